"""Growing the tree of a trained drafter: a chain, a tree of chosen nodes (EAGLE-2, 2406.16858), a sampled tree."""

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.compile import Runner
from specdec.core.sampling import AnySampling, pick_tokens
from specdec.core.tree import Tree, TreeShape, make_chain
from specdec.heads.base import Drafter

Children = Literal["distinct", "chosen"]
MIN_PROBABILITY = 1e-30  # probability that is divided by; float32 has no exact fractions of less


def check_children(children: str) -> None:
    """Raises ValueError unless it is one of `Children`."""
    if children not in get_args(Children):
        raise ValueError(f"children={children} must be chosen or distinct.")


class StepOutput(NamedTuple):
    """The result of a step on w nodes of each row."""

    state: Tensor  # [B, w, H]
    logits: Tensor  # [B, w, W]
    shared_logits: (
        Tensor  # [B, K-1, W] logits of the steps behind it, of a parallel drafter's first step; else [B, 0, W]
    )


class Steps(Protocol):
    """What growing a tree needs: HeadProposer has it."""

    drafter: Drafter
    shape: TreeShape
    runner: Runner

    def step(self, d: int, pending: int, state: Tensor, tokens: Tensor, seen: Tensor) -> StepOutput:
        """Step d of w drafted nodes, behind `pending` earlier ones in the drafter's cache.

        state [B, w, H], tokens [B, w], seen [B, w, pending + w] bool: which drafted nodes each of them sees
        """


def grow_chain(
    steps: Steps, newest: Tensor, first: StepOutput, sampling: AnySampling, draws: Sequence[Tensor] = ()
) -> Tree:
    """Greedy: the most likely tokens; else sampled ones, with their distributions.

    newest [B], first: step 1 of this token; draws: of each depth, as of `draw_column`
    """
    depth = steps.shape.depth
    (state, logits, _), tokens, distributions = first, [newest], []
    seen = masks.causal_mask(depth, newest.device).expand(len(newest), -1, -1)
    for d in range(1, depth + 1):
        if sampling.greedy:
            draft = logits[:, 0].argmax(-1)
        else:
            distributions.append(sampling.distribution(logits[:, 0]))  # [B, W]
            draft = pick_tokens(distributions[-1], draws[d - 1])
        tokens.append(steps.drafter.to_target(draft))
        if d < depth:
            state, logits, _ = steps.step(d + 1, d - 1, state, tokens[-1][:, None], seen[:, d - 1 : d, :d])
    return make_chain(
        torch.stack(tokens, dim=1), _stack_distributions(steps.drafter, distributions) if distributions else None
    )


def grow_tree(steps: Steps, newest: Tensor, first: StepOutput) -> Tree:
    """EAGLE-2: each depth widens the `width` most likely paths so far; the best `nodes` of all are kept.

    Paths are compared by the sum of log-probabilities, without a temperature. newest [B], first: step 1 of this token
    A block drafter's step costs next to nothing, so each depth widens `nodes` paths: no more can be kept, so these are the best
    `nodes` of all paths whose nodes have `width` children. Drafts of probability 0 are kept only where there are no others.
    """
    shape, runner, device, num_rows = steps.shape, steps.runner, newest.device, len(newest)
    width = min(shape.width, steps.drafter.vocab_size)
    num_widened = shape.nodes if steps.drafter.context_kind == "block" else width
    state, logits, _ = first
    # All nodes of the growing tree, in the order of their making (so parents come first); entry 0 is the root.
    tokens, scores = [newest[:, None]], [torch.zeros(num_rows, 1, device=device)]
    parents = [torch.full((num_rows, 1), -1, device=device)]
    frontier = torch.zeros(num_rows, 1, dtype=torch.long, device=device)  # [B, w] numbers of the nodes to widen
    value = torch.zeros(num_rows, 1, device=device)  # [B, w] log-probabilities of their paths
    seen = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)  # [B, w, P] which cached nodes each sees
    num_nodes, pending = 1, 0
    for d in range(1, shape.depth + 1):

        def widen(*inputs, num_nodes=num_nodes):
            return _widen_frontier(steps.drafter, width, num_widened, num_nodes, *inputs)

        widened = runner(("widen", num_nodes), widen, logits, value, frontier, seen, state)
        token, score, parent, value, frontier, seen, state, frontier_tokens = widened
        tokens.append(token)
        scores.append(score)
        parents.append(parent)
        if d == shape.depth:
            break
        num_nodes += token.shape[1]
        state, logits, _ = steps.step(d + 1, pending, state, frontier_tokens, seen)
        pending += frontier_tokens.shape[1]
    count = len(tokens)
    rank = lambda *tensors: _rank_nodes(tensors, count, shape.nodes)
    kept_tokens, kept_parents = runner(("rank", count), rank, *tokens, *scores, *parents)
    return Tree(kept_tokens, kept_parents, None)


