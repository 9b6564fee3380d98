"""Files and rows of conversations for tests of data."""

from pathlib import Path

from tests.support import write_rows
from train.data.rows import Row
from train.data.stream import Plan, Stream


def conversations(path: Path, num: int, *, first: int = 0, **more) -> str:
    """Writes rows with answers of different lengths. -> the path"""
    rows = [{"id": f"{path.stem}-{n}", **more, "messages": [{"role": "user", "content": f"Count from {n}."},
                                                   {"role": "assistant", "content": " ".join(map(str, range(n, n + 3 + n * n % 17)))}]}
            for n in range(first, first + num)]  # fmt: skip
    write_rows(path, rows)
    return str(path)


def make_rows(lengths) -> list[Row]:
    return [
        Row(str(n), "all", list(range(length)), [False] + [True] * (length - 1)) for n, length in enumerate(lengths)
    ]


def make_plan(tokenizer, train, **more) -> Plan:
    return Plan(
        **{"train": train, "tokenizer": tokenizer, "length": 64, "packed": True, "buffer": 8, "seed": 3, **more}
    )


def read(stream: Stream, numbers) -> list[list[str]]:
    packs = [[row.id for row in stream.pack(number)] for number in numbers]
    stream.close()
    return packs
