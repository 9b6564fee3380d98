"""Retrieval (REST, 2311.08252): what followed elsewhere where the text stood as it stands now."""

import heapq
import itertools
from pathlib import Path

from specdec import datastore as store
from specdec.proposers.text import RetractableTextProposer
from specdec.target import Target, load_tokenizer
from specdec.tree import Nodes


class Retrieval(RetractableTextProposer):
    """Looks the end of the text up in a datastore and drafts the best part of the trie of what follows there.

    datastore: a folder that scripts/datastore.py made
    max, min: tokens of the longest end of the text that is looked up, and of the shortest that is worth a draft
    samples: so many places are read: those of the longest match, then, as long as there are too few, also those of the
        match that is a token shorter, which counts the former once more. Of too many, some are taken at equal distances
    num: nodes of the trie that are drafted, those that most of the places lead through
    depth: of the deepest
    """

    def __init__(self, target: Target, *, datastore: str, max: int, min: int, samples: int, num: int, depth: int):
        for name, value in (("min", min), ("samples", samples), ("num", num), ("depth", depth)):
            if value < 1:
                raise ValueError(f"proposer.{name}={value} must be at least 1.")
        if max < min:
            raise ValueError(f"proposer.max={max} must be at least proposer.min={min}.")
        self.store = store.read(Path(datastore), store.fingerprint(load_tokenizer(target.name)))
        if max > self.store.length:
            raise ValueError(
                f"proposer.max={max} exceeds the {self.store.length} tokens that proposer.datastore={datastore} is "
                f"sorted by: lower it, or make the datastore with length={max}."
            )
        self.max, self.min, self.samples, self.num, self.depth = max, min, samples, num, depth

    def clear(self):
        pass

    def extend(self, row, new):
        pass

    def retract(self, row, length):
        pass

    def draft(self, row):
        return grow(self.store.tokens, self.places(self.texts[row]), num=self.num, depth=self.depth)

    def places(self, text: list[int]) -> list[int]:
        """Where in the datastore the text stands as `text` does at its end."""
        found: list[int] = []
        matches = self.store.matches(text[-self.max :], self.max)
        for entries in reversed(matches[self.min - 1 :]):
            missing, num = self.samples - len(found), len(entries)
            spread = entries if num <= missing else [entries[index * num // missing] for index in range(missing)]
            found += [self.store.suffixes[entry] for entry in spread]
        return found


def grow(tokens: memoryview, places: list[int], *, num: int, depth: int) -> Nodes:
    """Of the trie of what follows the places, the `num` nodes with the highest counts; of equals, those nearest the root."""
    draft: Nodes = []
    order = itertools.count()
    best: list[
        tuple
    ] = []  # (-count, depth, order, token, parent, places of the token); a child's count is never higher

    def offer(parent: int, depth: int, places: list[int]) -> None:
        following: dict[int, list[int]] = {}
        for place in places:
            following.setdefault(tokens[place + 1], []).append(place + 1)
        following.pop(store.SEPARATOR, None)
        for token, there in following.items():
            heapq.heappush(best, (-len(there), depth, next(order), token, parent, there))

    offer(0, 1, places)
    while best and len(draft) < num:
        _, level, _, token, parent, there = heapq.heappop(best)
        draft.append((token, parent))
        if level < depth:
            offer(len(draft), level + 1, there)
    return draft
