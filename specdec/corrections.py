"""How much longer passes take now than when their costs were measured: other contexts, other load, what was measured wrongly."""

import math

FORGET = 0.97  # what a pass counts after the next one
FIRST, LEAST = (
    0.3,
    0.02,
)  # by how much a pass may change the logarithm of a factor: the first of a size, and one of many
FOLLOW = 0.7  # share of it that other sizes take
FRESH = 5.0  # passes, as they count now, from which a size does not follow what is seen of others


class Corrections:
    """Factors by the nodes of a pass.

    What is followed are medians: by how much a pass took longer counts only up to a step, which becomes smaller with each pass
    of its size, so a pause of the machine does not count. Sizes of which nothing was seen lately follow the others, for the most
    part: one whose cost was too low must become dearer than those that it kept from being chosen. Sizes of which nothing was
    seen at all are between their neighbours.
    """

    def __init__(self) -> None:
        self.logs: dict[int, float] = {}
        self.weights: dict[int, float] = {}

    def copy(self) -> "Corrections":
        """With the same factors, as if they were seen long ago."""
        other = Corrections()
        other.logs, other.weights = dict(self.logs), dict.fromkeys(self.logs, 0.0)
        return other

    def factor(self, num: int) -> float:
        return math.exp(self._log(num))

    def saw(self, num: int, ratio: float) -> None:
        """ratio: of the seconds that a pass of `num` nodes took to what was measured for its size"""
        here, weight = self._log(num), self.weights.get(num, 0.0)
        step = max(LEAST, FIRST / (1 + weight))
        change = min(max(math.log(ratio) - here, -step), step)
        for other in self.logs:
            self.weights[other] *= FORGET
            self.logs[other] += FOLLOW * change * (1 - min(1.0, self.weights[other] / FRESH))
        self.logs[num], self.weights[num] = here + change, FORGET * weight + 1

    def _log(self, num: int) -> float:
        if num in self.logs or not self.logs:
            return self.logs.get(num, 0.0)
        low = max((known for known in self.logs if known < num), default=None)
        high = min((known for known in self.logs if known > num), default=None)
        if low is None or high is None:
            return FOLLOW * self.logs[high if low is None else low]  # type: ignore[index]
        return self.logs[low] + (num - low) / (high - low) * (self.logs[high] - self.logs[low])
