"""Encoded rows in Arrow tables, which may be mapped from files, and their packing by first fit."""

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
import pyarrow.compute
import torch
from numpy import ndarray

from specdec.core.devices import round_up_power
from specdec.text.conversations import Row

ENCODED_FILE = "encoded.arrow"  # the file of a source's encoded rows
MAX_CUT_SHARE = 0.01  # share of rows that are cut, above which a longer pack is worth a warning
LONG_PACK = 4096  # tokens; in shorter packs rows keep their order, as in earlier versions
ROWS_PER_CHUNK = 2_000  # rows whose tokens are counted together: a few MB of them
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
)  # an encoded row


def make_columns(row: Row, *, greedy: bool = False, writer: str | None = None, prompts: Sequence[int] = ()) -> dict:
    """The columns of SCHEMA for a row. prompts: digests of the row's prompts"""
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


class EncodedRows:
    """The rows of several sources, numbered in their order.

    tables: one table of SCHEMA for each source
    """

    def __init__(self, tables: Sequence[pyarrow.Table]):
        self.source_starts = list(itertools.accumulate((len(table) for table in tables), initial=0))
        self.table = pyarrow.concat_tables(tables)
        batches = self.table.to_batches()
        self.batch_starts = list(itertools.accumulate((len(batch) for batch in batches), initial=0))
        self.token_lists = [(_split_lists(batch["tokens"]), _split_lists(batch["mask"])) for batch in batches]

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "EncodedRows":
        """Rows in memory."""
        return cls([pyarrow.Table.from_pylist([make_columns(row) for row in rows], SCHEMA)])

    @classmethod
    def load(cls, folders: Iterable[Path]) -> "EncodedRows":
        """Rows of files that are mapped and not read. folders: one for each source"""
        mapped_files = [pyarrow.memory_map(str(folder / ENCODED_FILE)) for folder in folders]
        return cls([pyarrow.ipc.open_stream(mapped_file).read_all() for mapped_file in mapped_files])

    def __len__(self) -> int:
        return self.source_starts[-1]

    def read_column(self, name: str) -> ndarray:
        """A column of numbers or texts of all rows, [R]."""
        return self.table[name].to_numpy()

    def prompt_digests(self, row_numbers: ndarray) -> ndarray:
        """The digests of the prompts of the numbered rows, increasing and each once, [N]."""
        return numpy.unique(pyarrow.compute.list_flatten(self.table["prompts"].take(row_numbers)).to_numpy())

    @cached_property
    def lengths(self) -> ndarray:
        """The number of tokens of each row, [R]."""
        return pyarrow.compute.list_value_length(self.table["tokens"]).to_numpy().astype(numpy.int64)

    def read_arrays(self, number: int, length: int) -> tuple[ndarray, ndarray]:
        """Tokens (int32) and mask (bool) of a row, cut to `length`."""
        index = bisect.bisect_right(self.batch_starts, number) - 1  # of the batch that holds the row
        row = number - self.batch_starts[index]
        (tokens, token_ends), (mask, mask_ends) = self.token_lists[index]
        start, mask_start = int(token_ends[row]), int(mask_ends[row])
        num_tokens = min(int(token_ends[row + 1]) - start, length)
        return tokens[start : start + num_tokens], mask[mask_start : mask_start + num_tokens].view(bool)

    def read_row(self, number: int, length: int) -> Row:
        """A row, cut to `length` tokens."""
        tokens, mask = self.read_arrays(number, length)
        names = {name: self.table[name][number].as_py() for name in ("id", "category")}
        return Row(**names, tokens=tokens.tolist(), mask=mask.tolist())

    def count_goals(self, length: int) -> ndarray:
        """Supervised tokens of each row behind the first one, among its first `length` tokens, [R]."""
        counts = (numpy.count_nonzero(self.read_arrays(number, length)[1][1:]) for number in range(len(self)))
        return numpy.fromiter(counts, dtype=numpy.int64, count=len(self))


def _split_lists(column: pyarrow.ListArray) -> tuple[ndarray, ndarray]:
    """The values of all rows of a batch [N], and where in them each row begins and the last one ends [R + 1]."""
    return column.values.to_numpy(), column.offsets.to_numpy()


