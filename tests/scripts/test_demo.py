"""Tests of scripts/demo.py: how much it decodes depends on the machine, how much it trains on train.py."""

from types import SimpleNamespace

import pytest

from scripts import demo


def test_the_comparison_fits_into_its_part_of_the_minutes():
    assert demo.choose_prompts(0.04, 10)[0] == demo.MAX_PROMPTS
    num, seconds = demo.choose_prompts(0.2, 10)
    assert demo.MIN_PROMPTS <= num < demo.MAX_PROMPTS and seconds == num * demo.METHODS * demo.NEW_TOKENS * 0.2
    assert demo.choose_prompts(9.0, 10)[0] == demo.MIN_PROMPTS


def test_a_run_goes_on_with_the_sizes_that_it_was_begun_with(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "checkpoints/demo"
    (folder / "comparison").mkdir(parents=True)
    calls = []
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo.loading, "load_target", lambda options: SimpleNamespace(target=None, tokenizer=None))
    monkeypatch.setattr(demo.data, "load_prompts", lambda *_, **__: [SimpleNamespace(tokens=[1])])
    monkeypatch.setattr(demo, "measure_token_seconds", lambda target, prompt: 0.04)
    monkeypatch.setattr(demo, "run_script", lambda file, *arguments: calls.append((file, [*arguments])) or 0)

    def run(limit: int) -> None:
        calls.clear()
        with pytest.raises(SystemExit) as ended:
            demo.main(["minutes=20"])
        assert ended.value.code == 0 and calls[-1][0] == "scripts/evaluate.py" and f"limit={limit}" in calls[-1][1]

    run(limit=8)
    assert calls[0] == ("train.py", ["head=eagle3", "run=demo", "resume=true", "train.hours=0.2000"])
    (folder / "finished").write_text("350\n")
    (folder / "comparison/settings.json").write_text('{"num_questions": 5}')
    run(limit=5)
    assert len(calls) == 1 and "at most 12 minutes of steps" in capsys.readouterr().out
