"""Encodes whole sources once, with several processes, into Arrow files that all processes of a run map.

    data.cache/
      rows-<key>/    encoded.arrow: the rows of one source (packing.SCHEMA)

The key covers the source's content, the tokenizer with its chat template, the libraries that render and
tokenise, and this project's own code that does. files.keep_folder makes the folders in one process of a run, and
notices damaged ones. `datasets.map` does neither, and would need a copy of all lines on the disk.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy
import pyarrow
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from specdec.core import files, progress, row_files
from specdec.measuring import trained_prompts
from specdec.text import answer_mask, chat_template, messages, reading, token_text
from specdec.text import conversations as data
from train.data import packing

Numbered = tuple[int, str, str | dict]  # index in its source, place, and what reading.read_raw yields: of a row

BATCH = 100  # rows that a process encodes at a time
AHEAD = 4  # batches for each process that are read before they are written
ROWS_PER_WORKER = 2_000  # starting a process pays from so many rows on
MODULES = (data, answer_mask, chat_template, messages, reading, packing, trained_prompts, row_files, token_text)
CODE = [__file__, *(str(module.__file__) for module in MODULES)]  # decides about the encoded rows


@dataclass(frozen=True)
class Encoding:
    """How sources are encoded. conf/data has the options."""

    tokenizer: PreTrainedTokenizerBase
    cache: Path
    split: str | None = None  # of a dataset; None: train
    limit: int | None = None  # rows of each source
    workers: int | None = None  # processes; None: as many as the cores and the rows allow
    arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template, for rows that do not say them

    def __post_init__(self):
        chat_template.check_arguments(self.tokenizer, self.arguments)

    def key(self, source: str) -> str:
        """16 hex digits that change with anything the encoded rows depend on."""
        tokenizer = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else token_text.fingerprint(tokenizer),
            tokenizer.chat_template,
            token_text.num_ids(tokenizer),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            [library.__version__ for library in (transformers, tokenizers, jinja2)],
            [Path(path).read_text(encoding="utf-8") for path in CODE],
            identify_content(source, self.split),
            self.limit,
            self.arguments,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def identify_content(source: str, split: str | None) -> list:
    """What identifies the content of a source: digests of its files, or the fingerprint that `datasets` gives."""
    paths = reading.find_files(source)
    if not paths and Path(source).is_dir():
        paths = sorted(path for path in Path(source).rglob("*") if path.is_file())
    if not paths:
        return [reading.open_dataset(source, split)._fingerprint]
    digests: list = [split]
    for path in paths:
        with path.open("rb") as file:
            digests.append([path.suffix, hashlib.file_digest(file, "sha256").hexdigest()])
    return digests


def load_rows(
    train: str | list[str] | dict[str, float], encoding: Encoding, *, hold_out: int = 0, tokens: int | None = None
) -> tuple[packing.Rows, numpy.ndarray]:
    """One or several sources, encoded -> the rows, and the numbers of those to train on: without held-out ones, cut at a number
    of tokens, repeated by weight.

    train: as reading.read_sources; hold_out, tokens: as conf/data
    Raises ValueError, naming file and line or the row, for what cannot be encoded.
    """
    weights = reading.read_sources(train)
    for source in weights:
        reading.check_trainable(source)
    folders = [encoding.cache / f"rows-{encoding.key(source)}" for source in weights]
    for source, folder in zip(weights, folders):
        files.keep_folder(folder, functools.partial(encode_source, source, encoding))
    rows = packing.Rows.load(folders)
    kept = numpy.delete(numpy.arange(len(rows)), reading.hold_out(rows.column("greedy").tolist(), hold_out))
    numbers = packing.take_tokens(rows, kept, tokens)
    if any(weight != 1 for weight in weights.values()):
        nums = numpy.diff(numpy.searchsorted(numbers, rows.starts)).tolist()  # rows of each source
        copies = [packing.count_copies(num, weight) for num, weight in zip(nums, weights.values())]
        numbers = packing.repeat_rows(numbers, numpy.concatenate(copies))
    return rows, numbers


# One source


def read_source(source: str, encoding: Encoding) -> Iterator[tuple[str, str | dict]]:
    return itertools.islice(reading.read_raw(source, encoding.split), encoding.limit)


def count_rows(source: str, encoding: Encoding) -> int:
    """Rows that `read_source` yields."""
    if reading.find_files(source):
        return sum(1 for _ in read_source(source, encoding))
    num = len(reading.open_dataset(source, encoding.split))
    return num if encoding.limit is None else min(num, encoding.limit)


def encode_source(source: str, encoding: Encoding, folder: Path) -> None:
    """Writes encoded.arrow into `folder`."""
    num_rows = count_rows(source, encoding)
    if not num_rows:
        raise ValueError(f"There are no rows in {source}.")
    workers = encoding.workers or max(1, min(os.cpu_count() or 1, num_rows // ROWS_PER_WORKER))
    numbered = ((index, place, raw) for index, (place, raw) in enumerate(read_source(source, encoding)))
    batches = iter(lambda: list(itertools.islice(numbered, BATCH)), [])
    begun = time.perf_counter()
    try:
        encoded = encode_batches(batches, encoding, workers=workers)
        first = next(encoded)  # starts the processes: a fork must not copy a lock that draws the progress
        with (
            progress.start(f"encoding {Path(source).name}", num_rows, unit="rows", any_process=True) as task,
            pyarrow.OSFile(str(folder / packing.ENCODED), "wb") as file,
            pyarrow.ipc.new_stream(file, packing.SCHEMA) as stream,
        ):
            task.begun = begun
            for rows in itertools.chain([first], encoded):
                stream.write_batch(rows)
                task.advance(len(rows), num_tokens=len(rows["tokens"].values))
    except BrokenExecutor as error:
        raise ValueError(
            f"A process that encoded {source} ended ({error}). Perhaps memory ran out: lower workers={workers}."
        ) from error


def encode_batches(
    batches: Iterable[list[Numbered]], encoding: Encoding, *, workers: int
) -> Iterator[pyarrow.RecordBatch]:
    """`encode_batch` of each, in their order. workers: processes; 1: this one"""
    if workers == 1:
        yield from (encode_batch(batch, encoding) for batch in batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or tokenizers warns that processes are forked
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)  # forks need no second import
    pool = ProcessPoolExecutor(workers, context, initializer=_hold, initargs=(encoding,))
    try:
        coming: deque[Future[pyarrow.RecordBatch]] = deque()
        for batch in batches:
            coming.append(pool.submit(encode_batch, batch))
            if len(coming) > AHEAD * workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_held: list[Encoding] = []  # of a process of the pool: a tokenizer takes longer to send than a batch to encode


def _hold(encoding: Encoding) -> None:
    _held[:] = [encoding]


def encode_batch(batch: list[Numbered], encoding: Encoding | None = None) -> pyarrow.RecordBatch:
    """Rows of a source -> packing.SCHEMA. encoding: None in a process of the pool, which holds it"""
    encoding = encoding or _held[0]
    columns = []
    for index, place, raw in batch:
        row = reading.to_row(place, raw)
        reading.check_messages(row, place)
        with reading.at(place):
            encoded = data.encode(encoding.tokenizer, reading.name_row(row, index, encoding.arguments))
        writer = str(row.get("target_fingerprint") or "")
        about: dict = {
            "greedy": row.get("temperature") == 0,
            "writer": writer,
            "prompts": trained_prompts.digest_row(row),
        }
        columns.append(packing.to_columns(encoded, **about))
    return pyarrow.RecordBatch.from_pylist(columns, packing.SCHEMA)
