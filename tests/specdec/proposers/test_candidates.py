"""Tests of the candidates of a round: what they are worth, and what is learned about them."""

import itertools
import random

import pytest

from specdec.proposers.candidates import Acceptance, Candidates, Kind, RowCandidates


def test_probabilities_become_what_is_seen_and_follow_changes():
    acceptance, generator = Acceptance(), random.Random(1)
    kind = Kind("head", 0.55, 2)
    for truth in (0.15, 0.9):
        for _ in range(1500):
            acceptance.learn(kind, generator.random() < truth)
        assert abs(acceptance.probability(kind) - truth) < 0.08
    assert acceptance.probability(Kind("head", 0.05, 1)) == pytest.approx(0.05)  # nothing is known of this kind
    assert abs(acceptance.typical("head", 2) - 0.9) < 0.08 and acceptance.typical("head", 3) == 0.5


def test_candidates_that_were_not_verified_teach_too():
    acceptance, kind = Acceptance(), Kind("Suffix", 0.9, 1)
    for _ in range(60):
        row = RowCandidates(acceptance, [5])
        row.add(9, 0, kind)
        row.teach([8])
    assert acceptance.probability(kind) < 0.15


def test_equal_candidates_of_two_members_are_one_node():
    row = RowCandidates(Acceptance(), [5])
    first = row.add(9, 0, Kind("Suffix", 0.5, 1))
    assert row.add(9, 0, Kind("head", 0.5, 1)) == first and len(row.tokens) == 2
    assert row.probabilities[first] == pytest.approx(0.75)
    drawn = row.add(9, 0, Kind("drawn", 0.5, 1), drawn=True)
    assert drawn != first  # a draw is never joined with another node


def test_a_token_that_ends_the_answer_is_not_worth_drafting():
    row = RowCandidates(Acceptance(), [5], ends=frozenset({7}))
    end = row.add(7, 0, Kind("Suffix", 0.9, 1))
    behind = row.add(3, end, Kind("Suffix", 0.9, 2))
    other = row.add(3, 0, Kind("Suffix", 0.9, 1))
    row.normalise()
    assert row.probabilities[end] == row.probabilities[behind] == 0.0 < row.probabilities[other]
    assert not RowCandidates(Acceptance(), [5], tokens_left=1).is_useful(1) and row.is_useful(1, 3)


def test_probabilities_of_siblings_add_up_to_at_most_one():
    row = RowCandidates(Acceptance(), [5])
    nodes = [row.add(token, 0, Kind("Suffix", 0.8, 1)) for token in (1, 2)]
    row.add(3, nodes[0], Kind("Suffix", 0.5, 2))
    row.normalise()
    assert row.probabilities == pytest.approx([1.0, 0.5, 0.5, 0.25])


def sum_best(row: RowCandidates, num: int) -> float:
    """The largest sum of probabilities of all sets of `num` nodes with their parents."""
    sums = []
    for nodes in itertools.combinations(range(1, len(row.tokens)), min(num, len(row.tokens) - 1)):
        if all(row.parents[node] in (0, *nodes) for node in nodes):
            sums.append(sum(row.probabilities[node] for node in nodes))
    return max(sums)


def test_the_size_is_the_best_of_all_and_trees_hold_the_likeliest_nodes():
    """Against all sizes and all sets of nodes, for random probabilities and costs."""
    generator = random.Random(0)
    for _ in range(50):
        curve = {1: 1.0}
        for num in range(2, 8):
            curve[num] = curve[num - 1] + generator.choice([-0.02, 0.0, 0.1, 0.5])
        rows = [RowCandidates(Acceptance(), [5]) for _ in range(2)]
        for row in rows:
            for token in range(6):
                row.add(token, generator.randrange(len(row.tokens)), Kind("Suffix", generator.random(), 1))
            row.normalise()
        best = Candidates(rows, [0, 1], curve, rate=2.0, linear=False).best()
        for row in rows:
            nodes = row.choose(best.size - 1, chain=False).nodes
            assert all(parent < place for place, (_, parent) in enumerate(nodes, start=1))
        values = []
        for size, seconds in curve.items():
            values.append(2 + sum_best(rows[0], size - 1) + sum_best(rows[1], size - 1) - 2.0 * seconds)
        assert best.tokens - 2.0 * best.seconds == pytest.approx(max(values))
