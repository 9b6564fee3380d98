"""The speed of a setting from its parts: tokens a round, and seconds of a round (docs/methods.md, section 8).

predicted speedup = tau * seconds of a plain round / seconds of a drafted round

A round of plain decoding emits one token. `stages` are seconds by decode.STAGES, as in Generation.
"""

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec import replay
from specdec.decode import Decoder
from specdec.experts import Experts, experts_of, share_of_growth
from specdec.generation import STAGES, Generation
from specdec.proposers.heads import HeadProposer
from specdec.proposers.stopping import Stopping
from specdec.report import Report
from specdec.target import Target

RIDGE = 1.0  # of the fit: one over the variance of a normal prior around Stopping(), the drafter's own probabilities
MOST_READ = 2**30  # bytes
THRESHOLDS = [num / 50 for num in range(50)]


@dataclass(frozen=True)
class TimedRound:
    """One round of one answer."""

    stages: dict[str, float]
    num_drafted: int  # nodes beside the root
    accepted: int
    evidence: list[list[float]]  # [D][2], see Stopping; empty if the proposer records none


@dataclass(frozen=True)
class TimedAnswer:
    generation: Generation
    rounds: list[TimedRound]


def decode(decoder: Decoder, prompt: list[int], max_new_tokens: int, generator: torch.Generator) -> TimedAnswer:
    """One answer, its rounds timed one by one."""
    result, proposer = Generation([[]], [[]]), decoder.proposer
    rounds: list[TimedRound] = []
    before = result.stages
    for emitted in decoder.stream([prompt], max_new_tokens, generator=generator, result=result):
        result.tokens[0] += emitted.tokens[0]
        if len(result.drafted) > len(rounds):  # false for the prompt's own pass, which is no round
            stages = {name: result.stages[name] - before[name] for name in STAGES}
            evidence = proposer.evidence if isinstance(proposer, HeadProposer) else []
            values = torch.cat(evidence).tolist() if evidence else []
            rounds.append(TimedRound(stages, result.drafted[-1], emitted.accepted[0], values))
        before = dict(result.stages)
    return TimedAnswer(result, rounds)


def decoded_tau(answers: list[TimedAnswer]) -> float:
    return 1 + statistics.fmean(timed.accepted for answer in answers for timed in answer.rounds)


def replayed_tau(chances: list[Tensor], depth: int) -> float:
    """tau of chains of `depth`. chances: for each answer, [K, n] as replay.rounds takes them, K >= depth"""
    replays = [replay.rounds(each[:depth]) for each in chances]
    return 1 + sum(float(accepted.sum()) for _, accepted in replays) / sum(rounds for rounds, _ in replays)


def median_stages(answers: list[TimedAnswer]) -> dict[str, float]:
    """Stages of a round, averaged over rounds, each of which counts with a median.

    The median is that of the rounds of the same answer with as many drafts. So a disturbance of the machine does not
    count, but longer answers and longer chains do.
    """
    groups: dict[tuple[int, int], list[TimedRound]] = {}
    for number, answer in enumerate(answers):
        for timed in answer.rounds:
            groups.setdefault((number, timed.num_drafted), []).append(timed)
    num = sum(map(len, groups.values()))

    def mean(stage: str) -> float:
        medians = [(len(group), statistics.median(timed.stages[stage] for timed in group)) for group in groups.values()]
        return sum(size * seconds for size, seconds in medians) / num

    return {stage: mean(stage) for stage in STAGES}


def predict(tau: float, stages: dict[str, float], plain: dict[str, float]) -> float:
    """Speedup over plain decoding."""
    return tau * sum(plain.values()) / sum(stages.values())


