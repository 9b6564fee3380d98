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
from specdec.core.devices import given
from specdec.core.generation import STAGES, Ends, Generation, RoundCost
from specdec.core.sampling import NO_TOKEN, AnySampling, Randomness, Sampling, of_rows
from specdec.core.tree import Tree, root
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
    left: int
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

    def take(self, new: list[int], ends: Ends) -> list[int]:
        """Adds new tokens to the answer, up to its end -> those that were added. With NO_TOKEN behind them, or where the grammar refuses them,
        none is added, and the answer ends with a fault."""
        if new[-1] == NO_TOKEN:
            return self._fail(NOTHING_FOLLOWS.format(len(self.tokens)))
        if not self.tokens:
            self.ends = (self.ends or ends).begin(self.prompt)
        assert self.ends is not None
        new, self.ended = self.ends.cut(self.tokens, new[: self.left])
        self.generation.tokens[0].extend(new)
        if self.constraint:
            try:
                self.constraint.take(new)
            except ValueError as error:
                return self._fail(str(error))
        self.left = 0 if self.ended else self.left - len(new)
        return new

    def _fail(self, fault: str) -> list[int]:
        self.fault, self.left = fault, 0
        return []


NOTHING_FOLLOWS = (
    "No token can follow the answer's first {}: the target's logits are not finite there, or a grammar allows none. float16 may "
    "overflow: then use dtype=bfloat16 or float32."
)


