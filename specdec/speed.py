"""The speed of a setting from its parts: tokens a round, and what a round takes (methods, sections 2 and 10).

predicted speedup = tau * plain round / drafted round

A round of plain decoding emits one token. `stages` are seconds by decode.STAGES, as in Generation.
"""

import statistics
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec import replay
from specdec.decode import STAGES, Decoder, Generation
from specdec.proposers.heads import HeadProposer
from specdec.proposers.stopping import Stopping
from specdec.report import Report

RIDGE = 1.0  # of the fit: one over the variance of a normal prior around Stopping(), which believes the drafter
THRESHOLDS = [num / 50 for num in range(50)]


@dataclass(frozen=True)
class Timed:
    """One round of one answer."""

    stages: dict[str, float]
    num_drafted: int  # nodes beside the root
    accepted: int
    evidence: list[list[float]]  # [D][2], see Stopping; nothing if the proposer has none


@dataclass(frozen=True)
class Answer:
    generation: Generation
    rounds: list[Timed]


def decode(decoder: Decoder, prompt: list[int], max_new_tokens: int, generator: torch.Generator) -> Answer:
    """One answer, its rounds timed one by one."""
    result, proposer = Generation([[]], [[]]), decoder.proposer
    rounds: list[Timed] = []
    before = result.stages
    for emitted in decoder.stream([prompt], max_new_tokens, generator=generator, result=result):
        result.tokens[0] += emitted.tokens[0]
        if len(result.drafted) > len(rounds):  # not so when the prompt was read
            stages = {name: result.stages[name] - before[name] for name in STAGES}
            evidence = proposer.evidence if isinstance(proposer, HeadProposer) else []
            found = torch.cat(evidence).tolist() if evidence else []
            rounds.append(Timed(stages, result.drafted[-1], emitted.accepted[0], found))
        before = dict(result.stages)
    return Answer(result, rounds)


def decoded_tau(answers: list[Answer]) -> float:
    return 1 + statistics.fmean(timed.accepted for answer in answers for timed in answer.rounds)


def replayed_tau(accepts: list[Tensor], depth: int) -> float:
    """accepts: [K, n] as in replay.rounds, an answer each, K >= depth -> tau of chains of `depth`"""
    found = [replay.rounds(accept[:depth]) for accept in accepts]
    return 1 + sum(float(accepted.sum()) for _, accepted in found) / sum(rounds for rounds, _ in found)


def median_stages(answers: list[Answer]) -> dict[str, float]:
    """Stages of a round. Rounds of one answer with equally many drafts count with their medians: what else the machine
    did in the meantime plays no part then, but longer answers and longer chains do."""
    groups: dict[tuple[int, int], list[Timed]] = {}
    for number, answer in enumerate(answers):
        for timed in answer.rounds:
            groups.setdefault((number, timed.num_drafted), []).append(timed)
    num = sum(len(group) for group in groups.values())
    return {
        name: sum(len(group) * statistics.median(timed.stages[name] for timed in group) for group in groups.values())
        / num
        for name in STAGES
    }


def predict(tau: float, stages: dict[str, float], plain: dict[str, float]) -> float:
    """Speedup over plain decoding."""
    return tau * sum(plain.values()) / sum(stages.values())


def best_chain(report: Report) -> int:
    """The length of chain that a report of a chain makes fastest: 1 .. the one that it measured.

    A step of drafting is taken to cost the same at every depth, and what a draft adds to the target's pass likewise.
    """
    survival, stages = report.survival, report.ms_per_round
    depth, plain = len(survival), 1e3 / report.baseline_tokens_per_second

    def speedup(num: int) -> float:
        share = num / depth
        verify = plain + share * (stages["verify"] - plain)
        rest = sum(spent for stage, spent in stages.items() if stage not in ("draft", "verify"))
        return (1 + sum(survival[:num])) * plain / (share * stages["draft"] + verify + rest)

    return max(range(1, depth + 1), key=speedup)


