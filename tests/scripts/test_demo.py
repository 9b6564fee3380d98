"""Tests of scripts/demo.py: how much it trains and decodes follows from the speed of the machine."""

import pytest

from scripts import demo
from scripts.demo import Speed

FAST = Speed(read=0.2, step=0.35, token=0.04)  # two cores with bfloat16 units
SLOW = Speed(read=0.6, step=1.0, token=0.12)
SLOWEST = Speed(read=7, step=14, token=0.2)


def test_a_fast_machine_trains_and_compares_all():
    plan = demo.make_plan(FAST, 15)
    assert plan.whole and (plan.steps, plan.prompts) == (1000, 8)
    assert "That is less" not in demo.describe(plan, FAST)


@pytest.mark.parametrize("minutes", [8, 15, 60])
def test_a_slow_machine_takes_less_within_the_minutes_and_says_so(minutes):
    plan = demo.make_plan(SLOW, minutes)
    assert plan.training + plan.comparing <= minutes * 60
    assert plan.training <= demo.SHARE * minutes * 60
    assert ("That is less than the 1,000 steps and 8 prompts" in demo.describe(plan, SLOW)) == (not plan.whole)
    assert f"{plan.steps:,} steps" in demo.describe(plan, SLOW)


def test_there_is_a_least_that_is_shown_with_its_time():
    plan = demo.make_plan(SLOWEST, 15)
    assert (plan.steps, plan.prompts) == (demo.FEWEST_STEPS, demo.FEWEST_PROMPTS)
    assert f"about {plan.training / 60:.0f} minutes" in demo.describe(plan, SLOWEST)


def test_the_plan_counts_what_the_target_reads_once():
    few, many = (demo._training(SLOW, steps) for steps in (100, 1000))
    assert many - few == pytest.approx(900 * SLOW.step + (demo.PACKS - demo.SOLVED) * SLOW.read)


def test_a_run_goes_on_with_the_steps_that_it_was_begun_with(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "checkpoints/demo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 350}\n")
    called = []
    opened = type("Opened", (), {"target": None, "tokenizer": None})
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo.loading, "load_target", lambda options: opened)
    monkeypatch.setattr(demo.data, "load_prompts", lambda *_, **__: [type("Prompt", (), {"tokens": [1]})])
    monkeypatch.setattr(demo, "measure", lambda target, prompt: FAST)
    monkeypatch.setattr(demo, "train", lambda steps: called.append(steps) or 0)
    monkeypatch.setattr(demo, "compare", lambda prompts: called.append(prompts) or 0)
    monkeypatch.setattr(demo, "options", lambda *_: demo.Demo())
    for finished, wanted in ((False, [350, 8]), (True, [5])):
        if finished:
            (folder / "finished").write_text("350\n")
            (folder / "comparison").mkdir()
            (folder / "comparison/settings.json").write_text('{"num_prompts": 5}')
        called.clear()
        with pytest.raises(SystemExit) as ended:
            demo.main()
        assert ended.value.code == 0 and called == wanted
    assert "350 steps" in capsys.readouterr().out
