"""Tests of losses: values and gradients against autograd of plain formulas; survival by hand."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from train.objective import losses
from train.objective.losses import LOSSES, Goals, LossSlots

TEMPERATURE = 1.7


@dataclass
class PlainSlot:
    """One slot, and the goal that it guesses, for the formulas below."""

    p: Tensor  # [W] the target's distribution over all tokens, on the draft vocabulary
    q: Tensor  # [W] the drafter's distribution
    index: int | None  # index of the text's token in the draft vocabulary; None: it has none
    state: Tensor | None = None  # [D] the drafter's estimate of the target's state
    goal_state: Tensor | None = None  # [D] the target's state
    confidence: Tensor | None = None  # scalar logit

    @property
    def list_p(self) -> Tensor:
        """p on the draft vocabulary alone."""
        return self.p / self.p.sum()

    @property
    def overlap(self) -> Tensor:
        return torch.minimum(self.p, self.q).sum()


def sum_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def sum_top_k(slot: PlainSlot) -> Tensor:
    best = sorted(range(len(slot.p)), key=lambda token: float(slot.p[token].detach()))[-10:]
    return -(slot.p[best] * slot.q[best].log()).sum()


def sum_smooth_l1(slot: PlainSlot) -> Tensor:
    distance = (slot.state - slot.goal_state).abs()
    return torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean()


def sum_confidence(slot: PlainSlot) -> Tensor:
    accepted, sure = slot.overlap.detach(), slot.confidence.sigmoid()
    return -accepted * sure.log() - (1 - accepted) * (1 - sure).log()


# docs/methods.md, section 3
FORMULAS = {
    "kl": lambda slot: sum_kl(slot.list_p, slot.q),
    "tv": lambda slot: 1 - slot.overlap,
    "ce": lambda slot: 0 * slot.q.sum() if slot.index is None else -slot.q[slot.index].log(),
    "top_k": sum_top_k,
    "smooth_l1": sum_smooth_l1,
    "confidence": sum_confidence,
}
FIGURES = {
    "overlap": lambda slot: slot.overlap,
    "probability": lambda slot: 0 * slot.q.sum() if slot.index is None else slot.q[slot.index],
}
FUNCTIONS = {**LOSSES, "overlap": losses.overlap, "probability": losses.probability}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_slots(logits: Tensor, goal_logits: Tensor, *, token_ids: Tensor, temperature: float = 1.0, **arguments):
    """logits [M, W], before the temperature; goal_logits [M, V], of which the first W are the draft vocabulary"""
    goal_logits = goal_logits / temperature
    goals = Goals(
        state=arguments.get("goal_state"),
        logits=goal_logits[:, : logits.shape[1]],
        token_ids=token_ids,
        log_norm=goal_logits.logsumexp(-1),
    )
    state, confidence = arguments.get("state"), arguments.get("confidence")
    return LossSlots(goals, logits, state, confidence, temperature=temperature)


def test_every_loss_has_a_formula():
    """`candidates` is the head's own; test_objective.py has its formula."""
    assert {*FORMULAS} == {*LOSSES} - {"candidates"}


