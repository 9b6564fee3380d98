"""The exact distribution of what transformers' `generate` samples, and how far tokens are from a distribution."""

import itertools

import torch
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def law_of(model, ids: torch.Tensor, mask: torch.Tensor, num: int, settings: dict) -> torch.Tensor:
    """The distribution [V ** num] of the next `num` tokens, by transformers' own processors, after ids and mask [1,
    T].
    """
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(settings.get("temperature", 1.0)))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    vocab_size = model.config.vocab_size
    probabilities = torch.ones(1, dtype=torch.float64)
    for length in range(num):
        texts = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)), dtype=torch.long).view(
            vocab_size**length, length
        )
        tokens = torch.cat([ids.expand(vocab_size**length, -1), texts], dim=1)
        seen = torch.cat([mask.expand(vocab_size**length, -1), torch.ones_like(texts)], dim=1)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(tokens, attention_mask=seen, position_ids=positions).logits[:, -1]
        probabilities = (probabilities[:, None] * processors(tokens, logits).softmax(-1)).flatten()
    return probabilities


def distance(tokens: torch.Tensor, distribution: torch.Tensor) -> float:
    """Chi-square of the last two of tokens [N, 3] under a distribution [V ** 3], in standard deviations above its
    mean.
    """
    vocab_size = round(len(distribution) ** (1 / 3))
    places = tokens @ torch.tensor([0, vocab_size, 1])
    counts = torch.bincount(places, minlength=vocab_size**2).double()
    expected = len(tokens) * distribution.view(vocab_size, -1).sum(0)
    common = expected >= 5
    counts, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected))
    freedom = int((expected > 0).sum()) - 1
    assert freedom > 5
    statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5
