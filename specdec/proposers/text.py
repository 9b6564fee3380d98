"""What proposers share that need only the text: they keep each row's text on the host and make trees there."""

from abc import abstractmethod
from typing import Any, NamedTuple

from specdec.core.tree import Nodes, plant
from specdec.proposers.base import Proposer


class Guess(NamedTuple):
    """A node of a draft: as in Nodes, and what is known of it before it is verified."""

    token: int
    parent: int
    chance: float  # estimated, that it is accepted if its parent is
    match: int  # tokens at the text's end that were found again


class TextProposer(Proposer):
    """Drafts from each row's text alone: texts[b] is row b's prompt and answer, the newest token last.

    states[b] is what the class keeps beside row b's text, made by `fresh`.
    """

    target_layers = ()
    varies = True
    selects = True

    def begin(self, tokens, num):
        self.device = tokens.device
        self.texts: list[list[int]] = [[] for _ in range(len(tokens))]
        self.states = [self.fresh(text) for text in self.texts]
        for row, (first, *_) in enumerate(tokens.tolist()):
            self._write(row, [first])

    def commit(self, tokens, features, num, counts):
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts)):
            self._write(row, new[:count])

    def propose(self, sampling, generator):
        drafts = [self.draft(row) for row in range(len(self.texts))]
        return plant([text[-1] for text in self.texts], drafts, self.device)

    def select(self, rows, nums):
        self.texts, self.states = [self.texts[row] for row in rows], [self.states[row] for row in rows]

    def replace(self, rows, nums, opening):
        news = zip(opening.tokens.tolist(), opening.following.tolist(), opening.counts)
        for row, ((first, *_), following, count) in zip(rows, news):
            self.texts[row] = []
            self.states[row] = self.fresh(self.texts[row])
            self._write(row, [first])
            self._write(row, following[:count])

    def _write(self, row: int, new: list[int]) -> None:
        self.texts[row] += new
        self.extend(row, new)

    def guess(self, row: int) -> list[Guess]:
        """`draft` with estimates; without any of its own, one half."""
        return [Guess(token, parent, 0.5, 0) for token, parent in self.draft(row)]

    def fresh(self, text: list[int]) -> Any:
        """What is kept beside a row's text. text: that text, empty so far, which grows"""
        return None

    @abstractmethod
    def extend(self, row: int, new: list[int]) -> None:
        """Called once texts[row] ends with the tokens `new`."""

    @abstractmethod
    def draft(self, row: int) -> Nodes:
        """The drafts for texts[row]; may be empty."""


class RetractableTextProposer(TextProposer):
    """A TextProposer that can be rewound: a mark is the length of each text."""

    rewinds = True

    def mark(self):
        return [len(text) for text in self.texts]

    def rewind(self, mark):
        for row, length in enumerate(mark):
            self.retract(row, length)
            del self.texts[row][length:]

    @abstractmethod
    def retract(self, row: int, length: int) -> None:
        """Undoes `extend` for all tokens after the first `length`. Called before texts[row] is cut to `length`."""
