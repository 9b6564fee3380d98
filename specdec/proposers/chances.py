"""How likely a draft is to be accepted: the drafter's own estimate, corrected by what was accepted so far."""

from dataclasses import dataclass

FORGET = 0.998  # what an observation counts after the next one of its kind
TRUST = 6.0  # observations that the estimate counts as which is to be corrected
DEEPEST = 4  # deeper drafts count as of this depth
BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


@dataclass(frozen=True)
class Kind:
    """What is known of a draft before it is verified.

    source: who drafts it; estimate: of that one, that the draft is accepted if its parent is; rank: siblings of this
    source that are likelier; match: tokens of the text that were found again, for proposers that look at texts
    """

    source: str
    estimate: float
    depth: int
    rank: int = 0
    match: int = 0

    @property
    def keys(self) -> tuple[tuple, tuple]:
        """Of the counters, the rough one first."""
        level = sum(self.estimate >= bound for bound in BOUNDS)
        length = min(self.match.bit_length(), 5)
        rough = (self.source, self.rank == 0, level)
        return rough, (*rough, min(self.depth, DEEPEST), length)


class Counter:
    """How often a draft of a kind was accepted; what is long ago counts less."""

    def __init__(self) -> None:
        self.accepted = self.offered = 0.0

    def add(self, accepted: bool) -> None:
        self.accepted = FORGET * self.accepted + accepted
        self.offered = FORGET * self.offered + 1

    def correct(self, estimate: float) -> float:
        return (self.accepted + TRUST * estimate) / (self.offered + TRUST)


class Chances:
    """Calibrated chances. A kind's fine counter corrects what its rough counter makes of the estimate."""

    def __init__(self) -> None:
        self.counters: dict[tuple, Counter] = {}
        self.depths: dict[tuple[str, int], Counter] = {}

    def of(self, kind: Kind) -> float:
        """The chance that a draft is accepted if its parent is."""
        value = min(max(kind.estimate, 1e-4), 0.999)
        for key in kind.keys:
            if key in self.counters:
                value = self.counters[key].correct(value)
        return value

    def learn(self, kind: Kind, accepted: bool) -> None:
        """Called for every draft whose parent was accepted, offered or not: the text shows whether it was right."""
        for key in kind.keys:
            self.counters.setdefault(key, Counter()).add(accepted)
        if kind.rank == 0:
            self.depths.setdefault((kind.source, kind.depth), Counter()).add(accepted)

    def typical(self, source: str, depth: int, *, otherwise: float = 0.5) -> float:
        """The chance of a source's first draft at a depth, before anything is known about it."""
        counter = self.depths.get((source, depth))
        return otherwise if counter is None else counter.correct(otherwise)
