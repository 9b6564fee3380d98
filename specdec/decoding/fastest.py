"""Whether to compile passes and to start them as CUDA graphs, where nobody has said so: on a GPU the first use measures it.

The result is kept on disk beside the measured costs (proposers/costs.py). On a CPU nothing is compiled unless it is asked for.
"""

import warnings

import numpy
import torch

from specdec.core import fast
from specdec.core.compile import Runner
from specdec.core.devices import name_cause
from specdec.core.files import cache_document
from specdec.core.sampling import Sampling
from specdec.core.untrusted import read_json
from specdec.proposers import costs
from specdec.target.model import Target
from specdec.target.verifier import Verifier

RunMode = tuple[bool, bool]  # compile, cuda_graphs
RUN_MODES: tuple[RunMode, ...] = ((False, False), (False, True), (True, False), (True, True))
TIMED_NODES, REPEATS = 6, 8  # of the pass that is timed, and how often
SIMPLER_MODE_TIME_RATIO = 0.97  # of the time of a way that needs less preparation, at most
_modes_by_file: dict[str, RunMode] = {}  # by file, for folders that cannot be written


def choose_run_mode(runner: Runner, target: Target) -> None:
    """Decides what the runner was not told: the way in which a pass of this target is fastest."""
    if not runner.undecided:
        return
    requested, runner.undecided = runner.requested, False
    if not _can_measure(target.device) or target.share.size > 1:
        return
    modes = [mode for mode in RUN_MODES if all(wish in (None, setting) for wish, setting in zip(requested, mode))]
    if not fast.allows("graphs", target.device):
        modes = [mode for mode in modes if not mode[1]] or modes
    plain = Verifier(target, sampling=Sampling(), rule="token", runner=Runner())
    file = costs.find_costs_file(costs.describe_conditions(plain, Sampling()) | {"ways": modes}).with_suffix(
        ".way.json"
    )
    if str(file) not in _modes_by_file:
        try:
            document = read_json(file)
            _modes_by_file[str(file)] = bool(document["compile"]), bool(document["cuda_graphs"])
        except (OSError, ValueError, KeyError, TypeError):
            seconds = {mode: _time_mode(target, mode) for mode in modes}
            _modes_by_file[str(file)] = mode = pick_fastest_mode(seconds)
            seconds_by_mode = {" and ".join(name for name, on in zip(("compile", "cuda_graphs"), run_mode) if on) or "neither": time
                    for run_mode, time in seconds.items()}  # fmt: skip
            document = {"compile": mode[0], "cuda_graphs": mode[1], "seconds": seconds_by_mode}
            cache_document(file, document, "Which way of passes is fastest")
    runner.compile, runner.cuda_graphs = _modes_by_file[str(file)]


def pick_fastest_mode(seconds: dict[RunMode, float | None]) -> RunMode:
    """The fastest way; one that needs more preparation must be faster by more than what measurements vary. None: it failed"""
    best = next(iter(seconds))
    for mode, time in seconds.items():
        best_seconds = seconds[best]
        if time is not None and (best_seconds is None or time < SIMPLER_MODE_TIME_RATIO * best_seconds):
            best = mode
    return best


def _can_measure(device: torch.device) -> bool:
    return device.type == "cuda"


def _time_mode(target: Target, mode: RunMode) -> float | None:
    """Seconds of a pass, or None where it cannot run this way"""
    runner = Runner(mode[0], cuda_graphs=mode[1])
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner)
    if mode[1] and not verifier.capturable:
        return None
    try:
        timer = costs.PassTimer(verifier, Sampling(), 1, linear=True)
        for _ in range(2):  # what happens only once
            timer.seconds(TIMED_NODES)
        times = [timer.seconds(TIMED_NODES) for _ in range(REPEATS)]
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"Passes are not tried with compile={mode[0]}, cuda_graphs={mode[1]}: {name_cause(error)}",
            stacklevel=2,
        )
        return None
    return float(numpy.quantile(times, 0.25)) if runner.cuda_graphs == mode[1] else None
