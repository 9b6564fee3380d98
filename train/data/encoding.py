"""Encodes whole sources once: `datasets.map` with several processes, into Arrow files that all processes map.

    data.cache/
      rows-<key>/    encoded*.arrow: the rows of one source (packing.SCHEMA)
      packs-<key>/   members.npy, ends.npy: which rows are in which pack; facts.json with their fingerprint

The key of rows covers the source's content, the tokenizer with its chat template, the libraries that render and tokenise,
and this project's own code that does. `datasets` has fingerprints of its own, but notices no damaged file and lets each
process of a run encode; so the folders are made by files.keep_folder, with checksums and a lock.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import jinja2
import numpy
import tokenizers
import transformers
from numpy.lib.format import open_memmap
from transformers import PreTrainedTokenizerBase

from specdec.core import files, plain_text, row_files, token_ids
from specdec.proposers import datastore
from train import progress
from train.data import answer_mask, chat_template, packing, reading
from train.data import rows as data

BATCH = 100  # rows that a process encodes between two reports of its progress
SECONDS_BETWEEN_LOOKS = 0.5  # at how far the processes are
ROWS_PER_WORKER = 2_000  # starting a process pays from so many rows on
MODULES = (data, answer_mask, chat_template, reading, packing, row_files, plain_text, token_ids)
CODE = [__file__, *(str(module.__file__) for module in MODULES)]  # decides about the encoded rows
LINES = datasets.Features({"place": datasets.Value("string"), "line": datasets.Value("string")})


@dataclass(frozen=True)
class Encoding:
    """How sources are encoded. conf/data has the options."""

    tokenizer: PreTrainedTokenizerBase
    cache: Path
    split: str | None = None  # of a dataset; None: train, or the only one
    limit: int | None = None  # rows of each source
    workers: int | None = None  # processes; None: as many as the cores and the rows allow
    thinking: bool | None = None  # the mode of rows that do not say theirs

    def __post_init__(self):
        data.check_offsets(self.tokenizer)
        chat_template.check_mode(self.tokenizer, self.thinking)

    def key(self, source: str) -> str:
        """16 hex digits that change with anything the encoded rows depend on."""
        tokenizer = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else datastore.fingerprint(tokenizer),
            tokenizer.chat_template,
            token_ids.num_ids(tokenizer),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            [library.__version__ for library in (transformers, tokenizers, jinja2)],
            [Path(path).read_text(encoding="utf-8") for path in CODE],
            identify_content(source, self.split),
            self.limit,
            self.thinking,
        ]
        return _digest(parts)


def _digest(parts: list) -> str:
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


def load_packs(
    train: str | list[str] | dict[str, float],
    encoding: Encoding,
    *,
    hold_out: int = 0,
    tokens: int | None = None,
    length: int,
    packed: bool,
) -> packing.Packs:
    """The packs of one or several sources: encoded, held out, cut at a number of tokens, repeated by weight, packed.

    train: as reading.read_sources; hold_out, tokens: as conf/data. Raises ValueError, naming file and line or the row, for
    what cannot be encoded.
    """
    found = reading.read_sources(train)
    keys = [encoding.key(source.name) for source in found]
    folders = [encoding.cache / f"rows-{key}" for key in keys]
    for source, folder in zip(found, folders):
        files.keep_folder(folder, functools.partial(encode_source, source.name, encoding), option="cache=")
    rows = packing.Rows.load(folders)
    numbers = packing.first_tokens(rows, packing.hold_out(rows, hold_out), tokens)
    if any(source.weight != 1 for source in found):
        nums = numpy.diff(numpy.searchsorted(numbers, rows.starts)).tolist()  # rows of each source
        copies = [packing.count_copies(num, source.weight) for num, source in zip(nums, found)]
        numbers = packing.repeat(numbers, numpy.concatenate(copies))
    key = _digest([keys, [str(source.weight) for source in found], hold_out, tokens, length, packed])
    folder = encoding.cache / f"packs-{key}"
    return packing.Packs(rows, length=length, packed=packed, numbers=numbers, folder=folder)


# One source


def encode_source(source: str, encoding: Encoding, folder: Path) -> None:
    """Writes encoded*.arrow into `folder`."""
    work = folder / "work"
    work.mkdir()
    with _without_bars():
        rows = open_rows(source, encoding, work)
        if not len(rows):
            raise ValueError(f"There are no rows in {source}.")
        workers = encoding.workers or max(1, min(os.cpu_count() or 1, len(rows) // ROWS_PER_WORKER))
        workers = min(workers, len(rows))
        counts = open_memmap(work / "counts.npy", mode="w+", dtype=numpy.int64, shape=(workers, 2))
        with show_progress(f"encoding {Path(source).name}", len(rows), counts):
            try:
                rows.map(
                    Encoder(encoding, source, bool(reading.find_files(source)), work / "counts.npy"),
                    batched=True,
                    batch_size=BATCH,
                    with_indices=True,
                    with_rank=True,
                    remove_columns=rows.column_names,
                    features=datasets.Features.from_arrow_schema(packing.SCHEMA),
                    num_proc=workers if workers > 1 else None,
                    load_from_cache_file=False,
                    cache_file_name=str(folder / "encoded.arrow"),
                    new_fingerprint="encoded",
                )
            except RuntimeError as error:  # datasets' word for a process that was killed
                raise ValueError(
                    f"A process that encoded {source} ended ({error}). Perhaps memory ran out: lower workers={workers}."
                ) from error
    shutil.rmtree(work)


@dataclass(frozen=True)
class Encoder:
    """Called by `datasets.map` in its processes with some rows of a source."""

    encoding: Encoding
    source: str
    lines: bool  # whether rows are (place, line) of files, not rows of a dataset
    counts: Path  # int64 [processes, 2]: rows and tokens done

    def __call__(self, batch: dict[str, list], indices: list[int], rank: int | None = None) -> dict[str, list]:
        encoded = []
        for place, index in enumerate(indices):
            row = {name: values[place] for name, values in batch.items()}
            where = row["place"] if self.lines else f"{self.source} row {index}"
            raw = row["line"] if self.lines else row
            found, row = data.encode_raw(self.encoding.tokenizer, where, index, raw, thinking=self.encoding.thinking)
            encoded.append(packing.to_columns(found, greedy=row.get("temperature") == 0))
        counts = numpy.load(self.counts, mmap_mode="r+")
        counts[rank or 0] += (len(indices), sum(len(columns["tokens"]) for columns in encoded))
        return {name: [columns[name] for columns in encoded] for name in packing.SCHEMA.names}


def open_rows(source: str, encoding: Encoding, work: Path) -> datasets.Dataset:
    """The lines of files, or the rows of a dataset, as a memory-mapped table."""
    if not reading.find_files(source):
        rows = reading.open_dataset(source, encoding.split)
        return rows if encoding.limit is None else rows.select(range(min(encoding.limit, len(rows))))
    try:
        return datasets.Dataset.from_generator(
            read_lines,
            features=LINES,
            gen_kwargs={"source": source, "limit": encoding.limit},
            cache_dir=str(work / "lines"),
            fingerprint="lines",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


def read_lines(source: str, limit: int | None) -> Iterator[dict]:
    """The rows of files as LINES has them."""
    place = None
    for place, raw in itertools.islice(reading.read_raw(source, None), limit):
        line = raw if isinstance(raw, str) else json.dumps(reading.to_row(place, raw), default=str)
        yield {"place": place, "line": line}
    if place is None:
        raise ValueError(f"There are no rows in {source}.")


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Within, `datasets` draws no progress bars of its own."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def show_progress(what: str, num_rows: int, counts: numpy.ndarray) -> Iterator[None]:
    """Within, a thread shows the rows and the tokens so far. counts: [processes, 2], in a file that all processes change

    The display begins with the first rows, when all processes have been forked: a fork must not copy a lock that draws.
    """
    begun, ended = time.perf_counter(), threading.Event()

    def watch() -> None:
        while not counts.any() and not ended.wait(SECONDS_BETWEEN_LOOKS):
            pass
        with progress.start(what, num_rows, unit="rows", any_process=True) as task:
            task.begun, last = begun, False
            while not last:
                last = ended.wait(SECONDS_BETWEEN_LOOKS)
                rows, tokens = counts.sum(0).tolist()
                task.update(rows, num_tokens=tokens)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