@pytest.mark.parametrize("num_rows_at_a_time", [1, 10**6])  # a CPU works on the rows of KL in chunks
@pytest.mark.parametrize("width", [12, 15])  # a reduced draft vocabulary, and all tokens
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"candidates"}))
def test_values_and_gradients_are_those_of_the_formula(name, width, num_rows_at_a_time, monkeypatch):
    """At a temperature that is not 1."""
    monkeypatch.setattr(losses, "LOGITS_PER_CHUNK", width * num_rows_at_a_time)
    num, vocab_size = 5, 15
    logits, goal_logits = 2 * randn(0, num, width), 2 * randn(1, num, vocab_size)
    logits[4, 0], goal_logits[4, 1] = 60.0, 60.0
    inputs = [value.requires_grad_() for value in (logits, 2 * randn(2, num, 4), randn(3, num))]
    goal_state, token_ids = 2 * randn(4, num, 4), torch.tensor([0, 3, -1, 11, 2])
    states = {"state": inputs[1], "goal_state": goal_state, "confidence": inputs[2]}
    slots = make_slots(logits, goal_logits, token_ids=token_ids, temperature=TEMPERATURE, **states)
    p, q = (goal_logits / TEMPERATURE).softmax(-1)[:, :width], (logits / TEMPERATURE).softmax(-1)
    indices = [None if token < 0 else token for token in token_ids.tolist()]
    plain = [PlainSlot(*values) for values in zip(p, q, indices, inputs[1], goal_state, inputs[2])]
    expected = torch.stack([(FORMULAS | FIGURES)[name](slot) for slot in plain])
    values, upstream = FUNCTIONS[name](slots), randn(5, num)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-10)
    results = []
    for function in (values, expected):
        grads = torch.autograd.grad(function, inputs, upstream, allow_unused=True, materialize_grads=True)
        results.append(grads)
    assert max(grad.abs().max() for grad in results[0]) > 1e-3
    for grad, expected_grad in zip(*results):
        torch.testing.assert_close(grad, expected_grad, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"candidates"}))
def test_extreme_logits_give_finite_losses_and_gradients(name, dtype):
    """No inf or nan for one-hot laws, those that underflow, and a draft vocabulary without any mass of the target."""
    one_hot = torch.tensor([[0, -1e30, -1e30, -1e30], [-1e30, 0, -1e30, -1e30], [0, 0, 0, 0], [1e4, -1e4, 0, 1e4]])
    far = torch.tensor([[-1e4, -1e4, 0, 200], [0, -1e4, 0, 1e4], [-1e30, -1e30, -1e30, 0]])
    pairs = list(itertools.product(torch.cat([one_hot, far]).to(dtype), repeat=2))
    logits = torch.stack([pair[0] for pair in pairs])[:, :3].clone().requires_grad_()
    confidence = torch.linspace(-1e4, 1e4, len(pairs), dtype=dtype, requires_grad=True)
    for token in (-1, 0, 1, 2):
        slots = make_slots(
            logits,
            torch.stack([pair[1] for pair in pairs]),
            token_ids=torch.full((len(pairs),), token),
            state=logits,
            goal_state=logits.detach() + 1e4,
            confidence=confidence,
        )
        values = FUNCTIONS[name](slots)
        assert values.dtype == dtype and values.isfinite().all()
        for gradient in torch.autograd.grad(values.sum(), (logits, confidence), allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


def test_smooth_l1_of_half_precision_states():
    """States may be in half precision; the loss has the precision of the logits."""
    logits, states, results = torch.zeros(4, 3), randn(0, 2, 4, 9), []
    for state, goal_state in (states, states.bfloat16()):
        slots = make_slots(logits, logits, token_ids=torch.zeros(4), state=state, goal_state=goal_state)
        results.append(losses.smooth_l1(slots))
    assert results[1].dtype == torch.float32
    torch.testing.assert_close(results[1], results[0], atol=0.02, rtol=0)


# All depths of a slot


EXISTS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 1, 0]]).bool()  # [K, S]


def test_dpace_by_hand():
    probability = torch.tensor([[0.0, 1.0, 0.0, 9.0, 9.0], [0.5, 0.5, 9.0, 0.5, 9.0], [1.0, 9.0, 9.0, 0.0, 9.0]])
    # s = 1/2, 3/4, 1 | 1, 3/4, (1) | 1/2, (1), (1) | (1), 3/4, 1/2 | (1), (1), (1): entries in brackets do not exist
    expected = [
        [0.5 + 0.375 + 0.375, 1 + 0.75 + 0.75, 0.5 + 0.5 + 0.5, 0, 0],
        [0.375 + 0.375, 0.75 + 0.75, 0, 0.75 + 0.375, 0],
        [0.375, 0, 0, 0.375, 0],
    ]
    weights = losses.dpace(probability.requires_grad_(), EXISTS)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(expected))
    flat = losses.dpace(probability, torch.ones(3, 5).bool(), smoothing=1.0)
    assert flat.tolist() == [[3] * 5, [2] * 5, [1] * 5]
