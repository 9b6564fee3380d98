"""Tests of batches that are read ahead of their step."""

import functools

import pytest
import torch

from tests.conversations import make_rows
from tests.support import losses_of
from train.data.loader import Loader, Material, Order
from train.data.packing import Packs, Rows

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "settings", [["features.mode=online"], ["features.mode=cached", "features.folder=cache"]], ids=" ".join
)
def test_reading_ahead_changes_no_loss(fit, settings, monkeypatch):
    for ahead in (0, 2):
        monkeypatch.setattr("train.trainer.Loader", functools.partial(Loader, ahead=ahead))
        fit(f"ahead-{ahead}", *settings, "train.accumulation=2")
    assert losses_of("ahead-0") == losses_of("ahead-2") and len(losses_of("ahead-0")) == 4


def make_loader(packs, ahead: int) -> Loader:
    order = Order(len(packs), seed=3, batch=2, accumulation=2, number=0, num=1)
    return Loader(Material(packs, 64, None), order=order, device=torch.device("cpu"), ahead=ahead)


def test_batches_read_ahead_are_those_of_the_step():
    packs = Packs(Rows.of(make_rows([20, 30, 40, 50, 12, 64, 33])), length=64)
    slow, fast = make_loader(packs, 0), make_loader(packs, 3)
    for step in range(6):
        for expected, micro in zip(slow.step(step), fast.step(step), strict=True):
            assert (micro.indices, micro.rows, micro.number) == (expected.indices, expected.rows, expected.number)
            assert torch.equal(micro.batch.tokens, expected.batch.tokens)
            assert torch.equal(fast.on_device(micro)[0].documents, slow.on_device(expected)[0].documents)
        assert len(fast.coming) <= 3 and len(fast.coming_on_device) <= 3
    fast.close()


def test_a_thread_that_fails_raises_in_the_training_loop():
    class Broken(Packs):
        def __getitem__(self, index):
            raise OSError(5, "Input/output error")

    loader = make_loader(Broken(Rows.of(make_rows([20, 30])), length=64), 1)
    with pytest.raises(ValueError, match=r"thread that reads data ahead.*OSError.*Input/output error"):
        loader.step(0)
    loader.close()
