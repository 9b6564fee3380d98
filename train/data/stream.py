"""Packs of a data set that is read as it comes, for data that does not fit on the disk as tokens.

The sources are endless: each begins again when it ends. Rows are drawn from them in turn, in shares that equal their
weights. Draws are cut into buffers, which are dealt to the processes like cards:

    draws     0 .. B-1 | B .. 2B-1 | 2B .. 3B-1 | ...        B = buffer
    buffer    0        | 0         | 1
    process   0        | 1         | 0                       of two

A buffer is encoded and packed by first fit, and its packs are shuffled by (seed, process, buffer). So the packs of a
process follow from the settings alone, and [buffer, number of its first pack] is all that continuing needs: rows before
it are skipped without parsing.

`datasets.interleave_datasets` draws sources at random, so that shares equal the weights only roughly, and deals single
rows to processes. Runs that were begun before would read other packs with it.
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
        chat_template.check_mode(self.tokenizer, self.thinking)
        for name, given in (("tokens", self.tokens), ("hold_out", self.hold_out)):
            if given:
                raise ValueError(f"{name}={given} counts over the whole data set: use limit= (rows), or stream=false.")


@dataclass(frozen=True)
class Drawn:
    place: str
    index: int  # of the row in its source
    raw: str | dict
    again: bool  # whether the source had ended before

    def encode(self, plan: Plan) -> Row | None:
        """The row, cut to the plan's length; None if no goal is left."""
        encoded, _ = data.encode_raw(plan.tokenizer, self.place, self.index, self.raw, thinking=plan.thinking)
        return data.truncate(encoded, plan.length)


def draw_rows(plan: Plan, sources: list[reading.Source]) -> Iterator[Drawn]:
    """The endless draws of a plan."""

    def read_endlessly(source: str) -> Iterator[Drawn]:
        for again in itertools.chain([False], itertools.repeat(True)):
            empty = True
            rows = reading.read_raw(source, plan.split, streaming=True)
            for index, (place, raw) in enumerate(itertools.islice(rows, plan.limit)):
                empty = False
                yield Drawn(place, index, raw, again)
            if empty:
                raise ValueError(f"There are no rows in {source}.")

    endless = [read_endlessly(source.name) for source in sources]
    for index in itertools.cycle(reading.order_sources(sources)):
        yield next(endless[index])


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Stream:
    """The packs of one process, by their number from 0 on, read in order: `pack` only goes forward.

    first: packs of the first rows, the same in all processes
    files: 16 hex digits of the files' sizes, which show changes behind the first rows; None if a source is a dataset
    A thread encodes the next buffer meanwhile.
    """

    def __init__(self, plan: Plan, *, process: int = 0, num_processes: int = 1):
        self.plan, self.process, self.num_processes = plan, process, num_processes
        self.sources = reading.read_sources(plan.train)
        self.first = self._read_first()
        found = [reading.find_files(source.name) for source in self.sources]
        sizes = [[(path.name, path.stat().st_size) for path in paths] for paths in found]
        self.files = _digest(sizes) if all(found) else None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self.seek([0, 0])

    def _read_first(self) -> packing.Packs:
        plan = self.plan
        drawn = itertools.takewhile(lambda each: not each.again, itertools.islice(draw_rows(plan, self.sources), FIRST))
        rows = [row for each in drawn if (row := each.encode(plan)) is not None]
        packs = packing.Packs(packing.Rows.of(rows), length=plan.length, packed=plan.packed)
        weights = [[source.name, str(source.weight)] for source in self.sources]
        packs.fingerprint = "stream-" + _digest([packs.fingerprint, weights, plan.buffer, plan.limit, plan.hold_out])
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
        draws, size = draw_rows(self.plan, self.sources), self.plan.buffer
        taken = 0
        for number in itertools.count(buffer):
            start = (number * self.num_processes + self.process) * size
            drawn = list(itertools.islice(draws, start - taken, start - taken + size))
            taken = start + size
            yield self._pack(drawn, number)

    def _pack(self, drawn: list[Drawn], buffer: int) -> list[list[Row]]:
        """The packs of a buffer's rows, shuffled."""
        plan = self.plan
        rows = [row for each in drawn if (row := each.encode(plan)) is not None]
        if not rows:
            raise ValueError(
                f"{drawn[0].place} and the {len(drawn) - 1} rows after it have no supervised token among their first "
                f"{plan.length}. Raise the length or the buffer."
            )
        packs: dict[int, list[Row]] = {}
        for row, index in zip(rows, packing.place_rows([len(row.tokens) for row in rows], plan.length, plan.packed)):
            packs.setdefault(int(index), []).append(row)
        ordered = [packs[index] for index in sorted(packs)]
        random.Random(f"{plan.seed} {self.process} {buffer}").shuffle(ordered)
        return ordered
