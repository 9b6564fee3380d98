"""Tests of scripts/demo.py: how much it trains and decodes follows from the speed of the machine."""

from types import SimpleNamespace

import pytest

from scripts import demo
from scripts.demo import Speed

FAST = Speed(read=0.2, token=0.04)  # two cores with bfloat16 units
SLOW = Speed(read=0.6, token=0.12)
SLOWEST = Speed(read=7, token=0.2)


def test_the_plan_fits_into_the_minutes_and_says_so():
    plan = demo.make_plan(FAST, 15)
    assert (plan.steps, plan.prompts) == (1000, 8) and "That is less" not in demo.describe(plan, FAST)
    for minutes in (8, 15, 60):
        plan = demo.make_plan(SLOW, minutes)
        assert plan.training + plan.comparing <= minutes * 60 and plan.training <= demo.SHARE * minutes * 60
        said = demo.describe(plan, SLOW)
        assert ("That is less than the 1,000 steps and 8 prompts" in said) == ((plan.steps, plan.prompts) != (1000, 8))
        assert f"{plan.steps:,} steps" in said
    plan = demo.make_plan(SLOWEST, 15)
    assert (plan.steps, plan.prompts) == (demo.FEWEST_STEPS, demo.FEWEST_PROMPTS)
    assert f"about {plan.training / 60:.0f} minutes" in demo.describe(plan, SLOWEST)
    read_once = (demo.PACKS - demo.SOLVED) * SLOW.read
    assert SLOW.training(1000) - SLOW.training(100) == pytest.approx(900 * demo.STEP * SLOW.read + read_once)


def test_a_run_goes_on_with_the_sizes_that_it_was_begun_with(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "checkpoints/demo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 350}\n")
    called = []
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo.loading, "load_target", lambda options: SimpleNamespace(target=None, tokenizer=None))
    monkeypatch.setattr(demo.data, "load_prompts", lambda *_, **__: [SimpleNamespace(tokens=[1])])
    monkeypatch.setattr(demo, "measure", lambda target, prompt: FAST)
    monkeypatch.setattr(demo, "run_command", lambda file, given: called.append((file, given)) or 0)
    for finished, files in ((False, ["train.py", "scripts/evaluate.py"]), (True, ["scripts/evaluate.py"])):
        if finished:
            (folder / "finished").write_text("350\n")
            (folder / "comparison").mkdir()
            (folder / "comparison/settings.json").write_text('{"num_prompts": 5}')
        called.clear()
        with pytest.raises(SystemExit) as ended:
            demo.main([])
        assert ended.value.code == 0 and [file for file, _ in called] == files
        assert called[-1][1]["limit"] == (5 if finished else 8)
    assert "350 steps" in capsys.readouterr().out
