"""Encodes whole sources once: `datasets.map` with several processes, then arrays on the disk that all processes map.

    data.cache/
      rows-<key>/    tokens.npy, mask.npy, ends.npy, ... of one source (packing.Part), about.json
      packs-<key>/   members.npy, ends.npy: which rows are in which pack, about.json with their fingerprint

The key of rows covers the source's content, the tokenizer with its chat template, the libraries that render and tokenise,
and this project's own code that does.
"""

import contextlib
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
import pyarrow
import tokenizers
import transformers
from numpy.lib.format import open_memmap
from transformers import PreTrainedTokenizerBase

from specdec.core import plain_text, token_ids
from specdec.proposers import datastore
from train import progress
from train.data import chat_template, disk_cache, packing, reading, sources
from train.data import rows as data
from train.data.sources import Source

BATCH = 100  # rows that a process encodes between two reports of its progress
SECONDS_BETWEEN_LOOKS = 0.5  # at how far the processes are
ROWS_PER_WORKER = 2_000  # starting a process pays from so many rows on
CODE = (
    "rows.py",
    "chat_template.py",
    "reading.py",
    "row_files.py",
    "encoding.py",
    "packing.py",
    plain_text.__file__,
    token_ids.__file__,
)  # decides about the arrays
COLUMNS = datasets.Features(
    {
        "tokens": datasets.List(datasets.Value("int32")),
        "mask": datasets.List(datasets.Value("uint8")),
        "name": datasets.Value("string"),
        "greedy": datasets.Value("bool"),
        "thinking": datasets.Value("int8"),
    }
)
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
        """16 hex digits that change with anything the arrays depend on."""
        tokenizer = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else datastore.fingerprint(tokenizer),
            tokenizer.chat_template,
            token_ids.num_ids(tokenizer),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            [library.__version__ for library in (transformers, tokenizers, jinja2)],
            [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in CODE],
            content(source, self.split),
            self.limit,
            self.thinking,
        ]
        return digest(parts)


def digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def content(source: str, split: str | None) -> list:
    """What identifies the content of a source: digests of its files, or the fingerprint that `datasets` gives."""
    files = reading.find_files(source)
    if not files and Path(source).is_dir():
        files = sorted(path for path in Path(source).rglob("*") if path.is_file())
    if not files:
        return [reading.open_dataset(source, split)._fingerprint]
    digests: list = [split]
    for path in files:
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

    train: as sources.read_sources; hold_out, tokens: as conf/data. Raises ValueError, naming file and line or the row, for
    what cannot be encoded.
    """
    found = sources.read_sources(train)
    keys = [encoding.key(source.name) for source in found]
    rows = packing.Rows([load_rows(source.name, key, encoding) for source, key in zip(found, keys)])
    numbers = packing.first_tokens(rows, packing.hold_out(rows, hold_out), tokens)
    if any(source.weight != 1 for source in found):
        numbers = packing.repeat(numbers, weigh(found, rows, numbers))
    key = digest([keys, [str(source.weight) for source in found], hold_out, tokens, length, packed])
    folder = encoding.cache / f"packs-{key}"
    return packing.Packs(rows, length=length, packed=packed, numbers=numbers, folder=folder)


def weigh(found: list[Source], rows: packing.Rows, numbers: numpy.ndarray) -> numpy.ndarray:
    """-> how often each of the numbered rows occurs in an epoch"""
    borders = numpy.searchsorted(numbers, rows.starts)
    return numpy.concatenate(
        [sources.copies(int(stop - start), each.weight) for each, start, stop in zip(found, borders, borders[1:])]
    )


def load_rows(source: str, key: str, encoding: Encoding) -> packing.Part:
    folder = encoding.cache / f"rows-{key}"
    disk_cache.keep(folder, lambda partial: encode_source(source, encoding, partial))
    return packing.Part.load(folder)


# One source


@dataclass(frozen=True)
class Encoder:
    """Called by `datasets.map` in its processes with some rows of a source."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    lines: bool  # whether rows are (place, line) of files, not rows of a dataset
    counts: Path  # int64 [processes, 2]: rows and tokens done
    thinking: bool | None = None  # as Encoding

    def __call__(self, batch: dict[str, list], indices: list[int], rank: int | None = None) -> dict[str, list]:
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        for place, index in enumerate(indices):
            row = {name: values[place] for name, values in batch.items()}
            where = row["place"] if self.lines else f"{self.source} row {index}"
            row = reading.to_row(where, row["line"] if self.lines else row)
            reading.check_messages(row, where)
            with reading.at(where):
                encoded = data.encode(self.tokenizer, reading.named(row, index, self.thinking))
            columns["tokens"].append(encoded.tokens)
            columns["mask"].append(encoded.mask)
            columns["name"].append(json.dumps([encoded.id, encoded.category]))
            columns["greedy"].append(row.get("temperature") == 0)
            columns["thinking"].append(packing.MODES.index(encoded.thinking))
        counts = numpy.load(self.counts, mmap_mode="r+")
        counts[rank or 0] += (len(indices), sum(map(len, columns["tokens"])))
        return columns


