"""Encoded rows in Arrow tables, which may be mapped from files, and first-fit packing of them."""

import bisect
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import torch
from numpy import ndarray

from specdec.text.conversations import Row

ENCODED = "encoded.arrow"  # the file of a source's encoded rows
CHUNK = 2_000  # rows whose tokens are counted together
SCHEMA = pyarrow.schema(
    {
        "tokens": pyarrow.list_(pyarrow.int32()),
        "mask": pyarrow.list_(pyarrow.uint8()),  # 1 where the assistant wrote the token
        "id": pyarrow.string(),
        "category": pyarrow.string(),
        "supervised": pyarrow.int64(),  # supervised tokens
        "greedy": pyarrow.bool_(),  # written at temperature 0
        "arguments": pyarrow.string(),  # JSON of the template arguments with which it was written
        "left_out": pyarrow.int32(),  # answers of the history that are not supervised
        "writer": pyarrow.string(),  # fingerprint of the target that wrote it; empty: not known
        "prompts": pyarrow.list_(pyarrow.int64()),  # digests of its prompts (trained_prompts.py)
    }
)  # of an encoded row


def to_columns(row: Row, *, greedy: bool = False, writer: str | None = None, prompts: Sequence[int] = ()) -> dict:
    """A row as SCHEMA has it. prompts: digests of them"""
    return {
        "tokens": numpy.array(row.tokens, dtype=numpy.int32),
        "mask": numpy.array(row.mask, dtype=numpy.uint8),
        "id": row.id,
        "category": row.category,
        "supervised": sum(row.mask),
        "greedy": greedy,
        "arguments": json.dumps(row.arguments, sort_keys=True),
        "left_out": row.num_left_out,
        "writer": writer or "",
        "prompts": [*prompts],
    }


class Rows:
    """The rows of several sources, numbered in their order. tables: of SCHEMA, one for each source"""

    def __init__(self, tables: Sequence[pyarrow.Table]):
        self.starts = list(itertools.accumulate((len(table) for table in tables), initial=0))
        self.batches = [batch for table in tables for batch in table.to_batches() if len(batch)]
        self.firsts = list(itertools.accumulate((len(batch) for batch in self.batches), initial=0))  # row of each batch
        self.lists = [(_lists(batch["tokens"]), _lists(batch["mask"])) for batch in self.batches]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Rows":
        return cls([pyarrow.Table.from_pylist([to_columns(row) for row in rows], SCHEMA)])

    @classmethod
    def load(cls, folders: Iterable[Path]) -> "Rows":
        """Maps the file ENCODED of some folders, each of one source."""
        maps = [pyarrow.memory_map(str(folder / ENCODED)) for folder in folders]
        return cls([pyarrow.ipc.open_stream(each).read_all() for each in maps])

    def __len__(self) -> int:
        return self.starts[-1]

    def column(self, name: str) -> ndarray:
        """A column of numbers of all rows, [R]"""
        found = [batch[name].to_numpy(zero_copy_only=False) for batch in self.batches]
        return numpy.concatenate([numpy.zeros(0, dtype=numpy.int64), *found])

    def prompt_digests(self, numbers: ndarray) -> ndarray:
        """Digests of the prompts of the numbered rows, increasing, each once [N]"""
        is_numbered, parts = numpy.zeros(len(self), dtype=bool), [numpy.zeros(0, dtype=numpy.int64)]
        is_numbered[numbers] = True
        for first, batch in zip(self.firsts, self.batches):
            digests, ends = _lists(batch["prompts"])
            of_batch = digests[ends[0] : ends[-1]]
            parts.append(of_batch[numpy.repeat(is_numbered[first : first + len(batch)], numpy.diff(ends))])
        return numpy.unique(numpy.concatenate(parts))

    @cached_property
    def lengths(self) -> ndarray:  # [R]
        return numpy.concatenate(
            [numpy.zeros(0, dtype=numpy.int64), *(numpy.diff(ends) for (_, ends), _ in self.lists)]
        )

    def arrays(self, number: int, length: int) -> tuple[ndarray, ndarray]:
        """-> tokens (int32) and mask (bool) of a row, cut to `length`"""
        index = bisect.bisect_right(self.firsts, number) - 1  # of the batch that holds the row
        row = number - self.firsts[index]
        (tokens, ends), (mask, mask_ends) = self.lists[index]
        start, mask_start = int(ends[row]), int(mask_ends[row])
        num = min(int(ends[row + 1]) - start, length)
        return tokens[start : start + num], mask[mask_start : mask_start + num].view(bool)

    def row(self, number: int, length: int) -> Row:
        tokens, mask = self.arrays(number, length)
        index = bisect.bisect_right(self.firsts, number) - 1
        row_id, category = (
            self.batches[index][name][number - self.firsts[index]].as_py() for name in ("id", "category")
        )
        return Row(id=row_id, category=category, tokens=tokens.tolist(), mask=mask.tolist())

    def goals(self, length: int) -> ndarray:
        """Supervised tokens of each row that something precedes among its first `length` tokens, [R]"""
        counts = (numpy.count_nonzero(self.arrays(number, length)[1][1:]) for number in range(len(self)))
        return numpy.fromiter(counts, dtype=numpy.int64, count=len(self))


