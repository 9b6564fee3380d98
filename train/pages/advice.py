"""What to try next, by rules over the figures of a run. Each rule looks at one thing and says what to change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.data.data_law import fit, points_of

LATE = 0.02  # survival at the last depth below which it is hardly ever reached
COVERED = 0.95  # share of the supervised tokens that can be drafted
FLAT = 0.01  # tau that a run gained in its last third
FALLEN = 0.03  # share of the loss that it lost there
MORE = 0.1  # tau that five times the tokens bring by the law of data
EPOCHS = 6.0
SLOW = 0.5  # time of drafting over the time of a pass of the target
UNLIKE = 0.35  # tau of training texts above that of held-out ones
WIDE = 0.3  # width of tau's interval
AVERAGE = 0.05  # tau of the average weights above that of the weights
SPREAD = 0.5  # tau of the best category above that of the worst
CLIPPED = 0.9


@dataclass(frozen=True)
class Figures:
    """What the rules look at. log: rows of log.jsonl; about: of about.json; each may lack figures"""

    report: dict[str, Any]
    log: list[dict[str, Any]]
    about: dict[str, Any]

    @property
    def tau(self) -> float | None:
        return self.report.get("replayed_tau") or self.report.get("tau")

    @property
    def survival(self) -> list[float]:
        return self.report.get("replayed_survival") or self.report.get("survival") or []

    @property
    def training(self) -> dict[str, Any]:
        return self.report.get("training") or {}

    def validations(self) -> list[tuple[int, float]]:
        """(step, tau)"""
        reports = [(row["step"], row["validation"]) for row in self.log if "validation" in row and not row.get("last")]
        taus = [(step, report.get("replayed_tau") or report.get("tau")) for step, report in reports]
        return [(step, tau) for step, tau in taus if tau]

    def logged(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row[name]) for row in self.log if isinstance(row.get(name), int | float)]


def depth_too_long(run: Figures) -> str | None:
    survival = run.survival
    if len(survival) < 2 or survival[-1] >= LATE:
        return None
    useful = max(1, sum(share >= LATE for share in survival))
    return (
        f"Draft fewer tokens: the last of {len(survival)} drafts is accepted in {100 * survival[-1]:.1f} % of the rounds. Try "
        f"decode.depth={useful}, or proposer=auto, which chooses the depth every round."
    )


def vocabulary_too_small(run: Figures) -> str | None:
    covered = run.about.get("data", {}).get("covered")
    if covered is None or covered >= COVERED:
        return None
    return (
        f"{100 * (1 - covered):.1f} % of the supervised tokens are not in the draft vocabulary and can never be drafted: try a larger "
        "head.vocab_size (each step then costs more)."
    )


def tau_is_flat(run: Figures) -> str | None:
    taus, losses = run.validations(), run.logged("loss")
    if len(taus) < 3 or len(losses) < 9:
        return None
    begin = taus[-1][0] * 2 / 3
    before = [tau for step, tau in taus if step <= begin]
    late = [loss for step, loss in losses if step > begin]
    if not before or len(late) < 6:
        return None
    third = len(late) // 3
    first, last = sum(late[:third]) / third, sum(late[-third:]) / third
    if first <= 0 or (first - last) / first < FALLEN or taus[-1][1] - max(before) >= FLAT:
        return None
    return (
        f"The loss still falls ({first:.2f} to {last:.2f} in the last third) but tau does not rise ({max(before):.2f} to "
        f"{taus[-1][1]:.2f}): the loss rewards what drafting does not need. Try another loss (head.objective.losses.lk=1), a deeper "
        "unroll (head.objective.depth), or training data that resemble the held-out prompts."
    )


def too_little_data(run: Figures) -> str | None:
    law, tokens = fit(points_of(run.log), depth=max(1, len(run.survival))), run.training.get("tokens")
    if law is None or not tokens:
        return None
    now, more = law.tau(tokens), law.tau(5 * tokens)
    if more - now < MORE:
        return None
    return (
        f"Train longer on more text: by the law of data of this run, five times the tokens give tau {more:.2f} instead of {now:.2f} "
        "(train.steps, scripts/answer.py for more answers)."
    )


def read_too_often(run: Figures) -> str | None:
    tokens, unique = run.training.get("tokens"), run.training.get("unique_tokens")
    if not tokens or not unique or tokens / unique < EPOCHS:
        return None
    return (
        f"Each token was read {tokens / unique:.1f} times: new answers bring more than further rounds through these "
        "(scripts/answer.py, or prompts=self for prompts of the target's own)."
    )


def drafting_too_slow(run: Figures) -> str | None:
    stages = run.report.get("ms_per_round") or {}
    draft, verify = stages.get("draft"), stages.get("verify")
    if not draft or not verify or draft / verify < SLOW:
        return None
    return (
        f"Drafting takes {draft:.1f} ms of a round and the target's pass {verify:.1f} ms: this target is small for such a drafter. Try "
        "a smaller draft vocabulary, a smaller head.drafter.intermediate_size, fewer drafts, or decode.compile=true."
    )


def data_unlike(run: Figures) -> str | None:
    texts = [tau for _, tau in run.logged("tau")][-10:]
    if not texts or run.tau is None or (mean := sum(texts) / len(texts)) - run.tau < UNLIKE:
        return None
    return (
        f"On training texts tau is {mean:.2f}, on held-out prompts {run.tau:.2f}: these are unlike each other, or the head knows its "
        "texts by heart. Train on prompts of the kind that will be asked, or on more of them."
    )


def too_few_prompts(run: Figures) -> str | None:
    interval = run.report.get("replayed_tau_ci") or run.report.get("tau_ci")
    if interval is None or interval[1] - interval[0] < WIDE:
        return None
    return (
        f"tau is known to {interval[0]:.2f} .. {interval[1]:.2f} only: validation.num_prompts more prompts cost a pass each, as they "
        "are replayed."
    )


def rate_too_high(run: Figures) -> str | None:
    ema = run.report.get("ema") or {}
    if not {"plain", "average"} <= set(ema) or ema["average"] - ema["plain"] < AVERAGE:
        return None
    return (
        f"The average of the weights is better than the weights (tau {ema['average']:.2f} against {ema['plain']:.2f}): the learning "
        "rate was still high at the end. Let it fall to zero (optimizer.schedule=cosine, or wsd), or lower it."
    )


def clipped_always(run: Figures) -> str | None:
    clipped = [share for _, share in run.logged("clipped")]
    if len(clipped) < 5 or sum(clipped) / len(clipped) < CLIPPED:
        return None
    return (
        f"{100 * sum(clipped) / len(clipped):.0f} % of the steps were clipped at train.max_grad_norm, so the learning rate alone sets "
        "the size of a step. That is no fault; train.batch or train.accumulation makes gradients less noisy."
    )


def unequal_categories(run: Figures) -> str | None:
    parts = {
        name: tau
        for name, part in (run.report.get("by_category") or {}).items()
        if (tau := part.get("replayed_tau") or part.get("tau"))
    }
    if len(parts) < 2:
        return None
    worst, best = min(parts, key=lambda name: parts[name]), max(parts, key=lambda name: parts[name])
    if parts[best] - parts[worst] < SPREAD:
        return None
    return (
        f"tau is {parts[worst]:.2f} for {worst} and {parts[best]:.2f} for {best}: if {worst} matters, add such prompts to the training "
        "data (weights by source: data.train={a: 2, b: 1})."
    )


def slower_than_plain(run: Figures) -> str | None:
    speedup, auto = run.report.get("speedup"), (run.report.get("auto") or {}).get("speedup")
    if speedup is None or speedup >= 1:
        return None
    beside = f", while proposer=auto is {auto:.2f} times as fast as plain decoding" if auto and auto > 1 else ""
    return (
        f"This fixed shape is slower than plain decoding ({speedup:.2f}){beside}: do not serve it as it is. scripts/tune.py shows what a "
        "round costs here and which shape pays."
    )


RULES: tuple[Callable[[Figures], str | None], ...] = (
    slower_than_plain,
    depth_too_long,
    drafting_too_slow,
    too_little_data,
    read_too_often,
    tau_is_flat,
    data_unlike,
    unequal_categories,
    vocabulary_too_small,
    rate_too_high,
    too_few_prompts,
    clipped_always,
)


def advice(run: Figures) -> list[str]:
    """What applies, the most important first."""
    return [said for rule in RULES if (said := rule(run)) is not None]
