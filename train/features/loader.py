"""Micro-batches, read ahead of the step by a thread: collated, with their cached features, and copied to the device."""

import functools
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from specdec.core import devices
from specdec.target.model import TargetOutput
from specdec.text.conversations import Row
from train.data import batches
from train.data.batches import TrainingBatch
from train.data.packing import Packs
from train.features.outputs import FeatureRead, Features, StoredFeatures

Result = TypeVar("Result")
MICRO_BATCHES_AHEAD = 4  # micro-batches that a server is asked for ahead of the step: one takes it up to four steps
NUM_LENGTHS, MIN_LENGTH_UNIT = 8, 1024  # lengths of batches, at most, and the tokens between two of them, at least
TOKENS_AHEAD = 65_536  # tokens of these micro-batches, whose outputs must fit in the memory of the host


@dataclass(frozen=True)
class MicroBatch:
    """The packs that one process reads between two backward passes."""

    number: int  # place among this process' micro-batches, from 0 on
    row_ids: list[str]  # ids of the packs' rows, for messages
    batch: TrainingBatch  # on the CPU
    feature_read: FeatureRead | None = None  # the target's outputs, if they are read ahead


@dataclass(frozen=True)
class Material:
    """The inputs of training steps: packs, and the target's outputs for them."""

    packs: Packs
    length: int  # tokens of a pack, at most
    features: Features | None  # None: the objective reads the target itself

    def collate(self, packs: list[list[Row]]) -> TrainingBatch:
        """Packs as a batch, on the CPU, padded to one of a few lengths: short packs cost less than a long one."""
        longest = 0
        for pack in packs:
            longest = max(longest, sum(len(row.tokens) for row in pack))
        unit = max(MIN_LENGTH_UNIT, self.length // NUM_LENGTHS)
        return batches.collate(packs, length=min(self.length, -(-longest // unit) * unit), pad_token=0)

    def count_prefetched(self, batch: int) -> int:
        """The number of micro-batches to read ahead. A server answers late, but many texts at once.

        batch: packs of a micro-batch
        """
        if not isinstance(self.features, StoredFeatures) or self.features.reader is None:
            return 1
        return max(1, min(MICRO_BATCHES_AHEAD, TOKENS_AHEAD // (batch * self.length)))

    def target_output(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput | None:
        """The target's outputs for a batch on the training device. prefetched: the outputs, if they were read ahead"""
        return self.features(batch, prefetched) if self.features else None


@dataclass
class Order:
    """The order in which a process reads packs.

    An epoch is a permutation made from the seed, dealt to groups of processes in turn.
    """

    num_packs: int
    seed: int
    batch: int  # packs of a micro-batch
    accumulation: int  # micro-batches of a step
    group: int  # number of this process' group
    num_groups: int
    launch_start: tuple[int, int] = (0, 0)  # first step of this launch, and packs read before it, by any groups

    def __call__(self, step: int, micro: int) -> list[int]:
        """The indices of the packs of one micro-batch of a step."""
        start = self.count_packs_before(step) + (micro * self.num_groups + self.group) * self.batch
        indices = []
        for number in range(start, start + self.batch):
            epoch, position = divmod(number, self.num_packs)
            indices.append(permute_packs(self.num_packs, self.seed + epoch)[position])
        return indices

    def count_packs_before(self, step: int) -> int:
        """The number of packs that all processes have read before a step."""
        first_step, first_pack = self.launch_start
        return first_pack + (step - first_step) * self.accumulation * self.num_groups * self.batch


class Loader:
    """The micro-batches of one process. Their content follows from their number, not from the reading ahead.

    steps: steps of the run, after which nothing is read
    `num_prefetched`: micro-batches that are read ahead of the step, one of them on the device
    An error in a thread is raised where its result is asked for. A second thread waits for a server's answers, so that
    the first one goes on to ask for more.
    """

    def __init__(self, material: Material, *, order: Order, device: torch.device, steps: int):
        self.material, self.order, self.device = material, order, devices.number_device(device)
        self.accumulation = order.accumulation
        self.num_prefetched = material.count_prefetched(order.batch)
        self.end_number = steps * order.accumulation
        start_thread = functools.partial(ThreadPoolExecutor, 1, initializer=set_thread_device, initargs=(self.device,))
        self.thread = start_thread(thread_name_prefix="loader")
        self.receiver = start_thread(thread_name_prefix="receiver") if self.num_prefetched > 1 else self.thread
        self.host_futures: dict[int, Future[MicroBatch]] = {}
        self.device_futures: dict[int, Future[tuple[TrainingBatch, TargetOutput | None]]] = {}

    def read_step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        first, stop = step * self.accumulation, (step + 1) * self.accumulation
        for number in range(first, max(stop, min(self.end_number, stop + self.num_prefetched))):
            self._submit(number)
        return [self._wait_for(self.host_futures[number]) for number in range(first, stop)]

    def read_on_device(self, micro: MicroBatch) -> tuple[TrainingBatch, TargetOutput | None]:
        """A micro-batch on the training device, and the target's outputs for it if the objective needs them."""
        number = micro.number
        last = max(number, min(self.end_number - 1, number + self.num_prefetched))
        for later_number in range(number, last + 1):
            self._submit(later_number)
        for later_number in range(number, min(number + 1, last) + 1):  # this one and the next
            if later_number not in self.device_futures:
                future = self.host_futures[later_number]
                self.device_futures[later_number] = self.receiver.submit(self._send_micro_batch, future)
        batch, output = self._wait_for(self.device_futures.pop(number))
        del self.host_futures[number]
        return batch, self.material.target_output(batch, output)

    def close(self) -> None:
        """Ends the threads, without waiting for what they do."""
        for thread in (self.thread, self.receiver):
            thread.shutdown(wait=False, cancel_futures=True)

    def reread_step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, not read ahead."""
        first = step * self.accumulation
        return [self._make_micro_batch(number) for number in range(first, first + self.accumulation)]

    # In the threads

    def _make_micro_batch(self, number: int) -> MicroBatch:
        material, indices = self.material, self.order(*divmod(number, self.accumulation))
        packs = [material.packs[index] for index in indices]
        batch = material.collate(packs)
        feature_read = material.features.prefetch(batch) if material.features else None
        row_ids = [row.id for pack in packs for row in pack]
        return MicroBatch(number, row_ids, batch, feature_read)

    def _send_micro_batch(self, future: Future[MicroBatch]) -> tuple[TrainingBatch, TargetOutput | None]:
        micro = future.result()  # it was submitted before, so where there is only one thread it has made it
        return micro.batch.move_to(self.device), micro.feature_read(self.device) if micro.feature_read else None

    def _submit(self, number: int) -> None:
        if number not in self.host_futures:
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
    """Sets the GPU of a new thread. Its current one is the first GPU, in whose memory pinning would open a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@functools.lru_cache(maxsize=2)
def permute_packs(num: int, seed: int) -> list[int]:
    """The order of the packs in an epoch."""
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order
