"""The report of `make gpu`, with a tiny target on this device: all its parts, what is kept of them, and what fails."""

import json
import math
import sys

import pytest
import torch

from benchmarks import gpu_report

TINY = ["device=cpu", "tiny=true"]


def read(out) -> dict:
    return json.loads(out.with_suffix(".json").read_text())["parts"]


@pytest.mark.full
def test_all_parts_are_done_once(capsys, tmp_path, monkeypatch):
    out = tmp_path / "report"
    gpu_report.main([*TINY, f"out={out}"])
    page, figures = out.with_suffix(".md").read_text(), read(out)
    assert len(figures) == 9 and not any("error" in row for row in figures.values())
    check_figures(figures)
    assert page.strip() in capsys.readouterr().out
    for title in ("training", "decoding", "tests"):
        assert f"## {title}" in page

    run_names = []
    monkeypatch.setattr(gpu_report, "run_measurement", lambda options, name, measure: run_names.append(name))
    gpu_report.write_figures(gpu_report.GpuReportOptions(out=str(out)), "tests", {"error": "cut"})
    for arguments, names in (([], ["tests"]), (["redo=true"], list(figures))):  # failures are tried again
        with pytest.raises(SystemExit):
            gpu_report.main([*TINY, f"out={out}", *arguments])
        assert run_names == names
        run_names.clear()


def check_figures(figures: dict[str, dict]) -> None:
    command = figures["main command"]
    assert command["steps"] == 3 and command["identical_outputs"] == 1 and all(map(math.isfinite, command["losses"]))
    on, off, other = (row for name, row in figures.items() if name.startswith("training"))
    assert (on["fast"], off["fast"], other["head"]) == ("on", "off", "mtp")
    assert on["flops"] == off["flops"] > other["flops"]
    decodings = {name: row for name, row in figures.items() if "decoding" in name}
    assert list(decodings) == [f"decoding {mode}, 24 tokens" for mode in gpu_report.MODES]
    for row in decodings.values():
        times = [row[f"{key}_ms"] for key in ("plain", "verify_1", "verify_4", "round_of_5")]
        assert min(times) > 0 and max(times) < math.inf
    assert "passed" in figures["tests"]["result"]
    assert any("No CUDA graphs" in text for text in decodings["decoding captured, 24 tokens"]["said"])


def test_a_part_that_fails_or_ends_its_process_is_written_and_the_next_goes_on(tmp_path, monkeypatch):
    def fail() -> dict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(
        gpu_report, "list_measurements", lambda options: {"first": fail, "second": lambda: {"figure": 1.5}}
    )
    with pytest.raises(SystemExit, match="1 parts failed"):
        gpu_report.main([*TINY, f"out={tmp_path}/report"])
    parts = read(tmp_path / "report")
    assert parts["second"]["figure"] == 1.5 and "illegal memory access" in parts["first"]["error"]
    assert "- first: RuntimeError: CUDA error" in (tmp_path / "report.md").read_text()
    options, run = gpu_report.GpuReportOptions(out=str(tmp_path / "report")), gpu_report.run_child
    code, seconds = "import os; os._exit(139)", 60.0
    monkeypatch.setattr(gpu_report, "run_child", lambda command, *arguments: run([command[0], "-c", code], *arguments))
    gpu_report.run_in_process(options, "first", [], seconds)
    assert "ended with 139" in read(tmp_path / "report")["first"]["error"]
    code, seconds = "input()", 0.0
    gpu_report.run_in_process(options, "first", [], seconds)
    found = read(tmp_path / "report")
    assert "took more than 0 s" in found["first"]["error"] and found["second"]["figure"] == 1.5


def test_time_that_is_over_leaves_parts_out(tmp_path):
    with pytest.raises(SystemExit, match="9 parts failed or were left out"):
        gpu_report.main([*TINY, f"out={tmp_path}/report", "minutes=0"])
    assert all("minutes were over" in each["error"] for each in read(tmp_path / "report").values())


def test_the_main_command_says_what_stopped_it(tmp_path):
    """Not where the launcher noticed it."""
    (tmp_path / "train.py").write_text("import sys; print('step 8'); sys.exit('error: no memory')")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(tmp_path / "train.py")]
    with pytest.raises(RuntimeError, match=r"error: no memory$"):
        gpu_report.run_child(command, tmp_path, 60)


def test_the_gpu_report_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given in ([], ["device=cpu"]):
        with pytest.raises(ValueError, match=r"no CUDA device.*tiny=true"):
            gpu_report.main(given)
