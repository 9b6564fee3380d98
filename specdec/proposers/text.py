"""What proposers that only look at text have in common: the rows on the host, and trees made there."""

from abc import abstractmethod

from specdec.proposers.base import Proposer
from specdec.tree import Nodes, plant


class TextProposer(Proposer):
    """Knows each row's text and nothing else: texts[b] is row b's prompt and answer, the newest token last."""

    target_layers = ()
    varies = True

    def begin(self, tokens, num):
        self.device = tokens.device
        self.texts: list[list[int]] = [[] for _ in range(len(tokens))]
        self.clear()
        for row, (first, *_) in enumerate(tokens.tolist()):
            self.texts[row].append(first)
            self.extend(row, [first])

    def commit(self, tokens, features, num, counts):
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts)):
            self.texts[row] += new[:count]
            self.extend(row, new[:count])

    def propose(self, sampling, generator):
        drafts = [self.draft(row) for row in range(len(self.texts))]
        return plant([text[-1] for text in self.texts], drafts, self.device)

    @abstractmethod
    def clear(self) -> None:
        """Forgets the last batch; `texts` holds an empty list for each row of the new one."""

    @abstractmethod
    def extend(self, row: int, new: list[int]) -> None:
        """texts[row] now ends with `new`."""

    @abstractmethod
    def draft(self, row: int) -> Nodes:
        """What may follow texts[row]; nothing, if there is nothing to go by."""


class RetractableTextProposer(TextProposer):
    """One that can be rewound: a mark is the length of each text."""

    rewinds = True

    def mark(self):
        return [len(text) for text in self.texts]

    def rewind(self, mark):
        for row, length in enumerate(mark):
            self.retract(row, length)
            del self.texts[row][length:]

    @abstractmethod
    def retract(self, row: int, length: int) -> None:
        """texts[row] will be cut to `length` tokens: undoes what `extend` made of the others, which it still holds."""
