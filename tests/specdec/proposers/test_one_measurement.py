"""Tests that two processes of one machine measure ways of passes and costs once, and both take the result."""

import os
import time

import pytest
from torch import distributed as dist

from specdec.core.compile import Runner
from specdec.core.files import lock_cached
from specdec.core.sampling import Sampling
from specdec.decoding import fastest
from specdec.proposers import costs
from specdec.target.verifier import Verifier
from tests.support.targets import make_target
from tests.support.together import together


def choose_and_measure(folder: str) -> dict:
    """In each of two processes, at the same moment: the way and the costs that it takes, and its own measurements.

    Each would find another way the fastest, and other costs.
    """
    os.environ["SPECDEC_CACHE"] = folder
    dist.init_process_group("gloo")
    rank, counts = dist.get_rank(), {"ways": 0, "costs": 0}

    class Timer:
        def __init__(self, verifier, sampling, rows, *, linear):
            runner = verifier.runner
            self.is_fastest = (runner.compile, runner.cuda_graphs) == fastest.RUN_MODES[1 + rank]

        def seconds(self, num):
            counts["ways"] += 1
            time.sleep(0.01)
            return 0.1 if self.is_fastest else 1.0

        def measure(self, sizes):
            counts["costs"] += 1
            time.sleep(0.3)
            return {num: num + 0.1 * rank for num in sizes}

    costs.PassTimer = Timer
    fastest._can_measure = fastest.fast.allows = lambda *_: True
    target, runner = make_target(6), Runner(None, cuda_graphs=None)
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=Runner())
    curves = costs.MeasuredCosts(verifier, Sampling(), linear=True)
    dist.barrier()
    fastest.choose_run_mode(runner, target)
    dist.barrier()
    curves.prepare(8)
    return {"way": [runner.compile, runner.cuda_graphs], "costs": sorted(curves.table.items()), "counts": counts}


@pytest.mark.full
def test_one_of_two_processes_measures_for_both(tmp_path):
    first, second = together(2, "tests.specdec.proposers.test_one_measurement:choose_and_measure", str(tmp_path))
    assert first["way"] == second["way"] and any(first["way"])
    assert first["costs"] == second["costs"] and [size for size, _ in first["costs"]] == [1, 8]
    counts = first["counts"], second["counts"]
    assert sorted(count["ways"] for count in counts) == [
        0,
        len(fastest.RUN_MODES) * (2 + fastest.REPEATS),
    ]  # 2: warm-up
    assert sum(count["costs"] for count in counts) == 2  # of 1 row and of 8, each by one of them


def test_a_folder_that_cannot_be_locked_is_no_obstacle(tmp_path):
    (tmp_path / "file").write_text("")
    with lock_cached(tmp_path / "file" / "costs.json"), lock_cached(None):
        pass
    with pytest.raises(OSError, match="of the work itself"), lock_cached(tmp_path / "costs.json"):
        raise OSError("of the work itself")
