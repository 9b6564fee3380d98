"""Copies from the CPU that nobody waits for."""

import math

import torch
from torch import Tensor


def move(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors of int64 from the CPU, as one; as they are if the device is the CPU."""
    if device.type == "cpu":
        return tensors
    flat = torch.cat([each.flatten() for each in tensors])
    parts = send(flat, device).split([math.prod(each.shape) for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors)]


def given(values: list, device: torch.device | str) -> Tensor:
    """torch.tensor(values, device=device), but the host does not wait."""
    return send(torch.tensor(values), torch.device(device))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """One tensor; from page-locked memory where the device is a GPU, because other memory is copied while the host waits"""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
