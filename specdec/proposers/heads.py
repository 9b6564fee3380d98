"""A trained drafter as a proposer: it keeps the drafter's cache; proposers/growth.py grows the trees."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.cache import CacheMark, RowCache
from specdec.core.cache_memory import CacheMemory
from specdec.core.cached_keys import Piece, count_piece_tokens
from specdec.core.compile import Runner
from specdec.core.devices import upload_values
from specdec.core.option_types import BatchSize, SmallCount, Text
from specdec.core.sampling import AnySampling, Sampling, draw_column
from specdec.core.tree import Tree, TreeShape
from specdec.core.wording import format_count
from specdec.heads.base import Drafter
from specdec.heads.draft import Draft, load_existing
from specdec.proposers.base import Proposer, select_last
from specdec.proposers.growth import (
    Children,
    StepOutput,
    check_children,
    count_tree_drafts,
    find_static_parents,
    grow_chain,
    grow_sampled_tree,
    grow_tree,
)
from specdec.proposers.new_tokens import Committed, NewTokens, RoundState, join_committed
from specdec.target.model import Target


class Mark(NamedTuple):
    """The state of a HeadProposer once everything committed is absorbed."""

    cache: CacheMark
    carried: list[Tensor]
    absorbed: tuple[Tensor, StepOutput]


class HeadProposer(Proposer):
    """Drafts a chain if the shape's width is 1, else a tree.

    At temperature 0 a wider tree's nodes are chosen (EAGLE-2). Above, a chain's tokens are sampled. So is a tree of
    fixed shape, its siblings without replacement, unless `children` is "chosen". A greedy row of a sampled tree has the
    likeliest tokens.
    Raises ValueError for an unknown value of `children`, and for a depth beyond the drafter's steps.
    """

    rewinds = True
    selects = True

    def __init__(
        self,
        drafter: Drafter,
        shape: TreeShape,
        *,
        children: Children = "distinct",
        compile: bool | None = False,
        cuda_graphs: bool | None = False,
    ):
        check_children(children)
        drafter.check_window(shape.depth)
        if drafter.depth is not None and shape.depth > drafter.depth:
            raise ValueError(
                f"depth={shape.depth} is more than this drafter's {format_count(drafter.depth, 'step')}: lower depth=."
            )
        self.drafter = drafter.eval()
        self.shape = shape
        self.children = children
        parents = find_static_parents(shape)
        self.parents = upload_values(parents, drafter.target.device)  # of a sampled tree
        self.runner = Runner(compile, cuda_graphs=cuda_graphs)
        self.target_layers = drafter.target_layers
        self.depth, self.nodes, self.linear = shape.depth, shape.nodes, shape.chain
        self.target_cache: RowCache | None = None  # cache of the batch
        # Memory of this drafter's cache, and of prompts that join
        self.memory, self.joining_memory = CacheMemory(), CacheMemory()
        self.captures_steps = True  # whether steps are CUDA graphs each: not within the graph of a whole round
        # Places and depths as tensors: one compiled step serves all depths
        self.numbers = torch.arange(shape.depth * max(shape.width, shape.nodes) + 2, device=drafter.target.device)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds

    def as_chain(self, deepest: int) -> "HeadProposer":
        """The same drafter as a chain of `deepest` drafts, or of as many as it can make."""
        depth = deepest if self.drafter.depth is None else min(deepest, self.drafter.depth)
        compile, graphs = self.runner.requested
        chain = HeadProposer(self.drafter, TreeShape(depth, 1, depth), compile=compile, cuda_graphs=graphs)
        chain.runner.follow(self.runner)
        return chain

    def steady(self):
        return self

    def attach_verifier(self, verifier, sampling):
        self.runner.follow(verifier.runner)

    def attach_cache(self, cache):
        self.target_cache = cache

    @property
    def room(self) -> int:
        """Entries that the longest row may need; pending ones are more than the nodes of a tree."""
        num_entries = 0 if self.target_cache is None else self.target_cache.room
        return num_entries + self.depth * self.shape.width

    def finish(self, answer_lengths):
        self.cache.release()

    def begin(self, tokens, num):
        max_rows = 1 if self.target_cache is None else self.target_cache.max_rows
        self._begin(tokens, self.memory, max_rows)

    def _begin(self, tokens: Tensor, memory: CacheMemory, max_rows: int) -> None:
        """`begin` with K and V from a memory."""
        self.cache = self.drafter.cache(tokens.shape[0])
        self.cache.use_memory(self.room, memory, num_rows=max_rows, masked=self.runner.cuda_graphs)
        self.first_tokens = tokens[:, :1]  # [B, 1] token of slot 0, which no `commit` has
        # [B, 1, H] each: for context_kind="depth", the states of modules 1..K-1 at their newest slots
        self.carried: list[Tensor] = []
        self.absorbed: tuple[Tensor, StepOutput] | None = None  # result of `absorb`, until the next `commit`
        self.waiting: list[Committed] = []  # tokens that `absorb` has not read yet

    def commit(self, tokens, features, num, counts):
        """Only stores its arguments: `absorb` reads them for the next tree. So the last round computes nothing.

        If rounds are captured, a prompt is read at once, up to its last token: all rounds have one shape.
        """
        opens = self.cache.get_seq_length() == 0 and not self.waiting
        if self.drafter.first_slot == 0 and opens:
            tokens, num, counts = (
                torch.cat([self.first_tokens, tokens], dim=1),
                num + 1,
                [count + 1 for count in counts],
            )
        new = NewTokens(tokens, features, num, counts)
        if opens and self.runner.cuda_graphs and min(counts) > 1:
            last, shape = self._read_prompts(new), (len(counts), self.round_tokens)
            new = last._replace(tokens=last.tokens.expand(*shape), features=last.features.expand(*shape, -1))
        self.waiting.append(Committed(new, list(range(len(counts)))))
        self.absorbed = None

    @torch.no_grad()
    def _read_prompts(self, new: NewTokens) -> NewTokens:
        """Reads all but the last token of each row, in pieces. Returns the last ones [B, 1]."""
        tokens, features, num, counts = new
        self.cache.make_room(tokens.shape[1])
        size = count_piece_tokens(tokens.device, len(counts))
        for start in range(0, max(counts) - 1, size):
            stop = min(start + size, max(counts) - 1)
            piece_counts = [min(max(0, count - 1 - start), stop - start) for count in counts]
            piece_num = upload_values(piece_counts, tokens.device)
            piece = NewTokens(tokens[:, start:stop], features[:, start:stop], piece_num, piece_counts)
            self._read_piece(piece, start)
        last = _select_newest(tokens, num), _select_newest(features, num)
        return NewTokens(*last, torch.ones_like(num), [1] * len(counts))

    def _read_piece(self, new: NewTokens, start: int) -> None:
        """Reads tokens behind the first `start` entries of all rows. Rows that ended before keep their states."""
        tokens, features, num, counts = new
        cache = self.cache.with_tensors(self.cache.keys_and_values, self.cache.lengths)
        piece = Piece(start) if self.drafter.reads_pieces and cache.reads_pieces else None
        _, _, *states = self._first_step(tokens, features, num, cache, self.carried, piece)
        before = self.carried or [torch.zeros_like(state) for state in states]
        self.carried = [torch.where(num[:, None, None] > 0, *pair) for pair in zip(states, before)]
        self.cache.commit(num, counts)

    @property
    def round_tokens(self) -> int:
        """Columns of the tokens that a round commits."""
        return self.depth + 1

    def select(self, rows, answer_lengths):
        index = upload_values(rows, self.first_tokens.device)
        self.cache.select(rows)
        self.first_tokens, self.carried = self.first_tokens[index], [state[index] for state in self.carried]
        self.waiting = [committed.select(rows) for committed in self.waiting]
        if self.absorbed is not None:
            newest, first = self.absorbed
            self.absorbed = newest[index], StepOutput(*(tensor[index] for tensor in first))

    def replace(self, rows, answer_lengths, opening):
        assert self.absorbed is None, "prompts join after a round"
        opened = copy.copy(self)
        opened._begin(opening.tokens, self.joining_memory, 1)
        opened.commit(opening.following, opening.features, opening.num, opening.counts)
        index = upload_values(rows, self.first_tokens.device)
        if self.cache.memory is not None:
            self.cache.grow(self.room)
        self.cache.replace(rows, opened.cache)
        opened.cache.release()
        self.first_tokens = self.first_tokens.index_copy(0, index, opened.first_tokens)
        numbers = dict(zip(rows, itertools.count()))
        prompts = opened.waiting[0]._replace(rows=[numbers.get(row) for row in range(len(self.first_tokens))])
        self.waiting = [*(committed.without(rows) for committed in self.waiting), prompts]

    @torch.no_grad()
    def mark(self):
        absorbed = self.absorb()  # a mark is a state of the cache, so nothing may wait outside of it
        return Mark(self.cache.mark(), self.carried, absorbed)

    def rewind(self, mark):
        self.cache.rewind(mark.cache)
        self.carried, self.absorbed, self.waiting = mark.carried, mark.absorbed, []

    @torch.no_grad()
    def propose(self, sampling, generator):
        num_rows, device = self.first_tokens.shape[0], self.first_tokens.device
        draws = [draw_column(num_rows, generator, device) for _ in range(self.count_draws(sampling))]
        newest, first = self.absorb()
        tree = self._grow(newest, first, sampling, draws)
        self.cache.drop_pending()
        return tree

    def _grow(self, newest: Tensor, first: StepOutput, sampling: AnySampling, draws: Sequence[Tensor]) -> Tree:
        if self.shape.chain:
            return grow_chain(self, newest[:, 0], first, sampling, draws)
        if draws:
            return grow_sampled_tree(self, newest[:, 0], first, sampling, draws, self.parents)
        return grow_tree(self, newest[:, 0], first)

    @property
    def _copies_weights(self) -> bool:
        """Whether a step reads a copy of weights that it makes itself, which no graph finds again."""
        return self.drafter.context_kind == "text" and self.drafter.draft_to_target is not None

    def count_drafts(self, sampling: AnySampling) -> int:
        """Nodes of a tree, without the root."""
        if self.shape.chain:
            return self.shape.depth
        if self.count_draws(sampling):
            return len(self.parents) - 1
        return count_tree_drafts(self.drafter, self.shape)

    # Rounds that the device makes alone (decoding/device_round.py)

    def can_leave_host(self, sampling: AnySampling) -> bool:
        """Whether the next round follows from tensors of fixed shape."""
        if not isinstance(sampling, Sampling) or not self.runner.cuda_graphs or self._copies_weights:
            return False
        known = self.absorbed is None and self.cache.memory is not None and bool(self.waiting)
        return known and all(self.cache.host_lengths) and max(self.count_waiting()) <= self.round_tokens

    def count_waiting(self) -> list[int]:
        """[B] committed tokens that were not read yet."""
        counts = [0] * len(self.waiting[0].rows)
        for new, rows in self.waiting:
            for row, source in enumerate(rows):
                counts[row] += 0 if source is None else new.counts[source]
        return counts

    def round_state(self) -> RoundState:
        """The state before a round, for which `can_leave_host` holds."""
        new = join_committed(self.waiting, length=self.round_tokens)
        return RoundState(self.cache.lengths, new.tokens, new.features, new.num, self.carried)

    def draft_from_state(
        self, state: RoundState, sampling: AnySampling, draws: Sequence[Tensor]
    ) -> tuple[Tree, RoundState]:
        """A tree, and the state after it, whose tokens and features are still those that were read.

        Only K and V change here. draws: see `count_draws`
        """
        view = copy.copy(self)
        view.captures_steps = False
        view.cache = self.cache.with_tensors(self.cache.keys_and_values, state.lengths)
        view.carried = list(state.carried)
        unknown_counts = [0] * len(state.num)
        new = NewTokens(state.tokens, state.features, state.num, unknown_counts)
        view.absorbed = newest, first = view._read(new, view.runner)
        tree = view._grow(newest, first, sampling, draws)
        return tree, replace(state, lengths=view.cache.lengths, carried=view.carried)

    def restore_round(self, state: RoundState, host_lengths: list[int], counts: list[int]) -> None:
        """Goes on from a state. host_lengths and counts [B]: `state.lengths` and `state.num` on the host"""
        self.cache.rewind((state.lengths, host_lengths))
        self.carried, self.absorbed = state.carried, None
        new = NewTokens(state.tokens, state.features, state.num, counts)
        self.waiting = [Committed(new, [*range(len(counts))])]

    def count_draws(self, sampling: AnySampling) -> int:
        """Random numbers that a tree needs in each row."""
        sampled = not sampling.greedy and (self.shape.chain or self.children == "distinct")
        return len(self.parents) - 1 if sampled else 0

    def absorb(self) -> tuple[Tensor, StepOutput]:
        """Returns the newest token [B, 1] and the result of its step 1.

        Runs step 1 over the tokens of each `commit` since the last call, and commits their entries in the cache.
        """
        if self.absorbed is None:
            opened_rows = [row for row, has_tokens in enumerate(self.cache.host_lengths) if not has_tokens]
            if 0 < len(opened_rows) < len(self.cache.host_lengths):
                self.absorbed = self._absorb_opened(opened_rows)
            else:
                self.absorbed = self._absorb_all(reads_prompts=bool(opened_rows))
        return self.absorbed

    def _absorb_all(self, *, reads_prompts: bool) -> tuple[Tensor, StepOutput]:
        """Reads all rows together. reads_prompts: whether their prompts are among the waiting tokens"""
        new = self._take_waiting(fixed=self.runner.by_shape and not reads_prompts)
        if not reads_prompts:
            return self._read(new, self.runner)
        # The shape of a prompt seldom comes again: not worth compiling
        sees_features = self.drafter.context_kind in ("none", "block")  # of all slots at once, without a mask of them
        return self._read(new if sees_features else self._read_prompts(new), Runner())

    def _take_waiting(self, *, fixed: bool) -> NewTokens:
        """Takes the tokens that were not read yet, and makes room for them and for drafts in the cache."""
        new, self.waiting = join_committed(self.waiting, length=self.round_tokens if fixed else None), []
        drafts = max(self.shape.depth * self.shape.width, self.shape.nodes)  # levels of a sampled tree may be wider
        self.cache.make_room(new.tokens.shape[1] + drafts)
        return new

    def _read(self, new: NewTokens, runner: Runner) -> tuple[Tensor, StepOutput]:
        inputs = new.tokens, new.features, new.num, self.cache.lengths, *self.carried
        name = "absorb", self.shape.depth
        *carried, newest, state, logits, shared_logits = self._run_step(runner, name, self._absorb, *inputs)
        self.carried = carried
        self.cache.commit(new.num, new.counts)
        return newest, StepOutput(state, logits, shared_logits)

    def _absorb_opened(self, opened_rows: list[int]) -> tuple[Tensor, StepOutput]:
        """Reads the rows with prompts by themselves: else all other rows would be padded to their length."""
        index, opened = upload_values(opened_rows, self.first_tokens.device), copy.copy(self)
        opened._begin(self.first_tokens[index], self.joining_memory, 1)
        opened.waiting = [committed.select(opened_rows) for committed in self.waiting]
        newest, first = opened.absorb()
        self.waiting = [committed.without(opened_rows) for committed in self.waiting]
        current_tokens, current_output = self._absorb_all(reads_prompts=False)
        self.cache.replace(opened_rows, opened.cache)
        opened.cache.release()
        self.carried = [state.index_copy(0, index, new) for state, new in zip(self.carried, opened.carried)]
        merged = [tensor.index_copy(0, index, new) for tensor, new in zip(current_output, first)]
        return current_tokens.index_copy(0, index, newest), StepOutput(*merged)

    def step(self, d: int, pending: int, state: Tensor, tokens: Tensor, seen: Tensor) -> StepOutput:
        """See growth.Steps."""
        if self.drafter.parallel:
            assert self.absorbed is not None
            shared_logits = self.absorbed[1].shared_logits
            return StepOutput(
                state, shared_logits[:, d - 2 : d - 1].expand(-1, tokens.shape[1], -1), shared_logits[:, :0]
            )

        d_traced = d
        if self.drafter.repeats_step and self.runner.by_shape:
            d_traced, seen = 2, self._widen_seen(seen)

        def step(state, tokens, seen, lengths, depth, places, *halves):
            positions = (lengths + depth)[:, None].expand_as(tokens)
            view = self.cache.with_tensors(halves, lengths, slots=lengths[:, None] + places)
            return self._step(d_traced, state, tokens, seen, positions, view)

        depth, places = self.numbers[self.drafter.first_slot + d - 2], self.numbers[pending : pending + tokens.shape[1]]
        inputs = state, tokens, seen, self.cache.lengths, depth, places
        state, logits = self._run_step(self.runner, ("step", d_traced), step, *inputs)
        return StepOutput(state, logits, logits[:, :0])

    def _widen_seen(self, seen: Tensor) -> Tensor:
        """`seen` of a step with as many entries as in the last step, so that all steps have one shape."""
        num, most = seen.shape[-1], (self.shape.depth - 1) * self.shape.width
        wide = seen.new_zeros(*seen.shape[:2], max(num, most))
        wide[..., :num] = seen
        return wide

    def _run_step(self, runner: Runner, name: object, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """function(*inputs, *K and V of the cache), as a CUDA graph if steps are captured."""

        def run(*inputs):
            return runner(name, function, *inputs, *self.cache.keys_and_values)

        if not self.captures_steps or self._copies_weights:
            return run(*inputs)
        return runner.run_whole(name, run, inputs, list(self.cache.groups.values()))

    def likeliest(self, logits: Tensor, num: int) -> tuple[list, list]:
        """Returns the `num` likeliest tokens of each row: probabilities [B][num] and target ids. logits [B, 1, W]"""

        def likeliest(logits):
            best = logits[:, 0].float().softmax(-1).topk(num, dim=-1)
            return best.values, self.drafter.to_target(best.indices)

        def run(logits):
            return self.runner(("candidates", num), likeliest, logits)

        values, tokens = self.runner.run_whole(("candidates", num), run, [logits], [])
        return values.tolist(), tokens.tolist()

    def _absorb(self, tokens, features, num, lengths, *tensors):
        """Computes `absorb` from tensors alone. tensors: the carried states, then keys and values of the cache

        Returns the states to carry on; the newest token [B, 1]; state and logits of its step 1; logits of later steps.
        """
        num_carried = len(tensors) - len(self.cache.keys_and_values)
        carried, halves = tensors[:num_carried], tensors[num_carried:]
        cache, newest = self.cache.with_tensors(halves, lengths), _select_newest(tokens, num)
        if self.drafter.parallel:
            state, readouts = self._parallel_step(tokens, features, num, cache)
            logits = self.drafter.logits(1, readouts)  # [B, K, W] of all depths in one product
            return newest, state, logits[:, :1], logits[:, 1:]
        state, readout, *states = self._first_step(tokens, features, num, cache, carried)
        logits = self.drafter.logits(1, readout)
        return *states, newest, state, logits, logits[:, :0]

    def _parallel_step(self, tokens: Tensor, features: Tensor, num: Tensor, cache: RowCache) -> tuple[Tensor, Tensor]:
        """Runs all steps of a parallel drafter at once.

        Returns a state that nothing reads [B, 1, 0], and the readouts of all steps [B, K, R].
        """
        drafter, num_new, num_later = self.drafter, tokens.shape[1], self.shape.depth - 1
        blank = drafter.blank(len(tokens), num_later)
        if blank is None:
            state, _ = self._first_step(tokens, features, num, cache, ())
            return state[..., :0], drafter.all_readouts(state)[:, 0, : 1 + num_later]
        # The later steps of the newest slot stand after all new slots, whatever the number of new slots in each row
        h = torch.cat([drafter.encode(features), blank[0]], dim=1)
        slot_index = torch.arange(num_new + num_later, device=h.device)  # [S + K - 1]
        is_later_step = (slot_index >= num_new)[None]
        later_slots = num[:, None] + torch.arange(num_later, device=h.device)  # [B, K - 1] slots of the steps behind
        slots = torch.cat(
            [slot_index[:num_new].expand(len(h), -1), later_slots], dim=1
        )  # [B, S + K - 1], of the new ones
        real = is_later_step | (slot_index < num[:, None])  # [B, S + K - 1]
        seen = masks.causal_mask(num_new + num_later, h.device) & real[:, None]  # [B, ., S + K - 1]
        seen = seen | torch.eye(num_new + num_later, dtype=torch.bool, device=h.device)
        cache.reserve(num_new + num_later)
        mask = cast(Tensor, cache.sees(seen, drafter.windows))
        positions = cache.lengths[:, None] + drafter.first_slot + slots
        state, readout = drafter.step(1, h, torch.cat([tokens, blank[1]], dim=1), positions, mask, cache)
        return state[:, :1, :0], torch.cat([_select_newest(readout, num), readout[:, num_new:]], dim=1)

    def _first_step(
        self, tokens: Tensor, features: Tensor, num: Tensor, cache: RowCache, carried, text_piece: Piece | None = None
    ) -> tuple[Tensor, ...]:
        """Runs step 1 over the new tokens with their true features, and writes the keys that later rounds need.

        text_piece: stand-in for a mask
        Returns state and readout [B, 1, .] of the newest slot, then the states to carry on.
        """
        drafter, num_new = self.drafter, tokens.shape[1]
        start = cache.lengths + drafter.first_slot  # [B] the first new slot
        positions = start[:, None] + torch.arange(num_new, device=start.device)  # [B, S]
        if drafter.first_slot == 0:
            h = features.new_zeros(*tokens.shape, 0)
        else:
            h = drafter.encode(features)
        cache.reserve(num_new)
        if drafter.context_kind in ("none", "block"):
            drafter.context(h, positions - 1, cache)
            seen = masks.committed_mask(cache.lengths + num, cache.visible)
            h, tokens, positions = (_select_newest(x, num) for x in (h, tokens, positions))
            return drafter.step(1, h, tokens, positions, seen, cache)

        mask: Any = text_piece or cache.sees(masks.causal_mask(num_new, start.device), drafter.windows)
        state, readout = drafter.step(1, h, tokens, positions, mask, cache)
        newest = _select_newest(state, num), _select_newest(readout, num)
        if drafter.context_kind != "depth":
            return newest
        # Modules 2..K read the new tokens too, each at a slot one further back. An entry of the cache stands for a
        # token: in module d it is the entry of the slot whose step d reads this token.
        states: list[Tensor] = []
        for d in range(2, self.shape.depth + 1):
            previous_state = carried[d - 2] if carried else torch.zeros_like(state[:, :1])
            states.append(_select_newest(state, num))
            h = torch.cat([previous_state, state[:, :-1]], dim=1)
            state, _ = drafter.step(d, h, tokens, positions, _mask_lagging(mask, d, cache), cache)
        return *newest, *states

    def _step(self, d: int, state, tokens, seen, positions, cache: RowCache) -> tuple[Tensor, Tensor]:
        """Computes `step` from tensors and a cache made of tensors. positions [B, w]: positions of the tokens"""
        drafter, mask = self.drafter, None
        if drafter.context_kind not in ("none", "block"):
            if drafter.context_kind == "depth":
                seen = torch.zeros_like(seen)  # the earlier nodes are entries of other modules; a node sees itself
            mask = cast(Tensor, cache.sees(seen, drafter.windows))
            if drafter.context_kind == "depth":
                mask = _mask_lagging(mask, d, cache)
        state, readout = drafter.step(d, state, tokens, positions, mask, cache)
        return state, drafter.logits(d, readout)


def make_draft_proposer(
    target: Target,
    *,
    model: Text,
    depth: SmallCount,
    width: SmallCount,
    nodes: BatchSize | None,
    children: Children,
    compile: bool | None,
) -> HeadProposer:
    """Makes the proposer of two-model drafting (2211.17192, 2302.01318): a frozen causal LM in the target's dtype.

    model: folder or Hub name of a causal LM with the target's tokenizer
        Tokens that only one of the two models has are never drafted.
    depth, width, nodes: see TreeShape; nodes None: depth x width
    Raises ValueError if the model cannot be used.
    """
    lm, drafted = load_existing(target, model, dtype=str(target.dtype).removeprefix("torch."))
    drafter = Draft(target, model=lm, vocab=drafted).requires_grad_(False)
    return HeadProposer(drafter, TreeShape(depth, width, nodes or depth * width), children=children, compile=compile)


def _select_newest(values: Tensor, num: Tensor) -> Tensor:
    """[B, 1, ...]: the last value that counts in each row of values [B, S, ...]"""
    return select_last(values, num)[:, None]


def _mask_lagging(mask: Any, d: int, cache: RowCache) -> Any:
    """Returns the entries of module d that a slot could see when it was the newest, for context_kind="depth".

    No slot's step d reads the first d - 1 tokens. The slot whose step d reads an entry's token is d - 1 before that
    token. It sees the keys of tokens up to its own, and itself, so that no row is empty. See docs/architecture.md.
    """
    if isinstance(mask, Piece):
        return replace(mask, lag=d - 1)
    entry = torch.arange(mask.shape[-1], device=mask.device)  # [C]
    own_slot = cache.slots[:, None, :, None]  # [B, 1, S, 1]
    return mask & (entry >= d - 1) & (entry <= own_slot - (d - 1)) | (entry == own_slot)
