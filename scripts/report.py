"""python scripts/report.py run=checkpoints/eagle-smollm2-135m

Writes the page of a training run again, beside the report.json of its best step: report.html, which needs no network. For
the folder of a sweep: comparison.html in that folder, of all its runs.
"""

from helpers.options import options, run

from dataclasses import dataclass, field
from pathlib import Path

from train import progress
from train.pages import comparison_page, run_page


@dataclass(frozen=True)
class ReportOptions:
    run: str = field(metadata={"help": "folder of a run, of one of its steps, or of a sweep"})


def main() -> None:
    chosen = options(ReportOptions, __doc__)
    folder = Path(chosen.run)
    page = comparison_page if comparison_page.runs_in(folder) else run_page
    progress.Results().say(f"written: {page.write(folder)}")


if __name__ == "__main__":
    run(main)
