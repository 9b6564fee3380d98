"""The candidates of a round: what may be drafted in one row, by whom, and how likely it is to be accepted."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.core.grammar import Constraint
from specdec.core.tree import Nodes
from specdec.proposers.chances import Chances, Kind
from specdec.proposers.text import Guess


class Chosen(NamedTuple):
    """The drafts of one row that are verified."""

    drafts: Nodes
    drawn: list[int]  # numbers in the tree of those that were sampled
    sources: list[str]


@dataclass
class Pool:
    """The candidates of one row: a trie whose node 0 is the newest token.

    left: tokens that the answer may still have; ends: tokens that end it. A draft that would be its last token is worth
    nothing, as every round emits a token of the target after the drafts.
    constraint: of a grammar that the answer follows; a draft that it does not allow is worth nothing
    """

    tokens: list[int]
    left: int = sys.maxsize
    ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    parents: list[int] = field(default_factory=lambda: [-1])
    kinds: list[list[Kind]] = field(default_factory=lambda: [[]])
    chances: list[float] = field(default_factory=lambda: [1.0])  # of the path to each node
    drawn: list[int] = field(default_factory=list)  # nodes that were sampled; all of them are verified
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> chosen node
    barred: set[int] = field(default_factory=set)  # nodes that the grammar does not allow
    beside: list[int] | None = None  # chosen nodes that are verified beside drawn ones; None: nothing was drawn

    def add(self, token: int, parent: int, kind: Kind, chances: Chances, *, drawn: bool = False) -> int:
        """-> the number of the node, an old one if it was chosen already"""
        known = None if drawn else self.places.get((parent, token))
        if known is not None:
            self.kinds[known].append(kind)
            one, other = (chances.of(each) for each in self.kinds[known][:2])
            both = Kind("both", 1 - (1 - one) * (1 - other), kind.depth, kind.rank)
            self.kinds[known].append(both)
            if known not in self.barred:
                self.chances[known] = self.path_chance(parent, both, chances, token)
            return known
        number = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append([kind])
        # What is drafted beside a drawn token must not depend on the token, so its chance says nothing about it
        self.chances.append(self.path_chance(parent, kind, chances, None if drawn else token))
        if drawn:
            self.drawn.append(number)
            return number
        if self.constraint and (parent in self.barred or not self.constraint.fits(self._text_to(number))):
            self.barred.add(number)
            self.chances[number] = 0.0
        self.places[parent, token] = number
        return number

    def settle_beside(self, num: int) -> None:
        """Before anything is drawn: the likeliest `num` nodes are verified beside what will be drawn, whatever that is."""
        self.beside = self.best(num, chain=False)

    def _text_to(self, node: int) -> list[int]:
        """The drafts from the root to this node."""
        text = list[int]()
        while node:
            text.append(self.tokens[node])
            node = self.parents[node]
        return text[::-1]

    def wants(self, depth: int, token: int | None = None) -> bool:
        """Whether a draft at this depth can add to the answer. token: None if it is not known yet"""
        return depth < self.left and token not in self.ends

    def path_chance(self, parent: int, kind: Kind, chances: Chances, token: int | None = None) -> float:
        """Of the path to such a candidate; 0 if it cannot add to the answer."""
        return self.chances[parent] * chances.of(kind) if self.wants(kind.depth, token) else 0.0

    def add_guesses(self, source: str, guesses: Iterable[Guess], chances: Chances) -> None:
        """The tree that a proposer of texts guesses."""
        numbers, depths = [0], [0]
        for guess in guesses:
            depths.append(depths[guess.parent] + 1)
            rank = sum(self.parents[each] == numbers[guess.parent] for each in numbers[1:])
            kind = Kind(source, guess.chance, depths[-1], rank, guess.match)
            numbers.append(self.add(guess.token, numbers[guess.parent], kind, chances))

    def best(self, num: int, *, chain: bool) -> list[int]:
        """At most `num` nodes, parents first: the likeliest; of a pool with drawn ones, those and `beside`. chain: of one path"""
        if chain:
            return self._path()[:num]
        if self.beside is not None:
            return sorted([*self.drawn, *self.beside])
        allowed = set(range(1, len(self.tokens))) - self.barred
        rank = sorted(allowed, key=lambda node: (-self.chances[node], node))
        return sorted(rank[:num])

    def choose(self, num: int, *, chain: bool) -> Chosen:
        """The `best` ones, numbered from 1."""
        nodes = self.best(num, chain=chain)
        number = {0: 0, **{node: place for place, node in enumerate(nodes, 1)}}
        drafts = [(self.tokens[node], number[self.parents[node]]) for node in nodes]
        return Chosen(drafts, [number[node] for node in self.drawn], [self.kinds[node][-1].source for node in nodes])

    def values(self, *, chain: bool) -> list[float]:
        """The chances of the nodes in the order in which `best` takes them."""
        if chain:
            return [self.chances[node] for node in self._path()]
        if self.beside is not None:
            return [self.chances[node] for node in (*self.drawn, *self.beside)]
        return sorted(self.chances[1:], reverse=True)

    def settle(self) -> None:
        """Corrects chances from the root down: those of siblings add up to at most one."""
        total: Counter[int] = Counter()
        for node in range(1, len(self.tokens)):
            total[self.parents[node]] += self._own(node)  # type: ignore[assignment]
        own = [
            self._own(node) / max(1.0, total[self.parents[node]]) if node else 1.0 for node in range(len(self.tokens))
        ]
        for node in range(1, len(self.tokens)):
            self.chances[node] = self.chances[self.parents[node]] * own[node]

    def _own(self, node: int) -> float:
        above = self.chances[self.parents[node]]
        return self.chances[node] / above if above > 0 else 0.0

    def _path(self) -> list[int]:
        path, node = list[int](), 0
        while True:
            children = [child for child in range(node + 1, len(self.tokens)) if self.parents[child] == node]
            following = [child for child in children if child not in self.barred]
            if not following:
                return path
            node = max(following, key=lambda child: (child in self.drawn, self.chances[child]))
            path.append(node)

    def teach(self, chances: Chances, new: list[int]) -> None:
        """new: the tokens that followed. All candidates whose parents were right are counted, verified or not, but none that
        a grammar does not allow: they say nothing about the drafter."""
        nodes = {0}
        for token in new:
            following = [
                child for child, parent in enumerate(self.parents) if parent in nodes and child not in self.barred
            ]
            for child in following:
                for kind in self.kinds[child]:
                    chances.learn(kind, self.tokens[child] == token)
            nodes = {child for child in following if self.tokens[child] == token}
