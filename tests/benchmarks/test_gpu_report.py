"""The report of `make gpu`: a dry run of all its figures on this device, what is kept of them, and what fails."""

import json
import math
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.gpu import bench as modes
from benchmarks.gpu import checks, children, page, rows, training
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.children import Children, run_figures
from benchmarks.gpu.figures import Figure, FigureFile, choose_path, list_missing
from benchmarks.gpu.machine import Machine, StandIn
from benchmarks.gpu.options import GpuReportOptions, make_tiny
from specdec.core import compile

DRY = ["dry_run=true"]
GROUPS = ["proofs", "decoding", training.ROUNDS, "training", training.LAST]  # of parts 1 and 2


@pytest.fixture
def file(tmp_path):
    return FigureFile(tmp_path / "report.jsonl")


@pytest.fixture
def bench():
    return Bench(make_tiny(GpuReportOptions(dry_run=True)), StandIn(torch.device("cpu")))


def make_figures(**measures) -> list[Figure]:
    return [Figure(name, 1, "group", "subject", measure) for name, measure in measures.items()]


def write_values(file: FigureFile, name: str, **values) -> None:
    file.append(name, part=1, subject="subject", code="12345678", values=values)


# Dry runs


def test_a_dry_run_measures_every_figure_of_decoding_and_training(tmp_path, capsys):
    """In this process. The page says that its figures mean nothing."""
    arguments = [*DRY, f"out={tmp_path}"]
    for group in GROUPS:
        gpu_report.main([*arguments, f"only={group}"])
    file = FigureFile(tmp_path / "gpu_report.dry.jsonl")
    figures = {name: line["values"] for name, line in file.read().items()}
    options = make_tiny(GpuReportOptions(dry_run=True))
    assert list(figures) == [figure.name for figure in gpu_report.list_figures(options) if figure.stage < 3]
    assert all(line["stand_in"] for line in file.read().values())
    check_decoding(figures, file)
    check_training(figures)
    with pytest.raises(SystemExit, match=r"^3 figures failed or are missing"):
        gpu_report.main([*arguments, "minutes=0"])
    text = (tmp_path / "gpu_report.dry.md").read_text()
    assert "A dry run, whose figures mean nothing" in text and text in capsys.readouterr().out
    assert "- main command" in text.split("## Not tried yet")[1]
    for title in ("Proofs", "Kernels", "Passes", "Tokens and rounds", "Trees", "Validation", "Training"):
        assert f"\n## {title}\n\n| figure |" in text


def check_decoding(figures: dict[str, dict], file: FigureFile) -> None:
    lines, nodes = file.read(), (1, 9)
    for mode in (modes.CAPTURED, modes.COMPILED, modes.TUNED):
        names = [f"pass of {num}, {mode.name}, 16 tokens" for num in nodes]
        names += [f"plain token, {mode.name}, 16 tokens", f"round of 5 drafts, {mode.name}, 16 tokens"]
        for name in names:
            assert 0 < figures[name]["ms"] < math.inf and figures[name]["mode"] == mode.name
            assert lines[name]["captures"] >= 1 and (lines[name]["compiles"] > 0) == mode.compile
    assert figures["kernels, captured"]["kernels_per_token"] > figures["kernels, tuned"]["kernels_per_token"] > 0
    assert figures["round of a sampled tree of 63 nodes, captured"]["drafts"] == 63
    assert {figures[f"proof of {path}"]["result"] for path in ("varlen", "cache", "loss")} == {"agrees"}


def check_training(figures: dict[str, dict]) -> None:
    for depth, optimizer in training.VARIANTS:
        row = figures[f"training eagle3, depth {depth}, {optimizer}"]
        assert (row["depth"], row["optimizer"], row["supervise"]) == (depth, optimizer, "text")
    deep, shallow = (figures[f"training eagle3, depth {depth}, muon"] for depth in (7, 4))
    assert deep["flops"] > shallow["flops"] == figures["training eagle3, fast=off"]["flops"]
    phases = {row["phase"]: row for row in figures["validation of 3 prompts"]["phases"]}
    assert list(phases) == ["settling", "first", "second", "end"]
    assert phases["first"]["captures"] > 0 and phases["first"]["decoded_prompts"] == 3
    assert figures["waits of 10 rounds"]["reads_of_accepted_tokens"] == 10
    assert figures["waits of a training step"]["waits"] == 0


def test_what_the_memory_checker_runs_decodes_all_rows(capsys):
    rows.main(DRY)
    figures = json.loads(capsys.readouterr().out)
    num = sum(tokens for _, tokens in rows.ARRIVALS)
    assert figures["captures"] > 0 and set(figures["tokens"].values()) == {num} and len(figures["tokens"]) == 4


