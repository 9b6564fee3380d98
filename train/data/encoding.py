"""Encodes whole sources once, with several processes, into Arrow files that all processes of a run map.

    data.cache/
      rows-<key>/    encoded.arrow: the rows of one source (packing.SCHEMA)

The key covers the source's content, the tokenizer with its chat template, the libraries that render and
tokenise, and this project's own code that does. files.make_folder_once makes the folders in one process of a run, and
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
from specdec.text import answer_mask, chat_template, conversations, messages, reading, token_text
from train.data import packing

NumberedRow = tuple[int, str, str | dict]  # a row: its index in the source, and what reading.read_raw yields of it

ROWS_PER_BATCH = 100  # rows that a process encodes at a time: sending them costs little beside encoding them
BATCHES_AHEAD = 4  # batches for each process that are read ahead of the writing, so that no process waits
ROWS_PER_WORKER = 2_000  # rows that pay for the start of one more process
CODE_MODULES = (
    answer_mask,
    chat_template,
    conversations,
    messages,
    packing,
    reading,
    row_files,
    token_text,
    trained_prompts,
)
CODE_FILES = [
    __file__,
    *(str(module.__file__) for module in CODE_MODULES),
]  # files on whose content encoded rows depend


@dataclass(frozen=True)
class Encoding:
    """The settings of encoding sources, from conf/data."""

    tokenizer: PreTrainedTokenizerBase
    cache: Path  # folder of encoded sources
    split: str | None = None  # a dataset's split; None: train
    limit: int | None = None  # rows of each source; None: all
    workers: int | None = None  # processes; None: as many as the cores and the rows allow
    arguments: dict[str, Any] = field(default_factory=dict)  # the chat template's, for rows that have none

    def __post_init__(self):
        chat_template.check_arguments(self.tokenizer, self.arguments)

    def compute_key(self, source: str) -> str:
        """16 hex digits that change with all that the encoded rows depend on."""
        tokenizer = self.tokenizer
        dependencies = [
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else token_text.digest_vocabulary(tokenizer),
            tokenizer.chat_template,
            token_text.count_ids(tokenizer),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            [library.__version__ for library in (transformers, tokenizers, jinja2)],
            [Path(path).read_text(encoding="utf-8") for path in CODE_FILES],
            identify_content(source, self.split),
            self.limit,
            self.arguments,
        ]
        return hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()[:16]


def identify_content(source: str, split: str | None) -> list:
    """The identity of a source's content: digests of its files, or the fingerprint that `datasets` gives."""
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
) -> tuple[packing.EncodedRows, numpy.ndarray]:
    """The encoded rows of one or several sources, and the numbers of the rows to train on.

    These are without the rows held out, cut at a number of supervised tokens, and repeated by weight.
    train: sources, as `reading.read_sources` takes them; hold_out, tokens: as in conf/data
    Raises ValueError, with file and line or the row, for what cannot be encoded.
    """
    weights = reading.read_sources(train)
    for source in weights:
        reading.check_trainable(source)
    folders = [encoding.cache / f"rows-{encoding.compute_key(source)}" for source in weights]
    for source, folder in zip(weights, folders):
        files.make_folder_once(folder, functools.partial(encode_source, source, encoding))
    encoded = packing.EncodedRows.load(folders)
    held_out = reading.choose_held_out(encoded.read_column("greedy").tolist(), hold_out)
    trainable = numpy.delete(numpy.arange(len(encoded)), held_out)
    row_numbers = packing.take_tokens(encoded, trainable, tokens)
    if any(weight != 1 for weight in weights.values()):
        row_counts = numpy.diff(numpy.searchsorted(row_numbers, encoded.source_starts)).tolist()  # rows of each source
        copies = [packing.count_copies(num_rows, weight) for num_rows, weight in zip(row_counts, weights.values())]
        row_numbers = packing.repeat_rows(row_numbers, numpy.concatenate(copies))
    return encoded, row_numbers


# One source


