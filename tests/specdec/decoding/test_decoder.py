"""The round loop: drafting changes the speed and not the answers."""

import dataclasses
import itertools

import pytest
import torch

from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import (
    NUM_NEW,
    Scripted,
    chain_of,
    check_counters,
    greedy,
    oracle,
    prompts_of,
    random_tokens,
)
from tests.support.drafters import VARIANTS, make_drafter, paired
from tests.support.loops import transformers_answer

SHAPES = [chain_of(1), chain_of(4), TreeShape(depth=3, width=3, nodes=8)]


@pytest.fixture(scope="module")
def answers(target):
    """The answers of transformers to the prompts."""
    return [transformers_answer(target, prompt, NUM_NEW) for prompt in prompts_of(target)]


@pytest.fixture
def prompts(target):
    return prompts_of(target)


@pytest.fixture
def texts(prompts, answers):
    """Prompt and answer of each row."""
    return [prompt + answer for prompt, answer in zip(prompts, answers)]


@pytest.fixture(scope="module")
def small_answers(small_target):
    return [transformers_answer(small_target, prompt, NUM_NEW) for prompt in prompts_of(small_target)]


# Drafters


def test_plain_decoding(target, answers):
    prompts = prompts_of(target)
    assert [greedy(target, None).generate([prompt], NUM_NEW).tokens[0] for prompt in prompts] == answers
    together = greedy(target, None).generate(prompts, NUM_NEW)
    assert together.tokens == answers
    assert together.accepted == [[0] * (NUM_NEW - 1)] * 5
    assert all(len(set(answer)) > 8 for answer in answers)  # the answers are not one token repeated


@paired("small_drafter, shape", VARIANTS, SHAPES)
def test_drafting_does_not_change_the_answers(small_drafter, small_target, small_answers, shape):
    prompts = prompts_of(small_target)
    shape = dataclasses.replace(shape, depth=min(shape.depth, small_drafter.depth or shape.depth))
    decoder = greedy(small_target, HeadProposer(small_drafter, shape))
    separate = [decoder.generate([prompt], NUM_NEW) for prompt in prompts[:2]]
    together = decoder.generate(prompts, NUM_NEW)
    assert together.tokens == small_answers
    assert [generation.tokens[0] for generation in separate] == small_answers[:2]
    assert [generation.accepted[0] for generation in separate] == together.accepted[:2]  # rows are independent
    check_counters(together)
    counts = set(itertools.chain(*together.accepted))
    assert counts <= set(range(shape.depth + 1)) and {0, 1} <= counts  # some were refused and some accepted


# Proposers that are given the answer


def test_accepted_paths_through_scattered_nodes(target, answers, prompts, texts):
    """The text is at random nodes of random trees, so the kept nodes are seldom the first ones."""
    generator = torch.Generator().manual_seed(0)
    paths = set()

    def pick(num: int) -> int:
        return int(torch.randint(num, (), generator=generator))

    def drafts(text, position):
        parents, tokens, path = [-1], [text[position]], [0]
        for node in range(1, 10):
            parent, token = pick(node), target.vocab_size - node
            if parent == path[-1] and position + len(path) < len(text) and pick(3):
                token = text[position + len(path)]
                path.append(node)
            parents.append(parent)
            tokens.append(token)
        paths.add(tuple(path))
        return Tree(torch.tensor([tokens]), torch.tensor([parents]), None)

    for batch in ([0], [1], [0, 1, 2], [0, 1, 2, 3, 4]):
        proposer = Scripted([texts[row] for row in batch], 9, drafts)
        generation = greedy(target, proposer).generate([prompts[row] for row in batch], NUM_NEW)
        assert generation.tokens == [answers[row] for row in batch]
        check_counters(generation)
        assert len(set(itertools.chain(*generation.accepted))) > 2
        for text, features in zip(proposer.texts, proposer.features):  # features belong to the tokens that were kept
            expected = target.read(torch.tensor([text]), proposer.target_layers).features[0, : len(features)]
            torch.testing.assert_close(torch.stack(features), expected, atol=1e-9, rtol=0)
            assert len(features) == len(text) - 1
    assert any(path != tuple(range(len(path))) for path in paths)


# Ends of answers


def lengths(prompts: list[list[int]], answers: list[list[int]]) -> list[int]:
    return [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)]