def _widen_frontier(
    drafter: Drafter, width: int, num_widened: int, num_nodes: int, logits, value, frontier, seen, state
) -> tuple[Tensor, ...]:
    """The `width` best children of each node of a frontier, and the next frontier: the `most` best of them.

    num_nodes: nodes so far -> the children's tokens, scores, parents [B, w * width]; of the next frontier value, numbers,
    seen, parents' state and tokens
    """
    logits = logits[:, :1] if drafter.parallel else logits  # which are then those of all nodes
    best = logits.float().log_softmax(-1).topk(width, dim=-1)  # [B, w, width]
    score = (value[..., None] + best.values).flatten(1)
    token = drafter.to_target(best.indices).expand(-1, frontier.shape[1], -1).flatten(1)
    owner = torch.arange(frontier.shape[1], device=token.device).repeat_interleave(width).expand_as(token)
    value, widened_index = score.topk(min(num_widened, score.shape[1]), dim=1)  # [B, w]
    from_owner = owner.gather(1, widened_index)  # [B, w] index into the last frontier
    rows = torch.arange(len(token), device=token.device)[:, None]
    itself = torch.eye(widened_index.shape[1], dtype=torch.bool, device=token.device).expand(len(token), -1, -1)
    seen = torch.cat([seen[rows, from_owner], itself], dim=-1)
    parent = frontier.gather(1, owner)
    return (
        token,
        score,
        parent,
        value,
        num_nodes + widened_index,
        seen,
        state[rows, from_owner],
        token.gather(1, widened_index),
    )


