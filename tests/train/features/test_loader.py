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


def make_loader(packs) -> Loader:
    order = Order(len(packs), seed=3, batch=2, accumulation=2, group=0, num_groups=1)
    return Loader(Material(packs, 64, None), order=order, device=torch.device("cpu"), steps=6)


@pytest.mark.parametrize("num_prefetched", [1, 3])
def test_batches_read_ahead_are_those_of_the_step(monkeypatch, num_prefetched):
    monkeypatch.setattr(Material, "count_prefetched", lambda *_: num_prefetched)
    packs = Packs(EncodedRows.from_rows(make_rows([20, 30, 40, 50, 12, 64, 33])), length=64)
    loader = make_loader(packs)
    for step in range(6):
        for number, micro in enumerate(loader.read_step(step)):
            indices = loader.order(step, number)
            expected = loader.material.collate([loader.material.packs[index] for index in indices])
            assert micro.row_ids == [row.id for index in indices for row in packs[index]]
            assert micro.number == 2 * step + number
            assert torch.equal(micro.batch.tokens, expected.tokens)
            assert torch.equal(loader.read_on_device(micro)[0].documents, expected.documents)
        assert len(loader.host_futures) <= num_prefetched and len(loader.device_futures) <= num_prefetched
    loader.close()


def test_a_thread_that_fails_raises_in_the_training_loop():
    class Broken(Packs):
        def __getitem__(self, index):
            raise OSError(5, "Input/output error")

    loader = make_loader(Broken(EncodedRows.from_rows(make_rows([20, 30])), length=64))
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


def make_engine_loader(target, engine, *, batch: int = 1, steps: int = 16) -> Loader:
    packs = Packs(EncodedRows.from_rows(make_rows([40] * 40)), length=64)
    material = Material(packs, 64, StoredFeatures(target, (1,), folder=None, reader=engine))
    order = Order(len(packs), seed=3, batch=batch, accumulation=1, group=0, num_groups=1)
    return Loader(material, order=order, device=torch.device("cpu"), steps=steps)


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


def test_a_server_that_answers_late_but_fast_enough_starves_no_step(small_target, monkeypatch):
    """A text takes three steps; in the time of a step, three texts come."""
    starved = {}
    for num_prefetched in (1, MICRO_BATCHES_AHEAD):
        engine = SlowEngine(small_target, latency=0.18, gap=0.02)
        monkeypatch.setattr("train.features.loader.MICRO_BATCHES_AHEAD", num_prefetched)
        loader = make_engine_loader(small_target, engine)
        assert loader.num_prefetched == num_prefetched
        starved[num_prefetched] = statistics.median(measure_waits(loader, step=0.06)[4:])
        loader.close()
        assert engine.num_requests == 16  # none for steps that the run does not have
    assert starved[1] > 0.05 and starved[MICRO_BATCHES_AHEAD] < 0.02


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
