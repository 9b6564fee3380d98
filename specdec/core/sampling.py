"""From logits to the distribution of the next token, in the order of transformers' generate.

A repetition penalty comes first, then temperature, top-k and top-p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.core.devices import upload_tensor, upload_values
from specdec.core.nucleus import keep_nucleus
from specdec.core.tree import Tree

# By increasing cost: the likeliest token, a softmax, a softmax with filters or a penalty
SamplingKind = Literal["greedy", "sampled", "cut"]
Randomness = torch.Generator | None | Sequence[torch.Generator | None]  # of all rows, or of each row

MIN_PLAIN_TEMPERATURE = 1e-3  # below it, differences from the largest logit are divided, which cannot overflow
MIN_TEMPERATURE = 1e-30  # below it, where float32 cannot divide, a distribution is greedy
NO_TOKEN = -1  # in place of a token if the logits are not finite, or all are -inf


@dataclass(frozen=True)
class Sampling:
    """The settings of the distribution. Temperature 0 is greedy, and so is one below MIN_TEMPERATURE.

    With a greedy temperature, only the penalty has an effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or above.")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null to keep all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or null to keep all tokens.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is no penalty.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1

    @property
    def kind(self) -> SamplingKind:
        if self != Sampling(temperature=self.temperature):
            return "cut"
        return "greedy" if self.greedy else "sampled"

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """logits [B, N, V], seen [B, N, V] bool -> [B, N, V]; a penalty above 1 makes seen tokens less likely"""
        logits = widen_logits(logits)
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def distribution(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> probabilities at temperature > 0, in float32 (float64 for logits in float64).

        Top-k keeps all logits that equal the k-th. Of equal logits at the boundary, top-p keeps those of the highest
        token ids. (transformers keeps those that an unstable sort puts last, which differ by processor.)
        """
        logits = widen_logits(logits)
        if self.temperature < MIN_PLAIN_TEMPERATURE:
            logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / self.temperature
        if self.top_k is not None:
            threshold = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]  # [..., 1]
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        if self.top_p is not None and self.top_p < 1:  # 1 would drop only tokens of probability 0
            logits = keep_nucleus(logits.reshape(-1, logits.shape[-1]), self.top_p).view(logits.shape)
        return logits.softmax(-1)


@dataclass(frozen=True)
class RowSampling:
    """Settings of each row of a batch, used like one `Sampling`. Rows [B] are the first dimension of tensors."""

    samplings: tuple[Sampling, ...]

    @property
    def greedy(self) -> bool:
        return all(row.greedy for row in self.samplings)

    @property
    def penalises(self) -> bool:
        return any(row.penalises for row in self.samplings)

    @property
    def kind(self) -> SamplingKind:
        return self.costliest.kind

    @property
    def costliest(self) -> Sampling:
        """A setting of the rows whose distribution takes as long as those of all"""
        order: tuple[SamplingKind, ...] = ("greedy", "sampled", "cut")
        return max(self.samplings, key=lambda row: order.index(row.kind))

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """`Sampling.penalise` of each row"""
        logits = widen_logits(logits).clone()
        for sampling, rows in self._groups(logits.device):
            if sampling.penalises:
                logits[rows] = sampling.penalise(logits[rows], seen[rows])
        return logits

    def distribution(self, logits: Tensor) -> Tensor:
        """`Sampling.distribution` of each row.

        A greedy row gives its most likely token probability 1, if there is one.
        """
        distributions = torch.zeros_like(widen_logits(logits))
        for sampling, rows in self._groups(logits.device):
            if sampling.greedy:
                largest, best = logits[rows].max(-1, keepdim=True)
                distributions[rows] = torch.zeros_like(distributions[rows]).scatter_(
                    -1, best, largest.isfinite().to(distributions.dtype)
                )
            else:
                distributions[rows] = sampling.distribution(logits[rows])
        return distributions

    def _groups(self, device: torch.device) -> list[tuple[Sampling, Tensor]]:
        """Each setting, and the numbers of its rows"""
        rows_by_sampling: dict[Sampling, list[int]] = {}
        for row, sampling in enumerate(self.samplings):
            rows_by_sampling.setdefault(sampling, []).append(row)
        return [(sampling, upload_values(rows, device)) for sampling, rows in rows_by_sampling.items()]


AnySampling = Sampling | RowSampling


def join_samplings(rows: Sequence[Sampling]) -> AnySampling:
    """The settings of all rows, as one if they are equal"""
    return rows[0] if len(set(rows)) == 1 else RowSampling(tuple(rows))


def pick_tokens(distribution: Tensor, uniform: Tensor) -> Tensor:
    """distribution [B, V], uniform [B, 1] in float64 from [0, 1) -> [B], one token a row with these probabilities.

    A distribution with NaN gives any token in range, so that no table is read outside of its bounds.
    """
    reached = distribution.cumsum(-1, dtype=torch.float64)  # [B, V]; float32 would round away rare tokens
    index = torch.searchsorted(reached, uniform * reached[:, -1:], right=True)[:, 0]
    return index.clamp_(max=distribution.shape[-1] - 1)


def draw_column(num: int, source: Randomness, device) -> Tensor:
    """[num, 1] random numbers from [0, 1) in float64, for `pick_tokens`"""
    return draw_uniform(num, source, device, torch.float64)[:, None]


def draw_uniform(num: int, source: Randomness, device, dtype: torch.dtype, row_mask: Tensor | None = None) -> Tensor:
    """[num] random numbers from [0, 1), of each row by its own generator if the source has several.

    row_mask [num] bool, on the CPU: rows that need a number. So a row's draws do not depend on other rows.
    """
    if not isinstance(source, Sequence):
        return torch.rand(num, generator=source, device=device, dtype=dtype)
    needs_draw = [True] * num if row_mask is None else row_mask.tolist()
    places = [device if generator is None else generator.device for generator in source]
    drawn = [
        torch.rand(1, generator=generator, device=place, dtype=dtype) if needs else torch.zeros(1, dtype=dtype)
        for generator, place, needs in zip(source, places, needs_draw)
    ]

    def upload_draws(values: Tensor) -> Tensor:
        return upload_tensor(values, torch.device(device)) if values.device.type == "cpu" else values.to(device)

    together = len({value.device for value in drawn}) == 1
    return upload_draws(torch.cat(drawn)) if together else torch.cat([upload_draws(value) for value in drawn])


def widen_logits(logits: Tensor) -> Tensor:
    """The logits in float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mark_seen(tree: Tree, committed: Tensor) -> Tensor:
    """The tokens before each node: [B, N, V] bool, committed ones, and those on the path from the root to the node.

    committed [B, V] bool: tokens of the prompt and of the answer so far
    """
    own = tree.tokens[:, :, None]  # [B, N, 1] in place of nodes that are no ancestors
    tokens = torch.where(tree.ancestors(), tree.tokens[:, None], own)  # [B, N, N]
    return committed[:, None].repeat(1, tokens.shape[1], 1).scatter_(2, tokens, True)
