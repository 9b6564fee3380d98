"""The weights of a drafter that is trained by several processes: whole in each of them, or in parts (FSDP2).

whole   (DDP)     every process has all weights, gradients and moments of the optimizer
parts   (FSDP2)   every process keeps 1/n of each, as DTensors; a block is gathered for as long as it computes
"""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from specdec.heads.base import Drafter, Head
from train.consistency import ConsistencyObjective
from train.objective import Loss, Objective
from train.optimization import Average
from train.parts import gathered, gathered_state, in_parts

AnyObjective = Objective | ConsistencyObjective
FSDP = "ACCELERATE_USE_FSDP"
# What accelerate takes from its configuration and train.py does not: variables, which its launcher sets, values that change nothing,
# and what other ones ask for
OFF, ONCE = ("false", "", "0", "no", "off", "n", "f"), ("1", "")
OF_ACCELERATE = {
    FSDP: (OFF, "FSDP, which train.shard=true sets up here"),
    "ACCELERATE_USE_DEEPSPEED": (OFF, "DeepSpeed, whose place train.shard=true takes here"),
    "ACCELERATE_USE_MEGATRON_LM": (OFF, "Megatron-LM, which train.py does not use"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (OFF, "parallelism_config, whose place target.tp and train.shard take here"),
    "ACCELERATE_DYNAMO_BACKEND": (OFF, "torch.compile (dynamo), which training does not use"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (ONCE, "gradient accumulation, which train.accumulation sets here"),
}
OPTIMIZER = "adamw"  # computes every number of a weight from that number's gradient alone, so it works on parts


def plugin(shard: bool) -> FullyShardedDataParallelPlugin | None:
    """What makes accelerate shard. Every field is given, or accelerate would take it from the environment.

    Weights are gathered, and gradients summed, in their own type: mixed precision is autocast's, as without sharding.
    Raises ValueError if there is one process only, or if accelerate's own configuration asks for what train.py does not take from it.
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
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
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


def start(accelerator: Accelerator, chosen: FullyShardedDataParallelPlugin | None) -> None:
    """On a CPU accelerate leaves the plugin aside, so it is set here."""
    if chosen is None:
        return
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = chosen


def check(drafter: Head, *, optimizer: str, on_policy: float) -> None:
    """Raises ValueError for what cannot be trained in parts."""
    if drafter.adapts_target:
        raise ValueError(
            f"shard=true: {type(drafter).__name__} trains an adapter inside the target, which is whole in every process: set "
            "shard=false."
        )
    if optimizer != OPTIMIZER:
        raise ValueError(
            f"shard=true: optimizer.name={optimizer} needs whole matrices, and each process has a part of them: use "
            f"optimizer.name={OPTIMIZER}, or set shard=false."
        )
    if on_policy:
        raise ValueError(
            f"shard=true: data.on_policy={on_policy} lets every process write with the whole draft model at every step: set "
            "data.on_policy=0 or shard=false."
        )


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

    def saved(self, average: Average | None) -> list[dict]:
        """The state_dicts of drafter, optimizer and average, as one process has them, in the CPU's memory; tensors only in the main
        process."""
        states = [self.drafter.state_dict(), self.optimizer.state_dict(), average.state_dict() if average else {}]
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
