"""The model of speed against figures of the literature and against a simulation of single rounds."""

import math
import re
from dataclasses import replace

import pytest
import torch

from specdec import replay, speed
from specdec.decode import Decoder
from specdec.experts import Experts
from specdec.figures import rate_ratio_interval
from specdec.generation import Generation
from specdec.measurement import Prompt, PromptResult
from specdec.proposers.heads import HeadProposer
from specdec.proposers.stopping import Stopping
from specdec.report import Report
from specdec.sampling import Sampling
from specdec.speed import ChainCosts, TimedAnswer, TimedRound
from tests.support import chain_of, make_drafter, random_tokens


def stages(draft: float, verify: float, rest: float = 0.0) -> dict[str, float]:
    return {"draft": draft, "verify": verify, "keep": rest, "other": 0.0}


@pytest.mark.parametrize(
    ("alpha", "cost", "best", "speedup"),
    [(0.7, 0.05, 6, 2.35), (0.8, 0.05, 8, 3.09), (0.9, 0.05, 13, 4.67), (0.7, 0.1, 4, 1.98), (0.9, 0.1, 10, 3.43)],
)
def test_best_chain_lengths_equal_those_of_the_literature(alpha, cost, best, speedup):
    """Leviathan et al. (2211.17192), equal to the table of docs/methods.md, section 8."""
    speedups = {
        num: speed.predict(sum(alpha**d for d in range(num + 1)), stages(num * cost, 1.0), stages(0, 1.0))
        for num in range(1, 20)
    }
    assert max(speedups, key=speedups.get) == best and speedups[best] == pytest.approx(speedup, abs=0.005)


def test_the_terms_of_an_explanation_add_up():
    line = speed.explain("chain of 3", 1.62, stages(0.0021, 0.0273, 0.0001), stages(0.0, 0.0264))
    assert line.startswith("chain of 3: ")
    tau, draft, verify, rest, total, plain, speedup = map(float, re.findall(r"\d+\.\d+", line))
    assert (tau, draft, verify, rest, total, plain) == (1.62, 2.1, 27.3, 0.1, 29.5, 26.4)
    assert draft + verify + rest == pytest.approx(total) and speedup == round(1.62 * 26.4 / 29.5, 2)


def test_median_stages_ignore_outliers_and_weight_lengths_by_their_rounds():
    def rounds(verify: list[float], num_drafted: int) -> list[TimedRound]:
        return [TimedRound(stages(1.0, seconds), num_drafted, 0, []) for seconds in verify]

    nothing = Generation([[]], [[]])
    answers = [
        TimedAnswer(nothing, rounds([2.0, 2.0, 90.0], 1) + rounds([4.0], 3)),
        TimedAnswer(nothing, rounds([3.0], 1)),
    ]
    assert speed.median_stages(answers) == pytest.approx(stages(1.0, (3 * 2.0 + 4.0 + 3.0) / 5))


def test_costs_between_measured_lengths_are_interpolated():
    assert speed.interpolate({0: 1.0, 2: 2.0, 5: 8.0}, 5) == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]


def test_costs_of_a_mixture_grow_with_its_experts():
    """A pass over n drafts and the root costs 1 + 2 f(1 + n) with f(N) = 8 (1 - (3/4)^N)."""
    experts = Experts(8, 2)
    costs = [1 + 2 * hit for hit in (2, 3.5, 4.625, 5.46875)]
    assert speed.interpolate({0: costs[0], 3: costs[3]}, 3, experts) == pytest.approx(costs)
    plain, chain = stages(0.0, costs[0]), stages(0.9, costs[3])
    chained = speed.chain_costs(plain, {3: chain}, chain, 3, experts)
    assert chained.verify == pytest.approx(costs) and chained.draft == pytest.approx([0.0, 0.3, 0.6, 0.9])


def test_the_best_chain_of_a_mixture_follows_its_experts():
    """One of two experts for each token: passes over 1, 2, 3 tokens use 1, 1.5, 1.75 experts.

    Of the 0.75 that three tokens add, the first draft costs two thirds. With survival .7, .5 and verification of 1 (plain)
    and 1.9 (two drafts), a chain of one emits 1.7 in 1.45 if drafts cost alike (2.2 in 1.9 for two), and in 1.6 here.
    """
    survival = [0.7, 0.5]
    report = reported(survival, verify=1.9e3, baseline=1.0)
    assert 1.7 / 1.45 > 2.2 / 1.9 > 1.7 / 1.6
    assert speed.best_chain(report) == 1 and speed.best_chain(replace(report, experts=[2, 1])) == 2


