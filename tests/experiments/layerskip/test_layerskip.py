"""Drafting with some of the target's layers: the drafts, and verification that reuses the layers' results."""

import copy
import dataclasses
import itertools
import re

import pytest
import torch
import torch._inductor
from torch import nn
from transformers import DynamicCache

from specdec.core import masks, rules
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import PartialPass
from specdec.decoding.decoder import Decoder
from specdec.experiments.layerskip import proposer as layerskip
from specdec.experiments.layerskip.proposer import LayerSkip
from specdec.proposers import growth
from specdec.target.model import Target
from specdec.target.verifier import Verifier
from tests.support.decoding import NUM_NEW, SUBSETS, greedy, prompts_of, random_tokens
from tests.support.enumeration import SAMPLINGS, answer_statistic, decoder_error, sampled_target
from tests.support.loops import logits_of_layers
from tests.support.targets import make_target, scale_forward

pytestmark = pytest.mark.full

GREEDY = Sampling()


@pytest.fixture(scope="module")
def small_answers(small_target):
    return greedy(small_target, None).generate(prompts_of(small_target), NUM_NEW).tokens


@torch.no_grad()
def propose(target: Target, proposer: LayerSkip, prompts, sampling: Sampling):
    """The tree and the cache after the prompts without their last tokens, which are the roots."""
    num = torch.tensor([len(prompt) - 1 for prompt in prompts])
    padded = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    length = padded.shape[1] - 1
    cache = target.cache(len(prompts))
    cache.reserve(length)
    mask = masks.pending_mask(masks.causal_mask(length, None), cache.lengths, cache.visible)
    target.read(padded[:, :-1], (), positions=cache.slots, mask=mask, cache=cache)
    cache.commit(num, num.tolist())
    proposer.attach_cache(cache)
    proposer.begin(padded[:, :-1], num)
    proposer.commit(padded[:, 1:], torch.zeros(*padded[:, 1:].shape, 0), num, num.tolist())
    return proposer.propose(sampling, torch.Generator().manual_seed(0)), cache


# Drafts


@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
@torch.no_grad()
def test_drafts_equal_those_of_a_model_of_these_layers(target, layers):
    proposer = LayerSkip(target, layers=layers, depth=3)
    prompts = prompts_of(target)[:3]
    for sampling in (Sampling(), Sampling(1.5, top_k=20)):
        tree, cache = propose(target, proposer, prompts, sampling)
        assert tree.linear and tree.tokens.shape == (3, 4) and cache.pending == 0
        for row, prompt in enumerate(prompts):
            tokens = tree.tokens[row].tolist()
            logits = logits_of_layers(target, proposer.layers, prompt[:-1], tokens[:-1])
            assert tokens[0] == prompt[-1]
            if sampling.greedy:
                assert tree.probs is None and tokens[1:] == logits.argmax(-1).tolist()
            else:
                torch.testing.assert_close(tree.probs[row, 1:], sampling.distribution(logits), atol=1e-10, rtol=0)


@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
def test_drafting_does_not_change_the_answers(small_target, small_answers, layers):
    prompts = prompts_of(small_target)
    decoder = greedy(small_target, LayerSkip(small_target, layers=layers, depth=3))
    generation = decoder.generate(prompts, NUM_NEW)
    assert generation.tokens == small_answers
    alone = decoder.generate(prompts[:1], NUM_NEW)
    assert alone.tokens == small_answers[:1]
    assert alone.accepted[0] == generation.accepted[0] and set(generation.drafted) == {3}
    counts = set(itertools.chain(*generation.accepted))
    if layers == 8:  # the whole target drafts: every draft is accepted, until the answer is cut
        for part in (generation, alone):
            assert all(row[:-1] == part.drafted[: len(row) - 1] for row in part.accepted)
    else:
        assert {0, 1, 2} <= counts


