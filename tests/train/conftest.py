"""Fixtures that run the command train.py on a tiny target."""

import pytest
from hydra import compose, initialize_config_dir

from tests.support import ROOT, save_target, train_command, train_overrides, write_rows
from train.overrides import as_written

ANSWERS = [f"{number} is followed by {number + 1}, then by {number + 2}." for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny target, conversations and prompts."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target", num_layers=8)
    rows = [{"id": f"row-{n}", "messages": [{"role": "user", "content": f"Count from {n}."},
                                            {"role": "assistant", "content": answer}]} for n, answer in enumerate(ANSWERS)]  # fmt: skip
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "prompts.jsonl", [{"prompt": "Count from 3."}, {"prompt": "Count on."}])
    return folder


@pytest.fixture
def fit(folder, tmp_path, monkeypatch):
    """fit(run, "key=value", ...): trains a short run in a new working directory -> exit status"""
    monkeypatch.chdir(tmp_path)

    def run(name, *more):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("train", overrides=as_written(train_overrides(folder, name, *more)))
        (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        return train_command().fit(config)

    return run
