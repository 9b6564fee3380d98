"""Prints conversations as the trainer sees them: after the chat template, with the supervised tokens in green.

specdec show_data data=data/train.jsonl row=0 num=1 target.name=targets/smollm2-135m
"""

from specdec.options.command_line import read_command

import itertools

from specdec import loading
from specdec.core import progress
from specdec.core.option_types import Count, Options, Text, Whole
from specdec.core.wording import format_count
from specdec.options.command_types import TemplateSettings
from specdec.options.run_command import run_command
from specdec.options.target import TokenizerOptions
from specdec.target.model import load_tokenizer
from specdec.text.conversations import encode, show_row
from specdec.text.reading import check_messages, name_location, name_row, read_rows


class ShowDataOptions(Options):
    data: Text
    row: Whole
    num: Count
    split: Text | None
    template: TemplateSettings
    target: TokenizerOptions


def main(arguments: list[str] | None = None) -> None:
    options = read_command("show_data", ShowDataOptions, __doc__, arguments)
    console = progress.Results()
    tokenizer = load_tokenizer(options.target.name, trust_remote_code=options.target.trust_remote_code)
    template = loading.read_template(options.template, tokenizer)
    rows = []
    numbered = enumerate(read_rows(options.data, options.split))
    for number, (place, fields) in itertools.islice(numbered, options.row, options.row + options.num):
        check_messages(fields, place)
        with name_location(place):
            rows.append(encode(tokenizer, name_row(fields, number, template)))
    if not rows:
        raise ValueError(f"{options.data} has no row {options.row}. Choose a smaller row=.")
    for row in rows:
        left_out = f", {format_count(row.num_left_out, 'earlier answer')} left out" if row.num_left_out else ""
        size = f"{format_count(len(row.tokens), 'token')}, {sum(row.mask)} supervised"
        console.rule(f"{row.id}  {row.category}  {size}{left_out}")
        console.print(show_row(tokenizer, row))


if __name__ == "__main__":
    run_command(main, ShowDataOptions)
