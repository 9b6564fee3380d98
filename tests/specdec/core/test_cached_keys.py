"""Committed keys read to their length, against a mask over all entries: the operator, whole targets, decoders."""

import functools

import pytest
import torch

from specdec.core import cache, cached_keys, fast, masks, rules
from specdec.core.cached_keys import attend_cached, find_cached_keys
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import make_chain
from specdec.decoding.batch import Request
from specdec.decoding.prefill import Prefill
from specdec.target.verifier import Verifier
from tests.support.compiled import CHAIN, TREE, decoder_of, prompts_of
from tests.support.decoding import random_trees
from tests.support.drafters import make_drafter
from tests.support.families import FAMILIES
from tests.support.targets import make_target
from tests.support.tree_cases import attend_masked, make_mask
from tests.target_table import make_family_target

# Families whose attention takes a mask apart, caps its scores, or has other numbers of heads than configured
CANNOT = {"nemotron", "stablelm", "gemma2", "vaultgemma", "doge", "falcon", "jetmoe"}


CANNOT_READ_PIECES = {*CANNOT, "afmoe", "mimo_v2_flash", "gptj"}

PATHS = pytest.mark.parametrize("paths", [("cache",), ("cache", "tree")], ids=["cache", "tree"])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("window", [None, 6])
def test_joined_parts_against_a_mask(seed, window, monkeypatch):
    """Ragged rows, chains and trees, texts in several parts, a level of a tree behind another, sinks."""
    torch.manual_seed(seed)
    monkeypatch.setattr(cached_keys, "MIN_PART_KEYS", int(torch.randint(2, 9, ())))
    rows, groups, heads, capacity = int(torch.randint(1, 4, ())), int(torch.randint(1, 3, ())), 4, 24
    num = int(torch.randint(1, 6, ()))
    lengths = torch.randint(0, capacity - num, (rows,))
    tree = random_trees(torch.default_generator, rows, num, 50)
    tree = make_chain(tree.tokens, None) if seed % 2 == 0 else tree
    ancestors = tree.ancestors()
    queries = int(torch.randint(1, num + 1, ())) if window is None else num  # the last level only
    mask = make_mask(ancestors, lengths, capacity, window)[:, :, -queries:]
    query = torch.randn(rows, heads, queries, 8, dtype=torch.float64)
    key, value = torch.randn(2, rows, groups, capacity, 8, dtype=torch.float64)
    find = functools.partial(
        find_cached_keys, ancestors[:, -queries:], lengths, capacity=capacity, heads=(heads, groups), window=window
    )
    cached = find()
    assert cached.table[2, :-1].sum() <= groups * (lengths.sum() + rows)  # keys that are read
    for sinks in (None, torch.randn(heads, dtype=torch.float64)):
        reference = attend_masked(query, key, value, mask, sinks)
        for seen in (cached, find(tree=True)):
            out = attend_cached(query, key, value, seen, scale=8**-0.5, sinks=sinks)
            torch.testing.assert_close(out, reference, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [None, 4000])
def test_parts_follow_from_the_length(window):
    """A large capacity leaves the parts of a short text, and a long text has as many as it may."""
    lengths = torch.tensor([500, 30_000])
    ancestors = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    cached = find_cached_keys(ancestors, lengths, capacity=40_960, heads=(8, 2), window=window)
    short, long = cached.table[2, :-1].view(2, 2, -1).sort(-1, descending=True).values[:, 0].tolist()
    assert short[:3] == [256, 244 if window is None else 241, 0]
    assert sum(long) == (30_000 if window is None else 3_996) and max(long) == max(256, -(-sum(long) // len(long)))


def test_the_proof_of_the_path_runs_here():
    cached_keys.check_cached_keys(torch.device("cpu"))


def must_mask(target) -> bool:
    """True for targets that cannot read keys to their length: several shapes of K and V, widths without a kernel,
    or attention of their own."""
    shapes = {(shape.num_heads, shape.width) for shape in target._shapes if shape}
    unlike = target.recurrent or target.layer_kinds.chunk or target.adds_masks or target.penalises_distance
    return unlike or len(shapes) > 1 or any(width % 8 for _, width in shapes)


def list_addresses(caches) -> list[list[int]]:
    return [list(map(torch.Tensor.data_ptr, row_cache.keys_and_values)) for row_cache in caches]


@pytest.mark.full
@PATHS
@pytest.mark.filterwarnings("ignore:The fast path cache is left out")
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.refused], ids=str)
def test_passes_of_families_against_a_mask(family, paths):
    """A tree in each of two rows, whose texts differ in length. A family that cannot reads its cache under a mask."""
    target, outputs = make_family_target(family), []
    target.__dict__.pop("reads_length", None)
    with fast.force_paths(*paths):
        lean = target.reads_length
    if not lean:
        target.__dict__.pop("reads_length", None)
        assert str(family) in CANNOT or must_mask(target)
        return
    torch.manual_seed(0)
    tree = random_trees(torch.default_generator, 2, 4, 50)
    text = torch.randint(0, target.vocab_size, (2, 9), device=target.device)
    for reads in (False, True):
        target.__dict__["reads_length"] = reads
        rows = target.cache(2)
        assert (rows.query_heads is None) != reads
        rows.reserve(9)
        mask = masks.pending_mask(masks.causal_mask(9, target.device), rows.lengths, rows.visible)
        with torch.no_grad(), fast.force_paths(*paths):
            target.read(text, (), positions=rows.slots, mask=mask, cache=rows)
            rows.commit(torch.tensor([9, 5]), [9, 5])
            verify = Verifier(target, sampling=Sampling(), rule="token", runner=Runner(), hidden_states=(1,))
            output = verify(tree, rows, rules.Draws(None)).output
        outputs.append(torch.cat([output.features, output.final], dim=-1))
    target.__dict__.pop("reads_length")
    exact = target.dtype == torch.float64
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-10 if exact else 1e-4, rtol=0 if exact else 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.refused], ids=str)
def test_pieces_of_families_against_a_mask(family):
    """Prompts of two lengths in three pieces. A family that cannot reads them under a mask."""
    target = make_family_target(family)
    reads = target.reads_pieces
    assert reads or str(family) in CANNOT_READ_PIECES or must_mask(target)
    results = [read_prompts(target, maskless) for maskless in (False, reads)]
    target.__dict__["reads_pieces"] = reads
    error = 1e-10 if target.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(results[1], results[0], atol=error, rtol=error)


