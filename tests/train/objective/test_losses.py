"""Tests of losses and survival: gradients by finite differences, values by hand and by enumeration of outcomes."""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from train.objective import losses
from train.objective.losses import LOSSES, Goals, LossSlots

LOSSES = {
    name: loss for name, loss in LOSSES.items() if name != "candidates"
}  # tests/train/objective/test_objective.py has that
SLOT_FUNCTIONS = {**LOSSES, "overlap": losses.overlap, "probability": losses.probability}
DIVERGENCES = ("kl", "reverse_kl", "jsd", "tv")


def make_slots(
    logits: Tensor,  # [M, W]
    goal_logits: Tensor,  # [M, V], of which the first W are the draft vocabulary
    *,
    token: Tensor | None = None,
    state: Tensor | None = None,
    goal_state: Tensor | None = None,
    confidence: Tensor | None = None,
) -> LossSlots:
    num, width = logits.shape
    nothing = torch.zeros(num, 1, dtype=logits.dtype)
    goal = Goals(
        state=nothing if goal_state is None else goal_state,
        logits=goal_logits[:, :width],
        token_ids=torch.zeros(num, dtype=torch.long) if token is None else token,
        log_norm=goal_logits.logsumexp(-1),
    )
    return LossSlots(goal, logits, state=nothing if state is None else state, confidence_logits=confidence)


