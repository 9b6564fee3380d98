"""Writes the page of a training run or of a sweep again.

    specdec report run=checkpoints/eagle-smollm2-135m

The page of a run is report.html beside the report.json of its best step. For the folder of a sweep it is comparison.html of all
its runs. Pages need no network.
"""

from helpers.options import options, run

from dataclasses import dataclass, field
from pathlib import Path

from train import progress
from train.pages import comparison_page, run_page


@dataclass(frozen=True)
class ReportOptions:
    run: str = field(metadata={"help": "folder of a run, of one of its steps, or of a sweep"})


def main(arguments: list[str] | None = None) -> None:
    chosen = options(ReportOptions, __doc__, arguments)
    folder = Path(chosen.run)
    page = comparison_page if comparison_page.runs_in(folder) else run_page
    progress.Results().say(f"written: {page.write(folder)}")


if __name__ == "__main__":
    run(main)
