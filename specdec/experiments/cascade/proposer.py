"""Drafts are made by the target itself with a part of its cache, and verified with all of it (TriForce, 2404.11912)."""

import torch
from torch import Tensor

from specdec.core import rules
from specdec.core.cache import RowCache
from specdec.core.compile import Runner
from specdec.core.option_types import Count, Whole
from specdec.core.tree import chain
from specdec.proposers.base import Proposer, last_of
from specdec.target.model import Target
from specdec.target.verifier import Verifier


class Cascade(Proposer):
    """Useful if a pass spends most of its time on a long context: passes over a part of the cache do not.

    The part of a row's cache is chosen anew each round: the first `sinks` entries and the last `window` entries. `inner` drafts
    for the target on that part, which verifies token by token, until every row has exactly `num` drafts. These have the
    distributions of the target on the part, and verification by the full target uses them. Only the full target applies a
    repetition penalty.
    """

    linear = True

    def __init__(
        self,
        target: Target,
        *,
        inner: Proposer,
        num: Count,
        sinks: Whole,
        window: Count,
        compile: bool | None = False,
    ):
        if not inner.rewinds:
            raise ValueError(
                f"inner={type(inner).__name__} cannot be rewound, so it cannot draft for a cascade: choose another inner=."
            )
        if not target.plain:
            raise ValueError(
                f"{target.name} has layers that do not keep every token's entries alike, so no part of them can be chosen for a "
                "cascade: choose another proposer."
            )
        if target.spread:
            raise ValueError(
                f"The layers of {target.name} are on several devices, and a cascade needs one: set target.device=cuda."
            )
        self.target, self.inner = target, inner
        self.depth, self.sinks, self.window = num, sinks, window
        self.budget = sinks + window  # entries of the part
        self.target_layers = inner.target_layers
        self.runner = Runner(compile)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds + self.inner.compile_seconds

    def share(self, cache):
        self.full = cache
        num_layers, _, num_rows, num_heads, _, head_dim = cache.data.shape
        self.part = RowCache.alike(
            num_layers=num_layers,
            batch=num_rows,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=cache.data.dtype,
            device=cache.data.device,
            capacity=self.budget + 2 * self.depth + self.inner.depth + 1,  # grows if a tree needs more
        )
        self.inner.share(self.part)

    def begin(self, tokens, num):
        self.inner.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.newest = last_of(tokens, num)  # [B]
        self.inner.commit(tokens, features, num, counts)

    @torch.no_grad()
    def propose(self, sampling, generator):
        num, part, inner = self.depth, self.part, self.inner
        verifier = Verifier(
            self.target,
            sampling=sampling,
            rule="token",
            runner=self.runner,
            hidden_states=self.target_layers,
            distribution=True,
        )
        draws = rules.Draws(generator)
        self._take_part()
        mark = inner.mark()
        tokens = self.newest[:, None].repeat(1, 2 + num)  # [B, 2 + num] root, drafts, and a place for the surplus
        probs: Tensor | None = None  # [B, 2 + num, V]
        done, known = torch.zeros_like(self.newest), [0] * len(tokens)  # [B] drafts so far; the same on the host
        while min(known) < num:
            tree = inner.propose(sampling, generator)
            if self.runner.compile and inner.varies:
                tree = tree.rounded(inner.depth)
            verdict = verifier(tree, part, draws)
            path, following = verdict.along(tree, inner.depth)  # [B, P] each
            # A row takes no more than it still needs, so that the part keeps its size, but at least one: finished rows
            # take part until the last row is finished
            kept = torch.minimum(verdict.num_kept, (num - done).clamp(min=1))  # [B]
            place = done[:, None] + torch.arange(1, 1 + path.shape[1], device=done.device)  # [B, P]
            wanted = (place <= num) & (place <= (done + kept)[:, None])
            place = torch.where(wanted, place, 1 + num)
            tokens.scatter_(1, place, following)
            if verdict.distribution is not None:
                if probs is None:
                    probs = verdict.distribution.new_zeros(*tokens.shape, verdict.distribution.shape[-1])
                probs[part.rows, place] = verdict.distribution[part.rows, path]
            done = done + kept
            if not tree.linear:
                part.keep(path)
            counts = kept.tolist()
            known = [before + count for before, count in zip(known, counts)]
            part.commit(kept, counts)
            inner.commit(following, verdict.output.features[part.rows, path], kept, counts)
        inner.rewind(mark)
        return chain(tokens[:, : 1 + num], None if probs is None else probs[:, : 1 + num])

    def _take_part(self) -> None:
        self.part.take_part(self.full, self._entries())

    def _entries(self) -> Tensor:
        """The full cache's entries that the part has: [layers, B, heads, M], short rows filled up."""
        full = self.full
        place = torch.arange(min(self.budget, full.get_seq_length()), device=full.data.device)
        start = (full.lengths - self.budget).clamp(min=0)[:, None]  # [B, 1] entries that a row leaves out
        chosen = torch.where(place < self.sinks, place, place + start)  # [B, M]
        return chosen[None, :, None].expand(full.data.shape[0], -1, full.data.shape[3], -1)
