"""Micro-batches, read ahead of the step by a thread: collated, with their cached features, and copied to the device."""

import functools
import random
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from specdec.core import devices
from specdec.target.model import TargetOutput
from train.data import batches
from train.data.batches import TrainingBatch
from train.data.packing import Packs
from train.features.outputs import FeatureRead, Features, StoredFeatures

Result = TypeVar("Result")
MICRO_BATCHES_AHEAD, TOKENS_AHEAD = (
    4,
    65_536,
)  # micro-batches that a server is asked for ahead of the step, and their tokens


@dataclass(frozen=True)
class MicroBatch:
    number: int  # of this process' micro-batches, from 0 on
    pack_indices: list[int]  # of the packs
    row_ids: list[list[str]]  # ids of each pack's rows, to name them
    batch: TrainingBatch  # on the CPU
    feature_read: FeatureRead | None = None  # the target's outputs, if they are being read ahead


@dataclass(frozen=True)
class Material:
    """What steps are made of: packs, and the target's outputs for them."""

    packs: Packs
    length: int  # tokens of a pack
    features: Features | None  # None: the objective reads the target itself

    def collate(self, indices: list[int]) -> TrainingBatch:
        return batches.collate([self.packs[index] for index in indices], length=self.length, pad_token=0)

    def count_prefetched(self, batch: int) -> int:
        """How many micro-batches of so many packs to read ahead: a server answers late, but many texts at once."""
        if not isinstance(self.features, StoredFeatures) or self.features.reader is None:
            return 1
        return max(1, min(MICRO_BATCHES_AHEAD, TOKENS_AHEAD // (batch * self.length)))

    def target_output(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput | None:
        """batch: on the training device; ahead: what has been read of them already"""
        return self.features(batch, prefetched) if self.features else None


@dataclass
class Order:
    """Which packs a process reads. An epoch is a permutation made from the seed, dealt to groups of processes in turn.

    number, num: this process' group, and how many there are
    first: the first step of this launch, and the packs that were read before it, perhaps by other groups
    """

    num_packs: int
    seed: int
    batch: int  # packs of a micro-batch
    accumulation: int  # micro-batches of a step
    group: int
    num_groups: int
    launch_start: tuple[int, int] = (0, 0)

    def __call__(self, step: int, micro: int) -> list[int]:
        """The packs of one micro-batch of a step."""
        start = self.count_packs_before(step) + (micro * self.num_groups + self.group) * self.batch
        epoch_positions = [divmod(position, self.num_packs) for position in range(start, start + self.batch)]
        return [
            permute_packs(self.num_packs, self.seed + epoch)[pack_position] for epoch, pack_position in epoch_positions
        ]

    def count_packs_before(self, step: int) -> int:
        """Packs that all processes have read before a step."""
        first_step, first_pack = self.launch_start
        return first_pack + (step - first_step) * self.accumulation * self.num_groups * self.batch


class Loader:
    """The micro-batches of one process. Their content follows from their number and not from what is read ahead.

    order: of the packs, and how many a micro-batch and a step have
    ahead: micro-batches that are read ahead of the step; 0: none; None: as many as the material needs. One of them is on the device
    steps: of the run; nothing is read for later ones. None: it has no end
    What fails in a thread is raised where its result is asked for. A second thread waits for what a server gives, so that the
    first one goes on to ask for more.
    """

    def __init__(
        self,
        material: Material,
        *,
        order: Order,
        device: torch.device,
        num_prefetched: int | None = None,
        steps: int | None = None,
    ):
        self.material, self.order, self.device = material, order, devices.number_device(device)
        self.accumulation, self.num_prefetched = (
            order.accumulation,
            material.count_prefetched(order.batch) if num_prefetched is None else num_prefetched,
        )
        self.end_number = sys.maxsize if steps is None else steps * order.accumulation
        start_thread = lambda name: ThreadPoolExecutor(1, name, set_thread_device, (self.device,))
        self.thread = start_thread("loader") if self.num_prefetched else None
        self.receiver = start_thread("receiver") if self.num_prefetched > 1 else self.thread
        self.host_futures: dict[int, Future[MicroBatch]] = {}
        self.device_futures: dict[int, Future[tuple[TrainingBatch, TargetOutput | None]]] = {}

    def read_step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        if self.thread is None:
            return self.reread_step(step)
        first, stop = step * self.accumulation, (step + 1) * self.accumulation
        for number in range(first, max(stop, min(self.end_number, stop + self.num_prefetched))):
            self._submit(number)
        return [self._wait_for(self.host_futures[number]) for number in range(first, stop)]

    def read_on_device(self, micro: MicroBatch) -> tuple[TrainingBatch, TargetOutput | None]:
        """A micro-batch on the training device, and the target's outputs for it if the objective needs them."""
        number = micro.number
        if self.receiver is None:
            batch = micro.batch.move_to(self.device)
            return batch, self.material.target_output(batch)
        last = max(number, min(self.end_number - 1, number + self.num_prefetched))
        for later_number in range(number, last + 1):
            self._submit(later_number)
        for later_number in range(number, min(number + 1, last) + 1):
            if later_number not in self.device_futures:
                self.device_futures[later_number] = self.receiver.submit(
                    self._send_micro_batch, self.host_futures[later_number]
                )
        batch, output = self._wait_for(self.device_futures.pop(number))
        del self.host_futures[number]
        return batch, self.material.target_output(batch, output)

    def close(self) -> None:
        for thread in (self.thread, self.receiver):
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)

    def reread_step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, not read ahead."""
        return [
            self._make_micro_batch(number) for number in range(step * self.accumulation, (step + 1) * self.accumulation)
        ]

    # In the threads, if there are any

    def _make_micro_batch(self, number: int) -> MicroBatch:
        material, indices = self.material, self.order(*divmod(number, self.accumulation))
        packs = [material.packs[index] for index in indices]
        batch = batches.collate(packs, length=material.length, pad_token=0)
        feature_read = material.features.prefetch(batch) if material.features and self.thread else None
        row_ids = [[row.id for row in pack] for pack in packs]
        return MicroBatch(number, indices, row_ids, batch, feature_read)

    def _send_micro_batch(self, future: Future[MicroBatch]) -> tuple[TrainingBatch, TargetOutput | None]:
        micro = future.result()  # it was submitted before, so where there is only one thread it has made it
        return micro.batch.move_to(self.device), micro.feature_read(self.device) if micro.feature_read else None

    def _submit(self, number: int) -> None:
        if number not in self.host_futures:
            assert self.thread is not None
            self.host_futures[number] = self.thread.submit(self._make_micro_batch, number)

    def _wait_for(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        except ValueError:
            raise
        except Exception as error:
            if devices.describe_out_of_memory(error):
                raise
            raise ValueError(
                f"The thread that reads data ahead of the step failed ({type(error).__name__}: {error}). Look at the "
                "data and the cached features."
            ) from error


def set_thread_device(device: torch.device) -> None:
    """A new thread's current GPU is the first one, in whose memory pinning would open a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@functools.lru_cache(maxsize=2)
def permute_packs(num: int, seed: int) -> list[int]:
    """The order of an epoch."""
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order
