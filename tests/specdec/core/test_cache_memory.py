"""Memory of K and V that outlives an answer."""

import torch

from specdec.core.cache_memory import MAX_MEMORY_SHARE, CacheMemory, EntryShape, Groups

SHAPE = EntryShape(2, 4, torch.float32, torch.device("cpu"))
ROW_BYTES = 256 * SHAPE.num_bytes


def take(memory: CacheMemory, *, num_rows: int = 1, free_rows: float = 1e9) -> Groups:
    """K and V where the device has memory for so many rows"""
    free_bytes = free_rows * ROW_BYTES / MAX_MEMORY_SHARE
    groups = memory.take_groups({SHAPE: 1}, num_rows=num_rows, free_bytes=free_bytes)
    assert groups is not None
    return groups


def test_rows_that_did_not_fit_are_not_asked_for_again():
    memory, addresses = CacheMemory(), set()
    for _ in range(4):
        memory.expect(200, 32)
        groups = take(memory, num_rows=2, free_rows=10)
        assert groups[SHAPE].shape == (1, 8, 2, 256, 4)
        addresses.add(groups[SHAPE].data_ptr())
        memory.keep_groups(groups)
    assert len(addresses) == 1
    assert memory.take_groups({SHAPE: 1}, num_rows=16, free_bytes=10 * ROW_BYTES / MAX_MEMORY_SHARE) is None


def test_as_many_sets_stay_as_were_in_use_at_once():
    memory = CacheMemory()
    memory.expect(200, 1)
    addresses = []
    for _ in range(3):
        sets = [take(memory) for _ in range(3)]
        addresses.append({groups[SHAPE].data_ptr() for groups in sets})
        for groups in sets:
            memory.keep_groups(groups)
    assert addresses[0] == addresses[1] == addresses[2]
    memory.expect(600, 1)
    assert take(memory)[SHAPE].shape[3] == 1024 and not memory.free_groups
