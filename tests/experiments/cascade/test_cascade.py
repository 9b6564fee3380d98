"""A cascade drafts with the target on a part of its cache: its entries and positions, rewinding, losslessness."""

import pytest
import torch

from specdec.core import masks, rules
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape, make_chain
from specdec.decoding.decoder import Decoder
from specdec.experiments.cascade.proposer import Cascade
from specdec.proposers.heads import HeadProposer
from specdec.proposers.text import Ngram
from specdec.target.verifier import Verifier
from tests.support.decoding import chain_of, check_counters, greedy, prompts_of, random_tokens
from tests.support.drafters import make_drafter
from tests.support.enumeration import answer_statistic, sampled_target, without_temperature

pytestmark = pytest.mark.full

TREE = TreeShape(depth=2, width=2, nodes=4)
SMALL = {"num": 4, "sinks": 1, "window": 3}
WHOLE = {**SMALL, "window": 500}


def make_cascade(target, proposer=None, **arguments) -> Cascade:
    return Cascade(target, inner=proposer or Ngram(target, min=1, max=2, num=2), **arguments)


def eagle(target, shape) -> HeadProposer:
    return HeadProposer(make_drafter(target, "eagle"), shape)


INNERS = {
    "ngram": lambda target: Ngram(target, min=1, max=2, num=3),
    "chain": lambda target: eagle(target, chain_of(3)),
    "tree": lambda target: eagle(target, TREE),
    "own cache": lambda target: HeadProposer(make_drafter(target, "draft"), chain_of(3)),
}


# Rewinding


def commit_spans(proposer, texts, features, spans) -> None:
    """Commits texts[b, first:last] of every row b, where spans[b] = (first, last). features [B, T, F*D]"""
    width = max(last - first for first, last in spans)
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    previous_features = features.new_zeros(len(texts), width, features.shape[-1])
    for row, (first, last) in enumerate(spans):
        tokens[row, : last - first] = texts[row, first:last]
        previous_features[row, : last - first] = features[row, first - 1 : last - 1]
    counts = [last - first for first, last in spans]
    proposer.commit(tokens, previous_features, torch.tensor(counts), counts)


def rewound_and_fresh(drafter, shape):
    """The outputs of the first step, the drafts and the cache: rewound over two rounds, and without these rounds."""
    target, results = drafter.target, []
    texts = torch.tensor([random_tokens(row, 24, target.vocab_size) for row in range(3)])
    wrong = torch.tensor([random_tokens(row, 24, target.vocab_size) for row in range(9, 12)])
    with torch.no_grad():
        features, wrong_features = (target.read(tokens, drafter.target_layers).features for tokens in (texts, wrong))
    for rewinds in (True, False):
        proposer = HeadProposer(drafter, shape)
        proposer.begin(texts, torch.tensor([7, 5, 9]))
        commit_spans(proposer, texts, features, [(1, 8), (1, 6), (1, 10)])
        mark = proposer.mark() if rewinds else None
        first = proposer.propose(Sampling(), None)
        if rewinds:
            for spans in ([(8, 9), (6, 9), (10, 12)], [(9, 12), (9, 11), (12, 13)]):
                commit_spans(proposer, wrong, wrong_features, spans)
                proposer.propose(Sampling(), None)
            proposer.rewind(mark)
            assert torch.equal(proposer.propose(Sampling(), None).tokens, first.tokens)
        commit_spans(proposer, texts, features, [(8, 11), (6, 8), (10, 11)])
        with torch.no_grad():
            newest, outputs = proposer.absorb()
        results.append(((newest, *outputs), proposer.propose(Sampling(), None), proposer.cache))
    return results


HEADS = [("draft", {}), ("medusa", {}), ("eagle3", {}), ("mtp", {}), ("mtp", {"num_modules": 5}), ("dspark", {})]


@pytest.mark.parametrize("shape", [chain_of(3), TREE], ids=str)
@pytest.mark.parametrize("head, arguments", HEADS, ids=str)
def test_a_rewound_head_drafts_what_a_fresh_one_does(target, head, arguments, shape):
    rewound, fresh = rewound_and_fresh(make_drafter(target, head, arguments=arguments), shape)
    for value, reference in zip(rewound[0], fresh[0]):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12)
    assert torch.equal(rewound[1].tokens, fresh[1].tokens) and torch.equal(rewound[1].parents, fresh[1].parents)
    assert rewound[2].lengths.tolist() == fresh[2].lengths.tolist() == rewound[2].host_lengths


def test_proposers_that_cannot_be_rewound_are_refused(target):
    with pytest.raises(ValueError, match=r"^inner=Cascade cannot be rewound"):
        make_cascade(target, make_cascade(target, **SMALL), **SMALL)


# The part


def read_prompts(target, prompts):
    """The target's cache after a batch of prompts."""
    cache, num = target.cache(len(prompts)), torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    cache.reserve(padded.shape[1])
    positions = torch.arange(padded.shape[1]).expand(len(prompts), -1)
    mask = masks.pending_mask(masks.causal_mask(padded.shape[1], "cpu"), cache.lengths, cache.visible)
    target.read(padded, (), positions=positions, mask=mask, cache=cache)
    cache.commit(num, num.tolist())
    return cache


def logits_on_the_part(target, proposer, cache, tokens):
    """Logits [B, N, V] of the target on the proposer's part, for tokens [B, N] after the committed ones."""
    proposer.attach_cache(cache)
    proposer._fill_part_cache()
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=Runner())
    return target.logits(verifier(make_chain(tokens, None), proposer.part_cache, rules.Draws(None)).output.final)


