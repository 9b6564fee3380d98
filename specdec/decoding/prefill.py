"""Prompts that join a batch together, read in pieces."""

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.clock import Moment
from specdec.target.model import Target, TargetOutput


class Prefill:
    """Prompts that join a batch together, read up to some place.

    layers: numbers of the hidden states that are kept
    `tokens` [R, T]: prompts, right-padded; `num` [R]: their lengths, `counts` on the host
    `num_read`: tokens of each prompt that were read, padding included; `read_times`: start and end of each reading
    """

    def __init__(self, target: Target, layers: tuple[int, ...], prompts: list[list[int]]):
        self.target, self.layers = target, layers
        self.counts = [len(prompt) for prompt in prompts]
        self.num = torch.tensor(self.counts, device=target.device)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        self.tokens = padded.to(target.device)
        self.cache = target.cache(len(prompts))
        self.num_read = 0
        self.read_times: list[tuple[Moment, Moment]] = []
        self.outputs: list[TargetOutput] = []

    @property
    def complete(self) -> bool:
        """Whether all tokens were read."""
        return self.num_read == self.tokens.shape[1]

    @property
    def divisible(self) -> bool:
        """Whether reading in pieces gives the same states as reading at once.

        Windows, recurrent states and LongRoPE's angles need the whole prompt.
        """
        target = self.target
        return not (target.windowed or target.recurrent) and target.rotary_boundary is None

    def advance(self, max_tokens: int | None = None) -> None:
        """Reads on in the prompts. max_tokens: number of tokens of all prompts with padding; None: all that remain"""
        start, end = self.num_read, self.tokens.shape[1]
        if start == end:
            return
        if max_tokens is not None and self.divisible:
            end = min(end, start + max(1, max_tokens // len(self.counts)))
        length, device = end - start, self.target.device
        counts = [min(max(0, count - start), length) for count in self.counts]
        self.cache.reserve(length, counts)
        positions = torch.arange(start, end, device=device).expand(len(counts), -1)
        self.cache.opening = start == 0 and self.target.reads_openings
        mask = None
        if not self.cache.opening:
            mask = masks.pending_mask(masks.causal_mask(length, device), self.cache.lengths, self.cache.visible)
        piece = self.tokens[:, start:end]
        self.outputs.append(self.target.read(piece, self.layers, positions=positions, mask=mask, cache=self.cache))
        self.cache.opening = False
        self.cache.commit((self.num - start).clamp(0, length), counts)
        self.num_read = end

    def output(self) -> tuple[Tensor, Tensor]:
        """Returns the last state of each prompt [R, D] and all features [R, T, F*D], once all tokens are read."""
        final, features = self.outputs[0].final, self.outputs[0].features
        if len(self.outputs) > 1:
            final = torch.cat([output.final for output in self.outputs], dim=1)
            features = torch.cat([output.features for output in self.outputs], dim=1)
        return final[self.cache.rows[:, 0], self.num - 1], features
