"""python scripts/report.py run=checkpoints/eagle-smollm2-135m

Writes the page of a training run again, beside the report.json of its best step: report.html, which needs no network.
"""

from dataclasses import dataclass, field
from pathlib import Path

from helpers.options import options, run
from train import progress
from train.pages import run_page


@dataclass(frozen=True)
class ReportOptions:
    run: str = field(metadata={"help": "folder of a run, or of one of its steps"})


def main() -> None:
    chosen = options(ReportOptions, __doc__)
    progress.Results().print(f"written: {run_page.write(Path(chosen.run))}")


if __name__ == "__main__":
    run(main)
