"""One pass of the target over a tree, and what the acceptance rule decides."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import masks, rules
from specdec.cache import RowCache
from specdec.compile import Runner
from specdec.compiled_target import CompiledTarget
from specdec.sampling import Sampling, seen
from specdec.target import Target, TargetOutput
from specdec.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """What a rule of rules.py decided, and the target's output that it decided by."""

    path: Tensor  # [B, N] the accepted nodes from node 0 down; entries past num_kept are 0
    num_kept: Tensor  # [B]
    next_token: Tensor  # [B]
    output: TargetOutput  # of the nodes, [B, N, .]
    choices: Tensor | None  # [B, N] the most likely token after each node; at temperature > 0 only if asked for
    law: Tensor | None  # [B, N, V] the target's law after each node, if asked for and temperature > 0

    def along(self, tree: Tree, depth: int) -> tuple[Tensor, Tensor]:
        """-> path [B, P], P at most 1 + depth, and the token that follows each of its nodes [B, P].

        These tokens are the accepted drafts and, last, the target's own token. Entries past num_kept mean nothing.
        """
        path = self.path[:, : 1 + depth]
        following = torch.cat([tree.tokens.gather(1, path)[:, 1:], self.next_token[:, None]], dim=1)
        return path, following.scatter(1, self.num_kept[:, None] - 1, self.next_token[:, None])


class Verifier:
    """Puts trees before the target.

    hidden_states: those wanted in `Verdict.output`; choices, law: whether the verdict has them at temperature > 0
    """

    def __init__(
        self,
        target: Target,
        *,
        sampling: Sampling,
        rule: str,
        runner: Runner,
        hidden_states: tuple[int, ...] = (),
        choices: bool = False,
        law: bool = False,
    ):
        self.target, self.compiled = target, CompiledTarget(target, runner)
        self.sampling, self.rule, self.runner = sampling, rules.RULES[rule], runner
        self.hidden_states, self.choices, self.law = hidden_states, choices, law

    def __call__(self, tree: Tree, cache: RowCache, draws: rules.Draws, marks: Tensor | None = None) -> Verdict:
        """Leaves the nodes' entries pending in the cache. marks [B, V]: see Decoder.stream"""
        linear = tree.linear
        assert linear or not self.target.recurrent, "Decoder refuses trees for such targets"
        cache.reserve(tree.tokens.shape[1])

        def place(tokens, parents, lengths, skipped):
            tree = Tree(tokens, parents, None, linear=linear)
            ancestors = tree.ancestors()  # [B, N, N]
            positions = (lengths + skipped)[:, None] + ancestors.sum(-1) - 1  # [B, N]
            return positions, masks.pending(ancestors, lengths, cache.visible)

        run = self.runner
        inputs = tree.tokens, tree.parents, cache.lengths, cache.skipped
        positions, mask = run(("place", linear, cache.visible), place, *inputs)
        output = self.compiled.read(
            tree.tokens, self.hidden_states, positions=positions, mask=mask, cache=cache, done=tree.done
        )
        if self.sampling.greedy and marks is None:

            def greedy(final, tokens, parents):
                choices = self.target.logits(final).argmax(-1)  # [B, N]
                return *rules.greedy(Tree(tokens, parents, None, linear=linear), choices), choices

            path, num_kept, next_token, choices = run(
                ("greedy", linear), greedy, output.final, tree.tokens, tree.parents
            )
            return Verdict(path, num_kept, next_token, output, choices, None)
        logits = run("logits", self.target.logits, output.final)  # [B, N, V]
        if marks is not None:
            logits = self.sampling.penalise(logits, seen(tree, marks))
        if self.sampling.greedy:
            choices = logits.argmax(-1)
            return Verdict(*rules.greedy(tree, choices), output, choices, None)
        choices = logits.argmax(-1) if self.choices else None
        law = self.sampling.law(logits)
        kept = law.clone() if self.law else None  # the rule overwrites it
        return Verdict(*self.rule(tree, law, draws), output, choices, kept)
