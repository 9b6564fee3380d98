"""Slow independent implementations of what the project computes: greedy decoding, skipped layers, the slot rule."""

import copy

import torch
from torch import nn
from transformers import DynamicCache

from specdec.target.model import Target
from specdec.unroll import replay


def transformers_answer(target, prompt: list[int], num: int, penalty: float = 1.0) -> list[int]:
    """Greedy decoding by transformers."""
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "repetition_penalty": penalty, "max_new_tokens": num, "pad_token_id": 0}
    out = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logits_of_layers(target: Target, numbers, text: list[int], later: list[int]) -> torch.Tensor:
    """Logits of a model that has only the layers `numbers`, for the tokens `later`.

    Its keys and values of `text`, which precedes `later`, are those of the whole target. -> logits [len(later), V]
    """
    whole_cache, part_cache = DynamicCache(), DynamicCache()
    target.model(torch.tensor([text]), past_key_values=whole_cache)
    model = copy.deepcopy(target.model)
    model.config.num_hidden_layers = len(numbers)
    model.model.layers = nn.ModuleList(model.model.layers[number] for number in numbers)
    for place, number in enumerate(numbers):
        model.model.layers[place].self_attn.layer_idx = place
        part_cache.update(whole_cache.layers[number].keys, whole_cache.layers[number].values, place)
    return model(torch.tensor([later]), past_key_values=part_cache).logits[0]


def tau(accept: torch.Tensor) -> float:
    """Tokens emitted per round over one answer, accept [K, n] as in `replay.count_rounds`; nan for an answer without a
    round.
    """
    num_tokens = accept.shape[1]
    return (num_tokens - 1) / replay.count_rounds(accept)[0] if num_tokens > 1 else float("nan")


def acceptance(drafter, prompt: list[int], answer: list[int], *, depth: int, temperature: float) -> torch.Tensor:
    """accept [K, n] for `replay.count_rounds`, where the target wrote `answer` (n tokens) to `prompt` at this
    temperature.
    """
    return replay.replay_answers(drafter, [(prompt, answer)], depth=depth, temperature=temperature)[0].acceptance


# The slot rule as a loop


class DenseKeys:
    """Replaces a cache: keeps the keys and values of all calls, and attends to the entries that a dense mask allows."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # K, V [B, heads, entries, head_dim]

    def visible_keys(self, layer: int):
        return self.layers[layer]

    def update(self, key, value, layer: int) -> None:
        known = self.layers.get(layer)
        self.layers[layer] = (
            tuple(torch.cat(pair, dim=2) for pair in zip(known, (key, value))) if known else (key, value)
        )

    def attend(self, layer: int, query, key, value, mask):
        self.update(key, value, layer)
        keys, values = (
            part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in self.visible_keys(layer)
        )
        scores = (query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ values


@torch.no_grad()
def follow(drafter, tokens, features, slot: int, depth: int, *, loss_logits: bool = False):
    """The slot rule for one slot: steps 1 .. depth along the given tokens, one step after the other.

    It uses neither of the two loops that it checks, the proposer with its cache and the unroll.
    tokens [T]; features [T, F*D], read only before the slot -> states [H] and logits [W] of each step
    judged: the logits that losses judge
    """
    first, kind, window = drafter.first_slot, drafter.context_kind, drafter.window or 2**20
    drafter = drafter.with_window(2**20) if kind == "depth" else drafter  # keys here are numbered by slots, not tokens
    cache, states, logits = DenseKeys(), [], []
    slots = torch.arange(first, slot + 1)  # [S]
    causal = torch.ones(len(slots), len(slots), dtype=torch.bool).tril()
    h = drafter.encode(features[None, :slot]) if first else features.new_zeros(1, len(slots), 0)  # f_(j-1) of each slot
    if kind == "block":
        drafter.context(h, slots[None] - 1, cache)
    if kind in ("none", "block"):  # of other slots only the context, which step 1 reads whole
        slots, h = slots[-1:], h[:, -1:]
    for d in range(1, depth + 1):
        if kind == "text":  # reads the text and the drafted tokens again
            places = torch.arange(slot + d)
            mask = torch.ones(len(places), len(places), dtype=torch.bool).tril()
            h, readout = drafter.step(
                1, h.new_zeros(1, len(places), 0), tokens[None, places], places[None], mask[None, None], None
            )
        else:
            if kind == "path" and d > 1:  # keys of step 1 of all slots, and of the steps of this slot
                slots, h, mask = slots[-1:], h[:, -1:], torch.ones(1, len(causal) + d - 1, dtype=torch.bool)
            elif kind == "depth":  # keys of this step at slots that need no drafted token, and at this slot
                mask = causal.tril(1 - d).triu(1 - window) | torch.eye(len(slots), dtype=torch.bool)
            else:
                mask = causal[-len(slots) :]
            positions = slots + d - 1
            h, readout = drafter.step(d, h, tokens[None, positions], positions[None], mask[None, None], cache)
        states.append(h[0, -1])
        logits.append((drafter.loss_logits if loss_logits else drafter.logits)(d, readout[:, -1:])[0, 0])
    return states, logits