def test_the_cache_grows_while_drafting(small_target):
    prompt = random_tokens(7, 240, small_target.vocab_size)
    decoder = greedy(small_target, LayerSkip(small_target, layers=SUBSETS["both"], depth=3))
    generation = decoder.generate([prompt, prompt[:9]], 40)
    assert generation.tokens == greedy(small_target, None).generate([prompt, prompt[:9]], 40).tokens
    assert decoder.proposer.cache.visible > 256


# Verification continues after the layers that drafted


def differences(target: Target, tree, cache, prompts, runner=None) -> tuple[float, float]:
    """The largest differences in logits and in K and V between verification and one pass over every row's text."""
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner or Runner())
    verification = verifier(tree, cache, rules.Draws(None))
    logits, entries = 0.0, 0.0
    for row, prompt in enumerate(prompts):
        text, whole = torch.tensor([prompt[:-1] + tree.tokens[row].tolist()]), DynamicCache()
        expected = target.model(text, past_key_values=whole).logits[0, len(prompt) - 1 :]
        logits = max(logits, float((target.logits(verification.output.final[row]) - expected).abs().max()))
        for layer, halves in enumerate(whole.layers):
            cached = cache.entry_tensor[layer, :, row, :, : text.shape[1]]
            entries = max(entries, float((cached - torch.stack([halves.keys[0], halves.values[0]])).abs().max()))
    return logits, entries


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
@torch.no_grad()
def test_verification_continues_after_the_first_layers(target, layers, sampling):
    prompts = prompts_of(target)
    tree, cache = propose(target, LayerSkip(target, layers=layers, depth=3), prompts, sampling)
    shared = tree.partial_pass.num_layers if tree.partial_pass else 0
    assert shared == (layers if isinstance(layers, int) else 3 * (layers[0] == 0))
    assert max(differences(target, tree, cache, prompts)) < 1e-12


@torch.no_grad()
def test_wrong_partial_passes_are_detected(target):
    """Negative control: a hidden state of another depth or node, or missing K and V, gives large differences."""
    prompts = prompts_of(target)
    for layers, num in ((5, 5), (SUBSETS["both"], 3)):
        tree, cache = propose(target, LayerSkip(target, layers=layers, depth=3), prompts, GREEDY)
        assert tree.partial_pass.num_layers == num
        for wrong in (num - 1, num + 1):
            damaged = dataclasses.replace(tree, partial_pass=PartialPass(tree.partial_pass.states, wrong))
            assert min(differences(target, damaged, copy.deepcopy(cache), prompts)) > 1e-3
        damaged = dataclasses.replace(tree, partial_pass=PartialPass(tree.partial_pass.states.roll(1, dims=1), num))
        assert min(differences(target, damaged, copy.deepcopy(cache), prompts)) > 1e-3
        stale = copy.deepcopy(cache)
        stale.entry_tensor[0, 0, stale.rows[:, 0], :, stale.lengths] = 0  # the root's K in the first layer
        stale_differences = differences(target, tree, stale, prompts)
        assert stale_differences[1] > 1e-3
        assert max(differences(target, tree, cache, prompts)) < 1e-12


@torch.no_grad()
def test_a_filled_tree_is_read_from_the_start(target):
    tree, cache = propose(target, LayerSkip(target, layers=5, depth=3), prompts_of(target), GREEDY)
    filled = tree.pad_to(4)
    assert filled.partial_pass is None and tree.pad_to(3) is tree
    assert max(differences(target, filled, cache, prompts_of(target))) < 1e-12


# Sampling


def decoder_of(*, rule="token", sampling="warm", wrong=None, **how) -> Decoder:
    target = sampled_target()
    proposer = LayerSkip(target, **{"layers": 1, "depth": 2, **how})
    if wrong:
        original_propose = proposer.propose
        proposer.propose = lambda *arguments: wrong(original_propose(*arguments))
    return Decoder(target, proposer, sampling=SAMPLINGS[sampling], stop=set(), rule=rule)


