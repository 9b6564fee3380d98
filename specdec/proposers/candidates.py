"""The candidates of a round: possible drafts, their acceptance probabilities, and the worth of trees of them."""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.core.constraint import Constraint
from specdec.core.tree import Nodes
from specdec.proposers.text import Guess

DECAY = 0.995  # weight of an observation, and of a round, after the next one: half after 140
TRUST = 3.0  # prior weight of the drafter's own estimate, in observations


@dataclass(frozen=True)
class Kind:
    """The properties of a draft before it is verified.

    source: name of the drafter; estimate: the drafter's probability that the draft is accepted if its parent is
    rank: number of likelier siblings of this source
    """

    source: str
    estimate: float
    depth: int
    rank: int = 0


class Acceptance:
    """Calibrated acceptance probabilities: the accepted share of drafts with nearly the same estimate.

    The estimate itself weighs as much as TRUST observations. Old observations weigh less than new ones.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple, tuple[float, float]] = {}  # accepted drafts, all drafts

    def probability(self, kind: Kind) -> float:
        """The probability that a draft is accepted if its parent is."""
        return self._corrected(_group(kind), min(max(kind.estimate, 1e-4), 0.999))

    def typical(self, source: str, depth: int) -> float:
        """The probability of a source's first draft at a depth, whatever its estimate; one half at first."""
        return self._corrected((source, depth), 0.5)

    def learn(self, kind: Kind, accepted: bool) -> None:
        """Adds an observation. It needs an accepted parent, but no verification: the text shows the right token."""
        for key in (_group(kind), *([(kind.source, kind.depth)] if kind.rank == 0 else [])):
            right, total = self.counts.get(key, (0.0, 0.0))
            self.counts[key] = DECAY * right + accepted, DECAY * total + 1

    def _corrected(self, key: tuple, estimate: float) -> float:
        right, total = self.counts.get(key, (0.0, 0.0))
        return (right + TRUST * estimate) / (total + TRUST)


def _group(kind: Kind) -> tuple:
    """The key of drafts of one source with nearly the same log-odds. Likeliest siblings have keys of their own."""
    estimate = min(max(kind.estimate, 0.01), 0.99)
    return kind.source, kind.rank == 0, round(math.log(estimate / (1 - estimate)))


class ChosenDrafts(NamedTuple):
    """The drafts of one row that are verified."""

    nodes: Nodes
    drawn: list[int]  # numbers of the sampled nodes in the tree


