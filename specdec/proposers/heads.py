"""A trained drafter's step over a tree: chains, EAGLE-2 trees (2406.16858), sampled trees, products of parallel heads."""

import heapq
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec import masks
from specdec.cache import RowCache
from specdec.compile import Runner
from specdec.drafter import Drafter
from specdec.proposers.base import Proposer, last_of
from specdec.sampling import Sampling, pick, uniforms
from specdec.tree import Tree, TreeShape, chain, root

Children = Literal["chosen", "distinct", "independent"]


def check_children(children: str) -> None:
    """Raises ValueError unless it is one of `Children`."""
    if children not in get_args(Children):
        raise ValueError(f"decode.children={children} must be chosen, distinct or independent.")


@dataclass(frozen=True)
class Stopping:
    """When to draft no deeper: once a draft's estimated chance to survive verification is below `threshold`.

    The chance of one more draft is sigmoid(bias + weight * x + confidence_weight * c), where x is the log-odds of the
    drafter's likeliest token and c what its confidence head says, if it has one; the chance of a path is their product.
    Nothing here looks at a token that was drawn and not yet offered, so sampling stays lossless (methods, 1.4).
    """

    weight: float = 1.0
    bias: float = 0.0
    confidence_weight: float = 0.0
    threshold: float = 0.0

    def log_chance(self, evidence: Tensor) -> Tensor:
        """evidence [B, 2], x and c -> [B]"""
        return F.logsigmoid(self.bias + self.weight * evidence[:, 0] + self.confidence_weight * evidence[:, 1])


