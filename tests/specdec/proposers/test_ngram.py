"""Prompt lookup against a naive search through the text, after commits and after rewinds."""

import random

import pytest

from specdec.core.sampling import Sampling
from specdec.proposers.text import Ngram
from tests.support.texts import begin, check_rounds, commit, repeating_texts


def naive(text: list[int], low: int, high: int, num: int) -> list[int]:
    """The expected chain, by a search that starts at the end of the text."""
    for n in range(min(high, len(text) - 1), low - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                grown = list(text)
                for offset in range(num):
                    grown.append(grown[place + offset])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize("low, high", [(1, 1), (1, 4), (2, 3), (3, 8)])
def test_the_index_drafts_what_a_naive_search_finds(low, high):
    num_matches = 0
    for text in repeating_texts(3, 60):
        proposer = Ngram(None, min=low, max=high, num=5)
        begin(proposer, [text[:2]])
        for length in range(2, len(text)):
            expected = naive(text[:length], low, high, 5)
            assert proposer.draft(0) == [(token, number) for number, token in enumerate(expected)]
            num_matches += bool(expected)
            commit(proposer, [[text[length]]])
    assert num_matches > 200


def test_rewind_restores_the_state_of_the_mark():
    draw = random.Random(1)

    def pick() -> list[list[int]]:
        return [random.Random(draw.random()).choices(range(3), k=draw.randrange(1, 6)) for _ in range(3)]

    proposer, texts = Ngram(None, min=1, max=3, num=6), [[0, 1, 2, 0], [1, 1], [2, 0, 2]]
    begin(proposer, texts)
    differed = 0
    for _ in range(40):
        mark = proposer.mark()
        before = [proposer.draft(row) for row in range(3)]
        for _ in range(draw.randrange(3)):
            commit(proposer, pick())
        differed += before != [proposer.draft(row) for row in range(3)]
        proposer.rewind(mark)
        assert [proposer.draft(row) for row in range(3)] == before
        new = pick()
        commit(proposer, new)
        texts = [text + more for text, more in zip(texts, new)]
        fresh = Ngram(None, min=1, max=3, num=6)
        begin(fresh, texts)
        for row in range(3):
            assert proposer.draft(row) == fresh.draft(row)
            assert vars(proposer.states[row]) == vars(fresh.states[row])
    assert differed > 10


def test_decoding_accepts_the_drafts_of_a_naive_search(small_target):
    def drafts_after(prompt, answer):
        return [(token, number) for number, token in enumerate(naive(prompt + answer, 1, 3, 4))]

    check_rounds(small_target, Ngram(small_target, min=1, max=3, num=4), drafts_after)


def test_rows_without_a_match_draft_nothing():
    proposer = Ngram(None, min=2, max=3, num=4)
    begin(proposer, [[1, 2, 3, 1], [4, 5, 4]])
    tree = proposer.propose(Sampling(0.0), None)
    assert tree.tokens.tolist() == [[1], [4]]
    commit(proposer, [[3], [5]])
    tree = proposer.propose(Sampling(0.0), None)
    assert tree.linear and tree.tokens.tolist() == [[3, 3, 3, 3, 3], [5, 4, 5, 4, 5]]


def test_bounds_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"^max=1 must be at least min=2"):
        Ngram(None, min=2, max=1, num=4)
