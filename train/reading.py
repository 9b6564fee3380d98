"""Rows of conversations and of prompts, from the forms in which people have them."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from specdec.grammar import Grammar
from train.chat_template import options_of

FORMS = (
    "a .jsonl file, a folder of .jsonl files (each of them may be compressed: .jsonl.gz), "
    "a folder made by datasets' save_to_disk, or the name of a dataset"
)
ENDINGS = (".jsonl", ".jsonl.gz")
LONGEST_LINE = 2**26  # characters


def read_text(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, which is compressed with gzip if its name ends in .gz.

    Raises ValueError if the compressed file is incomplete, damaged or no gzip file.
    """
    if path.suffix != ".gz":
        with path.open(encoding="utf-8") as lines:
            yield from _lines(lines, path)
        return
    num_read = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in _lines(lines, path):
                num_read += 1
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: the compressed file is incomplete or damaged after line {num_read} ({error}). "
            "Copy or make the file again."
        ) from None


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Raises ValueError for a line of more than LONGEST_LINE characters: a small compressed file can hold a huge one."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path} has a line of more than {LONGEST_LINE:,} characters, which cannot be a row.")
        yield line


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, line) for every line that is not blank."""
    for number, line in enumerate(read_text(path), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def parse(place: str, line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ValueError(f"{place}: not valid JSON ({error}). Repair or remove the line.") from None
    if type(row) is not dict:
        raise ValueError(f"{place}: expected a JSON object, found {type(row).__name__}.")
    return row


def find_files(source: str) -> list[Path]:
    """The files of lines that `source` stands for; none if it is a dataset. Raises ValueError if there is nothing to read."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and (files := sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))):
        return files
    if path.is_dir() and not ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        raise ValueError(f"The folder {source} holds neither .jsonl files nor a saved dataset. Give {FORMS}.")
    if not path.exists() and path.name.endswith(ENDINGS):
        raise ValueError(f"There is no file {source}. Give {FORMS}.")
    return []


def open_dataset(source: str, split: str, *, streaming: bool = False) -> Any:
    """One split of a dataset that is in a folder or that `datasets.load_dataset` finds: a `Dataset`, or an `IterableDataset`.

    streaming: whether to read a dataset that is not in a folder as it comes, without a copy on the disk
    """
    import datasets  # here: it takes a second of each command's start, and most sources are files

    if Path(source).is_dir():
        data = datasets.load_from_disk(source)
        if isinstance(data, datasets.DatasetDict):
            if split not in data:
                raise ValueError(f"{source} has no split {split!r}; it has: {', '.join(data)}.")
            data = data[split]
        return data
    try:
        return datasets.load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        raise ValueError(f"Could not read {source!r}. Give {FORMS}. ({type(error).__name__}: {error})") from error


def read_raw(source: str, split: str, *, streaming: bool = False) -> Iterator[tuple[str, str | dict]]:
    """Yields (place, line) of files and (place, row) of a dataset."""
    if files := find_files(source):
        return itertools.chain.from_iterable(map(read_lines, files))
    data = open_dataset(source, split, streaming=streaming)
    return ((f"{source} row {index}", row) for index, row in enumerate(data))


def read_rows(source: str, split: str) -> Iterator[tuple[str, dict]]:
    """Yields (place, row) of any of the forms that `source` may take."""
    for place, row in read_raw(source, split):
        yield place, parse(place, row) if isinstance(row, str) else row


def named(row: dict, index: int, thinking: bool | None = None) -> dict:
    """The row with its `id` and `category`, by default its index and "all", and its thinking mode."""
    row_id, category = row.get("id"), row.get("category")
    mode = {} if thinking is None else {"thinking": thinking} | options_of({"thinking": row.get("thinking")})
    return {**row, **mode, "id": str(index if row_id is None else row_id), "category": "all" if category is None else category}


def has_ids(row: dict) -> bool:
    """Whether a row holds the token ids that the target read and wrote, so that it needs no messages (data.kept)."""
    return row.get("tokens") is not None and row.get("prompt_tokens") is not None


