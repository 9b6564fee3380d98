"""Prompt lookup against a search through the text, and what it is told and made to forget."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from conftest import random_tokens
from specdec.decode import Decoder
from specdec.proposers.ngram import Ngram
from specdec.sampling import Sampling

LENGTHS, NUM_NEW = (5, 12, 2, 9, 1), 40


def begin(proposer, prompts: list[list[int]]) -> None:
    """A ragged batch; the last token of each stands for the first of its answer."""
    tokens = pad_sequence([torch.tensor(prompt[:-1]) for prompt in prompts], batch_first=True)
    counts = [len(prompt) - 1 for prompt in prompts]
    proposer.begin(tokens, torch.tensor(counts))
    commit(proposer, [prompt[1:] for prompt in prompts])


def commit(proposer, new: list[list[int]]) -> None:
    """Ragged, as the decoder does: what is behind a row's own is not its."""
    tokens = pad_sequence([torch.tensor(row) for row in new], batch_first=True, padding_value=9)
    counts = [len(row) for row in new]
    proposer.commit(tokens, tokens.new_zeros(*tokens.shape, 0), torch.tensor(counts), counts)


def naive(text: list[int], low: int, high: int, num: int) -> list[int]:
    """What the chain should be, by reading the text from behind."""
    for n in range(min(high, len(text) - 1), low - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                grown = list(text)
                for offset in range(num):
                    grown.append(grown[place + offset])
                return grown[len(text) :]
    return []


def texts(num_letters: int, length: int) -> list[list[int]]:
    """At random, and some that come to repeat themselves."""
    draw = random.Random(0)
    found = [[draw.randrange(num_letters) for _ in range(length)] for _ in range(4)]
    return [*found, [1] * length, found[0][:5] + [0, 1, 1, 2] * (length // 4), found[1][: length // 2] * 2]


@pytest.mark.parametrize("low, high", [(1, 1), (1, 4), (2, 3), (3, 8)])
def test_index_finds_what_a_search_finds(low, high):
    found = 0
    for text in texts(3, 60):
        proposer = Ngram(None, min=low, max=high, num=5)
        begin(proposer, [text[:2]])
        for length in range(2, len(text)):
            goal = naive(text[:length], low, high, 5)
            assert proposer.draft(0) == [(token, number) for number, token in enumerate(goal)]
            found += bool(goal)
            commit(proposer, [[text[length]]])
    assert found > 200


def test_copy_runs_on_into_itself():
    proposer = Ngram(None, min=1, max=4, num=8)
    begin(proposer, [[9, 1, 2, 3, 1, 2, 3, 1]])
    assert [token for token, _ in proposer.draft(0)] == [2, 3, 1, 2, 3, 1, 2, 3]


def test_rewind_leaves_no_trace():
    draw = random.Random(1)
    pick = lambda: [[draw.randrange(3) for _ in range(draw.randrange(1, 6))] for _ in range(3)]
    proposer, kept = Ngram(None, min=1, max=3, num=6), [[0, 1, 2, 0], [1, 1], [2, 0, 2]]
    begin(proposer, kept)
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
        kept = [text + more for text, more in zip(kept, new)]
        fresh = Ngram(None, min=1, max=3, num=6)
        begin(fresh, kept)
        for row in range(3):
            assert proposer.draft(row) == fresh.draft(row)
            assert vars(proposer.indices[row]) == vars(fresh.indices[row])
    assert differed > 10


def check_rounds(target, proposer, drafts_after) -> None:
    """Answers are the plain ones, and a round accepts what drafts_after(text) has of them, which is often something."""
    prompts = [random_tokens(seed, num, target.vocab_size) for seed, num in enumerate(LENGTHS)]
    plain = Decoder(target, None, sampling=Sampling(0.0), stop=set()).generate(prompts, NUM_NEW).tokens
    decoder = Decoder(target, proposer, sampling=Sampling(0.0), stop=set())
    assert decoder.generate(prompts, NUM_NEW).tokens == plain
    total = 0
    for prompt, answer in zip(prompts, plain):
        (accepted,) = decoder.generate([prompt], NUM_NEW).accepted  # alone, since a short chain of a batch is filled up
        goal, end = [], 1
        while end < NUM_NEW:
            children = {(parent, token): n for n, (token, parent) in enumerate(drafts_after(prompt, answer[:end]), 1)}
            node, count = 0, 0
            while end + count < NUM_NEW and (node, answer[end + count]) in children:
                node, count = children[node, answer[end + count]], count + 1
            goal.append(min(count, NUM_NEW - end - 1))
            end += count + 1
        assert accepted == goal
        total += sum(accepted)
    assert total > NUM_NEW


def test_decoding(small_target):
    def drafts_after(prompt, answer):
        return [(token, number) for number, token in enumerate(naive(prompt + answer, 1, 3, 4))]

    check_rounds(small_target, Ngram(small_target, min=1, max=3, num=4), drafts_after)


def test_no_match_no_draft():
    proposer = Ngram(None, min=2, max=3, num=4)
    begin(proposer, [[1, 2, 3, 1], [4, 5, 4]])
    tree = proposer.propose(Sampling(0.0), None)
    assert tree.tokens.tolist() == [[1], [4]]
    commit(proposer, [[3], [5]])
    tree = proposer.propose(Sampling(0.0), None)
    assert tree.linear and tree.tokens.tolist() == [[3, 3, 3, 3, 3], [5, 4, 5, 4, 5]]


@pytest.mark.parametrize("wrong", [{"min": 0}, {"num": 0}, {"max": 1}])
def test_mistakes(wrong):
    with pytest.raises(ValueError, match=r"^(min|num|max)=\d must be at least"):
        Ngram(None, **{"min": 2, "max": 3, "num": 4, **wrong})
