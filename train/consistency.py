"""Consistency training (CLLM, 2403.00835): from every state of a Jacobi trajectory, guess what the fixed point says.

The answers of a batch are cut into blocks of n tokens. Jacobi iteration continues the text before a block:

    text       x_0 .. x_(s-1)                      the row's own, whoever wrote it
    y(0)       n tokens drawn from that text       as a decoder begins that knows nothing better
    y(i+1)     what the adapted target says at y(i)
    y*         the original target's fixed point   its greedy continuation of the text

    position   s-1      s      s+1     s+2
    reads      x_(s-1)  y_1    y_2     y_3          tokens of a state
    judged by           y*_1   y*_2    y*_3         the original's law at the same position of the fixed point

States are on policy, because those that decoding will meet are the adapted target's own guesses; what the original
guesses behind a wrong token is worth little. Fixed points are the original's, as the paper's are, so that what is
learned does not move with who learns it, and every state teaches to say what the original says. y* need not be iterated
to: greedy decoding finds the same tokens, all blocks side by side, and reads each once. And since y* is the target's
continuation, not the text's, it does not matter at which temperature a row was written; the text is only what stands
before. (Behind an end of turn y* goes on, which decoding would not: a few tokens in a hundred.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec import masks
from specdec.heads.consistency import Consistency
from specdec.target import Target, TargetOutput
from train.data import Batch, answers
from train.objective import Loss, cross_entropy, divergence


@dataclass(frozen=True)
class Continuation:
    """What the original target says of a batch, and how it continues the text before M blocks of n tokens in each row."""

    text: Tensor  # [B, T, D] its final states along the text
    tokens: Tensor  # [B, n, M] y*; entry [., k] belongs to the block's token k
    final: Tensor  # [B, n, M, D] its final states there: the law of what follows


def cut(batch: Batch, num: int) -> Tensor:
    """Where blocks of `num` tokens begin: side by side through every answer, the first anywhere in its first `num` tokens.

    -> starts [B, M] places in the row; 0, where none can be, fills rows up
    """
    rows = []
    for row in range(len(batch.tokens)):
        offsets = [int(torch.randint(num, ())) for _ in answers(batch, row)]
        rows.append([s for (a, b), offset in zip(answers(batch, row), offsets) for s in range(a + offset, b, num)])
    longest = max(1, *map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=batch.tokens.device)


def draw(batch: Batch, starts: Tensor, num: int) -> Tensor:
    """y(0): tokens drawn from what stands before each block in its document; starts [B, M] -> [B, num, M]"""
    before = batch.positions.gather(1, starts)[:, None]  # [B, 1, M]
    chance = torch.rand(len(starts), num, starts.shape[1], device=starts.device)
    places = starts[:, None] - before + (chance * before).long()
    return batch.tokens.gather(1, places.flatten(1)).view_as(chance)


class Reader:
    """The target reads the batch once, then blocks that continue it, again and again."""

    def __init__(self, target: Target, batch: Batch, starts: Tensor, num: int):
        """starts [B, M]: where blocks of num tokens begin"""
        self.target, self.batch, self.starts, self.num = target, batch, starts, num
        num_rows, length = batch.tokens.shape
        self.at = place(batch, starts, num)  # [B, n, M]
        self.cache = target.cache(num_rows)
        self.cache.make_room(length + self.at[0].numel())
        self.text = self.read(batch.tokens, batch.positions, masks.documents(batch.documents))  # [B, T, D]
        self.cache.commit(torch.full_like(self.cache.lengths, length), [length] * num_rows)
        before = (starts - 1).clamp(min=0)[..., None].expand(-1, -1, target.width)  # [B, M, D]
        self.first = target.logits(self.text.gather(1, before)).argmax(-1)  # [B, M] what it says at the text's end

    def read(self, tokens: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        """tokens, at [B, S], mask [B, 1, S, keys] -> final [B, S, D]"""
        self.cache.reserve(tokens.shape[1])
        mask = nn.functional.pad(mask, (0, self.cache.visible - mask.shape[-1]))
        return self.target.read(tokens, (), positions=at, mask=mask, cache=self.cache).final

    def greedy(self) -> Continuation:
        """One token of every block a pass."""
        mask = masks.blocks(self.batch.documents, self.starts, self.num)
        mask = mask.unflatten(2, self.at.shape[1:])  # [B, 1, n, M, T + n*M]
        token, tokens, final = self.first, [], []
        for k in range(self.num):
            tokens.append(token)
            final.append(self.read(token, self.at[:, k], mask[:, :, k]))  # [B, M, D]
            token = self.target.logits(final[-1]).argmax(-1)
        return Continuation(self.text, torch.stack(tokens, dim=1), torch.stack(final, dim=1))

    def jacobi(self, state: Tensor, passes: Tensor) -> Tensor:
        """state [B, n, M], and the same after passes[m] iterations of the m-th blocks of all rows; passes [M]"""
        state = state.clone()
        for iteration in range(int(passes.max())):
            chosen = (passes > iteration).nonzero()[:, 0]  # [M']
            self.cache.pending = 0  # this pass is written over the last
            mask = masks.blocks(self.batch.documents, self.starts[:, chosen], self.num)  # [B, 1, n*M', T + n*M']
            final = self.read(state[:, :, chosen].flatten(1), self.at[:, :, chosen].flatten(1), mask)
            said = self.target.logits(final).argmax(-1).unflatten(1, (self.num, len(chosen)))  # [B, n, M']
            state[:, :, chosen] = torch.cat([self.first[:, None, chosen], said[:, :-1]], dim=1)
        return state


def place(batch: Batch, starts: Tensor, num: int) -> Tensor:
    """Positions of the blocks' tokens in their documents: starts [B, M] -> [B, num, M]"""
    return batch.positions.gather(1, starts)[:, None] + torch.arange(num, device=starts.device)[:, None]