def check_messages(row: dict, place: str) -> list[dict]:
    """The messages; none for a row with token ids alone. Raises ValueError for a row with neither."""
    if row.get("messages") is None and has_ids(row):
        return []
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{place}: no messages. A row needs "messages": [{{"role": ..., "content": ...}}, ...].')
    for message in messages:
        check_calls(message, place)
    parts = [message.get(key) for message in messages for key in ("role", "content")]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{place}: every message needs a role and a content, both text.")
    options(row, place)
    return messages


def check_calls(message: dict, place: str) -> None:
    """A message that calls tools needs no content: it gets an empty one. Raises ValueError for calls that are none."""
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f'{place}: tool_calls must be a list such as [{{"function": {{"name": .., "arguments": ..}}}}].')
    if calls and message.get("content") is None:
        message["content"] = ""


def options(row: dict, place: str) -> dict:
    """`thinking` and `tools` of a row, as far as it has them. Raises ValueError for tools that are none."""
    try:
        return options_of(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def load_conversations(source: str, *, split: str = "train", limit: int | None = None) -> list[dict]:
    """Reads rows with `messages`, and `id` and `category` filled in; other keys are kept.

    `source` is a .jsonl or .jsonl.gz file, a folder of them, a folder made by `save_to_disk`, or a name for
    `load_dataset`; `split` concerns the last two. Raises ValueError, naming file and line, for a row that is no conversation.
    """
    conversations: list[dict] = []
    for place, row in itertools.islice(read_rows(source, split), limit):
        check_messages(row, place)
        conversations.append(named(row, len(conversations)))
    return conversations


def hold_out(conversations: list[dict], num: int) -> tuple[list[dict], list[dict]]:
    """The first `num` rows written at temperature 0, and the rest: what scripts/replay.py judges is not trained on."""
    greedy = [index for index, row in enumerate(conversations) if row.get("temperature") == 0][:num]
    if len(greedy) < num:
        raise ValueError(f"Only {len(greedy)} rows were written at temperature 0: lower hold_out={num}.")
    held = set(greedy)
    return [conversations[i] for i in greedy], [row for i, row in enumerate(conversations) if i not in held]


def load_prompts(source: str, *, limit: int | None = None) -> list[dict]:
    """Reads rows {"id", "category", "messages", "tags", "grammar"} that end where the assistant is to answer, with `thinking` and
    `tools` where a row has them.

    A row has a `prompt` (text), or `messages`, of which an assistant's at the end is left out. Rows with `dropped`, which a
    filter of prompts left out, are not read.
    """
    prompts: list[dict] = []
    rows = ((place, row) for place, row in read_rows(source, "train") if not row.get("dropped"))
    for place, row in itertools.islice(rows, limit):
        if isinstance(row.get("prompt"), str):
            messages = [{"role": "user", "content": row["prompt"]}]
        elif row.get("messages") is not None:
            messages = check_messages(row, place)
            answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if messages and messages[-1]["role"] == "assistant":
                messages = messages[: answers[-1]]
        else:
            raise ValueError(f'{place}: no prompt. A row needs "prompt": "..." or "messages": [...].')
        if not messages:
            raise ValueError(f"{place}: nothing comes before the assistant's message, so there is no prompt.")
        tags = row.get("tags") or []
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ValueError(f'{place}: tags must be a list of texts, such as ["code"].')
        row = named(row, len(prompts))
        try:
            rule = row.get("grammar") and Grammar.of_row(row["grammar"])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        prompts.append(
            {"id": row["id"], "category": row["category"], "messages": messages, "tags": tags, "grammar": rule or None}
            | options(row, place)
        )
    return prompts


def spread(rows: list[dict], num: int | None) -> list[dict]:
    """`num` rows, evenly over the list, so that a list sorted by category keeps its mixture; all rows for None.

    Raises ValueError if none would be left.
    """
    if not rows or num == 0:
        raise ValueError("No rows leave nothing to decode: give a file with some, and a limit of 1 or more.")
    if num is None or num >= len(rows):
        return rows
    return [rows[int((index + 0.5) * len(rows) / num)] for index in range(num)]