@pytest.mark.full
def test_the_command_runs_the_checks_in_a_child(tmp_path):
    arguments = [*DRY, "part=3", f"out={tmp_path}/other", "minutes=5"]
    gpu_report.main(arguments)
    figures = {name: line["values"] for name, line in FigureFile(tmp_path / "other.dry.jsonl").read().items()}
    assert list(figures) == ["memory checker", "GPU tests", "main command"]
    assert "passed" in figures["GPU tests"]["result"] and figures["memory checker"]["captures"] > 0
    command = figures["main command"]
    assert command["steps"] == 3 and command["identical_outputs"] == 1
    assert 0 < command["first_loss"] < math.inf and 0 < command["last_loss"] < math.inf


# Lines


def test_finished_figures_are_kept_and_failed_ones_come_last(file):
    figures = make_figures(first=None, second=None, third=None)
    write_values(file, "first", ms=1.5)
    file.append("second", error="no memory")
    assert [figure.name for figure in list_missing(figures, file)] == ["third", "second"]
    assert [figure.name for figure in list_missing(figures, file, redo=True)] == ["first", "second", "third"]
    assert [figure.name for figure in list_missing(figures, file, since=time.time() - 60)] == ["third"]
    file.append("first", error="cut")
    assert file.read()["first"]["values"] == {"ms": 1.5}
    write_values(file, "first", ms=2.5)
    assert file.read()["first"]["values"] == {"ms": 2.5}


def test_a_line_that_was_cut_costs_no_other(file):
    write_values(file, "first", ms=1.5)
    with open(file.path, "a") as end:
        end.write('{"figure": "second", "val')
    write_values(file, "third", ms=2.5)
    assert list(file.read()) == ["first", "third"]


def test_earlier_figures_are_taken_over(file, tmp_path):
    earlier = FigureFile(tmp_path / "earlier.jsonl")
    for name in ("first", "second"):
        write_values(earlier, name, ms=1.5)
    earlier.append("third", error="cut")
    write_values(file, "first", ms=2.5)
    file.take_over(earlier.path)
    assert {name: line["values"]["ms"] for name, line in file.read().items()} == {"first": 2.5, "second": 1.5}
    with pytest.raises(ValueError, match=r"earlier=nothing\.jsonl is not there"):
        file.take_over(tmp_path.joinpath("nothing.jsonl").relative_to(tmp_path))


