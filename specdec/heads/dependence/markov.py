"""DSpark's Markov heads (2607.05147): a low-rank term of the previous token is added to the logits of all tokens.

plain   W2 m, with m = W1 e(previous token)
gated   W2 (g m), with g = sigmoid(G [s; m]) of the draft's state s
rnn     W2 tanh(o), with a state r along the path: [z, c, o] = J [r; m; s], r' = sigmoid(z) r + (1 - sigmoid(z)) tanh(c)
"""

from typing import Literal, get_args

import torch
from torch import nn

from specdec.heads.dependence.base import Dependence, DrafterSizes

Form = Literal["plain", "gated", "rnn"]


class Markov(Dependence):
    """A Markov head.

    rank: rank of the term
    table: whether W1 is the paper's table of all tokens; else it maps the tokens' embeddings
    form: plain, gated or rnn, see above
    """

    head = "dspark"
    token_row_prefixes = ("after.",)
    before_shape = True

    def __init__(self, sizes: DrafterSizes, *, rank: int, table: bool = False, form: Form = "plain"):
        super().__init__()
        if form not in get_args(Form):
            raise ValueError(f"dependence.form={form} must be plain, gated or rnn.")
        self.form, self.num_confident = form, rank
        self.before: nn.Embedding | nn.Linear
        if table:
            self.before = nn.Embedding(sizes.num_tokens, rank)
            nn.init.normal_(self.before.weight, std=rank**-0.5)
        else:
            self.before = nn.Linear(sizes.width, rank, bias=False)
        self.gate = nn.Linear(sizes.width + rank, rank) if form == "gated" else None
        self.joint = nn.Linear(sizes.width + 2 * rank, 3 * rank) if form == "rnn" else None
        self.after = nn.Linear(rank, sizes.vocab_size, bias=False)
        nn.init.zeros_(self.after.weight)

    def first_carried(self, block):
        return block.states[..., 0, :1].new_zeros(*block.tokens.shape, self.num_confident if self.joint else 0)

    def advance(self, d, state, tokens, embedding, carried):
        embedded = self.before(tokens if isinstance(self.before, nn.Embedding) else embedding)
        if self.gate is not None:
            return torch.cat(
                [embedded, self.gate(torch.cat([state, embedded], dim=-1)).sigmoid() * embedded], -1
            ), carried
        if self.joint is not None:
            gate, update, out = self.joint(torch.cat([carried, embedded, state], dim=-1)).chunk(3, dim=-1)
            carried = gate.sigmoid() * carried + (1 - gate.sigmoid()) * update.tanh()
            return torch.cat([embedded, out.tanh()], dim=-1), carried
        return embedded, carried

    def logits(self, readout, unary, embed):
        return unary() + self.after(readout[..., -self.num_confident :].contiguous())
