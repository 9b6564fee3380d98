"""Retrieval (REST, 2311.08252): drafts are continuations found in a datastore of other texts."""

import heapq
import itertools
from pathlib import Path

from specdec.core.tree import Nodes
from specdec.proposers import datastore as store
from specdec.proposers.text import RetractableTextProposer
from specdec.target.loading import load_tokenizer
from specdec.target.model import Target


class Retrieval(RetractableTextProposer):
    """Looks up the end of the text in a datastore, makes a trie of the continuations there, and drafts its best part.

    datastore: a folder as specdec/proposers/datastore.py writes it
    max, min: tokens of the longest end of the text that is looked up, and of the shortest that is drafted from
    samples: number of places that are read. First those of the longest match; while there are too few, also those of the
        match that is one token shorter, which includes the places of the longer match again, so these count twice. If a
        match has too many places, some are taken at equal distances
    num: number of drafted nodes: those of the trie with the most places below them
    depth: the largest depth of a drafted node
    """

    def __init__(self, target: Target, *, datastore: str, max: int, min: int, samples: int, num: int, depth: int):
        for name, value in (("min", min), ("samples", samples), ("num", num), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if max < min:
            raise ValueError(f"max={max} must be at least min={min}.")
        tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
        self.store = store.read(Path(datastore), store.fingerprint(tokenizer))
        if max > self.store.length:
            raise ValueError(
                f"max={max} exceeds the {self.store.length} tokens that datastore={datastore} is sorted by: lower max=, or "
                f"sort the datastore by {max} tokens."
            )
        self.max, self.min, self.samples, self.num, self.depth = max, min, samples, num, depth

    def extend(self, row, new):
        pass

    def retract(self, row, length):
        pass

    def draft(self, row):
        return grow(self.store.tokens, self.places(self.texts[row]), num=self.num, depth=self.depth)

    def places(self, text: list[int]) -> list[int]:
        """Places of the datastore where the end of `text` occurs."""
        places: list[int] = []
        matches = self.store.matches(text[-self.max :], self.max)
        for entries in reversed(matches[self.min - 1 :]):
            missing, num = self.samples - len(places), len(entries)
            spread = entries if num <= missing else [entries[index * num // missing] for index in range(missing)]
            places += [self.store.suffixes[entry] for entry in spread]
        return places


def grow(tokens: memoryview, places: list[int], *, num: int, depth: int) -> Nodes:
    """The `num` nodes with the highest counts in the trie of the places' continuations; of equals those nearest the root."""
    draft: Nodes = []
    order = itertools.count()
    # (-count, depth, order, token, parent, places of the token); a child's count is never higher than its parent's
    best: list[tuple] = []

    def offer(parent: int, depth: int, places: list[int]) -> None:
        following: dict[int, list[int]] = {}
        for place in places:
            following.setdefault(tokens[place + 1], []).append(place + 1)
        following.pop(store.SEPARATOR, None)
        for token, own in following.items():
            heapq.heappush(best, (-len(own), depth, next(order), token, parent, own))

    offer(0, 1, places)
    while best and len(draft) < num:
        _, level, _, token, parent, own = heapq.heappop(best)
        draft.append((token, parent))
        if level < depth:
            offer(len(draft), level + 1, own)
    return draft
