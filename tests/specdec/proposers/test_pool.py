"""Tests of the candidates of a round."""

import pytest

from specdec.proposers.chances import Chances, Kind
from specdec.proposers.pool import Pool


def test_equal_candidates_of_two_members_are_one_node():
    chances, pool = Chances(), Pool([5])
    first = pool.add(9, 0, Kind("Suffix", 0.5, 1), chances)
    assert pool.add(9, 0, Kind("head", 0.5, 1), chances) == first and len(pool.tokens) == 2
    assert pool.chances[first] == pytest.approx(0.75)
    drawn = pool.add(9, 0, Kind("drawn", 0.5, 1), chances, drawn=True)
    assert drawn != first  # a draw is never joined with another node


def test_a_token_that_ends_the_answer_is_not_worth_drafting():
    chances = Chances()
    pool = Pool([5], ends=frozenset({7}))
    end = pool.add(7, 0, Kind("Suffix", 0.9, 1), chances)
    behind = pool.add(3, end, Kind("Suffix", 0.9, 2), chances)
    other = pool.add(3, 0, Kind("Suffix", 0.9, 1), chances)
    pool.settle()
    assert pool.chances[end] == pool.chances[behind] == 0.0 < pool.chances[other]
    assert not Pool([5], left=1).wants(1) and pool.wants(1, 3)
