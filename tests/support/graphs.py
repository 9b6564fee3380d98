"""Stand-ins of CUDA graphs on a CPU."""

from collections.abc import Callable

import pytest
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.core import compile


class StepRecorder:
    """Stands in for `compile.capture_step`: operations are recorded once, and done again at each start.

    `captured`: tensors that each recording reads or writes besides its own results; `num_starts`: starts so far
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.captured: list[list] = []
        self.num_starts = 0
        monkeypatch.setattr(compile, "capture_step", self.capture)

    def capture(self, function: Callable[[], None], device, pool, *, restore: Callable[[], None]) -> Callable[[], None]:
        for _ in range(compile.WARM_UP_CALLS):
            function()
            restore()

        def run() -> tuple:
            function()
            return ()

        graph = make_fx(run)()  # runs it
        restore()
        nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
        self.captured.append([getattr(graph, node.target) for node in nodes])

        def start() -> None:
            self.num_starts += 1
            graph()

        return start