def read_prompts(target, maskless: bool) -> list[torch.Tensor]:
    """The last states, features, K and V of two prompts, with or without masks."""
    target.__dict__["reads_pieces"] = maskless
    prefill = Prefill(target, (1,), prompts_of(target, 0, (9, 5)))
    with torch.no_grad():
        prefill.advance(6)
        assert prefill.num_read == (3 if target.divisible else 9)
        prefill.advance(6)
        prefill.advance()
    final, features = prefill.output()
    return [
        final,
        features[0, :9],
        features[1, :5],
        *(kept[:, :, :5] for kept in prefill.cache.keys_and_values if kept.dim() > 1),
    ]


@pytest.mark.parametrize(
    "head, shape, arguments",
    [
        (None, CHAIN, {}),
        ("eagle", TREE, {}),
        ("eagle3", CHAIN, {}),
        ("mtp", CHAIN, {}),
        ("peagle", CHAIN, {}),
        ("eagle", TREE, {"window": 7}),
        ("eagle3", CHAIN, {"window": 7, "num_layers": 2, "full_layers": [1]}),
        ("peagle", CHAIN, {"window": 7}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@PATHS
def test_decoding_gives_the_same_answers(head, shape, arguments, temperature, paths):
    target = make_target(6, num_layers=3)
    with fast.force_paths(*paths):
        drafter = head and make_drafter(target, head, True, arguments)
        lean = decoder_of(target, drafter, shape, compiled=False, temperature=temperature)
        answers = [
            lean.generate(prompts_of(target, seed), 24, generator=torch.Generator().manual_seed(1)) for seed in range(3)
        ]
        assert target.reads_length and target.cache(1).query_heads
        assert drafter is None or lean.proposer.cache.query_heads
    target.__dict__.pop("reads_length")
    plain = decoder_of(target, drafter, shape, compiled=False, temperature=temperature)
    for seed, answer in enumerate(answers):
        wanted = plain.generate(prompts_of(target, seed), 24, generator=torch.Generator().manual_seed(1))
        assert answer.tokens == wanted.tokens and answer.accepted == wanted.accepted


def test_memory_is_allocated_once_and_used_again(monkeypatch):
    """For prompt, answer and tree, of target and head. Later answers that are not longer have it, empty."""
    target = make_target(6, num_layers=3)
    with fast.force_paths("cache"):
        drafter = make_drafter(target, "eagle", True)
        decoder = decoder_of(target, drafter, TREE, compiled=False)
        places = []
        for seed, num in ((0, 260), (1, 250), (2, 20), (3, 260)):  # capacities are powers of two
            batch = decoder.batch()
            batch.admit([Request(prompt, num) for prompt in prompts_of(target, seed)])
            caches = batch.cache, decoder.proposer.cache
            before = list_addresses(caches)
            for each, pending in zip(caches, (9, 18)):
                assert 0 <= each.capacity - (9 + num + pending) < 512
            assert not any(half[:, :, 9:].any() for half in batch.cache.keys_and_values)
            while batch.running:
                batch.run_round()
                assert list_addresses(caches) == before
            batch.close()
            places.append(before)
        assert places[0] == places[1] == places[2] == places[3]
        plain = decoder_of(make_target(6, num_layers=3), None, compiled=False)
        prompts = prompts_of(target, 7)
        monkeypatch.setattr(cache, "count_free_bytes", lambda device: 10_000)  # too little for all at once: it grows
        decoder = decoder_of(target, drafter, TREE, compiled=False)
        batch = decoder.batch()
        batch.admit([Request(prompts[0], 400)])
        assert batch.cache.capacity == 256
        batch.close()
        assert decoder.generate(prompts, 30).tokens == plain.generate(prompts, 30).tokens
