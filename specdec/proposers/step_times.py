"""What the parts of a round beside the target's pass take here, learnt from rounds."""

FOLLOW, FALL = 0.1, 0.5  # share of a new measurement in what is known: where it is longer, and where it is shorter


class StepTimes:
    """Seconds of a head's steps, and of other parts of a round, by their names and by rows.

    Other work on the machine only makes a step longer, and a head that seems too slow is tried seldom, so shorter times count
    more.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], float] = {}

    def saw(self, name: str, rows: int, seconds: float) -> None:
        known = self.known.get((name, rows), seconds)
        share = FALL if seconds < known else FOLLOW
        self.known[name, rows] = known + share * (min(seconds, 2 * known) - known)

    def seconds(self, name: str, rows: int) -> float:
        """For the nearest number of rows that is known; 0 for a step that has not been made."""
        others = [(abs(each - rows), seconds) for (step, each), seconds in self.known.items() if step == name]
        return min(others, default=(0, 0.0))[1]
