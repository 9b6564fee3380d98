"""DFlash 2's bilinear selector (Inco and Z Lab, August 2026).

pair(a, b) = <A[a] * P s, B[b]> for a token a, the candidate b behind it, and the state s of b's position.
"""

import torch
from torch import nn

from specdec.heads.dependence.base import DrafterSizes, Lattice


class Selector(Lattice):
    """A lattice whose pair scores are a bilinear form. B starts as zero, so pair scores start as zero.

    rank: width of the product; top: candidates of a position
    table: whether A and B are the method's tables of all tokens; else they map the tokens' embeddings
    """

    head = "dflash2"

    def __init__(self, sizes: DrafterSizes, *, rank: int = 64, top: int = 16, table: bool = False):
        super().__init__(sizes, top=top)
        self.predecessor: nn.Module
        self.successor: nn.Module
        if table:
            self.predecessor, self.successor = (nn.Embedding(num, rank) for num in (sizes.num_tokens, sizes.vocab_size))
            nn.init.normal_(self.predecessor.weight, std=0.02)
            self.token_row_prefixes = ("successor.",)
        else:
            self.predecessor, self.successor = (nn.Linear(sizes.width, rank, bias=False) for _ in range(2))
        nn.init.zeros_(self.successor.weight)
        self.hidden = nn.Linear(sizes.width, rank, bias=False)
        nn.init.normal_(self.hidden.weight, std=0.02)

    def advance(self, d, state, tokens, embedding, carried):
        predecessor = self.predecessor(tokens if isinstance(self.predecessor, nn.Embedding) else embedding)
        return torch.cat([*self.candidates(d, carried), predecessor * self.hidden(state)], dim=-1), carried

    def pair_scores(self, readout, ids, embed):
        query = readout[..., 2 * self.top :]  # [..., rank]
        table = isinstance(self.successor, nn.Embedding)
        successor = self.successor(ids if table else embed(ids).to(self.hidden.weight.dtype))  # [..., top, rank]
        return (successor @ query.to(successor.dtype)[..., None])[..., 0]
