"""Files and rows of conversations for tests of data."""

import copy
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.text.conversations import Row
from tests.support.commands import write_rows
from tests.support.targets import small_tokenizer

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TAIL = "{{ '<|im_end|>\n' }}{% endfor %}" + ASKS


def conversations(path: Path, num: int, *, first: int = 0, **fields) -> str:
    """Writes rows with answers of different lengths. -> the path"""
    rows = []
    for n in range(first, first + num):
        counted = " ".join(map(str, range(n, n + 3 + n * n % 17)))
        rows.append({"id": f"{path.stem}-{n}", **fields, "messages": pair(f"Count from {n}.", counted)})
    write_rows(path, rows)
    return str(path)


def pair(question: str, answer: str, **fields) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]


def as_row(messages: list[dict], **fields) -> dict:
    """A row as reading.load_conversations gives it."""
    return {"id": "row 7", "category": "all", "messages": messages, **fields}


def with_template(template: str | None) -> PreTrainedTokenizerBase:
    """The small tokenizer with another chat template. None: its own"""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def supervised(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[str]:
    """The text of each run of consecutive supervised tokens."""
    runs: list[list[int]] = []
    for place, token in enumerate(row.tokens):
        if row.mask[place]:
            runs = runs if place and row.mask[place - 1] else [*runs, []]
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def make_rows(lengths) -> list[Row]:
    return [
        Row(str(n), "all", list(range(length)), [False] + [True] * (length - 1)) for n, length in enumerate(lengths)
    ]
