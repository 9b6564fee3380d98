"""Requests that are decoded together: they join between rounds, and leave once their answers have ended."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core import constraint, rules, token_counts
from specdec.core.cache import RowCache
from specdec.core.clock import Moment, RoundClock
from specdec.core.constraint import Constraint
from specdec.core.devices import LateValues, round_up_power, upload_values
from specdec.core.generation import STAGES, Ends, Generation, RoundCost
from specdec.core.sampling import NO_TOKEN, AnySampling, Randomness, Sampling, join_samplings
from specdec.core.tree import Tree, make_root
from specdec.decoding.device_round import DeviceLoop, find_device_round
from specdec.decoding.prefill import Prefill
from specdec.proposers.base import Opening, Proposer
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from specdec.target.verifier import Verdict, Verifier


@dataclass(eq=False)
class Request:
    """A prompt, and its answer so far.

    tokens_left: number of tokens that the answer may still have; 0 once it has ended
    generator: random numbers of this answer alone; None: those of the batch
    sampling, ends: settings of this answer alone; None: those of the decoder
    penalised [V] bool: tokens with a repetition penalty from the start; None: the prompt's tokens
    constraint: state of the grammar that the answer follows; None: the answer is free
    generation: the answer, with its share of the times of its rounds
    ended: whether a token or a text has ended the answer, not its length
    fault: sentence that says why the answer could not go on
    """

    prompt: list[int]
    tokens_left: int
    generator: torch.Generator | None = None
    sampling: Sampling | None = None
    ends: Ends | None = None
    penalised: Tensor | None = None
    constraint: Constraint | None = None
    generation: Generation = field(default_factory=lambda: Generation([[]], [[]]))
    ended: bool = False
    fault: str = ""

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens[0]

    def extend_answer(self, new: list[int], ends: Ends) -> list[int]:
        """Adds the new tokens up to the answer's end, and returns those that were added.

        The answer ends with a fault if the last token is NO_TOKEN, or the grammar refuses one.
        """
        if new[-1] == NO_TOKEN:
            return self._fail(NOTHING_FOLLOWS.format(len(self.tokens)))
        if not self.tokens:
            self.ends = (self.ends or ends).begin(self.prompt)
        assert self.ends is not None
        new, self.ended = self.ends.cut_tokens(self.tokens, new[: self.tokens_left])
        self.generation.tokens[0].extend(new)
        if self.constraint:
            try:
                self.constraint.take(new)
            except ValueError as error:
                return self._fail(str(error))
        self.tokens_left = 0 if self.ended else self.tokens_left - len(new)
        return new

    def _fail(self, fault: str) -> list[int]:
        self.fault, self.tokens_left = fault, 0
        return []


NOTHING_FOLLOWS = (
    "No token can follow the answer's first {}: the target's logits are not finite there, or a grammar allows none. "
    "float16 may overflow: then use dtype=bfloat16 or float32."
)


@dataclass(frozen=True)
class BatchRound:
    """The tokens that one round added to the answers of R running requests.

    requests [R]: requests that were running; row_indices [R]: their rows in the tree and the path
    tokens [R][.]: tokens added to each answer, up to its end
    num_kept [R]: accepted nodes of the path with the root, those past the end of an answer included
    num_drafted: nodes of the tree, without the root
    tree, path [B, P]: accepted nodes as in Verdict, up to the deepest draft; None for a round of the device alone
    """

    requests: list[Request]
    tokens: list[list[int]]
    row_indices: list[int]
    num_kept: list[int]
    num_drafted: int
    cost: RoundCost
    tree: Tree | None = None
    path: Tensor | None = None

    @property
    def accepted(self) -> list[int]:
        """[R] drafts among the tokens that were added."""
        return [max(0, len(tokens) - 1) for tokens in self.tokens]

    def record(self) -> None:
        """Adds the round's counts to each answer, and an equal share of its times."""
        token_counts.count_tokens(written=sum(map(len, self.tokens)))
        for request, accepted in zip(self.requests, self.accepted):
            request.generation.accepted[0].append(accepted)
            request.generation.drafted.append(self.num_drafted)
            request.generation.add_times(self.cost, 1 / len(self.requests))


