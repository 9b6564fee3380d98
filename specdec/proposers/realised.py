"""How much of what is expected comes."""

KEPT = 0.995  # what a round counts after the next one
MOST = 2.0  # a single round counts as at most so many times what was expected, and as at least its inverse


class Realised:
    """What came over what was expected, over many rounds.

    Of many candidates the one is taken that seems best, which is the one that is most overestimated: so less comes than the
    chances and the costs of what is taken tell (the winner's curse).

    trust: the sum for which nothing is wrong at first
    """

    def __init__(self, trust: float):
        self.trust = self.expected = self.real = trust

    def saw(self, expected: float, real: float) -> None:
        """One round."""
        fading = (1 - KEPT) * self.trust
        self.expected = KEPT * self.expected + fading + expected
        self.real = KEPT * self.real + fading + real

    def saw_ratio(self, ratio: float) -> None:
        """One round, which counts as much as any other. A pause of the machine counts as little as a slow round."""
        self.saw(1.0, min(max(ratio, 1 / MOST), MOST))

    @property
    def ratio(self) -> float:
        return self.real / self.expected
