"""Micro-batches, read ahead of the step by a thread: collated, with their cached features, and copied to the device."""

import functools
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from specdec.target import TargetOutput
from train import data
from train.data import Batch, Row
from train.features import Cached, Online
from train.onpolicy import OnPolicy
from train.packing import Packs
from train.stream import Stream

Result = TypeVar("Result")


@dataclass(frozen=True)
class MicroBatch:
    number: int  # of this process' micro-batches, from 0 on
    indices: list[int]  # of the packs; none in a stream
    rows: list[str]  # ids, to name them
    batch: Batch  # on the CPU
    written: bool  # whether the draft wrote its answers (on-policy)


@dataclass(frozen=True)
class Material:
    """What steps are made of: packs, and the target's outputs for them.

    ahead: micro-batches that are read ahead of the step; 0: none. Answers that the draft writes are never written ahead
    """

    packs: Packs  # all, or those of a stream's first rows
    length: int  # tokens of a pack
    features: Online | Cached | None  # None: the objective reads the target itself
    on_policy: OnPolicy | None = None
    stream: Stream | None = None
    ahead: int = 0

    def __post_init__(self):
        if self.ahead < 0:
            raise ValueError(f"ahead={self.ahead} must be 0 or more micro-batches.")
        assert not (self.stream and isinstance(self.features, Cached))
        if self.stream and self.on_policy:
            raise ValueError("on_policy= needs packs that can be read again: use stream=false.")

    def collate(self, packs: list[list[Row]]) -> Batch:
        return data.collate(packs, length=self.length, pad_token=0)


class Loader:
    """The micro-batches of one process. Their content follows from (seed, number, process) and not from what is read ahead.

    batch: packs of a micro-batch; accumulation: micro-batches of a step
    What fails in the thread is raised where its result is asked for.
    """

    def __init__(
        self,
        material: Material,
        *,
        batch: int,
        accumulation: int,
        seed: int,
        process: int,
        num_processes: int,
        device: torch.device,
    ):
        self.material, self.batch, self.accumulation, self.seed = material, batch, accumulation, seed
        self.process, self.num_processes, self.device = process, num_processes, device
        self.ahead = 0 if material.on_policy else material.ahead
        self.thread = ThreadPoolExecutor(1, "loader", use_device, (device,)) if self.ahead else None
        self.coming: dict[int, Future[MicroBatch]] = {}
        self.coming_on_device: dict[int, Future[tuple[Batch, TargetOutput | None]]] = {}

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        first, stop = step * self.accumulation, (step + 1) * self.accumulation
        if self.thread is None:
            return [self._micro_batch(number) for number in range(first, stop)]
        for number in range(first, stop + self.ahead):
            self._submit(number)
        return [self._result(self.coming[number]) for number in range(first, stop)]

    def on_device(self, micro: MicroBatch) -> tuple[Batch, TargetOutput | None]:
        """A micro-batch on the training device, and the target's outputs for it if the objective needs them."""
        number, material = micro.number, self.material
        batch, output = micro.batch, None
        if self.thread is None:
            batch = micro.batch.to(self.device)
        else:
            for later in range(number, number + self.ahead + 1):
                if later not in self.coming_on_device:
                    self._submit(later)
                    self.coming_on_device[later] = self.thread.submit(self._to_device, self.coming[later])
            batch, output = self._result(self.coming_on_device.pop(number))
            del self.coming[number]
        features = material.on_policy.features if micro.written and material.on_policy else material.features
        if features is not None and output is None:
            output = features(micro.indices, batch)
        return batch, output

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)
        if self.material.stream:
            self.material.stream.close()

    # Where a run continues

    def position(self, step: int) -> list[int]:
        """What `seek` needs to continue a stream before a step, in this process; nothing for packs."""
        stream = self.material.stream
        return stream.position(step * self.accumulation * self.batch) if stream else []

    def seek(self, position: list[int]) -> None:
        if self.material.stream:
            self.material.stream.seek(position)

    # In the thread, if there is one

    def _micro_batch(self, number: int) -> MicroBatch:
        material = self.material
        if material.stream:
            indices: list[int] = []
            first = number * self.batch
            packs = [material.stream.pack(place) for place in range(first, first + self.batch)]
        else:
            indices = self.indices(number)
            packs = [material.packs[index] for index in indices]
        written = material.on_policy(indices) if material.on_policy else None
        batch = material.collate(packs) if written is None else written
        return MicroBatch(number, indices, [row.id for pack in packs for row in pack], batch, written is not None)

    def indices(self, number: int) -> list[int]:
        """Packs of a micro-batch; each epoch is a permutation made from the seed."""
        num_packs = len(self.material.packs)
        start = (number * self.num_processes + self.process) * self.batch
        places = [divmod(position, num_packs) for position in range(start, start + self.batch)]
        return [permutation(num_packs, self.seed + epoch)[place] for epoch, place in places]

    def _to_device(self, coming: Future[MicroBatch]) -> tuple[Batch, TargetOutput | None]:
        micro = coming.result()  # it was submitted before, so the only thread has made it
        features = self.material.features
        output = features.read(micro.indices, self.device) if isinstance(features, Cached) else None
        return micro.batch.to(self.device), output

    def _submit(self, number: int) -> None:
        if number not in self.coming:
            assert self.thread is not None
            self.coming[number] = self.thread.submit(self._micro_batch, number)

    def _result(self, coming: Future[Result]) -> Result:
        try:
            return coming.result()
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"The thread that reads data ahead of the step failed ({type(error).__name__}: {error}). Look at the data "
                "and the cached features; ahead=0 reads them in the step."
            ) from error


def use_device(device: torch.device) -> None:
    """A new thread's current GPU is the first one, in whose memory pinning would open a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@functools.lru_cache(maxsize=2)
def permutation(num: int, seed: int) -> list[int]:
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order
