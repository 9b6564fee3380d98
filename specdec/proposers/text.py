"""Proposers that look at the text alone: prompt lookup, retrieval from a datastore, and what a grammar forces."""

import heapq
import itertools
from abc import abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from specdec.core.constraint import Constraint
from specdec.core.option_types import Count, SmallCount, Text
from specdec.core.tree import Nodes, make_tree
from specdec.proposers import datastore as store
from specdec.proposers.base import Proposer
from specdec.target.loading import load_tokenizer
from specdec.target.model import Target
from specdec.text import token_text


class Guess(NamedTuple):
    """A node of a draft as in Nodes, with its probability."""

    token: int
    parent: int
    probability: float  # estimated probability that it is accepted if its parent is


class TextProposer(Proposer):
    """Drafts from each row's text alone: texts[b] is row b's prompt and answer, the newest token last.

    states[b]: the class's state of row b, made by `start_row`
    """

    target_layers = ()
    varies = True
    selects = True

    def begin(self, tokens, num):
        self.device = tokens.device
        self.texts: list[list[int]] = [[] for _ in range(len(tokens))]
        self.states = [self.start_row(text) for text in self.texts]
        for row, (first, *_) in enumerate(tokens.tolist()):
            self._write(row, [first])

    def commit(self, tokens, features, num, counts):
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts)):
            self._write(row, new[:count])

    def propose(self, sampling, generator):
        drafts = [self.draft(row) for row in range(len(self.texts))]
        return make_tree([text[-1] for text in self.texts], drafts, self.device)

    def select(self, rows, answer_lengths):
        self.texts, self.states = [self.texts[row] for row in rows], [self.states[row] for row in rows]

    def replace(self, rows, answer_lengths, opening):
        news = zip(opening.tokens.tolist(), opening.following.tolist(), opening.counts)
        for row, ((first, *_), following, count) in zip(rows, news):
            self.texts[row] = []
            self.states[row] = self.start_row(self.texts[row])
            self._write(row, [first])
            self._write(row, following[:count])

    def _write(self, row: int, new: list[int]) -> None:
        self.texts[row] += new
        self.extend(row, new)

    def guess(self, row: int) -> list[Guess]:
        """The drafts with estimated probabilities: one half, if the class has no estimates."""
        return [Guess(token, parent, 0.5) for token, parent in self.draft(row)]

    def start_row(self, text: list[int]) -> Any:
        """The state of a new row. text: the row's text, empty so far, which grows"""
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


def check_bounds(min: int, max: int) -> None:
    """Raises ValueError unless min <= max."""
    if max < min:
        raise ValueError(f"max={max} must be at least min={min}.")


class Ngram(RetractableTextProposer):
    """Drafts a chain: the tokens that followed the latest earlier occurrence of the text's last n tokens.

    n is the largest for which there is one. The latest occurrence is taken, because an answer that repeats itself
    usually continues as it did last. A copy that reaches the end of the text goes on with its own tokens. In a text of
    period p the match is p tokens back, and so are the tokens that the copy then reads.

    min, max: bounds of n; num: number of drafts in every chain
    """

    linear = True

    def __init__(self, target: Target, *, min: SmallCount, max: SmallCount, num: Count):
        check_bounds(min, max)
        self.min, self.max, self.num = min, max, num
        self.depth = num

    def start_row(self, text):
        return NgramIndex(text, self.min, self.max)

    def extend(self, row, new):
        self.states[row].extend(len(new))

    def retract(self, row, length):
        self.states[row].retract(length)

    def draft(self, row) -> Nodes:
        text, match_position = self.texts[row], self.states[row].find()
        if match_position is None:
            return []
        copy = text[match_position : match_position + self.num]
        while len(copy) < self.num:
            copy.append(copy[match_position - len(text)])
        return list(zip(copy, range(self.num)))


