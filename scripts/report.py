"""Writes the page of a training run again, or puts results of evaluate side by side. It needs no network.

    specdec report run=checkpoints/eagle-smollm2-135m
    specdec report results=evaluation,other/evaluation

The page is report.html beside the report.json of the run's best step. Results of different protocols are not
comparable: what differs is said first.
"""

from specdec.options.command_line import read_command, split_list

from pathlib import Path

from specdec.core import progress
from specdec.core.option_types import Options, Text
from specdec.measuring import results
from specdec.measuring.terminal_table import make_terminal_table
from specdec.options.run_command import run_command
from train.show import run_page


class ReportOptions(Options):
    run: Text | None
    results: str


def main(arguments: list[str] | None = None) -> None:
    options = read_command("report", ReportOptions, __doc__, arguments)
    console = progress.Results()
    if (options.run is None) == (not options.results):
        raise ValueError("Give run=FOLDER of a training run, or results=FOLDER,FOLDER of specdec evaluate.")
    if options.run is not None:
        return console.say(f"written: {run_page.write_run_page(Path(options.run))}")
    documents = results.read_all_results(split_list(options.results))
    for sentence in results.find_differences(documents):
        console.say(sentence)
    table = results.tabulate_side_by_side(documents)
    console.print(make_terminal_table("Side by side", table, console.width))


if __name__ == "__main__":
    run_command(main, ReportOptions)
