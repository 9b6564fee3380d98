"""python scripts/show_data.py target=targets/smollm2-135m data=data/train.jsonl row=0 num=1 max_length=1024

Prints conversations as the trainer sees them: after the chat template, with the supervised tokens in green.
"""

from dataclasses import dataclass, field

import rich.console
from transformers import AutoTokenizer

from helpers.options import options
from train.data import encode, show, truncate
from train.reading import load_conversations


@dataclass(frozen=True)
class ShowData:
    target: str = field(metadata={"help": "folder or name of the target, for its tokenizer"})
    data: str = field(metadata={"help": "conversations: a .jsonl file, a folder of them, or a dataset"})
    row: int = field(default=0, metadata={"help": "index of the first row to print"})
    num: int = field(default=1, metadata={"help": "how many rows to print"})
    max_length: int = field(default=1024, metadata={"help": "rows are cut at this many tokens, as in training"})


def main() -> None:
    chosen = options(ShowData, __doc__)
    console = rich.console.Console(highlight=False)
    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    try:
        conversations = load_conversations(chosen.data, limit=chosen.row + chosen.num)[chosen.row :]
        if not conversations:
            raise ValueError(f"{chosen.data} has no row {chosen.row}. Choose a smaller row.")
        rows = [encode(tokenizer, conversation) for conversation in conversations]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for row in rows:
        kept = truncate(row, chosen.max_length)
        num_supervised = sum(kept.mask) if kept else 0
        console.rule(f"{row.id}  {row.category}  {len(row.tokens)} tokens, {num_supervised} supervised")
        console.print(show(tokenizer, kept) if kept else f"skipped: the prompt alone fills {chosen.max_length} tokens")


if __name__ == "__main__":
    main()
