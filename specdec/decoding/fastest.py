"""The run mode of passes: whether they are compiled, and whether they start as CUDA graphs.

Where the user has not chosen it, a GPU measures it at the first use. The result is kept on disk beside the measured
costs (proposers/costs.py) if no mode has failed, else in this process only. On a CPU nothing is compiled unless the
user asks for it.
"""

import warnings
from pathlib import Path

import numpy
import torch

from specdec.core import fast
from specdec.core.compile import Runner
from specdec.core.devices import name_cause
from specdec.core.files import cache_document, lock_cached
from specdec.core.sampling import Sampling
from specdec.core.untrusted import read_json
from specdec.proposers import costs
from specdec.target.model import Target
from specdec.target.verifier import Verifier

RunMode = tuple[bool, bool]  # compile, cuda_graphs
RUN_MODES: tuple[RunMode, ...] = ((False, False), (False, True), (True, False), (True, True))
TIMED_NODES = 6  # nodes of the timed pass, as of a usual chain
REPEATS = 8  # timings of each mode; their lower quartile counts, because other work on the machine only adds time
# A mode with more preparation is used only if its pass takes at most 97 % of the simpler mode's time: timings vary so.
SIMPLER_MODE_TIME_RATIO = 0.97
_modes_by_file: dict[str, RunMode] = {}  # results by their files, for folders that cannot be written


def choose_run_mode(runner: Runner, target: Target) -> None:
    """Sets the settings of the runner that nobody has chosen: those of the fastest mode for this target."""
    if not runner.undecided:
        return
    requested, runner.undecided = runner.requested, False
    if not _can_measure(target.device) or target.share.size > 1:
        return
    modes = _list_modes(requested, target)
    conditions = costs.describe_conditions(_make_verifier(target, (False, False)), Sampling()) | {"ways": modes}
    file = costs.find_costs_file(conditions).with_suffix(".way.json")
    if str(file) not in _modes_by_file:
        with lock_cached(file):
            _modes_by_file[str(file)] = _read_mode(file) or _measure_modes(target, modes, file)
    runner.compile, runner.cuda_graphs = _modes_by_file[str(file)]


def pick_fastest_mode(seconds: dict[RunMode, float | None]) -> RunMode:
    """The fastest mode. seconds: seconds of a pass by mode, simple modes first; None: the mode has failed

    A later mode must be faster than an earlier one by more than timings vary.
    """
    best = next(iter(seconds))
    for mode, time in seconds.items():
        best_seconds = seconds[best]
        if time is not None and (best_seconds is None or time < SIMPLER_MODE_TIME_RATIO * best_seconds):
            best = mode
    return best


def _list_modes(requested: tuple[bool | None, bool | None], target: Target) -> list[RunMode]:
    """Modes that agree with the requested settings, None for a free one, and that this device and target have."""
    modes = [mode for mode in RUN_MODES if all(wish in (None, setting) for wish, setting in zip(requested, mode))]
    if not (fast.allows("graphs", target.device) and _make_verifier(target, (False, True)).capturable):
        return [mode for mode in modes if not mode[1]] or modes
    return modes


def _read_mode(file: Path) -> RunMode | None:
    """The mode of an earlier measurement; None without one, or if its file is damaged."""
    try:
        document = read_json(file)
        return bool(document["compile"]), bool(document["cuda_graphs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measure_modes(target: Target, modes: list[RunMode], file: Path) -> RunMode:
    """Times a pass in each mode, and returns the fastest one. Writes the seconds to `file` unless a mode has failed."""
    seconds = {mode: _time_mode(target, mode) for mode in modes}
    mode = pick_fastest_mode(seconds)
    if None in seconds.values():  # such as by full memory: the next process tries again
        return mode
    seconds_by_name = {_name_mode(mode): time for mode, time in seconds.items()}
    document = {"compile": mode[0], "cuda_graphs": mode[1], "seconds": seconds_by_name}
    cache_document(file, document, "Which way of passes is fastest")
    return mode


def _name_mode(mode: RunMode) -> str:
    return " and ".join(name for name, on in zip(("compile", "cuda_graphs"), mode) if on) or "neither"


def _can_measure(device: torch.device) -> bool:
    return device.type == "cuda"


def _time_mode(target: Target, mode: RunMode) -> float | None:
    """Seconds of a pass in this mode; None, with a warning, if it cannot run"""
    verifier = _make_verifier(target, mode)
    try:
        timer = costs.PassTimer(verifier, Sampling(), 1, linear=True)
        for _ in range(2):  # warm-up: compiling, capturing
            timer.seconds(TIMED_NODES)
        times = [timer.seconds(TIMED_NODES) for _ in range(REPEATS)]
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"Passes are not tried with compile={mode[0]}, cuda_graphs={mode[1]}: {name_cause(error)}",
            stacklevel=2,
        )
        return None
    return float(numpy.quantile(times, 0.25)) if verifier.runner.cuda_graphs == mode[1] else None


def _make_verifier(target: Target, mode: RunMode) -> Verifier:
    runner = Runner(mode[0], cuda_graphs=mode[1])
    return Verifier(target, sampling=Sampling(), rule="token", runner=runner)
