"""Tests of specdec/loading.py: threads, and what is said of a dtype."""

import json

import pytest
import torch

from specdec import loading
from specdec.core import precision, threads


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    monkeypatch.setattr(loading, "_threads", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    loading.print_dtype.cache_clear()
    yield
    torch.set_num_threads(before)


def test_threads_are_decided_once(monkeypatch):
    for cores in (3, 1):
        monkeypatch.setattr(threads, "count_usable_cores", lambda cores=cores: cores)
        loading.use_threads()
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("given", "recorded"), [(None, 2), ("2", 1)])
def test_a_users_number_of_threads_wins_and_then_that_of_continued_results(monkeypatch, tmp_path, given, recorded):
    monkeypatch.setattr(threads, "count_usable_cores", lambda: 1)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    (tmp_path / "settings.json").write_text(json.dumps({"threads": recorded}))
    loading.use_threads(tmp_path / "settings.json")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("given", "dtype", "said"),
    [("auto", "float32", "target.dtype=float32 (as asked)"), ("bfloat16", "bfloat16", "is slow here (as asked); auto is float32"), ("float32", "float32", "")],
)  # fmt: skip
def test_what_auto_is_and_what_is_slow_is_said_once(capsys, given, dtype, said):
    for _ in range(2):
        loading.print_dtype(given, dtype, precision.DtypeChoice("float32", "as asked"))
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == bool(said)
