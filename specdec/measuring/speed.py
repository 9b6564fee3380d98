"""How long a chain pays for an export."""

from specdec.measuring.report import Report
from specdec.target.structure import Experts, interpolate_cost


def predict_chain_speedups(report: Report) -> list[float]:
    """[K] predicted speedups of chains of 1, 2, .. drafts, up to the length that the report measured by decoding.

    Assumes that a step of drafting costs the same at every depth, and so does each draft in the target's pass, or in that
    of a mixture each further expert (experts.growth).
    """
    survival, stages = report.replayed_survival or report.survival, report.ms_per_round  # of replay: over more prompts
    assert survival is not None and stages is not None and report.baseline_tokens_per_second is not None
    depth, plain_ms = len(survival), 1e3 / report.baseline_tokens_per_second
    experts = None if report.experts is None else Experts(*report.experts)

    def predict_speedup(num: int) -> float:
        depth_share = num / depth
        verify_ms = plain_ms + interpolate_cost(experts, 1, 1 + num, 1 + depth) * (stages["verify"] - plain_ms)
        other_ms = sum(ms for stage, ms in stages.items() if stage not in ("draft", "verify"))
        return (1 + sum(survival[:num])) * plain_ms / (depth_share * stages["draft"] + verify_ms + other_ms)

    return [predict_speedup(num) for num in range(1, depth + 1)]


def choose_chain(report: Report) -> int:
    """The chain length with the highest of `predict_chain_speedups`."""
    speedups = predict_chain_speedups(report)
    return 1 + speedups.index(max(speedups))