PROMPTS = [random_tokens(seed, num, 61) for seed, num in enumerate((12, 3, 17, 8))]
NEW = torch.tensor([random_tokens(seed + 9, 3, 61) for seed in range(4)])


@pytest.mark.parametrize("arguments", [SMALL, WHOLE, {**SMALL, "sinks": 0}, {**SMALL, "sinks": 9, "window": 2}])
def test_the_part_gives_the_logits_of_a_mask_over_the_whole_text(target, arguments):
    logits = logits_on_the_part(target, make_cascade(target, **arguments), read_prompts(target, PROMPTS), NEW)
    for row, prompt in enumerate(PROMPTS):
        text, num = torch.tensor([prompt + NEW[row].tolist()]), len(prompt)
        mask = masks.causal_mask(num + 3, "cpu")
        if num > arguments["sinks"] + arguments["window"]:
            mask[num:, arguments["sinks"] : num - arguments["window"]] = False
        expected = target.logits(target.read(text, (), mask=mask[None, None]).final)[0, num:]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-12)


# Rounds


@pytest.mark.parametrize("inner_name", INNERS)
def test_all_drafts_are_accepted_with_a_window_over_the_whole_text(small_target, inner_name):
    prompts, num_rounds = prompts_of(small_target), 4
    proposer = make_cascade(small_target, INNERS[inner_name](small_target), **WHOLE)
    plain = greedy(small_target, None).generate(prompts, 1 + 5 * num_rounds)
    generation = greedy(small_target, proposer).generate(prompts, 1 + 5 * num_rounds)
    assert generation.tokens == plain.tokens
    assert generation.accepted == [[4] * num_rounds] * 5 and generation.drafted == [4] * num_rounds


def test_drafting_does_not_change_the_answers(small_target):
    """At temperature 0 the drafts are the target's choices on its part, whatever `inner` drafts, in any batch."""
    prompts = prompts_of(small_target)
    plain, accepted = greedy(small_target, None).generate(prompts, 14), []
    for make in INNERS.values():
        generation = greedy(small_target, make_cascade(small_target, make(small_target), **SMALL)).generate(prompts, 14)
        assert generation.tokens == plain.tokens
        check_counters(generation)
        accepted.append(generation.accepted)
    assert accepted == accepted[:1] * len(INNERS) and {0, 4} <= {count for row in accepted[0] for count in row}
    for row in (0, 1):
        decoder = greedy(small_target, make_cascade(small_target, **SMALL))
        assert decoder.generate([prompts[row]], 14).accepted[0] == accepted[0][row]


def test_inner_holds_the_committed_tokens_only(small_target):
    """Drafts that were not committed are not in the texts of `inner`."""
    prompts, inner = prompts_of(small_target), INNERS["ngram"](small_target)
    answers = greedy(small_target, make_cascade(small_target, inner, **SMALL)).generate(prompts, 14).tokens
    for prompt, answer, text in zip(prompts, answers, inner.texts):
        assert text[: len(prompt) + len(answer)] == prompt + answer


# Sampling


def make_sampled(inner_name, rule="token", **arguments) -> Decoder:
    target = sampled_target()
    proposer = Ngram(target, min=1, max=2, num=2) if inner_name == "ngram" else eagle(target, chain_of(1))
    return Decoder(target, make_cascade(target, proposer, **arguments), sampling=Sampling(1.0), stop=set(), rule=rule)


NARROW = {"num": 2, "sinks": 0, "window": 1}


def test_the_laws_of_drafts_equal_those_of_the_partial_target(target):
    """The distribution of every draft after those before it. Some rows need more inner rounds than others."""
    sampling, prompts = Sampling(1.3), PROMPTS
    for make in INNERS.values():
        proposer, cache = make_cascade(target, make(target), **SMALL), read_prompts(target, PROMPTS)
        num = torch.tensor([len(prompt) for prompt in prompts])
        features = target.read(NEW[:, :1].expand(-1, 17), proposer.target_layers).features
        padded = torch.zeros(4, 18, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt) + 1] = torch.tensor([*prompt, NEW[row, 0]])
        proposer.attach_cache(cache)
        proposer.begin(padded[:, :-1], num)
        proposer.commit(padded[:, 1:], features, num, num.tolist())
        with torch.no_grad():
            tree = proposer.propose(sampling, torch.Generator().manual_seed(0))
        logits = logits_on_the_part(target, make_cascade(target, **SMALL), cache, tree.tokens)
        assert tree.linear and tree.tokens.shape == (4, 5) and tree.tokens[:, 0].tolist() == NEW[:, 0].tolist()
        torch.testing.assert_close(tree.probs[:, 1:], sampling.distribution(logits)[:, :-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner_name, rule", [("ngram", "block"), ("chain", "token")])
def test_sampled_answers_follow_the_target_law(inner_name, rule):
    decoder = make_sampled(inner_name, rule, **NARROW)
    statistic, freedom = answer_statistic(decoder, 1000)
    assert freedom > 9 and statistic < freedom + 4 * (2 * freedom) ** 0.5
    counts = decoder.generate([[1, 1]] * 200, 4, generator=torch.Generator().manual_seed(0)).accepted
    assert {0, 1, 2} <= {count for row in counts for count in row}


def test_a_wrong_law_is_detected():
    decoder = make_sampled("ngram", **NARROW)
    original_propose = decoder.proposer.propose
    decoder.proposer.propose = lambda *arguments: without_temperature(original_propose(*arguments))
    statistic, freedom = answer_statistic(decoder, 1000)
    assert statistic > freedom + 4 * (2 * freedom) ** 0.5
