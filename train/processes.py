"""The processes of a run: which one prints, how long they wait for one another, what each reads, and their weights.

Every process has all weights, gradients and moments of the optimizer (DDP). A target may be divided over processes, and
so may texts.
"""

import contextlib
import contextvars
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from specdec.core.context_parallel import WHOLE_TEXT, TextShare
from specdec.core.group import Group
from specdec.heads.base import Head
from specdec.target.model import Target

Item = TypeVar("Item")
HEARTBEAT = 30.0  # seconds between two messages of a process that works alone, well below train.timeout
WHOLE_DRAFTER = "each process has the whole drafter, and target.shard=true divides a target"
# Variables ACCELERATE_NAME of accelerate's launcher: flag, what decides in its place, values that change nothing
OFF_VALUES = ("false", "", "0", "no", "off", "n", "f")
REFUSED_FLAGS = {
    "USE_FSDP": ("--use_fsdp", WHOLE_DRAFTER, OFF_VALUES),
    "USE_DEEPSPEED": ("--use_deepspeed", WHOLE_DRAFTER, OFF_VALUES),
    "USE_MEGATRON_LM": ("--use_megatron_lm", WHOLE_DRAFTER, OFF_VALUES),
    "USE_PARALLELISM_CONFIG": ("--use_parallelism_config", WHOLE_DRAFTER, OFF_VALUES),
    "DYNAMO_BACKEND": ("--dynamo_backend", "fast= says what is compiled", OFF_VALUES),
    "GRADIENT_ACCUMULATION_STEPS": ("--gradient_accumulation_steps", "train.accumulation= does that", ("1", "")),
}


class TrainingObjective(Protocol):
    """A torch module that the loop trains. Its forward pass gives a `Loss` (train/objective/objective.py)."""

    drafter: Head
    depth: int
    every_slot: bool
    supervise: str

    def __call__(self, batch: Any, output: Any, *, compare: bool) -> Any:
        """The loss of a batch. compare: whether guesses are compared with the text, too"""

    def train(self, mode: bool = True) -> Any: ...

    def parameters(self, recurse: bool = True) -> Iterator[Any]: ...


# What accelerate's launcher asks for


def check_launcher() -> None:
    """Raises ValueError for a flag or a configuration of the launcher that accelerate would follow by itself."""
    for name, (flag, instead, harmless) in REFUSED_FLAGS.items():
        value = os.environ.get(f"ACCELERATE_{name}", harmless[0])
        if value.lower() not in harmless:
            raise ValueError(
                f"accelerate launch asks for {flag} {value}, which train.py does not follow, as {instead}: leave the "
                "flag out, or the line of its configuration."
            )


def find_ignored_flags(precision: str, num_processes: int) -> Iterator[str]:
    """A sentence for each flag of the launcher that the run does not follow. precision, num_processes: the run's own

    The launcher passes `no` where nobody asks for mixed precision. It passes an address for several processes.
    """
    flag = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if flag not in ("no", precision):
        yield (
            f"accelerate launch asks for --mixed_precision {flag}, and precision={precision} decides: give "
            "precision=bf16 or fp32."
        )
    has_address = "MASTER_PORT" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    if has_address and num_processes == 1 and "WORLD_SIZE" not in os.environ:
        yield (
            "accelerate launch was asked for several processes and has started one, as it does without --multi_gpu: "
            "give that in place of --cpu, or use torchrun --nproc_per_node N."
        )


def count_threads(num_processes: int) -> int:
    """Threads of each process: OMP_NUM_THREADS, unless that is a launcher's 1, else an equal share of the cores."""
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal() and int(number) > 1:
        return int(number)
    return max(1, (os.cpu_count() or 1) // num_processes)


# Who speaks


def is_main() -> bool:
    """Whether this is the process that prints. It is known before the accelerator is made."""
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str) -> None:
    """Prints a line once. `Accelerator.print` would print it on every machine."""
    if is_main():
        print(text)


@contextlib.contextmanager
def shorten_warnings() -> Iterator[None]:
    """Within, a warning is one line without its place in the code.

    UserWarnings come from the main process alone, because all have them. A RuntimeWarning concerns one process.
    """
    formatwarning, number = warnings.formatwarning, os.environ.get("RANK", "0")
    who = "" if is_main() else f"process {number}: "
    with warnings.catch_warnings():
        if not is_main():
            warnings.simplefilter("ignore", UserWarning)
        warnings.formatwarning = lambda message, *_, **__: f"warning: {who}{message}\n"
        try:
            yield
        finally:
            warnings.formatwarning = formatwarning


# Waiting


