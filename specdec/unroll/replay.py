"""tau from the training unroll, without decoding (docs/methods.md, section 2).

Given that the target emitted x, a draft at depth d of a round was accepted with probability min(1, q(x) / p(x)) if it
was sampled from q. At temperature 0 this probability is 1 if the draft is x, and 0 if not. These acceptances determine
where rounds start. tau is the number of emitted tokens over the expected number of rounds. At temperature 0 every start
is certain, and tau is that of the decoder exactly.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.heads.base import Drafter
from specdec.target.model import TargetOutput
from specdec.unroll.plan import plan_unroll, unroll

CHUNK = 256  # goals whose [., V] logits exist at a time


def rounds(accept: Tensor) -> tuple[float, Tensor]:
    """The expected number of rounds for one answer, and of those that accept at least d drafts.

    accept [K, n]: entry [d-1, s] belongs to a round that starts when s tokens of the answer exist. It is the probability
    that the round accepts its draft at depth d, which is token s + d - 1, given that it accepted the drafts before.
    Entry s = 0 is not read: the first token comes from the prompt's pass. Of the last round only the tokens count that
    are emitted before the answer ends.
    -> number of rounds, accepted [K]: tau = (n - 1) / rounds = 1 + accepted.sum() / rounds
    """
    depth, num_tokens = accept.shape
    probabilities = accept.double().cpu().tolist()
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


def tau(accept: Tensor) -> float:
    """Tokens emitted per round over one answer, accept [K, n] as in `rounds`; nan for an answer without a round."""
    num_tokens = accept.shape[1]
    return (num_tokens - 1) / rounds(accept)[0] if num_tokens > 1 else float("nan")


def acceptance(drafter: Drafter, prompt: list[int], answer: list[int], *, depth: int, temperature: float) -> Tensor:
    """accept [K, n] for `rounds`, where the target wrote `answer` (n tokens) to `prompt` at this temperature."""
    return acceptances(drafter, [(prompt, answer)], depth=depth, temperature=temperature)[0]


def pad(texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Prompts and their answers -> [B, T], with zeros behind the short ones"""
    return pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)


def read(drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
    """The target's states for a batch of prompts and their answers, as the drafter reads them."""
    return drafter.target.read(pad(texts).to(drafter.target.device), drafter.target_layers)


@torch.no_grad()
def acceptances(
    drafter: Drafter,
    texts: list[tuple[list[int], list[int]]],
    *,
    depth: int,
    temperature: float,
    output: TargetOutput | None = None,
) -> list[Tensor]:
    """`acceptance` of several prompts and their answers in one batch.

    output: what `read` gave for these texts; only its features are needed at temperature 0. None: it is read here
    """
    output = output or read(drafter, texts)
    padded = pad(texts)
    begins = torch.tensor([[len(prompt)] for prompt, _ in texts])  # [B, 1]
    lengths = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in texts])
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    goals = (positions > begins) & (positions < lengths)  # the first token of an answer is not drafted
    documents = torch.where(positions < lengths, 0, -1)
    device = drafter.target.device
    steps = plan_unroll(drafter, documents, positions, goals, depth=depth).to(device)
    tokens, begins = padded.to(device), begins.to(device)
    unrolled = unroll(drafter, tokens, output.features, steps)
    # [B, K, T + 1]: the guess of depth d for a token belongs to the round that began d - 1 tokens before. The last entry is
    # for guesses of rounds that begin before the answer's first token.
    num_rows, length = padded.shape
    found = torch.zeros(num_rows, depth, length + 1, dtype=torch.float64, device=device)
    for part in steps.parts(CHUNK):
        row, position = steps.goals[part.goals].unbind(1)  # [M] each
        truth = drafter.target.logits(output.final[row, position - 1]) if temperature > 0 else None  # [M, V]
        for d, step in enumerate(steps.steps, start=1):
            numbers = step.goals[part.steps[d - 1]]
            row, position = steps.goals[numbers].unbind(1)
            logits = drafter.logits(d, unrolled.at(unrolled.readouts, d, part))
            own = None if truth is None else truth[numbers - part.goals.start]
            values = _probabilities(drafter, logits, tokens[row, position], own, temperature)
            start = position - begins[row, 0] - d + 1  # tokens of the answer that existed then
            found[row, d - 1, torch.where(start >= 1, start, -1)] = values.to(found.dtype)
    return [values[:, : len(answer)] for values, (_, answer) in zip(found.cpu(), texts)]


def _probabilities(drafter: Drafter, logits: Tensor, token: Tensor, truth: Tensor | None, temperature: float) -> Tensor:
    """[M]: the probability that each token's draft, made by logits [M, W], was accepted; truth [M, V]: target's logits"""
    if truth is None:
        return drafter.to_target(logits.argmax(-1)) == token
    # [M], -1 if it cannot be drafted
    draft = token if drafter.target_to_draft is None else drafter.target_to_draft[token]
    distribution = (logits.to(truth.dtype) / temperature).log_softmax(-1)
    guess = distribution.gather(1, draft.clamp(min=0)[:, None])[:, 0]
    real = (truth / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]
    return torch.where(draft >= 0, (guess - real).exp().clamp(max=1), 0.0)
