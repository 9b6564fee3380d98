"""Consistency training (CLLM, 2403.00835): every state of a Jacobi trajectory guesses the tokens of its fixed point.

The answers of a batch are cut into blocks of n tokens. Jacobi iteration continues the text before a block:

    text       x_0 .. x_(s-1)                      the row's own, from any source
    y(0)       n tokens drawn from that text       as in a decoder's first round
    y(i+1)     the adapted target's choices at y(i)
    y*         the original target's fixed point   its greedy continuation of the text

    position   s-1      s      s+1     s+2
    reads      x_(s-1)  y_1    y_2     y_3          tokens of a state
    judged by           y*_1   y*_2    y*_3         the original's distribution at the same position of the fixed point

States are on policy: decoding will meet the adapted target's own guesses. Guesses of the original target behind a wrong
token teach little. Fixed points are the original target's, as in the paper, so the goal does not move during training.
y* needs no iteration: greedy decoding finds the same tokens, for all blocks side by side, and reads each token once. It
is the target's continuation and not the text's, so the temperature at which a row was written does not matter. Behind
an end of turn y* goes on, although decoding stops there: this concerns a few tokens in a hundred.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.core import devices, masks
from specdec.core.option_types import NonNegative, SmallCount, raise_first
from specdec.experiments.jacobi.head import Consistency
from specdec.target.adapter import disable_adapter as original_target
from specdec.target.model import Target, TargetOutput
from train.data.batches import TrainingBatch, find_answers
from train.objective.objective import Loss, sum_divergence

Passes = Annotated[int, Field(ge=0, le=1024)]


@dataclass(frozen=True)
class Continuation:
    """The original target's states along a batch, and its continuation of the text before each of M blocks."""

    text: Tensor  # [B, T, D] final states along the text
    tokens: Tensor  # [B, n, M] y*; entry [., k] belongs to the block's token k
    final: Tensor  # [B, n, M, D] final states at these tokens: the distribution of the next ones


def cut_blocks(batch: TrainingBatch, num: int) -> Tensor:
    """The starts [B, M] of adjacent blocks of `num` tokens in all answers, as positions in the row.

    An answer's first block starts at random in its first `num` tokens. Rows with fewer blocks are filled up with 0,
    where no block can start.
    """
    starts_by_row = []
    for row in range(len(batch.tokens)):
        texts = find_answers(batch.on_host, row)
        offsets = [int(torch.randint(num, ())) for _ in texts]
        starts_by_row.append([s for (a, b), offset in zip(texts, offsets) for s in range(a + offset, b, num)])
    longest = max(1, *map(len, starts_by_row))
    return devices.upload_tensor(
        torch.tensor([row + [0] * (longest - len(row)) for row in starts_by_row]), batch.tokens.device
    )


def draw_guesses(batch: TrainingBatch, starts: Tensor, num: int) -> Tensor:
    """y(0) [B, num, M]: tokens drawn from the text before each block in its document. starts: [B, M]"""
    num_preceding = batch.positions.gather(1, starts)[:, None]  # [B, 1, M]
    uniforms = torch.rand(len(starts), num, starts.shape[1], device=starts.device)
    sources = starts[:, None] - num_preceding + (uniforms * num_preceding).long()
    return batch.tokens.gather(1, sources.flatten(1)).view_as(uniforms)


