"""Prompt lookup: drafts are copies from the prompt and the answer so far."""

from specdec.core.tree import Nodes
from specdec.proposers.text import RetractableTextProposer
from specdec.target.model import Target


class Ngram(RetractableTextProposer):
    """Drafts a chain: the tokens that followed the latest earlier occurrence of the text's last n tokens.

    n is the largest for which there is one. The latest occurrence is taken, because an answer that repeats itself
    usually continues as the last time. A copy that reaches the end of the text goes on with its own tokens: in a text of
    period p the match is p tokens back, and so are the tokens that the copy then reads.

    min, max: of n; num: drafts of every chain
    """

    linear = True

    def __init__(self, target: Target, *, min: int, max: int, num: int):
        for name, value in (("min", min), ("num", num)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if max < min:
            raise ValueError(f"max={max} must be at least min={min}.")
        self.min, self.max, self.num = min, max, num
        self.depth = num

    def fresh(self, text):
        return Index(text, self.min, self.max)

    def extend(self, row, new):
        self.states[row].extend(len(new))

    def retract(self, row, length):
        self.states[row].retract(length)

    def draft(self, row) -> Nodes:
        text, place = self.texts[row], self.states[row].find()
        if place is None:
            return []
        copy = text[place : place + self.num]
        while len(copy) < self.num:
            copy.append(copy[place - len(text)])
        return list(zip(copy, range(self.num)))


class Index:
    """The latest place behind each n-gram of a text, min <= n <= max, at which another token follows.

    text: a list that the caller extends and cuts, calling `extend` and `retract`
    """

    def __init__(self, text: list[int], min: int, max: int):
        self.text, self.min, self.max = text, min, max
        self.places: dict[tuple[int, ...], int] = {}  # n-gram -> place behind it
        self.replaced: list[int | None] = []  # the former entries of `places`, in the order of replacement

    def extend(self, num: int) -> None:
        """Called after the text has grown by `num` tokens: `num` more places are now followed by a token."""
        end = len(self.text)
        for place in range(end - num, end):
            for ngram in self._before(place):
                self.replaced.append(self.places.get(ngram))
                self.places[ngram] = place

    def retract(self, length: int) -> None:
        """Called before the text is cut to `length` tokens."""
        for place in reversed(range(length, len(self.text))):
            for ngram in reversed(self._before(place)):
                earlier = self.replaced.pop()
                if earlier is None:
                    del self.places[ngram]
                else:
                    self.places[ngram] = earlier

    def find(self) -> int | None:
        """The place behind the earlier occurrence of the longest n-gram that ends the text; None without one"""
        places = (self.places.get(ngram) for ngram in reversed(self._before(len(self.text))))
        return next((place for place in places if place is not None), None)

    def _before(self, place: int) -> list[tuple[int, ...]]:
        """The n-grams that end before `place`, the shortest first."""
        return [tuple(self.text[place - n : place]) for n in range(self.min, min(self.max, place) + 1)]
