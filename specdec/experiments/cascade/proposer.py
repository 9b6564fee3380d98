"""The target itself drafts with a part of its cache, and verifies with all of it (TriForce, 2404.11912)."""

import torch
from torch import Tensor

from specdec.core import rules
from specdec.core.cache import RowCache
from specdec.core.compile import Runner
from specdec.core.option_types import Count, Whole
from specdec.core.tree import make_chain
from specdec.proposers.base import Proposer, select_last
from specdec.target.model import Target
from specdec.target.verifier import Verifier


class Cascade(Proposer):
    """The proposer, which is useful if a pass spends most of its time on a long context.

    Each round takes another part of a row's cache: the first `sinks` entries and the last `window` entries. `inner`
    drafts for the target on that part, which verifies token by token, until every row has exactly `num` drafts. These
    have the target's distributions on the part, and the verification by the full target uses them. Only the full target
    applies a repetition penalty.
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
                f"inner={type(inner).__name__} cannot be rewound, so it cannot draft for a cascade: choose another "
                "inner=."
            )
        if not target.plain:
            raise ValueError(
                f"{target.name} has layers that do not keep every token's entries alike, so no part of them can be "
                "chosen for a cascade: choose another proposer."
            )
        if target.on_several_devices:
            raise ValueError(
                f"The layers of {target.name} are on several devices, and a cascade needs one: set target.device=cuda."
            )
        self.target, self.inner_proposer = target, inner
        self.depth, self.sinks, self.window = num, sinks, window
        self.budget = sinks + window  # entries of the part
        self.target_layers = inner.target_layers
        self.runner = Runner(compile)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds + self.inner_proposer.compile_seconds

    def attach_cache(self, cache):
        self.full = cache
        num_layers, _, num_rows, num_heads, _, head_dim = cache.entry_tensor.shape
        self.part_cache = RowCache.uniform(
            num_layers=num_layers,
            batch=num_rows,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=cache.entry_tensor.dtype,
            device=cache.entry_tensor.device,
            capacity=self.budget + 2 * self.depth + self.inner_proposer.depth + 1,  # grows if a tree needs more
        )
        self.inner_proposer.attach_cache(self.part_cache)

    def begin(self, tokens, num):
        self.inner_proposer.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.last_tokens = select_last(tokens, num)  # [B]
        self.inner_proposer.commit(tokens, features, num, counts)

    @torch.no_grad()
    def propose(self, sampling, generator):
        num, part_cache, proposer = self.depth, self.part_cache, self.inner_proposer
        verifier = Verifier(
            self.target,
            sampling=sampling,
            rule="token",
            runner=self.runner,
            hidden_states=self.target_layers,
            distribution=True,
        )
        draws = rules.Draws(generator)
        self._fill_part_cache()
        mark = proposer.mark()
        tokens = self.last_tokens[:, None].repeat(1, 2 + num)  # [B, 2 + num] root, drafts, and a place for the surplus
        probs: Tensor | None = None  # [B, 2 + num, V]
        # [B] drafts so far; the same on the host
        num_drafted, host_drafted = (
            torch.zeros_like(self.last_tokens),
            [0] * len(tokens),
        )
        while min(host_drafted) < num:
            tree = proposer.propose(sampling, generator)
            if self.runner.compile and proposer.varies:
                tree = tree.pad_to_power(proposer.depth)
            verdict = verifier(tree, part_cache, draws)
            path, following = verdict.follow_path(tree, proposer.depth)  # [B, P] each
            # A row takes no more than it still needs, so that the part keeps its size, but at least one: finished rows
            # take part until the last row is finished
            num_kept = torch.minimum(verdict.num_kept, (num - num_drafted).clamp(min=1))  # [B]
            positions = num_drafted[:, None] + torch.arange(1, 1 + path.shape[1], device=num_drafted.device)  # [B, P]
            needed = (positions <= num) & (positions <= (num_drafted + num_kept)[:, None])
            positions = torch.where(needed, positions, 1 + num)
            tokens.scatter_(1, positions, following)
            if verdict.distribution is not None:
                if probs is None:
                    probs = verdict.distribution.new_zeros(*tokens.shape, verdict.distribution.shape[-1])
                probs[part_cache.rows, positions] = verdict.distribution[part_cache.rows, path]
            num_drafted = num_drafted + num_kept
            if not tree.linear:
                part_cache.keep_path(path)
            counts = num_kept.tolist()
            host_drafted = [before + count for before, count in zip(host_drafted, counts)]
            part_cache.commit(num_kept, counts)
            proposer.commit(following, verdict.output.features[part_cache.rows, path], num_kept, counts)
        proposer.rewind(mark)
        return make_chain(tokens[:, : 1 + num], None if probs is None else probs[:, : 1 + num])

    def _fill_part_cache(self) -> None:
        self.part_cache.copy_entries(self.full, self._select_entries())

    def _select_entries(self) -> Tensor:
        """Indices [layers, B, heads, M] of the full cache's entries that the part has; short rows are filled up."""
        full = self.full
        positions = torch.arange(min(self.budget, full.get_seq_length()), device=full.entry_tensor.device)
        start = (full.lengths - self.budget).clamp(min=0)[:, None]  # [B, 1] entries that a row leaves out
        selected = torch.where(positions < self.sinks, positions, positions + start)  # [B, M]
        return selected[None, :, None].expand(full.entry_tensor.shape[0], -1, full.entry_tensor.shape[3], -1)
