"""The comparison with Speculators: its own half on a tiny target, and the files that the other half reads."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from scripts import compare_training
from tests.support import save_target, write_rows

LAYERS, LENGTH, VOCAB = 5, 64, 24


@pytest.mark.slow
def test_both_halves_get_the_same_rows(tmp_path):
    target = save_target(tmp_path / "target", num_layers=LAYERS)
    turns = lambda n: [
        {"role": "user", "content": f"Count from {n}."},
        {"role": "assistant", "content": f"{n}, {n + 1}"},
    ]
    write_rows(tmp_path / "rows.jsonl", [{"messages": turns(n)} for n in range(30)])
    compare = compare_training.Compare(
        length=LENGTH, depth=3, threads=1, steps=2, vocab_size=VOCAB,
        data=str(tmp_path / "rows.jsonl"), target=str(tmp_path / "target"),
    )  # fmt: skip
    child = compare_training.own(compare, tmp_path)
    data = tmp_path / "data"
    prepared = child.ask({"export": str(data), "cached": True})
    with compare_training.highest(child.process.pid) as memory:
        reply = child.ask({"steps": 2})
    child.close()
    assert memory["whole"] > 2**26 and memory["above"] >= 0
    assert reply["tokens"] == sum(prepared["tokens"]) and all(map(math.isfinite, reply["losses"]))
    rows = load_from_disk(str(data))
    assert sorted(number for batch in prepared["batches"] for number in batch) == list(range(len(rows)))
    assert sum(len(row["input_ids"]) for row in rows) == sum(prepared["tokens"])
    hidden = load_file(data / "hidden_states" / "hs_0.safetensors")
    assert torch.equal(hidden["token_ids"], rows[0]["input_ids"])
    assert hidden["hidden_states"].shape == (len(rows[0]["input_ids"]), 4, target.width)
    output = target.read(rows[0]["input_ids"][None], ())
    states = hidden["hidden_states"][:, -1].float()
    torch.testing.assert_close(target.norm(states), output.final[0], atol=0.05, rtol=0.05)  # the child's is bfloat16
    offsets, chosen = (numpy.load(data / f"{name}-{VOCAB}.npy") for name in ("d2t", "t2d"))
    assert (numpy.flatnonzero(chosen) == offsets + numpy.arange(VOCAB)).all()


def test_without_speculators(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare_training.py", f"python={tmp_path}/none"])
    with pytest.raises(ValueError, match="make engines"):
        compare_training.main()


def test_the_other_half_imports_nothing_of_this_project():
    source = Path(compare_training.__file__).with_name("trainers") / "of_speculators.py"
    spec = importlib.util.spec_from_file_location("of_speculators", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # nor anything of Speculators before it is asked to train
    assert callable(module.build)
    assert "specdec" not in source.read_text() and "helpers" not in source.read_text()


def test_a_folder_that_exists_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare_training.py", f"python={sys.executable}", f"save={tmp_path}"])
    with pytest.raises(ValueError, match="choose another save=FOLDER"):
        compare_training.main()
