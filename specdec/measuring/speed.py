"""How long a chain pays for an export, and the limit of plain decoding."""

import time

import torch

from specdec.measuring.report import Report
from specdec.target.model import Target
from specdec.target.structure import Experts, experts_of, share_of_growth

MOST_READ = 2**30  # bytes


def chain_speedups(report: Report) -> list[float]:
    """[K] predicted speedups of chains of 1, 2, .. drafts, up to the length that the report measured by decoding.

    Assumes that a step of drafting costs the same at every depth, and so does each draft in the target's pass, or in that
    of a mixture each further expert (experts.growth).
    """
    survival, stages = report.replayed_survival or report.survival, report.ms_per_round  # of replay: over more prompts
    assert survival is not None and stages is not None and report.baseline_tokens_per_second is not None
    depth, plain = len(survival), 1e3 / report.baseline_tokens_per_second
    experts = None if report.experts is None else Experts(*report.experts)

    def speedup(num: int) -> float:
        share = num / depth
        verify = plain + share_of_growth(experts, 1, 1 + num, 1 + depth) * (stages["verify"] - plain)
        rest = sum(spent for stage, spent in stages.items() if stage not in ("draft", "verify"))
        return (1 + sum(survival[:num])) * plain / (share * stages["draft"] + verify + rest)

    return [speedup(num) for num in range(1, depth + 1)]


def best_chain(report: Report) -> int:
    """The chain length with the highest of `chain_speedups`."""
    speedups = chain_speedups(report)
    return 1 + speedups.index(max(speedups))


# The limit of plain decoding


def bytes_per_token(target: Target) -> int:
    """Bytes of weights that the pass of one token reads: of an embedding apart from the LM head one row, which is left out,
    and of a mixture the experts that a token uses. A multimodal model's other parts are not read."""
    experts = experts_of(target.config.to_dict())
    used = 1.0 if experts is None else experts.per_token / experts.num
    weights = {id(target.lm_head.weight): float(target.lm_head.weight.nbytes)}
    for name, value in [*target.decoder.named_parameters(), *target.decoder.named_buffers()]:
        if value is not target.embed.weight:
            weights[id(value)] = value.nbytes * (used if "experts" in name.split(".") else 1.0)
    return round(sum(weights.values()))


def memory_bandwidth(num_bytes: int, device: torch.device, *, repeats: int = 15) -> float:
    """Bytes/s at which the device reads `num_bytes`, at most MOST_READ, from memory (a sum of float32); the best of `repeats`."""
    values = torch.ones(min(num_bytes, MOST_READ) // 4, device=device)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        float(values.sum())  # waits for the device
        best = max(best, values.nbytes / (time.perf_counter() - start))
    return best
