"""Writes the page of a training run again, puts results side by side, or makes a board of records. Needs no network.

    specdec report run=checkpoints/eagle-smollm2-135m
    specdec report results=evaluation,other/evaluation
    specdec report records=served/record.json,records
    specdec report records=served out=forms dataset=openai/gsm8k
    specdec report board=records

The page is report.html beside the report.json of the run's best step. What differs and must not be compared is said
first. With out=, records also get the forms of others: acceptance_rate.json of specdec_bench, and with dataset= the
.eval_results/specdec.yaml of a repository on the Hugging Face Hub.
"""

from specdec.options.command_line import read_command, split_list

from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from specdec.core import hub, progress
from specdec.core.option_types import Options, Text, raise_first
from specdec.measuring import board, record_forms, records, results
from specdec.measuring.terminal_table import make_terminal_table
from specdec.options.command_types import OUTPUT_FOLDER
from specdec.options.run_command import run_command
from train.show import run_page


class ReportOptions(Options):
    run: Text | None
    results: str
    records: str
    out: Annotated[Text | None, OUTPUT_FOLDER]
    dataset: Text | None
    source: Text | None
    board: Text | None

    @model_validator(mode="after")
    def check_forms(self) -> "ReportOptions":
        raise_first(
            {
                "out= is of records=: give that, too, or leave it out.": bool(self.out and not self.records),
                "dataset= is of records= and out=: give these, too, or leave it out.": bool(
                    self.dataset and not self.out
                ),
                f"dataset={self.dataset} is no set of the Hugging Face Hub: give its user/name.": bool(
                    self.dataset and ("@" in self.dataset or not hub.is_hub_name(self.dataset))
                ),
                "source= is of dataset=: give that, too, or leave it out.": bool(self.source and not self.dataset),
            }
        )
        return self


def main(arguments: list[str] | None = None) -> None:
    options = read_command("report", ReportOptions, __doc__, arguments)
    console = progress.Results()
    if sum(map(bool, (options.run, options.results, options.records, options.board))) != 1:
        raise ValueError("Give one of run=, results=, records= and board=. See --help.")
    if options.run is not None:
        console.say(f"written: {run_page.write_run_page(Path(options.run))}")
    elif options.results:
        show_results(split_list(options.results), console)
    elif options.board is not None:
        for sentence in board.write_board(Path(options.board)):
            console.say(sentence)
        console.say(f"written: {options.board}/{board.PAGE} and {board.MARKDOWN}")
    else:
        contents = records.read_records(split_list(options.records))
        show_records(contents, console)
        write_forms(contents, options, console)


def show_results(folders: list[str], console: progress.Results) -> None:
    """Prints what differs between results, and their main figures."""
    documents = results.read_all_results(folders)
    for sentence in results.find_differences(documents):
        console.say(sentence)
    table = results.tabulate_side_by_side(documents)
    console.print(make_terminal_table("Side by side", table, console.width))


def show_records(contents: records.RecordFiles, console: progress.Results) -> None:
    """Prints what of the records may not be compared, their figures, and their checks."""
    numbered = {f"#{number}": record for number, record in enumerate(contents.records.values(), start=1)}
    names = [f"{number}: {name}" for number, name in zip(numbered, contents.records, strict=True)]
    for sentence in (*contents.refused, f"Records: {', '.join(names)}.", *records.describe_differences(numbered)):
        console.say(sentence)
    table = records.tabulate_records(numbered)
    console.print(make_terminal_table("Side by side", table, console.width))
    for sentence in (*records.describe_common_checks(numbered), *records.describe_notes(numbered)):
        console.say(sentence)
    for absence in contents.absences:
        console.say(f"{absence.drafter} in {absence.engine}: {absence.reason}")


def write_forms(contents: records.RecordFiles, options: ReportOptions, console: progress.Results) -> None:
    """Writes the records in the forms of others into out=, if it is given."""
    if options.out is None:
        return
    out = Path(options.out)
    console.say(f"written: {record_forms.write_rates(contents.records, contents.folder, out)}")
    if options.dataset is not None:
        path = record_forms.write_eval_results(contents.records, out, dataset=options.dataset, source=options.source)
        console.say(f"written: {path}")


if __name__ == "__main__":
    run_command(main, ReportOptions)
