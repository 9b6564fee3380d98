"""Prompts that join a batch together, read in pieces."""

import torch
from torch import Tensor

from specdec.core.cached_keys import count_piece_tokens
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

    def advance(self, max_tokens: int | None = None) -> None:
        """Reads a piece, or all prompts if they are not divisible. max_tokens: bound of tokens of all with padding"""
        if self.complete:
            return
        start, num_rows, length = self.num_read, len(self.counts), self.tokens.shape[1]
        if self.target.divisible:
            length = count_piece_tokens(self.target.device, num_rows)
            length = length if max_tokens is None else min(length, max(1, max_tokens // num_rows))
        tokens = self.tokens[:, start : start + length]
        counts = [min(max(0, count - start), tokens.shape[1]) for count in self.counts]
        self.outputs.append(self.target.read_piece(tokens, self.layers, self.cache, counts))
        self.num_read += tokens.shape[1]

    def output(self) -> tuple[Tensor, Tensor]:
        """Returns the last state of each prompt [R, D] and all features [R, T, F*D], once all tokens are read."""
        final, features = self.outputs[0].final, self.outputs[0].features
        if len(self.outputs) > 1:
            final = torch.cat([output.final for output in self.outputs], dim=1)
            features = torch.cat([output.features for output in self.outputs], dim=1)
        return final[self.cache.rows[:, 0], self.num - 1], features
