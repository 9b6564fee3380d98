"""tau from the training unroll, without decoding (docs/methods.md, section 2).

A draft x at depth d was sampled from q. Given that the target emitted x, the draft was accepted with probability
min(1, q(x) / p(x)). At temperature 0 this is 1 if the draft equals x, else 0. The acceptances determine where rounds
start: tau is the number of emitted tokens over the expected number of rounds. At temperature 0 it is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.heads.base import Drafter
from specdec.target.model import TargetOutput
from specdec.unroll.plan import plan_unroll, unroll

GOALS_PER_CHUNK = 256  # goals whose [., V] logits exist at a time


@dataclass(frozen=True)
class Replay:
    """Chains of K drafts along an answer of n tokens.

    candidates [4, K]: sums over the tokens that each depth guesses, of a head with a lattice; None: another head. Rows:
        number of tokens; tokens that are candidates; the target's probability of all candidates; expected rounds that
        would accept the depth if every token that is a candidate were drafted
    """

    acceptance: Tensor  # [K, n] as in `count_rounds`
    candidates: Tensor | None = None

    @cached_property
    def rounds(self) -> "ExpectedRounds":
        """The result of `trace_rounds` for this answer."""
        return trace_rounds(self.acceptance)

    @property
    def expected_rounds(self) -> tuple[float, Tensor]:
        """The result of `count_rounds` for this answer."""
        return self.rounds.totals


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected rounds of an answer of n tokens, by the tokens of the answer before them.

    starts [n]: rounds that start there; accepted [n]: drafts that these accept
    by_depth [K]: rounds that accept at least d drafts
    """

    starts: list[float]
    accepted: list[float]
    by_depth: list[float]

    @property
    def totals(self) -> tuple[float, Tensor]:
        """Expected number of rounds, and expected numbers of rounds that accept at least d drafts, [K]."""
        return sum(self.starts), torch.tensor(self.by_depth, dtype=torch.float64)

    def list_starts(self) -> Iterator[tuple[int, float, float]]:
        """Yields tokens of the answer before a round, expected rounds that start there, and tokens that they emit."""
        for position, (num_rounds, accepted) in enumerate(zip(self.starts, self.accepted)):
            yield position, num_rounds, num_rounds + accepted


def count_rounds(acceptance: Tensor) -> tuple[float, Tensor]:
    """Expected number of rounds for one answer, and expected numbers of rounds that accept at least d drafts, [K].

    acceptance [K, n]: entry [d-1, s] belongs to a round that starts when s tokens of the answer exist. It is the
        probability that the round accepts its draft at depth d, token s + d - 1, if it accepted the drafts before.
        Entry s = 0 is not read, because the first token comes from the prompt's pass.

    tau = (n - 1) / rounds = 1 + accepted.sum() / rounds. In the last round only tokens before the answer's end count.
    """
    return trace_rounds(acceptance).totals


def trace_rounds(acceptance: Tensor) -> ExpectedRounds:
    """The expected rounds of an answer where they start. acceptance [K, n]: see `count_rounds`"""
    depth, num_tokens = acceptance.shape
    probabilities = acceptance.double().cpu().tolist()
    starts = [0.0] * (num_tokens + depth + 2)
    starts[1] = 1.0
    accepted, by_depth = [0.0] * num_tokens, [0.0] * depth
    for start in range(1, num_tokens):
        alive = starts[start]
        for d in range(1, depth + 1):
            if start + d >= num_tokens:  # the target's own token fills the last place
                break
            survives = alive * probabilities[d - 1][start]
            starts[start + d] += alive - survives
            by_depth[d - 1] += survives
            accepted[start] += survives
            alive = survives
        else:
            starts[start + depth + 1] += alive
    return ExpectedRounds(starts[:num_tokens], accepted, by_depth)


