"""LiLiCorr against loops over its published equations (tests/support/reference.py)."""

import pytest
import torch

from specdec.experiments.lilicorr import part as lilicorr
from specdec.heads.dependence import DraftedBlock, DrafterSizes, make_dependence
from tests.specdec.heads.test_heads import select_goals, unroll_row
from tests.support import reference
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.loops import follow
from tests.support.targets import make_target

TOP, SLOT, LENGTH = 4, 5, 24
CLOSE = {"atol": 1e-5, "rtol": 0}  # norms are computed in float32


@pytest.fixture(scope="module", params=[(24, False), (24, True), (None, False)], ids=str)
def drafter(request):
    hidden, reduced = request.param
    part = {"kind": "lilicorr", "top": TOP, "hidden": hidden, "factor": 12, "num_heads": 2, "logit_scale": 3.0}
    return make_drafter(make_target(61), "lilicorr", reduced, {"dependence": part, "num_drafts": 3})


@pytest.fixture(scope="module")
def text(drafter):
    tokens = torch.tensor(random_tokens(0, LENGTH, 61))
    return tokens, drafter.target.read(tokens[None], drafter.target_layers).features[0]


@pytest.fixture(scope="module")
def read_scores(drafter, text):
    """read_scores(tokens, slot) -> logits [3, vocab_size] of the block there, as tests/support/reference.py has them"""
    part, target = drafter.dependence, drafter.target
    tensors = {f"lilicorr.{name}": value for name, value in part.state_dict().items()}
    config = {"block_size": 4, "lilicorr_candidate_topk": TOP, "lilicorr_num_heads": 2, "lilicorr_num_layers": 2,
              "lilicorr_vector_eps": part.vector_eps, "lilicorr_logit_scale": 3.0,
              "rms_norm_eps": part.sizes.eps}  # fmt: skip
    embed = target.embed.weight[drafter.to_target(torch.arange(drafter.vocab_size))]

    @torch.no_grad()
    def read(tokens, slot):
        states, _ = follow(drafter, tokens, text[1], slot, 1)
        states = states[0][: 3 * target.width].view(3, target.width)
        before, context = tokens[slot : slot + 3], drafter.encode(text[1][slot - 1])
        before = before if drafter.target_to_draft is None else drafter.target_to_draft[before]
        logits = states @ drafter.goal_head[0].T
        return reference.lilicorr(tensors, config, logits, states, context, before, embed)

    return read


@pytest.mark.parametrize("path", [(0, 0), (1, 3), (3, 2), (None, 1), (2, None)])
def test_logits_against_loops(drafter, text, read_scores, path):
    """Along candidates by number, and along tokens that are none (None), behind which all scores are zero."""
    tokens, features = text[0].clone(), text[1]
    for step, number in enumerate(path):
        candidates = read_scores(tokens, SLOT)[step].isfinite()
        chosen = (~candidates).nonzero()[0] if number is None else candidates.nonzero()[number]
        tokens[SLOT + 1 + step] = drafter.to_target(chosen)
    _, logits = follow(drafter, tokens, features, SLOT, 3)
    expected = read_scores(tokens, SLOT)
    torch.testing.assert_close(torch.stack(logits), expected, **CLOSE)
    for step, number in enumerate(path):
        behind = expected[step + 1]
        assert (behind[behind.isfinite()] == 0).all() == (number is None) and behind.isfinite().sum() == TOP


def test_loss_against_a_loop(drafter, text, read_scores):
    """Cross-entropy where the tokens so far, and the one to guess, are candidates; else zero."""
    tokens, features = text[0].clone(), text[1]
    for slot in range(2, LENGTH - 3, 4):  # texts of candidates, some of them longer than others
        for step in range(slot % 3 + 1):
            tokens[slot + 1 + step] = drafter.to_target(read_scores(tokens, slot)[step].isfinite().nonzero()[step])
    unrolled, positions = unroll_row(drafter, tokens, features), []
    for slot in range(1, LENGTH - 3):
        scores, forced = read_scores(tokens, slot), True
        for d in range(1, 4):
            goal = int(tokens[slot + d])
            readout, _ = select_goals(unrolled, unrolled.readouts, d, [slot + d])
            draft = goal if drafter.target_to_draft is None else int(drafter.target_to_draft[goal])
            loss_logits = drafter.loss_logits(d, readout)
            loss = drafter.candidate_loss(readout, loss_logits, torch.tensor([draft])).item()
            forced = forced and draft >= 0 and bool(scores[d - 1, draft].isfinite())
            expected = -float(scores[d - 1].log_softmax(0)[draft]) if forced else 0.0
            assert loss == pytest.approx(expected, abs=1e-5), (slot, d)
            positions.append((d, forced))
    assert {(1, True), (2, True), (3, True), (1, False), (2, False), (3, False)} <= set(positions)


def test_log_probabilities_train_the_states(drafter, monkeypatch):
    """The gradient is that of plain autograd, although logits are made again; without it the states learn less."""
    torch.manual_seed(0)
    states = torch.randn(1, 5, 3, 32).double().requires_grad_()
    tokens = torch.zeros(1, 5, dtype=torch.long)
    embed, to_target = drafter.target.embed, drafter.to_target
    block = DraftedBlock(
        states.detach()[:, :, 0], states, tokens, drafter.unary, lambda ids: embed(to_target(ids)), to_target
    )

    def gradient(run=lilicorr.checkpoint):
        monkeypatch.setattr(lilicorr, "checkpoint", run)
        carried = drafter.dependence.first_carried(block)
        scores = carried[..., 9 * TOP :]  # behind ids, logits and target ids of 3 positions
        return torch.autograd.grad(scores.square().sum(), states)[0]

    direct = gradient()
    plain = gradient(lambda function, *inputs, **_: function(*inputs))
    torch.testing.assert_close(direct, plain, atol=1e-12, rtol=1e-9)
    detached = gradient(lambda function, *inputs, **_: [value.detach() for value in function(*inputs)])
    assert not torch.allclose(direct, detached, atol=1e-6)


BAD = [("top", 6), ("top", 32), ("num_heads", 5), ("vector_eps", 0.5), ("logit_scale", 0), ("factor", 0)]
BAD += [("mlp_ratio", 0.001)]


@pytest.mark.parametrize("name, value", BAD)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=rf"dependence.*{name}.*\.$"):
        make_dependence(DrafterSizes(32, 61, 61, 3, 1e-6), {"kind": "lilicorr", name: value})
