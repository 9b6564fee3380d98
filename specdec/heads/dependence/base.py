"""The interface of a dependence between the tokens of a block, and what candidate lattices have in common.

A block drafter makes the states s_1 .. s_K of a block in one pass, and from each the unary logits U_d = LM head(s_d). A part says how
the distribution of draft d follows from U_d and the tokens before. A `Dependence` corrects the logits of all tokens; a `Lattice`
scores pairs of the few likeliest tokens of neighbouring positions, and drafts nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.core.sampling import widen_logits

STATES_PER_CHUNK = 512  # states whose logits exist at a time, while candidates are chosen


@dataclass(frozen=True)
class DrafterSizes:
    """Of a block drafter."""

    width: int  # D, of states and embeddings
    num_tokens: int  # V, which a draft may follow
    vocab_size: int  # W, which can be drafted
    num_drafts: int  # K
    eps: float  # of norms


@dataclass(frozen=True)
class DraftedBlock:
    """What is known once the block's pass is over."""

    feature: Tensor  # [..., D] the encoded feature before the anchor
    states: Tensor  # [..., K, D]
    tokens: Tensor  # [...] the anchor
    unary: Callable[[Tensor], Tensor]  # states [..., D] -> logits [..., W]
    embed: Callable[[Tensor], Tensor]  # draft ids [...] -> the target's embeddings [..., D]
    to_target: Callable[[Tensor], Tensor]  # draft ids -> target ids, any shape


class Dependence(nn.Module, ABC):
    """How a draft depends on those before it. What is carried along a path is a part of its state.

    head: the head that has this part, a file in conf/head
    by_token: beginnings of the names of tensors with a row for each token that can be drafted
    num_confident: how many numbers at a readout's beginning a confidence head reads beside the state
    """

    head: str
    token_row_prefixes: tuple[str, ...] = ()
    num_confident = 0

    def first_carried(self, block: DraftedBlock) -> Tensor:
        """What step 1 finds carried, [..., C]"""
        return block.states[..., 0, :0]

    @abstractmethod
    def advance(
        self, d: int, state: Tensor, tokens: Tensor, embedding: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Step d: the state [..., D] of draft d, the token before it [...], its embedding [..., D], and what was carried [..., C].

        -> the readout [..., R] of draft d, and what the step behind it finds carried [..., C]
        """

    def engine_fields(self, anchor_predicts: bool) -> dict | None:
        """Fields of config.json by which engines know this part; None: the exporter knows it, or no engine does."""
        return None

    @abstractmethod
    def logits(self, readout: Tensor, unary: Callable[[], Tensor], embed: Callable[[Tensor], Tensor]) -> Tensor:
        """readout [..., R], unary() [..., W]; embed: see DraftedBlock -> logits of the draft, [..., W]"""


class Lattice(Dependence):
    """The `top` likeliest tokens of each position by the unary logits, and scores of pairs of neighbours.

    The proposal at temperature T is softmax((U + pair) / T) over the candidates on the path that is taken, in float32. No other token
    is proposed. Carried are the candidates' draft ids and unary logits of all positions, as float32, which holds ids exactly, and
    behind them what `prepare_carried` makes. A readout begins with the candidates of its position: ids [top], unary logits [top].
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
        """states [M, D] -> ids and unary logits of the candidates, [M, top] each, and what else `prepare_carried` reads, [M, .] each"""
        with torch.no_grad():  # logits of all tokens at all positions of a text would not fit
            top = widen_logits(unary(states)).topk(self.top)
        return top.indices, top.values

    def prepare_carried(self, block: DraftedBlock, ids: Tensor, scores: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        """What else a block carries, [..., .] each. ids, scores [..., K, top]: of its candidates; more: from `choose_candidates`"""
        return ()

    def candidates(self, d: int, carried: Tensor) -> list[Tensor]:
        """ids and unary logits of position d, [..., top] each"""
        starts = (kind * self.sizes.num_drafts * self.top + (d - 1) * self.top for kind in range(2))
        return [carried[..., start : start + self.top] for start in starts]

    @abstractmethod
    def pair_scores(self, readout: Tensor, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """readout [..., R] of a draft, ids [..., top] -> the scores of these tokens behind the token before, [..., top]"""

    def score(self, readout: Tensor, embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """readout [..., R] -> ids and scores of the candidates, [..., top] each"""
        ids, scores = readout[..., : self.top].long(), readout[..., self.top : 2 * self.top]
        return ids, scores + widen_logits(self.pair_scores(readout, ids, embed))

    def logits(self, readout, unary, embed):
        ids, scores = self.score(readout, embed)
        return scores.new_full((*ids.shape[:-1], self.sizes.vocab_size), -torch.inf).scatter(-1, ids, scores)

    def candidate_loss(
        self, readout: Tensor, unary: Tensor, token: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """readout [M, R], unary logits [M, W], token [M]: the draft id that ought to be guessed.

        -> the cross-entropy over the candidates, [M]. A token that is none of them takes the place of the least likely one.
        """
        ids = readout[..., : self.top].long()
        missing = ~(ids == token[:, None]).any(-1)
        ids = torch.cat([ids[:, :-1], torch.where(missing, token, ids[:, -1])[:, None]], dim=-1)
        scores = widen_logits(unary).gather(-1, ids) + widen_logits(self.pair_scores(readout, ids, embed))
        return nn.functional.cross_entropy(scores, (ids == token[:, None]).int().argmax(-1), reduction="none")
