"""One pass of the target over a tree of drafts, and the verdict of the acceptance rule."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import rules
from specdec.core.cache import RowCache
from specdec.core.cached_keys import CachedKeys
from specdec.core.compile import Runner
from specdec.core.sampling import NO_TOKEN, AnySampling, Sampling, mark_seen
from specdec.core.tree import Tree
from specdec.target.compiled import CompiledTarget
from specdec.target.model import Target, TargetOutput


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule of rules.py for B trees of N nodes, and the target's output."""

    path: Tensor  # [B, N] accepted nodes from node 0 down; entries past num_kept are 0
    num_kept: Tensor  # [B] number of accepted nodes, node 0 included
    next_token: Tensor  # [B] the target's token behind the path, NO_TOKEN where it has none
    output: TargetOutput  # output for the nodes, [B, N, .]
    distribution: Tensor | None  # [B, N, V] the target's distribution after each node, on request at temperature > 0

    def follow_path(self, tree: Tree, depth: int) -> tuple[Tensor, Tensor]:
        """The path [B, P], P at most 1 + depth, and the token that follows each of its nodes [B, P].

        These tokens are the accepted drafts and, last, the target's own token. Entries past num_kept mean nothing.
        """
        path = self.path[:, : 1 + depth]
        following = torch.cat([tree.tokens.gather(1, path)[:, 1:], self.next_token[:, None]], dim=1)
        return path, following.scatter(1, self.num_kept[:, None] - 1, self.next_token[:, None])