def _lists(column: pyarrow.ListArray) -> tuple[ndarray, ndarray]:
    """-> the values of all rows of a batch [N]; where in them each row begins, and the last one ends [R + 1]"""
    return column.values.to_numpy(), column.offsets.to_numpy()


def first_fit(lengths: Sequence[int], capacity: int) -> ndarray:
    """First fit: every row, in order, goes into the first pack with enough room. -> the pack of each row, [R]

    lengths: of the rows, none above `capacity`
    A tree over the packs holds the largest room under each node, so a row costs O(log R).
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node i has the children 2i and 2i + 1; the leaves are the packs
    packs = numpy.empty(len(lengths), dtype=numpy.int64)
    for row, length in enumerate(lengths):
        assert length <= capacity
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        packs[row] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
    return packs


class Packs(torch.utils.data.Dataset):
    """Rows cut to `length` and packed, or one row in each pack; items are packs for `collate`.

    numbers: the rows to pack, in this order; a row may occur several times. None: all
    `fingerprint` (16 hex digits) changes with any token, mask or boundary; `num_supervised` counts goals.
    One warning says how many rows were cut and skipped. Raises ValueError if no row remains.
    """

    def __init__(self, rows: Rows, *, length: int, packed: bool = True, numbers: ndarray | None = None):
        self.rows, self.length = rows, length
        numbers = numpy.arange(len(rows)) if numbers is None else numbers
        goals = rows.goals(length)
        kept = numbers[goals[numbers] > 0]
        self.num_cut, self.num_skipped = int((rows.lengths[kept] > length).sum()), len(numbers) - len(kept)
        self.num_supervised = int(goals[kept].sum())
        lengths = numpy.minimum(rows.lengths[kept], length)
        pack_of = first_fit(lengths.tolist(), length) if packed else numpy.arange(len(lengths))
        self.members = kept[numpy.argsort(pack_of, kind="stable")]  # the rows in the order of their packs
        sizes = numpy.bincount(pack_of)
        self.ends = numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int64)  # of each pack in it, after a 0
        self.fingerprint = self._digest(numpy.repeat(sizes, sizes).tolist())
        if self.num_cut or self.num_skipped:
            warnings.warn(
                f"Of {len(numbers)} rows, {self.num_cut} are cut at {length} tokens and {self.num_skipped} are "
                "skipped, because their prompt alone is that long. Raise the length to keep them.",
                stacklevel=2,
            )
        if num_left_out := int(self.rows.column("left_out")[numpy.unique(self.members)].sum()):
            warnings.warn(
                f"{num_left_out} answers of earlier turns are not supervised: the chat template writes them there without their "
                "thoughts, or behind another prompt. Give each of these turns as the last one of a row of its own.",
                stacklevel=2,
            )
        if not len(self):
            raise ValueError(f"No row has a supervised token among their first {length}. Raise the length or add data.")

    def _digest(self, sizes: list[int]) -> str:
        """sizes: rows in the pack of each member"""
        digest = hashlib.sha256()
        for number, size in zip(self.members.tolist(), sizes):
            tokens, mask = self.rows.arrays(number, self.length)
            digest.update(numpy.array([size, len(tokens)], dtype="<i8").tobytes())
            digest.update(tokens.astype("<i8").tobytes())
            digest.update(mask.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The template arguments with which all rows were written; {} if these are not known, or not the same"""
        different = set(self.rows.column("arguments")[self.members].tolist())
        return json.loads(different.pop()) if len(different) == 1 else {}

    @property
    def writers(self) -> list[str]:
        """Fingerprints of what wrote the rows; empty: not known"""
        return self.rows.column("writer")[self.members].tolist()

    @cached_property
    def prompt_digests(self) -> ndarray:
        """Digests of the prompts of the rows, increasing [N]"""
        return self.rows.prompt_digests(self.members)

    @property
    def num_tokens(self) -> int:
        """Tokens of all packs without padding."""
        return int(numpy.minimum(self.rows.lengths[self.members], self.length).sum())

    @cached_property
    def supervised_counts(self) -> torch.Tensor:
        """How often each id is supervised, up to the highest that is."""
        counts = numpy.zeros(0, dtype=numpy.int64)
        for start in range(0, len(self.members), CHUNK):
            pairs = [self.rows.arrays(number, self.length) for number in self.members[start : start + CHUNK].tolist()]
            tokens = numpy.concatenate([tokens[mask] for tokens, mask in pairs])
            more = numpy.bincount(tokens, minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        return torch.from_numpy(counts)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> list[Row]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        members = self.members[self.ends[index] : self.ends[index + 1]].tolist()
        return [self.rows.row(number, self.length) for number in members]


# Which rows


def take_tokens(rows: Rows, numbers: ndarray, num: int | None) -> ndarray:
    """The first of the numbered rows, until `num` supervised tokens are reached; all for None."""
    counts = rows.column("supervised")[numbers]
    return numbers if num is None else numbers[numpy.cumsum(counts) - counts < num]


def count_copies(num: int, weight: Fraction) -> ndarray:
    """How often each of `num` rows occurs in an epoch, [num]: row i floor((i + 1) w) - floor(i w) times.

    So weight 2 has every row twice, 0.5 every second row, and 1.5 every row once and every second row once more.
    """
    return numpy.diff([place * weight.numerator // weight.denominator for place in range(num + 1)])


def repeat_rows(numbers: ndarray, copies: ndarray) -> ndarray:
    """Every row as often as `copies` says: all rows once, then those that come twice, and so on."""
    passes = [numbers[copies > turn] for turn in range(int(copies.max(initial=0)))]
    return numpy.concatenate([numbers[:0], *passes])


# Draft vocabularies


def draft_vocab(packs: Packs, *, size: int | None, num_tokens: int) -> torch.Tensor | None:
    """A draft vocabulary, increasing ids [W]: the `size` that are supervised most often; None: all `num_tokens`. Ties prefer low ids."""
    if size is None or size >= num_tokens:
        return None
    frequencies = torch.zeros(num_tokens, dtype=torch.long)
    frequencies[: len(packs.supervised_counts)] = packs.supervised_counts
    return frequencies.argsort(descending=True, stable=True)[:size].sort().values


def covered(packs: Packs, vocab: torch.Tensor) -> float:
    """The share of the supervised tokens that are in the draft vocabulary, [W] ids."""
    counts = packs.supervised_counts
    return float(counts[vocab[vocab < len(counts)]].sum() / counts.sum())