class ConsistencyObjective(nn.Module):
    """What `Objective` is to drafters with a step, for one whose target guesses for itself.

    losses, weights by name; what has weight 0 is not computed:
        consistency   KL of the adapted target's law at a state from the original's at the fixed point, from the state's
                      first wrong token on: the paper's global consistency loss, summed over positions
        original      KL of the adapted target from the original one along the text
        ce            cross-entropy on the text's tokens, the paper's AR loss: for texts written at temperature 0
    depth: n, tokens of a block
    passes: a state is one of y(0) .. y(passes), each as likely, drawn for every block
    """

    every_slot = False  # it judges guesses at texts of the target's own

    def __init__(self, drafter: Consistency, *, losses: dict[str, float], depth: int, passes: int):
        super().__init__()
        known = ("consistency", "original", "ce")
        if set(losses) - set(known) or not losses.get("consistency"):
            raise ValueError(
                f"head.objective.losses={dict(losses)}: give weights to some of {', '.join(known)}; the first needs one."
            )
        if depth != drafter.depth:
            raise ValueError(
                f"head.objective.depth={depth} must be head.drafter.num_drafts={drafter.depth}: decoding then meets "
                "states of the length that was trained. Change one of them."
            )
        if not 0 <= passes < depth:
            raise ValueError(
                f"head.objective.passes={passes} must be 0 to depth - 1 = {depth - 1}: after {depth} passes every state "
                "is its fixed point."
            )
        self.drafter = drafter
        self.losses, self.depth, self.passes = (
            {name: weight for name, weight in losses.items() if weight},
            depth,
            passes,
        )

    def forward(self, batch: Batch, output: TargetOutput | None) -> Loss:
        """output: None, since the adapted target is read here"""
        assert output is None
        target = self.drafter.target
        starts = cut(batch, self.depth)  # [B, M]
        num_blocks = starts.shape[1]
        passes = torch.randint(self.passes + 1, (num_blocks,), device=starts.device)
        begun = draw(batch, starts, self.depth)  # [B, n, M]
        with torch.no_grad():
            with target.original():
                original = Reader(target, batch, starts, self.depth).greedy()
            states = Reader(target, batch, starts, self.depth).jacobi(begun, passes)

        # One pass over [text, states], with gradient
        length = batch.tokens.shape[1]
        over_text = nn.functional.pad(masks.documents(batch.documents), (0, self.depth * num_blocks))
        over_states = masks.blocks(batch.documents, starts, self.depth)  # [B, 1, n*M, T + n*M]
        final = target.read(
            torch.cat([batch.tokens, states.flatten(1)], dim=1),
            (),
            positions=torch.cat([batch.positions, place(batch, starts, self.depth).flatten(1)], dim=1),
            mask=torch.cat([over_text, over_states], dim=2),
            gradient=True,
        ).final  # [B, T + n*M, D]
        text, guessed = final[:, :length], final[:, length:].unflatten(1, (self.depth, num_blocks))

        # Before its first wrong token a state is the text that `original` is for
        left = ((states != original.tokens).cumsum(1) > 0) & (starts > 0)[:, None]  # [B, n, M]
        total = self.losses["consistency"] * divergence(target, guessed[left], original.final[left])
        rows, position = batch.loss_mask.nonzero().unbind(1)
        if "original" in self.losses:
            drift = divergence(target, text[rows, position - 1], original.text[rows, position - 1])
            total = total + self.losses["original"] * drift
        if "ce" in self.losses:
            judged = cross_entropy(target, text[rows, position - 1], batch.tokens[rows, position])
            total = total + self.losses["ce"] * judged
        matches = torch.zeros(0, *batch.tokens.shape, dtype=torch.bool, device=starts.device)
        return Loss(total, torch.tensor(len(rows), device=starts.device), matches)