class HeadProposer(Proposer):
    """Widens by joint log-probability, `width` nodes a depth, and keeps the best `nodes` (EAGLE-2).

    At temperature > 0 a chain's tokens are sampled from the drafter's law, and the law is handed on; a wider tree's nodes
    are chosen, by probabilities to which no temperature is applied. children: "distinct" or "independent" instead sample
    a tree of fixed shape, siblings without or with replacement.
    """

    rewinds = True

    def __init__(
        self,
        drafter: Drafter,
        shape: TreeShape,
        *,
        children: Children = "chosen",
        stopping: Stopping | None = None,
        compile: bool = False,
    ):
        check_children(children)
        if drafter.depth is not None and shape.depth > drafter.depth:
            raise ValueError(f"decode.depth={shape.depth} is more than this drafter's {drafter.depth} steps.")
        self.drafter = drafter.eval()
        self.shape = shape
        self.children = children
        self.stopping = stopping
        self.runner = Runner(compile)
        self.target_layers = drafter.target_layers
        self.depth = shape.depth
        self.evidence: list[Tensor] = []  # for each depth of the last round, [B, 2]: see Stopping

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds

    def begin(self, tokens, num):
        self.cache = self.drafter.cache(tokens.shape[0])
        self.opening = tokens[:, :1]  # [B, 1] the token of slot 0, which `commit` does not bring
        self.carried: list[Tensor] = []  # attends="depth": of modules 1..K-1, the state [B, 1, H] of their newest slot
        self.absorbed: list[Tensor] = []  # what `_first_step` found, until more is committed

    def commit(self, tokens, features, num, counts):
        if self.drafter.first_slot == 0 and self.cache.longest == 0:
            tokens, num, counts = torch.cat([self.opening, tokens], dim=1), num + 1, [count + 1 for count in counts]
        self.tokens, self.features, self.num, self.counts = tokens, features, num, counts
        self.absorbed = []

    @torch.no_grad()
    def mark(self):
        absorbed = self._first_step()  # now, for the next `commit` would replace what still waits
        return self.cache.lengths, self.cache.known, self.carried, absorbed

    def rewind(self, mark):
        self.cache.lengths, self.cache.known, self.carried, self.absorbed = mark  # later entries will be overwritten

    @torch.no_grad()
    def propose(self, sampling, generator):
        self.evidence = []
        newest, state, logits, evidence = self._first_step()
        draft = self._chain if self.shape.chain else self._tree if self._chooses(sampling) else self._sampled_tree
        tree = draft(newest[:, 0], state, logits, evidence, sampling, generator)
        self.cache.pending = 0
        return tree

    def _first_step(self) -> list[Tensor]:
        """Takes in what was committed. -> newest token [B, 1], state, logits [B, 1, .] and evidence [B, 2] of its step 1"""
        if self.absorbed:
            return self.absorbed
        drafts = max(self.shape.depth * self.shape.width, self.shape.nodes)  # levels of a sampled tree may be wider
        self.cache.make_room(self.tokens.shape[1] + drafts)
        opening = self.cache.longest == 0  # a prompt's shape seldom comes again: not worth compiling
        run = Runner() if opening else self.runner
        inputs = (self.tokens, self.features, self.num, self.cache.lengths, *self.cache.halves, *self.carried)
        *found, newest, state, logits, evidence = run(("absorb", self.shape.depth), self._absorb_all, *inputs)
        self.carried = found
        self.cache.commit(self.num, self.counts)
        self.absorbed = [newest, state, logits, evidence]
        return self.absorbed

    def _chooses(self, sampling: Sampling) -> bool:
        return sampling.greedy or self.children == "chosen"

    def _goes_on(self, evidence: Tensor) -> bool:
        """Whether a further draft is worth offering to any row; evidence [B, 2] of its law."""
        if self.stopping is None:
            return True
        self.evidence.append(evidence)
        if self.stopping.threshold == 0:
            return True
        chance = sum(map(self.stopping.log_chance, self.evidence), evidence.new_zeros(len(evidence))).exp()  # [B]
        return bool(chance.max() >= self.stopping.threshold)

    def _evidence(self, d: int, readout: Tensor, logits: Tensor) -> Tensor:
        """readout [B, w, R], logits [B, w, W] of step d -> [B, 2], of the first node; nothing if nobody asks for it"""
        if self.stopping is None:
            return logits.new_zeros(len(logits), 0)
        best = logits[:, 0].float().log_softmax(-1).max(-1).values  # [B]
        odds = best - torch.log1p(-best.exp().clamp(max=1 - 1e-6))
        confidence = self.drafter.confidence(d, readout[:, 0])
        return torch.stack([odds, torch.zeros_like(odds) if confidence is None else confidence.float()], dim=1)

    def _newest(self, values: Tensor, num: Tensor) -> Tensor:
        """[B, S, ...] of the newly committed -> [B, 1, ...] of each row's last"""
        return last_of(values, num)[:, None]

    def _absorb_all(self, tokens, features, num, lengths, *rest):
        """`_absorb`: what is carried on, then what `_first_step` returns."""
        halves, before = rest[: len(self.cache.halves)], rest[len(self.cache.halves) :]
        state, readout, *carried = self._absorb(tokens, features, num, self.cache.over(halves, lengths), before)
        logits = self.drafter.logits(1, readout)
        return *carried, self._newest(tokens, num), state, logits, self._evidence(1, readout, logits)

    def _absorb(self, tokens: Tensor, features: Tensor, num: Tensor, cache: RowCache, carried) -> tuple[Tensor, ...]:
        """Step 1 over the newly committed tokens with their true features; what later rounds look at stays in the cache.

        -> state, readout [B, 1, .] of step 1 of the newest slot, and what is carried on
        """
        drafter, num_new = self.drafter, tokens.shape[1]
        start = cache.lengths + drafter.first_slot  # [B] the first new slot
        positions = start[:, None] + torch.arange(num_new, device=start.device)  # [B, S]
        if drafter.first_slot == 0:
            h = features.new_zeros(*tokens.shape, 0)
        else:
            h = drafter.encode(features)
        cache.reserve(num_new)
        if drafter.attends in ("none", "block"):
            if drafter.attends == "block":
                drafter.context(h, positions - 1, cache)
            seen = masks.committed(cache.lengths + num, cache.visible)
            h, tokens, positions = (self._newest(x, num) for x in (h, tokens, positions))
            return drafter.step(1, h, tokens, positions, seen, cache)

        mask = masks.pending(masks.causal(num_new, start.device), cache.lengths, cache.visible)
        state, readout = drafter.step(1, h, tokens, positions, mask, cache)
        last = self._absorb_deeper(state, tokens, num, positions, mask, cache, carried)
        return self._newest(state, num), self._newest(readout, num), *last

    def _absorb_deeper(self, state, tokens, num, positions, mask, cache, carried) -> list[Tensor]:
        """attends="depth": modules 2..K read the new tokens too, each one slot further back; state [B, S, H] of module 1.

        An entry of the cache stands for a token: module d's is that of the slot whose step d reads this token.
        """
        last: list[Tensor] = []
        for d in range(2, self.shape.depth + 1 if self.drafter.attends == "depth" else 2):
            before = carried[d - 2] if carried else torch.zeros_like(state[:, :1])
            last.append(self._newest(state, num))
            h = torch.cat([before, state[:, :-1]], dim=1)
            state, _ = self.drafter.step(d, h, tokens, positions, _lagging(mask, d, cache), cache)
        return last

    def _step(self, d: int, state, tokens, seen, cache: RowCache) -> tuple[Tensor, Tensor, Tensor]:
        """Step d of drafted nodes. state [B, w, H], tokens [B, w], seen [B, w, P] -> state, logits, evidence"""
        drafter, mask = self.drafter, None
        positions = (cache.lengths + drafter.first_slot + d - 2)[:, None].expand_as(tokens)
        if drafter.attends not in ("none", "block"):
            cache.reserve(tokens.shape[1])
            if drafter.attends == "depth":
                seen = torch.zeros_like(seen)  # the nodes before it are those of other modules; it sees itself
            mask = masks.pending(seen, cache.lengths, cache.visible)
            if drafter.attends == "depth":
                mask = _lagging(mask, d, cache)
        state, readout = drafter.step(d, state, tokens, positions, mask, cache)
        logits = drafter.logits(d, readout)
        return state, logits, self._evidence(d, readout, logits)

    def _take_step(self, d: int, pending: int, state, tokens, seen) -> tuple[Tensor, Tensor, Tensor]:
        """`_step`, compiled, with `pending` drafted entries in the cache."""

        def step(state, tokens, seen, lengths, *halves):
            cache = self.cache.over(halves, lengths)
            cache.pending = pending
            return self._step(d, state, tokens, seen, cache)

        cache = self.cache
        return self.runner(("step", d, pending), step, state, tokens, seen, cache.lengths, *cache.halves)

    def _chain(self, newest, state, logits, evidence, sampling, generator) -> Tree:
        tokens, laws = [newest], []
        seen = masks.causal(self.shape.depth, newest.device).expand(len(newest), -1, -1)
        for d in range(1, self.shape.depth + 1):
            if not self._goes_on(evidence):
                break
            if sampling.greedy:
                draft = logits[:, 0].argmax(-1)
            else:
                laws.append(sampling.law(logits[:, 0]))  # [B, W]
                draft = pick(laws[-1], uniforms(len(newest), generator, newest.device))
            tokens.append(self.drafter.to_target(draft))
            if d < self.shape.depth:
                state, logits, evidence = self._take_step(
                    d + 1, d - 1, state, tokens[-1][:, None], seen[:, d - 1 : d, :d]
                )
        return chain(torch.stack(tokens, dim=1), self._spread(laws) if laws else None)

    def _spread(self, laws: list[Tensor]) -> Tensor:
        """Laws over the draft vocabulary, [B, W] each -> [B, 1 + N, V]; nothing is on the root and off the list."""
        law = torch.stack([torch.zeros_like(laws[0]), *laws], dim=1)  # [B, 1 + N, W]
        if self.drafter.draft_to_target is None:
            return law
        wide = law.new_zeros(*law.shape[:2], self.drafter.target.vocab_size)
        wide[..., self.drafter.draft_to_target] = law
        return wide

    def _tree(self, newest, state, logits, evidence, sampling, generator) -> Tree:
        depth, device, num_rows = self.shape.depth, newest.device, len(newest)
        width = min(self.shape.width, self.drafter.vocab_size)
        # All nodes ever made, in the order of their making (so parents come first); entry 0 is the root.
        tokens, scores = [newest[:, None]], [torch.zeros(num_rows, 1, device=device)]
        parents = [torch.full((num_rows, 1), -1, device=device)]
        frontier = torch.zeros(num_rows, 1, dtype=torch.long, device=device)  # [B, w] numbers of the nodes to widen
        value = torch.zeros(num_rows, 1, device=device)  # [B, w] their joint log-probabilities
        seen = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)  # [B, w, P] which cached nodes each sees
        made, pending = 1, 0
        for d in range(1, depth + 1):
            if not self._goes_on(evidence):
                break
            widen = ("widen", made)
            inputs = (logits, value, frontier, seen, state)
            some = self.runner(widen, lambda *inputs, made=made: self._widen(width, made, *inputs), *inputs)
            token, score, parent, value, frontier, seen, state, chosen = some
            tokens.append(token)
            scores.append(score)
            parents.append(parent)
            if d == depth:
                break
            made += token.shape[1]
            state, logits, evidence = self._take_step(d + 1, pending, state, chosen, seen)
            pending += chosen.shape[1]
        if len(tokens) == 1:
            return root(newest)
        count = len(tokens)
        kept = self.runner(("rank", count), lambda *parts: self._rank(parts, count), *tokens, *scores, *parents)
        return Tree(kept[0], kept[1], None)

    def _widen(self, width: int, made: int, logits, value, frontier, seen, state) -> tuple[Tensor, ...]:
        """The `width` best children of each node of a frontier, and the next frontier among them.

        made: nodes so far -> the children's tokens, scores, parents [B, w * width]; the next frontier's value, frontier,
        seen, state and tokens
        """
        best = logits.float().log_softmax(-1).topk(width, dim=-1)  # [B, w, width]
        score = (value[..., None] + best.values).flatten(1)
        token = self.drafter.to_target(best.indices).flatten(1)
        owner = torch.arange(frontier.shape[1], device=token.device).repeat_interleave(width).expand_as(token)
        value, chosen = score.topk(min(width, score.shape[1]), dim=1)  # [B, w]
        from_owner = owner.gather(1, chosen)  # [B, w] index into the last frontier
        rows = torch.arange(len(token), device=token.device)[:, None]
        itself = torch.eye(chosen.shape[1], dtype=torch.bool, device=token.device).expand(len(token), -1, -1)
        seen = torch.cat([seen[rows, from_owner], itself], dim=-1)
        parent = frontier.gather(1, owner)
        return token, score, parent, value, made + chosen, seen, state[rows, from_owner], token.gather(1, chosen)

    def _rank(self, parts: tuple[Tensor, ...], count: int) -> tuple[Tensor, Tensor]:
        """Tokens, scores and parents of `count` batches of nodes -> tokens and parents [B, N] of the best."""
        token, score, parent = (torch.cat(parts[i * count : (i + 1) * count], dim=1) for i in range(3))
        # A child never scores above its parent, and a stable sort puts the earlier first: a kept child's parent is kept.
        ranked = score.sort(dim=1, descending=True, stable=True).indices
        kept = ranked[:, : 1 + self.shape.nodes].sort(dim=1).values  # [B, N], in the order of making
        number = torch.zeros_like(parent).scatter(
            1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        )
        kept_parent = parent.gather(1, kept)
        kept_parent = torch.where(kept_parent < 0, -1, number.gather(1, kept_parent.clamp(min=0)))
        return token.gather(1, kept), kept_parent

    def _sampled_tree(self, newest, state, logits, evidence, sampling, generator) -> Tree:
        """A tree of `static_parents`; which nodes it has depends on nothing that is drawn."""
        parents, num_rows = static_parents(self.shape), len(newest)
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        tokens = [newest] + [newest] * (len(parents) - 1)
        laws = [torch.zeros(0)] * (len(parents) - 1)
        level, pending = [0], 0  # nodes whose logits are at hand, in order
        seen = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=newest.device)
        for d in range(1, self.shape.depth + 1):
            if not self._goes_on(evidence):
                parents = parents[: depths.index(d)]
                break
            for place, node in enumerate(level):
                law = sampling.law(logits[:, place])  # [B, W]
                for child in [child for child in range(1, len(parents)) if parents[child] == node]:
                    draft = pick(law, uniforms(len(newest), generator, newest.device))
                    laws[child - 1], tokens[child] = law, self.drafter.to_target(draft)
                    if self.children == "distinct":
                        law = _without(law, draft)
            following = [node for node in range(len(parents)) if depths[node] == d and node in parents]
            if not following or d == self.shape.depth:
                break
            owner = torch.tensor([level.index(parents[node]) for node in following], device=newest.device)
            itself = torch.eye(len(following), dtype=torch.bool, device=newest.device).expand(num_rows, -1, -1)
            seen = torch.cat([seen[:, owner], itself], dim=-1)
            chosen = torch.stack([tokens[node] for node in following], dim=1)
            state, logits, evidence = self._take_step(d + 1, pending, state[:, owner], chosen, seen)
            level, pending = following, pending + len(following)
        num_nodes = len(parents)
        if num_nodes == 1:
            return root(newest)
        shape = torch.tensor(parents, device=newest.device).expand(num_rows, -1)
        return Tree(torch.stack(tokens[:num_nodes], dim=1), shape, self._spread(laws[: num_nodes - 1]))


