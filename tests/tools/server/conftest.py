"""Fixtures of the server's tests."""

import pytest

from specdec.target.model import Target
from tests.support.targets import save_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target with a tokenizer, in float64."""
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return Target.load(str(folder), dtype="float64")