class ContinuationReader:
    """Reads a batch with the target once, and then blocks that continue it, any number of times."""

    def __init__(self, target: Target, batch: TrainingBatch, starts: Tensor, num: int):
        """starts [B, M]: first positions of the blocks; num: tokens of a block"""
        self.target, self.batch, self.starts, self.num = target, batch, starts, num
        num_rows, length = batch.tokens.shape
        self.block_positions = find_block_positions(batch, starts, num)  # [B, n, M]
        self.cache = target.cache(num_rows)
        self.cache.make_room(length + self.block_positions[0].numel())
        self.text = self.read(batch.tokens, batch.positions, masks.document_mask(batch.documents))  # [B, T, D]
        self.cache.commit(torch.full_like(self.cache.lengths, length), [length] * num_rows)
        preceding = (starts - 1).clamp(min=0)[..., None].expand(-1, -1, target.width)  # [B, M, D]
        self.first = target.logits(self.text.gather(1, preceding)).argmax(-1)  # [B, M] each block's first token

    def read(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The final states [B, S, D] of tokens at positions [B, S]. mask: [B, 1, S, keys]"""
        self.cache.reserve(tokens.shape[1])
        mask = nn.functional.pad(mask, (0, self.cache.visible - mask.shape[-1]))
        return self.target.read(tokens, (), positions=positions, mask=mask, cache=self.cache).final

    def decode_greedily(self) -> Continuation:
        """The continuation by greedy decoding of all blocks, one token of each in a pass."""
        mask = masks.jacobi_mask(self.batch.documents, self.starts, self.num)
        mask = mask.unflatten(2, self.block_positions.shape[1:])  # [B, 1, n, M, T + n*M]
        token, tokens, final = self.first, [], []
        for k in range(self.num):
            tokens.append(token)
            final.append(self.read(token, self.block_positions[:, k], mask[:, :, k]))  # [B, M, D]
            token = self.target.logits(final[-1]).argmax(-1)
        return Continuation(self.text, torch.stack(tokens, dim=1), torch.stack(final, dim=1))

    def iterate_states(self, state: Tensor, passes: Tensor) -> Tensor:
        """state [B, n, M], passes [M] -> the state after passes[m] iterations of the m-th block of every row"""
        state = state.clone()
        for iteration in range(int(passes.max())):
            active = (passes > iteration).nonzero()[:, 0]  # [M']
            self.cache.drop_pending()  # this pass overwrites the last one
            mask = masks.jacobi_mask(self.batch.documents, self.starts[:, active], self.num)  # [B, 1, n*M', T + n*M']
            final = self.read(state[:, :, active].flatten(1), self.block_positions[:, :, active].flatten(1), mask)
            choices = self.target.logits(final).argmax(-1).unflatten(1, (self.num, len(active)))  # [B, n, M']
            state[:, :, active] = torch.cat([self.first[:, None, active], choices[:, :-1]], dim=1)
        return state


def find_block_positions(batch: TrainingBatch, starts: Tensor, num: int) -> Tensor:
    """The positions [B, num, M] of the blocks' tokens in their documents. starts: [B, M]"""
    return batch.positions.gather(1, starts)[:, None] + torch.arange(num, device=starts.device)[:, None]


class ConsistencyObjective(nn.Module):
    """The training objective of a consistency adapter, in the place of `Objective`, which is for drafters with steps.

    losses: weights by name; a loss of weight 0 is not computed:
        consistency   KL of the adapted target's distribution at a state from the original's at the fixed point, from
        the state's
                      first wrong token on: the paper's global consistency loss, summed over positions
        original      KL of the adapted target from the original one along the text
    depth: n, tokens of a block
    passes: each block's state is drawn from y(0) .. y(passes), all equally likely
    """

    supervise = "answers"
    every_slot = False  # it judges the target's own texts, so the batch's text cannot be replayed

    def __init__(self, drafter: Consistency, *, losses: dict[str, NonNegative], depth: SmallCount, passes: Passes):
        super().__init__()
        loss_names = ("consistency", "original")
        wrong = {
            f"losses={dict(losses)}: give weights to some of {', '.join(loss_names)}; the first needs one.": (
                {name for name, weight in losses.items() if weight} - set(loss_names) or not losses.get("consistency")
            ),
            f"{drafter.target.name} has recurrent or convolution layers, and consistency training reads many blocks "
            "behind one "
            "text, which their state cannot follow: train another head.": drafter.target.recurrent,
            f"depth={depth} must be the drafter's num_drafts, {drafter.depth}, so that decoding meets states of the "
            "length that was trained. Change one of them.": depth != drafter.depth,
            f"passes={passes} must be 0 to depth - 1 = {depth - 1}: after {depth} passes every state is its fixed "
            "point.": (not 0 <= passes < depth),
        }
        raise_first(wrong)
        self.drafter, self.depth, self.passes = drafter, depth, passes
        self.losses = {name: weight for name, weight in losses.items() if weight}

    def forward(self, batch: TrainingBatch, output: TargetOutput | None, *, compare: bool = False) -> Loss:
        """The loss of a batch. output: None, as the adapted target is read here; compare: without effect"""
        assert output is None
        target = self.drafter.target
        starts = cut_blocks(batch, self.depth)  # [B, M]
        num_blocks = starts.shape[1]
        passes = torch.randint(self.passes + 1, (num_blocks,), device=starts.device)
        first_guesses = draw_guesses(batch, starts, self.depth)  # [B, n, M]
        with torch.no_grad():
            with original_target(target):
                original = ContinuationReader(target, batch, starts, self.depth).decode_greedily()
            states = ContinuationReader(target, batch, starts, self.depth).iterate_states(first_guesses, passes)

        # One pass over [text, states], with gradient
        length = batch.tokens.shape[1]
        over_text = nn.functional.pad(masks.document_mask(batch.documents), (0, self.depth * num_blocks))
        over_states = masks.jacobi_mask(batch.documents, starts, self.depth)  # [B, 1, n*M, T + n*M]
        final = target.read(
            torch.cat([batch.tokens, states.flatten(1)], dim=1),
            (),
            positions=torch.cat([batch.positions, find_block_positions(batch, starts, self.depth).flatten(1)], dim=1),
            mask=torch.cat([over_text, over_states], dim=2),
            gradient=True,
        ).final  # [B, T + n*M, D]
        text, guessed = final[:, :length], final[:, length:].unflatten(1, (self.depth, num_blocks))

        # Up to its first wrong token a state equals the text, for which there is the loss `original`
        wrong = ((states != original.tokens).cumsum(1) > 0) & (starts > 0)[:, None]  # [B, n, M]
        block, k, m = wrong.nonzero().unbind(1)
        total = self.losses["consistency"] * sum_divergence(target, guessed[block, k, m], original.final[block, k, m])
        text_rows, position = devices.upload_tensor(batch.on_host.loss_mask.nonzero(), starts.device).unbind(1)
        if "original" in self.losses:
            drift = sum_divergence(target, text[text_rows, position - 1], original.text[text_rows, position - 1])
            total = total + self.losses["original"] * drift
        return Loss(total, len(text_rows), None)
