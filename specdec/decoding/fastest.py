"""Whether to compile passes and to start them as CUDA graphs, where nobody has said so: on a GPU the first use measures it.

The result is kept on disk beside the measured costs (proposers/costs.py). On a CPU nothing is compiled unless it is asked for.
"""

import warnings

import numpy
import torch

from specdec.core import fast
from specdec.core.compile import Runner
from specdec.core.devices import name_cause
from specdec.core.files import keep_document
from specdec.core.sampling import Sampling
from specdec.core.untrusted import read_json
from specdec.proposers import costs
from specdec.target.model import Target
from specdec.target.verifier import Verifier

Way = tuple[bool, bool]  # compile, cuda_graphs
WAYS: tuple[Way, ...] = ((False, False), (False, True), (True, False), (True, True))
NODES, REPEATS = 6, 8  # of the pass that is timed, and how often
GAIN = 0.97  # of the time of a way that needs less preparation, at most
_known: dict[str, Way] = {}  # by file, for folders that cannot be written


def settle(runner: Runner, target: Target) -> None:
    """Decides what the runner was not told: the way in which a pass of this target is fastest."""
    if not runner.undecided:
        return
    asked, runner.undecided = runner.asked, False
    if not _measures(target.device) or target.share.size > 1:
        return
    ways = [way for way in WAYS if all(wish in (None, own) for wish, own in zip(asked, way))]
    if not fast.on("graphs", target.device):
        ways = [way for way in ways if not way[1]] or ways
    plain = Verifier(target, sampling=Sampling(), rule="token", runner=Runner())
    file = costs.find_file(costs.describe_conditions(plain, Sampling()) | {"ways": ways}).with_suffix(".way.json")
    if str(file) not in _known:
        try:
            found = read_json(file)
            _known[str(file)] = bool(found["compile"]), bool(found["cuda_graphs"])
        except (OSError, ValueError, KeyError, TypeError):
            seconds = {way: _time(target, way) for way in ways}
            _known[str(file)] = way = choose(seconds)
            told = {" and ".join(name for name, on in zip(("compile", "cuda_graphs"), each) if on) or "neither": time
                    for each, time in seconds.items()}  # fmt: skip
            found = {"compile": way[0], "cuda_graphs": way[1], "seconds": told}
            keep_document(file, found, "Which way of passes is fastest")
    runner.compile, runner.cuda_graphs = _known[str(file)]


def choose(seconds: dict[Way, float | None]) -> Way:
    """The fastest way; one that needs more preparation must be faster by more than what measurements vary. None: it failed"""
    best = next(iter(seconds))
    for way, time in seconds.items():
        known = seconds[best]
        if time is not None and (known is None or time < GAIN * known):
            best = way
    return best


def _measures(device: torch.device) -> bool:
    return device.type == "cuda"


def _time(target: Target, way: Way) -> float | None:
    """Seconds of a pass, or None where it cannot run this way"""
    runner = Runner(way[0], cuda_graphs=way[1])
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner)
    if way[1] and not verifier.capturable:
        return None
    try:
        timer = costs.PassTimer(verifier, Sampling(), 1, linear=True)
        for _ in range(2):  # what happens only once
            timer.seconds(NODES)
        times = [timer.seconds(NODES) for _ in range(REPEATS)]
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"Passes are not tried with compile={way[0]}, cuda_graphs={way[1]}: {name_cause(error)}",
            stacklevel=2,
        )
        return None
    return float(numpy.quantile(times, 0.25)) if runner.cuda_graphs == way[1] else None