class Verifier:
    """Verifies trees of drafts by passes of the target.

    rule: name of an acceptance rule in rules.RULES
    hidden_states: numbers of the hidden states in `Verdict.output`
    distribution: whether a verdict has it at temperature > 0
    """

    def __init__(
        self,
        target: Target,
        *,
        sampling: Sampling,
        rule: str,
        runner: Runner,
        hidden_states: tuple[int, ...] = (),
        distribution: bool = False,
    ):
        self.target, self.compiled = target, CompiledTarget(target, runner)
        self.sampling, self.rule, self.runner = sampling, rules.RULES[rule], runner
        self.hidden_states, self.distribution = hidden_states, distribution

    def __call__(
        self,
        tree: Tree,
        cache: RowCache,
        draws: rules.Draws,
        marks: Tensor | None = None,
        *,
        sampling: AnySampling | None = None,
        allowed: Tensor | None = None,
    ) -> Verdict:
        """Verifies a tree, and leaves its entries pending in the cache.

        draws: random numbers of the rule; marks [B, V]: penalised tokens, see Decoder.stream
        sampling: settings of this pass, None: the decoder's
        allowed [B, N, V] bool: tokens that a grammar lets follow each node, None: all tokens
        """
        sampling = sampling or self.sampling
        assert tree.linear or not self.target.recurrent, "Decoder refuses trees for such targets"
        cache.reserve(tree.tokens.shape[1])

        restrictions = {"marks": marks, "allowed": allowed}
        if self.capturable and isinstance(sampling, Sampling):
            return self._decide_captured(tree, cache, draws, sampling, restrictions)
        return self.decide(tree, cache, draws, sampling, **restrictions)

    def _decide_captured(
        self,
        tree: Tree,
        cache: RowCache,
        draws: rules.Draws,
        sampling: Sampling,
        restrictions: dict[str, Tensor | None],
    ) -> Verdict:
        """`decide` by a CUDA graph, whose inputs include the random numbers. restrictions: marks and allowed tokens"""
        num_rows, num_nodes = tree.tokens.shape
        linear, max_children = tree.linear, tree.max_children
        optional: dict[str, Tensor | None] = {"probs": tree.probs, **restrictions}
        if not sampling.greedy:
            drawn = draws.draw_ahead(num_rows, num_nodes, tree.tokens.device)
            optional |= {"numbers": drawn.numbers, "last": drawn.last}
        names = [name for name, tensor in optional.items() if tensor is not None]

        def verify(tokens, parents, lengths, skipped, slots, *tensors):
            values = dict(zip(names, tensors))
            view = cache.with_tensors(cache.keys_and_values, lengths, skipped=skipped, slots=slots)
            captured_tree = Tree(tokens, parents, values.get("probs"), linear, max_children=max_children)
            fixed_draws = rules.FixedDraws(values["numbers"], values["last"]) if "last" in values else draws
            restricted = {name: values.get(name) for name in restrictions}
            verdict = self.decide(captured_tree, view, fixed_draws, sampling, **restricted)
            output = verdict.output
            outputs = verdict.path, verdict.num_kept, verdict.next_token, output.features, output.final
            return outputs if verdict.distribution is None else (*outputs, verdict.distribution)

        graph_inputs = [tree.tokens, tree.parents, cache.lengths, cache.skipped, cache.slots]
        graph_inputs += [tensor for tensor in optional.values() if tensor is not None]
        name = "verify", tuple(names), linear, max_children, *self.settings(sampling)
        path, num_kept, next_token, features, final, *more = self.runner.run_whole(
            name, verify, graph_inputs, list(cache.groups.values())
        )
        return Verdict(path, num_kept, next_token, TargetOutput(features, final), more[0] if more else None)

    def settings(self, sampling: AnySampling) -> tuple:
        """What a verdict depends on beside tensors, for the keys of graphs."""
        return self.hidden_states, sampling, self.rule, self.distribution

    def decide(
        self,
        tree: Tree,
        cache: RowCache,
        draws: rules.Draws,
        sampling: AnySampling,
        *,
        marks: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Verdict:
        """The verdict on a tree whose entries are reserved in the cache. Arguments as of `__call__`"""
        inputs = tree.tokens, tree.parents, cache.lengths, cache.skipped
        if sampling.greedy and marks is None and allowed is None:
            outputs = self._read_greedily(cache, tree.linear, *inputs)
            path, num_kept, next_token, features, final = outputs
            return Verdict(path, num_kept, next_token, TargetOutput(features, final), None)
        output = self._read(cache, tree.linear, *inputs)
        logits = self.runner("logits", self.target.logits, output.final)  # [B, N, V]
        if marks is not None:
            logits = sampling.penalise(logits, mark_seen(tree, marks))
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if sampling.greedy:
            return Verdict(*_choose_greedily(tree, logits), output, None)
        distribution = sampling.distribution(logits)
        stored_distribution = distribution.clone() if self.distribution else None  # the rule overwrites it
        return Verdict(*self.rule(tree, distribution, draws), output, stored_distribution)

    @property
    def capturable(self) -> bool:
        """Whether a pass can be a CUDA graph. Masks by position keep positions, and recurrent layers states, outside of
        K and V.
        """
        target = self.target
        if not self.runner.cuda_graphs or target.recurrent or target.share.size > 1:
            return False
        masks_positions = target.masks_positions and not target.reads_length
        return not (masks_positions or target.on_several_devices)

    def _read(self, cache: RowCache, linear: bool, tokens, parents, lengths, skipped) -> TargetOutput:
        """The target's output for the nodes. tokens, parents [B, N]; lengths, skipped [B]: the cache's"""

        def place_nodes(tokens, parents, lengths, skipped):
            tree = Tree(tokens, parents, None, linear=linear)
            ancestors = tree.ancestors()  # [B, N, N]
            positions = (lengths + skipped)[:, None] + ancestors.sum(-1) - 1  # [B, N]
            seen = self.target.make_draft_mask(ancestors, cache.with_tensors(cache.keys_and_values, lengths))
            return positions, *((seen,) if isinstance(seen, Tensor) else itertools.chain(*seen))

        positions, *seen = self.runner(("place", linear, cache.visible), place_nodes, tokens, parents, lengths, skipped)
        mask = seen[0] if len(seen) == 1 else tuple(map(CachedKeys, seen[::3], seen[1::3], seen[2::3]))
        return self.compiled.read(tokens, self.hidden_states, positions=positions, mask=mask, cache=cache)

    def _read_greedily(self, cache: RowCache, linear: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Path, num_kept and next_token, as in Verdict, then features and final states of `_read`."""
        output = self._read(cache, linear, *inputs)

        def greedy(final, tokens, parents):
            logits = self.target.logits(final)
            return _choose_greedily(Tree(tokens, parents, None, linear=linear), logits)

        return *self.runner(("greedy", linear), greedy, output.final, *inputs[:2]), output.features, output.final


def _choose_greedily(tree: Tree, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Path, num_kept and next_token, as in Verdict, by logits [B, N, V].

    next_token is NO_TOKEN where the largest logit is not finite.
    """
    choices = logits.argmax(-1)
    path, num_kept, next_token = rules.accept_greedy(tree, choices)
    largest = logits.gather(2, choices[..., None])[..., 0].gather(1, path.gather(1, num_kept[:, None] - 1))[:, 0]
    return path, num_kept, torch.where(largest.isfinite(), next_token, NO_TOKEN)
