"""Fair timing: what is compared takes turns, so that whatever disturbs the machine disturbs all alike."""

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


def interleave(functions: Mapping[Key, Callable[[Item], Result]], item: Item, number: int) -> dict[Key, Result]:
    """Calls every function with `item`, one after the other; `number` counts the items, and the order rotates with it.

    -> the results, by the keys of `functions`
    """
    keys = list(functions)
    first = number % len(keys)
    return {key: functions[key](item) for key in keys[first:] + keys[:first]}


def fastest_batch(
    decode: Callable[[list[list[int]]], float], prompts: list[list[int]], sizes: tuple[int, ...] = (1, 4, 16)
) -> int:
    """The batch size at which `decode`, which takes a group of prompts and returns its tokens/s, is fastest.

    Compares medians over the first three groups of each size, after a warm-up. Sizes larger than the number of prompts
    are left out.
    """
    rates = {}
    for size in [size for size in sizes if size <= len(prompts)]:
        groups = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        decode(groups[0])
        rates[size] = statistics.median(map(decode, groups[:3]))
    return max(rates, key=lambda size: rates[size])
