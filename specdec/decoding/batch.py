"""Rows that are decoded together: prompts are read and join between rounds, and rows leave when their answers have ended."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.core import constraint, masks, rules
from specdec.core.cache import RowCache
from specdec.core.clock import Moment, RoundClock
from specdec.core.constraint import Constraint
from specdec.core.devices import upload_values
from specdec.core.generation import STAGES, Ends, Generation, RoundCost
from specdec.core.sampling import NO_TOKEN, AnySampling, Randomness, Sampling, join_samplings
from specdec.core.tree import Tree, make_root
from specdec.proposers.base import Opening, Proposer
from specdec.target.model import Target, TargetOutput
from specdec.target.verifier import Verifier


@dataclass(eq=False)
class Request:
    """A prompt, and its answer so far.

    left: tokens that the answer may still have; 0 once it has ended
    generator: of this answer's random numbers alone; None: those of the batch
    sampling, ends: of this answer alone; None: those of the decoder
    penalised [V] bool: tokens to which a repetition penalty applies from the start; None: the prompt's tokens
    constraint: of a grammar that the answer follows; None: it is free
    generation: the answer, and its share of the times of the rounds that it took part in
    """

    prompt: list[int]
    tokens_left: int
    generator: torch.Generator | None = None
    sampling: Sampling | None = None
    ends: Ends | None = None
    penalised: Tensor | None = None
    constraint: Constraint | None = None
    generation: Generation = field(default_factory=lambda: Generation([[]], [[]]))
    ended: bool = False  # by a token or text that ends it, not by its length
    fault: str = ""  # why the answer could not go on

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens[0]

    def extend_answer(self, new: list[int], ends: Ends) -> list[int]:
        """Adds new tokens to the answer, up to its end -> those that were added. With NO_TOKEN behind them, or where the grammar refuses them,
        none is added, and the answer ends with a fault."""
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
    "No token can follow the answer's first {}: the target's logits are not finite there, or a grammar allows none. float16 may "
    "overflow: then use dtype=bfloat16 or float32."
)


@dataclass(frozen=True)
class BatchRound:
    """What one round emitted, for the requests that took part in it."""

    requests: list[Request]
    tokens: list[list[int]]
    row_indices: list[int]  # of these requests, in the tree and the path
    tree: Tree
    path: Tensor  # [B, P] as in Verdict, up to the deepest draft
    num_kept: list[int]  # nodes of the path that were accepted, with the root; those past the end of an answer too
    cost: RoundCost

    @property
    def num_drafted(self) -> int:
        """Nodes of the tree, without the root."""
        return self.tree.tokens.shape[1] - 1

    @property
    def accepted(self) -> list[int]:
        return [max(0, len(tokens) - 1) for tokens in self.tokens]


class Prefill:
    """Prompts that join a batch together, as far as they were read.

    layers: hidden states that are kept; room: entries that the cache will need
    tokens [R, T]: the prompts, right-padded; num [R]: their lengths, `counts` on the host
    pieces: where the reading of each piece began and ended
    """

    def __init__(self, target: Target, layers: tuple[int, ...], prompts: list[list[int]], *, room: int = 0):
        self.target, self.layers = target, layers
        self.counts = [len(prompt) for prompt in prompts]
        self.num = torch.tensor(self.counts, device=target.device)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        self.tokens = padded.to(target.device)
        self.cache = target.cache(len(prompts))
        self.cache.preallocate(room, target.spare)
        self.num_read, self.read_times = 0, list[tuple[Moment, Moment]]()
        self.outputs: list[TargetOutput] = []

    @property
    def complete(self) -> bool:
        return self.num_read == self.tokens.shape[1]

    @property
    def divisible(self) -> bool:
        """Whether pieces give what the whole gives: windows, recurrent states and LongRoPE's angles need the whole prompt."""
        target = self.target
        return not (target.windowed or target.recurrent) and target.rotary_boundary is None

    def advance(self, max_tokens: int | None = None) -> None:
        """Reads on. most: tokens, of all prompts together, with their padding; None: all that are left"""
        start, end = self.num_read, self.tokens.shape[1]
        if start == end:
            return
        if max_tokens is not None and self.divisible:
            end = min(end, start + max(1, max_tokens // len(self.counts)))
        length, device = end - start, self.target.device
        counts = [min(max(0, count - start), length) for count in self.counts]
        self.cache.reserve(length, counts)
        positions = torch.arange(start, end, device=device).expand(len(counts), -1)
        mask = masks.pending_mask(masks.causal_mask(length, device), self.cache.lengths, self.cache.visible)
        piece = self.tokens[:, start:end]
        self.outputs.append(self.target.read(piece, self.layers, positions=positions, mask=mask, cache=self.cache))
        self.cache.commit((self.num - start).clamp(0, length), counts)
        self.num_read = end

    def output(self) -> tuple[Tensor, Tensor]:
        """Once all is read -> the last state of each prompt [R, D], and the features of all tokens [R, T, F*D]"""
        final, features = self.outputs[0].final, self.outputs[0].features
        if len(self.outputs) > 1:
            final = torch.cat([output.final for output in self.outputs], dim=1)
            features = torch.cat([output.features for output in self.outputs], dim=1)
        return final[self.cache.rows[:, 0], self.num - 1], features


class Batch:
    """Decodes requests together, a round at a time. `Decoder.batch` makes it.

    generator: random numbers for all requests that have none of their own
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        verify: Verifier,
        ends: Ends,
        generator: torch.Generator | None,
    ):
        self.target, self.proposer, self.verify, self.ends, self.generator = target, proposer, verify, ends, generator
        self.default_sampling = verify.sampling  # of requests that have none of their own
        self.sampling: AnySampling = self.default_sampling  # of the rows
        self.runner = verify.runner
        self.clock = RoundClock(target.device, self._compile_seconds)
        self.previous_round_marks: tuple[Moment, ...] = ()  # of the last round: the wait, what is kept, the end
        self.requests: list[Request] = []  # of each row; one whose answer has ended stands still until it leaves
        self.cache: RowCache
        self.last_tokens: Tensor  # [B] the last token of each row
        self.penalised_tokens: Tensor | None  # [B, V] the tokens to which a repetition penalty applies

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.tokens_left]

    @property
    def joins(self) -> bool:
        """Whether requests can join while others run. Else `admit` needs a batch in which none runs."""
        return self.proposer is None or self.proposer.selects

    @torch.inference_mode()
    def prefill(self, requests: list[Request]) -> Prefill:
        """The prompts of requests that will be admitted together, of which nothing is read yet."""
        if not self.running:
            self.close()  # its memory may be used again
        nodes = self.proposer.nodes if self.proposer else 0
        room = max((len(request.prompt) + request.tokens_left for request in requests), default=0) + 1 + nodes
        prompts = [request.prompt for request in requests]
        return Prefill(self.target, self.verify.hidden_states, prompts, room=room)

    @torch.inference_mode()
    def read(self, prefill: Prefill, max_tokens: int | None = None) -> None:
        """Reads on in prompts, which may be done between rounds. most: as for Prefill.advance"""
        start = self.clock.mark()
        prefill.advance(max_tokens)
        prefill.read_times.append((start, self.clock.mark()))

    @torch.inference_mode()
    def admit(self, requests: list[Request], prefill: Prefill | None = None) -> list[list[int]]:
        """Reads the prompts, or what `prefill` has not read of them -> the first token of each answer"""
        prefill, waiting = prefill or self.prefill(requests), self.running
        self.read(prefill)
        start = self.clock.mark()
        if self.running:
            assert self.joins, "this proposer's batches cannot be joined"
            first = self._join(requests, prefill)
        else:
            self.close()
            self.requests, self.previous_round_marks = list(requests), ()
            self.cache, self.last_tokens, self.penalised_tokens, opening, first = self._start_answers(requests, prefill)
            self._update_sampling(new=True)
            if self.proposer:
                self.proposer.attach_cache(self.cache)
                self.proposer.begin(opening.tokens, opening.num)
                self.proposer.commit(opening.following, opening.features, opening.num, opening.counts)
        tokens, end = self.clock.read(first)
        emitted = [request.extend_answer([token], self.ends) for request, token in zip(requests, tokens)]
        seconds = sum(self.clock.seconds(*piece) for piece in [*prefill.read_times, (start, end)])
        for request in requests:
            request.generation.prefill_seconds += seconds / len(requests)
        for request in waiting:
            request.generation.elapsed += seconds
        return emitted

    @torch.inference_mode()
    def run_round(self) -> BatchRound:
        """One round of all rows. At least one request must be running."""
        clock, compiled = self.clock, self._compile_seconds()
        start = clock.mark()
        self._shrink()
        is_running = [request.tokens_left > 0 for request in self.requests]
        tree, allowed = self._constrain(self._propose())
        drafted = clock.mark()
        penalised = self.penalised_tokens if self.sampling.penalises else None
        draws = rules.Draws(self._randomness(self.requests))
        verdict = self.verify(tree, self.cache, draws, penalised, sampling=self.sampling, allowed=allowed)
        num_kept, self.last_tokens = verdict.num_kept, verdict.next_token.clamp(min=0)
        path, following = verdict.follow_path(tree, self.proposer.depth if self.proposer else 0)  # [B, P] each
        # The only wait for the device in a round
        (*lists, counts), verified = clock.read(torch.cat([following, num_kept[:, None]], dim=1).T)
        following = following.clamp(min=0)  # no NO_TOKEN in what is read next; its row has ended
        round_marks = self.previous_round_marks
        if not tree.linear:
            self.cache.keep_path(path)
        if not all(is_running):  # a row that has ended stands still: its text would outgrow the target's positions
            num_kept = num_kept * upload_values(is_running, num_kept.device)
            counts = [count * on for count, on in zip(counts, is_running)]
        self.cache.commit(num_kept, counts)
        if self.proposer:
            if self.proposer.watches and verdict.choices is not None:
                self.proposer.watch(tree, verdict.choices)
            features = verdict.output.features
            if not tree.linear:
                features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
            self.proposer.commit(following, features, num_kept, counts)
        committed = clock.mark()
        requests, row_indices = self.running, [row for row, on in enumerate(is_running) if on]
        emitted = [list(row[:n]) for row, n in zip(zip(*lists), counts)]
        tokens = [
            request.extend_answer(row, self.ends) for request, row, on in zip(self.requests, emitted, is_running) if on
        ]
        if self.penalised_tokens is not None:
            real = torch.arange(following.shape[1], device=following.device) < num_kept[:, None]
            self.penalised_tokens.scatter_(1, torch.where(real, following, self.last_tokens[:, None]), True)
        self.previous_round_marks = verified, committed, clock.mark()
        if not clock.queued:  # else the device is not there yet, and what followed the last wait counts in its place
            round_marks = self.previous_round_marks
        intervals = [(start, drafted), (drafted, verified), *itertools.pairwise(round_marks)]
        stages = dict.fromkeys(STAGES, 0.0) | dict(zip(STAGES, itertools.starmap(clock.seconds, intervals)))
        cost = RoundCost(sum(stages.values()), self._compile_seconds() - compiled, stages)
        kept_nodes = [counts[row] for row in row_indices]
        round_ = BatchRound(requests, tokens, row_indices, tree, path, kept_nodes, cost)
        if self.proposer and not cost.compile_seconds:
            self.proposer.record_cost(round_.cost)
        for request, accepted in zip(requests, round_.accepted):
            request.generation.accepted[0].append(accepted)
            request.generation.drafted.append(round_.num_drafted)
            request.generation.add_times(round_.cost, 1 / len(requests))
        return round_

    def close(self) -> None:
        """Ends the batch: what proposers learn from its answers, they learn now. It may be used again."""
        if self.requests:
            if self.proposer:
                self.proposer.finish(self._answer_lengths())
            self.cache.release()
        self.requests = []

    # Rows

    def _answer_lengths(self) -> list[int]:
        return [len(request.tokens) for request in self.requests]

    def _shrink(self) -> None:
        """Rows whose answers have ended leave, unless shapes are compiled: each number of rows would be a new one."""
        staying = [row for row, request in enumerate(self.requests) if request.tokens_left or self.runner.by_shape]
        if self.joins and len(staying) < len(self.requests):
            num = len(staying)
            last = [row for row in staying if row >= num]  # they take the places of those that leave
            places = [row if self.requests[row].tokens_left else last.pop() for row in range(num)]
            self._select(places, self._answer_lengths())

    def _select(self, rows: list[int], answer_lengths: list[int]) -> None:
        index = upload_values(rows, self.last_tokens.device)
        self.cache.select(rows)
        self.last_tokens, self.penalised_tokens = (
            self.last_tokens[index],
            None if self.penalised_tokens is None else self.penalised_tokens[index],
        )
        if self.proposer:
            self.proposer.select(rows, answer_lengths)
        self.requests = [self.requests[row] for row in rows]
        self._update_sampling()

    def _update_sampling(self, *, new: bool = False) -> None:
        """Recomputes the batch's sampling. The proposer is notified if its kind changed or the batch is new."""
        previous, self.sampling = self.sampling, join_samplings([self._sampling_of(row) for row in self.requests])
        if self.proposer and (new or self.sampling.kind != previous.kind):
            self.proposer.attach_verifier(self.verify, self.sampling)

    def _sampling_of(self, request: Request) -> Sampling:
        return request.sampling or self.default_sampling

    def _join(self, requests: list[Request], prefill: Prefill) -> Tensor:
        """Requests take the places of rows that have ended, or new rows -> the first token of each answer [R], or NO_TOKEN"""
        answer_lengths, free = (
            self._answer_lengths(),
            [row for row, request in enumerate(self.requests) if not request.tokens_left],
        )
        num_added = len(requests) - len(free)
        if num_added > 0:
            num_rows = len(self.requests)
            self._select([*range(num_rows), *[0] * num_added], answer_lengths)  # places for the new rows
            answer_lengths += [0] * num_added
            free += range(num_rows, num_rows + num_added)
        rows = free[: len(requests)]
        cache, newest, penalised, opening, first = self._start_answers(requests, prefill)
        index = upload_values(rows, newest.device)
        self.cache.replace(rows, cache)
        cache.release()
        self.last_tokens = self.last_tokens.index_copy(0, index, newest)
        if penalised is not None and self.penalised_tokens is None:
            self.penalised_tokens = torch.zeros(
                len(self.requests), self.target.vocab_size, dtype=torch.bool, device=newest.device
            )
        if self.penalised_tokens is not None:  # rows without a penalty need no marks
            self.penalised_tokens = self.penalised_tokens.index_copy(
                0, index, torch.zeros_like(self.penalised_tokens[index]) if penalised is None else penalised
            )
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

    # Passes

    def _propose(self) -> Tree:
        if self.proposer is None:
            return make_root(self.last_tokens)
        self.proposer.limit([request.tokens_left for request in self.requests], self.ends.tokens)
        self.proposer.constrain(self._constraints())
        tree = self.proposer.propose(self.sampling, self._randomness(self.requests))
        return tree.pad_to_power(self.proposer.depth) if self.runner.by_shape and self.proposer.varies else tree

    def _constraints(self) -> list[Constraint | None]:
        return [request.constraint if request.tokens_left else None for request in self.requests]

    def _constrain(self, tree: Tree) -> tuple[Tree, Tensor | None]:
        """-> the tree without what grammars do not allow, and what may follow each node [B, N, V] bool; None: everything"""
        constraints = self._constraints()
        if not any(constraints):
            return tree, None
        watched = self.proposer is not None and self.proposer.watches  # then it must see its own nodes
        fixed = self.runner.by_shape  # another size would be compiled first
        return constraint.constrain_tree(
            tree, constraints, self.target.vocab_size, prune=not (watched or fixed) and tree.partial_pass is None
        )

    def _start_answers(
        self, requests: list[Request], prefill: Prefill
    ) -> tuple[RowCache, Tensor, Tensor | None, Opening, Tensor]:
        """Of prompts that were read: a cache with them, the first token of each answer [R], marks [R, V], what a proposer needs, and the first
        tokens again, with NO_TOKEN"""
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
        opening = Opening(padded, num, following, features, prefill.counts)
        return prefill.cache, newest, penalised, opening, first

    def _mark_penalised(self, padded: Tensor, num: Tensor, penalised: Sequence[Tensor | None]) -> Tensor:
        """[R, V] bool: the prompts' tokens, or those that a request names"""
        real = torch.arange(padded.shape[1], device=padded.device) < num[:, None]  # [R, T]
        marks = torch.zeros(len(num), self.target.vocab_size, dtype=torch.bool, device=padded.device)
        marks.scatter_(1, torch.where(real, padded, padded[:, :1]), True)
        row_marks = [marks[row] if named is None else named.to(marks.device) for row, named in enumerate(penalised)]
        return torch.stack(row_marks)

    def _compile_seconds(self) -> float:
        return self.runner.seconds + (self.proposer.compile_seconds if self.proposer else 0.0)