def encode_source(source: str, encoding: Encoding, folder: Path) -> dict:
    """Writes the arrays of packing.Part into `folder`. -> facts"""
    work = folder / "work"
    work.mkdir()
    with quiet():
        rows = open_rows(source, encoding, work)
        num_rows = len(rows)
        if not num_rows:
            raise ValueError(f"There are no rows in {source}.")
        workers = encoding.workers or max(1, min(os.cpu_count() or 1, num_rows // ROWS_PER_WORKER))
        workers = min(workers, num_rows)
        counts = open_memmap(work / "counts.npy", mode="w+", dtype=numpy.int64, shape=(workers, 2))
        with Progress(source, num_rows, counts):
            try:
                encoded = rows.map(
                    Encoder(
                        encoding.tokenizer,
                        source,
                        bool(reading.find_files(source)),
                        work / "counts.npy",
                        encoding.thinking,
                    ),
                    batched=True,
                    batch_size=BATCH,
                    with_indices=True,
                    with_rank=True,
                    remove_columns=rows.column_names,
                    features=COLUMNS,
                    num_proc=workers if workers > 1 else None,
                    load_from_cache_file=False,
                    cache_file_name=str(work / "encoded.arrow"),
                    new_fingerprint="encoded",
                )
            except RuntimeError as error:  # datasets' word for a process that was killed
                raise ValueError(
                    f"A process that encoded {source} ended ({error}). Perhaps memory ran out: lower workers={workers}."
                ) from error
        facts = write_arrays(encoded, folder)
    shutil.rmtree(work)
    return facts


def open_rows(source: str, encoding: Encoding, work: Path) -> datasets.Dataset:
    """The lines of files, or the rows of a dataset, as a memory-mapped table."""
    limit = encoding.limit
    if not reading.find_files(source):
        rows = reading.open_dataset(source, encoding.split)
        return rows if limit is None else rows.select(range(min(limit, len(rows))))
    try:
        return datasets.Dataset.from_generator(
            read_lines, features=LINES, gen_kwargs={"source": source, "limit": limit}, cache_dir=str(work / "lines"),
            fingerprint="lines",
        )  # fmt: skip
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


def read_lines(source: str, limit: int | None) -> Iterator[dict]:
    num_read = 0
    for place, raw in itertools.islice(reading.read_raw(source, None), limit):
        num_read += 1
        line = raw if isinstance(raw, str) else json.dumps(reading.to_row(place, raw), default=str)
        yield {"place": place, "line": line}
    if not num_read:
        raise ValueError(f"There are no rows in {source}.")


def write_arrays(encoded: datasets.Dataset, folder: Path) -> dict:
    """The columns of COLUMNS -> the files of packing.Part."""
    num_rows = len(encoded)
    columns = encoded.data
    num_tokens, num_bytes = (
        sum(pyarrow.compute.sum(size(chunk)).as_py() for chunk in columns.column(name).chunks if len(chunk))
        for name, size in (("tokens", pyarrow.compute.list_value_length), ("name", pyarrow.compute.binary_length))
    )
    shapes = {
        "tokens": (num_tokens, numpy.int32), "mask": (num_tokens, bool), "names": (num_bytes, numpy.uint8),
        "ends": (num_rows + 1, numpy.int64), "name_ends": (num_rows + 1, numpy.int64),
        "supervised": (num_rows, numpy.int64), "greedy": (num_rows, bool), "thinking": (num_rows, numpy.int8),
    }  # fmt: skip
    out = {
        name: open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(num,))
        for name, (num, dtype) in shapes.items()
    }
    row = token = byte = 0
    for table in encoded.with_format("arrow").iter(batch_size=10_000):
        parts = {name: table.column(name).combine_chunks() for name in COLUMNS}
        tokens = parts["tokens"].flatten().to_numpy(zero_copy_only=False)
        mask = parts["mask"].flatten().to_numpy(zero_copy_only=False).astype(bool)
        ends = numpy.cumsum(pyarrow.compute.list_value_length(parts["tokens"]).to_numpy())
        names = "".join(parts["name"].to_pylist()).encode()
        name_ends = numpy.cumsum(pyarrow.compute.binary_length(parts["name"]).to_numpy())
        rows = slice(row, row + len(ends))
        out["tokens"][token : token + len(tokens)] = tokens
        out["mask"][token : token + len(mask)] = mask
        out["names"][byte : byte + len(names)] = numpy.frombuffer(names, dtype=numpy.uint8)
        out["ends"][row + 1 : rows.stop + 1] = token + ends
        out["name_ends"][row + 1 : rows.stop + 1] = byte + name_ends
        out["supervised"][rows] = numpy.add.reduceat(mask, numpy.concatenate([[0], ends[:-1]]), dtype=numpy.int64)
        for name in ("greedy", "thinking"):
            out[name][rows] = parts[name].to_numpy(zero_copy_only=False)
        row, token, byte = rows.stop, token + len(tokens), byte + len(names)
    for array in out.values():
        array.flush()
    return {"num_rows": num_rows, "num_tokens": num_tokens}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within, `datasets` draws no bars of its own, and tokenizers does not warn that processes are forked."""
    shown = datasets.is_progress_bar_enabled()
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        if threads is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


class Progress:
    """Shows the rows and the tokens so far, as all processes count them.

    That begins with the first rows, when all processes have been forked: a fork must not copy a lock that draws.
    """

    def __init__(self, source: str, num_rows: int, counts: numpy.ndarray):
        self.name, self.num_rows, self.counts = Path(source).name, num_rows, counts
        self.begun = time.perf_counter()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.counts.any() and not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            pass
        with progress.start(f"encoding {self.name}", self.num_rows, unit="rows", any_process=True) as task:
            task.begun, ended = self.begun, False
            while not ended:
                ended = self.ended.wait(SECONDS_BETWEEN_LOOKS)
                rows, tokens = self.counts.sum(0).tolist()
                task.update(rows, num_tokens=tokens)

    def __enter__(self) -> "Progress":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()