def _lagging(mask: Tensor, d: int, cache: RowCache) -> Tensor:
    """attends="depth": of module d's entries, those that the newest slot of its time could see (architecture, 1.4).

    The first d - 1 tokens are read by no slot's step d. The slot whose step d reads an entry's token is d - 1 before it,
    and saw keys of tokens up to its own; and itself, so that no row is empty.
    """
    entry = torch.arange(mask.shape[-1], device=mask.device)  # [C]
    own = cache.slots[:, None, :, None]  # [B, 1, S, 1]
    return mask & (entry >= d - 1) & (entry <= own - (d - 1)) | (entry == own)


def _without(law: Tensor, draft: Tensor) -> Tensor:
    """law [B, W] after draft [B] was drawn and not put back; where nothing is left, any other token, for certain."""
    rest = law.scatter(1, draft[:, None], 0)
    total = rest.sum(-1, keepdim=True)
    other = F.one_hot((draft + 1) % law.shape[1], law.shape[1]).to(law.dtype)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(law.dtype).tiny), other)


FIRST_CHILD, NEXT_CHILD = 0.6, 0.4  # assumed acceptance of the first child, and each further one's share of the last


def static_parents(shape: TreeShape) -> list[int]:
    """The parents of a fixed tree, level by level: the `nodes` paths that are likeliest to be accepted if every node's
    children are accepted with the chances 0.6, 0.24, 0.096 .. in order (Sequoia, 2402.12374, for equal positions)."""
    best: list[tuple[float, int, tuple[int, ...]]] = [
        (-FIRST_CHILD, 1, (0,))
    ]  # negative chance, depth, ranks along the path
    chosen: list[tuple[int, ...]] = []
    while best and len(chosen) < shape.nodes:
        chance, depth, ranks = heapq.heappop(best)
        chosen.append(ranks)
        if depth < shape.depth:
            heapq.heappush(best, (chance * FIRST_CHILD, depth + 1, (*ranks, 0)))
        if ranks[-1] + 1 < shape.width:
            heapq.heappush(best, (chance * NEXT_CHILD, depth, (*ranks[:-1], ranks[-1] + 1)))
    paths = [(), *sorted(chosen, key=lambda ranks: (len(ranks), ranks))]
    return [-1, *(paths.index(path[:-1]) for path in paths[1:])]
