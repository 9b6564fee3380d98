"""The candidates of all rows in a round, and what trees of them are worth."""

import math
from dataclasses import dataclass

from specdec.proposers.pool import Pool
from specdec.proposers.round_value import RoundValue, Values


@dataclass(frozen=True)
class Candidates:
    """pools: of every row; running: rows whose answers have not ended; linear: whether trees are chains"""

    pools: list[Pool]
    running: list[int]
    value: RoundValue
    linear: bool

    @property
    def values(self) -> Values:
        return [self.pools[row].values(chain=self.linear) for row in self.running]

    @property
    def forced(self) -> int:
        """Drafts that were drawn, which are verified in any case, and those beside them."""
        return max(len(pool.drawn) + len(pool.beside or ()) for pool in self.pools)

    def best(self) -> tuple[int, float, float]:
        """-> nodes of the best size, its seconds, expected tokens"""
        return self.value.best(self.values, forced=self.forced)

    def gain(self, likely: list[float], *, drawn: bool) -> float:
        """What one more candidate in each row, of these chances [B], adds to the value of the round.

        drawn: it would be sampled, and verified in any case; minus infinity where no size has room for it
        """
        if drawn and self.forced >= self.value.room:
            return -math.inf
        return self.value.gain(self.values, [likely[row] for row in self.running], forced=self.forced, drawn=drawn)

    def settle_beside(self, likely: list[float]) -> None:
        """Fixes what is verified beside draws, before the first one, whose chances are `likely` [B]."""
        with_draw = [[likely[row], *own] for row, own in zip(self.running, self.values)]
        num, *_ = self.value.best(with_draw, forced=1)
        for pool in self.pools:
            pool.settle_beside(0 if self.linear else num - 2)

    def gain_of_head(self, typical: list[float], first: float, step: float) -> float:
        """What a head is expected to add to the value of the round beside its steps.

        typical [K]: chance of its draft at each depth if those before are right; first, step: seconds of its steps
        """
        values, value = self.values, self.value
        known = [max(row[:1], default=0.0) for row in values]  # chance that a text proposer is right already
        pools = [self.pools[row] for row in self.running]
        before, chance, best, cost = value.of(values), 1.0, -math.inf, first
        more = [list(row) for row in values]
        for d, own in enumerate(typical, start=1):
            chance *= own
            likely = [chance * (1 - sure) * pool.wants(d) for sure, pool in zip(known, pools)]
            more = [sorted([*row, one], reverse=True) for row, one in zip(more, likely)]
            best = max(best, value.of(more) - before - value.rate * cost)
            cost += step
        return best
