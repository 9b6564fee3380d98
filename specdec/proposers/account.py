"""What drafting that chooses how much to draft has chosen, expected and got."""

from collections import Counter, deque
from dataclasses import dataclass, field

KEPT = 4096  # rounds whose choices are kept


@dataclass(frozen=True)
class Choice:
    """What one round drafted."""

    size: int  # nodes of a row's tree, the root included
    sources: Counter  # drafts in the trees of all rows by Kind.source, without the copies that fill trees up
    head: bool  # whether the head drafted, even if none of its drafts was taken
    trial: bool  # whether it did to see whether it pays by now


@dataclass
class Account:
    """What was expected and what came, since the last `forget`."""

    rounds: int = 0
    tokens: float = 0.0  # of all rows
    expected: float = 0.0  # tokens that were expected
    seconds: float = 0.0  # of verification and drafting, expected
    plain: float = 0.0  # seconds that plain decoding takes for the expected tokens, in as many rows
    head: int = 0  # rounds in which the head drafted
    trials: int = 0  # of these, rounds to see whether it pays by now
    checks: int = 0  # rounds that drafted nothing, to see what that takes by now
    sizes: Counter = field(default_factory=Counter)  # rounds by the nodes of their trees
    choices: deque[Choice] = field(default_factory=lambda: deque(maxlen=KEPT))  # of the last rounds

    def add(self, size: int, expected: float, seconds: float, plain: float) -> None:
        """One round, before it is verified."""
        self.rounds += 1
        self.sizes[size] += 1
        self.expected += expected
        self.seconds += seconds
        self.plain += plain