def explain(name: str, tau: float, stages: dict[str, float], plain: dict[str, float]) -> str:
    """A line on where the time goes."""
    draft, verify, *rest = (1e3 * stages[stage] for stage in STAGES)
    return (
        f"{name}: {tau:.2f} tokens a round; {draft:.1f} ms draft + {verify:.1f} verify + {sum(rest):.1f} rest = "
        f"{draft + verify + sum(rest):.1f} ms against {1e3 * sum(plain.values()):.1f} ms plain: predicted "
        f"{predict(tau, stages, plain):.2f}"
    )


@dataclass(frozen=True)
class Lengths:
    """Seconds by the number of drafts in a chain, 0 .. D of them. A chain that stops below its limit has taken one step
    more than it offers drafts: the step told it to stop."""

    draft: list[float]  # [1 + D]
    verify: list[float]  # [1 + D]
    rest: float

    def round(self, num_drafts: int, limit: int) -> float:
        return self.draft[min(num_drafts + 1, limit)] + self.verify[num_drafts] + self.rest


def between(known: dict[int, float], num: int) -> list[float]:
    """Values at 0 .. num, straight lines between those that are known; 0 and num are."""
    values = []
    for place in range(num + 1):
        low, high = max(n for n in known if n <= place), min(n for n in known if n >= place)
        share = (place - low) / max(1, high - low)
        values.append(known[low] + share * (known[high] - known[low]))
    return values


def chain_lengths(
    plain: dict[str, float], chains: dict[int, dict[str, float]], told: dict[str, float], depth: int
) -> Lengths:
    """plain, chains: stages of plain decoding and of chains by their length, that of `depth` among them; told: of the
    chain of `depth` whose every step also says what Stopping asks for."""
    draft = between({0: plain["draft"], **{n: stages["draft"] for n, stages in chains.items()}}, depth)
    verify = between({0: plain["verify"], **{n: stages["verify"] for n, stages in chains.items()}}, depth)
    asking = max(0.0, told["draft"] - draft[depth]) / depth  # a step
    return Lengths([seconds + n * asking for n, seconds in enumerate(draft)], verify, told["keep"] + told["other"])


def whole_rounds(answers: list[Answer]) -> list[Timed]:
    """All rounds but the last of each answer, whose drafts may have been cut rather than refused."""
    return [timed for answer in answers for timed in answer.rounds[:-1]]


def fit_stopping(rounds: list[Timed]) -> Stopping:
    """Logistic regression of "this draft is accepted" on its evidence, over drafts before which all were accepted.

    Where the drafter has no confidence head that part of the evidence is 0, and its weight stays 0.
    """
    depths = [(timed, d) for timed in rounds for d in range(min(timed.accepted + 1, len(timed.evidence)))]
    evidence = torch.tensor([timed.evidence[d] for timed, d in depths], dtype=torch.float64)  # [M, 2]
    accepted = torch.tensor([d < timed.accepted for timed, d in depths], dtype=torch.float64)  # [M]
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
    survival: list[list[float]], accepted: list[int], lengths: Lengths, *, depth: int, threshold: float
) -> float:
    """If rounds whose full chains had these estimates [R][D], and accepted so many drafts, had stopped below `threshold`."""
    offered = [sum(chance >= threshold for chance in row[:depth]) for row in survival]
    tokens = len(offered) + sum(map(min, accepted, offered))
    return sum(lengths.round(num, depth) for num in offered) / tokens


def plan(rounds: list[Timed], stopping: Stopping, lengths: Lengths) -> tuple[int, Stopping]:
    """The depth and the threshold at which chains that stop would have been fastest over recorded rounds of full chains.

    They are tried one by one. In theory a draft is worth offering if its chance to survive, times the time that a token
    takes, is more than what it adds to the round; but what it adds depends on where the chain ends, for of the last draft
    the step is paid for when its evidence is at hand. A threshold of 0: stopping does not pay.
    """
    evidence = torch.tensor([timed.evidence for timed in rounds])  # [R, D, 2]
    survival = stopping.log_chance(evidence.flatten(0, 1)).view(len(rounds), -1).cumsum(1).exp().tolist()  # [R][D]
    accepted = [timed.accepted for timed in rounds]
    _, threshold, depth = min(
        (seconds_per_token(survival, accepted, lengths, depth=depth, threshold=threshold), threshold, depth)
        for depth in range(1, len(lengths.verify))
        for threshold in THRESHOLDS
    )
    return depth, replace(stopping, threshold=threshold)
