"""The division of work between processes. Training has a group of several (train/processes.py)."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Group:
    """One process, which does all of the work."""

    main = True  # True in the process that reads and writes files

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's part of the items"""
        return items

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of all processes, each once"""
        return results

    def share(self, value: Item) -> Item:
        """The value of the main process"""
        return value