def best_chain(report: Report) -> int:
    """The chain length with the highest predicted speedup, up to the length that the report measured by decoding.

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

    return max(range(1, depth + 1), key=speedup)


def explain(name: str, tau: float, stages: dict[str, float], plain: dict[str, float]) -> str:
    """One line: the parts of a round and the predicted speedup."""
    draft, verify, *rest = (1e3 * stages[stage] for stage in STAGES)
    return (
        f"{name}: {tau:.2f} tokens a round; {draft:.1f} ms draft + {verify:.1f} verify + {sum(rest):.1f} rest = "
        f"{draft + verify + sum(rest):.1f} ms against {1e3 * sum(plain.values()):.1f} ms plain: predicted "
        f"{predict(tau, stages, plain):.2f}"
    )


@dataclass(frozen=True)
class ChainCosts:
    """Seconds of a round by the number of drafts in a chain that may stop, 0 .. D of them.

    A chain that stops below its limit has taken one step more than it has drafts: the one whose evidence stopped it.
    """

    draft: list[float]  # [1 + D]
    verify: list[float]  # [1 + D]
    rest: float

    def round(self, num_drafts: int, limit: int) -> float:
        return self.draft[min(num_drafts + 1, limit)] + self.verify[num_drafts] + self.rest


def interpolate(known: dict[int, float], num: int, experts: Experts | None = None) -> list[float]:
    """Values at 0 .. num drafts; `known` has 0 and num. Between the known ones they grow as the costs of passes do.

    experts: of the target, if the values are of its passes, which also read the root
    """
    values = []
    for place in range(num + 1):
        low, high = max(n for n in known if n <= place), min(n for n in known if n >= place)
        share = share_of_growth(experts, 1 + low, 1 + place, 1 + high)
        values.append(known[low] + share * (known[high] - known[low]))
    return values


def chain_costs(
    plain: dict[str, float],
    chains: dict[int, dict[str, float]],
    recording: dict[str, float],
    depth: int,
    experts: Experts | None = None,
) -> ChainCosts:
    """plain: stages of plain decoding; chains: of chains by their length, that of `depth` among them; recording: of the
    chain of `depth` that also records the evidence for Stopping at every step; experts: of the target"""
    draft = interpolate({0: plain["draft"], **{n: stages["draft"] for n, stages in chains.items()}}, depth)
    verify = interpolate({0: plain["verify"], **{n: stages["verify"] for n, stages in chains.items()}}, depth, experts)
    evidence = max(0.0, recording["draft"] - draft[depth]) / depth  # seconds a step
    draft = [seconds + n * evidence for n, seconds in enumerate(draft)]
    return ChainCosts(draft, verify, recording["keep"] + recording["other"])


def complete_rounds(answers: list[TimedAnswer]) -> list[TimedRound]:
    """All rounds but the last of each answer, whose drafts may have been cut off rather than refused."""
    return [timed for answer in answers for timed in answer.rounds[:-1]]


def fit_stopping(rounds: list[TimedRound]) -> Stopping:
    """Logistic regression of "this draft is accepted" on its evidence, over drafts whose predecessors were all accepted.

    Where the drafter has no confidence head, that part of the evidence is 0 and its weight stays 0.
    """
    cases = [(timed, d) for timed in rounds for d in range(min(timed.accepted + 1, len(timed.evidence)))]
    evidence = torch.tensor([timed.evidence[d] for timed, d in cases], dtype=torch.float64)  # [M, 2]
    accepted = torch.tensor([d < timed.accepted for timed, d in cases], dtype=torch.float64)  # [M]
    inputs = torch.cat([evidence, torch.ones(len(evidence), 1, dtype=torch.float64)], dim=1)  # [M, 3]
    prior = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # weight, confidence_weight, bias
    fitted = prior.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([fitted], max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        misfit = F.binary_cross_entropy_with_logits(inputs @ fitted, accepted, reduction="sum")
        total = misfit + RIDGE / 2 * (fitted - prior).square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    weight, confidence_weight, bias = fitted.tolist()
    return Stopping(weight=weight, bias=bias, confidence_weight=confidence_weight)


def seconds_per_token(
    survival: list[list[float]], accepted: list[int], costs: ChainCosts, *, depth: int, threshold: float
) -> float:
    """What a token would have taken if recorded rounds had been chains of `depth` that stop below `threshold`.

    survival: [R][D] estimated for each draft of the full chains; accepted: [R] drafts of these chains
    """
    num_drafts = [sum(chance >= threshold for chance in row[:depth]) for row in survival]
    num_tokens = len(num_drafts) + sum(map(min, accepted, num_drafts))
    return sum(costs.round(num, depth) for num in num_drafts) / num_tokens


def plan_stopping(rounds: list[TimedRound], stopping: Stopping, costs: ChainCosts) -> tuple[int, Stopping]:
    """The depth and the threshold at which chains that stop would have been fastest over recorded rounds of full chains.

    All pairs are tried. In theory a draft is worth its costs if its chance to survive, times the time that a token takes,
    is more than what it adds to the round. But what it adds depends on where the chain ends: the step of the last draft
    is already paid for when its evidence is known. A threshold of 0 means that stopping does not pay.
    """
    evidence = torch.tensor([timed.evidence for timed in rounds])  # [R, D, 2]
    survival = stopping.log_chance(evidence.flatten(0, 1)).view(len(rounds), -1).cumsum(1).exp().tolist()  # [R][D]
    accepted = [timed.accepted for timed in rounds]
    _, threshold, depth = min(
        (seconds_per_token(survival, accepted, costs, depth=depth, threshold=threshold), threshold, depth)
        for depth in range(1, len(costs.verify))
        for threshold in THRESHOLDS
    )
    return depth, replace(stopping, threshold=threshold)


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
