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
MIN_PROBABILITY = 1e-30  # smallest probability that may be a divisor: float32 has no exact fractions of less


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
    """The interface that growing a tree needs. HeadProposer has it."""

    drafter: Drafter
    shape: TreeShape
    runner: Runner

    def step(self, d: int, pending: int, state: Tensor, tokens: Tensor, seen: Tensor) -> StepOutput:
        """Runs step d on w drafted nodes, after `pending` earlier ones in the drafter's cache.

        state [B, w, H], tokens [B, w], seen [B, w, pending + w] bool: drafted nodes that each of them sees
        """


def grow_chain(steps: Steps, newest: Tensor, first: StepOutput, sampling: AnySampling, draws: Sequence[Tensor]) -> Tree:
    """Returns a chain of the most likely tokens if greedy, else of sampled tokens with their distributions.

    newest [B]: the newest token, with `first`: its step 1
    draws [K]: random numbers of each depth, as `draw_column` gives them
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
    """Returns the tree of EAGLE-2 (2406.16858).

    Each depth widens the `width` best paths, and the best `nodes` of all are kept. Paths are compared by the sum of
    log-probabilities, without a temperature. A block drafter's step costs next to nothing, so each depth widens `nodes`
    paths. No more can be kept: so these are the best `nodes` of all paths whose nodes have `width` children. Drafts of
    probability 0 are kept only if there are no others.
    newest [B]: the newest token, with `first`: its step 1
    """
    shape, runner, device, num_rows = steps.shape, steps.runner, newest.device, len(newest)
    state, logits, _ = first
    # All nodes of the growing tree, parents first; entry 0 is the root
    tokens, scores = [newest[:, None]], [torch.zeros(num_rows, 1, device=device)]
    parents = [torch.full((num_rows, 1), -1, device=device)]
    frontier = torch.zeros(num_rows, 1, dtype=torch.long, device=device)  # [B, w] numbers of the nodes to widen
    value = torch.zeros(num_rows, 1, device=device)  # [B, w] log-probabilities of their paths
    seen = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)  # [B, w, P] cached nodes that each sees
    num_nodes, pending = 1, 0
    for d in range(1, shape.depth + 1):

        def widen(*inputs, num_nodes=num_nodes):
            return _widen_frontier(steps, num_nodes, *inputs)

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

    def rank(*tensors):
        return _rank_nodes(tensors, count, shape.nodes)

    kept_tokens, kept_parents = runner(("rank", count), rank, *tokens, *scores, *parents)
    return Tree(kept_tokens, kept_parents, None)


def count_widened(drafter: Drafter, shape: TreeShape) -> tuple[int, int]:
    """Children of a node, and nodes of a depth that get children."""
    width = min(shape.width, drafter.vocab_size)
    return width, shape.nodes if drafter.context_kind == "block" else width


def count_tree_drafts(drafter: Drafter, shape: TreeShape) -> int:
    """Nodes of the result of `grow_tree`, without the root."""
    width, num_widened = count_widened(drafter, shape)
    num_drafts, frontier = 0, 1
    for _ in range(shape.depth):
        num_children = frontier * width
        num_drafts += num_children
        frontier = min(num_widened, num_children)
    return min(shape.nodes, num_drafts)


def _widen_frontier(steps: Steps, num_nodes: int, logits, value, frontier, seen, state) -> tuple[Tensor, ...]:
    """Makes the `width` best children of each node of a frontier, and the next frontier: the best of them.

    num_nodes: number of nodes before
    Returns tokens, scores and parents of the children [B, w * width]; and of the next frontier values, numbers, seen,
    states of the parents, and tokens.
    """
    drafter, shape = steps.drafter, steps.shape
    width, num_widened = count_widened(drafter, shape)
    logits = logits[:, :1] if drafter.parallel else logits  # all nodes then have the same
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
    """Returns tokens and parents [B, N] of the root and the best drafts.

    tensors: `count` batches of tokens, then as many of scores, and of parents
    """
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
    """Returns the tree of `find_static_parents` with sampled tokens, siblings drawn without replacement.

    Its shape does not depend on any draw.
    newest [B]: the newest token, with `first`: its step 1; parents [N]: the static parents
    draws [N - 1]: random numbers of each node but the root, as `draw_column` gives them
    """
    drafter, owners = steps.drafter, find_static_parents(steps.shape)
    children = _list_children(owners)
    tokens, distributions = [newest] * len(owners), [torch.zeros(0)] * (len(owners) - 1)
    state, logits, _ = first
    level, d, pending = [0], 1, 0  # nodes that `logits` belong to, in order
    seen = torch.zeros(len(newest), 1, 0, dtype=torch.bool, device=newest.device)
    while True:
        # Draw the children of each node of this level.
        for index, node in enumerate(level):
            node_draws = [draws[child - 1] for child in children[node]]
            siblings = _draw_siblings(logits[:, index], sampling, node_draws)
            for child, (draft, distribution) in zip(children[node], siblings):
                distributions[child - 1], tokens[child] = distribution, drafter.to_target(draft)

        # Run the next step on those children that have children.
        next_level = [node for node, owner in enumerate(owners) if owner in level and children[node]]
        if not next_level:
            break
        above = [level.index(owners[node]) for node in next_level]
        seen, state = _take_nodes(seen, above), _take_nodes(state, above)
        itself = torch.eye(len(next_level), dtype=torch.bool, device=newest.device).expand(len(newest), -1, -1)
        seen = torch.cat([seen, itself], dim=-1)
        level_tokens = torch.stack([tokens[node] for node in next_level], dim=1)
        d += 1
        state, logits, _ = steps.step(d, pending, state, level_tokens, seen)
        level, pending = next_level, pending + len(next_level)
    probs = _stack_distributions(drafter, distributions)
    shape = parents.repeat(len(newest), 1)
    return Tree(torch.stack(tokens, dim=1), shape, probs, max_children=max(map(owners.count, owners)))


def _list_children(parents: list[int]) -> list[list[int]]:
    """The children of each node, in order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    return children