@dataclass
class LaunchedRound:
    """A round that the device makes alone.

    requests, is_running [B]: the rows at its start; num_drafted: nodes of a tree, without the root
    marks: start and end on the device
    values: tokens and their number for each row, to be read later
    `tokens`, `counts`: the same on the host, once they were read
    """

    requests: list[Request]
    is_running: list[bool]
    num_drafted: int
    values: LateValues
    marks: tuple[Moment, Moment]
    tokens: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class AcceptedPath(NamedTuple):
    """The nodes of a tree that the rule accepted in each row, and the tokens after them."""

    path: Tensor  # [B, P] nodes from the root down, up to the deepest draft
    following: Tensor  # [B, P] token after each node; 0 in place of NO_TOKEN
    num_kept: Tensor  # [B] accepted nodes of the path, with the root
    tokens: list[tuple[int, ...]]  # [B][P] `following` on the host, with NO_TOKEN
    counts: list[int]  # [B] `num_kept` on the host


class Batch:
    """Decodes B requests together, one round at a time. `Decoder.batch` makes it.

    generator: random numbers of all requests that have none of their own
    max_rows: requests that may run at once, for which K and V are allocated if passes are captured
    `requests` [B]: requests being decoded. A finished request keeps its row, unchanged, until `_shrink` removes it
    `last_tokens` [B]: the last token of each row
    `penalised_tokens` [B, V] bool: tokens with a repetition penalty; None: no row has a penalty
    """

    cache: RowCache
    last_tokens: Tensor
    penalised_tokens: Tensor | None

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        verify: Verifier,
        ends: Ends,
        generator: torch.Generator | None,
        max_rows: int,
    ):
        self.target, self.proposer, self.verify, self.ends, self.generator = target, proposer, verify, ends, generator
        self.max_rows = max_rows
        self.default_sampling = verify.sampling  # sampling of requests that have none of their own
        self.sampling: AnySampling = self.default_sampling  # sampling of all rows
        self.runner = verify.runner
        # Entries behind an answer: a tree, and what two rounds commit of which the host does not know
        depth, nodes = (proposer.depth, proposer.nodes) if proposer else (0, 0)
        self.reserve = 1 + nodes + 2 * (1 + depth)
        # K and V of this kind of batch, and of prompts that join one
        self.memory = self.runner.memories["rows", verify.hidden_states, self.reserve, max_rows]
        self.joining_memory = self.runner.memories["joining prompts"]
        self.clock = RoundClock(target.device, self._compile_seconds)
        self.previous_round_marks: tuple[Moment, ...] = ()  # after the wait, after the commit, at the end
        self.device_loop: DeviceLoop | None = None  # rounds of the device alone; None: the host takes part
        self.launched: LaunchedRound | None = None  # the last of them, not delivered yet
        self.proposer_began = False  # whether the proposer has read this batch's prompts
        self.requests: list[Request] = []

    @property
    def running(self) -> list[Request]:
        """Requests whose answers have not ended."""
        return [request for request in self.requests if request.tokens_left]

    @property
    def joins(self) -> bool:
        """Whether requests can join while others run. Else `admit` needs a batch in which none runs."""
        return self.proposer is None or self.proposer.selects

    def count_free(self, batch_size: int) -> int:
        """The number of requests that can join now, if `batch_size` may run at once."""
        running = len(self.running)
        return batch_size - running if self.joins or not running else 0

    @torch.inference_mode()
    def prefill(self, requests: list[Request]) -> Prefill:
        """Returns the prompts of requests that will be admitted together. Nothing of them is read yet."""
        if not self.running:
            self.close()  # its memory may be used again
        prefill = Prefill(self.target, self.verify.hidden_states, [request.prompt for request in requests])
        if self.running:
            prefill.cache.use_memory(self._count_room(requests), self.joining_memory)
        else:
            self._allocate_rows(prefill.cache, requests)
        return prefill

    def expect(self, longest: int) -> None:
        """Announces texts of at most `longest` tokens with their answers, so that one capacity serves all."""
        self.memory.expect(longest + self.reserve, self.max_rows)

    def _count_room(self, requests: list[Request]) -> int:
        """Entries that the longest answer and what is behind it may need."""
        lengths = (len(request.prompt) + len(request.tokens) + request.tokens_left for request in requests)
        return max(lengths, default=0) + self.reserve

    def _allocate_rows(self, cache: RowCache, requests: list[Request]) -> None:
        """Gives the cache of a new batch its K and V, for as many rows as may come to run."""
        num_rows = self.max_rows if self.joins else 1
        cache.use_memory(self._count_room(requests), self.memory, num_rows=num_rows)

    @torch.inference_mode()
    def read(self, prefill: Prefill, max_tokens: int | None = None) -> None:
        """Reads on in prompts between rounds. max_tokens: see Prefill.advance"""
        start, num_before = self.clock.mark(), prefill.num_read
        prefill.advance(max_tokens)
        prefill.read_times.append((start, self.clock.mark()))
        num_read = prefill.num_read - num_before
        token_counts.count_tokens(read=sum(min(max(0, count - num_before), num_read) for count in prefill.counts))

    @torch.inference_mode()
    def admit(self, requests: list[Request], prefill: Prefill | None = None) -> list[list[int]]:
        """Reads the prompts, or what `prefill` has not read of them, and returns the first token of each answer."""
        self._leave_device()
        prefill, waiting = prefill or self.prefill(requests), self.running
        while not prefill.complete:
            self.read(prefill)
        start = self.clock.mark()
        if self.running:
            assert self.joins, "this proposer's batches cannot be joined"
            first = self._join(requests, prefill)
        else:
            first = self._open(requests, prefill)
        tokens, end = self.clock.read(first)
        emitted = [request.extend_answer([token], self.ends) for request, token in zip(requests, tokens)]
        seconds = sum(self.clock.seconds(*span) for span in [*prefill.read_times, (start, end)])
        for request in requests:
            request.generation.prefill_seconds += seconds / len(requests)
        for request in waiting:
            request.generation.elapsed += seconds
        return emitted

    @torch.inference_mode()
    def run_round(self) -> BatchRound:
        """Drafts, verifies and commits once in all rows, and returns the tokens of the running requests.

        At least one request must be running. docs/architecture.md, section 5, shows the loop.
        """
        clock, compile_seconds = self.clock, self._compile_seconds()
        if self._enters_device() or self.launched is not None:
            return self._run_on_device(compile_seconds)
        start = clock.mark()

        # Remove finished rows. Those that stay, because shapes are compiled, take part without effect.
        self._shrink()
        is_running = [request.tokens_left > 0 for request in self.requests]

        # Draft a tree in every row, without what grammars do not allow.
        tree, allowed = self._constrain(self._draft_tree())
        drafted = clock.mark()

        # Verify the tree in one pass of the target, and wait for the accepted path.
        verdict, accepted, verified = self._verify_tree(tree, allowed)

        # Commit the accepted path to the cache and to the proposer; finished rows commit nothing.
        accepted = self._commit_accepted(tree, verdict, accepted, is_running)
        committed = clock.mark()

        # Extend the answers of the running requests.
        row_indices = [row for row, runs in enumerate(is_running) if runs]
        requests = [self.requests[row] for row in row_indices]
        emitted = [list(accepted.tokens[row][: accepted.counts[row]]) for row in row_indices]
        tokens = [request.extend_answer(new, self.ends) for request, new in zip(requests, emitted)]
        self._penalise(accepted)

        # Measure the round, and give each answer its share.
        cost = self._measure_round((start, drafted), (verified, committed, clock.mark()), compile_seconds)
        num_kept = [accepted.counts[row] for row in row_indices]
        num_drafted = tree.tokens.shape[1] - 1
        round_ = BatchRound(requests, tokens, row_indices, num_kept, num_drafted, cost, tree, accepted.path)
        if self.proposer and not cost.compile_seconds:
            self.proposer.record_cost(cost)
        round_.record()
        return round_

    def close(self) -> None:
        """Ends the batch, and lets the proposer learn from its answers. The batch may be used again."""
        self.device_loop = self.launched = None
        if self.requests:
            if self.proposer and self.proposer_began:
                self.proposer.finish(self._answer_lengths())
            self.cache.release()
        self.requests, self.proposer_began = [], False

    # Rounds of the device alone

    def _enters_device(self) -> bool:
        """Whether the device makes the next rounds alone, as it then does until requests join or the batch ends."""
        if not self.runner.cuda_graphs:
            return False
        if self.device_loop is None and self._has_room_for_device():
            device_round = find_device_round(self.cache, self.verify, self.proposer, self.sampling)
            if device_round is not None:
                head = self.proposer if isinstance(self.proposer, HeadProposer) else None
                self.device_loop = DeviceLoop(device_round, self.cache, head, self.last_tokens)
        return self.device_loop is not None

    def _has_room_for_device(self) -> bool:
        """Whether no grammar needs the host, and rounds in vain stay within the caches and the target's positions."""
        room, limit = self._count_room(self.requests), self.target.max_positions
        fits = room <= self.cache.capacity and (limit is None or room <= limit)
        if fits and isinstance(self.proposer, HeadProposer):
            fits = self.proposer.room <= self.proposer.cache.capacity
        return fits and not any(self._constraints())

    def _run_on_device(self, compile_seconds: float) -> BatchRound:
        """Starts the next round on the device, and delivers the tokens of the one before.

        compile_seconds: seconds of compiling before the round
        """
        # Start what can be started before the host waits.
        host_start = time.perf_counter()
        launched = self.launched or self._launch(None)
        assert launched is not None, "a request is running"
        self.launched = self._launch(launched) if self.device_loop is not None else None
        host_seconds = time.perf_counter() - host_start

        # Extend the answers of the running requests.
        self._note_round(launched)
        host_start = time.perf_counter()
        rows = [row for row, runs in enumerate(launched.is_running) if runs and launched.requests[row].tokens_left]
        requests, num_kept = [launched.requests[row] for row in rows], [launched.counts[row] for row in rows]
        emitted = [launched.tokens[row][: launched.counts[row]] for row in rows]
        tokens = [request.extend_answer(new, self.ends) for request, new in zip(requests, emitted)]
        host_seconds += time.perf_counter() - host_start

        # The device works while the host does, so a round takes the longer of both.
        compile_seconds = self._compile_seconds() - compile_seconds
        seconds = max(self.clock.seconds(*launched.marks), host_seconds)
        cost = RoundCost(seconds, compile_seconds, {"round": seconds})
        round_ = BatchRound(requests, tokens, rows, num_kept, launched.num_drafted, cost)
        round_.record()
        return round_

    def _launch(self, previous: LaunchedRound | None) -> LaunchedRound | None:
        """Starts a round; None if no row has tokens left. previous: round that runs, and was not read"""
        assert self.device_loop is not None
        busy = {} if previous is None else dict(zip(map(id, previous.requests), previous.is_running))
        # The previous round gives each of its rows a token or more
        is_running = [request.tokens_left > busy.get(id(request), False) for request in self.requests]
        if not any(is_running):
            return None
        start = self.clock.mark()
        self.device_loop.launch(is_running, self._randomness(self.requests))
        marks = start, self.clock.mark()  # before the result, whose wait makes them known
        num_drafted, values = self.device_loop.round.num_drafts, self.device_loop.copy_result()
        return LaunchedRound(list(self.requests), is_running, num_drafted, values, marks)

    def _note_round(self, launched: LaunchedRound) -> None:
        """Waits for the result of a round, unless that was done before."""
        if launched.counts:
            return
        for *tokens, count in launched.values.read():
            launched.tokens.append(tokens)
            launched.counts.append(count)
        if self.device_loop is not None:
            kept = zip(launched.counts, launched.is_running)
            self.device_loop.note_counts([count if runs else 0 for count, runs in kept])

    def _leave_device(self) -> None:
        """Lets the host take part again, before rows change. A round that runs is delivered by the next `run_round`."""
        if self.device_loop is not None:
            if self.launched is not None:
                self._note_round(self.launched)
            self.last_tokens = self.device_loop.leave()
            self.device_loop = None

    # Rows

    def _answer_lengths(self) -> list[int]:
        """[B] tokens of each answer."""
        return [len(request.tokens) for request in self.requests]

    def _shrink(self) -> None:
        """Removes finished rows, unless shapes are compiled: each number of rows would be a new shape."""
        staying = [row for row, request in enumerate(self.requests) if request.tokens_left or self.runner.by_shape]
        if self.joins and len(staying) < len(self.requests):
            num = len(staying)
            last = [row for row in staying if row >= num]  # rows that take the places of those that leave
            rows = [row if self.requests[row].tokens_left else last.pop() for row in range(num)]
            self._select(rows, self._answer_lengths())

    def _add_rows(self, num_added: int) -> None:
        """Adds rows that hold no request. If passes are captured, numbers of rows are powers of two."""
        num_before = len(self.requests)
        num_rows = num_before + num_added
        if self.runner.cuda_graphs and self.joins:
            num_rows = max(num_rows, min(round_up_power(num_rows), self.max_rows))
        if num_rows > num_before:
            self._select([*range(num_before), *[0] * (num_rows - num_before)], self._answer_lengths())
            first = self.requests[0]
            generator = None if first.generator is None else torch.Generator()
            self.requests[num_before:] = [
                Request([], 0, generator, first.sampling) for _ in range(num_rows - num_before)
            ]

    def _select(self, rows: list[int], answer_lengths: list[int]) -> None:
        """Goes on with these rows only, in this order. answer_lengths [B]: tokens of each answer"""
        index = upload_values(rows, self.last_tokens.device)
        self.cache.select(rows)
        self.last_tokens = self.last_tokens[index]
        if self.penalised_tokens is not None:
            self.penalised_tokens = self.penalised_tokens[index]
        if self.proposer:
            self.proposer.select(rows, answer_lengths)
        self.requests = [self.requests[row] for row in rows]
        self._update_sampling()

    def _update_sampling(self, *, new: bool = False) -> None:
        """Joins the samplings of all rows. The proposer is told if their kind has changed, or the batch is new."""
        previous, self.sampling = self.sampling, join_samplings([self._sampling_of(row) for row in self.requests])
        if self.proposer and (new or self.sampling.kind != previous.kind):
            self.proposer.attach_verifier(self.verify, self.sampling)

    def _sampling_of(self, request: Request) -> Sampling:
        return request.sampling or self.default_sampling

    def _open(self, requests: list[Request], prefill: Prefill) -> Tensor:
        """Starts a new batch with these requests, and returns the first token of each answer [R], or NO_TOKEN."""
        self.close()
        self.cache = self._take_cache(prefill, requests)
        self.requests, self.previous_round_marks = list(requests), ()
        first, self.last_tokens, self.penalised_tokens, opening = self._start_answers(requests, prefill)
        self._update_sampling(new=True)
        if self.proposer:
            self.proposer.attach_cache(self.cache)
            self.proposer.begin(opening.tokens, opening.num)
            self.proposer.commit(opening.following, opening.features, opening.num, opening.counts)
            self.proposer_began = True
        self._add_rows(0)
        return first

    def _take_cache(self, prefill: Prefill, requests: list[Request]) -> RowCache:
        """The cache of prompts that open a batch, in the memory of batches."""
        if prefill.cache.memory is not self.joining_memory:
            return prefill.cache
        cache = self.target.cache(len(requests))  # others ran when the prompts were begun
        self._allocate_rows(cache, requests)
        cache.replace([*range(len(requests))], prefill.cache)
        prefill.cache.release()
        return cache

    def _join(self, requests: list[Request], prefill: Prefill) -> Tensor:
        """Puts requests into rows of finished ones or into new rows; returns their first tokens [R], or NO_TOKEN."""
        # Find rows, and add those that are missing.
        num_missing = len(requests) - sum(not request.tokens_left for request in self.requests)
        if num_missing > 0:
            self._add_rows(num_missing)
        answer_lengths = self._answer_lengths()
        rows = [row for row, request in enumerate(self.requests) if not request.tokens_left][: len(requests)]

        # Replace these rows in all that is kept for each row.
        first, last_tokens, penalised, opening = self._start_answers(requests, prefill)
        index = upload_values(rows, last_tokens.device)
        if self.cache.memory is not None:
            self.cache.grow(self._count_room(requests))
        self.cache.replace(rows, prefill.cache)
        prefill.cache.release()
        self.last_tokens = self.last_tokens.index_copy(0, index, last_tokens)
        if penalised is not None and self.penalised_tokens is None:
            shape = len(self.requests), self.target.vocab_size
            self.penalised_tokens = torch.zeros(shape, dtype=torch.bool, device=last_tokens.device)
        if self.penalised_tokens is not None:  # rows without a penalty need no marks
            marks = torch.zeros_like(self.penalised_tokens[index]) if penalised is None else penalised
            self.penalised_tokens = self.penalised_tokens.index_copy(0, index, marks)
        if self.proposer:
            self.proposer.replace(rows, answer_lengths, opening)
        for row, request in zip(rows, requests):
            self.requests[row] = request
        self._update_sampling()
        return first

    def _randomness(self, requests: list[Request]) -> Randomness:
        if all(request.generator is None for request in requests):
            return self.generator
        return [request.generator or self.generator for request in requests]

    # Steps of a round

    def _draft_tree(self) -> Tree:
        """The proposer's tree, or the root alone."""
        if self.proposer is None:
            return make_root(self.last_tokens)
        self.proposer.limit([request.tokens_left for request in self.requests], self.ends.tokens)
        self.proposer.constrain(self._constraints())
        tree = self.proposer.propose(self.sampling, self._randomness(self.requests))
        return tree.pad_to_power(self.proposer.depth) if self.runner.by_shape and self.proposer.varies else tree

    def _constraints(self) -> list[Constraint | None]:
        return [request.constraint if request.tokens_left else None for request in self.requests]

    def _constrain(self, tree: Tree) -> tuple[Tree, Tensor | None]:
        """Returns the tree without drafts that grammars refuse, and the tokens allowed after each node [B, N, V] bool.

        None: every token is allowed.
        """
        constraints = self._constraints()
        if not any(constraints):
            return tree, None
        fixed = self.runner.by_shape  # another size would be compiled first
        return constraint.constrain_tree(tree, constraints, self.target.vocab_size, prune=not fixed)

    def _verify_tree(self, tree: Tree, allowed: Tensor | None) -> tuple[Verdict, AcceptedPath, Moment]:
        """Runs the target over the tree and applies the rule; waits for the accepted path, and marks when it came."""
        penalised = self.penalised_tokens if self.sampling.penalises else None
        draws = rules.Draws(self._randomness(self.requests))
        verdict = self.verify(tree, self.cache, draws, penalised, sampling=self.sampling, allowed=allowed)
        num_kept, self.last_tokens = verdict.num_kept, verdict.next_token.clamp(min=0)
        path, following = verdict.follow_path(tree, self.proposer.depth if self.proposer else 0)  # [B, P] each
        # The only wait for the device in a round
        (*columns, counts), verified = self.clock.read(torch.cat([following, num_kept[:, None]], dim=1).T)
        # A row without a next token ends with this round, so any token may stand for NO_TOKEN
        accepted = AcceptedPath(path, following.clamp(min=0), num_kept, list(zip(*columns)), counts)
        return verdict, accepted, verified

    def _commit_accepted(
        self, tree: Tree, verdict: Verdict, accepted: AcceptedPath, is_running: list[bool]
    ) -> AcceptedPath:
        """Commits the accepted path to the cache and to the proposer, and returns what was committed.

        A finished row commits nothing: else its text would outgrow the target's positions.
        """
        path, following, num_kept, _, counts = accepted
        if not tree.linear and max(counts) > 1:  # the root is in its place
            self.cache.keep_path(path)
        if not all(is_running):
            num_kept = num_kept * upload_values(is_running, num_kept.device)
            counts = [count * runs for count, runs in zip(counts, is_running)]
        self.cache.commit(num_kept, counts)
        if self.proposer:
            features = verdict.output.features
            if not tree.linear:
                features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
            self.proposer.commit(following, features, num_kept, counts)
        return accepted._replace(num_kept=num_kept, counts=counts)

    def _penalise(self, accepted: AcceptedPath) -> None:
        """Marks the committed tokens, to which a repetition penalty applies from now on."""
        if self.penalised_tokens is None:
            return
        following = accepted.following
        is_kept = torch.arange(following.shape[1], device=following.device) < accepted.num_kept[:, None]
        self.penalised_tokens.scatter_(1, torch.where(is_kept, following, self.last_tokens[:, None]), True)

    def _measure_round(
        self, draft_marks: tuple[Moment, Moment], marks: tuple[Moment, Moment, Moment], compile_seconds: float
    ) -> RoundCost:
        """Returns the seconds of each stage of the round. compile_seconds: seconds of compiling before the round

        A device that works behind the host has not reached the last marks: those of the previous round count instead.
        """
        shown_marks = self.previous_round_marks if self.clock.queued else marks
        self.previous_round_marks = marks
        intervals = [draft_marks, (draft_marks[1], marks[0]), *itertools.pairwise(shown_marks)]
        stages = dict.fromkeys(STAGES, 0.0) | dict(zip(STAGES, itertools.starmap(self.clock.seconds, intervals)))
        return RoundCost(sum(stages.values()), self._compile_seconds() - compile_seconds, stages)

    # Prompts

    def _start_answers(
        self, requests: list[Request], prefill: Prefill
    ) -> tuple[Tensor, Tensor, Tensor | None, Opening]:
        """Draws the first token of each answer from prompts that were read.

        Returns the first tokens [R], or NO_TOKEN; the same with 0 for NO_TOKEN; penalised tokens [R, V] bool or None;
        and the prompts for the proposer.
        """
        padded, num, (last, features) = prefill.tokens, prefill.num, prefill.output()
        logits = self.target.logits(last)  # [R, V]
        sampling = join_samplings([self._sampling_of(request) for request in requests])
        penalised = None
        if sampling.penalises:
            penalised = self._mark_penalised(padded, num, [request.penalised for request in requests])
            logits = sampling.penalise(logits, penalised)
        if any(request.constraint for request in requests):
            states = [[request.constraint.following() if request.constraint else None] for request in requests]
            logits = logits.masked_fill(
                ~constraint.unpack_masks(states, logits.shape[1], logits.device)[:, 0], -torch.inf
            )
        if sampling.greedy:
            largest, best = logits.max(-1)
            first = torch.where(largest.isfinite(), best, NO_TOKEN)
        else:
            draws = rules.Draws(self._randomness(requests))
            first = draws.token(sampling.distribution(logits), torch.ones_like(num, dtype=torch.bool))
        newest = first.clamp(min=0)
        if penalised is not None:
            penalised.scatter_(1, newest[:, None], True)
        following = torch.cat([padded[:, 1:], newest[:, None]], dim=1)  # [R, T]
        following[torch.arange(len(num), device=num.device), num - 1] = newest
        return first, newest, penalised, Opening(padded, num, following, features, prefill.counts)

    def _mark_penalised(self, padded: Tensor, num: Tensor, penalised: Sequence[Tensor | None]) -> Tensor:
        """[R, V] bool: tokens of each prompt, or those that its request names. penalised [R]: see Request"""
        is_prompt = torch.arange(padded.shape[1], device=padded.device) < num[:, None]  # [R, T]
        marks = torch.zeros(len(num), self.target.vocab_size, dtype=torch.bool, device=padded.device)
        marks.scatter_(1, torch.where(is_prompt, padded, padded[:, :1]), True)
        row_marks = [marks[row] if named is None else named.to(marks.device) for row, named in enumerate(penalised)]
        return torch.stack(row_marks)

    def _compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self.runner.seconds + (self.proposer.compile_seconds if self.proposer else 0.0)