def read_source(source: str, encoding: Encoding) -> Iterator[tuple[str, str | dict]]:
    """The rows of a source up to the limit, as `reading.read_raw` yields them."""
    return itertools.islice(reading.read_raw(source, encoding.split), encoding.limit)


def count_rows(source: str, encoding: Encoding) -> int:
    """The number of rows that `read_source` yields."""
    if reading.find_files(source):
        return sum(1 for _ in read_source(source, encoding))
    num_rows = len(reading.open_dataset(source, encoding.split))
    return num_rows if encoding.limit is None else min(num_rows, encoding.limit)


def encode_source(source: str, encoding: Encoding, folder: Path) -> None:
    """Writes encoded.arrow into `folder`.

    Raises ValueError for a source without rows, and for a process that ends before its time.
    """
    num_rows = count_rows(source, encoding)
    if not num_rows:
        raise ValueError(f"There are no rows in {source}.")
    workers = encoding.workers or max(1, min(os.cpu_count() or 1, num_rows // ROWS_PER_WORKER))
    numbered_rows = ((index, location, raw) for index, (location, raw) in enumerate(read_source(source, encoding)))
    batches = iter(lambda: list(itertools.islice(numbered_rows, ROWS_PER_BATCH)), [])
    start_time = time.perf_counter()
    try:
        encoded_batches = encode_batches(batches, encoding, workers=workers)
        first_batch = next(encoded_batches)  # starts the processes: a fork must not copy a lock that draws the progress
        with (
            progress.start_task(f"encoding {Path(source).name}", num_rows, unit="rows", any_process=True) as task,
            pyarrow.OSFile(str(folder / packing.ENCODED_FILE), "wb") as file,
            pyarrow.ipc.new_stream(file, packing.SCHEMA) as stream,
        ):
            task.start_time = start_time
            for record_batch in itertools.chain([first_batch], encoded_batches):
                stream.write_batch(record_batch)
                task.advance(len(record_batch), num_tokens=len(record_batch["tokens"].values))
    except BrokenExecutor as error:
        raise ValueError(
            f"A process that encoded {source} ended ({error}). Perhaps memory ran out: lower workers={workers}."
        ) from error


def encode_batches(
    batches: Iterable[list[NumberedRow]], encoding: Encoding, *, workers: int
) -> Iterator[pyarrow.RecordBatch]:
    """The batches, encoded, in their order. workers: processes; 1: this process encodes"""
    if workers == 1:
        yield from (encode_batch(batch, encoding) for batch in batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or tokenizers warns that processes are forked
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)  # forks need no second import
    pool = ProcessPoolExecutor(workers, context, initializer=_set_encoding, initargs=(encoding,))
    try:
        futures: deque[Future[pyarrow.RecordBatch]] = deque()
        for batch in batches:
            futures.append(pool.submit(encode_batch, batch))
            if len(futures) > BATCHES_AHEAD * workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# In a process of the pool: a tokenizer takes longer to send than a batch to encode
_encoding_of_process: list[Encoding] = []


def _set_encoding(encoding: Encoding) -> None:
    _encoding_of_process[:] = [encoding]


def encode_batch(batch: list[NumberedRow], encoding: Encoding | None = None) -> pyarrow.RecordBatch:
    """Rows of a source, encoded as packing.SCHEMA. encoding: None in a process of the pool, which holds it"""
    encoding = encoding or _encoding_of_process[0]
    row_columns = []
    for index, location, raw in batch:
        row = reading.to_row(location, raw)
        reading.check_messages(row, location)
        with reading.name_location(location):
            encoded_row = conversations.encode(encoding.tokenizer, reading.name_row(row, index, encoding.arguments))
        columns = packing.make_columns(
            encoded_row,
            greedy=row.get("temperature") == 0,
            writer=str(row.get("target_fingerprint") or ""),
            prompts=trained_prompts.digest_row(row),
        )
        row_columns.append(columns)
    return pyarrow.RecordBatch.from_pylist(row_columns, packing.SCHEMA)
