"""The texts of a datastore for retrieval, from conversations or plain texts."""

import itertools
from collections.abc import Iterator
from typing import Any

import transformers

from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.answer_mask import find_special


def read_texts(
    source: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    limit: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> Iterator[list[int]]:
    """Yields the token ids of every text that is not empty.

    source: source of reading.read_rows, whose rows have `text`, `messages`, `prompt` and `completion`, or token ids; of
        conversations, only the assistant's turns are taken
    arguments: variables of the chat template, for rows without their own
    Raises ValueError for a row with neither `text` nor `messages`.
    """
    special = find_special(tokenizer)
    for number, (source_place, row) in enumerate(itertools.islice(reading.read_rows(source, split), limit)):
        if row.get("messages") is not None or reading.has_ids(row) or row.get("completion") is not None:
            reading.check_messages(row, source_place)
            with reading.name_location(source_place):
                encoded = data.encode(tokenizer, reading.name_row(row, number, arguments))
            yield from split_turns(encoded, special)
        elif isinstance(row.get("text"), str):
            with reading.name_location(source_place):
                tokens = data.tokenise(tokenizer, row["text"])["input_ids"]
            yield from filter(None, [tokens])
        else:
            raise ValueError(
                f'{source_place}: neither messages nor text. A row needs "messages": [...] or "text": "...".'
            )


def split_turns(row: data.Row, special: set[int]) -> Iterator[list[int]]:
    """The assistant's turns, each with the chat template's opening of the turn before it, from its special token on.

    With the opening, a text that ends with a prompt finds the beginnings of answers.
    """
    stretches = itertools.groupby(range(len(row.mask)), key=row.mask.__getitem__)
    for supervised, places in stretches:
        stretch = list(places)
        if supervised:
            opening = next((i for i in range(stretch[0] - 1, -1, -1) if row.tokens[i] in special), stretch[0])
            yield row.tokens[opening : stretch[-1] + 1]