def test_the_page_alone_needs_no_gpu(file, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_values(file, "device", device="a GPU", bandwidth=3.35e12, measured_bandwidth=3e12)
    with pytest.raises(SystemExit, match="figures failed or are missing"):
        gpu_report.main(["minutes=0", f"out={file.path.with_suffix('')}"])
    assert capsys.readouterr().out.startswith("# a GPU\n\nMemory: 3.35 TB/s on paper, 3.00 TB/s measured.")


def test_figures_of_a_dry_run_have_a_file_of_their_own(tmp_path):
    names = [choose_path(out, dry_run=dry).name for out in ("a.b", str(tmp_path)) for dry in (False, True)]
    assert names == ["a.b.jsonl", "a.b.dry.jsonl", "gpu_report.jsonl", "gpu_report.dry.jsonl"]
    assert choose_path(f"{tmp_path}/new/", dry_run=False) == tmp_path / "new" / "gpu_report.jsonl"


# Failures


def test_a_figure_that_fails_is_written_and_the_next_one_goes_on(file, bench):
    def fail(bench):
        warnings.warn("The fast path tree is left out: it differs", stacklevel=1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run_figures(make_figures(first=fail, second=lambda bench: {"ms": 1.5}), bench, file)
    lines = file.read()
    assert "illegal memory access" in lines["first"]["error"] and "test_gpu_report.py:" in lines["first"]["error"]
    assert lines["first"]["said"] == ["The fast path tree is left out: it differs"]
    assert lines["second"]["values"] == {"ms": 1.5}
    text = page.format_page(lines, make_figures(third=None))
    assert "- first: RuntimeError: CUDA error" in text and "## Not tried yet\n\n- third" in text


def test_a_device_that_fails_ends_its_process(file, bench, monkeypatch):
    monkeypatch.setattr(bench.machine, "is_alive", lambda: False)
    with pytest.raises(SystemExit, match="the device failed in first"):
        run_figures(make_figures(first=lambda bench: {}, second=lambda bench: {}), bench, file)
    assert list(file.read()) == ["first"]


LINES = """
import json, os, sys, time
def add(name, **entries):
    with open({path!r}, "a") as file:
        file.write(json.dumps({{"figure": name, "time": time.time(), **entries}}) + "\\n")
def is_first():
    return not os.path.exists({path!r})
"""


@pytest.fixture
def run_children(file, monkeypatch):
    """run_children(code, figures, limit) -> figures of a group whose child processes run this code, with `file`"""

    def run(code: str, names: str, limit: float = 60.0, minutes: float = 5.0) -> dict[str, dict]:
        setting = LINES.format(path=str(file.path))
        popen = subprocess.Popen
        monkeypatch.setattr(
            children.subprocess,
            "Popen",
            lambda words, **options: popen([sys.executable, "-c", setting + code], **options),
        )
        figures = [Figure(name, 1, "group", "subject", lambda bench: {}, limit) for name in names.split()]
        Children(GpuReportOptions(minutes=minutes), file, []).run_group("group", figures)
        return file.read()

    return run


def test_a_process_that_dies_costs_one_figure(run_children):
    """Another process measures the rest."""
    code = """
if is_first():
    add("first", begun=True)
    print("out of luck", flush=True)
    os._exit(139)
add("second", begun=True)
add("second", values={"ms": 1.5})
"""
    lines = run_children(code, "first second")
    assert lines["first"]["error"] == "its process ended with 139: out of luck"
    assert lines["second"]["values"] == {"ms": 1.5}


def test_a_report_that_was_killed_within_a_figure_measures_it_again(run_children, file):
    file.append("other", begun=True, time=time.time() - 1e6)
    file.append("first", begun=True, time=time.time() - 1e6)
    lines = run_children("time.sleep(1); add('first', begun=True); add('first', values={'ms': 1.5})", "first")
    assert lines["first"]["values"] == {"ms": 1.5}


def test_a_process_that_measures_nothing_fails_figure_by_figure(run_children):
    lines = run_children("sys.exit('error: no torch')", "first second")
    assert [line["error"] for line in lines.values()] == ["its process ended with 1: error: no torch"] * 2


def test_a_figure_that_takes_too_long_is_ended(run_children):
    lines = run_children("add('first', begun=True); time.sleep(600)", "first", limit=0.1)
    assert lines["first"]["error"] == "took more than 0 s"


def test_minutes_that_are_over_cut_a_figure_and_leave_the_others(run_children):
    code = "add('first', begun=True); time.sleep(600)"
    lines = run_children(code, "first second", minutes=0.03)
    assert list(lines) == ["first"] and lines["first"]["error"] == children.OVER


def test_the_main_command_says_what_stopped_it(tmp_path):
    """Not where the launcher noticed it."""
    (tmp_path / "train.py").write_text("import sys; print('step 8'); sys.exit('error: no memory')")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(tmp_path / "train.py")]
    with pytest.raises(RuntimeError, match=r"error: no memory$"):
        checks.run_child(command, tmp_path)


def test_the_gpu_report_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device.*dry_run=true"):
        gpu_report.main([])
    for argument, message in (("part=4", "part=4 must be 1, 2 or 3"), ("nodes=a", "nodes=a must be a comma list")):
        with pytest.raises(ValueError, match=message):
            gpu_report.main([argument])


# The machine


def test_inductor_gets_the_options_of_the_mode(bench, monkeypatch):
    """In place of the runner's own; compiles are counted."""
    calls = []
    monkeypatch.setattr(torch._inductor, "compile", lambda module, examples, options: calls.append(options) or module)
    machine = Machine(torch.device("cpu"))
    machine.options = {modes.DESCENT: True}
    with machine.installed():
        compile.Runner(True)("double", lambda x: 2 * x, torch.ones(3))
    assert calls == [{**compile.CPU_OPTIONS, modes.DESCENT: True}] and machine.counts["compiles"] == 1


def test_waits_are_listed_by_their_places(bench, monkeypatch):
    """torch raises at the first one; then all are found as warnings."""
    mode = SimpleNamespace(now="default")

    def wait():
        if mode.now == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if mode.now == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    monkeypatch.setattr(bench.machine, "set_waits", lambda name: setattr(mode, "now", name))
    with pytest.raises(RuntimeError, match=r"waits for the device at \S+test_gpu_report.py:\d+ x 2$"):
        training.refuse_waits(bench, lambda: lambda: [wait() for _ in range(2)])
    assert mode.now == "default"
    with pytest.raises(RuntimeError, match="out of memory"):
        training.refuse_waits(bench, lambda: lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))


# The page


def test_the_page_names_states_of_the_code():
    lines = {name: {"subject": "subject", "code": name, "values": {"ms": 1.5}} for name in ("aaaa", "bbbb")}
    assert "of 2 states of the code (aaaa, bbbb)" in page.format_page(lines, make_figures(aaaa=None))
    assert "states of the code" not in page.format_page({"aaaa": lines["aaaa"]}, make_figures(aaaa=None))
