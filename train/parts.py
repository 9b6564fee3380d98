"""Tensors that several processes keep in parts (DTensors), and the same for whole ones."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(value: Tensor) -> Tensor:
    """This process's part of a tensor; a change of it changes the tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def gathered(value: Tensor) -> Tensor:
    """The whole tensor. All processes call this together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered_state(state: Any, *, keep: bool) -> Any:
    """A state_dict with whole tensors in the CPU's memory, copies that training does not change and no two of which share
    memory. keep: whether this process needs them; if not, they are left out"""
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