@dataclass(frozen=True)
class Step:
    """What one round emitted, for the requests that took part in it."""

    requests: list[Request]
    tokens: list[list[int]]
    rows: list[int]  # of these requests, in the tree and the path
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
        self.cache.expect(room, target.spare)
        self.place, self.pieces = 0, list[tuple[Moment, Moment]]()
        self.outputs: list[TargetOutput] = []

    @property
    def done(self) -> bool:
        return self.place == self.tokens.shape[1]

    @property
    def divisible(self) -> bool:
        """Whether pieces give what the whole gives: windows, recurrent states and LongRoPE's angles need the whole prompt."""
        target = self.target
        return not (target.windowed or target.recurrent) and target.rotary_boundary is None

    def advance(self, most: int | None = None) -> None:
        """Reads on. most: tokens, of all prompts together, with their padding; None: all that are left"""
        start, end = self.place, self.tokens.shape[1]
        if start == end:
            return
        if most is not None and self.divisible:
            end = min(end, start + max(1, most // len(self.counts)))
        length, device = end - start, self.target.device
        counts = [min(max(0, count - start), length) for count in self.counts]
        self.cache.reserve(length, counts)
        positions = torch.arange(start, end, device=device).expand(len(counts), -1)
        mask = masks.pending_mask(masks.causal_mask(length, device), self.cache.lengths, self.cache.visible)
        piece = self.tokens[:, start:end]
        self.outputs.append(self.target.read(piece, self.layers, positions=positions, mask=mask, cache=self.cache))
        self.cache.commit((self.num - start).clamp(0, length), counts)
        self.place = end

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
        self.usual = verify.sampling  # of requests that have none of their own
        self.sampling: AnySampling = self.usual  # of the rows
        self.runner = verify.runner
        self.clock = RoundClock(target.device, self._compiling)
        self.behind: tuple[Moment, ...] = ()  # of the last round: the wait, what is kept, the end
        self.rows: list[Request] = []  # of each row; one whose answer has ended stands still until it leaves
        self.cache: RowCache
        self.newest: Tensor  # [B] the last token of each row
        self.marks: Tensor | None  # [B, V] the tokens to which a repetition penalty applies

    @property
    def running(self) -> list[Request]:
        return [request for request in self.rows if request.left]

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
        room = max((len(request.prompt) + request.left for request in requests), default=0) + 1 + nodes
        prompts = [request.prompt for request in requests]
        return Prefill(self.target, self.verify.hidden_states, prompts, room=room)

    @torch.inference_mode()
    def read(self, prefill: Prefill, most: int | None = None) -> None:
        """Reads on in prompts, which may be done between rounds. most: as for Prefill.advance"""
        start = self.clock.mark()
        prefill.advance(most)
        prefill.pieces.append((start, self.clock.mark()))

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
            self.rows, self.behind = list(requests), ()
            self.cache, self.newest, self.marks, opening, first = self._begin(requests, prefill)
            self._settle_sampling(new=True)
            if self.proposer:
                self.proposer.share(self.cache)
                self.proposer.begin(opening.tokens, opening.num)
                self.proposer.commit(opening.following, opening.features, opening.num, opening.counts)
        tokens, end = self.clock.read(first)
        emitted = [request.take([token], self.ends) for request, token in zip(requests, tokens)]
        seconds = sum(self.clock.seconds(*piece) for piece in [*prefill.pieces, (start, end)])
        for request in requests:
            request.generation.prefill_seconds += seconds / len(requests)
        for request in waiting:
            request.generation.elapsed += seconds
        return emitted

    @torch.inference_mode()
    def step(self) -> Step:
        """One round of all rows. At least one request must be running."""
        clock, compiled = self.clock, self._compiling()
        start = clock.mark()
        self._shrink()
        running = [request.left > 0 for request in self.rows]
        tree, allowed = self._constrain(self._propose())
        drafted = clock.mark()
        marks = self.marks if self.sampling.penalises else None
        draws = rules.Draws(self._randomness(self.rows))
        verdict = self.verify(tree, self.cache, draws, marks, sampling=self.sampling, allowed=allowed)
        num_kept, self.newest = verdict.num_kept, verdict.next_token.clamp(min=0)
        path, following = verdict.along(tree, self.proposer.depth if self.proposer else 0)  # [B, P] each
        # The only wait for the device in a round
        (*lists, counts), verified = clock.read(torch.cat([following, num_kept[:, None]], dim=1).T)
        following = following.clamp(min=0)  # no NO_TOKEN in what is read next; its row has ended
        behind = self.behind
        if not tree.linear:
            self.cache.keep(path)
        if not all(running):  # a row that has ended stands still: its text would outgrow the target's positions
            num_kept = num_kept * given(running, num_kept.device)
            counts = [count * on for count, on in zip(counts, running)]
        self.cache.commit(num_kept, counts)
        if self.proposer:
            if self.proposer.watches and verdict.choices is not None:
                self.proposer.watch(tree, verdict.choices)
            features = verdict.output.features
            if not tree.linear:
                features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
            self.proposer.commit(following, features, num_kept, counts)
        kept = clock.mark()
        requests, rows = self.running, [row for row, on in enumerate(running) if on]
        emitted = [list(row[:n]) for row, n in zip(zip(*lists), counts)]
        tokens = [request.take(row, self.ends) for request, row, on in zip(self.rows, emitted, running) if on]
        if self.marks is not None:
            real = torch.arange(following.shape[1], device=following.device) < num_kept[:, None]
            self.marks.scatter_(1, torch.where(real, following, self.newest[:, None]), True)
        self.behind = verified, kept, clock.mark()
        if not clock.queued:  # else the device is not there yet, and what followed the last wait counts in its place
            behind = self.behind
        places = [(start, drafted), (drafted, verified), *itertools.pairwise(behind)]
        stages = dict.fromkeys(STAGES, 0.0) | dict(zip(STAGES, itertools.starmap(clock.seconds, places)))
        cost = RoundCost(sum(stages.values()), self._compiling() - compiled, stages)
        kept_nodes = [counts[row] for row in rows]
        done = Step(requests, tokens, rows, tree, path, kept_nodes, cost)
        if self.proposer and not cost.compile_seconds:
            self.proposer.timed(done.cost)
        for request, accepted in zip(requests, done.accepted):
            request.generation.accepted[0].append(accepted)
            request.generation.drafted.append(done.num_drafted)
            request.generation.add_times(done.cost, 1 / len(requests))
        return done

    def close(self) -> None:
        """Ends the batch: what proposers learn from its answers, they learn now. It may be used again."""
        if self.rows:
            if self.proposer:
                self.proposer.finish(self._nums())
            self.cache.release()
        self.rows = []

    # Rows

    def _nums(self) -> list[int]:
        return [len(request.tokens) for request in self.rows]

    def _shrink(self) -> None:
        """Rows whose answers have ended leave, unless shapes are compiled: each number of rows would be a new one."""
        staying = [row for row, request in enumerate(self.rows) if request.left or self.runner.by_shape]
        if self.joins and len(staying) < len(self.rows):
            num = len(staying)
            last = [row for row in staying if row >= num]  # they take the places of those that leave
            places = [row if self.rows[row].left else last.pop() for row in range(num)]
            self._select(places, self._nums())

    def _select(self, rows: list[int], nums: list[int]) -> None:
        index = given(rows, self.newest.device)
        self.cache.select(rows)
        self.newest, self.marks = self.newest[index], None if self.marks is None else self.marks[index]
        if self.proposer:
            self.proposer.select(rows, nums)
        self.rows = [self.rows[row] for row in rows]
        self._settle_sampling()

    def _settle_sampling(self, *, new: bool = False) -> None:
        """Recomputes the batch's sampling. The proposer is notified if its kind changed or the batch is new."""
        before, self.sampling = self.sampling, of_rows([self._sampling_of(row) for row in self.rows])
        if self.proposer and (new or self.sampling.kind != before.kind):
            self.proposer.meet(self.verify, self.sampling)

    def _sampling_of(self, request: Request) -> Sampling:
        return request.sampling or self.usual

    def _join(self, requests: list[Request], prefill: Prefill) -> Tensor:
        """Requests take the places of rows that have ended, or new rows -> the first token of each answer [R], or NO_TOKEN"""
        nums, free = self._nums(), [row for row, request in enumerate(self.rows) if not request.left]
        more = len(requests) - len(free)
        if more > 0:
            num_rows = len(self.rows)
            self._select([*range(num_rows), *[0] * more], nums)  # places for the new rows
            nums += [0] * more
            free += range(num_rows, num_rows + more)
        rows = free[: len(requests)]
        cache, newest, marks, opening, first = self._begin(requests, prefill)
        index = given(rows, newest.device)
        self.cache.replace(rows, cache)
        cache.release()
        self.newest = self.newest.index_copy(0, index, newest)
        if marks is not None and self.marks is None:
            self.marks = torch.zeros(len(self.rows), self.target.vocab_size, dtype=torch.bool, device=newest.device)
        if self.marks is not None:  # rows without a penalty need no marks
            self.marks = self.marks.index_copy(
                0, index, torch.zeros_like(self.marks[index]) if marks is None else marks
            )
        if self.proposer:
            self.proposer.replace(rows, nums, opening)
        for row, request in zip(rows, requests):
            self.rows[row] = request
        self._settle_sampling()
        return first

    def _randomness(self, requests: list[Request]) -> Randomness:
        if all(request.generator is None for request in requests):
            return self.generator
        return [request.generator or self.generator for request in requests]

    # Passes

    def _propose(self) -> Tree:
        if self.proposer is None:
            return root(self.newest)
        self.proposer.limit([request.left for request in self.rows], self.ends.tokens)
        self.proposer.constrain(self._constraints())
        tree = self.proposer.propose(self.sampling, self._randomness(self.rows))
        return tree.rounded(self.proposer.depth) if self.runner.by_shape and self.proposer.varies else tree

    def _constraints(self) -> list[Constraint | None]:
        return [request.constraint if request.left else None for request in self.rows]

    def _constrain(self, tree: Tree) -> tuple[Tree, Tensor | None]:
        """-> the tree without what grammars do not allow, and what may follow each node [B, N, V] bool; None: everything"""
        constraints = self._constraints()
        if not any(constraints):
            return tree, None
        watched = self.proposer is not None and self.proposer.watches  # then it must see its own nodes
        fixed = self.runner.by_shape  # another size would be compiled first
        return constraint.constrain(
            tree, constraints, self.target.vocab_size, prune=not (watched or fixed) and tree.done is None
        )

    def _begin(
        self, requests: list[Request], prefill: Prefill
    ) -> tuple[RowCache, Tensor, Tensor | None, Opening, Tensor]:
        """Of prompts that were read: a cache with them, the first token of each answer [R], marks [R, V], what a proposer needs, and the first
        tokens again, with NO_TOKEN"""
        padded, num, (last, features) = prefill.tokens, prefill.num, prefill.output()
        logits = self.target.logits(last)  # [R, V]
        sampling = of_rows([self._sampling_of(request) for request in requests])
        marks = None
        if sampling.penalises:
            marks = self._mark(padded, num, [request.penalised for request in requests])
            logits = sampling.penalise(logits, marks)
        if any(request.constraint for request in requests):
            states = [[request.constraint.following() if request.constraint else None] for request in requests]
            logits = logits.masked_fill(~constraint.unpack(states, logits.shape[1], logits.device)[:, 0], -torch.inf)
        if sampling.greedy:
            largest, best = logits.max(-1)
            first = torch.where(largest.isfinite(), best, NO_TOKEN)
        else:
            draws = rules.Draws(self._randomness(requests))
            first = draws.token(sampling.distribution(logits), torch.ones_like(num, dtype=torch.bool))
        newest = first.clamp(min=0)
        if marks is not None:
            marks.scatter_(1, newest[:, None], True)
        following = torch.cat([padded[:, 1:], newest[:, None]], dim=1)  # [R, T]
        following[torch.arange(len(num), device=num.device), num - 1] = newest
        opening = Opening(padded, num, following, features, prefill.counts)
        return prefill.cache, newest, marks, opening, first

    def _mark(self, padded: Tensor, num: Tensor, penalised: Sequence[Tensor | None]) -> Tensor:
        """[R, V] bool: the prompts' tokens, or those that a request names"""
        real = torch.arange(padded.shape[1], device=padded.device) < num[:, None]  # [R, T]
        marks = torch.zeros(len(num), self.target.vocab_size, dtype=torch.bool, device=padded.device)
        marks.scatter_(1, torch.where(real, padded, padded[:, :1]), True)
        given = [marks[row] if own is None else own.to(marks.device) for row, own in enumerate(penalised)]
        return torch.stack(given)

    def _compiling(self) -> float:
        return self.runner.seconds + (self.proposer.compile_seconds if self.proposer else 0.0)
