"""One reader of a model's files: those that transformers reads, in its order; what is missing or damaged is named."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from specdec.core.shards import INDEX, SINGLE, Shards
from specdec.export.stitched import write_stitched
from specdec.heads.native import NativeMTP, read_native_modules
from specdec.target.model import Target
from tests.support.native import save_native
from tests.support.saved_targets import edit, save

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def read(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / SINGLE)


def write(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})


def divide(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes two shards and their index."""
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(PARTS, halves):
        write(folder, file, {name: tensors[name] for name in half})
    places = {name: file for file, half in zip(PARTS, halves) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model in two shards, with an MTP module."""
    save_native(tmp_path / "model", "qwen2")
    divide(tmp_path / "model", read(tmp_path / "model"))
    (tmp_path / "model" / SINGLE).unlink()
    return tmp_path / "model"


@pytest.fixture
def readers(tmp_path, folder):
    """All that read a model's files, by name: each takes its folder."""
    shutil.copytree(folder, tmp_path / "whole")
    target = Target.load(str(tmp_path / "whole"), dtype="float32")
    drafter = NativeMTP(target).frozen_copy()

    def stitch(name: str) -> None:
        target.name = name
        write_stitched(drafter, target, tmp_path / "out")

    return {
        "whole": Target.load,
        "ends": Target.load_ends,
        "native": lambda name: read_native_modules(name, target),
        "stitched": stitch,
    }


def load_both(folder: Path) -> tuple[Target, Target]:
    """A whole target and its ends, which are the same model."""
    whole, ends = (load(str(folder), dtype="float32") for load in (Target.load, Target.load_ends))
    assert torch.equal(whole.lm_head.weight, ends.lm_head.weight) and whole.fingerprint() == ends.fingerprint()
    return whole, ends


def refusals(readers: dict, folder: Path) -> set[str]:
    """What all readers say."""
    sentences = set()
    for read_folder in readers.values():
        with pytest.raises(ValueError) as refused:
            read_folder(str(folder))
        sentences.add(str(refused.value))
    return sentences


def test_a_shard_that_is_missing_is_named(folder, readers):
    (folder / PARTS[1]).unlink()
    (sentence,) = refusals(readers, folder)
    assert sentence == f"{folder} has no file {PARTS[1]}: take a complete copy of it."


def test_a_shard_that_is_damaged_is_named(folder, readers):
    path = folder / PARTS[0]
    for content in (path.read_bytes()[:-9], b"", b"\xff" * 80):
        path.write_bytes(content)
        (sentence,) = refusals(readers, folder)
        assert sentence.startswith(f"{path} is damaged (") and sentence.endswith("): take another copy of it.")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight"]
)
def test_a_tensor_that_its_shard_lacks_is_named(folder, readers, name):
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = safetensors.torch.load_file(folder / file)
    write(folder, file, {key: value for key, value in tensors.items() if key != name})
    (sentence,) = refusals(readers, folder)
    lack = f"lacks the tensor {name}, which {INDEX} places there"
    assert sentence == f"{folder / file} {lack}: take another copy of both files."


def test_a_single_file_comes_before_the_index(tmp_path):
    """As after a merge into a folder that had shards."""
    folder = save(tmp_path)
    old = read(folder)
    write(folder, SINGLE, {name: value + 0.05 * torch.randn_like(value) for name, value in old.items()})
    alone = Target.load_ends(str(folder), dtype="float32")
    divide(folder, old)
    assert load_both(folder)[0].fingerprint() == alone.fingerprint()
    assert torch.equal(load_both(folder)[0].lm_head.weight, alone.lm_head.weight)
    (folder / SINGLE).unlink()
    whole, _ = load_both(folder)
    assert whole.fingerprint() != alone.fingerprint() and torch.equal(whole.lm_head.weight, old["lm_head.weight"])


def test_the_file_that_the_configuration_names_comes_first(tmp_path):
    folder = save(tmp_path)
    write(folder, "other.safetensors", {name: value + 1 for name, value in read(folder).items()})
    edit(folder, transformers_weights="other.safetensors")
    _, ends = load_both(folder)
    assert torch.equal(ends.lm_head.weight, read(folder)["lm_head.weight"] + 1)
    edit(folder, transformers_weights="../other.safetensors")
    with pytest.raises(ValueError, match=r"which is not inside it: the folder is damaged or unsafe"):
        Shards(str(folder))


def test_a_tensor_that_no_index_names_is_read_as_well(tmp_path):
    """transformers reads all of every shard; of two of one name, the later file's."""
    folder = save(tmp_path)
    tensors = read(folder)
    divide(folder, tensors)
    (folder / SINGLE).unlink()
    last = safetensors.torch.load_file(folder / PARTS[1])
    write(folder, PARTS[1], last | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    document = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(
        json.dumps(document | {"weight_map": document["weight_map"] | {"lm_head.weight": PARTS[0]}})
    )
    load_both(folder)


def test_pickles_are_read_where_there_is_nothing_else(tmp_path):
    folder = save(tmp_path)
    wanted = Target.load(str(folder), dtype="float32").fingerprint()
    torch.save(read(folder), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    assert Target.load(str(folder), dtype="float32").fingerprint() == wanted
    with pytest.raises(ValueError, match="has no safetensors"):
        Target.load_ends(str(folder))
