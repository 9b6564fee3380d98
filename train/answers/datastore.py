"""The texts of a datastore for retrieval, from conversations or plain texts (specdec/proposers/datastore.py has its files)."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy
import transformers

import specdec
from specdec.proposers import datastore
from train.data import chat_template, reading
from train.data import rows as data


def read_texts(
    source: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    split: str | None = None,
    limit: int | None = None,
    thinking: bool | None = None,
) -> Iterator[list[int]]:
    """Token ids of every text that is not empty.

    source: what `reading.read_rows` takes, with rows that have `text`, `messages`, `prompt` and `completion`, or token
        ids. Of conversations, only the assistant's turns are taken
    thinking: the mode of conversations that do not say theirs

    Raises ValueError for a row with neither `text` nor `messages`.
    """
    chat_template.check_mode(tokenizer, thinking)
    special = data.find_special(tokenizer)
    for number, (place, row) in enumerate(itertools.islice(reading.read_rows(source, split), limit)):
        if row.get("messages") is not None or reading.has_ids(row) or row.get("completion") is not None:
            reading.check_messages(row, place)
            with reading.at(place):
                encoded = data.encode(tokenizer, reading.name_row(row, number, thinking))
            yield from turns(encoded, special)
        elif isinstance(row.get("text"), str):
            with reading.at(place):
                tokens = data.tokenise(tokenizer, row["text"])["input_ids"]
            yield from filter(None, [tokens])
        else:
            raise ValueError(f'{place}: neither messages nor text. A row needs "messages": [...] or "text": "...".')


def turns(row: data.Row, special: set[int]) -> Iterator[list[int]]:
    """The assistant's turns, each with the chat template's opening of the turn before it, from its special token on.

    With the opening, a text that ends with a prompt finds the beginnings of answers.
    """
    stretches = itertools.groupby(range(len(row.mask)), key=row.mask.__getitem__)
    for supervised, places in stretches:
        stretch = list(places)
        if supervised:
            opening = next((i for i in range(stretch[0] - 1, -1, -1) if row.tokens[i] in special), stretch[0])
            yield row.tokens[opening : stretch[-1] + 1]


def build(
    out: Path,
    texts: list[list[int]],
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    length: int,
    about: dict,
    progress: Callable[[list], Iterable] = iter,
) -> None:
    """Writes the datastore of some texts into the folder `out`.

    length: how many tokens places are sorted by, the longest match that can be found
    about: what else datastore.json says, such as where the texts come from
    progress: wraps the rounds of sorting
    """
    tokens = datastore.join(texts)
    suffixes = datastore.sort(tokens, length, progress=progress)
    document = {
        "tokenizer_fingerprint": datastore.fingerprint(tokenizer),
        "num_texts": len(texts),
        "length": length,
        **about,
        "versions": {
            "specdec": specdec.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
    }
    datastore.write(out, tokens, suffixes, document)
