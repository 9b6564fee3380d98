"""Prints conversations as the trainer sees them: after the chat template, with the supervised tokens in green.

specdec show_data data=data/train.jsonl row=0 num=1 target.name=targets/smollm2-135m
"""

from specdec.options.command_line import options, run

import itertools
from dataclasses import dataclass, field

from specdec import loading
from specdec.core import progress
from specdec.target.model import load_tokenizer
from specdec.text.conversations import encode, show
from specdec.text.reading import at, check_messages, name_row, read_rows


@dataclass(frozen=True)
class ShowData:
    data: str = field(metadata={"help": "conversations: a .jsonl file, a folder of them, or a dataset"})
    row: int = field(default=0, metadata={"help": "index of the first row to print"})
    num: int = field(default=1, metadata={"help": "number of rows to print"})
    split: str | None = field(default=None, metadata={"help": loading.SPLIT})
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TEMPLATE)
    target: loading.TokenizerOptions = field(default_factory=loading.TokenizerOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(ShowData, __doc__, arguments)
    console = progress.Results()
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    template = loading.read_template(chosen.template, tokenizer)
    rows = []
    numbered = enumerate(read_rows(chosen.data, chosen.split))
    for number, (place, fields) in itertools.islice(numbered, chosen.row, chosen.row + chosen.num):
        check_messages(fields, place)
        with at(place):
            rows.append(encode(tokenizer, name_row(fields, number, template)))
    if not rows:
        raise ValueError(f"{chosen.data} has no row {chosen.row}. Choose a smaller row=.")
    for row in rows:
        left_out = f", {row.num_left_out} earlier answers left out" if row.num_left_out else ""
        console.rule(f"{row.id}  {row.category}  {len(row.tokens)} tokens, {sum(row.mask)} supervised{left_out}")
        console.print(show(tokenizer, row))


if __name__ == "__main__":
    run(main)
