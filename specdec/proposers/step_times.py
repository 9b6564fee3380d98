"""What the parts of a round beside the target's pass take here, learnt from rounds."""

from collections import Counter

FOLLOW = 0.1  # share of a new measurement in what is known
FALL, FIRST = 0.5, 10  # share of one that is shorter, among the first ones


class StepTimes:
    """Seconds of a head's steps, and of other parts of a round, by their names and by rows.

    They follow the mean. The first may have been made beside other work on the machine, and a head that seems too slow is tried
    seldom, so among the first ones shorter times count more.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], float] = {}
        self.counts: Counter[tuple[str, int]] = Counter()

    def saw(self, name: str, rows: int, seconds: float) -> None:
        key = name, rows
        known = self.known.get(key, seconds)
        share = FALL if seconds < known and self.counts[key] < FIRST else FOLLOW
        self.known[key] = known + share * (min(seconds, 2 * known) - known)
        self.counts[key] += 1

    def seconds(self, name: str, rows: int) -> float:
        """For the nearest number of rows that is known; 0 for a step that has not been made."""
        others = [(abs(each - rows), seconds) for (step, each), seconds in self.known.items() if step == name]
        return min(others, default=(0, 0.0))[1]
