"""Tests of the help, of options in messages, and of the folder of a run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import train.sweeps as sweeps
from specdec.core import files
from tests.support import ROOT
from train import display
from train.ranges import named
from train.state import RunFolder

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
    ("given", "close"),
    [("train.stepz=3", "train.steps"), ("head.objektive.depth=3", "head.objective.depth"), ("heads=mtp", "head")],
)
def test_an_unknown_option_is_named_with_the_one_that_is_like_it(given, close):
    known = [
        "head=eagle",
        "experiment=table/mtp",
        "head.objective.losses.kl=1",
        "+more.of=1",
        "head.drafter.num_layers=2",
    ]
    assert display.unknown(ROOT / "conf", known) is None
    said = display.unknown(ROOT / "conf", [*known, given])
    assert said.startswith(f"There is no option {given.partition('=')[0]!r}. Did you mean {close!r}?")
    assert (
        display.unknown(ROOT / "conf", ["xyzzy=1"])
        == "There is no option 'xyzzy'. python train.py --help lists them all."
    )


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


def test_a_state_is_read_back_and_the_newest_two_are_kept(tmp_path):
    folder = RunFolder(tmp_path, **FOLDER)
    assert folder.read_state() is None and folder.saved_step() == 0
    for step in (2, 10, 1_000_000):
        save(folder, step)
    assert [path.name for path in folder.states()] == ["step_1000000", "step_000010"]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step_000010", "step_1000000"]
    weights, optimizer, document = folder.read_state()
    assert weights["weight"].tolist() == [0, 1, 2] and document["seen"] == 7 and document["step"] == 1_000_000
    assert optimizer["state"][0]["exp_avg"].tolist() == [1, 1] and optimizer["param_groups"] == [{"lr": 0.1}]


def flip(path: Path, place: int = -1) -> None:
    """Flips one bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "drafter.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(tmp_path, name, damage):
    folder = RunFolder(tmp_path, **FOLDER)
    save(folder, 2)
    save(folder, 10)
    for step in (10, 2):
        path = tmp_path / "state" / f"step_{step:06d}" / name
        if damage == "flipped":
            flip(path, path.read_bytes().rindex(b'"seen": 7') + 8 if name == "state.json" else -1)
        else:
            path.write_bytes(path.read_bytes()[:-5])
        with pytest.warns(UserWarning, match=rf"step_000010/{name} is .*\. The state before it is used\."):
            if step == 10:
                assert folder.read_state()[2]["step"] == 2
            else:
                with pytest.raises(ValueError, match=rf"no state that is whole.*step_000002/{name}"):
                    folder.read_state()


def test_a_state_without_checksums_is_read(tmp_path):
    """Such are those of earlier versions."""
    folder = RunFolder(tmp_path, **FOLDER)
    save(folder, 2)
    (tmp_path / "state" / "step_000002" / files.CHECKSUMS).unlink()
    assert folder.read_state()[2]["step"] == 2


def test_a_state_of_other_settings_is_refused(tmp_path):
    save(RunFolder(tmp_path, **FOLDER), 2)
    other = replace(RunFolder(tmp_path, **FOLDER), settings={"optimizer.lr": 0.2, "head": "eagle"})
    with pytest.raises(ValueError, match=r"optimizer.lr was 0.1, is 0.2\. Resume with the settings"):
        other.read_state()


@pytest.mark.parametrize(
    ("then", "now", "refused"),
    [
        ((1, 1, 2), (1, 2, 1), False),  # the same packs in a step
        ((2, 2, 1), (4, 1, 1), False),
        ((1, 1, 2), (1, 1, 1), False),  # fewer, because there are fewer processes
        ((1, 1, 2), (3, 1, 2), True),
    ],
)
def test_another_number_of_processes_may_resume(tmp_path, then, now, refused):
    folders = [
        RunFolder(tmp_path, spec={}, settings=dict(zip(("train.batch", "train.accumulation", "processes"), values)))
        for values in (then, now)
    ]
    save(folders[0], 2)
    if refused:
        with pytest.raises(ValueError, match=r"train\.batch was 1, is 3"):
            folders[1].read_state()
    else:
        assert folders[1].read_state()[2]["step"] == 2


def steps_of(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder.path / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo'])
def test_log_and_best_go_back_to_the_state(tmp_path, torn):
    folder = RunFolder(tmp_path, **FOLDER)
    for step in range(1, 6):
        folder.log(step, {"loss": 1.0 / step})
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write(torn)
    folder.mark_best("step_000005")
    folder.go_back(3, {"step": 2, "figure": 1.5})
    assert steps_of(folder) == [1, 2, 3] and (tmp_path / "best").read_text() == "step_000002\n"
    folder.go_back(-1, {})
    assert steps_of(folder) == [] and not (tmp_path / "best").exists()


def test_a_damaged_line_of_the_log_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 is damaged"):
        RunFolder(tmp_path, **FOLDER).go_back(3, {})


def test_a_begun_or_finished_run_is_not_overwritten(tmp_path):
    folder = RunFolder(tmp_path, **FOLDER)
    assert not folder.check(resume=False) and not folder.check(resume="auto")
    folder.log(1, {})
    folder.check(resume=True)
    with pytest.raises(ValueError, match="has begun"):
        folder.check(resume=False)
    folder.finish(1)
    assert folder.check(resume="auto")
    with pytest.raises(ValueError, match=r"finished run \(1 steps\)"):
        folder.check(resume=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], "eagle-smollm2-135m"),
        (["head=eagle3", "target.name=Qwen/Qwen3-8B"], "eagle3-Qwen3-8B"),
        (["target.name='/models/Llama 3 (new)//'"], "eagle-Llama-3-new"),
        (["target.name='models/ä,b=c:$d@1/'"], "eagle-ä-b-c-d-1"),
        (["target.name=."], f"eagle-{Path.cwd().name}"),
        (["target.name=/"], "eagle-target"),
        (["target.name=123"], "eagle-123"),
        (
            ["experiment=table/eagle3_small", "features.folder=checkpoints/features/${run}", "target.name=a/b"],
            "eagle3_small-b",
        ),
        (["run=mine", "target.name=a/b"], "mine"),
    ],
)
def test_a_run_and_its_features_are_named_by_the_target(given, wanted):
    assert sweeps.target_name("targets/smollm2-135m/") == "smollm2-135m"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=given, return_hydra_config=True)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        assert config.run == wanted and config.features.folder == f"checkpoints/features/{wanted}"
    finally:
        HydraConfig.instance().cfg = before
