"""A cache of keys and values by itself: capacity, rows that stay, and slots of later unroll steps."""

import pytest
import torch

from specdec.core.cache import RowCache


def fill_cache(batch: int = 4, num: int = 5) -> RowCache:
    """Rows b of lengths num - b, whose entry i is 10 b + i."""
    cache = RowCache.uniform(
        num_layers=1, batch=batch, num_heads=1, head_dim=2, dtype=torch.float64, device="cpu", capacity=8
    )
    cache.reserve(num)
    values = (10.0 * torch.arange(batch)[:, None] + torch.arange(num)).double()[:, None, :, None].expand(-1, -1, -1, 2)
    cache.update(values, values, 0)
    counts = [num - row for row in range(batch)]
    cache.commit(torch.tensor(counts), counts)
    return cache


def test_capacity_doubles_only_when_it_is_exceeded():
    cache = fill_cache()
    cache.make_room(3)
    assert cache.capacity == cache.visible == 8
    cache.make_room(4)
    assert cache.capacity == 16 and cache.entry_tensor[0, 0, 3, 0, :2, 0].tolist() == [30, 31]


@pytest.mark.parametrize("rows", [[0, 1], [2, 1], [1, 0], [3, 0, 1], [1, 2, 3], [2, 2], [0, 1, 2, 3, 3], [3, 2, 1, 0]])
def test_rows_stay_in_any_order_and_several_times(rows):
    cache, expected = fill_cache(), fill_cache().entry_tensor[:, :, rows]
    cache.select(rows)
    assert cache.entry_tensor.equal(expected)
    assert cache.lengths.tolist() == cache.host_lengths == [5 - row for row in rows]


def test_rows_that_join_one_by_one_seldom_copy_the_others():
    """The number of rows doubles, also when the capacity grows: 9 rows make 4 copies behind the first allocation."""
    cache, addresses = fill_cache(batch=1), set()
    for num in range(2, 10):
        cache.select([*range(num - 1), 0])
        addresses.add(cache.entry_tensor.data_ptr())
        assert cache.entry_tensor.shape[2] == len(cache.host_lengths) == num
    assert len(addresses) == 4 and cache.max_rows == 16
    cache.make_room(100)
    assert cache.max_rows == 16 and cache.entry_tensor[0, 0, 8, 0, :5, 0].tolist() == [0, 1, 2, 3, 4]
