"""Digests of tensors count all values, in any dtype of 16 bits and more; cached ones are never wrong or in the way."""

import json
import os
import threading

import pytest
import safetensors
import safetensors.torch
import torch

from specdec.core import digests
from specdec.core.digests import digest_files, digest_tensor
from specdec.core.files import find_cache_folder

LONG = 3 * digests.NUM_VALUES + 5
OLD = 10**9  # seconds


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


@pytest.fixture
def path(tmp_path):
    """A file that was written long ago."""
    return write(tmp_path / "model.safetensors", torch.arange(40.0).view(5, 8))


def write(path, value, *, time=OLD):
    safetensors.torch.save_file({"a": value, "b": torch.ones(3, dtype=torch.int8)}, path)
    os.utime(path, (time, time))
    return path


def test_any_value_and_the_shape_count():
    value = torch.randn(LONG)
    expected = digest_tensor(value)
    for index in (0, digests.NUM_VALUES, LONG - 1):
        changed = value.clone()
        changed[index] += 1
        assert digest_tensor(changed) != expected
    assert digest_tensor(value[None]) != expected and digest_tensor(value[:-1]) != expected
    assert digest_tensor(torch.zeros(0)) != digest_tensor(torch.zeros(0, 2))
    assert digest_tensor(torch.tensor(1.0)) != digest_tensor(torch.tensor([1.0]))


def test_floating_point_numbers_count_as_bfloat16_and_packed_ones_by_their_bytes():
    value = torch.randn(37, 5).bfloat16()
    assert len({digest_tensor(value.to(dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)}) == 1
    assert digest_tensor(value.float() + 1e-9) == digest_tensor(value)
    packed = torch.arange(64, dtype=torch.uint8).view(8, 8)
    kinds = [packed, packed.view(torch.int8), packed.view(torch.float8_e4m3fn), packed.view(torch.int32), packed.bool()]
    assert len({digest_tensor(value) for value in kinds}) == len(kinds)
    changed = packed.clone()
    changed[7, 7] += 1
    assert digest_tensor(changed.view(torch.float8_e4m3fn)) != digest_tensor(kinds[2])


@pytest.mark.parametrize("shape", [(7, 300), (300, 70, 9), (2, 5 * digests.NUM_VALUES)])
def test_the_order_in_memory_does_not_count(shape):
    value = torch.randn(shape).transpose(0, -1)
    assert not value.is_contiguous() and digest_tensor(value) == digest_tensor(value.contiguous())


def test_a_file_is_read_once(path, monkeypatch):
    (first,) = digest_files([path], "x")
    tensors = {"a": torch.arange(40.0).view(5, 8), "b": torch.ones(3, dtype=torch.int8)}
    assert first == {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    with monkeypatch.context() as patch:
        patch.setattr(safetensors, "safe_open", lambda *_, **__: pytest.fail("it was read again"))
        assert digest_files([path], "x") == [first]
    for change in ("time", "inode"):
        if change == "inode":
            path.unlink()
        write(path, torch.arange(40.0).view(5, 8) + 1, time=OLD + (change == "time"))
        assert digest_files([path], "x") != [first]
        write(path, torch.arange(40.0).view(5, 8))
        os.utime(path, (OLD + 7, OLD + 7))
        assert digest_files([path], "x") == [first]


def test_a_file_of_this_moment_is_not_kept(path, cache):
    """It may be written again in the same tick of the clock."""
    os.utime(path)
    digest_files([path], "x")
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"about": 1, "digests": {"a": 2}}', "\0" * 50])
def test_a_damaged_record_is_made_again(path, cache, content):
    expected = digest_files([path], "x")
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    kept.write_text(content)
    assert digest_files([path], "x") == expected and kept.read_text() == whole
    kept.write_text(json.dumps(json.loads(whole) | {"digests": ["a"]}))
    assert digest_files([path], "x") == expected


def test_a_folder_that_cannot_be_written_costs_a_warning(path, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match=r"digests of a target's weights cannot be kept in .*will be made again"):
        assert digest_files([path], "x")[0]["a"] == digest_tensor(torch.arange(40.0).view(5, 8))


def test_a_user_without_a_home_has_a_folder_for_temporary_files(monkeypatch):
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    assert find_cache_folder().name == "specdec" and find_cache_folder().parent.is_dir()


@pytest.mark.filterwarnings("ignore:.*cannot be kept")
def test_several_may_write_at_once(path, cache):
    expected, messages = digest_files([path], "x"), []
    for kept in cache.iterdir():
        kept.unlink()
    threads = [threading.Thread(target=lambda: messages.extend(digest_files([path], "x"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages == 6 * expected and digest_files([path], "x") == expected


def test_long_work_says_how_far_it_is(path, monkeypatch, caplog):
    digest_files([path], "targets/x")
    assert not caplog.messages
    os.utime(path, (OLD + 1, OLD + 1))
    monkeypatch.setattr(digests, "FIRST_LINE_SECONDS", 0.0)
    digest_files([path], "targets/x")
    (line,) = caplog.messages
    assert line.startswith("targets/x: its weights are read for its fingerprint: 0.0 of 0.0 GB, about 0 s left")


def test_the_digest_of_sources_changes_with_any_module_and_runs_none(tmp_path, monkeypatch):
    package = tmp_path / "sourcepackage"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "one.py", "inner/__init__.py", "inner/two.py"):
        (package / name).write_text("" if name == "__init__.py" else "raise RuntimeError\n")
    (package / "inner/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest_all() -> list[str]:
        digests.digest_sources.cache_clear()
        names = [("sourcepackage",), ("sourcepackage.one",), ("sourcepackage.inner.two", "sourcepackage.one")]
        return [digests.digest_sources(*key) for key in names]

    before = digest_all()
    assert len(set(before)) == 3 and digest_all() == before
    (package / "inner/two.py").write_text("raise ValueError\n")
    changed = [old != new for old, new in zip(before, digest_all())]
    assert changed == [True, False, True]
    assert digests.digest_sources("sourcepackage.missing") == digests.digest_sources("missing.package")
