"""Writes the page of a training run again: report.html beside the report.json of its best step. It needs no network.

specdec report run=checkpoints/eagle-smollm2-135m
"""

from helpers.options import options, run

from dataclasses import dataclass, field
from pathlib import Path

from train import progress
from train.pages import run_page


@dataclass(frozen=True)
class ReportOptions:
    run: str = field(metadata={"help": "folder of a run, or of one of its steps"})


def main(arguments: list[str] | None = None) -> None:
    chosen = options(ReportOptions, __doc__, arguments)
    progress.Results().say(f"written: {run_page.write(Path(chosen.run))}")


if __name__ == "__main__":
    run(main)
