"""The speedup that an engine would have, which starts whole passes and steps at once, as captured CUDA graphs.

Decoding on a GPU here includes the time in which Python starts kernels, more of it in plain decoding than in an engine.
So the report has, beside the measured speedup, tau * plain / (verify + steps * step), of three captured times that are
measured once, in the run mode on which decoding settled. Sampling, scheduling and the end of a round are left out
(docs/gpu.md).
"""

import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core import fast, rules
from specdec.core.cache import RowCache
from specdec.core.compile import GraphPool, Runner, capture_graph
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree
from specdec.decoding import fastest
from specdec.measuring.report import Report
from specdec.proposers.base import Proposer
from specdec.proposers.costs import CONTEXT, PassTimer
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from specdec.target.verifier import Verifier

REPEATS = 20  # replays of one timing
TIMINGS = 3  # timings of each pass, in turn, of which the median counts


@dataclass(frozen=True)
class CapturedCosts:
    """Times of the captured parts of a round."""

    plain: float  # seconds of the target's pass over one token
    verify: float  # seconds of its pass over a tree
    step: float  # seconds of a step of the head
    nodes: int  # nodes of the tree, with its root
    steps: int  # steps of a round

    def speedup(self, tau: float) -> float:
        """The speedup over plain decoding at an acceptance length."""
        return tau * self.plain / (self.verify + self.steps * self.step)

    def add_to(self, report: Report) -> Report:
        """The report with the speedup of its tau, if it has one."""
        if report.tau is None:
            return report
        times = {name: 1e3 * getattr(self, name) for name in ("plain", "verify", "step")}
        figures = {**times, "nodes": self.nodes, "steps": self.steps}
        return replace(report, served_speedup=self.speedup(report.tau), served_ms=figures)


def measure_captured(target: Target, proposer: Proposer | None) -> CapturedCosts | None:
    """The times of a head's round; None where passes are not captured, and for other proposers."""
    if not isinstance(proposer, HeadProposer) or not fast.allows("graphs", target.device):
        return None
    compiled = _is_compiling_settled(target, proposer.runner)
    runner = Runner(cuda_graphs=True)
    runner.compile = compiled
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner, hidden_states=proposer.target_layers)
    if not verifier.capturable:
        return None
    shape, parallel = proposer.shape, proposer.drafter.parallel
    nodes, steps = 1 + shape.nodes, 1 if parallel else shape.depth
    try:
        pass_seconds = time_passes(verifier, nodes, linear=shape.chain)
        step_seconds = time_step(proposer, compiled=compiled)
    except RuntimeError as error:
        warnings.warn(f"served_speedup is left out: {str(error).splitlines()[0]}", stacklevel=2)
        return None
    return CapturedCosts(pass_seconds[1], pass_seconds[nodes], step_seconds, nodes, steps)


def _is_compiling_settled(target: Target, runner: Runner) -> bool:
    """Whether decoding with a runner of this one's settings compiles the target's passes."""
    compile, cuda_graphs = runner.requested
    settled = Runner(compile, cuda_graphs=cuda_graphs)
    fastest.choose_run_mode(settled, target)
    return settled.compile


@torch.inference_mode()
def time_passes(verifier: Verifier, nodes: int, *, linear: bool) -> dict[int, float]:
    """Seconds of captured passes over one node and over `nodes`, measured in turn, by their nodes.

    Raises RuntimeError where a pass cannot be captured.
    """
    timer, pool = PassTimer(verifier, Sampling(), 1, linear=linear), GraphPool()
    timer.cache.make_room(nodes)
    replays = {num: _capture_pass(verifier, timer.cache, timer.make_tree(num), pool) for num in (1, nodes)}
    times: dict[int, list[float]] = {num: [] for num in replays}
    for _ in range(TIMINGS):
        for num, replay in replays.items():
            times[num].append(time_repeated(replay, verifier.target.device))
    return {num: statistics.median(seconds) for num, seconds in times.items()}


def _capture_pass(verifier: Verifier, cache: RowCache, tree: Tree, pool: GraphPool) -> Callable[[], object]:
    """A pass over a tree, which moves the accepted nodes of a tree with branches. Nothing stays pending."""
    cache.reserve(tree.tokens.shape[1])

    def read_tree(tokens, parents, lengths, skipped, slots):
        view = cache.with_tensors(cache.keys_and_values, lengths, skipped=skipped, slots=slots)
        captured_tree = Tree(tokens, parents, None, linear=tree.linear)
        verdict = verifier.decide(captured_tree, view, rules.Draws(None), Sampling())
        if not tree.linear:
            view.keep_path(verdict.path)
        output = verdict.output
        return verdict.path, verdict.num_kept, verdict.next_token, output.features, output.final

    inputs = tree.tokens, tree.parents, cache.lengths, cache.skipped, cache.slots
    replay = capture_graph(read_tree, inputs, pool)
    cache.drop_pending()
    return functools.partial(replay, *inputs)


@torch.inference_mode()
def time_step(proposer: HeadProposer, *, compiled: bool = False) -> float:
    """Seconds of a captured step after a text: over one node of a chain, or over `width` nodes of a tree.

    The only step of a parallel head, or of one draft, reads the committed tokens.
    compiled: true for a compiled step
    """
    drafter, shape = proposer.drafter, proposer.shape
    target, device = drafter.target, drafter.target.device
    proposer_copy = HeadProposer(drafter, shape)  # with a cache of its own
    runner = proposer_copy.runner
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (1, CONTEXT), generator=generator).to(device)
    width = len(drafter.target_layers) * target.width
    features = torch.randn(1, CONTEXT, width, generator=generator).to(device, target.dtype)

    def commit(num: int) -> None:
        proposer_copy.commit(tokens[:, :num], features[:, :num], torch.full((1,), num, device=device), [num])

    proposer_copy.begin(tokens, torch.full((1,), CONTEXT, device=device))
    commit(CONTEXT)
    _, first = proposer_copy.absorb()
    runner.compile = compiled
    if drafter.parallel or shape.depth == 1:
        proposer_copy.cache.make_room(2 + shape.nodes)
        num = torch.full((1,), 2, device=device)
        inputs = (
            tokens[:, :2],
            features[:, :2],
            num,
            proposer_copy.cache.lengths,
            *proposer_copy.carried,
            *proposer_copy.cache.keys_and_values,
        )

        def absorb(*new: Tensor) -> tuple[Tensor, ...]:
            return runner(("absorb", shape.depth), proposer_copy._absorb, *new, *inputs[2:])

        return time_captured(absorb, inputs[:2])
    nodes = 1 if shape.chain else shape.width
    visible_nodes = torch.eye(nodes, dtype=torch.bool, device=device)[None]

    def step(state: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
        return proposer_copy.step(2, 0, state, parents, visible_nodes)[:2]

    return time_captured(step, (first.state.expand(-1, nodes, -1), tokens[:, :nodes]))


def time_captured(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> float:
    """Seconds of a captured function. Raises RuntimeError where it cannot be captured."""
    replay = capture_graph(function, inputs, GraphPool())
    return time_repeated(lambda: replay(*inputs), inputs[0].device)


def time_repeated(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call by a GPU's own clock, over REPEATS calls, none of which waits for another.

    One call before them, which may compile or capture, does not count.
    """
    call()
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3 / REPEATS
