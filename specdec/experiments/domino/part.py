"""Domino's correction (2605.29707): a GRU reads the tokens of the path, and its state corrects all logits.

The first draft is not corrected. The paper's correction starts at random, so its loss moves from the uncorrected logits
to the corrected ones in training. Here `after` starts at zero, so training needs no such schedule.
"""

import torch
from torch import nn

from specdec.heads.dependence.base import Dependence, DrafterSizes


class Domino(Dependence):
    """The correction W2 silu(W1 [s; r]) for a state s and the GRU's state r.

    hidden: width of r; rank: rank of the correction
    """

    head = "domino"
    token_row_prefixes = ("after.",)

    def __init__(self, sizes: DrafterSizes, *, hidden: int = 256, rank: int = 64):
        super().__init__()
        self.reader = nn.GRUCell(sizes.width, hidden, bias=False)
        self.join = nn.Linear(sizes.width + hidden, rank, bias=False)
        self.after = nn.Linear(rank, sizes.vocab_size, bias=False)
        nn.init.zeros_(self.after.weight)

    def first_carried(self, block):
        return block.states.new_zeros(*block.tokens.shape, self.reader.hidden_size)

    def advance(self, d, state, tokens, embedding, carried):
        carried = self.reader(embedding.flatten(0, -2), carried.flatten(0, -2)).view(carried.shape)
        out = nn.functional.silu(self.join(torch.cat([state, carried], dim=-1)))
        return (torch.zeros_like(out) if d == 1 else out), carried

    def logits(self, readout, unary, embed):
        return unary() + self.after(readout.contiguous())
