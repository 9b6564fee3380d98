"""The target itself, reading a part of its cache, drafts for the target that reads all of it (TriForce, 2404.11912)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec import rules
from specdec.cache import RowCache
from specdec.compile import Runner
from specdec.proposers.base import Proposer, last_of
from specdec.target import Target
from specdec.tree import chain
from specdec.verifier import Verifier


class Cascade(Proposer):
    """Worth it where a pass spends its time on a long context: the partial target's passes do not.

    The part of a row's cache, taken anew each round: its first `sinks` entries, its last `window`, and the `chunks` chunks
    of `chunk` entries between them whose keys are most like the newest ones. `inner` drafts for the target on that part,
    which verifies token by token, until every row has exactly `num` drafts; each is distributed as the partial target
    says, so its laws are those that the full target's verification needs. A repetition penalty is left to that.
    """

    def __init__(
        self,
        target: Target,
        *,
        inner: Proposer,
        num: int,
        sinks: int,
        window: int,
        chunks: int,
        chunk: int,
        compile: bool = False,
    ):
        for name, value, least in (("num", num, 1), ("sinks", sinks, 0), ("window", window, 1), ("chunks", chunks, 0)):
            if value < least:
                raise ValueError(f"proposer.{name}={value} must be at least {least}.")
        if chunk < 1:
            raise ValueError(f"proposer.chunk={chunk} must be at least 1; proposer.chunks=0 takes none.")
        if not inner.rewinds:
            raise ValueError(
                f"proposer.inner: {type(inner).__name__} cannot take back what it was told, so it cannot draft for a cascade."
            )
        self.target, self.inner = target, inner
        self.depth = num
        self.sinks, self.window, self.chunks, self.chunk = sinks, window, chunks, chunk
        self.target_layers = inner.target_layers
        self.runner = Runner(compile)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds + self.inner.compile_seconds

    @property
    def budget(self) -> int:
        """Entries of the part."""
        return self.sinks + self.window + self.chunks * self.chunk

    def share(self, cache):
        self.full = cache
        num_layers, _, num_rows, num_heads, _, head_dim = cache.data.shape
        self.part = RowCache(
            num_layers=num_layers,
            batch=num_rows,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=cache.data.dtype,
            device=cache.data.device,
            capacity=self.budget + 2 * self.depth + self.inner.depth + 1,  # a tree of `inner` may want more
        )
        self.means = cache.data.new_zeros(num_layers, num_rows, num_heads, 0, head_dim)  # of each chunk's keys
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
            layers=self.target_layers,
            law=True,
        )
        draws = rules.Draws(generator)
        self._take_part()
        mark = inner.mark()
        rows = part.rows
        tokens = self.newest[:, None].repeat(
            1, 2 + num
        )  # [B, 2 + num] the root, the drafts, and a place for the surplus
        laws: Tensor | None = None  # [B, 2 + num, V]
        done, known = torch.zeros_like(self.newest), [0] * len(tokens)  # [B] drafts so far; the same on the host
        while min(known) < num:
            tree = inner.propose(sampling, generator)
            if self.runner.compile and inner.varies:
                tree = tree.rounded(inner.depth)
            judged = verifier(tree, part, draws)
            path, following = judged.along(tree, inner.depth)  # [B, P] each
            kept = torch.minimum(judged.num_kept, (num - done).clamp(min=1))  # [B] no more than is wanted, so that the
            counts = kept.tolist()  # part keeps its size; but one, for every row goes on until the last is done
            place = done[:, None] + torch.arange(1, 1 + path.shape[1], device=done.device)  # [B, P]
            wanted = (place <= num) & (place <= (done + kept)[:, None])
            place = torch.where(wanted, place, 1 + num)
            tokens.scatter_(1, place, following)
            if judged.law is not None:
                if laws is None:
                    laws = judged.law.new_zeros(*tokens.shape, judged.law.shape[-1])
                laws[rows, place] = judged.law[rows, path]
            done = done + kept
            known = [before + count for before, count in zip(known, counts)]
            if not tree.linear:
                part.keep(path)
            part.commit(kept, counts)
            inner.commit(following, judged.output.features[rows, path], kept, counts)
        inner.rewind(mark)
        return chain(tokens[:, : 1 + num], None if laws is None else laws[:, : 1 + num])

    def _take_part(self) -> None:
        full, part = self.full, self.part
        entries = self._entries()
        part.pending, num = 0, entries.shape[-1]
        flat = full.data.flatten(0, 4)  # [layers * 2 * B * heads * C, head_dim]
        first = torch.arange(0, len(flat), full.visible, device=flat.device)  # where each K or V of a head begins
        wanted = first.view(*full.data.shape[:4], 1) + entries[:, None]  # [layers, 2, B, heads, M]
        part.data[..., :num, :] = flat.index_select(0, wanted.flatten()).view(*wanted.shape, -1)
        part.lengths = full.lengths.clamp(max=self.budget)
        part.known = [min(known, self.budget) for known in full.known]
        part.skipped = full.lengths - part.lengths

    def _entries(self) -> Tensor:
        """Which of the full cache's entries the part has, in any order: [layers, B, heads, M], short rows filled up."""
        full, device = self.full, self.full.data.device
        shape = *full.data.shape[0:3:2], full.data.shape[3], -1
        everything = torch.arange(min(self.budget, full.longest), device=device)  # what a short row takes
        if full.longest <= self.budget:
            return everything.expand(*shape)
        start = (full.lengths - self.window).clamp(min=0)[:, None, None]  # [B, 1, 1] of the window
        parts = [torch.arange(self.sinks, device=device), start + torch.arange(self.window, device=device)]
        if self.chunks:
            parts.append(self._likely(start))
        some = torch.cat([part.expand(*shape) for part in parts], dim=-1)
        return torch.where(full.lengths[:, None, None] <= self.budget, everything, some)

    def _likely(self, start: Tensor) -> Tensor:
        """The entries of the chunks whose mean key is most like the newest key. start [B, 1, 1] -> [layers, B, heads, .]"""
        full, size = self.full, self.chunk
        known, num = self.means.shape[3], (full.longest - self.window - self.sinks) // size
        keys = full.data[:, 0, :, :, self.sinks + known * size : self.sinks + num * size]
        means = torch.cat(
            [self.means, keys.unflatten(3, (num - known, size)).mean(4)], dim=3
        )  # [layers, B, heads, chunks, .]
        self.means = means[:, :, :, : max(0, min(full.known) - self.sinks) // size]  # the others' entries may change
        newest = full.data[:, 0, full.rows[:, 0], :, full.lengths - 1].transpose(0, 1)  # [layers, B, heads, head_dim]
        likeness = F.cosine_similarity(newest[:, :, :, None], means, dim=-1)
        first = self.sinks + size * torch.arange(num, device=start.device)  # [chunks]
        best = first[likeness.masked_fill(first + size > start, -torch.inf).topk(self.chunks).indices]
        return (best[..., None] + torch.arange(size, device=start.device)).flatten(3)
