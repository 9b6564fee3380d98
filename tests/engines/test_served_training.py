"""A training run whose validations are asked of vLLM, where `make engines` has set it up."""

from pathlib import Path

import pytest
import torch

from scripts import export
from specdec import checkpoint
from specdec.engines.draft_weights.vllm import make_vllm_words
from specdec.heads.draft import Draft
from tests.engines import tiny_heads
from tests.engines.test_running_engines import running
from tests.engines.test_served_heads import engines
from tests.engines.test_swapped_heads import make_command
from tests.support.commands import ROOT
from tests.support.runs import log_of, train_in_process
from tests.support.targets import REAL_TARGET
from tests.support.together import free_ports

pytestmark = pytest.mark.full
NUM = 3  # held-out prompts


def save_noisy_target(folder: Path) -> str:
    """Saves a tiny target, and a head that is the target with noise, with its export; name of the target."""
    target = tiny_heads.make_target(folder / "target", tokenizer=str(REAL_TARGET))
    torch.manual_seed(0)
    head = Draft(target, copy_layers=list(range(target.num_layers))).eval()
    for parameter in head.parameters():
        parameter.data += 0.003 * torch.randn_like(parameter)
    checkpoint.save(folder / "head", head, {"_target_": "specdec.heads.draft.Draft"})
    export.main([f"checkpoint={folder}/head", "format=vllm", f"out={folder}/export", "target.dtype=float32"])
    return target.name


@engines
def test_vllm_serves_the_head_of_each_validation(tmp_path, monkeypatch, capsys):
    """Of a head that training spoils: tau as served is that of replay, round by round, at each load."""
    monkeypatch.chdir(ROOT)
    name, (port,) = save_noisy_target(tmp_path), free_ports(1)
    command = make_command(name, tmp_path / "export", "draft_model", port)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with running(command, port, tmp_path / "log", **environment, **make_vllm_words()[0]) as url:
        monkeypatch.chdir(tmp_path)
        arguments = ["run=served", "head=draft", f"start={tmp_path}/head", f"target.name={name}", "threads=1",
                     f"data.train={ROOT}/data/train.jsonl", f"data.heldout={ROOT}/data/prompts_heldout.jsonl",
                     "data.limit=24", "data.length=256", "train.steps=2", "train.validate_every=1", "optimizer.lr=0.02",
                     "precision=fp32", "target.dtype=float32", "features.mode=online", "decode.depth=3",
                     "validation.decode=end", "validation.auto=never", "validation.share=null",
                     f"validation.num_prompts={NUM}", "validation.max_new_tokens=24", "validation.loads=[1,3]",
                     f"validation.engine={url}"]  # fmt: skip
        assert train_in_process(arguments) == 0
    rows = [row["validation"] for row in log_of("served") if "validation" in row and not row.get("last")]
    taus = [row["served"]["loads"]["1"]["tau"] for row in rows]
    assert len(taus) == 3 and taus[0] > 1.1 * taus[-1], taus
    for row in rows:
        assert row["served"]["kind"] == "vllm" and row["served"]["version"] == f"step-{row['step']}"
        for level in row["served"]["loads"].values():
            assert level["answers"] == NUM and "served = trained" in level["verdict"]
            assert level["tau"] == pytest.approx(level["replayed_tau"]) and level["first_difference"] is None
    assert "NOT what was trained" not in capsys.readouterr().out
