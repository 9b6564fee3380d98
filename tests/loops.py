"""Independent slow ways to what the project computes: by transformers, by a model of some layers, by the slot rule."""

import copy

import torch
from torch import nn
from transformers import DynamicCache

from specdec.target import Target


def transformers_answer(target, prompt: list[int], num: int, penalty: float = 1.0) -> list[int]:
    """Greedy decoding by transformers."""
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "repetition_penalty": penalty, "max_new_tokens": num, "pad_token_id": 0}
    out = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logits_of_layers(target: Target, numbers, text: list[int], later: list[int]) -> torch.Tensor:
    """A model of these layers alone reads `later` after keys and values that the whole target made of `text`.

    -> logits [len(later), V]
    """
    whole, part = DynamicCache(), DynamicCache()
    target.model(torch.tensor([text]), past_key_values=whole)
    model = copy.deepcopy(target.model)
    model.config.num_hidden_layers = len(numbers)
    model.model.layers = nn.ModuleList(model.model.layers[number] for number in numbers)
    for place, number in enumerate(numbers):
        model.model.layers[place].self_attn.layer_idx = place
        part.update(whole.layers[number].keys, whole.layers[number].values, place)
    return model(torch.tensor([later]), past_key_values=part).logits[0]


# The slot rule as a loop


class DenseKeys:
    """In the place of a cache: keeps the keys and values of all calls, and attends to what a dense mask allows."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # K, V [B, heads, entries, head_dim]

    def look(self, layer: int):
        return self.layers[layer]

    def update(self, key, value, layer: int) -> None:
        known = self.layers.get(layer)
        self.layers[layer] = (
            tuple(torch.cat(pair, dim=2) for pair in zip(known, (key, value))) if known else (key, value)
        )

    def attend(self, layer: int, query, key, value, mask):
        self.update(key, value, layer)
        keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in self.look(layer))
        scores = (query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ values


@torch.no_grad()
def follow(drafter, tokens, features, slot: int, depth: int):
    """What the slot rule says of one slot: steps 1 .. depth along the given tokens, one step after the other.

    Independent of both loops: neither a proposer and its cache nor the unroll has a part in it.
    tokens [T]; features [T, F*D], of which those before the slot are read -> states [H] and logits [W] of each step
    """
    first, kind = drafter.first_slot, drafter.attends
    cache, states, logits = DenseKeys(), [], []
    slots = torch.arange(first, slot + 1)  # [S]
    causal = torch.ones(len(slots), len(slots), dtype=torch.bool).tril()
    h = drafter.encode(features[None, :slot]) if first else features.new_zeros(1, len(slots), 0)  # f_(j-1) of each slot
    if kind == "block":
        drafter.context(h, slots[None] - 1, cache)
    if kind in ("none", "block"):  # nothing of other slots but the context, which step 1 sees whole
        slots, h = slots[-1:], h[:, -1:]
    for d in range(1, depth + 1):
        if kind == "text":  # the text, with what is drafted, read again
            places = torch.arange(slot + d)
            mask = torch.ones(len(places), len(places), dtype=torch.bool).tril()
            h, readout = drafter.step(1, h.new_zeros(1, len(places), 0), tokens[None, places], places[None], mask[None, None], None)  # fmt: skip
        else:
            if kind == "path" and d > 1:  # keys of all slots' step 1, and of this slot's own steps
                slots, h, mask = slots[-1:], h[:, -1:], torch.ones(1, len(causal) + d - 1, dtype=torch.bool)
            elif kind == "depth":  # keys of this step at slots that need no drafted token, and its own
                mask = causal.tril(1 - d) | torch.eye(len(slots), dtype=torch.bool)
            else:
                mask = causal[-len(slots) :]
            at = slots + d - 1
            h, readout = drafter.step(d, h, tokens[None, at], at[None], mask[None, None], cache)
        states.append(h[0, -1])
        logits.append(drafter.logits(d, readout[:, -1:])[0, 0])
    return states, logits
