"""Optimizers, schedules of the learning rate, the average of the weights, and the norms of gradients."""

import contextlib
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from specdec.core import precision
from specdec.target.model import DTYPES
from train.settings.options import OptimizerOptions

ADAMW8BIT = "bitsandbytes"
AVERAGE_PREFIX = "average:"  # prefix of the names of averaged weights in a saved state
# Parameters whose rows are tokens or single figures: AdamW suits them better than Muon, as it does embeddings
OUTPUT_LAYERS = ("lm_head", "lm_heads", "after", "confidence_head")


SCHEDULE_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    # Share of lr by schedule: a function of progress (0 after the warm-up, 1 after the last step), final and decay
    "cosine": lambda progress, final, decay: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": lambda progress, final, decay: 1 - (1 - final) * max(0.0, progress - (1 - decay)) / decay,  # 2404.06395
    "linear": lambda progress, final, decay: 1 - (1 - final) * progress,
    "constant": lambda progress, final, decay: 1.0,
}


def make_schedule(
    optimizer: torch.optim.Optimizer, settings: OptimizerOptions, *, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule with a linear warm-up, then the shape that `settings` name.

    The rate of a parameter group with a `delay` is 0 for that many steps. Then its warm-up begins.
    """
    warmup = settings.warmup_steps(steps)

    def factor(step: int, delay: int) -> float:
        start = warmup + delay
        if step < start:
            return max(0, step - delay + 1) / (warmup + 1)
        progress = min(1.0, (step - start) / max(1, steps - start))
        return SCHEDULE_SHAPES[settings.schedule](progress, settings.final, settings.decay)

    delays = [group.get("delay", 0) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [functools.partial(factor, delay=delay) for delay in delays])


# Optimizers


def make_parameter_groups(module: nn.Module, weight_decay: float, *, adapter: dict | None) -> list[dict]:
    """Groups of the trained parameters. Matrices decay, norms do not. adapter: lr and delay of the target's adapter"""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    head_parameters = [p for name, p in trained.items() if not name.startswith("adapter.")]
    groups = [
        {"params": [p for p in head_parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in head_parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if adapter is not None:
        adapter_parameters = [p for name, p in trained.items() if name.startswith("adapter.")]
        groups.append({"params": adapter_parameters, "weight_decay": 0.0, **adapter})
    return groups


def list_hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The weights that Muon trains: those of linear layers that are no output layers."""
    matrices: list[nn.Parameter] = []
    for name, layer in module.named_modules():
        output = any(part in OUTPUT_LAYERS for part in name.split("."))
        if isinstance(layer, nn.Linear | nn.GRUCell | nn.MultiheadAttention) and not output:
            matrices += [each for each in layer.parameters(recurse=False) if each.dim() == 2 and each.requires_grad]
    return list(dict.fromkeys(matrices))  # a shared one once


NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of each step (Jordan, Muon, 2024)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(update: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrix [m, n] with orthogonal rows or columns, approximately. dtype: dtype of the products"""
    x = update.to(dtype)
    x = x.T if update.shape[0] > update.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    first, second, third = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return x.T if update.shape[0] > update.shape[1] else x


def count_operations(matrix: Tensor) -> float:
    """Floating-point operations of `orthogonalise` for a matrix [m, n]"""
    low, high = sorted(matrix.shape)
    return NEWTON_SCHULZ_STEPS * (4.0 * low * low * high + 2.0 * low**3)


def divide_matrices(matrices: Sequence[Tensor], num_processes: int) -> tuple[list[list[int]], list[float]]:
    """The numbers of the matrices that each process orthogonalises, and its floating-point operations.

    The dearest matrix goes first, to the process with the least work so far. No matrix is divided.
    """
    shares: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0.0] * num_processes
    costs = [count_operations(matrix) for matrix in matrices]
    for number in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        process = loads.index(min(loads))
        shares[process].append(number)
        loads[process] += costs[number]
    return shares, loads


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum, as torch.optim.Muon with match_rms_adamw, but in what the device computes in.

    That one takes bfloat16 everywhere: 77 times as long on a CPU without units for it (results/47-right-by-default.md).
    Several processes must have equal gradients (DDP). Each orthogonalises its share of whole matrices and sends the
    results to the others, so an update is that of one process. All have all of the momentum.
    """

    MOMENTUM = 0.95

    def __init__(self, groups: list[dict], *, lr: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                state["momentum_buffer"].lerp_(weight.grad, 1 - self.MOMENTUM)
            updates: Iterable[Tensor] = map(self._compute_update, weights)
            if num_processes > 1:
                updates = self._exchange_updates(weights, num_processes)
            for weight, update in zip(weights, updates):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                # As large as AdamW's updates (2502.16982, section 2.2)
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))

    def _compute_update(self, weight: Tensor, num_processes: int = 1) -> Tensor:
        assert weight.grad is not None
        update = weight.grad.lerp(self.state[weight]["momentum_buffer"], self.MOMENTUM)
        return orthogonalise(update, find_compute_dtype(weight.device, num_processes))

    def _exchange_updates(self, weights: list[Tensor], num_processes: int) -> list[Tensor]:
        """The updates of all weights, from all processes. A matrix travels while the next one is computed."""
        updates, transfers = list(weights), []
        for numbers in itertools.zip_longest(*divide_matrices(weights, num_processes)[0]):
            for process, number in enumerate(numbers):
                if number is not None:
                    updates[number] = self._compute_or_allocate(weights[number], process, num_processes)
                    transfers.append(dist.broadcast(updates[number], process, async_op=True))
        for transfer in transfers:
            transfer.wait()
        return updates

    def _compute_or_allocate(self, weight: Tensor, process: int, num_processes: int) -> Tensor:
        """The update of a weight of `process`, or memory for it in the others."""
        dtype = find_compute_dtype(weight.device, num_processes)  # all ask at the same moment
        if process == dist.get_rank():
            return self._compute_update(weight, num_processes).contiguous()
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)


@functools.cache
def find_compute_dtype(device: torch.device, num_processes: int = 1) -> torch.dtype:
    """The dtype of products on a device; for several processes, whose devices may differ, that of the first one"""
    dtype = DTYPES[precision.choose_dtype(device).dtype]
    if num_processes > 1:
        dtypes = list(DTYPES.values())
        number = torch.tensor(dtypes.index(dtype), device=device)
        dist.broadcast(number, 0)
        return dtypes[int(number)]
    return dtype


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer with one state.

    Muon's updates are scaled to the size of AdamW's (2502.16982), so learning rates mean the same for both.
    matrices, remaining: parameter groups
    """

    def __init__(self, matrices: list[dict], remaining: list[dict], *, lr: float, betas: tuple[float, float]):
        parts = (
            Muon(matrices, lr=lr),
            torch.optim.AdamW(remaining, lr=lr, betas=betas, fused=True),
        )
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.optimizers = parts
        self._share()

    def _share(self) -> None:
        """Gives both optimizers this one's groups and state, which the schedule and the checkpoints see."""
        muon, adamw = self.optimizers
        muon.param_groups = self.param_groups[: len(muon.param_groups)]
        adamw.param_groups = self.param_groups[len(muon.param_groups) :]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for part in self.optimizers:
            part.step()


def make_optimizer(
    module: nn.Module, settings: OptimizerOptions, *, adapter: dict | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `settings` name. adapter: lr and delay of the target's adapter

    Raises ValueError if the optimizer's library is not installed, or the head has nothing that it trains.
    """
    groups = make_parameter_groups(module, settings.weight_decay, adapter=adapter)
    first, second = settings.betas
    shared_options: dict[str, Any] = {"lr": settings.lr, "betas": (first, second)}
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **shared_options)
    if settings.name == "adamw8bit":  # moments in blocks of 8 bits (2110.02861)
        try:
            library = importlib.import_module(ADAMW8BIT)
        except ImportError as error:
            raise ValueError(f"name=adamw8bit needs {ADAMW8BIT} ({error}): pip install {ADAMW8BIT}.") from error
        return library.optim.AdamW8bit(groups, **shared_options)
    matrices = list_hidden_matrices(module)
    if not matrices:
        raise ValueError("name=muon trains matrices, and this head has none: use name=adamw.")
    matrix_ids = {id(matrix) for matrix in matrices}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in matrix_ids]
    muon = {"params": matrices, "weight_decay": settings.weight_decay, "lr": settings.muon_lr or settings.lr}
    return MuonWithAdamW([muon], groups, **shared_options)


# What is kept beside the weights


class WeightAverage:
    """The exponential moving average of the trained weights, in float32 or their own wider type.

    After t updates the share of the old average is min(decay, (1 + t) / (10 + t)), so the random start is forgotten.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the average to the weights as they are."""
        for name, weight in self.weights.items():
            self.values[name].copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights to the average, after a step of the optimizer."""
        self.updates += 1
        old_share = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_([*self.values.values()], [*self.weights.values()], 1 - old_share)

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Within, the module has the averaged weights."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        for name, weight in self.weights.items():
            before = weight.detach().clone()
            weight.copy_(self.values[name])
            self.values[name] = before

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.values, "updates": torch.tensor(self.updates)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the average of `state_dict`."""
        self.updates = int(state["updates"])
        for name, value in self.values.items():
            value.copy_(state[name])


def read_norms(norms: list[Tensor], limit: float) -> dict[str, float]:
    """The mean norm of gradients, and the share of steps that were clipped; {} without norms. Empties the list."""
    if not norms:
        return {}
    values = torch.stack(norms)  # [steps]
    norms.clear()
    mean, clipped = torch.stack([values.mean(), (values > limit).float().mean()]).tolist()
    return {"grad_norm": mean, "clipped": clipped}


def pop_prefixed(values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes the values whose names begin with `prefix`. -> these values, by name without the prefix"""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values.pop(name) for name in names}
