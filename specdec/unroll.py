"""The training unroll: a drafter's step over every slot of a text. Training and replay share it; see the slot rule.

Slot j is column j-1 here, because slot 0 has no feature:

    column            0     1     2    ..   T-2
    slot              1     2     3         T-1
    step 1 reads     x1,f0 x2,f1 x3,f2
    step d reads     x_d  x_(d+1) x_(d+2)         token index = column + d
    step d guesses   x_(d+1) ...                  goal index = column + d + 1, judged at position column + d
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec import masks
from specdec.cache import UnrollCache
from specdec.drafter import Drafter


@dataclass(frozen=True)
class Unrolled:
    """States and readouts of every step; steps after the first exist only for slots that some goal judges."""

    states: list[Tensor]  # K of [B, S_d, H]
    readouts: list[Tensor]  # K of [B, S_d, R]
    place: Tensor  # [B, T-1] where a slot's column stands in steps 2..K
    positions: Tensor  # [B, T] of the tokens in their documents

    def at(self, values: list[Tensor], d: int, rows: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """Step d of the slots that guess `goals` [M] of batch rows `rows` [M] -> values [M, .], exists [M] bool

        A document's slot 0 has no feature, so nothing guesses its tokens 0..d at step d.
        """
        exists = self.positions[rows, goals] > d
        column = (goals - 1 - d).clamp(min=0)  # the slot rule, see above
        place = column if d == 1 else self.place[rows, column]
        return values[d - 1][rows, place], exists


def unroll(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor,
    *,
    documents: Tensor,
    positions: Tensor,
    goals: Tensor,
    depth: int,
) -> Unrolled:
    """tokens, documents (-1: padding), positions [B, T]; features [B, T, F*D]; goals [B, T] bool: tokens to be guessed

    Step 1 runs on all slots, since later slots attend to its keys; later steps run only where a goal follows.
    """
    assert drafter.attends == "path"
    length = tokens.shape[1]
    cache = UnrollCache()
    slot_positions = positions[:, 1:]  # [B, T-1], 0 where a slot has no feature of its own document, and for padding
    mask = masks.documents(torch.where(slot_positions > 0, documents[:, 1:], -1))  # [B, 1, T-1, T-1]
    h = drafter.encode(features[:, :-1])
    h, readout = drafter.step(1, h, tokens[:, 1:], slot_positions, mask, cache)
    states, readouts = [h], [readout]

    # The slots whose guesses of steps 2..depth are judged, moved to the front of each row, which others fill up.
    judged = [_later(goals & (positions > d), d) for d in range(2, depth + 1)]  # of [B, T-1]
    wanted = torch.stack(judged).any(0) if judged else torch.zeros_like(slot_positions, dtype=torch.bool)
    num = max(1, int(wanted.sum(1).max()))
    order = wanted.sort(dim=1, descending=True, stable=True).indices[:, :num]  # [B, S]
    place = torch.zeros_like(slot_positions).scatter(1, order, torch.arange(num, device=order.device).expand_as(order))
    mask = mask.gather(2, order[:, None, :, None].expand(-1, 1, -1, length - 1))  # [B, 1, S, T-1]
    h = h.gather(1, order[..., None].expand(-1, -1, h.shape[-1]))
    for d in range(2, depth + 1):
        step_tokens = _later(tokens, d - 1).gather(1, order)  # [B, S]
        h, readout = drafter.step(d, h, step_tokens, slot_positions.gather(1, order) + d - 1, mask, cache)
        states.append(h)
        readouts.append(readout)
    return Unrolled(states, readouts, place, positions)


def _later(values: Tensor, num: int) -> Tensor:
    """values [B, T] -> [B, T-1]: what stands `num` after each slot; past the end, 0."""
    shifted = values[:, 1 + num :]
    return nn.functional.pad(shifted, (0, values.shape[1] - 1 - shifted.shape[1]))
