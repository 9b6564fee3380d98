"""Tests on another device: with TEST_DEVICE=cuda, tensors and models that tests make are there (CONTRIBUTING.md).

What the library makes itself is left alone, because it must find the right device by its inputs: that is what such a run
tests. So torch.set_default_device, which would put everything there, is not used.
"""

import os
import sys
from types import FrameType

import pytest
import torch
from torch.overrides import TorchFunctionMode

import train.data.rows
from tests.support import ROOT

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
TESTS, LIBRARY = f"{ROOT}/tests/", (f"{ROOT}/specdec/", f"{ROOT}/train/", f"{ROOT}/scripts/", f"{ROOT}/train.py")


def called_by_test(frame: FrameType | None) -> bool:
    """Whether the innermost frame of this project is one of its tests, whatever packages are in between."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(LIBRARY):
            return False
        if name.startswith(TESTS) and name != __file__:
            return True
        frame = frame.f_back
    return False


class OnDevice(TorchFunctionMode):
    """Within, tensors that tests make without naming a device are on `device`."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in FACTORIES and kwargs.get("device") is None and called_by_test(sys._getframe(1)):
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)


def make_generator(device: str) -> type:
    """A class in place of torch.Generator: those that tests make without naming a device are of this one."""
    real = torch.Generator

    class Meta(type):
        def __instancecheck__(cls, value) -> bool:
            return isinstance(value, real)

        def __call__(cls, *args):
            return real(*args) if args or not called_by_test(sys._getframe(1)) else real(device)

    return Meta("Generator", (), {})


def begin() -> None:
    """Puts what tests make on DEVICE from now on. A device that is not there ends the run with a sentence."""
    if torch.device(DEVICE).type == "cpu":
        return
    if torch.device(DEVICE).type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"TEST_DEVICE={DEVICE}: there is no CUDA device here. Leave it out to run the tests on the CPU."
        )
    if torch.device(DEVICE).type != "meta":  # a pretended device draws its numbers on the CPU
        torch.Generator = make_generator(DEVICE)
    collate = train.data.rows.collate

    def collate_there(*args, **kwargs):
        batch = collate(*args, **kwargs)
        return batch.to(DEVICE) if called_by_test(sys._getframe(1)) else batch

    train.data.rows.collate = collate_there  # before the modules of tests import it
    OnDevice(DEVICE).__enter__()
