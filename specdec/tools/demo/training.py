"""Part 2 of the demo: train.py on a service's answers, and both heads on answers that it has not read."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from specdec.core import progress
from specdec.heads.base import Drafter
from specdec.measuring import report
from specdec.measuring.replay import AnsweredPrompt, count_replays
from specdec.measuring.report import PromptCounts
from specdec.options import config_files
from specdec.tools.adapt.adapt import SHOWN_LINES
from specdec.tools.demo.budget import DRAFTING, until
from specdec.unroll import replay

VALIDATION = re.compile(r"step [1-9]\d*, ")  # the line of a validation behind the one before the first step
LAST_LINES = 12  # lines of a failed training that are shown


class TrainingProcess:
    """train.py under accelerate's launcher. launcher: the process; deadline: moment of the clock at which it ends

    lines: all lines so far; is_validated: whether a step behind the first one has been validated
    """

    def __init__(self, launcher: subprocess.Popen[str], deadline: float):
        self.launcher, self.deadline = launcher, deadline
        self.lines: list[str] = []
        self.is_validated = self.is_over = self.was_interrupted = False

    def follow(self) -> None:
        """Shows the lines of its steps until it has ended. Ctrl-C stops it."""
        assert self.launcher.stdout is not None
        while True:
            try:
                for line in self.launcher.stdout:
                    self.take_line(line.rstrip())
                return
            except KeyboardInterrupt:
                self.was_interrupted = True
                self.stop()

    def take_line(self, line: str) -> None:
        """Shows a line of a step, and stops at the deadline if there is a step to take."""
        self.lines.append(line)
        if SHOWN_LINES.match(line):
            progress.print_note(line)
        self.is_validated = self.is_validated or bool(VALIDATION.match(line))
        if self.is_validated and not self.is_over and time.perf_counter() > self.deadline:
            progress.print_note("The time of this part is over: its best step so far is taken.")
            self.is_over = True
            self.stop()

    def stop(self) -> None:
        """Ends the launcher at once, and train.py after its step, which closes the pipe."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGTERM)


def run_training(arguments: list[str], folder: Path, *, seconds: float) -> None:
    """Runs train.py by accelerate's launcher, and shows the lines of its steps. Ctrl-C stops it after its step.

    folder: the run's; seconds: time after which it ends at its best step, once one has been validated
    Raises ValueError with its last lines if it fails, KeyboardInterrupt if it was interrupted.
    """
    train = os.path.relpath(config_files.HOME / "train.py")
    progress.print_note(f"accelerate launch {train} {shlex.join(arguments)}")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", train, *arguments]
    deadline, merged = time.perf_counter() + seconds, subprocess.STDOUT
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=merged, text=True, start_new_session=True
    ) as launcher:
        process = TrainingProcess(launcher, deadline)
        process.follow()
    if process.was_interrupted:
        raise KeyboardInterrupt("Stopped; the training is saved. The same command continues.")
    if not process.is_over and not (folder / "finished").exists():
        errors = [line for line in process.lines if line.startswith("error:")]
        raise ValueError("\n".join(["The training failed:", *(errors or process.lines[-LAST_LINES:])]))


@dataclass(frozen=True)
class TrainingGain:
    """tau of the same answers before and after training, with the paired 95 % interval of its change."""

    answers: int
    before: float
    after: float
    change: float
    change_ci: list[float]

    def __str__(self) -> str:
        low, high = (100 * value / self.before for value in self.change_ci)
        return (
            f"tau {self.before:.2f} before, {self.after:.2f} after: {100 * self.change / self.before:+.0f} % "
            f"({low:+.0f} .. {high:+.0f}) on {self.answers} answers"
        )


def judge_heads(
    before: Drafter, after: Drafter, texts: list[AnsweredPrompt], label: str, *, seconds: float, least: int
) -> TrainingGain:
    """The change of tau by replay along answers, as many as the seconds allow. The target reads each text once."""
    counts: tuple[list[PromptCounts], list[PromptCounts]] = ([], [])
    tracked = progress.track_items(texts, label, unit="answers")
    for text in until(time.perf_counter() + seconds, tracked, least=least):
        pair = [(text.prompt, text.answer)]
        output = replay.read_target(before, pair)
        for drafter, counts_of_head in zip((before, after), counts):
            replays = replay.replay_answers(drafter, pair, depth=DRAFTING.depth, temperature=0, output=output)
            counts_of_head += count_replays(replays)
    change, interval = report.measure_tau_difference(counts[1], counts[0])
    return TrainingGain(len(counts[0]), report.compute_tau(counts[0]), report.compute_tau(counts[1]), change, interval)