def pad_texts(texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Prompts with their answers [B, T], filled up with zeros."""
    return pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)


def read_target(drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
    """The target's output for a batch of prompts and their answers, with the features that the drafter reads."""
    return drafter.target.read(pad_texts(texts).to(drafter.target.device), drafter.target_layers)


@torch.no_grad()
def replay_answers(
    drafter: Drafter,
    texts: list[tuple[list[int], list[int]]],
    *,
    depth: int,
    temperature: float,
    output: TargetOutput | None = None,
) -> list[Replay]:
    """Replays prompts and the answers that the target wrote to them at this temperature, in one batch.

    depth: drafts of a round, K; output: result of `read_target` for these texts, None: it is read here
    """
    # One plan and one unroll for all texts. The first token of an answer is not drafted
    output = output or read_target(drafter, texts)
    padded = pad_texts(texts)
    prompt_lengths = torch.tensor([[len(prompt)] for prompt, _ in texts])  # [B, 1]
    text_lengths = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in texts])
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    goals = (positions > prompt_lengths) & (positions < text_lengths)
    documents = torch.where(positions < text_lengths, 0, -1)
    device = drafter.target.device
    plan = plan_unroll(drafter, documents, positions, goals, depth=depth).move_to(device)
    tokens, prompt_lengths = padded.to(device), prompt_lengths.to(device)
    unrolled = unroll(drafter, tokens, output.features, plan)

    # Figures [F, B, K, T + 1]: the guess of depth d for a token belongs to the round that began d - 1 tokens before.
    # The last entry collects guesses of rounds that begin before the answer's first token
    num_rows, length = padded.shape
    num_figures = 3 if drafter.has_candidates else 1
    figures = torch.zeros(num_figures, num_rows, depth, length + 1, dtype=torch.float64, device=device)
    for chunk in plan.split_goals(GOALS_PER_CHUNK):
        row, position = plan.goals[chunk.goals].unbind(1)  # [M] each
        needs_truth = temperature > 0 or drafter.has_candidates
        truth = drafter.target.logits(output.final[row, position - 1]) if needs_truth else None  # [M, V]
        for d, step in enumerate(plan.steps, start=1):
            goal_numbers = step.goals[chunk.step_goals[d - 1]]
            row, position = plan.goals[goal_numbers].unbind(1)
            logits = drafter.logits(d, unrolled.select(unrolled.readouts, d, chunk))
            goal_truth = None if truth is None else truth[goal_numbers - chunk.goals.start]
            start = position - prompt_lengths[row, 0] - d + 1  # tokens of the answer when the round began
            entry = torch.where(start >= 1, start, -1)
            values = _measure_drafts(drafter, logits, tokens[row, position], goal_truth, temperature)
            figures[:, row, d - 1, entry] = torch.stack([value.to(figures.dtype) for value in values])
    return [
        _make_replay(*row_figures[..., : len(answer)])
        for row_figures, (_, answer) in zip(figures.cpu().transpose(0, 1), texts)
    ]


def _make_replay(acceptance: Tensor, *candidate_figures: Tensor) -> Replay:
    """The replay of an answer from its figures, [K, n] each."""
    return Replay(acceptance, _sum_candidates(*candidate_figures) if candidate_figures else None)


def _measure_drafts(
    drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor | None, temperature: float
) -> list[Tensor]:
    """Figures [M] of the drafts of M tokens: the acceptance and, of a head with a lattice, two of its candidates.

    logits [M, W] of the drafts; token [M]; truth [M, V]: the target's logits
    """
    values = [_compute_acceptance(drafter, logits, token, truth, temperature)]
    if drafter.has_candidates and truth is not None:
        values += _measure_candidates(drafter, logits, token, truth, temperature or 1.0)
    return values


def _compute_acceptance(
    drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor | None, temperature: float
) -> Tensor:
    """Probability [M] that each token's draft was accepted. logits [M, W], truth [M, V]: of drafter and target"""
    if truth is None or not temperature:
        return drafter.to_target(logits.argmax(-1)) == token
    draft = _find_draft_ids(drafter, token)
    distribution = (logits.to(truth.dtype) / temperature).log_softmax(-1)
    draft_log_probability = distribution.gather(1, draft.clamp(min=0)[:, None])[:, 0]
    target_log_probability = (truth / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]
    return torch.where(draft >= 0, (draft_log_probability - target_log_probability).exp().clamp(max=1), 0.0)


def _find_draft_ids(drafter: Drafter, token: Tensor) -> Tensor:
    """Draft ids [M] of target ids, -1 for tokens that cannot be drafted."""
    return token if drafter.target_to_draft is None else drafter.target_to_draft[token]


def _measure_candidates(
    drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor, temperature: float
) -> list[Tensor]:
    """Whether each token is a candidate [M], and the target's probability of all candidates [M].

    Candidates are the tokens with a finite logit. Arguments as of `_measure_drafts`
    """
    is_candidate, draft = logits.isfinite(), _find_draft_ids(drafter, token)  # [M, W]
    probabilities = (truth / temperature).softmax(-1)
    probabilities = probabilities if drafter.draft_to_target is None else probabilities[:, drafter.draft_to_target]
    is_hit = is_candidate.gather(1, draft.clamp(min=0)[:, None])[:, 0] & (draft >= 0)
    return [is_hit, (probabilities * is_candidate).sum(-1)]


def _sum_candidates(is_hit: Tensor, candidate_mass: Tensor) -> Tensor:
    """Sums [4, K] of a `Replay`. is_hit, candidate_mass [K, n]: zeros where a depth guesses no token"""
    depth, num_tokens = is_hit.shape
    goals = (num_tokens - torch.arange(1, depth + 1)).clamp(min=0)
    return torch.stack([goals, is_hit.sum(1), candidate_mass.sum(1), count_rounds(is_hit)[1]])
