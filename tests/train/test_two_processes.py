"""Tests of drafters that are trained by two processes (DDP), against one process."""

import re
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from tests.support.commands import ROOT, start, write_rows
from tests.support.processes import fit_float64, fit_together, free_ports
from tests.support.runs import log_of, losses_of, report_of, train_overrides, weights_of
from tests.support.together import MARK
from train.loop.trainer import VOTE_STEPS

pytestmark = pytest.mark.full

SETTINGS = ["data.pack=true", "data.length=128", "train.ema=0.9", "validation.decode=end", "validation.share=0",
            "validation.num_prompts=5"]  # fmt: skip
HEADS = {
    "eagle3": ["head=eagle3"],
    "mtp": ["head=mtp", "head.objective.gradient_checkpointing=true"],
    "draft": ["head=draft", "head.drafter.borrow_embeddings=false"],  # packs hold different numbers of documents
}


@pytest.fixture(scope="module")
def printed(folder, tmp_path_factory):
    """All runs of this file, and their folder. -> the folder, and what each of the two processes printed"""
    cwd = tmp_path_factory.mktemp("runs")
    write_rows(cwd / "prompts.jsonl", [{"prompt": f"Count from {number}."} for number in range(5)])

    def run(name: str, *options: str, head: str = "eagle3", **faults: int) -> dict:
        overrides = train_overrides(
            folder, name, *SETTINGS, f"data.heldout={cwd}/prompts.jsonl", *HEADS[head], *options
        )
        return {"run": name, "overrides": overrides, **faults}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for head in HEADS:
            fit_float64(**run(f"{head}-one", "train.accumulation=2", head=head))
        fit_float64(**run("one-then-two", "train.accumulation=2", stop=4))
        runs = [run(f"{head}-two", head=head) for head in HEADS]
        runs += [run("resumed", stop=4), run("resumed", "resume=true")]
        runs += [run("two-then-one", stop=4), run("one-then-two", "resume=true")]
        runs += [run("spoiled", "train.skip_not_finite=true", spoil=2)]
        minutes = ["train.save_every=null", "train.save_minutes=1e-9", "train.steps=90", "train.validate_every=27",
                   "train.accumulation=auto", "validation.num_prompts=1"]  # fmt: skip
        runs += [run("ended", *minutes, end=30)]
        both = fit_together(cwd, runs)
        fit_float64(**run("two-then-one", "train.accumulation=2", "resume=true"))
    return cwd, both


@pytest.fixture
def runs(printed, monkeypatch):
    monkeypatch.chdir(printed[0])


def check_same(first: Path, second: Path, *names: str) -> None:
    """Files of tensors with the same names, shapes and types, and values equal to rounding"""
    for name in names:
        one, two = (checkpoint.read_tensors(folder / name) for folder in (first, second))
        assert list(one) == list(two)
        for key, value in one.items():
            assert value.dtype == two[key].dtype
            torch.testing.assert_close(
                two[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize("head", HEADS)
def test_two_processes_train_as_one(runs, head):
    first_tensors, second_tensors = f"{head}-one", f"{head}-two"
    assert len(losses_of(first_tensors)) == 4 and losses_of(second_tensors) == pytest.approx(
        losses_of(first_tensors), rel=1e-10, abs=1e-10
    )
    first, second = (Path("checkpoints", run) for run in (first_tensors, second_tensors))
    check_same(first / "step_000004", second / "step_000004", "drafter.safetensors")
    check_same(
        first / "state/step_000004", second / "state/step_000004", "drafter.safetensors", "optimizer.safetensors"
    )
    assert (first / "step_000004/drafter.json").read_text() == (second / "step_000004/drafter.json").read_text()
    reports = [report_of(run) for run in (first_tensors, second_tensors)]
    for name in ("replayed_tau", "replayed_survival", "replayed_prompts", "num_prompts"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-9), name
    assert reports[0]["ema"]["kept"] == reports[1]["ema"]["kept"]
    assert reports[0]["training"]["parameters"] == reports[1]["training"]["parameters"]


def test_buffers_are_alike_in_both_processes_without_a_broadcast(printed):
    """Before each step of all runs: maps of the draft vocabulary, sizes of inputs, angles."""
    first, second = (re.findall(r"^# buffers .*", text, flags=re.M) for text in printed[1])
    assert first == second and len(first) > 60
    for name in ("draft_to_target", "target_to_draft", "fc.size", "inv_freq"):
        assert any(f"{name}'" in line for line in first), name


@pytest.mark.parametrize("run", ["resumed", "two-then-one", "one-then-two"])
def test_a_run_goes_on_with_one_process_or_two(runs, run):
    """Died in the fourth step, saved after the second; the weights are then those of a run that was not interrupted."""
    assert losses_of(run) == pytest.approx(losses_of("eagle3-one"), rel=1e-10, abs=1e-10)
    state = "state/step_000004"
    folders = Path("checkpoints/eagle3-one", state), Path("checkpoints", run, state)
    check_same(*folders, "drafter.safetensors", "optimizer.safetensors")


def test_a_step_that_is_not_finite_is_left_out_by_all(runs):
    """The log names the rows of both."""
    (skipped,) = [row for row in log_of("spoiled") if "skipped" in row]
    assert skipped["step"] == 2 and len(set(skipped["skipped"])) >= 4 and list(losses_of("spoiled")) == [1, 2, 3, 4]
    assert all(value.isfinite().all() for value in weights_of("spoiled").values())


def test_a_signal_to_any_process_ends_all_within_20_steps(runs, printed):
    """States by minutes are saved when the processes vote: at the latest after 20 steps, and after a validation."""
    last = max(losses_of("ended"))
    assert 30 <= last <= 30 + VOTE_STEPS < 90 and list(losses_of("ended")) == list(range(1, last + 1))
    states = sorted(path.name for path in Path("checkpoints/ended/state").iterdir())
    assert len(states) == 2 and states[0] >= "step_000027" and states[1] == f"step_{last:06d}"
    assert not Path("checkpoints/ended/finished").exists()
    assert f"Interrupted after step {last}; saved." in printed[1][0]


def test_two_nodes_by_torchrun(folder, tmp_path):
    """Two launchers, as docs/scaling.md starts them on two machines. One process speaks, not one of each machine."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1",
                "--rdzv_backend", "c10d", "--rdzv_id", "7", "--rdzv_endpoint",
                f"localhost:{free_ports(1)[0]}"]  # fmt: skip
    overrides = train_overrides(folder, "nodes", "train.steps=2", "train.validate_every=2")
    processes = [start([*launcher, ROOT / "train.py", *overrides], cwd=tmp_path, errors=True) for _ in range(2)]
    printed = "".join(process.communicate(timeout=200)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], printed
    for line in ("closed-form start", "step     1/2", "step     2/2", "best replayed tau"):
        assert printed.count(line) == 1, printed


def test_only_the_main_process_speaks_and_computes_the_start(printed):
    texts = [re.sub(rf"^(# |{re.escape(MARK)}).*\n?", "", text, flags=re.M) for text in printed[1]]
    main, other = (text.splitlines() for text in texts)
    new = len(HEADS) + 4  # the runs that two processes begin
    assert main.count("computed start") == new and main.count("computed vocabulary") == new + 3  # one for the pace
    assert not any(other)
