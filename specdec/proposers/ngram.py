"""Prompt lookup: the answer copies from the prompt and from itself."""

from specdec.proposers.text import RetractableTextProposer
from specdec.target import Target
from specdec.tree import Nodes


class Ngram(RetractableTextProposer):
    """A chain that copies what followed the latest earlier occurrence of the text's last n tokens, n as large as possible.

    min, max: the n that are looked for; num: drafts of every chain
    The latest occurrence, since an answer that repeats itself goes on as it did the last time. A copy that comes to the
    text's end runs on into itself: in a text of period p the match is p tokens back, and so is what the copy reads then.
    """

    def __init__(self, target: Target, *, min: int, max: int, num: int):
        for name, value in (("min", min), ("num", num)):
            if value < 1:
                raise ValueError(f"proposer.{name}={value} must be at least 1.")
        if max < min:
            raise ValueError(f"proposer.max={max} must be at least proposer.min={min}.")
        self.min, self.max, self.num = min, max, num
        self.depth = num

    def clear(self):
        self.indices = [Index(text, self.min, self.max) for text in self.texts]

    def extend(self, row, new):
        self.indices[row].extend(len(new))

    def retract(self, row, length):
        self.indices[row].retract(length)

    def draft(self, row) -> Nodes:
        text, place = self.texts[row], self.indices[row].find()
        if place is None:
            return []
        copy = text[place : place + self.num]
        while len(copy) < self.num:
            copy.append(copy[place - len(text)])
        return list(zip(copy, range(self.num)))


class Index:
    """Where a text's n-grams, min <= n <= max, were last followed by something; kept up as the text grows or is cut.

    text: the caller's, who changes it
    """

    def __init__(self, text: list[int], min: int, max: int):
        self.text, self.min, self.max = text, min, max
        self.places: dict[tuple[int, ...], int] = {}  # the place behind it
        self.replaced: list[int | None] = []  # what stood in `places` before, for every entry that was ever made

    def extend(self, num: int) -> None:
        """The text has grown by `num` tokens, by which as many more places have come to be followed by something."""
        end = len(self.text)
        for place in range(end - num, end):
            for ngram in self._before(place):
                self.replaced.append(self.places.get(ngram))
                self.places[ngram] = place

    def retract(self, length: int) -> None:
        """The text will be cut to `length` tokens."""
        for place in reversed(range(length, len(self.text))):
            for ngram in reversed(self._before(place)):
                earlier = self.replaced.pop()
                if earlier is None:
                    del self.places[ngram]
                else:
                    self.places[ngram] = earlier

    def find(self) -> int | None:
        """The place behind the longest n-gram that the text ends with and held before."""
        found = (self.places.get(ngram) for ngram in reversed(self._before(len(self.text))))
        return next((place for place in found if place is not None), None)

    def _before(self, place: int) -> list[tuple[int, ...]]:
        """The n-grams that end there, the shortest first."""
        return [tuple(self.text[place - n : place]) for n in range(self.min, min(self.max, place) + 1)]
