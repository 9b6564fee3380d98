"""Tests of optimizers, schedules, the average of the weights, and the record of gradient norms."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.drafters import VARIANTS, make_drafter, name_of
from tests.support.runs import log_of, report_of, weights_of
from train.loop.optimizer import OptimizerOptions, WeightAverage, list_hidden_matrices, make_optimizer, make_schedule
from train.loop.validate import Validation

USUAL = {"name": "adamw", "lr": 1.0, "muon_lr": None, "betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine",
         "warmup": 2, "decay": 0.25, "final": 0.1}  # fmt: skip


def settings(**changed) -> OptimizerOptions:
    return OptimizerOptions(**USUAL | changed)


class Small(nn.Module):
    """An embedding, a hidden matrix, a norm and an output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.fc = nn.Embedding(7, 80), nn.Linear(80, 64)
        self.norm, self.lm_head = nn.LayerNorm(64), nn.Linear(64, 7, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.norm(self.fc(self.embed(tokens))))


def rates(steps: int, **changed) -> list[float]:
    optimizer = make_optimizer(Small(), settings(**changed))
    scheduler = make_schedule(optimizer, settings(**changed), steps=steps)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_warm_up_and_follow_their_shapes():
    warm = pytest.approx([1 / 3, 2 / 3])
    shapes = {name: rates(10, schedule=name) for name in ("cosine", "wsd", "constant")}
    assert all(found[:2] == warm and found[2] == 1 for found in shapes.values())
    assert shapes["constant"][2:] == [1] * 8
    assert shapes["wsd"][2:9] == [1] * 7 and shapes["wsd"][9] == pytest.approx(1 - 0.9 * 0.5)  # 7 of 8 steps done
    assert shapes["cosine"][6] == pytest.approx(0.1 + 0.9 * 0.5) and shapes["cosine"] == sorted(
        shapes["cosine"][2:] + shapes["cosine"][:2], key=shapes["cosine"].index
    )
    assert rates(10, schedule="wsd", decay=1.0)[6] == pytest.approx(1 - 0.9 * 0.5)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_muon_trains_the_matrices_whose_rows_are_not_tokens(target, variant):
    drafter = make_drafter(target, *variant)
    hidden_ids = {id(matrix) for matrix in list_hidden_matrices(drafter)}
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        rows_are_tokens = parameter.shape[0] in (drafter.vocab_size, target.vocab_size)
        bias = name.endswith("_bias")  # LiLiCorr's, of distances
        hidden = parameter.dim() == 2 and not rows_are_tokens and parameter.shape[0] > 1 and not bias
        assert (id(parameter) in hidden_ids) == hidden, name
    groups = make_optimizer(drafter, settings(name="muon")).param_groups
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in trained.values())  # each once


def test_muon_moves_matrices_by_the_size_of_adamws_updates():
    module = Small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = make_optimizer(module, settings(name="muon", lr=1e-3, weight_decay=0.0, muon_lr=2e-3))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    after = dict(module.named_parameters())
    sizes = {name: float((after[name].detach() - old).square().mean().sqrt()) for name, old in before.items()}
    assert sizes["fc.weight"] == pytest.approx(0.2 * 2e-3, rel=0.3)  # the root mean square of most AdamW updates
    assert sizes["lm_head.weight"] == pytest.approx(1e-3, rel=1e-3)  # AdamW's first step


def test_a_missing_library_is_said(monkeypatch):
    monkeypatch.setattr("train.loop.optimizer.ADAMW8BIT", "no_such_library")
    with pytest.raises(ValueError, match=r"name=adamw8bit needs no_such_library .*pip install"):
        make_optimizer(Small(), settings(name="adamw8bit"))


def test_the_average_follows_the_weights_and_is_exchanged_for_them():
    module = nn.Linear(2, 1, bias=False)
    average = WeightAverage(module, decay=0.5)
    expected = module.weight.detach().clone()
    for step in range(1, 6):
        module.weight.data += 1.0
        average.update()
        kept = min(0.5, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * module.weight.detach()
    weights = module.weight.detach().clone()
    with average.swap_in():
        torch.testing.assert_close(module.weight.detach(), expected)
    assert torch.equal(module.weight, weights)
    restored = WeightAverage(nn.Linear(2, 1, bias=False), decay=0.5)
    restored.load_state_dict(average.state_dict())
    assert restored.updates == 5 and torch.equal(restored.values["weight"], average.values["weight"])


@pytest.mark.full
def test_clipping_is_in_the_log_alone(fit, capsys):
    fit("clipped", "train.max_grad_norm=1e-6", "train.log_every=2")
    printed = capsys.readouterr().out
    logged = [row for row in log_of("clipped") if "loss" in row]
    assert [line["step"] for line in logged] == [1, 2, 4] and all(line["clipped"] == 1 for line in logged)
    assert all(line["grad_norm"] > 1e-6 for line in logged) and "% clipped" not in printed


@pytest.mark.full
@pytest.mark.parametrize("better", ["plain", "average"])
def test_a_checkpoint_holds_the_better_of_weights_and_average(fit, monkeypatch, better):
    replay = Validation.replay

    def replay_candidates(self, frozen):  # candidates are judged in the order plain, average
        self.calls = [*getattr(self, "calls", []), frozen]
        wanted = ("plain", "average")[(len(self.calls) - 1) % 2] == better
        return [replace(each, replayed_accepted=[1.0 * wanted, 0.0]) for each in replay(self, frozen)]

    monkeypatch.setattr(Validation, "replay", replay_candidates)
    fit("both", "train.ema=0.9", "optimizer.lr=0.01")
    report = report_of("both")
    assert report["ema"]["kept"] == better and report["replayed_tau"] == report["ema"][better] > 1
    state, kept = weights_of("both", state=True), weights_of("both")
    prefix = {"plain": "", "average": "average:"}[better]
    trained = [name for name in kept if "average:" + name in state]
    for name in trained:  # while it is trained, fc has weights in units of its inputs' sizes
        size = state.get(name.replace("weight", "size"), torch.ones(()))
        torch.testing.assert_close(kept[name], state[prefix + name] / size)
    assert any(not torch.equal(state[name], state["average:" + name]) for name in trained)


@pytest.mark.full
def test_the_average_begins_with_the_solved_weights(fit):
    fit("begun", "head=eagle3", "train.ema=0.9", "solve_packs=2", "optimizer.lr=0", "train.steps=1")
    state = weights_of("begun", 1, state=True)
    trained = [name for name in state if "average:" + name in state]
    assert trained and all(torch.equal(state[name], state["average:" + name]) for name in trained)


@pytest.mark.full
@pytest.mark.parametrize("override", ["decode=tree", "head=medusa2", "validation.decode=always"])
def test_an_average_that_replay_cannot_judge_is_refused(fit, override):
    with pytest.raises(ValueError, match=r"train\.ema=0\.9 lets replay choose"):
        fit("refused", "train.ema=0.9", override)
