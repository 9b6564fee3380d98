"""The training unroll: a drafter's steps over every slot of a text, for training and replay (slot rule: drafter.py).

Column c is slot c + first; a drafter that reads features has first = 1, because slot 0 has none:

    column            0     1     2    ..   T-2
    slot              1     2     3         T-1
    step 1 reads     x1,f0 x2,f1 x3,f2
    step d reads     x_d  x_(d+1) x_(d+2)         token index = column + first + d - 1
    step d guesses   x_(d+1) ...                  goal index = column + first + d, judged at the position before
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec import masks
from specdec.cache import UnrollCache
from specdec.drafter import Drafter
from specdec.span_attention import spans


@dataclass(frozen=True)
class Unrolled:
    """States and readouts of every step. A step may have run on a part of the slots only: on those that are judged."""

    states: list[Tensor]  # K of [B, S_d, H]
    readouts: list[Tensor]  # K of [B, S_d, R]
    places: list[Tensor]  # K of [B, columns] the place of each slot in step d, -1 if the step did not run on it
    positions: Tensor  # [B, T] of the tokens in their documents
    first: int
    share: list[float]  # K: of the slots with a goal, the share that was run; below 1 if they were sampled

    def at(self, values: list[Tensor], d: int, rows: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """Step d of the slots that guess `goals` [M] of batch rows `rows` [M] -> values [M, .], exists [M] bool"""
        column = (goals - d - self.first).clamp(min=0)  # the slot rule, see above
        place = self.places[d - 1][rows, column]
        exists = (self.positions[rows, goals] >= d + self.first) & (place >= 0)
        return values[d - 1][rows, place.clamp(min=0)], exists


def unroll(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor,
    *,
    documents: Tensor,
    positions: Tensor,
    goals: Tensor,
    depth: int,
    anchors: int | None = None,
) -> Unrolled:
    """tokens, documents (-1: padding), positions [B, T]; features [B, T, F*D]; goals [B, T] bool: tokens to be guessed

    Steps whose keys no later slot reads run on slots with a goal only.
    anchors: the number of these slots in each row, drawn at random; None: all of them
    """
    first, kind = drafter.first_slot, drafter.attends
    num = tokens.shape[1] - first

    def later(values: Tensor, ahead: int) -> Tensor:
        """values [B, T] -> [B, columns]: the values `ahead` places after each slot; 0 past the end"""
        shifted = values[:, first + ahead :]
        return nn.functional.pad(shifted, (0, num - shifted.shape[1]))

    cache = UnrollCache()
    slot_positions = later(positions, 0)  # [B, columns]; below `first`: no feature of its own document
    index = torch.where(slot_positions >= first, later(documents, 0), -1)
    judged = [later(goals & (positions >= d + first), d) for d in range(1, depth + 1)]  # of [B, columns]
    h = drafter.encode(features[:, :num])  # the feature of column c is that of the slot before it
    every = torch.arange(num, device=tokens.device).expand_as(slot_positions)

    if kind == "text":
        _, readout = drafter.step(1, h, later(tokens, 0), slot_positions, masks.documents(index), cache)
        places = [nn.functional.pad(every[:, d:], (0, d), value=-1) for d in range(depth)]
        return Unrolled([h] * depth, [readout] * depth, places, positions, first, [1.0] * depth)

    states, readouts, places, share = [], [], [], []
    order = every
    # The first step that runs on chosen slots only, because no other slot reads its keys
    sparse_from = {"block": 1, "path": 2, "none": 2, "depth": depth + 1}[kind]
    seen = None if kind in ("none", "depth") else spans(index)
    drafter.context(h, slot_positions - 1, cache)
    place, kept = every, 1.0
    for d in range(1, depth + 1):
        if d == sparse_from:
            order, place, kept = _choose(torch.stack(judged[d - 1 :]).any(0), anchors)
            h = h.gather(1, order[..., None].expand(-1, -1, h.shape[-1]))
            if seen is not None:
                seen = seen.of(order)
        if kind == "depth":
            seen = spans(index, lag=d - 1)
        at = slot_positions.gather(1, order) + d - 1
        h, readout = drafter.step(d, h, later(tokens, d - 1).gather(1, order), at, seen, cache)
        states.append(h)
        readouts.append(readout)
        places.append(place)
        share.append(kept)
    return Unrolled(states, readouts, places, positions, first, share)


def _choose(wanted: Tensor, limit: int | None) -> tuple[Tensor, Tensor, float]:
    """Chooses wanted columns, at most `limit` of each row, at random. wanted [B, C] bool

    -> order [B, S] of chosen columns, in rows with fewer filled up with others; place [B, C] of each wanted column in
    it, -1 if it was not chosen; the share of wanted columns that were chosen
    """
    num = max(1, int(wanted.sum(1).max()))
    score = wanted.float()
    if limit is not None and num > limit:
        num, score = limit, score + torch.rand_like(score) * score
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :num].sort(dim=1).values  # [B, S]
    place = torch.full_like(wanted, -1, dtype=torch.long)
    place.scatter_(1, order, torch.arange(num, device=order.device).expand_as(order))
    place = torch.where(wanted, place, -1)
    return order, place, int((place >= 0).sum()) / max(1, int(wanted.sum()))
