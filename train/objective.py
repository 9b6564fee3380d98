"""The training objective: unroll, then judge every goal at every depth."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.drafter import Drafter
from specdec.target import TargetOutput
from specdec.unroll import unroll
from train import losses
from train.data import Batch

LOSSES = {
    name: function
    for name, function in inspect.getmembers(losses, inspect.isfunction)
    if function.__module__ == losses.__name__
}


@dataclass(frozen=True)
class Loss:
    """Sums over the batch's judged slots, so that the mean can be taken over all processes and micro-batches."""

    total: Tensor  # scalar, weighted by depth (decay ** (d - 1), normalised) and by the losses' weights
    num_goals: Tensor  # scalar: supervised tokens, the divisor
    matches: Tensor  # [K, B, T] bool: the guess of depth d for token i is the token that the text has


class Objective(nn.Module):
    """This, not the drafter, is what accelerate prepares: gradient synchronisation lives in a module's `forward`.

    losses: weights by name, of the functions in train/losses.py; what has weight 0 is not computed
    depth: steps of the unroll (EAGLE-3's training-time test); decay: weight of a step relative to the one before
    temperature: of both laws in losses on logits
    noise: half-width of the uniform noise on features, EAGLE-1's augmentation
    chunk: goals whose [., W] logits exist at a time
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        losses: dict[str, float],
        depth: int,
        decay: float,
        temperature: float,
        noise: float,
        chunk: int,
    ):
        super().__init__()
        used = {name: weight for name, weight in losses.items() if weight}
        if not used or set(used) - set(LOSSES):
            raise ValueError(
                f"head.objective.losses={dict(losses)}: give weights to some of {', '.join(sorted(LOSSES))}."
            )
        if drafter.depth is not None and depth > drafter.depth:
            raise ValueError(f"head.objective.depth={depth} is more than this drafter's {drafter.depth} steps.")
        self.drafter = drafter
        self.losses, self.depth, self.decay = used, depth, decay
        self.temperature, self.noise, self.chunk = temperature, noise, chunk
        weights = [decay**step for step in range(depth)]
        self.shares = [weight / sum(weights) for weight in weights]  # [K]

    def forward(self, batch: Batch, output: TargetOutput) -> Loss:
        features = output.features
        if self.noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise
        unrolled = unroll(
            self.drafter,
            batch.tokens,
            features,
            documents=batch.documents,
            positions=batch.positions,
            goals=batch.loss_mask,
            depth=self.depth,
        )
        goals = batch.loss_mask.nonzero()  # [G, 2] row and position
        matches = torch.zeros(self.depth, *batch.tokens.shape, dtype=torch.bool, device=goals.device)  # [K, B, T]
        total = torch.zeros((), device=goals.device)
        chunks = goals.split(self.chunk)
        for chunk in chunks:
            # With one chunk its logits are kept for the backward pass; with several they are made again there.
            if len(chunks) > 1 and torch.is_grad_enabled():
                part, hits = checkpoint(self._judge, chunk, batch, output.final, unrolled, use_reentrant=False)
            else:
                part, hits = self._judge(chunk, batch, output.final, unrolled)
            total = total + part
            matches[:, chunk[:, 0], chunk[:, 1]] = hits
        return Loss(total, torch.tensor(len(goals), device=goals.device), matches)

    def _judge(self, goals: Tensor, batch: Batch, final: Tensor, unrolled) -> tuple[Tensor, Tensor]:
        """goals [M, 2] -> the weighted sum of losses, matches [K, M]"""
        drafter = self.drafter
        rows, position = goals.unbind(1)
        tokens = batch.tokens[rows, position]  # [M]
        token = tokens if drafter.target_to_draft is None else drafter.target_to_draft[tokens]
        judge = final[rows, position - 1]  # [M, D]
        with torch.no_grad():
            goal_logits = drafter.goal_logits(judge).float() / self.temperature  # [M, W]
        total, hits = torch.zeros((), device=goals.device), []
        for d in range(1, self.depth + 1):
            readout, exists = unrolled.at(unrolled.readouts, d, rows, position)
            state, _ = unrolled.at(unrolled.states, d, rows, position)
            logits = drafter.logits(d, readout).float()  # [M, W]
            judged = losses.Judged(state, logits / self.temperature, judge, goal_logits, token)
            for name, weight in self.losses.items():
                total = total + self.shares[d - 1] * weight * (LOSSES[name](judged) * exists).sum()
            hits.append((drafter.to_target(logits.argmax(-1)) == tokens) & exists)
        return total, torch.stack(hits)


def slots(batch: Batch, output: TargetOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Every slot of a batch for `Drafter.solve`: tokens x_j [M], features f_(j-1) [M, F*D], final states at j [M, D]"""
    real = batch.positions[:, 1:] > 0  # [B, T-1]
    return batch.tokens[:, 1:][real], output.features[:, :-1][real], output.final[:, 1:][real]
