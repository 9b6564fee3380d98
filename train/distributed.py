"""The processes of a run: who speaks, how long they wait for one another, who reads what, and where the weights are.

whole   (DDP)     every process has all weights, gradients and moments of the optimizer
parts   (FSDP2)   every process keeps 1/n of each, as DTensors; a block is gathered for as long as it computes
"""

import contextlib
import copy
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from specdec.heads.base import Drafter, Head
from specdec.target.model import Target
from specdec.target.sharding import Share
from train.consistency import ConsistencyObjective
from train.objective import Loss, Objective

Item = TypeVar("Item")
AnyObjective = Objective | ConsistencyObjective
FSDP = "ACCELERATE_USE_FSDP"
# Variables by which accelerate's configuration asks for what train.py does not take from it, with the values that change nothing
OFF, ONCE = ("false", "", "0", "no", "off", "n", "f"), ("1", "")
OF_ACCELERATE = {
    FSDP: (OFF, "FSDP, which train.shard=true sets up here"),
    "ACCELERATE_USE_DEEPSPEED": (OFF, "DeepSpeed, whose place train.shard=true takes here"),
    "ACCELERATE_USE_MEGATRON_LM": (OFF, "Megatron-LM, which train.py does not use"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (OFF, "parallelism_config, whose place target.tp and train.shard take here"),
    "ACCELERATE_DYNAMO_BACKEND": (OFF, "torch.compile (dynamo), which training does not use"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (ONCE, "gradient accumulation, which train.accumulation sets here"),
}


# Who speaks


def is_main() -> bool:
    """Whether this is the process that speaks; before the accelerator is made, too."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """How many processes the launcher has started; before the accelerator is made, too."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Prints a line, once for all processes: `Accelerator.print` would print it on every machine."""
    if is_main():
        print(text)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, a warning is one line without the place in the code. UserWarnings come from the main process only, because all
    processes would repeat them. A RuntimeWarning concerns one process."""
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
    """minutes: how long a process waits for the others"""

    minutes: float
    process: int
    num_processes: int

    @contextlib.contextmanager
    def __call__(self, what: str, *, timed: bool = True) -> Iterator[None]:
        """Around work that needs the other processes. Raises ProcessLost, with `what`, if one of them ends.

        timed: whether `minutes` limit all of the work; if not, they limit each exchange in it
        If the others do not answer in time, the sentence is printed and this process ends. An exception would not help,
        because the call that waits, such as a GPU's, does not return.
        """
        if self.num_processes == 1:
            yield
            return
        timer = threading.Timer(60 * self.minutes, self._end, [what])
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
                f"Process {self.process} waited for {what}, and another process of the run has ended "
                f"({str(error).splitlines()[0].partition('. ')[0]})."
            ) from error
        finally:
            timer.cancel()

    def _end(self, what: str) -> None:
        sys.stderr.write(
            f"error: Process {self.process} has waited {self.minutes:g} minutes for {what}, and another process of the run "
            "does not answer. Raise train.timeout if that may take longer. Then continue with resume=true.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def compute_by_main(make: Callable[[], Item], what: str, *, minutes: float) -> Item:
    """The result of `make`, which the main process calls and the others get. They wait so many minutes for it."""
    state = PartialState()
    made = [make() if state.is_main_process else None]
    with Waiting(minutes, state.process_index, state.num_processes)(what):
        return broadcast_object_list(made)[0]


# Who reads what


@dataclass(frozen=True)
class Group:
    """The processes that read the same data with the same random numbers: the `number`-th of `num` groups.

    Processes that hold a target together by tensor parallelism always read the same. Where each keeps a part of a target's
    layers (FSDP2), each trains on its own data; all read the same where the target answers or decodes.
    """

    number: int
    num: int
    share: Share

    @classmethod
    def of(cls, accelerator: Accelerator, target: Target) -> "Group":
        """In training: the processes that a target is cut over by tensor parallelism; without it, each process alone."""
        return cls._of(accelerator, target.share if target.share.same else Share())

    @classmethod
    def in_step(cls, accelerator: Accelerator, target: Target) -> "Group":
        """Those that must call the target together, with the same texts where it decodes: all that hold it together."""
        return cls._of(accelerator, replace(target.share, same=True))

    @classmethod
    def _of(cls, accelerator: Accelerator, share: Share) -> "Group":
        return cls(accelerator.process_index // share.size, accelerator.num_processes // share.size, share)

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This group's part."""
        return items[self.number :: self.num]

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of all groups; those of a group are the same in all its processes."""
        return gather_object(results if self.share.first else [])


# Tensors that are whole, or in parts


def local(value: Tensor) -> Tensor:
    """This process's part of a tensor; a change of it changes the tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def gathered(value: Tensor) -> Tensor:
    """The whole tensor. All processes call this together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered_state(state: Any, *, keep: bool) -> Any:
    """A state_dict with whole tensors in the CPU's memory: copies, no two of which share memory.

    keep: whether this process needs them; if not, they are left out
    """
    if isinstance(state, dict):
        return {key: gathered_state(value, keep=keep) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return state
    whole = gathered(state.detach())
    return whole.to("cpu", copy=True) if keep else None


def in_parts(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every process has, in parts as those of `like`, or as it is if `like` is whole."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# Weights in parts


def make_plugin(shard: bool) -> FullyShardedDataParallelPlugin | None:
    """What makes accelerate shard. Every field is given, or accelerate would take it from the environment.

    Weights are gathered, and gradients summed, in their own type: mixed precision is autocast's, as without sharding.
    Raises ValueError for one process, or if accelerate's own configuration asks for what train.py does not take from it.
    """
    for variable, (harmless, what) in OF_ACCELERATE.items():
        given = os.environ.get(variable, harmless[0])
        if given.lower() not in harmless and not (shard and variable == FSDP):
            raise ValueError(
                f"accelerate's configuration asks for {what} ({variable}={given}): choose a configuration without it "
                "(accelerate config), or unset the variable."
            )
    if not shard:
        return None
    if num_processes() == 1:
        raise ValueError(
            "shard=true keeps a part of the drafter in each process, and there is one process: start several (accelerate "
            "launch --num_processes 8, or torchrun --nproc_per_node 8), or set shard=false."
        )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[],
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
        activation_checkpointing_offload=False,
        state_dict_type="FULL_STATE_DICT",
    )


def use_plugin(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Sets the plugin, which accelerate leaves aside on a CPU."""
    if plugin is not None:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


class Weights:
    """The weights of an objective, and its preparation by accelerate. All processes call each method together.

    prepared, optimizer: what trains; sharded: whether each process has a part of the weights
    """

    def __init__(self, accelerator: Accelerator, objective: AnyObjective, optimizer: torch.optim.Optimizer):
        self.accelerator, self.objective, self.drafter = accelerator, objective, objective.drafter
        self.sharded = accelerator.is_fsdp2
        # Gradients of each micro-batch, rather than of the step: those of shards would be whole until then
        self.sums_at_once = self.sharded or accelerator.num_processes == 1
        if self.sharded:
            self.twin = _twin(objective)
            _share_out(accelerator, objective)
        self.prepared, self.optimizer = accelerator.prepare(objective, optimizer)

    @contextlib.contextmanager
    def whole(self) -> Iterator[AnyObjective]:
        """Within, the objective with all of its weights in this process: of shards a copy, whose changes are lost."""
        if not self.sharded:
            yield self.objective
            return
        twin, state = self.twin, self.drafter.state_dict()
        try:
            twin.drafter.load_state_dict({name: gathered(value) for name, value in state.items()}, assign=True)
            yield twin.train(self.objective.training)
        finally:
            sizes = {name: value for name, value in state.items() if isinstance(value, DTensor)}
            empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in sizes.items()}
            twin.drafter.load_state_dict(empty, assign=True, strict=False)

    def frozen(self) -> Head:
        """A whole copy in the target's dtype, to decode with and to save."""
        with self.whole() as objective:
            return objective.drafter.decodable().to(dtype=self.drafter.target.dtype)

    def change(self, function: Callable[[Head], int], *, here: bool) -> int:
        """Sets weights as `function` does in the processes with `here`; the main one is among them, and the others get its
        weights. -> its result; 0: nothing was changed"""
        with self.whole() as objective:
            (result,) = broadcast_object_list([function(objective.drafter) if here else 0])
            if result:
                for parameter in objective.drafter.parameters():
                    parameter.data = broadcast(parameter.data)
                for buffer in objective.drafter.buffers():
                    buffer.copy_(broadcast(buffer))
                if self.sharded:
                    self.load(objective.drafter.state_dict())
        return result

    def load(self, weights: dict[str, Tensor]) -> None:
        """weights: whole ones, in every process"""
        own = self.drafter.state_dict()
        self.drafter.load_state_dict(
            {name: in_parts(value, own[name]) if name in own else value for name, value in weights.items()}
        )

    def load_optimizer(self, state: dict) -> None:
        """state: the optimizer's state_dict of one process, as `saved` gives it"""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parts = {
            number: {
                key: in_parts(value, parameters[number]) if isinstance(value, Tensor) and value.dim() else value
                for key, value in entry.items()
            }
            for number, entry in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": parts})

    def saved(self, average: dict[str, Tensor]) -> list[dict]:
        """The state_dicts of drafter, optimizer and average, as one process has them, in the CPU's memory; tensors only in the
        main process. average: the state_dict of the averaged weights, {} without one"""
        states = [self.drafter.state_dict(), self.optimizer.state_dict(), average]
        return [gathered_state(state, keep=self.accelerator.is_main_process) for state in states]


def _twin(objective: AnyObjective) -> AnyObjective:
    """A copy without weights: its parameters take no memory until they are given values."""
    shared = (objective.drafter._target, objective.drafter.goal_head)
    memo: dict[int, Any] = {id(each): each for each in shared}
    for parameter in objective.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(objective, memo)


def _share_out(accelerator: Accelerator, objective: AnyObjective) -> None:
    """Prepares `objective` for sharding: equal weights in all processes, as DDP sees to, and units.

    The objective is one unit: gathered for a whole micro-batch. Of a draft model each block is a unit too, which must be
    called equally often in all processes, or they would wait for each other.
    """
    for parameter in objective.parameters():
        parameter.data = broadcast(parameter.data)
    _register_loss()
    drafter = objective.drafter
    if isinstance(objective, Objective) and isinstance(drafter, Drafter) and drafter.attends == "text":
        objective.one_pass = True
        blocks = next(module for module in drafter.modules() if isinstance(module, nn.ModuleList))
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})


@functools.cache
def _register_loss() -> None:
    """Lets torch see the tensors in a Loss: the backward pass of shards begins with a hook on the outputs of `forward`."""
    torch.export.register_dataclass(Loss)
