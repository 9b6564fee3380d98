"""CUDA graphs: what a function of tensors gives the device to do, recorded once and then started as a whole.

A pass of a small or well compiled target is over before Python has launched the hundreds of kernels of the next one.
torch's own way (inductor's cudagraphs) would copy all weights and K and V at each call, because here they are arguments
of compiled functions (specdec/core/compile.py), so whole passes are captured instead.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2  # calls before the capture, for what happens only once: workspaces, compiling, choosing kernels

Replay = Callable[..., tuple[Tensor, ...]]


class GraphPool:
    """The memory of all graphs of one runner: they are replayed one after the other, so they need it only once.

    A replay overwrites the intermediate results of other graphs, which is harmless on one stream: a graph reads only its own
    inputs, which lie outside of the pool, what stays in memory, and what the same replay has written. Its outputs stay its own
    while it is kept, and they are copied before the next replay. A graph that is dropped leaves its outputs' memory to later
    captures. The graphs beside it lose nothing, because torch gives no memory of a pool back while a graph of it lives.
    When none is left, torch refuses the handle: so it is a runner's, not the process's, and a runner keeps its newest graph.
    """

    @functools.cached_property
    def handle(self):
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """Of all captures: memory that one has left is used again on the same stream only."""
        return torch.cuda.Stream()


def capture(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], pool: GraphPool) -> Replay:
    """`function` as a graph: the result copies its arguments to where the graph reads, starts it, and copies the outputs.

    The function is called several times with these inputs, which must have the same effect as once. It must not wait for
    the device, and what it reads or writes besides its arguments must stay where it is in memory.
    Raises RuntimeError where it cannot be captured.
    """
    if any(value.device.type != "cuda" for value in inputs):
        raise RuntimeError("only what runs on a CUDA device can be a CUDA graph")
    own, graph = [value.clone() for value in inputs], torch.cuda.CUDAGraph()
    with torch.cuda.device(own[0].device):  # streams are those of the current device
        current, aside = torch.cuda.current_stream(), pool.stream
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # the documentation of torch asks for a stream other than the default one
            for _ in range(WARM_UP):
                function(*own)
        current.wait_stream(aside)
        # Other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=pool.handle, stream=aside, capture_error_mode="thread_local"):
            outputs = function(*own)

    def replay(*given: Tensor) -> tuple[Tensor, ...]:
        for place, value in zip(own, given, strict=True):
            place.copy_(value)
        graph.replay()
        return tuple(value.clone() for value in outputs)  # the next replay overwrites them

    return replay
