"""Fixtures of the tests of specdec judge."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts import judge as judge_script
from specdec import checkpoint
from specdec.engines import client
from specdec.heads.draft import Draft
from specdec.measuring.record import read_record
from tests.support.commands import write_prompts
from tests.support.small_server import SmallServer
from tests.support.targets import save_target
from tests.tools.judge.drafting import NEW, NUM


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, two drafters that are it with noise, and prompts."""
    folder = tmp_path_factory.mktemp("served")
    target = save_target(folder / "target")
    for seed, name in enumerate(("head", "other")):
        torch.manual_seed(seed)
        draft = Draft(target, copy_layers=list(range(target.num_layers)))
        for parameter in draft.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        checkpoint.save(folder / name, draft, {"_target_": "specdec.heads.draft.Draft"})
    write_prompts(folder / "prompts.jsonl", NUM)
    return folder


@pytest.fixture
def judge(folder, tmp_path, run_script) -> Callable[..., tuple[dict, str]]:
    """judge(server, key=value ..) -> `server` of the report with its notes, and what was printed"""

    def run(server: SmallServer, *arguments: str, out: str = "served", name: bool = True) -> tuple[dict, str]:
        required = [f"engine={server.url}", f"prompts={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}", "repeat=0"]
        required += [f"target.name={folder / 'target'}"] * name
        printed = run_script(judge_script, *required, f"out={tmp_path / out}", *arguments)
        report = json.loads((tmp_path / out / "results.json").read_text())
        judged = read_record(tmp_path / out / "record.json")
        fields = {key: report[key] for key in ("notes", "protocol", "results")}
        return {**report["server"], **fields, "record": judged}, printed

    return run
