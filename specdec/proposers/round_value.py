"""What a round is worth, from the chances of its candidates and from costs (see auto.py)."""

from dataclasses import dataclass

Values = list[list[float]]  # of each running row, the chances of its candidates in the order in which they are taken


@dataclass(frozen=True)
class RoundValue:
    """Expected tokens - rate * seconds.

    curve: seconds by nodes, without those of the head; rate: tokens a second of all rows that are expected of rounds as they
    come; faith: what comes of a sum of chances; rows: those that run; forced: drafts that any tree must have
    """

    curve: dict[int, float]
    rate: float
    faith: float
    rows: int

    @property
    def room(self) -> int:
        """Drafts of the largest size."""
        return max(self.curve) - 1

    def best(self, values: Values, *, forced: int = 0) -> tuple[int, float, float]:
        """-> nodes of the best size, its seconds, expected tokens"""
        best = None
        for num, seconds in self.curve.items():
            if num < 1 + forced:
                continue
            expected = self.rows + self.faith * sum(sum(row[: num - 1]) for row in values)
            found = expected - self.rate * seconds, num, seconds, expected
            best = found if best is None or found[0] > best[0] else best
        assert best is not None, "no size holds the drafts that were drawn"
        return best[1:]

    def of(self, values: Values, *, forced: int = 0) -> float:
        """In the best size."""
        _, seconds, expected = self.best(values, forced=forced)
        return expected - self.rate * seconds

    def gain(self, values: Values, likely: list[float], *, forced: int, drawn: bool) -> float:
        """What one more candidate in each row, of these chances, adds. drawn: any tree must have it, after the forced ones"""
        if drawn:
            more = [[*row[:forced], chance, *row[forced:]] for row, chance in zip(values, likely, strict=True)]
        else:
            more = [sorted([*row, chance], reverse=True) for row, chance in zip(values, likely, strict=True)]
        return self.of(more, forced=forced + drawn) - self.of(values, forced=forced)
