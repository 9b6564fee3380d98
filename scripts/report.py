"""Writes the page of a training run again, or puts results of evaluate side by side. It needs no network.

    specdec report run=checkpoints/eagle-smollm2-135m
    specdec report results=evaluation,other/evaluation

The page is report.html beside the report.json of the run's best step. Results of different protocols are not comparable: what differs is
said first.
"""

from specdec.options.command_line import option, options, run, split

from dataclasses import dataclass
from pathlib import Path

from specdec.core import progress
from specdec.measuring import results_page
from specdec.measuring.evaluate import to_terminal
from train.show import run_page


@dataclass(frozen=True)
class ReportOptions:
    run: str | None = option(None, "folder of a run, or of one of its steps")
    results: str = option("", "comma list of folders of specdec evaluate")


def main(arguments: list[str] | None = None) -> None:
    chosen = options(ReportOptions, __doc__, arguments)
    console = progress.Results()
    if (chosen.run is None) == (not chosen.results):
        raise ValueError("Give run=FOLDER of a training run, or results=FOLDER,FOLDER of specdec evaluate.")
    if chosen.run is not None:
        return console.say(f"written: {run_page.write(Path(chosen.run))}")
    found = results_page.read(split(chosen.results))
    for sentence in results_page.say_differences(found):
        console.say(sentence)
    console.print(to_terminal("Side by side", results_page.tabulate_side_by_side(found)))


if __name__ == "__main__":
    run(main)
