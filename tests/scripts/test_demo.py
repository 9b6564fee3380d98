"""Tests of scripts/demo.py: how much it decodes follows from the speed of the machine, how much it trains from that of train.py."""

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
    folder.mkdir(parents=True)
    called = []
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo.loading, "load_target", lambda options: SimpleNamespace(target=None, tokenizer=None))
    monkeypatch.setattr(demo.data, "load_prompts", lambda *_, **__: [SimpleNamespace(tokens=[1])])
    monkeypatch.setattr(demo, "measure_token_seconds", lambda target, prompt: 0.04)
    monkeypatch.setattr(demo, "run_script", lambda file, *given: called.append((file, [*given])) or 0)
    for finished, files in ((False, ["train.py", "scripts/evaluate.py"]), (True, ["scripts/evaluate.py"])):
        if finished:
            (folder / "finished").write_text("350\n")
            (folder / "comparison").mkdir()
            (folder / "comparison/settings.json").write_text('{"num_questions": 5}')
        called.clear()
        with pytest.raises(SystemExit) as ended:
            demo.main(["minutes=20"])
        assert ended.value.code == 0 and [file for file, _ in called] == files
        assert f"limit={5 if finished else 8}" in called[-1][1]
        if not finished:
            assert called[0][1] == ["head=eagle3", "run=demo", "resume=true", "train.hours=0.2000"]
    assert "at most 12 minutes of steps" in capsys.readouterr().out
