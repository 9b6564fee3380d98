"""Acceptance rules: functions of a tree and the target's distributions, without a model (docs/methods.md, section 1).

No rule waits for a GPU: loops run over node numbers in Python, and everything else is tensors.

tree.probs[b, i] is the distribution that node i was drawn from, given its parent's context and its earlier siblings.
The rules need no other knowledge of the drafting:

    a chain                               q (Leviathan et al. 2211.17192; Chen et al. 2302.01318)
    children drawn independently          q (SpecInfer 2305.09781)
    children drawn without replacement    q without the earlier siblings' tokens, normalised by the proposer
                                          (Sequoia 2402.12374; RSD 2402.14160)
    chosen children                       one-hot; tree.probs = None stands for it and needs less memory

Every rule returns path [B, P], the accepted nodes from node 0 down, num_kept [B] and next_token [B]. P is N; entries of
path past num_kept are 0. next_token is NO_TOKEN where there is none. probs [B, N, V], the target's distributions, are
in float32 or float64.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.core.sampling import NO_TOKEN, Randomness, draw_column, draw_uniform, pick_tokens
from specdec.core.tree import Tree

AcceptedPath = tuple[Tensor, Tensor, Tensor]  # path, num_kept, next_token


def choose_draw_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of random numbers: that of probabilities on a CPU, elsewhere float64, as in captured rounds

    A generator gives other numbers in another dtype.
    """
    return dtype if device.type == "cpu" else torch.float64


