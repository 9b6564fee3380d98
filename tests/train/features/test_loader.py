"""Tests of batches that are read ahead of their step."""

import contextlib
import statistics
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from specdec.core import devices
from tests.support.conversations import make_rows
from train.data.packing import EncodedRows, Packs
from train.features import outputs
from train.features.loader import MICRO_BATCHES_AHEAD, Loader, Material, Order
from train.features.outputs import StoredFeatures

pytestmark = pytest.mark.full


def make_loader(packs, num_prefetched: int) -> Loader:
    order = Order(len(packs), seed=3, batch=2, accumulation=2, group=0, num_groups=1)
    return Loader(Material(packs, 64, None), order=order, device=torch.device("cpu"), num_prefetched=num_prefetched)


def test_batches_read_ahead_are_those_of_the_step():
    packs = Packs(EncodedRows.from_rows(make_rows([20, 30, 40, 50, 12, 64, 33])), length=64)
    slow, fast = make_loader(packs, 0), make_loader(packs, 3)
    for step in range(6):
        for expected, micro in zip(slow.read_step(step), fast.read_step(step), strict=True):
            assert (micro.pack_indices, micro.row_ids, micro.number) == (
                expected.pack_indices,
                expected.row_ids,
                expected.number,
            )
            assert torch.equal(micro.batch.tokens, expected.batch.tokens)
            assert torch.equal(fast.read_on_device(micro)[0].documents, slow.read_on_device(expected)[0].documents)
        assert len(fast.host_futures) <= 3 and len(fast.device_futures) <= 3
    fast.close()


def test_a_thread_that_fails_raises_in_the_training_loop():
    class Broken(Packs):
        def __getitem__(self, index):
            raise OSError(5, "Input/output error")

    loader = make_loader(Broken(EncodedRows.from_rows(make_rows([20, 30])), length=64), 1)
    with pytest.raises(ValueError, match=r"thread that reads data ahead.*OSError.*Input/output error"):
        loader.read_step(0)
    loader.close()


# A server as the source


class SlowEngine:
    """Features of zeros: the first after `latency` seconds, each further text at least `gap` seconds after the last."""

    def __init__(self, target, latency: float, gap: float):
        self.width, self.latency, self.gap = target.width, latency, gap
        self.last, self.num_requests = 0.0, 0

    def submit(self, tokens, layers) -> Future:
        self.num_requests, future, now = self.num_requests + 1, Future(), time.monotonic()
        self.last = max(now + self.latency, self.last + self.gap)
        states = [torch.zeros(len(tokens), self.width) for _ in layers]
        threading.Timer(self.last - now, future.set_result, [states]).start()
        return future


def make_engine_loader(target, engine, *, batch: int = 1, num_prefetched: int | None = None, steps: int = 16) -> Loader:
    packs = Packs(EncodedRows.from_rows(make_rows([40] * 40)), length=64)
    material = Material(packs, 64, StoredFeatures(target, (1,), folder=None, reader=engine))
    order = Order(len(packs), seed=3, batch=batch, accumulation=1, group=0, num_groups=1)
    return Loader(material, order=order, device=torch.device("cpu"), num_prefetched=num_prefetched, steps=steps)


def measure_waits(loader: Loader, *, step: float, steps: int = 16) -> list[float]:
    """Seconds that each step waits for its features; then it computes for `step` seconds."""
    waits = []
    for number in range(steps):
        start = time.monotonic()
        (micro,) = loader.read_step(number)
        loader.read_on_device(micro)
        waits.append(time.monotonic() - start)
        time.sleep(step)
    return waits


def test_a_server_that_answers_late_but_fast_enough_starves_no_step(small_target):
    """A text takes three steps; in the time of a step, three texts come."""
    starved = {}
    for num_prefetched in (1, None):
        engine = SlowEngine(small_target, latency=0.18, gap=0.02)
        loader = make_engine_loader(small_target, engine, num_prefetched=num_prefetched)
        starved[num_prefetched] = statistics.median(measure_waits(loader, step=0.06)[4:])
        loader.close()
        assert engine.num_requests == 16  # none for steps that the run does not have
    assert loader.num_prefetched == MICRO_BATCHES_AHEAD and starved[1] > 0.05 and starved[None] < 0.02


def test_a_server_is_asked_for_no_more_tokens_than_the_bound(small_target, monkeypatch):
    engine = SlowEngine(small_target, 0.0, 0.0)
    for tokens, expected in ((10**6, MICRO_BATCHES_AHEAD), (3 * 2 * 64, 3), (10, 1)):
        monkeypatch.setattr("train.features.loader.TOKENS_AHEAD", tokens)
        loader = make_engine_loader(small_target, engine, batch=2)
        assert loader.num_prefetched == expected
        (micro,) = loader.read_step(0)
        loader.read_on_device(micro)
        assert set(loader.host_futures) == set(range(1, 1 + expected)) and set(loader.device_futures) == {1}
        loader.device_futures[1].result()
        loader.close()
    assert Material(Packs(EncodedRows.from_rows(make_rows([20])), length=64), 64, None).count_prefetched(1) == 1


def test_features_come_to_the_device_beside_the_training(small_target, monkeypatch):
    """The copy and the final norm are given to the device aside, and the step may use them only once they are there."""
    order, norm = [], outputs.apply_final_norm

    @contextlib.contextmanager
    def aside(device):
        order.append("aside")
        yield
        order.append("end")

    monkeypatch.setattr(devices, "use_side_stream", aside)
    monkeypatch.setattr(devices, "join_side_stream", lambda joined: order.append(joined.shape))
    monkeypatch.setattr(outputs, "apply_final_norm", lambda *arguments: order.append("norm") or norm(*arguments))
    loader = make_engine_loader(small_target, SlowEngine(small_target, 0.0, 0.0), steps=1)
    (micro,) = loader.read_step(0)
    output = loader.read_on_device(micro)[1]
    loader.close()
    assert (
        order == ["aside", "norm", "end", (1, 64, 2 * small_target.width)]
        and output.final.shape[-1] == small_target.width
    )
