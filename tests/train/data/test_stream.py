"""Tests of rows that are read as training goes on: streams, and batches that are read ahead of their step."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.conversations import conversations, make_plan, make_rows, read
from tests.support import REAL_TARGET, fit_interrupted, losses_of
from train.data.loader import Loader, Material, Order
from train.data.packing import Packs, Rows
from train.data.stream import Stream

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REAL_TARGET)


# Streams


def test_a_stream_continues_exactly(tokenizer, tmp_path):
    plan = make_plan(tokenizer, [conversations(tmp_path / "a.jsonl", 21), conversations(tmp_path / "b.jsonl", 10)])
    whole = Stream(plan, process=1, num_processes=2)
    packs = [[row.id for row in whole.pack(number)] for number in range(40)]
    positions = [whole.position(number) for number in range(41)]
    whole.close()
    assert positions[40][0] > 3
    for number in (0, 1, 7, 20, 33):
        again = Stream(plan, process=1, num_processes=2)
        again.seek(positions[number])
        assert read(again, range(number, 40)) == packs[number:]
        assert again.first.fingerprint == whole.first.fingerprint
    assert read(Stream(make_plan(tokenizer, plan.train, seed=4), process=1, num_processes=2), range(40)) != packs


def test_processes_read_different_rows_of_a_stream(tokenizer, tmp_path):
    plan = make_plan(tokenizer, conversations(tmp_path / "a.jsonl", 32), packed=False)
    parts = [
        [name for pack in read(Stream(plan, process=process, num_processes=2), range(16)) for name in pack]
        for process in range(2)
    ]
    assert not set(parts[0]) & set(parts[1]) and len({*parts[0], *parts[1]}) == 32
    assert set(parts[0][:8]) == {f"a-{n}" for n in range(8)} and parts[0][:8] != sorted(parts[0][:8])


def test_weights_and_limit_of_a_stream(tokenizer, tmp_path):
    train = {conversations(tmp_path / "a.jsonl", 9): 1, conversations(tmp_path / "b.jsonl", 50): 3}
    stream = Stream(make_plan(tokenizer, train, limit=4, packed=False))
    seen = [name for pack in read(stream, range(40)) for name in pack]
    shares = [sum(name.startswith(source) for name in seen) for source in "ab"]
    assert shares == [10, 30] and set(seen) == {f"{source}-{n}" for source in "ab" for n in range(4)}
    for given in ({"tokens": 5}, {"hold_out": 7}):
        with pytest.raises(ValueError, match="counts over the whole data set: use limit="):
            make_plan(tokenizer, train, **given)


def test_a_broken_row_of_a_stream_is_named_when_it_comes(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.stream.FIRST", 4)
    path = Path(conversations(tmp_path / "a.jsonl", 20))
    path.write_text(path.read_text() + "{\n")
    stream = Stream(make_plan(tokenizer, str(path)))
    stream.pack(0)
    with pytest.raises(ValueError, match=r"a\.jsonl:21: not valid JSON"):
        stream.pack(10_000)
    stream.close()


def test_a_streamed_run_resumes_with_the_same_losses(fit, folder, tmp_path):
    source = conversations(tmp_path / "many.jsonl", 30)
    more = (
        "data.stream=true",
        "data.buffer=5",
        f"data.train=[{source},{folder}/train.jsonl]",
        "train.accumulation=2",
        "train.batch=2",
    )
    fit("whole", *more)
    fit_interrupted(fit, "died", *more)
    assert losses_of("died") == losses_of("whole") and len(losses_of("whole")) == 4
    with pytest.raises(ValueError, match=r"features\.mode=online"):
        fit("cached", *more, "features.mode=cached")


# Reading ahead


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
