"""A head as an engine runs it."""

import pytest

from specdec.measuring.servers.server import LLAMA_CPP, OPENVINO, SGLANG, VLLM
from specdec.measuring.servers.verdict import draft_as_engine
from tests.support.drafters import make_drafter


@pytest.mark.parametrize(
    "head, kind, window",
    [
        ("eagle3", VLLM, 6),
        ("eagle3", LLAMA_CPP, None),
        ("eagle3", OPENVINO, None),
        ("eagle3", SGLANG, 6),
        ("eagle", VLLM, None),
        ("mtp", VLLM, None),
        ("dflash", VLLM, 6),
        ("draft", VLLM, None),
    ],
)
def test_an_engine_without_windows_is_compared_with_a_head_without_one(small_target, head, kind, window):
    drafter = make_drafter(small_target, head).with_window(6)
    served = draft_as_engine(drafter, kind)
    assert served.window == window and set(served.windows) == {window} and drafter.window == 6
