"""Tests of specdec/measuring/servers/cpu_share.py, on a made-up /proc."""

import os
from pathlib import Path

import pytest

from specdec.measuring.servers import cpu_share
from specdec.measuring.servers.cpu_share import CpuMeter

URL = "http://127.0.0.1:8000"


@pytest.fixture
def proc(tmp_path, monkeypatch) -> Path:
    """This process, a server (20) with a worker (21), and another program (30); all times in ticks."""
    monkeypatch.setattr(cpu_share, "PROC", tmp_path)
    (tmp_path / "net").mkdir()
    heading, address = "  sl  local_address rem_address   st", "0100007F:1F40 00000000:0000"  # port 8000
    (tmp_path / "net" / "tcp").write_text(
        f"{heading}\n 0: {address} 0A 0:0 0:0 0 0 0 77 1\n 1: {address} 01 0 0 0 0 0 78\n"
    )
    write_times(tmp_path, busy=100, idle=900, ticks={os.getpid(): 5, 20: 10, 21: 20, 30: 65})
    (tmp_path / "20" / "fd").mkdir()
    (tmp_path / "20" / "fd" / "3").symlink_to("socket:[77]")
    (tmp_path / "20" / "comm").write_text("python\n")
    return tmp_path


def write_times(proc: Path, *, busy: int, idle: int, ticks: dict[int, int]) -> None:
    (proc / "stat").write_text(f"cpu  {busy - 3} 0 1 {idle - 4} 4 1 1 0 0 0\ncpu0 1 2\n")
    for number, value in ticks.items():
        folder, parent = proc / str(number), 20 if number == 21 else 1
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{number} (a (b) c) S {parent} 0 0 0 0 0 0 0 0 0 {value - 2} 1 1 0 20 0\n")


def test_other_programs_are_all_but_the_client_and_the_servers(proc):
    meter = CpuMeter.watch([URL])
    assert meter is not None and meter.roots == {os.getpid(), 20}
    before = meter.read()
    assert (before.total, before.busy, before.watched) == (1000, 100, 35)
    write_times(proc, busy=250, idle=950, ticks={os.getpid(): 15, 20: 30, 21: 70, 30: 145})
    assert meter.read().find_others(before) == pytest.approx((150 - 80) / 200)
    assert before.find_others(before) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:8001", "http://example.com:8000"])
def test_a_server_elsewhere_or_behind_a_forwarder_cannot_be_told(proc, url):
    assert CpuMeter.watch([URL, url]) is None
    (proc / "20" / "comm").write_text("docker-proxy\n")
    assert CpuMeter.watch([URL]) is None
