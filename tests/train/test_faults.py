"""Faults of a machine: two launches, kills, signals of schedulers, full disks, damaged files, processes that end."""

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.core import files
from specdec.core.lock import hold_lock
from specdec.core.resumable import open_resumable
from tests.support.commands import child_environment
from tests.support.runs import before_steps, losses_of
from tests.train import faults
from train.features import feature_files
from train.loop.trainer import Signals

HOLD = """
import os, sys, time
from pathlib import Path
from specdec.core.lock import hold_lock
with hold_lock(Path(sys.argv[1]), resource=Path('run')):
    {}os.write(1, b'held\\n')
    time.sleep(60)
"""
FORK = "import os; os.fork(); "  # the child lives on when its parent is killed


def hold(path: Path, code: str = "") -> subprocess.Popen:
    """A process that holds the lock, in a process group of its own."""
    process = subprocess.Popen([sys.executable, "-c", HOLD.format(code), str(path)], env=child_environment(), text=True,
                               stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    for _ in range(2 if code == FORK else 1):  # the child too: it closes the lock's file before it prints
        assert process.stdout.readline().startswith("held")
    return process


@pytest.mark.parametrize("code", ["", FORK])
def test_a_lock_names_its_holder_and_is_freed_by_kill_9(tmp_path, code):
    path = tmp_path / "lock"
    process = hold(path, code)
    try:
        wanted = rf"run is in use by process {process.pid} on {socket.gethostname()}, since .*: wait until"
        with pytest.raises(ValueError, match=wanted), hold_lock(path, resource=Path("run")):
            pass
        process.kill()
        process.wait()
        own_lock, refused_lock = (hold_lock(path, resource=Path("run")) for _ in range(2))
        with own_lock, pytest.raises(ValueError, match=f"process {os.getpid()}"), refused_lock:
            pass
        assert not path.exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.warns(UserWarning, match=r"has no locks \(Function not implemented\)"),
        hold_lock(tmp_path / "lock", resource=tmp_path),
    ):
        pass


def test_runs_and_results_in_use_are_refused(fit, tmp_path):
    path = Path("checkpoints/mine")
    with (
        hold_lock(path / "lock", resource=path),
        pytest.raises(ValueError, match="checkpoints/mine is in use by process"),
    ):
        fit("mine")
    rows = (tmp_path / "meta.json", tmp_path / "rows.jsonl", {})
    with (
        open_resumable(*rows, advice=""),
        pytest.raises(ValueError, match="in use by"),
        open_resumable(*rows, advice=""),
    ):
        pass
    with open_resumable(*rows, advice="") as results:
        results.append({"a": 1})


# Signals


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 0), ("SIGUSR1", 0), ("SIGINT", 130)])
def test_signals_save_after_the_step_and_the_same_command_continues(fit, capsys, number, status):
    with before_steps(lambda trainer: trainer.step == 2 and os.kill(os.getpid(), getattr(signal, number))):
        assert fit("run", "resume=auto") == status
    printed = capsys.readouterr().out
    assert "Interrupted after step 3; saved" in printed and "resume=auto" in printed
    assert list(losses_of("run")) == [1, 2, 3] and not Path("checkpoints/run/finished").exists()
    assert fit("run", "resume=auto") == 0 and list(losses_of("run")) == [1, 2, 3, 4]
    assert fit("run", "resume=auto") == 0 and "nothing left to do" in capsys.readouterr().out


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert signals.number == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (
        capfd.readouterr().err == "SIGTERM: stopping after this step.\n" and signal.getsignal(signal.SIGTERM) == before
    )


def test_a_run_killed_before_its_first_state_starts_again(fit):
    fit("whole")
    Path("checkpoints/killed").mkdir()
    Path("checkpoints/killed/log.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo')
    fit("killed", "resume=auto")
    assert losses_of("killed") == losses_of("whole")


# Full disks: the limit on the size of files is the system's own


@contextlib.contextmanager
def room_for(num_bytes: int):
    """Within, a file of this process cannot become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITES = {
    "append": lambda path, size: files.append_text(path, "x" * size + "\n", synced=True),
    "write_text": lambda path, size: files.write_text(path, "x" * size),
    "write_folder": lambda path, size: files.write_folder(
        path.with_name("folder"), tensors={"a.safetensors": {"a": torch.zeros(size)}}, documents={"b.json": {}}
    ),
    "feature_files": lambda path, size: feature_files.write_tensors(path, {"a": torch.zeros(size)}),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_damages_nothing(tmp_path, name):
    path = tmp_path / "file"
    WRITES[name](path, 10)
    before = contents(tmp_path)
    with room_for(1000), pytest.raises(ValueError, match=r"could not be written \(.*Free some disk space"):
        WRITES[name](path, 5000)
    assert contents(tmp_path) == before
    WRITES[name](path, 5000)
    assert contents(tmp_path) != before


@pytest.mark.parametrize(
    ("options", "room", "path"),
    [([], 20_000, "state/step_000002"), (["features.mode=cached"], 5000, r"cache/\w\w/")],
    ids=["state", "features"],
)
def test_a_run_on_a_full_disk_ends_in_a_sentence_and_resumes(fit, options, room, path):
    options = (*options, "features.folder=cache")
    fit("whole", *(each for each in options if "mode" in each), "features.folder=other")
    with room_for(room), pytest.raises(ValueError, match=rf"{path}.* could not be written"):
        fit("full", *options)
    fit("full", *options, "resume=true")
    assert losses_of("full") == losses_of("whole")
    assert not list(Path().rglob("*.partial"))


# Damaged caches


def test_damaged_features_are_named_and_made_again(fit):
    settings = ("features.mode=cached", "features.folder=cache", "data.pack=false")
    fit("first", *settings)
    before = contents(Path("cache"))
    packs = sorted(Path("cache").glob("*/*.safetensors"))
    packs[0].write_bytes(packs[0].read_bytes()[:-7])
    for pack, place in zip(packs[1:3], (-1, 300)):  # in a tensor, and in the header
        content = bytearray(pack.read_bytes())
        content[place] ^= 1
        pack.write_bytes(content)
    with pytest.warns(RuntimeWarning) as warned:
        fit("again", *settings)
    messages = [str(each.message) for each in warned if "made again" in str(each.message)]
    assert len(messages) == 3 and all(pack.name in " ".join(messages) for pack in packs[:3])
    assert losses_of("again") == losses_of("first") and contents(Path("cache")) == before


def test_every_flipped_bit_of_a_pack_is_found(tmp_path):
    path = tmp_path / "pack.safetensors"
    values = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    feature_files.write_tensors(path, {"4": values, "8": values + 1})
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with contextlib.suppress(ValueError):  # or the flip is of no consequence, such as of a blank in the header
                read = feature_files.read_tensors(path, ["4", "8"])
                assert (
                    torch.equal(read[0], values) and torch.equal(read[1], values + 1) and read[0].dtype == values.dtype
                )
    torch.save({}, path)
    with pytest.raises(ValueError, match="truncated or damaged"):
        feature_files.read_tensors(path, ["4"])


@pytest.mark.full
@pytest.mark.parametrize("name", faults.BEGUN)
def test_nothing_is_lost_by_kill_9_at_random_moments(tmp_path, name):
    faults.make_inputs(tmp_path)
    kills, lost = faults.kill_and_repeat(faults.commands(tmp_path)[name], tmp_path, 2, random.Random(name))
    assert kills == 2 and lost == []
