"""CUDA graphs: what a function of tensors gives the device to do, recorded once and then started as a whole.

A pass of a small or well compiled target is over before Python has launched the hundreds of kernels of the next one.
torch's own way (inductor's cudagraphs) would copy all weights and K and V at each call, because here they are arguments
of compiled functions (specdec/compile.py), so whole passes are captured instead.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2  # calls before the capture, for what happens only once: workspaces, compiling, choosing kernels

Replay = Callable[..., tuple[Tensor, ...]]


def capture(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Replay:
    """`function` as a graph: the result copies its arguments to where the graph reads, starts it, and copies the outputs.

    The function is called several times with these inputs, which must have the same effect as once. It must not wait for
    the device, and what it reads or writes besides its arguments must stay where it is in memory.
    Raises RuntimeError where it cannot be captured.
    """
    if any(value.device.type != "cuda" for value in inputs):
        raise RuntimeError("only what runs on a CUDA device can be a CUDA graph")
    own = [value.clone() for value in inputs]
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):  # the documentation of torch asks for a stream other than the default one
        for _ in range(WARM_UP):
            function(*own)
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device meanwhile
        outputs = function(*own)

    def replay(*given: Tensor) -> tuple[Tensor, ...]:
        for place, value in zip(own, given, strict=True):
            place.copy_(value)
        graph.replay()
        return tuple(value.clone() for value in outputs)  # the next replay overwrites them

    return replay
