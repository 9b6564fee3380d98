"""Files of rows, and the treatment of damaged lines.

Files of users (`read_file`): lines in UTF-8, JSON documents, both compressed with gzip or not, and parquet. A damaged
line is refused with its place, the cause and what to do.

Files that this project appends to (`read_own_lines`): JSONL in UTF-8. A damaged line is yielded as None, which the
caller skips or refuses. `cut_damaged_end` removes the half line of a killed writer.
"""

import gzip
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specdec.core.untrusted import is_text

FORMS = (
    "a .jsonl file, a folder of .jsonl files (each of them may be compressed: .jsonl.gz), a .json or .parquet file, "
    "a folder made by datasets' save_to_disk, or the name of a dataset"
)
LINE_ENDINGS = (".jsonl", ".jsonl.gz")
PARQUET_ENDINGS = (".parquet",)
LONGEST_LINE = 2**26  # bytes
LONGEST_DOCUMENT = 2**28  # characters
GZIP_MAGIC = b"\x1f\x8b"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, *, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yields the lines of a text file in UTF-8, with or without a byte-order mark, compressed with gzip or not.

    longest: bytes of a line; a small compressed file can hold a huge one
    Raises ValueError, naming the line, for a longer line, a damaged file, and bytes that are not UTF-8.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC) else raw
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise ValueError(f"{path}:{number}: a line of more than {longest:,} bytes cannot be a row.")
                yield line.decode().removeprefix("\ufeff")  # also in the middle of joined files
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number}: byte 0x{error.object[error.start]:02x} is not UTF-8. Save the file as UTF-8, compressed "
            "with gzip or not; of a Latin-1 file, `iconv -f latin1 -t utf-8 FILE` makes one."
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: the compressed file is incomplete or damaged after line {number} ({error}). "
            "Copy or make the file again."
        ) from None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, line) for every line that is not blank."""
    for number, line in enumerate(read_text(path), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def read_file(path: Path) -> Iterator[tuple[str, str | dict]]:
    """Yields (place, JSON text) of each row, or (place, row) of parquet. Raises ValueError for other files."""
    name = path.name.lower().removesuffix(".gz")
    with path.open("rb") as file:
        if name.endswith(PARQUET_ENDINGS) or file.read(4) == b"PAR1":
            yield from read_parquet(path, file)
            return
    lines = read_document(path) if name.endswith(".json") else read_lines(path)
    for location, line in lines:
        if not name.endswith((".jsonl", ".json")) and not line.lstrip().startswith("{"):
            raise ValueError(f"{location} is no row: {path.name} holds no JSON. Give {FORMS}.")
        yield location, line


def read_document(path: Path) -> Iterator[tuple[str, str]]:
    """The rows of a .json file: a list, one row, or lines as in a .jsonl file"""
    text = ""
    for line in read_text(path, longest=LONGEST_DOCUMENT):
        text += line
        if len(text) > LONGEST_DOCUMENT:
            raise ValueError(f"{path} has more than {LONGEST_DOCUMENT:,} characters. Give a .jsonl file.")
    try:
        document = json.loads(text.strip() or "[]")
    except (ValueError, RecursionError) as error:
        try:
            json.loads(text.strip().partition("\n")[0])
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: not valid JSON ({error}). Repair it, or give {FORMS}.") from None
        yield from read_lines(path)
        return
    rows = document if isinstance(document, list) else [document]
    yield from ((f"{path} row {index}", json.dumps(row)) for index, row in enumerate(rows))


def read_parquet(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict]]:
    import pyarrow  # imported here, as most sources are text
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(file).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path} row {index}", row) for index, row in enumerate(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: the parquet file is damaged or incomplete ({str(error).splitlines()[0]}). Copy or make it again."
        ) from None


def parse_line(location: str, line: str) -> dict:
    """The JSON object of a line. Raises ValueError, naming the place, for other lines and for half a surrogate pair."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
        raise ValueError(f"{location}: not valid JSON ({error}). Repair or remove the line.") from None
    if type(row) is not dict:
        more = " Give a file with all rows in one list the ending .json." if type(row) is list else ""
        raise ValueError(f"{location}: expected a JSON object, found {type(row).__name__}.{more}")
    if SURROGATE.search(line) and not is_text(row):
        key = next(key for key, value in row.items() if not is_text({key: value}))
        raise ValueError(
            f"{location}: {json.dumps(key)} has half of a surrogate pair (\\ud800 .. \\udfff), which is no character. "
            "Repair or remove the line."
        )
    return row


# Files that this project appends to


def read_own_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """Yields (line number, row), None for a damaged line. A last line without an end is left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and line.strip():
                yield number, _parse_own(line)


def cut_damaged_end(path: Path) -> int:
    """Cuts off a last line without an end, left by a killed writer. -> bytes that were cut"""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < size:
            file.truncate(end)
    return size - end


def _parse_own(line: bytes) -> dict | None:
    try:
        return parse_line("", line.decode())
    except ValueError:  # also for bytes that are not UTF-8
        return None