class Draws:
    """The random decisions of the rules. Tests replace them by an enumeration.

    source: generator of all rows, or one of each row
    """

    def __init__(self, source: Randomness):
        self.source = source

    def accept(self, probability: Tensor, row_mask: Tensor) -> Tensor:
        """Decides each row with a probability [B], where 1 or more means always -> [B] bool.

        row_mask [B] bool: rows to decide; all others get False, without a draw
        """
        device = probability.device
        dtype = choose_draw_dtype(device, probability.dtype)
        rows_to_draw = row_mask if device.type == "cpu" else None  # on a GPU, reading the mask costs more than a draw
        return row_mask & (draw_uniform(len(probability), self.source, device, dtype, rows_to_draw) < probability)

    def _draw_last(self, rows: int, device: torch.device) -> Tensor:
        """The random numbers [B, 1] of the last tokens"""
        return draw_column(rows, self.source, device)

    def accept_all(self, probability: Tensor) -> Tensor:
        """probability [B, N] -> [B, N] bool, each node decided by a draw of its own, in one go"""
        rows, num = probability.shape
        dtype = choose_draw_dtype(probability.device, probability.dtype)
        return self._draw_numbers(rows, num, probability.device, dtype) < probability

    def draw_ahead(self, rows: int, num: int, device: torch.device) -> "FixedDraws":
        """All draws of a rule over trees of `num` nodes, as inputs of a captured function"""
        numbers = self._draw_numbers(rows, num - 1, device, torch.float64)
        return FixedDraws(numbers, draw_column(rows, self.source, device))

    def _draw_numbers(self, rows: int, num: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`num` draws of each row [B, num], in the order of its nodes"""
        if not num:
            return torch.zeros(rows, 0, device=device, dtype=dtype)
        source = self.source
        if isinstance(source, Sequence):
            source = [generator for generator in source for _ in range(num)]
        return draw_uniform(rows * num, source, device, dtype).view(rows, num)

    def token(self, distribution: Tensor, row_mask: Tensor) -> Tensor:
        """distribution [B, V] -> [B], one token drawn in each row; any token where row_mask [B] is False

        NO_TOKEN for a distribution without a token: NaN, or no probability.
        """
        index = pick_tokens(distribution, self._draw_last(len(distribution), distribution.device))
        return torch.where(distribution.gather(1, index[:, None])[:, 0] > 0, index, NO_TOKEN)


class FixedDraws(Draws):
    """Decisions by numbers from [0, 1): [B, N - 1] of the nodes in their order, `last` [B, 1] of the last token."""

    def __init__(self, numbers: Tensor, last: Tensor):
        super().__init__(None)
        self.numbers = numbers
        self.last = last
        self.num_used = 0

    def accept(self, probability: Tensor, row_mask: Tensor) -> Tensor:
        self.num_used += 1
        return row_mask & (self.numbers[:, self.num_used - 1] < probability)

    def accept_all(self, probability: Tensor) -> Tensor:
        return self.numbers < probability

    def _draw_last(self, rows: int, device: torch.device) -> Tensor:
        return self.last


def accept_greedy(tree: Tree, choices: Tensor) -> AcceptedPath:
    """Temperature 0, lossless: the path follows children that equal the target's choice.

    choices [B, N]: the target's argmax after each node
    """
    path, num_kept, end = find_longest_path(tree, tree.tokens == choices.gather(1, tree.parents.clamp(min=0)))
    return path, num_kept, choices.gather(1, end[:, None])[:, 0]


def accept_tokens(tree: Tree, probs: Tensor, draws: Draws) -> AcceptedPath:
    """Token by token. Lossless for every kind of drafting above. probs is overwritten.

    Walk down from the root. At a node, try its children in order. Accept child x with probability min(1, r(x) / q(x)).
    Here r starts as the target's distribution p, and becomes norm(max(r - q, 0)) after a refusal. A chosen child is
    accepted with probability r(x); after its refusal r(x) becomes 0, and r is normalised. If every child is refused,
    the next token is drawn from r.
    """
    if probs.device.type != "cpu" and (tree.probs is None or tree.siblings is not None):
        return accept_tokens_at_once(tree, probs, draws)
    rows = torch.arange(len(probs), device=probs.device)
    end = torch.zeros_like(tree.tokens[:, 0])  # [B] last accepted node
    # Try every node below the end of its row's path, and extend the path by accepted ones
    for node in range(1, tree.tokens.shape[1]):  # descendants come after their node
        parent = tree.parents[:, node]
        if probs.device.type == "cpu" and not bool((parent == end).any()):
            continue  # no row's path ends at this parent. On a GPU, this read costs more than it saves.
        distribution = probs[rows, parent]  # [B, V] r after the parent's earlier children
        accepted = draws.accept(compute_acceptance(distribution, tree, node), parent == end)
        probs[rows, parent], _ = refuse_node(distribution, tree, node)
        end = torch.where(accepted, node, end)
    return *trace_path(tree.ancestors(), end), draws.token(probs[rows, end], torch.ones_like(end, dtype=torch.bool))


def accept_tokens_at_once(tree: Tree, probs: Tensor, draws: Draws) -> AcceptedPath:
    """`accept_tokens` in few kernels for any number of nodes: a node's r does not depend on any draw."""
    acceptance_probabilities, find_residual = (_verify_chosen if tree.probs is None else _verify_sampled)(tree, probs)
    # Decide every node by itself; the path goes through the first accepted child of each node
    accepted = draws.accept_all(acceptance_probabilities[:, 1:])  # [B, N - 1]
    earlier = _find_earlier_siblings(tree)[:, 1:, 1:]
    accepted &= ~(earlier & accepted[:, None]).any(-1)  # none is tried after an accepted earlier sibling
    path, num_kept, end = find_longest_path(tree, torch.cat([torch.ones_like(accepted[:, :1]), accepted], dim=1))
    return path, num_kept, draws.token(find_residual(end), torch.ones_like(end, dtype=torch.bool))


def _find_earlier_siblings(tree: Tree) -> Tensor:
    """[B, N, N] bool: the earlier siblings of each node"""
    numbers = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    return (tree.parents[:, :, None] == tree.parents[:, None]) & (numbers < numbers[:, None]) & (numbers > 0)


def _remove_tokens(mass: Tensor, tokens: Tensor, removed: Tensor) -> Tensor:
    """mass [B, M, V] with zeros, in place, at the tokens [B, N] of removed nodes. removed [B, M, N] bool"""
    same = (tokens[:, :, None] == tokens[:, None]).to(mass.dtype)  # [B, N, N]
    stays = (removed.to(mass.dtype) @ same) == 0  # [B, M, N] equal tokens of different nodes alike
    places = tokens[:, None].expand(-1, mass.shape[1], -1)
    return mass.scatter_(2, places, torch.where(stays, mass.gather(2, places), 0))


def _verify_chosen(tree: Tree, probs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Chosen children: acceptance probabilities [B, N] of the nodes,
    and a function end [B] -> residual [B, V] behind it.

    A refusal only takes a token away from p. So every r is p without the earlier siblings' tokens, normalised.
    """
    # The residual that meets each node: its parent's distribution without the earlier siblings' tokens
    rows = torch.arange(len(probs), device=probs.device)
    tokens = tree.tokens
    earlier = _find_earlier_siblings(tree)
    eps = torch.finfo(probs.dtype).eps
    residual = _remove_tokens(probs[rows[:, None], tree.parents.clamp(min=0)], tokens, earlier)  # [B, N, V]
    total = residual.sum(-1)
    mass = residual.gather(2, tokens[..., None])[..., 0]
    # Normalise it, unless the last earlier sibling took everything
    numbers = torch.arange(tokens.shape[1], device=tokens.device)
    previous_sibling = (earlier * numbers).amax(-1)  # the last earlier sibling, or 0
    previous_total = total.gather(1, previous_sibling)
    total = torch.where(total <= eps * previous_total, previous_total, total)  # an empty residual, as in `refuse_node`
    acceptance_probabilities = torch.where(previous_sibling > 0, mass / total, mass)

    def find_residual(end: Tensor) -> Tensor:
        distribution = probs[rows, end]  # [B, V]
        children = (tree.parents == end[:, None])[:, None]  # [B, 1, N]
        remaining = _remove_tokens(distribution[:, None].clone(), tokens, children)[:, 0]
        total = remaining.sum(-1, keepdim=True)
        return torch.where(children.any(-1) & (total > eps), remaining / total, distribution)

    return acceptance_probabilities, find_residual


def _verify_sampled(tree: Tree, probs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`_verify_chosen` for children drawn from distributions: all first children, then all second ones, and so on"""
    assert tree.probs is not None and tree.siblings is not None
    num_rows, num = tree.tokens.shape
    width = tree.siblings
    rows = torch.arange(num_rows, device=probs.device)[:, None]
    # Children [B, N, width] of each node by their rank among siblings, 0 for none
    rank = _find_earlier_siblings(tree).sum(-1)  # [B, N]
    places = tree.parents[:, 1:] * width + rank[:, 1:]
    numbers = torch.arange(1, num, device=probs.device).expand(num_rows, -1)
    children = places.new_zeros(num_rows, num * width).scatter_(1, places, numbers).view(num_rows, num, width)
    # Refuse all first children, then all second ones: r of their parents after each refusal
    acceptance_probabilities = torch.ones_like(probs[..., 0])
    residual = probs
    for child in children.unbind(2):  # [B, N], 0 where a node has no such child
        drafted = tree.probs[rows, child]
        token = tree.tokens.gather(1, child)[..., None]
        acceptance_probability = (residual.gather(2, token) / drafted.gather(2, token))[..., 0].clamp(max=1)
        acceptance_probabilities = acceptance_probabilities.scatter(
            1, child, acceptance_probability
        )  # the root's is unused
        refused, _ = _normalise_residual(residual, (residual - drafted).clamp_(min=0))
        residual = torch.where((child > 0)[..., None], refused, residual)
    return acceptance_probabilities, lambda end: residual[rows[:, 0], end]


def accept_blocks(tree: Tree, probs: Tensor, draws: Draws) -> AcceptedPath:
    """Whole paths: traversal verification (2505.12398), on a chain block verification (2403.10444).

    Lossless for every kind of drafting above. probs is overwritten.

    Nodes are tried in post-order: children before their parent, the root last. The path ends at the first accepted one.
    A node is accepted with probability P, given that all nodes before it were refused. P(root) = 1 and
    P(x) = min(1, P p(x) / q(x)), with P and p of x's parent. After each child, the parent's p and P become
    p = norm(R) and P = |R| / (|R| + 1 - P), where R = max(P p - q, 0). A node is tried only if all nodes before it
    were refused, so no draw changes these values. They are computed in the order of the nodes, before any draw.
    """
    num_rows, num_nodes = tree.tokens.shape
    rows = torch.arange(num_rows, device=probs.device)
    ancestors = tree.ancestors()  # [B, N, N]
    size = ancestors.sum(1)  # [B, N] size of each node's subtree
    # [B, N] place in post-order; until a node's children are placed, the next free place below it
    traversal_order = torch.zeros_like(size)
    path_probability = torch.ones_like(probs[..., 0])  # [B, N] P
    # Compute P of every node, and its parent's p and P after its refusal
    for node in range(1, num_nodes):
        parent = tree.parents[:, node]
        parent_probability = path_probability[rows, parent]  # [B]
        mass = parent_probability[:, None] * probs[rows, parent]  # [B, V] P p
        path_probability[:, node] = compute_acceptance(mass, tree, node)
        probs[rows, parent], total = refuse_node(mass, tree, node)
        path_probability[rows, parent] = torch.where(
            parent_probability == 1, parent_probability, total / (total + 1 - parent_probability)
        )
        traversal_order[:, node] = traversal_order[rows, parent]
        traversal_order[rows, parent] += size[:, node]
    # Try the nodes in post-order; the first accepted one ends the path
    end = torch.zeros_like(size[:, 0])
    undecided = torch.ones_like(end, dtype=torch.bool)  # [B]
    for candidate in traversal_order.argsort(1)[:, :-1].unbind(1):  # [B] each; the root is always accepted
        accepted = draws.accept(path_probability[rows, candidate], undecided)
        end = torch.where(accepted, candidate, end)
        undecided = undecided & ~accepted
    return *trace_path(ancestors, end), draws.token(probs[rows, end], torch.ones_like(undecided))


def compute_acceptance(mass: Tensor, tree: Tree, node: int) -> Tensor:
    """min(1, r(x) / q(x)) [B] of a node's token x. mass [B, V]: r"""
    token = tree.tokens[:, node, None]  # [B, 1]
    target_probability = mass.gather(1, token)[:, 0]
    return (
        target_probability
        if tree.probs is None
        else (target_probability / tree.probs[:, node].gather(1, token)[:, 0]).clamp(max=1)
    )


def refuse_node(mass: Tensor, tree: Tree, node: int) -> tuple[Tensor, Tensor]:
    """norm(R) [B, V] and |R| [B] for R = max(r - q, 0). mass [B, V]: r; q: distribution of `node`

    If |R| is at most a rounding error, r is returned instead: if r is a distribution, such a refusal is equally rare.
    """
    if tree.probs is None:
        residual = mass.scatter(1, tree.tokens[:, node, None], 0)
    else:
        residual = (mass - tree.probs[:, node]).clamp_(min=0)
    return _normalise_residual(mass, residual)


def _normalise_residual(mass: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """residual [..., V], overwritten, over its sum, and the sum [...]; `mass` where the sum is a rounding error"""
    total = residual.sum(-1, keepdim=True)  # [..., 1]
    rounding = (total <= torch.finfo(mass.dtype).eps).to(mass.dtype)
    return residual.addcmul_(mass, rounding).div_(total + rounding), total[..., 0]  # torch.where is slower


def find_longest_path(tree: Tree, accepted_nodes: Tensor) -> AcceptedPath:
    """The longest path from the root over accepted nodes [B, N] bool, and its end [B]. The root always counts."""
    ancestors = tree.ancestors()  # [B, N, N]
    reached = (accepted_nodes[:, None] | ~ancestors)[..., 1:].all(-1)  # [B, N]
    end = (reached * ancestors.sum(-1)).argmax(-1)
    return *trace_path(ancestors, end), end


def trace_path(ancestors: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """ancestors [B, N, N] from Tree, end [B] -> path [B, N] from the root to `end`, num_kept [B]"""
    numbers = torch.arange(ancestors.shape[1], device=end.device)  # [N]
    on_path = ancestors[torch.arange(len(end), device=end.device), end]  # [B, N]
    num_kept = on_path.sum(-1)
    path = torch.where(on_path, numbers, len(numbers)).sort(1).values  # parents come first
    return path.masked_fill(numbers >= num_kept[:, None], 0), num_kept


RULES: dict[str, Callable[[Tree, Tensor, Draws], AcceptedPath]] = {"token": accept_tokens, "block": accept_blocks}


def check_rule(rule: str) -> None:
    """Raises ValueError for an unknown rule."""
    if rule not in RULES:
        raise ValueError(f"rule={rule} must be {' or '.join(RULES)}.")