def _rank_nodes(tensors: tuple[Tensor, ...], count: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """`count` batches each of tokens, scores and parents -> tokens and parents [B, N] of the root and the best drafts"""
    token, score, parent = (torch.cat(tensors[i * count : (i + 1) * count], dim=1) for i in range(3))
    # A child never scores above its parent, and a stable sort puts the earlier first: a kept child's parent is kept.
    ranked = score.sort(dim=1, descending=True, stable=True).indices
    ranked_nodes = ranked[:, : 1 + num_kept].sort(dim=1).values  # [B, N], in the order of making
    places = torch.arange(ranked_nodes.shape[1], device=ranked_nodes.device).expand_as(ranked_nodes)
    number = torch.zeros_like(parent).scatter(1, ranked_nodes, places)
    ranked_parents = parent.gather(1, ranked_nodes)
    ranked_parents = torch.where(ranked_parents < 0, -1, number.gather(1, ranked_parents.clamp(min=0)))
    return token.gather(1, ranked_nodes), ranked_parents


def grow_sampled_tree(
    steps: Steps, newest: Tensor, first: StepOutput, sampling: AnySampling, draws: Sequence[Tensor], parents: Tensor
) -> Tree:
    """The tree of `find_static_parents` with sampled tokens, siblings without replacement. Its shape does not depend on any draw.

    newest [B], first: step 1 of this token; draws: of each node behind the root, as of `draw_column`; parents [N]: the static ones
    """
    drafter, owners = steps.drafter, find_static_parents(steps.shape)
    tokens, distributions = [newest] * len(owners), [torch.zeros(0)] * (len(owners) - 1)
    state, logits, _ = first
    level, d, pending = [0], 1, 0  # the nodes that `logits` belong to, in order
    seen = torch.zeros(len(newest), 1, 0, dtype=torch.bool, device=newest.device)
    while True:
        for index, node in enumerate(level):
            remaining_logits, distribution = logits[:, index], sampling.distribution(logits[:, index])  # [B, W] each
            for child in [child for child, owner in enumerate(owners) if owner == node]:
                draft = pick_tokens(distribution, draws[child - 1])
                distributions[child - 1], tokens[child] = distribution, drafter.to_target(draft)
                remaining_logits = remaining_logits.scatter(1, draft[:, None], -torch.inf)
                distribution = _without(distribution, draft, remaining_logits)
        next_level = [node for node, owner in enumerate(owners) if owner in level and node in owners]
        if not next_level:
            break
        # No tensor of places, for which a GPU would have to be given numbers
        above = [level.index(owners[node]) for node in next_level]
        seen, state = (torch.stack([tensor[:, place] for place in above], dim=1) for tensor in (seen, state))
        itself = torch.eye(len(next_level), dtype=torch.bool, device=newest.device).expand(len(newest), -1, -1)
        seen, level_tokens = (
            torch.cat([seen, itself], dim=-1),
            torch.stack([tokens[node] for node in next_level], dim=1),
        )
        d += 1
        state, logits, _ = steps.step(d, pending, state, level_tokens, seen)
        level, pending = next_level, pending + len(next_level)
    shape = parents.repeat(len(newest), 1)
    return Tree(
        torch.stack(tokens, dim=1),
        shape,
        _stack_distributions(drafter, distributions),
        max_children=max(map(owners.count, owners)),
    )


def _without(distribution: Tensor, draft: Tensor, remaining_logits: Tensor) -> Tensor:
    """distribution [B, W] once draft [B] was drawn and not put back; left [B, W]: the logits of what was not drawn.

    If nothing is left, or too little to be divided by, its most likely token gets probability 1, as in a tree of chosen nodes.
    """
    remainder = distribution.scatter(1, draft[:, None], 0)
    total = remainder.sum(-1, keepdim=True)
    best = torch.zeros_like(remainder).scatter(1, remaining_logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(total > MIN_PROBABILITY, remainder / total.clamp(min=MIN_PROBABILITY), best)


def _stack_distributions(drafter: Drafter, distributions: list[Tensor]) -> Tensor:
    """N distributions over the draft vocabulary, [B, W] each -> [B, 1 + N, V]; 0 for the root and for tokens outside of it"""
    return widen_distribution(drafter, torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1))


def widen_distribution(drafter: Drafter, distribution: Tensor) -> Tensor:
    """A distribution over the draft vocabulary, [..., W] -> [..., V]; 0 for tokens outside of it"""
    if drafter.draft_to_target is None:
        return distribution
    wide = distribution.new_zeros(*distribution.shape[:-1], drafter.target.vocab_size)
    wide[..., drafter.draft_to_target] = distribution
    return wide


FIRST_CHILD, NEXT_CHILD = 0.6, 0.4  # assumed acceptance of a first child; of each further child relative to the last


def find_static_parents(shape: TreeShape) -> list[int]:
    """The parents of a fixed tree, level by level (Sequoia, 2402.12374, with equal probabilities at all positions).

    Its nodes are the `nodes` paths that are most likely to be accepted if the children of every node are accepted with
    the probabilities 0.6, 0.24, 0.096 .. in order.
    """
    # -probability, depth, ranks along the path
    best: list[tuple[float, int, tuple[int, ...]]] = [(-FIRST_CHILD, 1, (0,))]
    selected: list[tuple[int, ...]] = []
    while best and len(selected) < shape.nodes:
        probability, depth, ranks = heapq.heappop(best)
        selected.append(ranks)
        if depth < shape.depth:
            heapq.heappush(best, (probability * FIRST_CHILD, depth + 1, (*ranks, 0)))
        if ranks[-1] + 1 < shape.width:
            heapq.heappush(best, (probability * NEXT_CHILD, depth, (*ranks[:-1], ranks[-1] + 1)))
    paths = [(), *sorted(selected, key=lambda ranks: (len(ranks), ranks))]
    return [-1, *(paths.index(path[:-1]) for path in paths[1:])]
