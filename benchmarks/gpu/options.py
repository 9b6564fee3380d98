"""The options of the report of a GPU."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks import common

PARTS = (1, 2, 3)
# Files with tests that are marked gpu: others may import what a lent machine lacks
GPU_TESTS = (
    "tests/test_on_gpu.py tests/benchmarks/test_training_step.py tests/scripts/test_evaluate.py "
    "tests/scripts/test_replay.py tests/train/test_train.py"
)


@dataclass(frozen=True)
class GpuReportOptions:
    part: int | None = None  # 1 decoding, 2 training and validation, 3 checks; null: what is missing of all, in order
    minutes: float = 10.0  # time of all; then figures are cut, or left for the next time. 0: only the page is written
    dry_run: bool = False  # all figures on a CPU, with a tiny target and stand-ins; they mean nothing
    out: str = "gpu_report"  # NAME.jsonl with the figures and NAME.md with the page, or a folder for both
    earlier: str | None = None  # NAME.jsonl of an earlier run, whose figures are taken over
    redo: bool = False  # whether finished figures are measured again
    shape: str = "qwen3-8b"  # sizes of the random target: qwen3-8b, 8b, 1b, qwen3-tiny, tiny
    nodes: str = "1,6,64"  # comma list of nodes to verify in one pass; chains up to 1 + depth, else trees
    context: int = 500  # tokens before what is decoded
    contexts: str = "3000,16000"  # comma list of longer contexts
    depth: int = 5  # drafts of a round
    rounds: int = 40  # timings of rounds; the median counts
    length: int = 8192  # tokens in a training pack, which holds eight conversations
    heads: str = "mtp,dflash,dspark"  # comma list of heads that are trained besides eagle3
    prompts: str = "16,64"  # comma list of prompts of a validation; the last one comes last
    steps: int = 30  # steps of the main command
    tests: str = f"-m gpu {GPU_TESTS}"  # arguments of pytest; empty: no tests
    processes: int = 1  # processes of the tests; each proves the fast paths for itself
    only: str | None = None  # one group of figures, in this process (the report starts itself so)
    since: float = 0.0  # figures that failed after this time (seconds since 1970) are not tried again

    @property
    def is_part_known(self) -> bool:
        return self.part is None or self.part in PARTS


def make_tiny(options: GpuReportOptions) -> GpuReportOptions:
    """The options of a dry run: every line runs, and nothing takes long."""
    sizes: Any = {"shape": "qwen3-tiny", "nodes": "1,9", "context": 16, "contexts": "24,40", "rounds": 2, "length": 128}
    sizes |= {"heads": "mtp", "prompts": "2,3", "steps": 3, "processes": 1}
    return replace(options, **sizes, tests="tests/specdec/core/test_tree.py" if options.tests else "")


def check_options(options: GpuReportOptions) -> None:
    """Raises ValueError for wrong values."""
    if not options.is_part_known:
        raise ValueError(f"part={options.part} must be 1, 2 or 3.")
    for key in ("nodes", "contexts", "prompts"):
        common.read_numbers(key, getattr(options, key))
