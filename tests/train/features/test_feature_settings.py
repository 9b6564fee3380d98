"""Tests of the space that cached features need: of what a run will read, without what is there."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from specdec.core.option_types import read_options
from specdec.options import config_files
from specdec.target.model import Target
from specdec.text.conversations import Row
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.targets import make_target
from tests.train.composing import compose_options
from train.data.packing import EncodedRows, Packs
from train.features.feature_files import FeatureFolder, compute_checksum
from train.features.outputs import StoredFeatures
from train.prepare import build
from train.prepare.build import count_missing, open_features
from train.settings.options import RunConfig

NUM, LONG = 40, 30  # rows, of 5 to 44 tokens, cut at 30


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(61, num_layers=4)


@pytest.fixture(scope="module")
def packs() -> Packs:
    rows = [Row(str(n), "all", random_tokens(n, 5 + n, 61), [False] + [True] * (4 + n)) for n in range(NUM)]
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


OPTIONS = """features.mode=cached train.batch=1 train.accumulation=1 solve_packs=0 precision=fp32
    target.dtype=float32 data.length=64 head.vocab_size=null decode.depth=2 train.validate_every=0
    validation.num_prompts=2 validation.max_new_tokens=4"""


def set_free_space(monkeypatch, num_bytes: float) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(num_bytes)))


def test_a_tenth_of_the_space_stays_free(target, tmp_path, monkeypatch):
    folder = FeatureFolder(target, (1, 2), tmp_path / "cache")
    set_free_space(monkeypatch, 1.11e9)
    folder.check_space(10**9)
    set_free_space(monkeypatch, 1.09e9)
    with pytest.raises(ValueError, match=r"need 1\.0 GB and 1\.1 GB are free: use mode=online"):
        folder.check_space(10**9)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_short_run_on_much_data_fits_on_the_disk(target, packs, tmp_path, monkeypatch, is_short):
    options = [*OPTIONS.split(), f"features.folder={tmp_path}/cache", f"train.steps={2 if is_short else 1000}"]
    document = config_files.fill(compose_options(*options).document(), {"train.epochs": 1.0, "train.hours": None})
    drafter, notes = make_drafter(target, "eagle"), []
    monkeypatch.setattr(build, "MIN_MEASURED_PACKS", 0)
    monkeypatch.setattr(build.progress, "print_note", notes.append)
    reads = build.permute_packs(len(packs), 0)[:2] if is_short else list(range(len(packs)))
    whole = FeatureFolder(target, drafter.target_layers, tmp_path / "cache").count_bytes(packs.num_tokens)
    set_free_space(monkeypatch, whole // 2)
    arguments = read_options(RunConfig, document), drafter, packs, Accelerator(cpu=True), None
    if is_short:
        open_features(*arguments)
        share = sum(count_row_tokens(packs, reads).values()) / packs.num_tokens
        assert f"up to {share * whole / 1e9:.2f} GB will be written to {tmp_path}/cache as they are needed" in notes[0]
        return
    with pytest.raises(ValueError, match=r"Cached features need .* GB .* fewer steps, less data"):
        open_features(*arguments)


def test_checksums_cover_name_type_and_shape():
    value = torch.arange(6.0)
    others = ("5", value), ("4", value.view(2, 3)), ("4", value.view(torch.int32))
    assert all(compute_checksum(*other) != compute_checksum("4", value) for other in others)


def test_a_folder_takes_a_servers_states_with_the_final_norm(target, packs, tmp_path):
    folder, tokens = FeatureFolder(target, (1,), tmp_path / "cache"), torch.tensor(packs[0][0].tokens)
    state = torch.rand(len(tokens), target.width).to(target.dtype)
    StoredFeatures(target, (1,), folder=folder)._store_received([tokens], [[state, state]])
    first, final = folder.read(tokens, folder.layers)
    assert torch.equal(first, state) and not torch.equal(final, state)
    torch.testing.assert_close(target.logits(final), target.model.lm_head(target.model.model.norm(state)))
