"""Tests of the help, of options in messages, and of the folder of a run."""

import re
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from specdec import checkpoint
from tests.support import ROOT
from train import display
from train.naming import named
from train.run_folder import RunFolder

FOLDER = {"spec": {}, "settings": {"optimizer.lr": 0.1, "head": "eagle"}}


def test_help_shows_every_option_and_its_comment():
    text = display.usage(ROOT / "conf")
    config = OmegaConf.load(ROOT / "conf" / "train.yaml")
    for key in config:
        if key not in ("defaults", "hydra"):
            assert re.search(rf"^{key}:", text, re.M), key
    for comment in ("# steps", "# continue the run in that folder", "# half-width, on features"):
        assert comment in text
    assert "job_logging" not in text and "\nhydra:" not in text and "head=consistency|dflash" in text


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("depth=5 is more than 4: lower depth=", "decode.depth=5 is more than 4: lower decode.depth="),
        ("other.depth=5 stays, and so does {lr=1}", "other.depth=5 stays, and so does {decode.lr=1}"),
        ("nodes=null and width=1", "decode.nodes=null and decode.width=1"),
        ("no option here", "no option here"),
    ],
)
def test_messages_name_the_option(message, wanted):
    with pytest.raises(ValueError) as caught, named("decode"):
        raise ValueError(message)
    assert str(caught.value) == wanted


def test_only_messages_of_value_errors_are_renamed():
    with pytest.raises(TypeError, match=r"^depth=5$"), named("decode"):
        raise TypeError("depth=5")


def save(folder: RunFolder, step: int) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    folder.save_state(step, weights={"weight": torch.arange(3.0)}, optimizer=optimizer, document={"seen": 7})


def test_a_state_is_read_back_and_only_the_newest_is_kept(tmp_path):
    folder = RunFolder(tmp_path, **FOLDER)
    assert folder.read_state() is None and folder.saved_step() == 0
    save(folder, 2)
    save(folder, 10)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step_000010"] and folder.saved_step() == 10
    weights, optimizer, document = folder.read_state()
    assert weights["weight"].tolist() == [0, 1, 2] and document["seen"] == 7 and document["step"] == 10
    assert optimizer["state"][0]["exp_avg"].tolist() == [1, 1] and optimizer["param_groups"] == [{"lr": 0.1}]


def test_a_state_of_other_settings_is_refused(tmp_path):
    save(RunFolder(tmp_path, **FOLDER), 2)
    other = replace(RunFolder(tmp_path, **FOLDER), settings={"optimizer.lr": 0.2, "head": "eagle"})
    with pytest.raises(ValueError, match=r"optimizer.lr was 0.1, is 0.2\. Resume with the settings"):
        other.read_state()


def test_the_log_is_cut_after_the_step_of_the_state(tmp_path):
    folder = RunFolder(tmp_path, **FOLDER)
    for step in range(1, 6):
        folder.log(step, {"loss": 1.0 / step})
    folder.cut_log(3)
    assert [line.split(",")[0] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in (1, 2, 3)
    ]


def test_a_begun_or_finished_run_is_not_overwritten(tmp_path):
    folder = RunFolder(tmp_path, **FOLDER)
    folder.check(resume=False)
    folder.log(1, {})
    folder.check(resume=True)
    with pytest.raises(ValueError, match="has begun"):
        folder.check(resume=False)
    folder.finish(1)
    with pytest.raises(ValueError, match=r"finished run \(1 steps\)"):
        folder.check(resume=True)
    checkpoint.remove(tmp_path)
