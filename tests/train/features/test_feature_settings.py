"""Tests of the space that cached features need: of what a run will read, without what is there."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specdec.core.option_types import read_options
from specdec.options import config_files
from specdec.target.model import Target
from specdec.text.conversations import Row
from tests.support import ROOT, make_drafter, make_target, random_tokens
from train.data.packing import EncodedRows, Packs
from train.features.feature_files import FeatureFolder
from train.prepare import build
from train.prepare.build import count_missing, open_features
from train.settings.hydra_text import make_search_path
from train.settings.options import RunConfig, read_run

NUM, LONG = 40, 30  # rows, of 5 to 44 tokens, cut at 30


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(61, num_layers=4)


@pytest.fixture(scope="module")
def packs() -> Packs:
    rows = [Row(str(n), "all", random_tokens(n, 5 + n, 61), [False] + [True] * (4 + n)) for n in range(NUM)]
    with pytest.warns(UserWarning, match="are cut at 30"):
        return Packs(EncodedRows.from_rows(rows), length=LONG)


def count_row_tokens(packs: Packs, reads: list[int]) -> dict[int, int]:
    """Tokens of each row in some packs"""
    return {int(row.id): len(row.tokens) for at in reads for row in packs[at]}


def fill(folder: FeatureFolder, packs: Packs, rows: set[int]) -> None:
    folder.create()
    for at in range(len(packs)):
        for row in packs[at]:
            if int(row.id) in rows:
                states = [torch.zeros(len(row.tokens), folder.target.width) for _ in folder.layers]
                folder.write(torch.tensor(row.tokens), states)


def test_only_what_is_read_and_not_there_counts(target, packs, tmp_path):
    folder = FeatureFolder(target, (1, 2), tmp_path / "cache")
    reads = list(range(1, len(packs), 3))
    row_lengths = count_row_tokens(packs, reads)
    assert count_missing(folder, packs, reads) == sum(row_lengths.values()) < packs.num_tokens
    assert count_missing(folder, packs, range(len(packs))) == packs.num_tokens
    there = set(list(row_lengths)[::2])
    fill(folder, packs, there | (set(range(NUM)) - set(row_lengths)))  # others in the folder make no room for these
    assert count_missing(folder, packs, reads) == sum(num for row, num in row_lengths.items() if row not in there)
    fill(folder, packs, set(row_lengths))
    assert count_missing(folder, packs, reads) == 0


def test_rows_count_once(target, packs, tmp_path):
    twice = Packs(packs.encoded, length=LONG, row_numbers=torch.arange(NUM).repeat(2).numpy())
    folder = FeatureFolder(target, (1, 2), tmp_path / "cache")
    assert count_missing(folder, twice, range(len(twice))) == packs.num_tokens == twice.num_tokens / 2


GIVEN = {
    "precision": "fp32", "target.dtype": "float32", "data.length": 64, "head.vocab_size": "null", "decode.depth": 2,
    "train.validate_every": 0, "validation.num_prompts": 2, "validation.max_new_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize("is_short", [True, False])
def test_a_short_run_on_much_data_fits_on_the_disk(target, packs, tmp_path, monkeypatch, is_short):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        options = [
            "run=some",
            f"features.folder={tmp_path}/cache",
            "features.mode=cached",
            "train.batch=1",
            "train.accumulation=1",
            "solve_packs=0",
            f"train.steps={2 if is_short else 1000}",
        ]
        options += [f"{name}={value}" for name, value in GIVEN.items()]
        options = read_run(
            OmegaConf.to_container(compose("train", overrides=[*options, make_search_path()]), resolve=True)
        )
    config = read_options(RunConfig, config_files.fill(options.document(), {"train.epochs": 1.0, "train.hours": None}))
    drafter, notes = make_drafter(target, "eagle"), []
    monkeypatch.setattr(build, "MIN_MEASURED_PACKS", 0)
    monkeypatch.setattr(build.progress, "print_note", notes.append)
    reads = build.permute_packs(len(packs), 0)[:2] if is_short else list(range(len(packs)))
    whole = FeatureFolder(target, drafter.target_layers, tmp_path / "cache").count_bytes(packs.num_tokens)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=whole // 2))
    if is_short:
        open_features(config, drafter, packs, Accelerator(cpu=True), None)
        share = sum(count_row_tokens(packs, reads).values()) / packs.num_tokens
        assert f"up to {share * whole / 1e9:.2f} GB will be written to {tmp_path}/cache as they are needed" in notes[0]
    else:
        with pytest.raises(ValueError, match=r"Cached features need .* GB .* fewer steps, less data"):
            open_features(config, drafter, packs, Accelerator(cpu=True), None)