def _take_nodes(values: Tensor, nodes: list[int]) -> Tensor:
    """[B, len(nodes), ...] of values [B, N, ...]. An index tensor would need numbers of the host on a GPU."""
    return torch.stack([values[:, node] for node in nodes], dim=1)


def _draw_siblings(logits: Tensor, sampling: AnySampling, draws: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Draws one draft [B] for each of the random numbers, without replacement, each with its distribution [B, W].

    logits [B, W]: logits after the parent
    """
    distribution, siblings = sampling.distribution(logits), []
    for uniform in draws:
        draft = pick_tokens(distribution, uniform)
        siblings.append((draft, distribution))
        logits = logits.scatter(1, draft[:, None], -torch.inf)
        distribution = _without(distribution, draft, logits)
    return siblings


def _without(distribution: Tensor, draft: Tensor, remaining_logits: Tensor) -> Tensor:
    """Returns the distribution [B, W] after draft [B] was drawn from it and not put back.

    remaining_logits [B, W]: logits, with -inf for drafts that were drawn. If next to no probability remains, their most
    likely token gets probability 1, as in a tree of chosen nodes.
    """
    remainder = distribution.scatter(1, draft[:, None], 0)
    total = remainder.sum(-1, keepdim=True)
    best = torch.zeros_like(remainder).scatter(1, remaining_logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(total > MIN_PROBABILITY, remainder / total.clamp(min=MIN_PROBABILITY), best)


def _stack_distributions(drafter: Drafter, distributions: list[Tensor]) -> Tensor:
    """[B, 1 + N, V] of N distributions over the draft vocabulary, [B, W] each; 0 for the root and for other tokens"""
    return widen_distribution(drafter, torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1))


def widen_distribution(drafter: Drafter, distribution: Tensor) -> Tensor:
    """[..., V] of a distribution [..., W] over the draft vocabulary; 0 for tokens outside of it"""
    if drafter.draft_to_target is None:
        return distribution
    wide = distribution.new_zeros(*distribution.shape[:-1], drafter.target.vocab_size)
    wide[..., drafter.draft_to_target] = distribution
    return wide


FIRST_CHILD = 0.6  # assumed acceptance probability of a first child, about that of trained heads on held-out text
NEXT_CHILD = 0.4  # assumed acceptance of each further child, relative to the last one


def find_static_parents(shape: TreeShape) -> list[int]:
    """Returns the parents of a fixed tree, level by level (Sequoia, 2402.12374, with equal probabilities everywhere).

    Its nodes are the `nodes` paths that are most likely to be accepted. The children of every node are assumed to be
    accepted with the probabilities 0.6, 0.24, 0.096 .. in order.
    """
    # (-probability, depth, ranks along the path)
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