def test_stop_inside_an_accepted_run(target, answers, prompts, texts):
    """The answer ends with the stop token; the other rows go on."""
    firsts = [index for index in range(1, 15) if (index - 1) % 5 < 4 and answers[0].index(answers[0][index]) == index]
    for index in firsts:
        stop = answers[0][index]
        expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in answers]
        proposer = Scripted(texts, 4, oracle(4), ends=lengths(prompts, expected))
        generation = greedy(target, proposer, {stop}).generate(prompts, NUM_NEW)
        assert generation.tokens == expected
        assert generation.tokens == greedy(target, None, {stop}).generate(prompts, NUM_NEW).tokens
        assert len(generation.accepted[0]) == -(-index // 5)
        check_counters(generation)
    assert {(index - 1) % 5 for index in firsts} == {0, 1, 2, 3}


def test_stop_as_the_first_token(target, answers):
    generation = greedy(target, None, {answers[0][0]}).generate(prompts_of(target)[:1], NUM_NEW)
    assert generation.tokens == [answers[0][:1]] and generation.accepted == [[]]


def test_stream_emits_nothing_after_the_end(target, answers, prompts, texts):
    stop = answers[0][2]
    expected = greedy(target, None, {stop}).generate(prompts, NUM_NEW).tokens
    proposer = Scripted(texts, 4, oracle(4), ends=lengths(prompts, expected))
    rounds = list(greedy(target, proposer, {stop}).stream(prompts, NUM_NEW))
    assert [token for emitted in rounds for token in emitted.tokens[0]] == answers[0][: answers[0].index(stop) + 1]
    assert len(rounds) > 2 and all(emitted.tokens[0] == [] and emitted.accepted[0] == 0 for emitted in rounds[2:])


def test_answers_end_at_the_token_budget(target, answers, prompts, texts):
    for num in range(1, 9):
        generation = greedy(target, Scripted(texts, 4, oracle(4))).generate(prompts, num)
        assert generation.tokens == [answer[:num] for answer in answers]
        check_counters(generation)


def test_caches_grow_past_their_first_capacity(small_target):
    """The rounds exceed the capacity (240 + 40 entries), and then the prompt does (300)."""
    proposer = HeadProposer(make_drafter(small_target, "eagle3"), SHAPES[2])
    for num_prompt in (240, 300):
        prompt = random_tokens(7, num_prompt, small_target.vocab_size)
        generation = greedy(small_target, proposer).generate([prompt, prompt[:9]], 40)
        assert generation.tokens == [transformers_answer(small_target, text, 40) for text in (prompt, prompt[:9])]
        assert proposer.cache.visible > 256


def test_prompts_and_lengths_that_cannot_be_decoded_are_refused(target):
    for prompts, num in (([], 5), ([[]], 5), ([[1], []], 5), ([[1]], 0)):
        with pytest.raises(ValueError, match="at least one prompt, every prompt at least one token"):
            greedy(target, None).generate(prompts, num)
    limit = target.config.max_position_embeddings
    proposer = Scripted([], 4, oracle(4))
    with pytest.raises(ValueError, match=r"500 tokens, 9 new ones and 4 drafts exceed the target's 512 positions"):
        greedy(target, proposer).generate([[1], [1] * 500], 9)
    assert limit == 512 and len(greedy(target, None).generate([[1] * 500], 12).tokens[0]) == 12
    with pytest.raises(ValueError, match=r"^temperature=-1"):
        Decoder(target, None, sampling=Sampling(-1), stop=set())


def test_drafts_fit_into_what_each_layer_sees(target, monkeypatch):
    """A chunk of four positions has room for the newest token and three drafts."""
    monkeypatch.setattr(target, "layer_kinds", dataclasses.replace(target.layer_kinds, chunk=4))
    greedy(target, Scripted([], 3, oracle(3)))
    with pytest.raises(ValueError, match=r"layers that see 4 positions, and 4 drafts .* lower depth= to 3"):
        greedy(target, Scripted([], 4, oracle(4)))


# Sampling


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("when", [0, 3])
def test_an_answer_that_no_token_can_follow_is_refused_by_name(target, monkeypatch, temperature, when):
    logits, passes = target.logits, []

    def failing(final):
        passes.append(final)
        return torch.full_like(logits(final), torch.nan) if len(passes) > when else logits(final)

    monkeypatch.setattr(target, "logits", failing)
    decoder = Decoder(target, None, sampling=Sampling(temperature), stop=set())
    with pytest.raises(
        ValueError, match=rf"^No token can follow the answer's first {when}: the target's logits are not finite"
    ):
        decoder.generate([[1, 2, 3]], 8)
    passes.clear()
    with pytest.raises(ValueError, match=rf"^No token can follow the answer's first {when}: "):
        list(decoder.answers([[1, 2, 3]], 8, batch_size=2))
