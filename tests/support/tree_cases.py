"""Attention of a tree over a cache in small cases, and its reference: a mask over all entries.

    TRITON_INTERPRET=1 python -m tests.support.tree_cases      the Triton kernels in their interpreter

prints a line for each case and for a decoder: the name, and the largest error of the kernels.
"""

import json
import unittest.mock
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import cached_keys, fast, masks, tree_attention
from specdec.core.tree import make_chain
from specdec.core.tree_attention import find_tree_keys
from tests.support.compiled import TREE, decoder_of, prompts_of
from tests.support.decoding import random_trees
from tests.support.drafters import make_drafter
from tests.support.targets import make_target


def make_mask(ancestors: Tensor, lengths: Tensor, capacity: int, window: int | None) -> Tensor:
    """[B, 1, S, C] bool: entries that each node sees. ancestors [B, S, S]; window: positions that a node sees"""
    seen = masks.pending_mask(ancestors, lengths, capacity)
    if window is None:
        return seen
    rows, num, _ = ancestors.shape
    positions = torch.arange(capacity).repeat(rows, 1)
    query_positions = lengths[:, None] + ancestors.sum(-1) - 1
    positions.scatter_(1, lengths[:, None] + torch.arange(num), query_positions)
    return seen & (positions[:, None, None] > query_positions[:, None, :, None] - window)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """[B, H, S, E] by a softmax over all entries. query [B, H, S, E]; key, value [B, G, C, E]; sinks [H]"""
    rows, heads, num, width = query.shape
    group = heads // key.shape[1]
    scores = width**-0.5 * query @ key.repeat_interleave(group, 1).mT
    column = torch.full((heads,), -torch.inf, dtype=query.dtype) if sinks is None else sinks
    column = column.view(1, -1, 1, 1).expand(rows, -1, num, 1)
    shares = torch.cat([scores.masked_fill(~mask, -torch.inf), column], -1).softmax(-1)[..., :-1]
    return shares @ value.repeat_interleave(group, 1)


@dataclass(frozen=True)
class TreeCase:
    """Rows of `lengths` committed entries, each with a tree of `nodes` nodes. heads: numbers of query and key heads"""

    nodes: int
    width: int
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    window: int | None = None
    sinks: bool = False
    chain: bool = False
    dtype: torch.dtype = torch.float32

    def make(self) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor]:
        """Query, key and value in float64; words, firsts and lengths; sinks; the reference [B, S, H, E].

        Query and cache are views of other layouts. Entries that no node sees are zero.
        """
        torch.manual_seed(self.nodes)
        rows, (heads, groups), num = len(self.lengths), self.heads, self.nodes
        lengths, capacity = torch.tensor(self.lengths), max(self.lengths) + num + 3
        tree = random_trees(torch.default_generator, rows, num, 50)
        ancestors = (make_chain(tree.tokens, None) if self.chain else tree).ancestors()
        exact = torch.float64
        query = torch.randn(rows, num, heads, self.width).to(self.dtype).to(exact).transpose(1, 2)
        key, value = torch.randn(rows, 2, groups, capacity, self.width).to(self.dtype).to(exact).unbind(1)
        unused = torch.arange(capacity) >= (lengths + num)[:, None]  # [B, C]
        for entries in (key, value):
            entries.masked_fill_(unused[:, None, :, None], 0)
        sinks = torch.randn(heads).to(self.dtype).to(exact) if self.sinks else None
        reference = attend_masked(query, key, value, make_mask(ancestors, lengths, capacity, self.window), sinks)
        keys = find_tree_keys(ancestors, lengths, self.window)
        return [query, key, value], keys, sinks, reference.transpose(1, 2)


FP16 = torch.float16  # the interpreter cannot multiply bfloat16
CASES = {
    "a token, ragged": TreeCase(1, 64, (0, 200, 31), (8, 2)),
    "a token, one key head": TreeCase(1, 24, (150,), (3, 1), sinks=True, dtype=FP16),
    "a chain in a window": TreeCase(6, 80, (130, 0), (4, 1), window=20, sinks=True, chain=True),
    "a tree of 96": TreeCase(6, 96, (40, 97), (4, 4), dtype=FP16),
    "64 nodes": TreeCase(64, 128, (300, 5), (4, 1), sinks=True, dtype=FP16),
    "two words in a window shorter than a path": TreeCase(70, 16, (33, 2), (2, 1), window=3, chain=True),
    "four words": TreeCase(256, 16, (17, 300), (2, 2), window=270),
    "wide keys": TreeCase(9, 256, (100,), (4, 2)),
}


def run_kernels(query: Tensor, key: Tensor, value: Tensor, tree: tuple, *, sinks: Tensor | None = None) -> Tensor:
    from specdec.core import tree_kernels  # imported here: needs triton

    cut = tree_attention.cut_queries(query.shape, key.shape[1])
    return tree_kernels.attend(query, key, value, tree, cut=cut, scale=query.shape[-1] ** -0.5, sinks=sinks)


def find_error_in_decoding(num_calls: int) -> float:
    """The largest error of the kernels in the first calls of a decoder, on its own queries and views of its cache."""
    errors, attend_tree = [], cached_keys.attend_tree

    def attend_both(query, key, value, words, firsts, lengths, scale, sinks):
        out = attend_tree(query, key, value, words, firsts, lengths, scale, sinks)
        if len(errors) < num_calls:
            errors.append(float((run_kernels(query, key, value, (words, firsts, lengths)) - out).abs().max()))
        return out

    target = make_target(6, num_layers=2)
    with (
        unittest.mock.patch.object(cached_keys, "attend_tree", attend_both),
        unittest.mock.patch.object(tree_attention, "MAX_BLOCKS", 16),
        fast.force_paths("cache", "tree"),
    ):
        decoder = decoder_of(target, make_drafter(target, "eagle", True), TREE, compiled=False)
        decoder.generate(prompts_of(target, 0), 4)
    assert len(errors) == num_calls
    return max(errors)


def main() -> None:
    print(json.dumps(["a decoder", find_error_in_decoding(8)]), flush=True)
    for name, tree_case in CASES.items():
        operands, tree, sinks, reference = tree_case.make()
        query, key, value = (tensor.to(tree_case.dtype) for tensor in operands)
        unused = torch.arange(key.shape[2]) >= (tree[2] + tree_case.nodes)[:, None]
        for entries in (key, value):  # an entry that is read shows itself
            entries.masked_fill_(unused[:, None, :, None], torch.nan)
        if tree_case.nodes == 9:  # widths that are not adjacent
            query = query.mT.contiguous().mT
        out = run_kernels(query, key, value, tree, sinks=None if sinks is None else sinks.to(tree_case.dtype))
        print(json.dumps([name, float((out - reference).abs().max())]), flush=True)


if __name__ == "__main__":
    main()