def reported(survival: list[float], *, verify: float, baseline: float) -> Report:
    """verify: ms of the target's pass; baseline: tokens/s"""
    figures = {"temperature": 0.0, "num_prompts": 1, "num_rounds": 1, "tau": 1.0, "tau_ci": [1.0, 1.0],
               "survival": survival, "acceptance": survival, "tokens_per_second": 1.0, "tokens_per_second_ci": [1.0, 1.0],
               "speedup": 1.0, "speedup_ci": [1.0, 1.0]}  # fmt: skip
    return Report(**figures, baseline_tokens_per_second=baseline, ms_per_round=stages(0.0, verify))


def test_reports_keep_the_numbers_of_experts_and_older_ones_load():
    report = reported([0.5], verify=1.0, baseline=1.0)
    assert "experts" not in report.to_json() and Report.from_json(report.to_json()) == report
    mixture = replace(report, experts=[8, 2])
    assert Report.from_json(mixture.to_json()) == mixture


def decoder_of(drafter, depth: int, stopping: Stopping | None, temperature: float = 0.0) -> Decoder:
    proposer = HeadProposer(drafter, chain_of(depth), stopping=stopping)
    return Decoder(drafter.target, proposer, sampling=Sampling(temperature), stop=set())


def answers_of(decoder: Decoder, num: int = 2) -> list[TimedAnswer]:
    vocab = decoder.target.vocab_size
    return [
        speed.decode(decoder, random_tokens(seed, 5, vocab), 20, torch.Generator().manual_seed(seed))
        for seed in range(num)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle", "mtp", "medusa", "dspark", "draft"])
def test_one_replay_gives_tau_of_every_shorter_chain(small_target, head):
    drafter = make_drafter(small_target, head)
    prompts = [random_tokens(seed, 5, small_target.vocab_size) for seed in range(2)]
    plain = answers_of(Decoder(small_target, None, sampling=Sampling(), stop=set()))
    accepts = [
        replay.acceptance(drafter, prompt, answer.generation.tokens[0], depth=3, temperature=0)
        for prompt, answer in zip(prompts, plain)
    ]
    for depth in (1, 2, 3):
        decoded = speed.decoded_tau(answers_of(decoder_of(drafter, depth, None)))
        assert speed.replayed_tau(accepts, depth) == pytest.approx(decoded)
    assert decoded > 1


def test_timed_rounds_equal_those_of_the_generation(small_target):
    decoder = decoder_of(make_drafter(small_target, "eagle"), 3, Stopping())
    answer = answers_of(decoder, 1)[0]
    generation = decoder.generate([random_tokens(0, 5, small_target.vocab_size)], 20)
    assert answer.generation.tokens == generation.tokens and answer.generation.accepted == generation.accepted
    assert [timed.accepted for timed in answer.rounds] == generation.accepted[0]
    assert {timed.num_drafted for timed in answer.rounds} == {3}
    assert all(len(timed.evidence) == 3 and len(timed.evidence[0]) == 2 for timed in answer.rounds)
    for name, seconds in answer.generation.stages.items():
        assert sum(timed.stages[name] for timed in answer.rounds) == pytest.approx(seconds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_stops_chains_by_the_rule_that_planning_assumes(small_target, temperature):
    """A chain stops where its survival, estimated from the recorded evidence, falls below the threshold."""
    stopping = Stopping(weight=0.8, bias=0.3, threshold=0.35)
    answers = answers_of(decoder_of(make_drafter(small_target, "eagle"), 4, stopping, temperature))
    lengths = set()
    for timed in (timed for answer in answers for timed in answer.rounds):
        survival = stopping.log_chance(torch.tensor(timed.evidence)).cumsum(0).exp().tolist()
        assert timed.num_drafted == sum(chance >= 0.35 for chance in survival)
        assert len(timed.evidence) == min(timed.num_drafted + 1, 4)
        lengths.add(timed.num_drafted)
    assert len(lengths) > 1


def synthetic_rounds(num: int, truth: Stopping, depth: int = 4) -> list[TimedRound]:
    """Synthetic rounds: each draft is accepted with the chance that `truth` computes from its evidence."""
    generator = torch.Generator().manual_seed(0)
    evidence = torch.randn(num, depth, 2, generator=generator) * 2
    chances = truth.log_chance(evidence.flatten(0, 1)).view(num, depth).exp()
    accepted = (torch.rand(num, depth, generator=generator) < chances).long().cumprod(1).sum(1)
    return [TimedRound({}, depth, *pair) for pair in zip(accepted.tolist(), evidence.tolist())]


def test_the_fit_recovers_the_coefficients_of_acceptance():
    truth = Stopping(weight=0.7, bias=0.9, confidence_weight=0.5)
    fitted = speed.fit_stopping(synthetic_rounds(4000, truth))
    for name in ("weight", "bias", "confidence_weight"):
        assert vars(fitted)[name] == pytest.approx(vars(truth)[name], abs=0.08)


def test_the_fit_stays_near_its_prior_with_few_rounds():
    accepted = [TimedRound({}, 1, 1, [[2.0, 0.0]])] * 3  # no draft was refused: without a prior the chance would be 1
    fitted = speed.fit_stopping(accepted)
    assert 0.5 < fitted.weight < 3 and abs(fitted.bias) < 2 and fitted.confidence_weight == 0


@pytest.mark.parametrize(("step", "node"), [(0.02, 0.05), (0.02, 0.2), (0.1, 0.2)])
def test_a_chain_with_the_planned_threshold_is_faster_than_fixed_chains(step, node):
    truth = Stopping(weight=0.7, bias=0.4)
    rounds = synthetic_rounds(500, truth)
    lengths = ChainCosts([step * n for n in range(5)], [1 + node * n for n in range(5)], 0.01)
    depth, stopping = speed.plan_stopping(rounds, truth, lengths)
    chances = [truth.log_chance(torch.tensor(timed.evidence)).exp().tolist() for timed in rounds]

    def seconds(depth: int, threshold: float) -> float:
        """Seconds for each token, from a simulation of every round."""
        spent, tokens = 0.0, 0
        for timed, row in zip(rounds, chances):
            survival, num = 1.0, 0
            for chance in row[:depth]:
                spent += step
                survival *= chance
                if survival < threshold:
                    break
                num += 1
            spent += 1 + node * num + 0.01
            tokens += 1 + min(timed.accepted, num)
        return spent / tokens

    planned = seconds(depth, stopping.threshold)
    assert planned < min(seconds(d, 0.0) for d in range(1, 5))
    assert planned < 1.001 * min(seconds(d, tenths / 10) for d in range(1, 5) for tenths in range(10))
    marginal = (node / planned, (step + node) / planned)  # cost in tokens of the last draft, and of an earlier one
    assert marginal[0] * 0.8 < stopping.threshold < marginal[1] * 1.2


def test_free_drafts_are_never_stopped():
    lengths = ChainCosts([0.1] * 5, [1.0] * 5, 0.0)
    assert speed.plan_stopping(synthetic_rounds(200, Stopping()), Stopping(), lengths) == (4, Stopping())


def test_the_cost_of_stopping_is_spread_over_the_steps():
    chains = {2: stages(0.3, 1.1), 4: stages(0.5, 1.3)}
    lengths = speed.chain_costs(stages(0.0, 1.0), chains, stages(0.9, 1.3, 0.01), 4)
    assert lengths.draft == pytest.approx([0.0, 0.25, 0.5, 0.7, 0.9])
    assert lengths.verify == pytest.approx([1.0, 1.05, 1.1, 1.2, 1.3]) and lengths.rest == 0.01
    assert lengths.round(1, 4) == pytest.approx(0.5 + 1.05 + 0.01)
    assert lengths.round(4, 4) == pytest.approx(0.9 + 1.3 + 0.01)


def test_the_interval_of_a_rate_ratio_is_paired_by_prompt():
    prompt = Prompt("", "", [0])
    rows = [
        PromptResult(prompt, Generation([[0]], [[]]), Generation([[0] * 9], [[1] * 4], seconds=s), math.nan, [], None)
        for s in (1, 5)
    ]
    slower = [replace(row, drafted=replace(row.drafted, seconds=2 * row.drafted.seconds)) for row in rows]
    assert rate_ratio_interval(slower, rows) == pytest.approx([0.5, 0.5])
