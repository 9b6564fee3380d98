"""Processes that hold a target together work as one: they read the same data with the same random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from specdec.target import Target
from specdec.target_parallel import Share

Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """The processes that hold this process' target: the `number`-th of `num` groups, among which data is divided.

    Without tensor parallelism every process is a group of its own.
    """

    number: int
    num: int
    share: Share

    @classmethod
    def of(cls, accelerator: Accelerator, target: Target) -> "Group":
        size = target.share.size
        return cls(accelerator.process_index // size, accelerator.num_processes // size, target.share)

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This group's part."""
        return items[self.number :: self.num]

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of all groups; those of a group are the same in all its processes."""
        return gather_object(results if self.share.first else [])