@dataclass
class RowCandidates:
    """The candidates of one row: a trie whose node 0 is the newest token.

    tokens_left: tokens that the answer may still have; ends: tokens that end it
        A draft that would be the answer's last token is worth nothing: a round also emits a token of the target.
    constraint: state of the answer's grammar; a draft that it refuses is worth nothing
    """

    acceptance: Acceptance
    tokens: list[int]
    tokens_left: int = sys.maxsize
    ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    parents: list[int] = field(default_factory=lambda: [-1])
    kinds: list[list[Kind]] = field(default_factory=lambda: [[]])
    probabilities: list[float] = field(default_factory=lambda: [1.0])  # probability of each node's path
    drawn: list[int] = field(default_factory=list)  # sampled nodes, all of which are verified
    chosen_nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # number of a chosen node by (parent, token)
    barred: set[int] = field(default_factory=set)  # nodes that the grammar refuses
    fixed_nodes: list[int] | None = None  # chosen nodes beside drawn ones; None before a draw

    def add(self, token: int, parent: int, kind: Kind, *, drawn: bool = False) -> int:
        """Adds a draft, and returns its node: an old one, if the same draft was chosen before."""
        node = None if drawn else self.chosen_nodes.get((parent, token))
        if node is not None:
            self.kinds[node].append(kind)
            first, second = map(self.acceptance.probability, self.kinds[node][:2])
            combined = Kind("both", 1 - (1 - first) * (1 - second), kind.depth, kind.rank)
            self.kinds[node].append(combined)
            if node not in self.barred:
                self.probabilities[node] = self.path_probability(parent, combined, token)
            return node
        number = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append([kind])
        # What is drafted beside a drawn token must not depend on the token, so its probability says nothing about it
        self.probabilities.append(self.path_probability(parent, kind, None if drawn else token))
        if drawn:
            self.drawn.append(number)
            return number
        if self.constraint and (parent in self.barred or not self.constraint.fits(self._text_to(number))):
            self.barred.add(number)
            self.probabilities[number] = 0.0
        self.chosen_nodes[parent, token] = number
        return number

    def add_siblings(self, parent: int, depth: int, probabilities: list[float], tokens: list[int]) -> int:
        """Adds a head's likeliest drafts below a node, and returns the first one that the grammar allows.

        Without an allowed one, returns the first.
        """
        kinds = [Kind("head", probability, depth, rank) for rank, probability in enumerate(probabilities)]
        nodes = [self.add(token, parent, kind) for token, kind in zip(tokens, kinds)]
        return next((node for node in nodes if node not in self.barred), nodes[0])

    def add_guesses(self, source: str, guesses: Iterable[Guess]) -> None:
        """Adds the tree that a text proposer guesses."""
        numbers, depths, children = [0], [0], Counter[int]()
        for guess in guesses:
            depths.append(depths[guess.parent] + 1)
            kind = Kind(source, guess.probability, depths[-1], children[guess.parent])
            children[guess.parent] += 1
            numbers.append(self.add(guess.token, numbers[guess.parent], kind))

    def is_useful(self, depth: int, token: int | None = None) -> bool:
        """Whether a draft at this depth can add to the answer. token: None before it is drawn"""
        return depth < self.tokens_left and token not in self.ends

    def path_probability(self, parent: int, kind: Kind, token: int | None = None) -> float:
        """The probability of the path to such a candidate; 0 if it cannot add to the answer."""
        useful = self.is_useful(kind.depth, token)
        return self.probabilities[parent] * self.acceptance.probability(kind) if useful else 0.0

    def normalise(self) -> None:
        """Scales the probabilities, from the root down, so that those of siblings add up to at most one."""
        above = [self.probabilities[parent] if parent >= 0 else 0.0 for parent in self.parents]
        conditional = [
            probability / parent_probability if parent_probability > 0 else 0.0
            for probability, parent_probability in zip(self.probabilities, above)
        ]
        total: Counter[int] = Counter()
        for parent, share in zip(self.parents, conditional):
            total[parent] += share  # type: ignore[assignment]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            self.probabilities[node] = self.probabilities[parent] * (conditional[node] / max(1.0, total[parent]))

    def order(self, *, chain: bool) -> list[int]:
        """The nodes in the order in which a growing tree takes them. chain: the nodes of one path only"""
        if chain:
            return self._path()
        if self.fixed_nodes is not None:
            return [*self.drawn, *self.fixed_nodes]
        allowed = set(range(1, len(self.tokens))) - self.barred
        return sorted(allowed, key=lambda node: (-self.probabilities[node], node))

    def values(self, *, chain: bool) -> list[float]:
        """The path probabilities of the nodes in this order."""
        return [self.probabilities[node] for node in self.order(chain=chain)]

    def choose(self, num: int, *, chain: bool) -> ChosenDrafts:
        """The first `num` nodes of the order, numbered from 1, parents first."""
        nodes = sorted(self.order(chain=chain)[:num])
        number = {0: 0, **{node: index for index, node in enumerate(nodes, 1)}}
        drafts = [(self.tokens[node], number[self.parents[node]]) for node in nodes]
        return ChosenDrafts(drafts, [number[node] for node in self.drawn])

    def fix_nodes(self, num: int) -> None:
        """Fixes the `num` likeliest nodes before anything is drawn: they are verified beside every draw."""
        self.fixed_nodes = sorted(self.order(chain=False)[:num])

    def teach(self, new: list[int]) -> None:
        """Learns from the tokens that followed. Every candidate with an accepted prefix counts, verified or not.

        Drafts that a grammar refuses do not count: they say nothing about the drafter.
        """
        nodes = {0}
        for token in new:
            following = [
                node for node, parent in enumerate(self.parents) if parent in nodes and node not in self.barred
            ]
            for node in following:
                for kind in self.kinds[node]:
                    self.acceptance.learn(kind, self.tokens[node] == token)
            nodes = {node for node in following if self.tokens[node] == token}

    def _text_to(self, node: int) -> list[int]:
        """The tokens of the drafts from the root to this node."""
        text = list[int]()
        while node:
            text.append(self.tokens[node])
            node = self.parents[node]
        return text[::-1]

    def _path(self) -> list[int]:
        """The likeliest chain of nodes; drawn nodes come first."""
        path, node = list[int](), 0
        while True:
            following = [
                child for child, parent in enumerate(self.parents) if parent == node and child not in self.barred
            ]
            if not following:
                return path
            node = max(following, key=lambda child: (child in self.drawn, self.probabilities[child]))
            path.append(node)


