"""Tests of batches that are read ahead of their step."""

import contextlib
import functools
import statistics
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from specdec.core import devices
from tests.conversations import make_rows
from tests.support import losses_of
from train.data.packing import Packs, Rows
from train.features import outputs
from train.features.loader import AHEAD, Loader, Material, Order
from train.features.outputs import Kept

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "settings", [["features.mode=online"], ["features.mode=cached", "features.folder=cache"]], ids=" ".join
)
def test_reading_ahead_changes_no_loss(fit, settings, monkeypatch):
    for ahead in (0, 2):
        monkeypatch.setattr("train.loop.trainer.Loader", functools.partial(Loader, ahead=ahead))
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


# A server as the source


class SlowEngine:
    """Takes `latency` seconds for a text, and gives the next text no sooner than `gap` seconds later: with features of zeros."""

    def __init__(self, target, latency: float, gap: float):
        self.width, self.latency, self.gap = target.width, latency, gap
        self.last, self.asked = 0.0, 0

    def submit(self, tokens, layers) -> Future:
        self.asked, future, now = self.asked + 1, Future(), time.monotonic()
        self.last = max(now + self.latency, self.last + self.gap)
        states = [torch.zeros(len(tokens), self.width) for _ in layers]
        threading.Timer(self.last - now, future.set_result, [states]).start()
        return future


def make_served(target, engine, *, batch: int = 1, ahead: int | None = None, steps: int = 16) -> Loader:
    packs = Packs(Rows.of(make_rows([40] * 40)), length=64)
    material = Material(packs, 64, Kept(target, (1,), folder=None, reader=engine))
    order = Order(len(packs), seed=3, batch=batch, accumulation=1, number=0, num=1)
    return Loader(material, order=order, device=torch.device("cpu"), ahead=ahead, steps=steps)


def waits_of(loader: Loader, *, step: float, steps: int = 16) -> list[float]:
    """Seconds that each step waits for its features; then it computes for `step` seconds."""
    found = []
    for number in range(steps):
        start = time.monotonic()
        (micro,) = loader.step(number)
        loader.on_device(micro)
        found.append(time.monotonic() - start)
        time.sleep(step)
    return found


def test_a_server_that_answers_late_but_fast_enough_starves_no_step(small_target):
    """A text takes three steps; in the time of a step, three texts come."""
    starved = {}
    for ahead in (1, None):
        engine = SlowEngine(small_target, latency=0.18, gap=0.02)
        loader = make_served(small_target, engine, ahead=ahead)
        starved[ahead] = statistics.median(waits_of(loader, step=0.06)[4:])
        loader.close()
        assert engine.asked == 16  # none for steps that the run does not have
    assert loader.ahead == AHEAD and starved[1] > 0.05 and starved[None] < 0.02


def test_a_server_is_asked_for_no_more_tokens_than_the_bound(small_target, monkeypatch):
    engine = SlowEngine(small_target, 0.0, 0.0)
    for tokens, wanted in ((10**6, AHEAD), (3 * 2 * 64, 3), (10, 1)):
        monkeypatch.setattr("train.features.loader.AHEAD_TOKENS", tokens)
        loader = make_served(small_target, engine, batch=2)
        assert loader.ahead == wanted
        (micro,) = loader.step(0)
        loader.on_device(micro)
        assert set(loader.coming) == set(range(1, 1 + wanted)) and set(loader.coming_on_device) == {1}
        loader.coming_on_device[1].result()
        loader.close()
    assert Material(Packs(Rows.of(make_rows([20])), length=64), 64, None).ahead(1) == 1


def test_features_come_to_the_device_beside_the_training(small_target, monkeypatch):
    """The copy and the final norm are given to the device aside, and the step may use them only once they are there."""
    order, norm = [], outputs.apply_final_norm

    @contextlib.contextmanager
    def aside(device):
        order.append("aside")
        yield
        order.append("end")

    monkeypatch.setattr(devices, "aside", aside)
    monkeypatch.setattr(devices, "hand_over", lambda joined: order.append(joined.shape))
    monkeypatch.setattr(outputs, "apply_final_norm", lambda *given: order.append("norm") or norm(*given))
    loader = make_served(small_target, SlowEngine(small_target, 0.0, 0.0), steps=1)
    (micro,) = loader.step(0)
    output = loader.on_device(micro)[1]
    loader.close()
    assert (
        order == ["aside", "norm", "end", (1, 64, 2 * small_target.width)]
        and output.final.shape[-1] == small_target.width
    )
