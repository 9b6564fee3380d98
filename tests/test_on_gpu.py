"""Tests on a GPU where there is one, elsewhere on a CPU with stand-ins of captures and of inductor (benchmarks/gpu).

`make gpu` runs them with all others that are marked gpu, and `pytest -m gpu` does.
"""

import pytest
import torch

from benchmarks import hardware
from benchmarks.gpu import training
from benchmarks.gpu.bench import CAPTURED, EAGER, Bench
from benchmarks.gpu.machine import make_machine
from benchmarks.gpu.options import GpuReportOptions, make_tiny
from benchmarks.gpu.rows import ARRIVALS, SHAPES, decode_rows
from specdec.core import fast
from specdec.core.sampling import Sampling

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench():
    """A tiny target in float32, whose answers do not depend on the order of sums."""
    options = make_tiny(GpuReportOptions(dry_run=not torch.cuda.is_available()))
    bench = Bench(options, make_machine(dry_run=options.dry_run))
    positions = bench.positions
    bench.target = hardware.make_random_target(options.shape, device=bench.device, positions=positions, dtype="float32")
    with bench.machine.installed():
        yield bench


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_come_and_go_have_the_answers_of_eager_passes(bench, shape):
    captures = bench.machine.counts["captures"]
    answers = decode_rows(bench, CAPTURED, shape, Sampling())
    assert [len(answer) for answer in answers] == [num for _, num in ARRIVALS]
    assert bench.machine.counts["captures"] > captures
    assert answers == decode_rows(bench, EAGER, shape, Sampling())


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_come_and_go_are_sampled_to_their_ends(bench, shape):
    answers = decode_rows(bench, CAPTURED, shape, Sampling(temperature=1.0))
    assert [len(answer) for answer in answers] == [num for _, num in ARRIVALS]


@pytest.mark.parametrize("check", [training.check_rounds, training.check_training_step])
def test_nothing_waits_for_the_device(bench, check):
    figures = check(bench)
    reads = {training.check_rounds: training.MIN_ROUNDS, training.check_training_step: 0}[check]
    assert (figures["waits"], figures["reads_of_accepted_tokens"]) == (0, reads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", fast.PATHS)
def test_fast_paths_agree_with_their_references(bench, path):
    assert bench.machine.prove(path, torch.bfloat16) == "agrees"
