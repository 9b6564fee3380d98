"""The target's distribution against the logits processors of transformers, and the penalty's context against a loop."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core import rules
from specdec.core.sampling import NO_TOKEN, RowSampling, Sampling, mark_seen
from specdec.core.tree import make_chain
from tests.support.decoding import random_tree

V = 40


def random_logits(dtype, *shape: int, ties: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return logits.round() if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, V, 2 * V])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_law_equals_that_of_transformers(temperature, top_k, top_p, dtype, ties):
    logits = random_logits(dtype, 50, ties=ties)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    sampling = Sampling(temperature, top_k=top_k, top_p=top_p)
    distribution = sampling.distribution(logits)
    expected = scores.softmax(-1)
    if ties and top_p is not None:  # which of equal logits an unstable sort puts last is not defined
        torch.testing.assert_close(distribution.sort(-1).values, expected.sort(-1).values, rtol=1e-6, atol=0)
    else:
        assert torch.equal(distribution, expected)
    assert distribution.dtype == dtype
    assert torch.equal(sampling.distribution(logits.view(5, 10, V)), distribution.view(5, 10, V))


def full_sort(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """The distribution by a sort of all tokens. Of equal logits at the boundary the highest token ids are kept."""
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.sort(-1).values[:, -top_k, None], -torch.inf)
    ascending, order = logits.sort(dim=-1, stable=True)
    kept = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    kept[:, -1] = True
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ascending.masked_fill(~kept, -torch.inf)).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [None, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["peaked", "usual", "flat", "equal", "ties", "bfloat16", "forbidden"])
def test_top_p_of_many_tokens_keeps_what_a_sort_of_all_of_them_keeps(kind, top_p, top_k, dtype):
    """Few tokens are sorted in place of all, which no peaked or flat distribution and no equal logits may show."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(12, 20_000, generator=generator, dtype=dtype)
    logits = {
        "peaked": lambda: 12 * noise,
        "usual": lambda: 2.5 * noise,
        "flat": lambda: 0.01 * noise,
        "equal": lambda: torch.zeros_like(noise),
        "ties": lambda: (2.5 * noise).round(),
        "bfloat16": lambda: (2.5 * noise).bfloat16().to(dtype),
        "forbidden": lambda: noise.masked_fill(noise < 1, -torch.inf),
    }[kind]()
    distribution = Sampling(1.0, top_k=top_k, top_p=top_p).distribution(logits)
    expected = full_sort(logits, top_k, top_p)
    assert torch.equal(distribution > 0, expected > 0)
    assert torch.equal(distribution, expected)


def test_law_of_bfloat16_logits_is_computed_in_float32():
    logits, sampling = random_logits(torch.bfloat16, 4), Sampling(0.7, top_p=0.9)
    assert torch.equal(sampling.distribution(logits), sampling.distribution(logits.float()))


@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.5])
def test_penalty_equals_that_of_transformers(penalty):
    """At every node of a tree, the context is the prompt and the path from the root to the node."""
    generator = torch.Generator().manual_seed(0)
    tree, logits = random_tree(generator, 12, V), random_logits(torch.float32, 1, 12)
    prompt = [3, 17, 3]
    committed = torch.zeros(1, V, dtype=torch.bool)
    committed[0, prompt] = True
    context = mark_seen(tree, committed)  # [1, N, V]
    penalised = Sampling(1.0, repetition_penalty=penalty).penalise(logits, context)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    paths = {-1: prompt}
    for node in range(12):
        paths[node] = [*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])]
        assert set(context[0, node].nonzero()[:, 0].tolist()) == set(paths[node])
        assert torch.equal(penalised[:, node], processor(torch.tensor([paths[node]]), logits[:, node]))
    assert committed.sum() == 2  # unchanged


NAN, INFINITY = math.nan, math.inf
OUT_OF_RANGE = [("temperature", wrong) for wrong in (-0.1, -1e-45, NAN, INFINITY)] + [("top_k", 0)]
OUT_OF_RANGE += [("top_p", 0.0), ("top_p", 1.1)] + [("repetition_penalty", wrong) for wrong in (0.0, NAN, INFINITY)]


@pytest.mark.parametrize("name, wrong", OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(name, wrong):
    with pytest.raises(ValueError, match=f"^{name}={wrong} must be "):
        Sampling(**{name: wrong})
    assert Sampling(temperature=0.0, top_k=1, top_p=1.0, repetition_penalty=0.5).top_p == 1.0


def test_no_value_is_read_from_the_device():
    """Tensors of the meta device hold no values, so reading a value raises an error."""
    tokens = torch.empty(2, 4, dtype=torch.long, device="meta")
    sampling = Sampling(0.7, top_k=3, top_p=0.9, repetition_penalty=1.2)
    context = mark_seen(make_chain(tokens, None), torch.empty(2, V, dtype=torch.bool, device="meta"))
    assert sampling.distribution(sampling.penalise(torch.empty(2, 4, V, device="meta"), context)).shape == (2, 4, V)


@pytest.mark.parametrize("num", [V, 20_000])
def test_logits_that_are_not_numbers_give_such_a_law(num):
    assert Sampling(1.0, top_p=0.9).distribution(torch.full((2, num), torch.nan)).isnan().all()


TINY = [1e-45, 1e-38, 1e-36, 1e-30, 1e-12, 1e-5]


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
def test_tiny_temperatures_are_greedy(temperature, size):
    """Of two equal largest logits a distribution has both, where it is none of those that are greedy outright."""
    logits = size * random_logits(torch.float32, 4, 3)
    sampling = Sampling(temperature)
    assert sampling.greedy == (temperature < 1e-30)
    for settings in (sampling, RowSampling((sampling, Sampling(0.8), sampling, Sampling()))):
        if settings.greedy:
            continue
        distribution = settings.distribution(logits)
        assert distribution.isfinite().all() and torch.allclose(distribution.sum(-1), torch.ones(4, 3))
        assert torch.equal(distribution[::2].argmax(-1), logits[::2].argmax(-1))
        assert distribution[::2].max(-1).values.min() > 0.999
    if not sampling.greedy:
        tied = torch.tensor([2.0, 5.0, 5.0, -3.0]) * size
        assert sampling.distribution(tied).tolist() == [0, 0.5, 0.5, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), "one NaN", float("inf")])
def test_a_law_without_a_token_says_so_and_the_other_rows_have_theirs(bad):
    logits = random_logits(torch.float32, 3)
    logits[1] = logits[1].index_fill(0, torch.tensor([5]), torch.nan) if bad == "one NaN" else bad
    everywhere = torch.ones(3, dtype=torch.bool)
    by_row = [RowSampling((Sampling(0.8), Sampling(temperature), Sampling())) for temperature in (0.3, 0.0)]
    for sampling in (Sampling(0.8), Sampling(1e-20), *by_row):
        drawn = rules.Draws(torch.Generator().manual_seed(0)).token(sampling.distribution(logits), everywhere)
        assert drawn[1] == NO_TOKEN and (drawn[[0, 2]] >= 0).all() and (drawn < V).all()
