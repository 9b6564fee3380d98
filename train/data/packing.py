"""Encoded conversations in arrays, which may be memory-mapped, and first-fit packing of them."""

import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy
import torch
from numpy import ndarray

from train.data import disk_cache
from train.data.rows import Row

CHUNK = 2_000  # rows whose tokens are counted together
MODES = (None, True, False)  # of thinking, as numbers in Part.thinking
FEWEST = 2  # times that `more` must have seen a token


@dataclass(frozen=True)
class Part:
    """The rows of one source, one after the other: row r has the tokens from ends[r] to ends[r + 1]."""

    tokens: ndarray  # [N] int32
    mask: ndarray  # [N] bool, True where the assistant wrote the token
    ends: ndarray  # [R + 1] int64
    names: ndarray  # [bytes] uint8, the JSON of [id, category] of every row
    name_ends: ndarray  # [R + 1] int64
    supervised: ndarray  # [R] int64, supervised tokens of each row
    greedy: ndarray  # [R] bool, written at temperature 0
    thinking: ndarray  # [R] int8, places in MODES

    @classmethod
    def load(cls, folder: Path) -> "Part":
        """Maps the arrays. `asarray`, because slices of a memmap cost ten times as much as those of an array."""
        names = cls.__dataclass_fields__
        return cls(**{name: numpy.asarray(numpy.load(folder / f"{name}.npy", mmap_mode="r")) for name in names})

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Part":
        names = [json.dumps([row.id, row.category]).encode() for row in rows]
        return cls(
            tokens=numpy.array([token for row in rows for token in row.tokens], dtype=numpy.int32),
            mask=numpy.array([value for row in rows for value in row.mask], dtype=bool),
            ends=numpy.cumsum([0, *(len(row.tokens) for row in rows)]),
            names=numpy.array(list(b"".join(names)), dtype=numpy.uint8),
            name_ends=numpy.cumsum([0, *map(len, names)]),
            supervised=numpy.array([sum(row.mask) for row in rows], dtype=numpy.int64),
            greedy=numpy.zeros(len(rows), dtype=bool),
            thinking=numpy.array([MODES.index(row.thinking) for row in rows], dtype=numpy.int8),
        )


class Rows:
    """The rows of several sources, numbered in their order."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = list(parts)
        self.starts = list(itertools.accumulate((len(part.supervised) for part in self.parts), initial=0))

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Rows":
        return cls([Part.of(rows)])

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def lengths(self) -> ndarray:  # [R]
        return numpy.concatenate([numpy.diff(part.ends) for part in self.parts])

    @cached_property
    def supervised(self) -> ndarray:  # [R]
        return numpy.concatenate([part.supervised for part in self.parts])

    @cached_property
    def greedy(self) -> ndarray:  # [R]
        return numpy.concatenate([part.greedy for part in self.parts])

    def find(self, number: int) -> tuple[Part, int]:
        """-> the part that holds a row, and the row's number in it"""
        index = next(index for index, start in enumerate(self.starts[1:]) if number < start)
        return self.parts[index], number - self.starts[index]

    def arrays(self, number: int, length: int) -> tuple[ndarray, ndarray]:
        """-> tokens and mask of a row, cut to `length`"""
        part, row = self.find(number)
        start, stop = int(part.ends[row]), int(part.ends[row + 1])
        stop = min(stop, start + length)
        return part.tokens[start:stop], part.mask[start:stop]

    def row(self, number: int, length: int) -> Row:
        part, row = self.find(number)
        tokens, mask = self.arrays(number, length)
        row_id, category = json.loads(part.names[part.name_ends[row] : part.name_ends[row + 1]].tobytes())
        return Row(id=row_id, category=category, tokens=tokens.tolist(), mask=mask.tolist())

    def goals(self, length: int) -> ndarray:
        """Supervised tokens of each row that something precedes among its first `length` tokens, [R]"""
        return numpy.fromiter(
            (numpy.count_nonzero(self.arrays(number, length)[1][1:]) for number in range(len(self))),
            dtype=numpy.int64,
            count=len(self),
        )


def first_fit(lengths: Iterable[int], capacity: int, *, num: int) -> ndarray:
    """First fit: every row, in order, goes into the first pack with enough room. -> the pack of each row, [num]

    lengths: of `num` rows, none above `capacity`
    A tree over the packs holds the largest room under each node, so a row costs O(log num).
    """
    leaves = 1 << max(0, num - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node i has the children 2i and 2i + 1; the leaves are the packs
    packs = numpy.empty(num, dtype=numpy.int64)
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
    folder: where the order of the rows is kept for later runs; None: nowhere
    `fingerprint` (16 hex digits) changes with any token, mask or boundary; `num_supervised` counts goals.
    One warning says how many rows were cut and skipped. Raises ValueError if no row remains.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        length: int,
        packed: bool = True,
        numbers: ndarray | None = None,
        folder: Path | None = None,
    ):
        self.rows, self.length = rows, length
        numbers = numpy.arange(len(rows)) if numbers is None else numbers
        if folder is None:
            self.members, self.ends, facts = arrange(rows, numbers, length=length, packed=packed)
        else:
            facts = disk_cache.keep(folder, lambda partial: self._write(partial, numbers, packed))
            self.members, self.ends = (numpy.load(folder / f"{name}.npy") for name in ("members", "ends"))
        self.num_cut, self.num_skipped = facts["num_cut"], facts["num_skipped"]
        self.num_supervised, self.fingerprint = facts["num_supervised"], facts["fingerprint"]
        if self.num_cut or self.num_skipped:
            warnings.warn(
                f"Of {len(numbers)} rows, {self.num_cut} are cut at {length} tokens and {self.num_skipped} are skipped, "
                f"because their prompt alone is that long. Raise the length to keep them.",
                stacklevel=2,
            )
        if not len(self):
            raise ValueError(f"No row has a supervised token among its first {length}. Raise the length or add data.")

    def _write(self, folder: Path, numbers: ndarray, packed: bool) -> dict:
        members, ends, facts = arrange(self.rows, numbers, length=self.length, packed=packed)
        numpy.save(folder / "members.npy", members)
        numpy.save(folder / "ends.npy", ends)
        return facts

    @cached_property
    def modes(self) -> list[bool | None]:
        """The thinking modes in which rows were written; None: not known"""
        thinking = numpy.concatenate([part.thinking for part in self.rows.parts])
        return [MODES[place] for place in numpy.unique(thinking[self.members]).tolist()]

    @property
    def num_tokens(self) -> int:
        """Of all packs, padding not counted."""
        return int(numpy.minimum(self.rows.lengths[self.members], self.length).sum())

    @cached_property
    def supervised_counts(self) -> torch.Tensor:
        """How often each id is supervised, up to the highest that is."""
        counts = numpy.zeros(0, dtype=numpy.int64)
        for tokens in supervised_tokens(self):
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