def randn(seed: int, *shape: int, draw=torch.randn) -> Tensor:
    return draw(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


rand = functools.partial(randn, draw=torch.rand)


def make_slots_by_hand(*, token: int = 0, confidence: Tensor | None = None) -> LossSlots:
    """A draft vocabulary of three of four tokens: q = (1/2, 1/4, 1/4), p = (0.2, 0.1, 0.3) there and 0.4 outside."""
    guess = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    goal = torch.tensor([[0.2, 0.1, 0.3, 0.4]], dtype=torch.float64)
    return make_slots(guess.log() + 3, goal.log() - 2, token=torch.tensor([token]), confidence=confidence)


# One slot


@pytest.mark.parametrize("width", [12, 7])
@pytest.mark.parametrize("name", SLOT_FUNCTIONS)
def test_gradients_against_finite_differences(name, width):
    num, vocab_size = 5, 12
    inputs = [randn(0, num, width), randn(1, num, 4), randn(2, num)]
    goal_logits, goal_state = randn(3, num, vocab_size), 2 * randn(4, num, 4)
    token = torch.tensor([0, 3, -1, 6, 2])

    def function(logits, state, confidence):
        slots = make_slots(logits, goal_logits, token=token, state=state, goal_state=goal_state, confidence=confidence)
        return SLOT_FUNCTIONS[name](slots)

    trained = {"smooth_l1": 1, "confidence": 2}.get(name, 0)
    for number, value in enumerate(inputs):
        value.requires_grad_(number == trained)
    values = function(*inputs)
    assert values.shape == (num,) and values.dtype == torch.float64
    assert torch.autograd.grad(values.sum(), inputs[trained])[0].abs().max() > 0.01
    assert gradcheck(function, inputs)


def test_values_by_hand():
    slots = make_slots_by_hand(token=2, confidence=torch.tensor([0.3], dtype=torch.float64))
    p, q = (1 / 3, 1 / 6, 1 / 2), (1 / 2, 1 / 4, 1 / 4)  # p renormalised on the draft vocabulary
    kl = lambda first, second: sum(a * math.log(a / b) for a, b in zip(first, second))
    mean = [(a + b) / 2 for a, b in zip(p, q)]
    overlap, confidence = 0.2 + 0.1 + 0.25, 1 / (1 + math.exp(-0.3))
    expected = {
        "kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": (kl(p, mean) + kl(q, mean)) / 2,
        "tv": 1 - overlap,
        "nla": -math.log(overlap),
        "ce": math.log(4),
        "top_k": 0.2 * math.log(2) + (0.1 + 0.3) * math.log(4),  # fewer than ten tokens: all of them
        "smooth_l1": 0.0,
        "confidence": -overlap * math.log(confidence) - (1 - overlap) * math.log(1 - confidence),
        "overlap": overlap,
        "probability": 0.25,
    }
    assert {name: SLOT_FUNCTIONS[name](slots).item() for name in SLOT_FUNCTIONS} == pytest.approx(expected, abs=1e-12)


def test_divergences_of_equal_distributions_are_zero():
    logits = randn(0, 6, 9)
    same_slots = make_slots(logits, logits + 5)
    for name in DIVERGENCES:
        torch.testing.assert_close(LOSSES[name](same_slots), torch.zeros(6).double(), atol=1e-12, rtol=0)
        assert (LOSSES[name](make_slots(logits, randn(1, 6, 9))) > 0.01).all()


def test_overlap_is_one_minus_tv():
    slots = make_slots(randn(0, 6, 7), randn(1, 6, 9))
    torch.testing.assert_close(losses.tv(slots) + losses.overlap(slots), torch.ones(6).double())
    torch.testing.assert_close(losses.nla(slots), -(1 - losses.tv(slots)).log())
    full = make_slots(randn(0, 6, 9), randn(1, 6, 9))
    distance = (full.logits.softmax(-1) - full.goals.logits.softmax(-1)).abs().sum(-1) / 2
    torch.testing.assert_close(losses.tv(full), distance)


@pytest.mark.parametrize("width", [9, 6])
def test_gradient_of_tv(width):
    """q / 2 * (s - E_q[s]) with s = sign(q - p): docs/methods.md, section 3."""
    logits, goal_logits = randn(0, 6, width).requires_grad_(), randn(1, 6, 9)
    (gradient,) = torch.autograd.grad(losses.tv(make_slots(logits, goal_logits)).sum(), logits)
    q, p = logits.detach().softmax(-1), goal_logits.softmax(-1)[:, :width]
    sign = (q - p).sign()
    torch.testing.assert_close(gradient, q / 2 * (sign - (q * sign).sum(-1, keepdim=True)))


def test_top_k_uses_the_ten_most_probable_tokens():
    slots = make_slots(randn(0, 3, 14), randn(1, 3, 20))
    p, log_q = randn(1, 3, 20).softmax(-1), slots.logits.log_softmax(-1)
    for row, loss in enumerate(losses.top_k(slots).tolist()):
        best = sorted(range(14), key=lambda token: float(p[row, token]))[-10:]
        assert loss == pytest.approx(-sum(float(p[row, v] * log_q[row, v]) for v in best))


def test_nla_is_clamped():
    goal = torch.tensor([[0.0, 30.0]]).double()
    assert losses.nla(make_slots(-goal, goal)).item() == pytest.approx(-math.log(1e-5))


def test_confidence_has_no_gradient_to_the_logits():
    logits, confidence = randn(0, 3, 9).requires_grad_(), randn(1, 3).requires_grad_()
    losses.confidence(make_slots(logits, randn(2, 3, 9), confidence=confidence)).sum().backward()
    assert logits.grad is None and confidence.grad.abs().max() > 0


def test_token_outside_the_draft_vocabulary():
    logits = randn(0, 2, 5).requires_grad_()
    for function in (losses.ce, losses.probability):
        slots = make_slots(logits, randn(1, 2, 9), token=torch.tensor([-1, -1]))
        assert function(slots).tolist() == [0, 0]
        (gradient,) = torch.autograd.grad(function(slots).sum(), logits)
        assert gradient.tolist() == [[0] * 5] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SLOT_FUNCTIONS)
def test_extreme_logits_give_finite_losses_and_gradients(name, dtype):
    """No inf or nan for one-hot distributions, those that underflow, and a draft vocabulary without any mass of the target."""
    one_hot = torch.tensor([[0, -1e30, -1e30, -1e30], [-1e30, 0, -1e30, -1e30], [0, 0, 0, 0], [1e4, -1e4, 0, 1e4]])
    far = torch.tensor([[-1e4, -1e4, 0, 200], [0, -1e4, 0, 1e4], [-1e30, -1e30, -1e30, 0]])
    pairs = list(itertools.product(torch.cat([one_hot, far]).to(dtype), repeat=2))
    logits = torch.stack([pair[0] for pair in pairs])[:, :3].clone().requires_grad_()
    confidence = torch.linspace(-1e4, 1e4, len(pairs), dtype=dtype, requires_grad=True)
    for token in (-1, 0, 1, 2):
        slots = make_slots(
            logits,
            torch.stack([pair[1] for pair in pairs]),
            token=torch.full((len(pairs),), token),
            state=logits,
            goal_state=logits.detach() + 1e4,
            confidence=confidence,
        )
        values = SLOT_FUNCTIONS[name](slots)
        assert values.dtype == dtype and values.isfinite().all()
        for gradient in torch.autograd.grad(values.sum(), (logits, confidence), allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


def test_smooth_l1_of_half_precision_states():
    """States may be in half precision; the loss has the precision of the logits."""
    state, goal = randn(0, 4, 9), randn(1, 4, 9)
    slots = make_slots(torch.zeros(4, 3), torch.zeros(4, 3), state=state.bfloat16(), goal_state=goal.bfloat16())
    expected = losses.smooth_l1(make_slots(torch.zeros(4, 3), torch.zeros(4, 3), state=state, goal_state=goal))
    assert losses.smooth_l1(slots).dtype == torch.float32
    torch.testing.assert_close(losses.smooth_l1(slots), expected, atol=0.02, rtol=0)


# All depths of a slot


EXISTS = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 1, 0]]).bool()  # [K, S]


