"""Processes that work as one: they read the same data with the same random numbers.

Those that hold a target together by tensor parallelism always do. Where each keeps a part of a target's layers (FSDP2), each
trains on its own data, and all work as one where the target answers or decodes, which takes it as many calls as the texts say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from specdec.target.model import Target
from specdec.target.parallel import Share

Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """The processes that read the same as this one: the `number`-th of `num` groups, among which data is divided."""

    number: int
    num: int
    share: Share

    @classmethod
    def of(cls, accelerator: Accelerator, target: Target) -> "Group":
        """Of training: the processes that a target is cut over by tensor parallelism; without it, each process alone."""
        return cls._of(accelerator, target.share if target.share.same else Share())

    @classmethod
    def in_step(cls, accelerator: Accelerator, target: Target) -> "Group":
        """Those that must call the target together, with the same texts where it decodes: all that hold it together."""
        return cls._of(accelerator, replace(target.share, same=True))

    @classmethod
    def _of(cls, accelerator: Accelerator, share: Share) -> "Group":
        return cls(accelerator.process_index // share.size, accelerator.num_processes // share.size, share)

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This group's part."""
        return items[self.number :: self.num]

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of all groups; those of a group are the same in all its processes."""
        return gather_object(results if self.share.first else [])
