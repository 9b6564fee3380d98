"""The interface of a dependence between the tokens of a block, and the base of candidate lattices.

A block drafter makes the states s_1 .. s_K of a block in one pass. Each gives the unary logits U_d = LM head(s_d). A
part defines how the distribution of draft d follows from U_d and the tokens before. A `Dependence` corrects the logits
of all tokens. A `Lattice` scores pairs of the likeliest tokens of neighbouring positions, and drafts no other tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.core.sampling import widen_logits

STATES_PER_CHUNK = 512  # upper bound of the states whose logits [., W] exist at a time, while candidates are chosen


@dataclass(frozen=True)
class DrafterSizes:
    """The sizes of a block drafter."""

    width: int  # D, width of states and embeddings
    num_tokens: int  # V, number of the target's tokens
    vocab_size: int  # W, number of tokens that can be drafted
    num_drafts: int  # K, drafts of a block
    eps: float  # epsilon of the norms


@dataclass(frozen=True)
class DraftedBlock:
    """The result of a block's pass, and the drafter's functions that a part needs."""

    feature: Tensor  # [..., D] encoded feature before the anchor
    states: Tensor  # [..., K, D] states of the drafts
    tokens: Tensor  # [...] anchors
    unary: Callable[[Tensor], Tensor]  # logits [..., W] of states [..., D]
    embed: Callable[[Tensor], Tensor]  # the target's embeddings [..., D] of draft ids [...]
    to_target: Callable[[Tensor], Tensor]  # target ids of draft ids, any shape


class Dependence(nn.Module, ABC):
    """The dependence of a draft on those before it. It may carry values along a path, as a part of the state.

    head: name of the head that has this part, a file in conf/head
    token_row_prefixes: beginnings of the names of tensors with a row for each token that can be drafted
    num_confident: numbers at the beginning of a readout that a confidence head reads beside the state
    before_shape: whether its term is added to the LM head's output, before the target's scale and cap, as engines do
    """

    head: str
    token_row_prefixes: tuple[str, ...] = ()
    num_confident = 0
    before_shape = False

    def first_carried(self, block: DraftedBlock) -> Tensor:
        """Carried values [..., C] that step 1 reads."""
        return block.states[..., 0, :0]

    @abstractmethod
    def advance(
        self, d: int, state: Tensor, tokens: Tensor, embedding: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Readout [..., R] of draft d, and the carried values [..., C] for the next step.

        state [..., D]: state of draft d; tokens [...], embedding [..., D]: previous token; carried [..., C]
        """

    @abstractmethod
    def logits(self, readout: Tensor, unary: Callable[[], Tensor], embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., W] of a draft. readout [..., R]; unary() [..., W]: unary logits; embed: see DraftedBlock"""


class Lattice(Dependence):
    """The `top` likeliest tokens of each position by the unary logits, and scores of pairs of neighbours.

    The proposal at temperature T is softmax((U + pair) / T) over the candidates, along the path, in float32. No other
    token is proposed. Carried values are the draft ids and unary logits of all candidates, then those of
    `prepare_carried`. They are float32, which holds ids exactly. A readout begins with its position's candidates: ids
    [top], unary logits [top].
    """

    def __init__(self, sizes: DrafterSizes, *, top: int):
        super().__init__()
        if not isinstance(top, int) or top < 2:
            raise ValueError(f"dependence.top={top} must be a whole number of at least 2 candidates.")
        self.sizes, self.top = sizes, min(top, sizes.vocab_size)

    def first_carried(self, block):
        chunks = [
            self.choose_candidates(block.unary, states)
            for states in block.states.flatten(0, -2).split(STATES_PER_CHUNK)
        ]
        ids, scores, *extra = (torch.cat(values).unflatten(0, block.states.shape[:-1]) for values in zip(*chunks))
        carried = ids.flatten(-2), scores.flatten(-2), *self.prepare_carried(block, ids, scores, *extra)
        return torch.cat([value.to(scores.dtype) for value in carried], dim=-1)

    def choose_candidates(self, unary: Callable[[Tensor], Tensor], states: Tensor) -> tuple[Tensor, ...]:
        """Ids and unary logits of the candidates, [M, top] each, and further inputs of `prepare_carried`, [M, .] each.

        unary: see DraftedBlock; states [M, D]
        """
        with torch.no_grad():  # gradients would keep the logits of all tokens at all positions of a text
            top = widen_logits(unary(states)).topk(self.top)
        return top.indices, top.values

    def prepare_carried(self, block: DraftedBlock, ids: Tensor, scores: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        """Further carried values, [..., .] each. ids, scores [..., K, top]: candidates; extra: from
        `choose_candidates`
        """
        return ()

    def candidates(self, d: int, carried: Tensor) -> list[Tensor]:
        """Ids and unary logits of the candidates of position d, [..., top] each."""
        starts = (kind * self.sizes.num_drafts * self.top + (d - 1) * self.top for kind in range(2))
        return [carried[..., start : start + self.top] for start in starts]

    @abstractmethod
    def pair_scores(self, readout: Tensor, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Scores [..., top] of candidates behind the previous token. readout [..., R] of the draft; ids [..., top]"""

    def score(self, readout: Tensor, embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and scores of the candidates, [..., top] each. readout [..., R]"""
        ids, scores = readout[..., : self.top].long(), readout[..., self.top : 2 * self.top]
        return ids, scores + widen_logits(self.pair_scores(readout, ids, embed))

    def logits(self, readout, unary, embed):
        ids, scores = self.score(readout, embed)
        return scores.new_full((*ids.shape[:-1], self.sizes.vocab_size), -torch.inf).scatter(-1, ids, scores)

    def candidate_loss(
        self, readout: Tensor, unary: Tensor, token: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Cross-entropy [M] over the candidates. A token that is no candidate takes the place of the least likely one.

        readout [M, R]; unary [M, W]: unary logits; token [M]: draft id of the goal
        """
        ids = readout[..., : self.top].long()
        missing = ~(ids == token[:, None]).any(-1)
        ids = torch.cat([ids[:, :-1], torch.where(missing, token, ids[:, -1])[:, None]], dim=-1)
        scores = widen_logits(unary).gather(-1, ids) + widen_logits(self.pair_scores(readout, ids, embed))
        return nn.functional.cross_entropy(scores, (ids == token[:, None]).int().argmax(-1), reduction="none")