def test_gradients_of_survival():
    kl, overlap = rand(0, 3, 5).requires_grad_(), rand(1, 3, 5).requires_grad_()
    assert gradcheck(lambda kl: losses.lk(kl, overlap.detach(), EXISTS, eta=3.0), kl)
    assert gradcheck(lambda overlap: losses.e2e_tv(overlap, EXISTS), overlap)
    # lk detaches its share, which finite differences would vary, so this gradient is compared with its formula.
    (gradient,) = torch.autograd.grad(losses.lk(kl, overlap, EXISTS, eta=3.0).sum(), overlap)
    mean = (overlap.detach() * EXISTS).sum(1, keepdim=True) / EXISTS.sum(1, keepdim=True)
    torch.testing.assert_close(gradient, ((-3 * mean).exp() - 1) * EXISTS)
    # If all factors are zero, the first still has a gradient.
    zeros = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(losses.e2e_tv(zeros, EXISTS).sum(), zeros)
    torch.testing.assert_close(gradient[0], torch.tensor([-1, -1, -1, 0, 0]).double() / 3)
    assert not gradient[1:].any()


def test_lk_by_hand():
    kl = torch.tensor([[2.0, 4.0, 9.0], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    overlap = torch.tensor([[0.2, 0.6, 0.9], [0.5, 0.9, 0.9], [0.9, 0.9, 0.9]])
    exists = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    first_share, second_share = math.exp(-3 * 0.4), math.exp(-3 * 0.5)
    expected = [
        [first_share * 2 + (1 - first_share) * 0.8, first_share * 4 + (1 - first_share) * 0.4, 0],
        [second_share * 1 + (1 - second_share) * 0.5, 0, 0],
        [0] * 3,
    ]
    torch.testing.assert_close(losses.lk(kl, overlap, exists, eta=3.0), torch.tensor(expected))


def test_e2e_tv_by_hand():
    overlap = torch.tensor([[0.5, 0.5, 0.5, 9.0, 9.0], [0.4, 0.4, 9.0, 0.4, 9.0], [0.5, 9.0, 9.0, 0.5, 9.0]])
    expected = [1 - (0.5 + 0.2 + 0.1) / 3, 1 - (0.5 + 0.2) / 3, 1 - 0.5 / 3, 1, 0]
    torch.testing.assert_close(losses.e2e_tv(overlap, EXISTS), torch.tensor(expected))


def test_dpace_by_hand():
    probability = torch.tensor([[0.0, 1.0, 0.0, 9.0, 9.0], [0.5, 0.5, 9.0, 0.5, 9.0], [1.0, 9.0, 9.0, 0.0, 9.0]])
    # s = 1/2, 3/4, 1 | 1, 3/4, (1) | 1/2, (1), (1) | (1), 3/4, 1/2 | (1), (1), (1): entries in brackets are not counted
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


def test_vat_by_hand():
    matches = torch.tensor([[1, 0, 1, 0, 0], [1, 0, 0, 0, 1], [1, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool()
    exists = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 1]]).bool()
    expected = [[1, 1, 1, 0, 1], [1, 0.5, 1, 0, 0.5], [1, 0.25, 0.5, 0, 0], [1, 0.125, 0.25, 0, 0.125]]
    torch.testing.assert_close(losses.vat(matches, exists, decay=0.5), torch.tensor(expected))
    # A miss that is not counted is not a rejection
    late = losses.vat(torch.zeros(3, 1).bool(), torch.tensor([[0], [1], [1]]).bool(), decay=0.5)
    assert late.tolist() == [[0], [1], [0.5]]