class NgramIndex:
    """The latest position after each n-gram of a text, min <= n <= max, at which another token follows.

    text: a list that the caller extends and cuts, calling `extend` and `retract`
    """

    def __init__(self, text: list[int], min: int, max: int):
        self.text, self.min, self.max = text, min, max
        self.places: dict[tuple[int, ...], int] = {}  # position after each n-gram
        self.replaced: list[int | None] = []  # former entries of `places`, in the order of replacement

    def extend(self, num: int) -> None:
        """Adds `num` positions, after the text has grown by as many tokens: a token now follows each."""
        end = len(self.text)
        for place in range(end - num, end):
            for ngram in self._before(place):
                self.replaced.append(self.places.get(ngram))
                self.places[ngram] = place

    def retract(self, length: int) -> None:
        """Removes positions, before the text is cut to `length` tokens."""
        for place in reversed(range(length, len(self.text))):
            for ngram in reversed(self._before(place)):
                earlier = self.replaced.pop()
                if earlier is None:
                    del self.places[ngram]
                else:
                    self.places[ngram] = earlier

    def find(self) -> int | None:
        """The position after the earlier occurrence of the longest n-gram that ends the text; None without one."""
        places = (self.places.get(ngram) for ngram in reversed(self._before(len(self.text))))
        return next((place for place in places if place is not None), None)

    def _before(self, position: int) -> list[tuple[int, ...]]:
        """The n-grams that end before `place`, the shortest first."""
        return [tuple(self.text[position - n : position]) for n in range(self.min, min(self.max, position) + 1)]


class Retrieval(RetractableTextProposer):
    """Looks up the end of the text in a datastore, makes a trie of the continuations there, and drafts its best part.

    datastore: folder as specdec/proposers/datastore.py writes it
    max, min: number of tokens of the longest end that is looked up, and of the shortest that is drafted from
    samples: number of places that are read. The places of the longest match come first. While they are too few, those
        of the match that is one token shorter follow. They include the places of the longer match, which count twice
        then. Of too many places, some are taken at equal distances.
    num: number of drafted nodes: those of the trie with the most places below them
    depth: largest depth of a drafted node
    """

    def __init__(
        self,
        target: Target,
        *,
        datastore: Text,
        max: SmallCount,
        min: SmallCount,
        samples: Count,
        num: Count,
        depth: SmallCount,
    ):
        check_bounds(min, max)
        tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
        self.store = store.read_datastore(Path(datastore), token_text.digest_vocabulary(tokenizer))
        if max > self.store.length:
            raise ValueError(
                f"max={max} exceeds the {self.store.length} tokens that datastore={datastore} is sorted by: lower "
                "max=, "
                f"or sort the datastore by {max} tokens."
            )
        self.max, self.min, self.samples, self.num, self.depth = max, min, samples, num, depth

    def extend(self, row, new):
        pass

    def retract(self, row, length):
        pass

    def draft(self, row):
        return grow_trie(self.store.tokens, self.find_places(self.texts[row]), num=self.num, depth=self.depth)

    def find_places(self, text: list[int]) -> list[int]:
        """The places of the datastore where the end of `text` occurs."""
        places: list[int] = []
        matches = self.store.matches(text[-self.max :], self.max)
        for entries in reversed(matches[self.min - 1 :]):
            missing, num = self.samples - len(places), len(entries)
            spread = entries if num <= missing else [entries[index * num // missing] for index in range(missing)]
            places += [self.store.suffixes[entry] for entry in spread]
        return places


def grow_trie(tokens: memoryview, places: list[int], *, num: int, depth: int) -> Nodes:
    """The `num` most frequent nodes in the trie of the places' continuations; of equals those nearest the root."""
    draft: Nodes = []
    order = itertools.count()
    # (-count, depth, order, token, parent, places of the token); a child's count is never higher than its parent's
    best: list[tuple] = []

    def offer(parent: int, depth: int, places: list[int]) -> None:
        following: dict[int, list[int]] = {}
        for place in places:
            following.setdefault(tokens[place + 1], []).append(place + 1)
        following.pop(store.SEPARATOR, None)
        for token, next_places in following.items():
            heapq.heappush(best, (-len(next_places), depth, next(order), token, parent, next_places))

    offer(0, 1, places)
    while best and len(draft) < num:
        _, level, _, token, parent, next_places = heapq.heappop(best)
        draft.append((token, parent))
        if level < depth:
            offer(len(draft), level + 1, next_places)
    return draft


class Forced(TextProposer):
    """Drafts a chain of the tokens that the grammar of a row's answer forces; nothing if the grammar leaves a choice.

    The target has no choice there either, so no such draft is refused. num: largest number of drafts
    """

    linear = True
    constraints: list[Constraint | None] = []  # [B] once a batch has told them

    def __init__(self, target: Target, *, num: Count):
        self.depth = num

    def constrain(self, constraints):
        self.constraints = constraints

    def extend(self, row, new):
        pass

    def draft(self, row) -> Nodes:
        constraint = self.constraints[row] if self.constraints else None
        tokens = constraint.forced() if constraint else []
        return [(token, node) for node, token in enumerate(tokens[: self.depth])]

    def guess(self, row):
        return [Guess(token, place, 1.0) for token, place in self.draft(row)]
