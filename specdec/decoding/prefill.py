"""Reading prompts, whole or in pieces with rounds of other rows between them."""

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.clock import Moment
from specdec.target.model import Target, TargetOutput


class Prefill:
    """Prompts that join a batch together, as far as they were read.

    layers: hidden states that are kept
    tokens [R, T]: the prompts, right-padded; num [R]: their lengths, `counts` on the host
    pieces: where the reading of each piece began and ended
    """

    def __init__(self, target: Target, layers: tuple[int, ...], prompts: list[list[int]]):
        self.target, self.layers = target, layers
        self.counts = [len(prompt) for prompt in prompts]
        self.num = torch.tensor(self.counts, device=target.device)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        self.tokens = padded.to(target.device)
        self.cache = target.cache(len(prompts))
        self.place, self.pieces = 0, list[tuple[Moment, Moment]]()
        self.outputs: list[TargetOutput] = []

    @property
    def done(self) -> bool:
        return self.place == self.tokens.shape[1]

    @property
    def divisible(self) -> bool:
        """Whether pieces give what the whole gives: windows, recurrent states and LongRoPE's angles need the whole prompt."""
        target = self.target
        return not (target.windowed or target.recurrent) and target.rotary_boundary is None

    def advance(self, most: int | None = None) -> None:
        """Reads on. most: tokens, of all prompts together, with their padding; None: all that are left"""
        start, end = self.place, self.tokens.shape[1]
        if start == end:
            return
        if most is not None and self.divisible:
            end = min(end, start + max(1, most // len(self.counts)))
        length, device = end - start, self.target.device
        counts = [min(max(0, count - start), length) for count in self.counts]
        self.cache.reserve(length, counts)
        positions = torch.arange(start, end, device=device).expand(len(counts), -1)
        mask = masks.pending(masks.causal(length, device), self.cache.lengths, self.cache.visible)
        piece = self.tokens[:, start:end]
        self.outputs.append(self.target.read(piece, self.layers, positions=positions, mask=mask, cache=self.cache))
        self.cache.commit((self.num - start).clamp(0, length), counts)
        self.place = end

    def output(self) -> tuple[Tensor, Tensor]:
        """Once all is read -> the last state of each prompt [R, D], and the features of all tokens [R, T, F*D]"""
        final, features = self.outputs[0].final, self.outputs[0].features
        if len(self.outputs) > 1:
            final = torch.cat([output.final for output in self.outputs], dim=1)
            features = torch.cat([output.features for output in self.outputs], dim=1)
        return final[self.cache.rows[:, 0], self.num - 1], features