@pytest.fixture
def enumerated(monkeypatch):
    """Lets tests/support/enumeration.py enumerate the draws of this proposer as it enumerates those of heads."""
    monkeypatch.setattr(
        layerskip, "pick_tokens", lambda distribution, uniform: growth.pick_tokens(distribution, uniform)
    )
    return monkeypatch


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", ["warm", "all"])
@pytest.mark.parametrize("layers", [1, [1], 2])
def test_lossless(enumerated, rule, sampling, layers):
    decoder = decoder_of(rule=rule, sampling=sampling, layers=layers)
    for number, seed in ((1, 0), (3, 1)):
        assert decoder_error(decoder, number, seed=seed, monkeypatch=enumerated) < 1e-12


def flatten_laws(tree):
    return dataclasses.replace(tree, probs=(tree.probs + 0.2) / (tree.probs + 0.2).sum(-1, keepdim=True))


def test_wrong_laws_are_detected(enumerated):
    assert decoder_error(decoder_of(wrong=flatten_laws), 1, monkeypatch=enumerated) > 1e-3


def test_whole_answers_follow_the_target_law():
    statistic, freedom = answer_statistic(decoder_of(rule="block"), 1000)
    assert freedom > 9 and statistic < freedom + 4 * (2 * freedom) ** 0.5


# Compiled


@pytest.fixture(scope="module")
def shallow() -> Target:
    return make_target(6, num_layers=3)


@pytest.mark.parametrize(
    "layers, how", [(2, "greedy"), ([0, 2], "sampled"), ([1, 2], "greedy"), (3, "greedy")], ids=str
)
def test_compiled_drafting_equals_uncompiled_drafting(shallow, traced, layers, how):
    sampling = Sampling(1.5 if how == "sampled" else 0.0)
    generations = []
    for compiled in (True, False):
        proposer = LayerSkip(shallow, layers=layers, depth=3, compile=compiled)
        decoder = Decoder(shallow, proposer, sampling=sampling, stop=set(), runner=Runner(compiled))
        parts = [
            decoder.generate(prompts, 10, generator=torch.Generator().manual_seed(0))
            for prompts in (prompts_of(shallow)[:2], prompts_of(shallow)[2:4])
        ]
        generations.append([(part.tokens, part.accepted) for part in parts])
        assert (proposer.compile_seconds > 0) == compiled
        with torch.no_grad():
            tree, cache = propose(shallow, proposer, prompts_of(shallow), GREEDY)
        assert max(differences(shallow, tree, cache, prompts_of(shallow), decoder.runner)) < 1e-12
    assert generations[0] == generations[1]


# Refusals


@pytest.mark.parametrize("layers", [0, 9, 2.5, -1, [], [0, 8], [-9, 1], [0, 1.5], "many", [0, 2, 2], [3, 1], [7, -1]])
def test_layers_that_do_not_exist_or_are_out_of_order_are_refused(target, layers):
    is_unordered = layers in ([0, 2, 2], [3, 1], [7, -1])
    sentence = "list every layer once and in the order" if is_unordered else "tiny has 8 layers; give .* 1 to 8, or a"
    with pytest.raises(ValueError, match=rf"^layers={re.escape(str(layers))}: {sentence}"):
        LayerSkip(target, layers=layers, depth=2)


def test_layers_are_counted_from_both_ends(target):
    assert LayerSkip(target, layers=[0, 2, -1], depth=2).layers == (0, 2, 7)
    assert LayerSkip(target, layers=None, depth=2).layers == (0, 1, 2, 3, 4)


def test_a_model_that_does_more_than_its_layers_is_refused(monkeypatch):
    target = make_target(6, num_layers=2)
    scale_forward(target, monkeypatch)
    with pytest.raises(
        ValueError, match=r"^tiny does more than its layers one after the other: it cannot draft with some"
    ):
        LayerSkip(target, layers=1, depth=2)
