"""Closed-form starts are ridge regressions, and each beats random weights. Weights in units of their inputs' sizes."""

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from specdec.core.cache import UnrollCache
from specdec.core.span_attention import find_spans
from specdec.heads.base import SizedLinear, Slots
from specdec.heads.blocks import RIDGE_SCALE
from specdec.heads.eagle import Eagle, Eagle3
from tests.support.drafters import load_head
from tests.support.targets import make_target


def solve_stacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Ridge regression as least squares with further rows: x [M, E], y [M, D] -> [E, D]"""
    strength = RIDGE_SCALE * (x**2).sum(0).mean()
    stacked = torch.cat([x, strength.sqrt() * torch.eye(x.shape[1]).double()])
    return torch.linalg.lstsq(stacked, nn.functional.pad(y, (0, 0, 0, x.shape[1]))).solution


def test_solve_against_stacked_least_squares(target):
    torch.manual_seed(0)
    head = Eagle(target).double()
    width, num = target.width, 300
    tokens = torch.randint(0, target.vocab_size, (num,))
    features, goals = torch.randn(num, width).double(), torch.randn(num, width).double()
    texts = (slice(0, 100), slice(100, num))
    assert head.solve([Slots(features[text], features[text], tokens[text, None], goals[text, None]) for text in texts])
    x = torch.cat([target.embed(tokens), features], dim=-1)  # [M, 2D]
    first = solve_stacked(x, goals)
    torch.testing.assert_close(head.fc.weight, first.T)
    mlp, h = head.block.mlp, x @ first
    normed = head.block.post_attention_layernorm(h)
    units = nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)  # [M, E]
    second = solve_stacked(units, goals - h)
    torch.testing.assert_close(mlp.down_proj.weight, second.T)
    seen = find_spans(torch.zeros(1, num, dtype=torch.long))
    state, _ = head.step(1, features[None], tokens[None], torch.arange(num)[None], seen, UnrollCache().at_step(1))
    torch.testing.assert_close(state[0], h + units @ second)


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_attention_starts_as_the_part_of_the_regression_that_fits_into_its_heads(name):
    """Against stacked least squares, over two texts; the MLP is solved onto what attention leaves."""
    torch.manual_seed(0)
    target, num = make_target(61), 300
    head = instantiate(load_head(name)["drafter"], target, vocab=None).double()
    tokens, features = torch.randint(61, (num,)), torch.randn(num, 32 * len(head.target_layers)).double()
    state, goals = torch.randn(2, num, 32).double()
    texts = (slice(0, 100), slice(100, num))
    assert head.solve([Slots(features[at], state[at], tokens[at, None], goals[at, None]) for at in texts])
    fused = features @ solve_stacked(features, state)
    torch.testing.assert_close(head.encode(features), fused)
    x = torch.cat([head.input_layernorm(head.embed(tokens)), head.hidden_norm(fused)], dim=-1)  # [M, 2D]
    residual = head.hidden_norm(fused) if head.norm_before_residual else fused
    outputs = x @ solve_stacked(x, goals - residual)
    attention, block = head.block.self_attn, head.block
    groups, width = head.config.num_key_value_heads, attention.head_dim
    _, _, directions = torch.linalg.svd(outputs, full_matrices=False)  # the largest first
    kept = directions[: groups * width]  # [rank, D]
    assert 0 < len(kept) < 32 and head.config.num_attention_heads > groups
    attended = attention.attend_self(x)
    torch.testing.assert_close(attended, outputs @ kept.T @ kept)
    h = residual + attended
    normed = block.post_attention_layernorm(h)
    units = nn.functional.silu(block.mlp.gate_proj(normed)) * block.mlp.up_proj(normed)
    torch.testing.assert_close(block.mlp.down_proj.weight, solve_stacked(units, goals - h).T)
    torch.testing.assert_close(head.norm.weight, state.square().mean().sqrt().expand(32), rtol=1e-6, atol=0)
    # A query is the key of the same embedding, so every position attends to itself
    keys, queries = (product.weight.unflatten(0, (-1, width)) for product in (attention.k_proj, attention.q_proj))
    assert torch.equal(queries, keys.repeat_interleave(len(queries) // groups, dim=0))
    assert keys[..., :32].all() and not keys[..., 32:].any()


SOLVED = {name: {} for name in ("eagle", "hass", "eagle3", "peagle", "hydra", "mtp")}
SOLVED |= {name: {"fuse": True} for name in ("dspark", "dflash")}
SCALES = {"eagle3": 0, "peagle": 0, "dspark": 0, "dflash": 0, "mtp": 1}  # distance to the states whose size it is


@torch.no_grad()
@pytest.mark.parametrize("name", SOLVED)
def test_a_closed_form_start_is_more_accurate_than_a_random_start(name):
    """The next state is linear in the token and the previous state, so a closed-form start drafts depth 1 correctly."""
    torch.manual_seed(0)
    target, num = make_target(61), 600
    tokens = torch.randint(61, (num, 3))
    state = torch.randn(num, 32).double()
    turn, move = torch.randn(2, 32, 32).double() / 32**0.5
    goals = [state]
    for d in range(3):
        goals.append(goals[-1] @ turn + 4 * target.embed(tokens[:, d]) @ move)
    choice = target.logits(goals[1]).argmax(-1)
    accuracies = []
    for solve in (False, True):
        drafter = instantiate(load_head(name)["drafter"] | SOLVED[name], target, vocab=None).double()
        features = state.repeat(1, len(drafter.target_layers))
        assert not solve or drafter.solve([Slots(features, state, tokens, torch.stack(goals[1:], dim=1))])
        cache = drafter.cache(num)
        h, position = drafter.encode(features[:, None]), torch.full((num, 1), 2)  # not the first slot of a text
        cache.reserve(1)
        drafter.context(h, position - 1, cache)
        seen = torch.zeros(num, 1, 1, cache.visible, dtype=torch.bool)
        seen[..., 0] = True
        _, readout = drafter.step(1, h, tokens[:, :1], position, seen, cache)
        accuracies.append(float((drafter.logits(1, readout)[:, 0].argmax(-1) == choice).double().mean()))
    assert accuracies[0] < 0.3 and accuracies[1] > (0.4 if isinstance(drafter, Eagle3) else 0.85), accuracies
    if name in SCALES:  # the last norm gives states this size
        size, expected = (value.pow(2).mean().sqrt() for value in (readout[..., :32], goals[SCALES[name]]))
        torch.testing.assert_close(size, expected, rtol=1e-3, atol=0)
    if isinstance(drafter, Eagle3):  # heads of a group share orthonormal directions, so outputs are as long as values
        attention, x = drafter.block.self_attn, torch.randn(9, 64).double()
        outputs, values = attention.attend_self(x), attention.v_proj(x)
        torch.testing.assert_close(outputs.norm(dim=-1), values.norm(dim=-1))


# Weights in units of the sizes of their inputs: the same map, other steps


def test_measuring_and_folding_do_not_change_the_map():
    torch.manual_seed(0)
    x = torch.randn(64, 4).double() * torch.tensor([0.01, 1.0, 2.0, 5000.0])
    linear = SizedLinear(4, 3, bias=True).double()
    before = linear(x)
    linear.measure_inputs([x[:20], x[20:]], random_weights=False)
    torch.testing.assert_close(linear.size, x.pow(2).mean(0).sqrt(), check_dtype=False)
    torch.testing.assert_close(linear(x), before)
    assert "size" in linear.state_dict()
    linear.fold()
    torch.testing.assert_close(linear(x), before)
    plain, again = nn.Linear(4, 3).double(), SizedLinear(4, 3, bias=True).double()
    again.measure_inputs([x], random_weights=True)
    for module in (plain, again):  # the weights are without sizes
        module.load_state_dict(linear.state_dict())
        torch.testing.assert_close(module(x), before)


def test_a_head_is_saved_and_decoded_with_ordinary_weights():
    head = Eagle3(make_target(61)).double()
    torch.manual_seed(0)
    features = torch.randn(1, 9, head.fc.in_features).double() * torch.logspace(-2, 3, head.fc.in_features).double()
    head.fc.measure_inputs([features[0]], random_weights=True)
    frozen = head.frozen_copy()
    assert "fc.size" in head.state_dict() and "fc.size" not in frozen.state_dict()
    torch.testing.assert_close(frozen.encode(features), head.encode(features))
    torch.testing.assert_close(nn.functional.linear(features, frozen.fc.weight), head.encode(features))