class ProcessLost(ValueError):
    """Another process of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Waiting:
    """A context in which a process waits for the others. minutes: time limit; process: number of this process"""

    minutes: float
    process: int
    num_processes: int

    @contextlib.contextmanager
    def __call__(self, awaited: str, *, timed: bool = True) -> Iterator[None]:
        """Around work that needs the other processes. Raises ProcessLost, with `what`, if one of them ends.

        timed: whether `minutes` limit all of the work; if not, they limit each exchange in it
        If the others do not answer in time, the sentence is printed and this process ends. An exception would not help,
        because the call that waits, such as a GPU's, does not return.
        """
        if self.num_processes == 1:
            yield
            return
        timer = threading.Timer(60 * self.minutes, self._end, [awaited])
        timer.daemon = True
        if timed:
            timer.start()
        try:
            yield
        except RuntimeError as error:
            # Gloo raises plain RuntimeErrors
            if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error).lower():
                raise
            raise ProcessLost(
                f"Process {self.process} waited for {awaited}, and another process of the run has ended "
                f"({str(error).splitlines()[0].partition('. ')[0]})."
            ) from error
        finally:
            timer.cancel()

    def _end(self, awaited: str) -> None:
        sys.stderr.write(
            f"error: Process {self.process} has waited {self.minutes:g} minutes for {awaited}, and another process of "
            "the run does not answer. Raise train.timeout if that may take longer. Then continue with resume=true.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def compute_by_main(make: Callable[[], Item], awaited: str, *, minutes: float) -> Item:
    """The result of `make` in all processes. The main one calls it, and the others wait at most `minutes`."""
    state = PartialState()
    made = [make() if state.is_main_process else None]
    with Waiting(minutes, state.process_index, state.num_processes)(awaited):
        return broadcast_object_list(made)[0]


# Who reads what


def check_groups(num: int, size: int, option: str) -> None:
    """Raises ValueError, which names the option, if `num` processes cannot be divided into groups of `size`."""
    if num == 1 or num % size:
        obstacle = "there is one process" if num == 1 else f"{num} processes cannot form groups of {size}"
        raise ValueError(
            f"{option} lets a group of processes divide what one would hold, and {obstacle}: start several (accelerate "
            "launch --num_processes 8, or torchrun --nproc_per_node 8), or change the option."
        )


def make_mesh(axis: Literal["dp_shard", "cp"], size: int, device_type: str, option: str) -> DeviceMesh:
    """The mesh of the `size` processes, with consecutive numbers, that this one works with. All processes call this.

    axis: dp_shard: they hold a target together; cp: they divide texts. accelerate makes the mesh.
    Raises ValueError, which names the option, if the processes cannot be divided into groups of `size`.
    """
    num = PartialState().num_processes
    check_groups(num, size, option)
    outer = "dp_replicate" if axis == "dp_shard" else "dp_shard"
    config = ParallelismConfig(**{f"{axis}_size": size, f"{outer}_size": num // size})
    return config.get_device_mesh(device_type)[axis]


def share_texts(size: int, device_type: str, length: int) -> TextShare:
    """This process' part of each text of `length` tokens that a group of `size` processes reads together.

    Raises ValueError, with the option to change, for too few processes or tokens.
    """
    if size == 1:
        return WHOLE_TEXT
    option = f"train.context_parallel={size}"
    if length < size * size:
        raise ValueError(
            f"{option} leaves a process without a part of data.length={length} tokens: give {size * size} or more."
        )
    mesh = make_mesh("cp", size, device_type, option)
    return TextShare(mesh.get_local_rank(), size, mesh.get_group())


@dataclass(frozen=True)
class ProcessGroup(Group):
    """The share of texts that a process answers or decodes. Processes that hold a target together do the same texts.

    number, num: this process' share, and the number of shares; first: whether its results are gathered
    """

    number: int
    num: int
    first: bool = True

    @classmethod
    def from_target(cls, accelerator: Accelerator, target: Target) -> "ProcessGroup":
        number, size = accelerator.process_index, target.share.size
        return cls(number // size, accelerator.num_processes // size, number % size == 0)

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This process' share of the items."""
        return items[self.number :: self.num]

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of all processes, each once."""
        return gather_object(results if self.first else [])

    def share(self, value: Item) -> Item:
        """The value of the main process."""
        return broadcast_object_list([value])[0]

    def share_result(self, make: Callable[[], Item]) -> Item:
        """The result of `make`, which the main process calls in a thread, however long it takes.

        The others hear from it every HEARTBEAT seconds, as they wait for one message no longer than train.timeout.
        """
        if PartialState().num_processes == 1:
            return make()
        with ThreadPoolExecutor(1, "main") as pool:
            futures = [pool.submit(contextvars.copy_context().run, make)] if self.main else []
            while True:
                done, _ = wait(futures, HEARTBEAT)
                results = self.share([future.result() for future in done])
                if results:
                    return results[0]

    @property
    def main(self) -> bool:  # type: ignore[override]
        """Whether this is the process that reads and writes files."""
        return PartialState().is_main_process


# The weights of all processes


def copy_state(state: Any) -> Any:
    """A state_dict with copies of its tensors in the CPU's memory, no two of which share memory."""
    if isinstance(state, dict):
        return {key: copy_state(value) for key, value in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def change_together(drafter: Head, change: Callable[[Head], int], *, applies: bool) -> int:
    """Changes weights in some processes, among them the main one, and gives its weights to all. All call it.

    applies: whether `change` is called in this process. -> the result of `change`; 0 if nothing was changed
    """
    (result,) = broadcast_object_list([change(drafter) if applies else 0])
    if result:
        for parameter in drafter.parameters():
            parameter.data = broadcast(parameter.data)
        for buffer in drafter.buffers():
            buffer.copy_(broadcast(buffer))
    return result
