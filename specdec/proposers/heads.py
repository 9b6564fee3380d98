"""A trained drafter's step over a tree: chains, EAGLE-2 trees (2406.16858) and products of parallel heads alike."""

import torch
from torch import Tensor

from specdec import masks
from specdec.drafter import Drafter
from specdec.proposers.base import Proposer
from specdec.tree import Tree, TreeShape, chain
from specdec.verify import probabilities


class HeadProposer(Proposer):
    """Widens by joint log-probability, `width` nodes a depth, and keeps the best `nodes` (EAGLE-2).

    At temperature > 0 a chain's tokens are sampled from the drafter's law at that temperature, and the law is handed
    on; a wider tree's nodes are chosen, by probabilities to which no temperature is applied.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape):
        if drafter.depth is not None and shape.depth > drafter.depth:
            raise ValueError(f"decode.depth={shape.depth} is more than this drafter's {drafter.depth} steps.")
        self.drafter = drafter.eval()
        self.shape = shape
        self.target_layers = drafter.target_layers
        self.depth = shape.depth

    def begin(self, tokens, num):
        self.cache = self.drafter.cache(tokens.shape[0])
        self.opening = tokens[:, :1]  # [B, 1] the token of slot 0, which `commit` does not bring
        self.carried: list[Tensor] = []  # attends="depth": of modules 1..K-1, the state [B, 1, H] of their newest slot

    def commit(self, tokens, features, num):
        if self.drafter.first_slot == 0 and self.cache.longest == 0:
            tokens, num = torch.cat([self.opening, tokens], dim=1), num + 1
        self.tokens, self.features, self.num = tokens, features, num

    @torch.no_grad()
    def propose(self, temperature, generator):
        newest = self._newest(self.tokens)[:, 0]  # [B]
        state, readout = self._absorb()
        logits = self.drafter.logits(1, readout)
        if self.shape.chain:
            return self._chain(newest, state, logits, temperature, generator)
        return self._tree(newest, state, logits)

    def _newest(self, values: Tensor) -> Tensor:
        """[B, S, ...] of the newly committed -> [B, 1, ...] of each row's last"""
        return values[torch.arange(len(self.num), device=self.num.device), self.num - 1][:, None]

    def _absorb(self) -> tuple[Tensor, Tensor]:
        """Step 1 over the newly committed tokens with their true features; what later rounds look at stays in the cache.

        -> state, readout [B, 1, .] of step 1 of the newest slot
        """
        drafter, cache, num_new = self.drafter, self.cache, self.tokens.shape[1]
        start = cache.lengths + drafter.first_slot  # [B] the first new slot
        positions = start[:, None] + torch.arange(num_new, device=start.device)  # [B, S]
        if drafter.first_slot == 0:
            h = self.features.new_zeros(*self.tokens.shape, 0)
        else:
            h = drafter.encode(self.features)
        if drafter.attends in ("none", "block"):
            cache.reserve(num_new)
            if drafter.attends == "block":
                drafter.context(h, positions - 1, cache)
            cache.commit(self.num, num_new)
            seen = masks.committed(cache.lengths, cache.visible)
            h, tokens, positions = map(self._newest, (h, self.tokens, positions))
            return drafter.step(1, h, tokens, positions, seen, cache)

        cache.reserve(num_new)
        mask = masks.pending(masks.causal(num_new, start.device), cache.lengths, cache.visible)
        state, readout = drafter.step(1, h, self.tokens, positions, mask, cache)
        if drafter.attends == "depth":
            self._absorb_deeper(state, positions, mask)
        cache.commit(self.num, num_new)
        return self._newest(state), self._newest(readout)

    def _absorb_deeper(self, state: Tensor, positions: Tensor, mask: Tensor) -> None:
        """Modules 2..K read the new tokens too, each one slot further back; state [B, S, H] of module 1.

        An entry of the cache stands for a token: module d's is that of the slot whose step d reads this token.
        """
        last = []
        for d in range(2, self.shape.depth + 1):
            before = self.carried[d - 2] if self.carried else torch.zeros_like(state[:, :1])
            last.append(self._newest(state))
            h = torch.cat([before, state[:, :-1]], dim=1)
            state, _ = self.drafter.step(d, h, self.tokens, positions, self._lagging(mask, d), self.cache)
        self.carried = last

    def _lagging(self, mask: Tensor, d: int) -> Tensor:
        """attends="depth": of module d's entries, those that the newest slot of its time could see (architecture, 1.4).

        The first d - 1 tokens are read by no slot's step d. The slot whose step d reads an entry's token is d - 1 before it,
        and saw keys of tokens up to its own; and itself, so that no row is empty.
        """
        entry = torch.arange(mask.shape[-1], device=mask.device)  # [C]
        own = self.cache.slots[:, None, :, None]  # [B, 1, S, 1]
        return mask & (entry >= d - 1) & (entry <= own - (d - 1)) | (entry == own)

    def _chain(self, newest, state, logits, temperature, generator) -> Tree:
        depth = self.shape.depth
        tokens, laws = [newest], []
        seen = masks.causal(depth, newest.device)
        for d in range(1, depth + 1):
            if temperature > 0:
                law = probabilities(logits[:, 0], temperature)  # [B, W]
                laws.append(law)
                draft = torch.multinomial(law, 1, generator=generator)[:, 0]
            else:
                draft = logits[:, 0].argmax(-1)
            tokens.append(self.drafter.to_target(draft))
            if d < depth:
                state, logits = self._step(
                    d + 1, state, tokens[-1][:, None], seen[d - 1 : d, :d].expand(len(newest), -1, -1)
                )
        self.cache.pending = 0
        return chain(torch.stack(tokens, dim=1), self._spread(laws) if laws else None)

    def _spread(self, laws: list[Tensor]) -> Tensor:
        """Laws over the draft vocabulary, [B, W] each -> [B, 1 + K, V]; nothing is on the root and off the list."""
        law = torch.stack([torch.zeros_like(laws[0]), *laws], dim=1)  # [B, 1 + K, W]
        if self.drafter.draft_to_target is None:
            return law
        wide = law.new_zeros(*law.shape[:2], self.drafter.target.vocab_size)
        wide[..., self.drafter.draft_to_target] = law
        return wide

    def _tree(self, newest, state, logits) -> Tree:
        depth, width, num_nodes = self.shape.depth, self.shape.width, self.shape.nodes
        num_rows, device = len(newest), newest.device
        rows = torch.arange(num_rows, device=device)[:, None]
        width = min(width, self.drafter.vocab_size)
        # All nodes ever made, in the order of their making (so parents come first); entry 0 is the root.
        tokens, scores = [newest[:, None]], [torch.zeros(num_rows, 1, device=device)]
        parents = [torch.full((num_rows, 1), -1, device=device)]
        frontier = torch.zeros(num_rows, 1, dtype=torch.long, device=device)  # [B, w] numbers of the nodes to widen
        value = torch.zeros(num_rows, 1, device=device)  # [B, w] their joint log-probabilities
        seen = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)  # [B, w, P] which cached nodes each sees
        made = 1
        for d in range(1, depth + 1):
            best = logits.float().log_softmax(-1).topk(width, dim=-1)  # [B, w, width]
            score = (value[..., None] + best.values).flatten(1)  # [B, w*width]
            token = self.drafter.to_target(best.indices).flatten(1)
            owner = torch.arange(frontier.shape[1], device=device).repeat_interleave(width).expand(num_rows, -1)
            tokens.append(token)
            scores.append(score)
            parents.append(frontier.gather(1, owner))
            if d == depth:
                break
            value, chosen = score.topk(min(width, score.shape[1]), dim=1)  # [B, w]
            from_owner = owner.gather(1, chosen)  # [B, w] index into the last frontier
            frontier = made + chosen
            made += score.shape[1]
            itself = torch.eye(chosen.shape[1], dtype=torch.bool, device=device).expand(num_rows, -1, -1)
            seen = torch.cat([seen[rows, from_owner], itself], dim=-1)
            state, logits = self._step(d + 1, state[rows, from_owner], token.gather(1, chosen), seen)
        self.cache.pending = 0
        every_token, every_score, every_parent = (torch.cat(x, dim=1) for x in (tokens, scores, parents))
        # A child never scores above its parent, and a stable sort puts the earlier first: a kept child's parent is kept.
        ranked = every_score.sort(dim=1, descending=True, stable=True).indices
        kept = ranked[:, : 1 + num_nodes].sort(dim=1).values  # [B, N], in the order of making
        number = torch.zeros_like(every_parent).scatter(
            1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept)
        )
        kept_parents = every_parent.gather(1, kept)
        kept_parents = torch.where(kept_parents < 0, -1, number.gather(1, kept_parents.clamp(min=0)))
        return Tree(every_token.gather(1, kept), kept_parents, None)

    def _step(self, d: int, state: Tensor, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Step d of drafted nodes. state [B, w, H], tokens [B, w], seen [B, w, P] -> state, logits [B, w, .]"""
        drafter, cache, mask = self.drafter, self.cache, None
        positions = (cache.lengths + drafter.first_slot + d - 2)[:, None].expand_as(tokens)
        if drafter.attends not in ("none", "block"):
            cache.reserve(tokens.shape[1])
            if drafter.attends == "depth":
                seen = torch.zeros_like(seen)  # the nodes before it are those of other modules; it sees itself
            mask = masks.pending(seen, cache.lengths, cache.visible)
            if drafter.attends == "depth":
                mask = self._lagging(mask, d)
        state, readout = drafter.step(d, state, tokens, positions, mask, cache)
        return state, drafter.logits(d, readout)
