"""Rows of conversations and of prompts in people's own forms, and the weights of sources.

data.train=a.jsonl                       one source
data.train=[a.jsonl,b.jsonl]             several, each read once an epoch
'data.train={a.jsonl: 2, b.jsonl: 0.5}'  an epoch has a twice and every second row of b

The reader is the project's own. That of `datasets` silently drops half of a
surrogate pair, and names no file and line of a damaged row.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import yaml

from specdec.core import extensions
from specdec.core.row_files import FORMS, LINE_ENDINGS, PARQUET_ENDINGS, parse_line, read_file
from specdec.text.messages import normalise_messages, read_arguments, set_defaults, write_arguments

Item = TypeVar("Item")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
LICENCES = tuple("license licence copying notice terms readme".split())  # beginnings of names of files with terms
EVALUATION = r"evaluation[ -]data ?set[ -]licen[sc]e(?:[ -]agreement)?"
LIMITS = re.compile(
    rf"{EVALUATION}|cc[ -]by-n[cd][\w.-]*|no[ -]?derivatives?\b|attribution-non-?commercial"
    r"|non-?commercial (?:[\w-]+ ){0,3}only\b|for non-?commercial\b(?! (?:and|or) commercial)|not for commercial"
    r"|commercial use is (?:not|prohibited|forbidden)",
    re.IGNORECASE,
)
# In a README: a line such as license: mit with a list below it; a heading that names the licence, with its paragraph
LICENCE_STATEMENT = re.compile(
    r"^(?:[^\w\n]*licen[sc]e\w*[^\w\n]*:.*(?:\n[ \t]*- .*)*"
    r"|(?:#.*licen[sc]e.*|.*licen[sc]e.*\n[=-]{3,})\s*\n(?:.+\n?)+)",
    re.IGNORECASE | re.MULTILINE,
)


def list_suites() -> list[Path]:
    """The files of public questions, with their licences"""
    return [path for folder in extensions.list_conf_folders() for path in sorted(folder.glob("suite/*.yaml"))]


def read_sources(train: str | Sequence[str] | Mapping[str, float]) -> dict[str, Fraction]:
    """{source: weight} of the setting `train` in one of its three forms.

    Raises ValueError for no source, and for a weight of 0 or less.
    """
    train = [train] if isinstance(train, str) else train
    weights = dict(train) if isinstance(train, Mapping) else dict.fromkeys(train, 1)
    if not weights or (not isinstance(train, Mapping) and len(weights) < len(train)):
        raise ValueError(f"train={train}: give at least one source, and each once (a weight of 2 reads it twice).")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"train={weights}: the weight of {name} must be a number above 0, such as 2 or 0.5.")
    return {str(name): Fraction(str(weight)) for name, weight in weights.items()}


# The rows of a source


@contextlib.contextmanager
def name_location(location: str) -> Iterator[None]:
    """Within, a ValueError names the place of its row."""
    try:
        yield
    except ValueError as error:
        if location in str(error):
            raise
        raise ValueError(f"{location}: {error}") from error


def to_row(location: str, raw: str | dict) -> dict:
    """A row from `read_raw`, without null values and without empty lists of tools or calls.

    Arrow gives all structs of a column the same keys. So at any depth a null there means an absent key.
    """
    row = parse_line(location, raw) if isinstance(raw, str) else _without_nulls(raw)
    row = {key: value for key, value in row.items() if value is not None and (key, value) != ("tools", [])}
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        with name_location(location):
            row["messages"] = normalise_messages(messages)
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def find_files(source: str) -> list[Path]:
    """The files of a source; none for a dataset. Raises ValueError if there is nothing to read."""
    path = Path(source)
    if path.is_file():
        return [path]
    for endings in (LINE_ENDINGS, PARQUET_ENDINGS) if path.is_dir() else ():
        if files := sorted(file for file in path.iterdir() if file.name.endswith(endings)):
            return files
    if path.is_dir() and not ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        raise ValueError(f"The folder {source} holds neither .jsonl files nor a saved dataset. Give {FORMS}.")
    if not path.exists() and path.name.endswith((*LINE_ENDINGS, *PARQUET_ENDINGS, ".json")):
        raise ValueError(f"There is no file {source}. Give {FORMS}.")
    return []


def find_limit(files: Iterable[Path], phrases: re.Pattern[str] = LIMITS) -> tuple[Path, str] | None:
    """-> the licence, notice or README that limits the use of one of the files, and its phrase

    It lies in the folder of the file or in two above, up to a repository's root, below the home and the working folder.
    """
    for folder in dict.fromkeys(folder for file in files for folder in _folders(file)):
        with contextlib.suppress(OSError):  # this user may not read some folders
            for path in sorted(folder.iterdir()):
                if not path.name.lower().startswith(LICENCES) or not path.is_file():
                    continue
                with path.open("rb") as file:
                    text = file.read(2**20).decode(errors="replace").replace("\r\n", "\n")
                if path.name.lower().startswith("readme"):
                    text = "\n".join(match[0] for match in LICENCE_STATEMENT.finditer(text))
                if found := phrases.search(" ".join(text.split())):
                    return path, found[0]
    return None


def _folders(file: Path) -> Iterator[Path]:
    """Yields the folders in which a file's licence may lie. A link has two places."""
    for path in (Path(os.path.abspath(file)), file.resolve()):
        for number, folder in enumerate(path.parents[:3]):
            if number and folder in (Path.home(), Path.cwd()):
                break
            yield folder
            if (folder / ".git").exists():
                break


