"""Hydra's multirun: python train.py -m head=eagle3,mtp optimizer.lr=1e-3,2e-3

Each job is a process of train.py with its overrides and a run folder of its own, so that accelerate's state is fresh.
A repeated sweep skips finished jobs and resumes interrupted ones. A job returns its best tau, which Hydra's sweepers
maximise.
"""

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec import checkpoint
from specdec.options import config_files

FLAGS = ("-m", "--multirun")
OPTIONS_IN_NAME = ("head", "target")  # options in the default name of a run
LAUNCHER_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # a variable that accelerate's launcher always sets
STOPPED_STATUS = 130  # exit status after Ctrl-C


def asks_for_multirun(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for several runs."""
    return any(flag in arguments for flag in FLAGS)


def refuse_launcher(arguments: Sequence[str]) -> str | None:
    """The sentence for a multirun under a launcher, which would start every job in every process; None without one."""
    if LAUNCHER_VARIABLE not in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    return f"a multirun starts its jobs itself: python train.py {' '.join(arguments)}"


def name_run(run: str, swept: Sequence[str], *, is_default: bool) -> str:
    """The folder of a job: the run's name and the job's own overrides, without characters that folders lack.

    is_default: whether the run has its default name, rather than that of run=
    """
    left_out = (*OPTIONS_IN_NAME, "run") if is_default else ("run",)
    others = [each for each in swept if each.partition("=")[0] not in left_out]
    return "-".join([run, *(re.sub(r"[^\w.=+]+", "-", each).strip("-") for each in others)])


@dataclass
class Multirun:
    """The jobs of a sweep. arguments: words of the command line; runs, failed: folders of finished and failed jobs"""

    arguments: Sequence[str] = ()
    runs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run_job(self, run: str, overrides: Sequence[str]) -> float:
        """Trains one job. -> its best tau; nan if it failed. Raises KeyboardInterrupt after Ctrl-C.

        run: name of the run as composed; overrides: all of the job's, as Hydra writes them
        """
        kept_overrides = [each for each in overrides if not each.startswith("run=")]
        swept = [each for each in overrides if each not in self.arguments]
        name = name_run(run, swept, is_default=kept_overrides == list(overrides))
        if not any(each.startswith("resume=") for each in kept_overrides):
            kept_overrides.append("resume=auto")
        command = [sys.executable, str(config_files.HOME / "train.py"), *kept_overrides, f"run={name}"]
        status = subprocess.run(command, check=False).returncode
        if status == STOPPED_STATUS:
            raise KeyboardInterrupt
        if status:
            print(f"{name} ended with status {status}; the other jobs go on.")
            self.failed.append(name)
            return math.nan
        self.runs.append(name)
        return read_tau(Path("checkpoints") / name)

    def describe_end(self) -> str:
        """The command that compares the jobs' heads, and the names of failed jobs."""
        folders = ",".join(f"checkpoints/{name}" for name in dict.fromkeys(self.runs))
        lines = [f"specdec evaluate checkpoint={folders}"] if folders else []
        lines += [f"Failed, and tried again by the same command: {', '.join(self.failed)}"] if self.failed else []
        return "\n".join(lines)


def read_tau(folder: Path) -> float:
    """tau of a run's best step, replayed if it was; nan if the run has no report."""
    try:
        report = checkpoint.read_json(checkpoint.resolve(folder) / "report.json")
    except ValueError:
        return math.nan
    tau = report.get("replayed_tau") or report.get("tau")
    return math.nan if tau is None else float(tau)