class BestSize(NamedTuple):
    """The size of tree that is worth most."""

    size: int  # nodes of each row's tree, with the root
    seconds: float  # seconds of its pass
    tokens: float  # expected tokens of all rows


@dataclass(frozen=True)
class Candidates:
    """The candidates of all rows, and the worth of a round: expected tokens - rate * seconds.

    rows [B]: all rows; running: rows whose answers have not ended; linear: whether trees are chains
    curve: seconds of a pass by nodes, without the head's; rate: tokens a second of all rows, expected of rounds
    """

    rows: list[RowCandidates]
    running: list[int]
    curve: dict[int, float]
    rate: float
    linear: bool

    @property
    def room(self) -> int:
        """Number of drafts that the largest size holds."""
        return max(self.curve) - 1

    @property
    def num_required(self) -> int:
        """Number of nodes that must be verified: drawn ones, and those fixed beside them."""
        return max(len(row.drawn) + len(row.fixed_nodes or ()) for row in self.rows)

    def values(self) -> list[list[float]]:
        """Path probabilities of each running row, in the order in which a growing tree takes its nodes."""
        return [self.rows[row].values(chain=self.linear) for row in self.running]

    @property
    def advantage(self) -> float:
        """The expected speed of the best size over that of plain decoding."""
        best = self.best()
        return best.tokens * self.curve[1] / (best.seconds * max(1, len(self.running)))

    def best(self) -> BestSize:
        return self._best(self.values(), self.num_required)

    def _best(self, values: list[list[float]], num_required: int) -> BestSize:
        sums = [0.0, *itertools.accumulate(map(sum, itertools.zip_longest(*values, fillvalue=0.0)))]
        sums += [sums[-1]] * self.room
        num_running, rate, curve = len(self.running), self.rate, self.curve
        sizes = [size for size in curve if size > num_required]
        assert sizes, "no size holds the drafts that were drawn"
        worths = [num_running + sums[size - 1] - rate * curve[size] for size in sizes]
        size = sizes[worths.index(max(worths))]
        return BestSize(size, curve[size], num_running + sums[size - 1])

    def _value(self, best: BestSize) -> float:
        return best.tokens - self.rate * best.seconds

    def gain(self, likely: list[float], *, drawn: bool) -> float:
        """Returns the value that one more candidate in each row, of path probabilities [B], adds to the round.

        drawn: whether the candidate is sampled, and so verified in any case; then -inf if no size has room for it
        """
        num_required, values, added = self.num_required, self.values(), [likely[row] for row in self.running]
        if drawn and num_required >= self.room:
            return -math.inf
        position = num_required if drawn else None
        grown = [_insert(row, one, position) for row, one in zip(values, added)]
        return self._value(self._best(grown, num_required + drawn)) - self._value(self._best(values, num_required))

    def fix_nodes(self, likely: list[float]) -> None:
        """Fixes the nodes beside draws, before the first draw, whose path probabilities are `likely` [B]."""
        with_draw = [[likely[row], *row_values] for row, row_values in zip(self.running, self.values())]
        size = self._best(with_draw, 1).size
        for row in self.rows:
            row.fix_nodes(0 if self.linear else size - 2)

    def gain_of_head(self, typical: list[float], first: float, step: float) -> float:
        """Returns the value that a head is expected to add to the round, less that of its steps' seconds.

        typical [K]: acceptance probability of its draft at each depth
        first, step: seconds of its first step, and of each later one
        """
        values = self.values()
        text_probabilities = [max(row[:1], default=0.0) for row in values]  # probability that a text proposer is right
        base_value, probability, best_gain, seconds = self._value(self._best(values, 0)), 1.0, -math.inf, first
        for depth, acceptance in enumerate(typical, start=1):
            probability *= acceptance
            likely = [
                probability * (1 - sure) * self.rows[row].is_useful(depth)
                for row, sure in zip(self.running, text_probabilities)
            ]
            values = [_insert(row, one, None) for row, one in zip(values, likely)]
            best_gain = max(best_gain, self._value(self._best(values, 0)) - base_value - self.rate * seconds)
            seconds += step
        return best_gain


def _insert(values: list[float], value: float, position: int | None) -> list[float]:
    """The values with one more, at a position, or in falling order."""
    return (
        sorted([*values, value], reverse=True) if position is None else [*values[:position], value, *values[position:]]
    )
