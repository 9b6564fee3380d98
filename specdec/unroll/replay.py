"""tau from the training unroll, without decoding (docs/methods.md, section 2).

Given that the target emitted x, a draft at depth d of a round was accepted with probability min(1, q(x) / p(x)) if it
was sampled from q. At temperature 0 this probability is 1 if the draft is x, and 0 if not. These acceptances determine
where rounds start. tau is the number of emitted tokens over the expected number of rounds. At temperature 0 every start
is certain, and tau is that of the decoder exactly.
"""

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

    candidates [4, K], of a head with a lattice, summed over the tokens that each depth guesses: 1, whether the answer's token is a
    candidate, the target's probability of all candidates, and the expected rounds that would accept the depth if every token that is
    a candidate were drafted
    """

    acceptance: Tensor  # [K, n] as in `count_rounds`
    candidates: Tensor | None = None

    @cached_property
    def expected_rounds(self) -> tuple[float, Tensor]:
        """What `count_rounds` gives."""
        return count_rounds(self.acceptance)


def count_rounds(acceptance: Tensor) -> tuple[float, Tensor]:
    """The expected number of rounds for one answer, and of those that accept at least d drafts.

    accept [K, n]: entry [d-1, s] belongs to a round that starts when s tokens of the answer exist. It is the probability
    that the round accepts its draft at depth d, which is token s + d - 1, given that it accepted the drafts before.
    Entry s = 0 is not read: the first token comes from the prompt's pass. Of the last round only the tokens count that
    are emitted before the answer ends.
    -> number of rounds, accepted [K]: tau = (n - 1) / rounds = 1 + accepted.sum() / rounds
    """
    depth, num_tokens = acceptance.shape
    probabilities = acceptance.double().cpu().tolist()
    starts = [0.0] * (num_tokens + depth + 2)
    starts[1] = 1.0
    accepted = [0.0] * depth
    for start in range(1, num_tokens):
        alive = starts[start]
        for d in range(1, depth + 1):
            if start + d >= num_tokens:  # the last place is filled by the target's own token, not by a draft
                break
            survives = alive * probabilities[d - 1][start]
            starts[start + d] += alive - survives
            accepted[d - 1] += survives
            alive = survives
        else:
            starts[start + depth + 1] += alive
    return sum(starts[1:num_tokens]), torch.tensor(accepted, dtype=torch.float64)


def pad_texts(texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Prompts and their answers -> [B, T], with zeros behind the short ones"""
    return pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)


def read_target(drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
    """The target's states for a batch of prompts and their answers, as the drafter reads them."""
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
    """Several prompts, and the answers that the target wrote to them at this temperature, in one batch.

    output: what `read` gave for these texts. None: it is read here
    """
    output = output or read_target(drafter, texts)
    padded = pad_texts(texts)
    prompt_lengths = torch.tensor([[len(prompt)] for prompt, _ in texts])  # [B, 1]
    text_lengths = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in texts])
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    goals = (positions > prompt_lengths) & (positions < text_lengths)  # the first token of an answer is not drafted
    documents = torch.where(positions < text_lengths, 0, -1)
    device = drafter.target.device
    plan = plan_unroll(drafter, documents, positions, goals, depth=depth).move_to(device)
    tokens, prompt_lengths = padded.to(device), prompt_lengths.to(device)
    unrolled = unroll(drafter, tokens, output.features, plan)
    # [., B, K, T + 1]: the guess of depth d for a token belongs to the round that began d - 1 tokens before. The last entry is
    # for guesses of rounds that begin before the answer's first token.
    num_rows, length = padded.shape
    num_figures, needs_truth = (3 if drafter.has_candidates else 1), temperature > 0 or drafter.has_candidates
    figures = torch.zeros(num_figures, num_rows, depth, length + 1, dtype=torch.float64, device=device)
    for chunk in plan.split_goals(GOALS_PER_CHUNK):
        row, position = plan.goals[chunk.goals].unbind(1)  # [M] each
        truth = drafter.target.logits(output.final[row, position - 1]) if needs_truth else None  # [M, V]
        for d, step in enumerate(plan.steps, start=1):
            goal_numbers = step.goals[chunk.step_goals[d - 1]]
            row, position = plan.goals[goal_numbers].unbind(1)
            logits = drafter.logits(d, unrolled.select(unrolled.readouts, d, chunk))
            goal_truth = None if truth is None else truth[goal_numbers - chunk.goals.start]
            values = [_compute_acceptance(drafter, logits, tokens[row, position], goal_truth, temperature)]
            if drafter.has_candidates and goal_truth is not None:
                values += _measure_candidates(drafter, logits, tokens[row, position], goal_truth, temperature or 1.0)
            start = position - prompt_lengths[row, 0] - d + 1  # tokens of the answer that existed then
            entry = torch.where(start >= 1, start, -1)
            figures[:, row, d - 1, entry] = torch.stack([value.to(figures.dtype) for value in values])
    answer_lengths = [len(answer) for _, answer in texts]
    return [
        Replay(acceptance, _sum_candidates(*candidate_figures) if candidate_figures else None)
        for acceptance, *candidate_figures in (
            row_figures[..., :answer_length]
            for row_figures, answer_length in zip(figures.cpu().transpose(0, 1), answer_lengths)
        )
    ]


def _compute_acceptance(
    drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor | None, temperature: float
) -> Tensor:
    """[M]: the probability that each token's draft, made by logits [M, W], was accepted; truth [M, V]: target's logits"""
    if truth is None or not temperature:
        return drafter.to_target(logits.argmax(-1)) == token
    draft = _find_draft_ids(drafter, token)
    distribution = (logits.to(truth.dtype) / temperature).log_softmax(-1)
    draft_log_probability = distribution.gather(1, draft.clamp(min=0)[:, None])[:, 0]
    target_log_probability = (truth / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]
    return torch.where(draft >= 0, (draft_log_probability - target_log_probability).exp().clamp(max=1), 0.0)


def _find_draft_ids(drafter: Drafter, token: Tensor) -> Tensor:
    """[M], -1 for what cannot be drafted"""
    return token if drafter.target_to_draft is None else drafter.target_to_draft[token]


def _measure_candidates(
    drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor, temperature: float
) -> list[Tensor]:
    """[M] each: whether the token is a candidate, which is what has a finite logit, and the target's probability of all candidates"""
    is_candidate, draft = logits.isfinite(), _find_draft_ids(drafter, token)  # [M, W]
    probabilities = (truth / temperature).softmax(-1)
    probabilities = probabilities if drafter.draft_to_target is None else probabilities[:, drafter.draft_to_target]
    is_hit = is_candidate.gather(1, draft.clamp(min=0)[:, None])[:, 0] & (draft >= 0)
    return [is_hit, (probabilities * is_candidate).sum(-1)]


def _sum_candidates(is_hit: Tensor, candidate_mass: Tensor) -> Tensor:
    """[K, n] each -> the sums [4, K] of a `Replay`; all entries are 0 where a depth guesses nothing"""
    depth, num_tokens = is_hit.shape
    goals = (num_tokens - torch.arange(1, depth + 1)).clamp(min=0)
    return torch.stack([goals, is_hit.sum(1), candidate_mass.sum(1), count_rounds(is_hit)[1]])