def pack_first_fit(lengths: Sequence[int], capacity: int) -> ndarray:
    """The pack of each row, [R], by first fit: every row, in order, goes into the first pack with enough room.

    lengths: tokens of each row, none above `capacity`
    A tree over the packs holds the largest room under each node, so a row costs O(log R).
    """
    leaves = max(1, round_up_power(len(lengths)))
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
            largest_room = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest_room:
                break
            room[node] = largest_room
    return packs


def pack_rows(lengths: ndarray, capacity: int) -> ndarray:
    """The pack of each row, [R], by first fit; of long packs, rows above half a pack first, so that short ones fill up.

    lengths [R]: tokens of each row, none above `capacity`
    """
    is_short = lengths <= (capacity / 2 if capacity > LONG_PACK else capacity)
    order = numpy.argsort(is_short, kind="stable")
    packs = numpy.empty(len(lengths), dtype=numpy.int64)
    packs[order] = pack_first_fit(lengths[order].tolist(), capacity)
    return packs


class Packs(torch.utils.data.Dataset):
    """Rows cut to `length` tokens and packed, or one row in each pack. Items are packs for `collate`.

    row_numbers: the rows to pack, in this order; a row may occur several times. None: all rows
    fingerprint: 16 hex digits that change with any token, mask or boundary
    num_supervised: the goals of all packs
    Raises ValueError if no row remains.
    """

    def __init__(self, encoded: EncodedRows, *, length: int, packed: bool = True, row_numbers: ndarray | None = None):
        self.encoded, self.length = encoded, length
        row_numbers = numpy.arange(len(encoded)) if row_numbers is None else row_numbers
        goal_counts = encoded.count_goals(length)
        usable = row_numbers[goal_counts[row_numbers] > 0]
        self.num_cut, self.num_skipped = int((encoded.lengths[usable] > length).sum()), len(row_numbers) - len(usable)
        self.num_supervised = int(goal_counts[usable].sum())

        # The rows in the order of their packs, and where in them each pack ends, behind a 0
        cut_lengths = numpy.minimum(encoded.lengths[usable], length)
        pack_of_row = pack_rows(cut_lengths, length) if packed else numpy.arange(len(cut_lengths))
        self.packed_rows = usable[numpy.argsort(pack_of_row, kind="stable")]
        pack_sizes = numpy.bincount(pack_of_row)
        self.pack_ends = numpy.concatenate([[0], numpy.cumsum(pack_sizes)]).astype(numpy.int64)
        self.fingerprint = self._compute_fingerprint(numpy.repeat(pack_sizes, pack_sizes).tolist())
        if not len(self):
            raise ValueError(f"No row has a supervised token among their first {length}. Raise the length or add data.")

    def warn_of_losses(self) -> None:
        """Warns of rows that were skipped, of cut ones where they are many, and of answers without supervision."""
        num_rows = len(self.packed_rows) + self.num_skipped
        if self.num_skipped or self.num_cut > MAX_CUT_SHARE * num_rows:
            warnings.warn(
                f"Rows that are cut at {self.length} tokens: {self.num_cut} of {num_rows}; skipped, because their "
                f"prompt alone is that long: {self.num_skipped}. A longer data.length keeps them.",
                stacklevel=2,
            )
        if num_left_out := int(self.encoded.read_column("left_out")[numpy.unique(self.packed_rows)].sum()):
            warnings.warn(
                f"{num_left_out} answers of earlier turns are not supervised: the chat template writes them there "
                "without their thoughts, or behind another prompt. Give each of these turns as the last one of a row "
                "of its own.",
                stacklevel=2,
            )

    def _compute_fingerprint(self, pack_sizes: list[int]) -> str:
        """The digest of all packs. pack_sizes: rows in the pack of each packed row"""
        digest = hashlib.sha256()
        for number, pack_size in zip(self.packed_rows.tolist(), pack_sizes):
            tokens, mask = self.encoded.read_arrays(number, self.length)
            digest.update(numpy.array([pack_size, len(tokens)], dtype="<i8").tobytes())
            digest.update(tokens.astype("<i8").tobytes())
            digest.update(mask.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def template_arguments(self) -> dict[str, Any]:
        """The template arguments with which all rows were written; {}: unknown, or not the same for all rows."""
        distinct_arguments = set(self.encoded.read_column("arguments")[self.packed_rows].tolist())
        return json.loads(distinct_arguments.pop()) if len(distinct_arguments) == 1 else {}

    @property
    def writers(self) -> list[str]:
        """The fingerprint of the target that wrote each row; an empty text: unknown."""
        return self.encoded.read_column("writer")[self.packed_rows].tolist()

    @cached_property
    def prompt_digests(self) -> ndarray:
        """The digests of the prompts of all rows, increasing, [N]."""
        return self.encoded.prompt_digests(self.packed_rows)

    @property
    def num_tokens(self) -> int:
        """The tokens of all packs, without padding."""
        return int(numpy.minimum(self.encoded.lengths[self.packed_rows], self.length).sum())

    @cached_property
    def supervised_counts(self) -> torch.Tensor:
        """The number of times that each id is supervised, [highest supervised id + 1]."""
        counts = numpy.zeros(0, dtype=numpy.int64)
        for start in range(0, len(self.packed_rows), ROWS_PER_CHUNK):
            pairs = [
                self.encoded.read_arrays(number, self.length)
                for number in self.packed_rows[start : start + ROWS_PER_CHUNK].tolist()
            ]
            tokens = numpy.concatenate([tokens[mask] for tokens, mask in pairs])
            longer_counts = numpy.bincount(tokens, minlength=len(counts))
            longer_counts[: len(counts)] += counts
            counts = longer_counts
        return torch.from_numpy(counts)

    def __len__(self) -> int:
        return len(self.pack_ends) - 1

    def __getitem__(self, index: int) -> list[Row]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row_numbers = self.packed_rows[self.pack_ends[index] : self.pack_ends[index + 1]].tolist()
        return [self.encoded.read_row(number, self.length) for number in row_numbers]


# Selection and repetition of rows


def take_tokens(encoded: EncodedRows, row_numbers: ndarray, num_tokens: int | None) -> ndarray:
    """The first of the numbered rows, until they hold `num_tokens` supervised tokens; all rows for None."""
    counts = encoded.read_column("supervised")[row_numbers]
    return row_numbers if num_tokens is None else row_numbers[numpy.cumsum(counts) - counts < num_tokens]


def count_copies(num_rows: int, weight: Fraction) -> ndarray:
    """The number of times that each row occurs in an epoch, [num_rows]: floor((i + 1) w) - floor(i w) for row i.

    So weight 2 has every row twice, 0.5 every second row, and 1.5 every row once and every second row once more.
    """
    return numpy.diff([row_index * weight.numerator // weight.denominator for row_index in range(num_rows + 1)])


def repeat_rows(row_numbers: ndarray, copies: ndarray) -> ndarray:
    """Rows repeated `copies` times: all rows once, then the rows that come twice, and so on."""
    passes = [row_numbers[copies > pass_index] for pass_index in range(int(copies.max(initial=0)))]
    return numpy.concatenate([row_numbers[:0], *passes])


# Draft vocabularies


def choose_draft_vocab(packs: Packs, *, size: int | None, num_tokens: int) -> torch.Tensor | None:
    """The `size` ids that are supervised most often, increasing, [W]; None: the draft vocabulary is the whole one.

    num_tokens: size of the target's vocabulary. Ties prefer low ids.
    """
    if size is None or size >= num_tokens:
        return None
    frequencies = torch.zeros(num_tokens, dtype=torch.long)
    frequencies[: len(packs.supervised_counts)] = packs.supervised_counts
    return frequencies.argsort(descending=True, stable=True)[:size].sort().values


def measure_coverage(packs: Packs, vocab: torch.Tensor) -> float:
    """The share of the supervised tokens that are in a draft vocabulary. vocab [W]: its ids"""
    counts = packs.supervised_counts
    return float(counts[vocab[vocab < len(counts)]].sum() / counts.sum())
