"""Packs of a data set that is read as it comes, for data that does not fit on the disk as tokens.

The sources are endless: each begins again when it ends, and rows are drawn from them in turn, in shares that equal their
weights. Draws are cut into buffers, which are dealt to the processes like cards:

    draws     0 .. B-1 | B .. 2B-1 | 2B .. 3B-1 | ...        B = buffer
    buffer    0        | 0         | 1
    process   0        | 1         | 0                       of two

A buffer is encoded and packed by first fit, and its packs are shuffled by (seed, process, buffer). So the packs of a process
follow from the settings alone, and [buffer, number of its first pack] is all that continuing needs: rows before it are
skipped without parsing.
"""

import bisect
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from train.data import chat_template, packing, reading
from train.data import rows as data
from train.data.rows import Row

FIRST = 4096  # rows for the draft vocabulary and the closed-form start, at most one pass over the sources


@dataclass(frozen=True)
class Plan:
    """What a stream reads. Raises ValueError for settings that need the whole data set."""

    train: str | list[str] | dict[str, float]
    tokenizer: PreTrainedTokenizerBase
    length: int
    packed: bool
    buffer: int  # rows
    seed: int
    split: str | None = None
    limit: int | None = None  # rows of each source
    hold_out: int = 0
    tokens: int | None = None
    thinking: bool | None = None  # the mode of rows that do not say theirs

    def __post_init__(self):
        data.check_offsets(self.tokenizer)
        chat_template.check_mode(self.tokenizer, self.thinking)
        if self.tokens is not None:
            raise ValueError(
                f"tokens={self.tokens} counts over the whole data set: use limit= (rows) with stream=true."
            )

    def encode(self, place: str, index: int, raw: str | dict) -> Row | None:
        """A row cut to `length`; None if no goal is left."""
        encoded, _ = data.encode_raw(self.tokenizer, place, index, raw, thinking=self.thinking)
        return data.truncate(encoded, self.length)


@dataclass(frozen=True)
class Drawn:
    place: str
    index: int  # of the row in its source
    raw: str | dict
    again: bool  # whether the source had ended before


class Draws:
    """The endless draws of a plan."""

    def __init__(self, plan: Plan):
        self.found = reading.read_sources(plan.train)
        self.plan = plan
        self.held = self._hold_out()
        self.turns = reading.order_sources(self.found)

    def _rows(self, source: str) -> Iterator[tuple[int, tuple[str, str | dict]]]:
        rows = reading.read_raw(source, self.plan.split, streaming=True)
        return enumerate(itertools.islice(rows, self.plan.limit))

    def _hold_out(self) -> dict[str, set[int]]:
        """The rows of each source that are held out: the first ones written at temperature 0."""
        left, held = self.plan.hold_out, {source.name: set[int]() for source in self.found}
        for source in self.found:
            rows = self._rows(source.name) if left else iter(())
            for index, (place, raw) in rows:
                if reading.to_row(place, raw).get("temperature") == 0:
                    held[source.name].add(index)
                    left -= 1
                if not left:
                    break
        if left:
            raise ValueError(f"Too few rows were written at temperature 0: lower hold_out={self.plan.hold_out}.")
        return held

    def _endless(self, source: str) -> Iterator[Drawn]:
        again = False
        while True:
            empty = True
            for index, (place, raw) in self._rows(source):
                if index not in self.held[source]:
                    empty = False
                    yield Drawn(place, index, raw, again)
            if empty:
                raise ValueError(f"There are no rows in {source}.")
            again = True

    def __iter__(self) -> Iterator[Drawn]:
        endless = [self._endless(source.name) for source in self.found]
        for index in itertools.cycle(self.turns):
            yield next(endless[index])


def sizes(names: list[str]) -> str | None:
    """16 hex digits of the sizes of the files that are read: whether a stream has changed behind its first rows.

    None if a source is a dataset, which is not in files here.
    """
    found = [reading.find_files(name) for name in names]
    if not all(found):
        return None
    parts = [[(path.name, path.stat().st_size) for path in paths] for paths in found]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Stream:
    """The packs of one process, by their number from 0 on. They are read in order: `pack` only goes forward.

    `first`: packs of the first rows, the same in all processes; `files`: `sizes` of the sources. The next buffer is encoded by a thread meanwhile.
    """

    def __init__(self, plan: Plan, *, process: int = 0, num_processes: int = 1):
        self.plan, self.process, self.num_processes = plan, process, num_processes
        self.draws = Draws(plan)
        self.first = self._read_first()
        self.files = sizes([source.name for source in self.draws.found])
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self.seek([0, 0])

    def _read_first(self) -> packing.Packs:
        drawn = itertools.takewhile(lambda each: not each.again, itertools.islice(self.draws, FIRST))
        rows = [self.plan.encode(each.place, each.index, each.raw) for each in drawn]
        kept = [row for row in rows if row is not None]
        packs = packing.Packs(packing.Rows.of(kept), length=self.plan.length, packed=self.plan.packed)
        weights = [[source.name, str(source.weight)] for source in self.draws.found]
        parts = [packs.fingerprint, weights, self.plan.buffer, self.plan.limit, self.plan.hold_out]
        packs.fingerprint = "stream-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return packs

    def seek(self, position: list[int]) -> None:
        """Continues at a position that `position` gave."""
        buffer, first = position
        self.begun = buffer  # the buffer whose first pack is starts[0]
        self.starts = [first]  # first packs of buffers from `begun` on; the last one has not been read
        self.packs: list[list[Row]] = []  # of the newest buffer
        self.buffers = self._read_buffers(buffer)
        self.coming: Future[list[list[Row]]] = self.executor.submit(next, self.buffers)

    def position(self, number: int) -> list[int]:
        """What `seek` needs to continue with a pack that has been read, or with the next one."""
        place = bisect.bisect_right(self.starts, number) - 1
        return [self.begun + place, self.starts[place]]

    def pack(self, number: int) -> list[Row]:
        while number >= self.starts[-1]:
            self.packs = self.coming.result()
            self.starts.append(self.starts[-1] + len(self.packs))
            self.coming = self.executor.submit(next, self.buffers)
        assert number >= self.starts[-2], "packs are read in order"
        return self.packs[number - self.starts[-2]]

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _read_buffers(self, buffer: int) -> Iterator[list[list[Row]]]:
        """Yields the packs of this process' buffers, from one of them on."""
        draws, size = iter(self.draws), self.plan.buffer
        taken = 0
        for number in itertools.count(buffer):
            start = (number * self.num_processes + self.process) * size
            drawn = list(itertools.islice(draws, start - taken, start - taken + size))
            taken = start + size
            yield self._pack(drawn, number)

    def _pack(self, drawn: list[Drawn], buffer: int) -> list[list[Row]]:
        """The packs of a buffer's rows, shuffled."""
        plan = self.plan
        encoded = [plan.encode(each.place, each.index, each.raw) for each in drawn]
        rows = [row for row in encoded if row is not None]
        if not rows:
            raise ValueError(
                f"{drawn[0].place} and the {len(drawn) - 1} rows after it have no supervised token among their first "
                f"{plan.length}. Raise the length or the buffer."
            )
        if plan.packed:
            pack_of = packing.first_fit((len(row.tokens) for row in rows), plan.length, num=len(rows)).tolist()
        else:
            pack_of = list(range(len(rows)))
        packs: list[list[Row]] = [[] for _ in range(max(pack_of) + 1)]
        for row, index in zip(rows, pack_of):
            packs[index].append(row)
        random.Random(f"{plan.seed} {self.process} {buffer}").shuffle(packs)
        return packs