def check_trainable(source: str) -> None:
    """Raises ValueError for a source beside a licence for evaluation alone, and for a suite of the Hub with one."""
    alone = re.compile(EVALUATION, re.IGNORECASE)
    if Path(source).exists():
        if found := find_limit(find_files(source) or [Path(source) / "data"], alone):
            raise ValueError(
                f'{source} may not be trained on: {found[0]} says "{found[1]}". Give other data, or move yours away '
                "from that file."
            )
        return
    for entry in (yaml.safe_load(path.read_text()) for path in list_suites()) if "/" in source else ():
        place = entry["source"]["hub"] if isinstance(entry["source"], dict) else entry["source"]
        if f"/{source.strip('/')}/".casefold() in f"/{place}/".casefold() and alone.search(entry["licence"]["name"]):
            raise ValueError(f"{source} may not be trained on: {entry['licence']['name']}. Give other data.")


def open_dataset(source: str, split: str | None, *, config: str | None = None) -> Any:
    """One split, by default train, of a dataset in a folder, or of one that `datasets.load_dataset` finds.

    config: name of one of its configurations
    """
    import datasets  # imported here: it takes a second, and most sources are files

    split = split or "train"
    try:
        if not Path(source).is_dir():
            return datasets.load_dataset(source, config, split=split)
        dataset = datasets.load_from_disk(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Could not read split {split!r} of {source!r}. Give {FORMS}. ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(
            f"{source} has no split {split!r}; it has: {', '.join(dataset)}. Choose one with split= (train.py: "
            "data.split=, data.heldout_split=)."
        )
    return dataset[split]


def read_raw(source: str, split: str | None) -> Iterator[tuple[str, str | dict]]:
    """Yields (place, JSON text) or (place, row), for `to_row`."""
    if files := find_files(source):
        return itertools.chain.from_iterable(map(read_file, files))
    return ((f"{source} row {index}", row) for index, row in enumerate(open_dataset(source, split)))


def read_rows(source: str, split: str | None) -> Iterator[tuple[str, dict]]:
    """Yields (place, row) in any form of `source`."""
    return ((location, to_row(location, raw)) for location, raw in read_raw(source, split))


def name_row(row: dict, index: int, arguments: dict[str, Any] | None = None) -> dict:
    """The row with `id` and `category` as texts, by default its index and "all".

    arguments: variables of the chat template that the row may replace
    """
    row = set_defaults(row, arguments) if arguments else row
    return {**row, "id": _to_text(row.get("id"), str(index)), "category": _to_text(row.get("category"), "all")}


def number_ids(ids: list[str]) -> list[str]:
    """The ids, with a number after each repeated one, because results are joined by id"""
    numbered_ids: dict[str, None] = {}
    for id in ids:
        numbered = (f"{id} ({number})" for number in itertools.count(2))
        numbered_ids[
            next(candidate for candidate in itertools.chain([id], numbered) if candidate not in numbered_ids)
        ] = None
    return list(numbered_ids)


def _to_text(value: Any, default: str) -> str:
    """A text as it is; any other value as JSON"""
    if value is None or isinstance(value, str):
        return default if value is None else value
    return json.dumps(value, ensure_ascii=False, default=str)


def has_ids(row: dict) -> bool:
    """True if a row has the token ids that the target read and wrote, so that it needs no messages"""
    return row.get("tokens") is not None and row.get("prompt_tokens") is not None


def find_plain_text(row: dict) -> tuple[str | None, str] | None:
    """-> (prompt, completion) or (None, text) of a row; None if it has messages or neither"""
    prompt, completion, text = (row.get(key) for key in ("prompt", "completion", "text"))
    if row.get("messages") is not None:
        return None
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return (None, text) if isinstance(text, str) else None


def check_messages(row: dict, location: str) -> list[dict]:
    """The messages; none for plain text or token ids alone. Raises ValueError for a row with none of these."""
    messages = row.get("messages")
    if messages is None and (has_ids(row) or find_plain_text(row) is not None):
        return []
    with name_location(location):
        if not isinstance(messages, list) or not messages:
            keys = ", ".join(map(str, row)) or "none"
            raise ValueError(
                f'no messages (its keys: {keys}). A row needs "messages": a list [{{"role": ..., "content": ...}}, ...]'
                ' with at least one of them; or "prompt" and "completion", or "text", each a text.'
            )
        for number, message in enumerate(messages):
            _check_message(message, number)
        read_arguments(row)
        if not has_ids(row):  # ids are used as they are
            _check_roles(messages)
    return messages


def _check_message(message: Any, number: int) -> None:
    fields = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
    if not all(isinstance(field, str) for field in fields):
        raise ValueError(f"every message needs a role and a content, both text; messages[{number}] has not.")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError('tool_calls must be a list such as [{"function": {"name": .., "arguments": ..}}].')


def _check_roles(messages: list[dict]) -> None:
    roles = dict.fromkeys(message["role"] for message in messages)
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ValueError(
            f"unknown roles {', '.join(unknown)}; the row has {', '.join(roles)}. Rename them: known roles are "
            f"{', '.join(ROLES)}."
        )


def load_conversations(
    source: str, *, split: str | None = None, limit: int | None = None, arguments: dict[str, Any] | None = None
) -> list[dict]:
    """Rows with `messages` or plain text, and with `id` and `category`. Other keys stay.

    source: one of FORMS; split: split of a dataset, None: train
    arguments: variables of the chat template that rows may replace
    Raises ValueError, naming file and line, for a row that is no conversation.
    """
    conversations: list[dict] = []
    for location, row in itertools.islice(read_rows(source, split), limit):
        check_messages(row, location)
        conversations.append(name_row(row, len(conversations), arguments))
    return conversations


def choose_held_out(greedy: Sequence[bool], num: int) -> list[int]:
    """Numbers of the first `num` rows written at temperature 0, which `specdec replay` reads and no training.

    greedy: True for rows written at temperature 0
    """
    held = [index for index, is_greedy in enumerate(greedy) if is_greedy][:num]
    if len(held) < num:
        raise ValueError(f"Only {len(held)} rows were written at temperature 0: lower hold_out={num}.")
    return held


def load_prompts(source: str, *, split: str | None = None, limit: int | None = None) -> list[dict]:
    """Rows {"id", "category", "prompt", "messages", "tags", "grammar", "place"} that end where the target is to answer.

    They also have template arguments (messages.ARGUMENTS) and `tools`, if given. A row has a `prompt` (text: a user's
    message for chat models), or `messages` with `prompt` None. An assistant's message at the end is left out.
    """
    prompts = []
    for index, (location, row) in enumerate(itertools.islice(read_rows(source, split), limit)):
        with name_location(location):
            prompts.append(
                {
                    **_to_prompt(name_row(row, index), location),
                    "place": location,
                    **write_arguments(read_arguments(row)),
                }
            )
    return prompts


def _to_prompt(row: dict, location: str) -> dict:
    prompt = row["prompt"] if isinstance(row.get("prompt"), str) else None
    if prompt is not None:
        messages = [{"role": "user", "content": prompt}]
    elif row.get("messages") is not None:
        messages = check_messages(row, location)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    else:
        raise ValueError('no prompt. A row needs "prompt": "..." or "messages": [...].')
    if not messages:
        raise ValueError("nothing comes before the assistant's message, so there is no prompt.")
    tags = row.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError('tags must be a list of texts, such as ["code"].')
    said = {"id": row["id"], "category": row["category"], "prompt": prompt, "messages": messages, "tags": tags}
    return {**said, "grammar": row.get("grammar") or None}


def digest_prompts(prompts: list[dict]) -> str:
    """16 hex digits of the contents of rows of `load_prompts`, without their places"""
    values = []
    for row in prompts:
        values.append([value for key, value in row.items() if key != "place"])
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()[:16]


def spread_rows(rows: list[Item], num: int | None) -> list[Item]:
    """`num` rows, evenly over the list, so that a list sorted by category keeps its mixture; all rows for None.

    Raises ValueError if none would be left.
    """
    if not rows or num == 0:
        raise ValueError("no rows. Give a file with some, and a limit of 1 or more.")
    if num is None or num >= len(rows):
        return rows
    return [rows[int((index + 0.5) * len(rows) / num)] for index in range(num)]
