"""The check of a server's hidden states at the start: they must give the server's own log-probabilities.

A server may hand over states of another layer, without a norm, or of damaged texts, and still have nearly always the
same best token (vLLM issue 50815: 96 % of them, with a mean error of .11). So the log-probabilities of a whole text are
compared, of the request that gave the states. States of the first layers are computed here, from the target's files.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.target.first_layers import read_first_states
from specdec.target.model import Target

NUM_TOKENS = 128  # tokens of the text
NUM_FURTHER_TOKENS = 72  # tokens behind it in the second pass
VOCAB_CHUNK = 16384  # rows of the LM head that are held in float32
ROUNDING_RATIO = 3  # error of log-probabilities over that of rounding the logits, at most
MIN_ERROR_LIMIT = 1e-4  # error of log-probabilities that float32 may have
NEIGHBOUR_SHARE = 0.5  # distance of a state from ours over its distance from a neighbouring layer's, at most
MAX_LAYER = 4  # highest hidden state that is compared, as its layers are read from the target's files
DISTANCE_EPSILONS = 8  # relative distance of a state from ours in units of the dtype's precision, at most
MIN_DISTANCE_LIMIT = 1e-4  # relative distance of a state that float32 may have


@dataclass(frozen=True)
class ReadText:
    """A text as a server read it.

    states: [t, layers, D] hidden states in the server's dtype, the last one before the final norm
    log_probs: [t - 1] the server's log-probability of each token behind the first
    """

    states: Tensor
    log_probs: Tensor


# tokens [t] -> the text as the server read it
ReadServed = Callable[[Tensor], "Future[ReadText]"]


def make_text(target: Target, num: int) -> Tensor:
    """A text [num] of ids that are seven apart."""
    return (7 * torch.arange(num) + 1) % target.vocab_size


@dataclass(frozen=True)
class StateReference:
    """What the states of a server are compared with.

    tokens: [t] the longer text; layers: numbers of the server's hidden states, the last one included
    first_states: hidden states 0, 1, .. [t, D] of that text, as computed here; empty where nothing is compared
    """

    target: Target
    tokens: Tensor
    layers: tuple[int, ...]
    first_states: list[Tensor]

    def check_server(self, read: ReadServed) -> None:
        """Has a server read the text and its beginning, and compares states and log-probabilities.

        Raises ValueError, with the figures, for a server whose states are not those of the target.
        """
        num = min(NUM_TOKENS, len(self.tokens) - 1)
        texts = [read(text).result() for text in (self.tokens[:num], self.tokens)]
        for text, second in zip(texts, reversed(texts)):
            check_log_probs(self.target, self.tokens[: len(text.states)], text, second)
            for number in range(1, len(self.first_states) - 1):
                if number in self.layers:
                    check_layer(self.target, text.states[:, self.layers.index(number)], self.first_states, number)

    def describe_gaps(self) -> str:
        """A sentence on the states that are not compared with the target's own; empty if all are."""
        compared = range(1, len(self.first_states) - 1)
        gaps = [str(number) for number in self.layers[:-1] if number not in compared and number]
        if not gaps:
            return ""
        return (
            f"hidden state{'s' * (len(gaps) > 1)} {', '.join(gaps)} of the engine {'are' if len(gaps) > 1 else 'is'} "
            f"not compared with the target's: only states up to {MAX_LAYER} are, where its files are here."
        )


def make_reference(target: Target, layers: tuple[int, ...], longest: int) -> StateReference:
    """The reference for servers of a target. longest: tokens that they read, at most"""
    tokens = make_text(target, min(NUM_TOKENS + NUM_FURTHER_TOKENS, longest - 1))
    early_layers = [number for number in layers if 0 < number <= min(MAX_LAYER, target.num_layers - 1)]
    first_states: list[Tensor] = []
    if early_layers and (target.shards is None or target.shards.is_local):
        # transformers joins the experts of some mixtures when it loads them whole, and fills some buffers only then
        with contextlib.suppress(ValueError, RuntimeError):
            first_states = read_first_states(target, tokens, min(max(early_layers) + 1, target.num_layers - 1))
    if not all(bool(states.isfinite().all()) for states in first_states):
        first_states = []
    return StateReference(target, tokens, layers, first_states)


@torch.no_grad()
def check_log_probs(target: Target, ids: Tensor, text: ReadText, second: ReadText) -> None:
    """Compares the log-probabilities that the last states of a text give with the server's.

    second: another pass over the text, which may be longer or shorter; the accepted error follows from both passes
    """
    final = target.norm(text.states[:, -1].to(target.device, target.dtype))[:-1]
    num = min(len(text.log_probs), len(second.log_probs))
    goals = ids[1:, None].to(target.device)
    logits = target.logits(final)
    here, rounded = (
        values.log_softmax(-1).gather(1, goals)[:, 0].cpu()
        for values in (logits, logits.to(text.states.dtype).to(logits.dtype))
    )
    exact = compute_exact_log_probs(target, final, goals)
    error, passes, rounding = (
        float((values - reference).abs().mean())
        for values, reference in (
            (here, text.log_probs),
            (text.log_probs[:num], second.log_probs[:num]),
            (rounded, exact),
        )
    )
    limit = max(ROUNDING_RATIO * rounding, passes, MIN_ERROR_LIMIT)
    if not error <= limit:
        raise ValueError(
            f"The engine's hidden states do not give its own log-probabilities: over {len(here)} tokens they differ "
            f"by {error:.2g} on average, and two passes of the engine by {passes:.2g}, rounding here by "
            f"{rounding:.2g} (at most {limit:.2g} is accepted). It serves another model than {target.name}, other "
            "layers, or states that something has changed."
        )


def compute_exact_log_probs(target: Target, final: Tensor, goals: Tensor) -> Tensor:
    """Log-probabilities [t] of tokens `goals` [t, 1] for final states [t, D], in float32 all through."""
    weight, bias = target.lm_head.weight, target.lm_head.bias
    parts = []
    for start in range(0, len(weight), VOCAB_CHUNK):
        rows = slice(start, start + VOCAB_CHUNK)
        product = final.float() @ weight[rows].to(final.device).float().T
        parts.append(product if bias is None else product + bias[rows].to(final.device).float())
    return target.shape_logits(torch.cat(parts, dim=-1)).log_softmax(-1).gather(1, goals)[:, 0].cpu()


def check_layer(target: Target, states: Tensor, references: list[Tensor], number: int) -> None:
    """Compares hidden state `number` [t, D] of a text with ours, and with those of the layers beside it.

    references: hidden states 0, 1, .. [at least t, D], as computed here
    """
    distance, *neighbours = (
        measure_distance(states, references[place][: len(states)]) for place in (number, number - 1, number + 1)
    )
    precision = max(torch.finfo(target.dtype).eps, torch.finfo(states.dtype).eps)
    limit = max(DISTANCE_EPSILONS * precision, MIN_DISTANCE_LIMIT)
    is_exact = target.quantisation is None
    if distance <= NEIGHBOUR_SHARE * min(neighbours) and (distance <= limit or not is_exact):
        return
    beside = " and ".join(f"{value:.2g}" for value in neighbours)
    raise ValueError(
        f"The engine's hidden state {number} differs from that of {target.name} by {distance:.2g} of its length "
        f"(at most {limit:.2g} is accepted), and from the layers beside it by {beside}. The engine counts layers "
        "otherwise, or changes the states: start it with specdec launch_engine."
    )


def measure_distance(states: Tensor, reference: Tensor) -> float:
    """The median over tokens of the distance of two states [t, D], over the length of the reference's."""
    expected = reference.float().cpu()
    return float(((states.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
