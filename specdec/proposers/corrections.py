"""How much longer passes take now than when their costs were measured: other contexts, other load, what was measured wrongly."""

import math

FORGET = 0.97  # what a pass counts after the next one
# By how much a pass may change the logarithm of a factor: the first of a size, and one of many
FIRST, LEAST = 0.3, 0.02
FOLLOW = 0.7  # share of it that other sizes take, if it is a rise
OLD = 100  # passes: many
# By how much a pass lowers the logarithm of another size that seemed dearer than the one that is seen now
FADE = 0.002
OWN = 0.9  # share of a change of others that a size does not take in the pass after its own; the square of it in the next one


def followed(change: float) -> float:
    """What other sizes take of a change."""
    return FOLLOW * change if change > 0 else change


class Corrections:
    """Factors by the nodes of a pass.

    What is followed are medians: by how much a pass took longer counts only up to a step, which becomes smaller with each pass
    of its size, so a pause of the machine does not count. Other sizes follow, the more the longer ago they were seen, but a rise
    not quite: one whose cost was too low must become dearer than those that it kept from being chosen. So such sizes seem too
    cheap rather than too dear, and are seen; and what made one dearer than others fades. Sizes of which nothing was seen at all
    are between their neighbours.
    """

    def __init__(self) -> None:
        self.logs: dict[int, float] = {}
        self.weights: dict[int, float] = {}
        self.ages: dict[int, int] = {}  # passes of other sizes since

    def copy(self) -> "Corrections":
        """With the same factors, as if they were seen long ago."""
        other = Corrections()
        other.logs, other.weights = dict(self.logs), dict.fromkeys(self.logs, 0.0)
        other.ages = dict.fromkeys(self.logs, OLD)
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
            self.ages[other] += 1
            faded = min(FADE, max(0.0, self.logs[other] - here))
            self.logs[other] += (followed(change) - faded) * (1 - OWN ** self.ages[other])
        self.logs[num], self.weights[num], self.ages[num] = here + change, FORGET * weight + 1, 0

    def _log(self, num: int) -> float:
        if num in self.logs or not self.logs:
            return self.logs.get(num, 0.0)
        low = max((known for known in self.logs if known < num), default=None)
        high = min((known for known in self.logs if known > num), default=None)
        if low is None or high is None:
            return followed(self.logs[high if low is None else low])  # type: ignore[index]
        return self.logs[low] + (num - low) / (high - low) * (self.logs[high] - self.logs[low])