def arrange(rows: Rows, numbers: ndarray, *, length: int, packed: bool) -> tuple[ndarray, ndarray, dict]:
    """-> the rows in the order of their packs, where in it each pack ends (after a 0), and facts about the packs"""
    goals = rows.goals(length)
    kept = numbers[goals[numbers] > 0]
    lengths = numpy.minimum(rows.lengths[kept], length)
    if packed:
        pack_of = first_fit(lengths.tolist(), length, num=len(kept))
    else:
        pack_of = numpy.arange(len(kept))
    members = kept[numpy.argsort(pack_of, kind="stable")]
    sizes = numpy.bincount(pack_of)
    facts = {
        "num_cut": int((rows.lengths[kept] > length).sum()),
        "num_skipped": len(numbers) - len(kept),
        "num_supervised": int(goals[kept].sum()),
        "fingerprint": fingerprint(rows, members, numpy.repeat(sizes, sizes), length),
    }
    return members, numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int64), facts


def fingerprint(rows: Rows, members: ndarray, sizes: ndarray, length: int) -> str:
    """sizes: for each member, how many rows its pack has"""
    digest = hashlib.sha256()
    for number, size in zip(members.tolist(), sizes.tolist()):
        tokens, mask = rows.arrays(number, length)
        digest.update(numpy.array([size, len(tokens)], dtype="<i8").tobytes())
        digest.update(tokens.astype("<i8").tobytes())
        digest.update(mask.tobytes())
    return digest.hexdigest()[:16]


# Which rows


def hold_out(rows: Rows, num: int) -> ndarray:
    """Numbers of all rows but the first `num` of those written at temperature 0, as reading.hold_out."""
    greedy = numpy.flatnonzero(rows.greedy)[:num]
    if len(greedy) < num:
        raise ValueError(f"Only {len(greedy)} rows were written at temperature 0: lower hold_out={num}.")
    return numpy.delete(numpy.arange(len(rows)), greedy)


def first_tokens(rows: Rows, numbers: ndarray, num: int | None) -> ndarray:
    """The first of the numbered rows, until `num` supervised tokens are reached; all for None."""
    counts = rows.supervised[numbers]
    return numbers if num is None else numbers[numpy.cumsum(counts) - counts < num]


def repeat(numbers: ndarray, copies: ndarray) -> ndarray:
    """Every row as often as `copies` says: all rows once, then those that come twice, and so on."""
    passes = [numbers[copies > turn] for turn in range(int(copies.max(initial=0)))]
    return numpy.concatenate([numbers[:0], *passes])


# What a run derives from its data


def supervised_tokens(packs: Packs) -> Iterator[ndarray]:
    """The supervised tokens of all packs, many rows at a time."""
    for start in range(0, len(packs.members), CHUNK):
        pairs = [packs.rows.arrays(number, packs.length) for number in packs.members[start : start + CHUNK].tolist()]
        yield numpy.concatenate([tokens for tokens, _ in pairs])[numpy.concatenate([mask for _, mask in pairs])]


def draft_vocab(
    packs: Packs, choice: str, before: torch.Tensor | None, *, size: int | None, num_tokens: int
) -> torch.Tensor | None:
    """A draft vocabulary, increasing ids [W]; None: all `num_tokens`. Ties prefer low ids.

    choice: data: the `size` ids that are supervised most often here; more: those of `before`, and of the others the most frequent ones
    that are supervised twice or more, until there are an eighth more than `size`
    """
    frequencies = torch.zeros(num_tokens, dtype=torch.long)
    frequencies[: len(packs.supervised_counts)] = packs.supervised_counts
    counts, ids = frequencies.sort(descending=True, stable=True)
    if choice == "data":
        return None if size is None or size >= num_tokens else ids[:size].sort().values
    if before is None:
        return None
    others = ids[(counts >= FEWEST) & ~torch.isin(ids, before.cpu())]
    room = None if size is None else max(0, size + size // 8 - len(before))
    return torch.cat([before.cpu(), others[:room]]).sort().values


def covered(packs: Packs, vocab: torch.Tensor) -> float:
    """The share of the supervised tokens that are in the draft vocabulary, [W] ids."""
    counts = packs.supervised_counts
    return float(counts[vocab[vocab < len(counts)]].sum() / counts.sum())
