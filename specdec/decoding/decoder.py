"""The loop of rounds: draft, verify, commit. Plain decoding is the same loop with trees of one node."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from specdec.core import rules
from specdec.core.answer_text import StopStrings
from specdec.core.compile import Runner
from specdec.core.constraint import Constraint
from specdec.core.generation import Ends, Generation, Round
from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.decoding import fastest
from specdec.decoding.batch import Batch, Request
from specdec.proposers.base import Proposer
from specdec.target.compiled import check_layers
from specdec.target.model import Target
from specdec.target.verifier import Verifier

READ_TOGETHER = 8192  # tokens of prompts, with padding, that are read side by side: longer prompts in fewer rows
CHAINS_ONLY = (
    "has recurrent or convolution layers, whose state follows one chain of tokens, so it cannot verify a tree of "
    "drafts: "
    "set width=1, which drafts a chain, or choose another proposer of chains, such as ngram."
)


class PromptQueue:
    """Numbered prompts that wait for rows."""

    def __init__(self, prompts: Iterable[list[int]]):
        self._prompts = enumerate(prompts)
        self._next = next(self._prompts, None)

    def has_prompt_for(self, num_free: int) -> bool:
        """Whether a prompt waits for one of the free rows."""
        return self._next is not None and num_free > 0

    def take(self, num: int, max_tokens: int | None) -> list[tuple[int, list[int]]]:
        """The next prompts: at most `num`, and at least one of them.

        max_tokens: bound of the tokens of several, with padding; None: no bound
        """
        pairs: list[tuple[int, list[int]]] = []
        longest = 0
        while self._next is not None and len(pairs) < num:
            longest = max(longest, len(self._next[1]))
            if pairs and max_tokens is not None and longest * (len(pairs) + 1) > max_tokens:
                break
            pairs.append(self._next)
            self._next = next(self._prompts, None)
        return pairs


class Decoder:
    """Drafts and verifies without changing the target's distribution; `proposer=None` is plain decoding.

    stop: token ids that end an answer and belong to it; stop_strings: texts that end an answer
    rule: acceptance rule, a key of rules.RULES
    runner: compiler of the target's passes, which decoders of one target can share; None: nothing is compiled

    Raises ValueError for a rule that does not exist, and for settings that do not fit the target.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        *,
        sampling: Sampling,
        stop: set[int],
        stop_strings: StopStrings | None = None,
        rule: str = "token",
        runner: Runner | None = None,
    ):
        rules.check_rule(rule)
        self.target, self.proposer = target, proposer
        self.sampling, self.stop, self.stop_strings, self.rule = sampling, stop, stop_strings, rule
        self.hidden_states = proposer.target_layers if proposer else ()
        self.runner = runner or Runner()
        fastest.choose_run_mode(self.runner, target)
        self._check_target()
        self.verify = Verifier(
            target,
            sampling=sampling,
            rule=rule,
            runner=self.runner,
            hidden_states=self.hidden_states,
        )
        if proposer is not None:
            proposer.attach_verifier(self.verify, sampling)

    def steady(self) -> "Decoder":
        """A decoder whose sampled answers depend on their own random numbers only. See Proposer.steady."""
        proposer = self.proposer and self.proposer.steady()
        if proposer is self.proposer:
            return self
        return Decoder(
            self.target,
            proposer,
            sampling=self.sampling,
            stop=self.stop,
            stop_strings=self.stop_strings,
            rule=self.rule,
            runner=self.runner,
        )

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        generator: torch.Generator | None = None,
        constraints: Sequence[Constraint | None] | None = None,
    ) -> Generation:
        """Answers B prompts of token ids, with at most `max_new_tokens` tokens each. Raises ValueError as `stream`."""
        result = Generation([[] for _ in prompts], [[] for _ in prompts])
        rounds = self.stream(prompts, max_new_tokens, generator=generator, result=result, constraints=constraints)
        for emitted in rounds:
            for answer, tokens in zip(result.tokens, emitted.tokens):
                answer += tokens
        return result

    def stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        generator: torch.Generator | None = None,
        result: Generation | None = None,
        penalised: Tensor | None = None,
        constraints: Sequence[Constraint | None] | None = None,
    ) -> Iterator[Round]:
        """Yields the first tokens, which follow the prompts, then the tokens of every round; counts rounds in `result`.

        penalised [B, V] bool: tokens with a repetition penalty from the start; None: the prompts' tokens
        constraints [B]: states of the grammars that answers follow, made for this call; None: no answer follows one
        Raises ValueError for prompts that are empty or do not fit into the target's positions.
        """
        # Make a request for each prompt.
        result = result or Generation([[] for _ in prompts], [[] for _ in prompts])
        self.check(prompts, max_new_tokens)
        marks = [None] * len(prompts) if penalised is None else list(penalised)
        constraints = constraints or [None] * len(prompts)
        requests = [
            Request(prompt, max_new_tokens, penalised=mark, constraint=constraint)
            for prompt, mark, constraint in zip(prompts, marks, constraints, strict=True)
        ]
        rows = {id(request): row for row, request in enumerate(requests)}

        # Read the prompts.
        with closing(self.batch(generator, max_rows=len(prompts))) as batch:
            first = batch.admit(requests)
            result.prefill_seconds += sum(request.generation.prefill_seconds for request in requests)
            _raise_fault(requests)
            yield Round(first, [0] * len(prompts))

            # Run rounds; a finished row emits nothing.
            while batch.running:
                round_ = batch.run_round()
                _raise_fault(requests)
                emitted: list[list[int]] = [[] for _ in prompts]
                accepted = [0] * len(prompts)
                for request, tokens, count in zip(round_.requests, round_.tokens, round_.accepted):
                    row = rows[id(request)]
                    emitted[row], accepted[row] = tokens, count
                    result.accepted[row].append(count)
                result.drafted.append(round_.num_drafted)
                result.add_times(round_.cost)
                yield Round(emitted, accepted)

    def answers(
        self, prompts: Iterable[list[int]], max_new_tokens: int, **arguments: Any
    ) -> Iterator[tuple[int, Generation]]:
        """Yields (number of the prompt, answer) in the order in which answers end. arguments: see `rounds`"""
        for _, ended in self.rounds(prompts, max_new_tokens, **arguments):
            yield from ended

    def rounds(
        self,
        prompts: Iterable[list[int]],
        max_new_tokens: int,
        *,
        batch_size: int,
        generator: Callable[[int], torch.Generator | None] = lambda number: None,
        constraint: Callable[[int], Constraint | None] = lambda number: None,
    ) -> Iterator[tuple[int, list[tuple[int, Generation]]]]:
        """Answers any number of prompts, `batch_size` at once: when an answer ends, the next prompt takes its place.

        Yields (number of tokens emitted, answers that ended) after each round. An answer comes with the number of its
        prompt, and has its share of the times.
        generator: random numbers of a prompt's answer, by its number; then they do not depend on the other prompts
        constraint: state of the grammar that a prompt's answer follows, by its number
        Raises ValueError for fewer than one row, and for a prompt as `stream`.
        """
        if batch_size < 1:
            raise ValueError(f"rows={batch_size} must be at least 1.")
        queue = PromptQueue(prompts)
        numbers: dict[int, int] = {}

        def take_requests(num_free: int) -> list[Request]:
            requests = []
            for number, prompt in queue.take(num_free, READ_TOGETHER if batch.joins else None):
                random_numbers, grammar = generator(number), constraint(number)
                request = Request(prompt, max_new_tokens, generator=random_numbers, constraint=grammar)
                numbers[id(request)] = number
                requests.append(request)
            return requests

        with closing(self.batch(max_rows=batch_size)) as batch:
            while True:
                # Admit as many prompts as there are free rows.
                taking_part, emitted = take_requests(batch.count_free(batch_size)), list[list[int]]()
                if taking_part:
                    self.check([request.prompt for request in taking_part], max_new_tokens)
                    emitted = batch.admit(taking_part)
                elif not batch.running:
                    break

                # Run a round, unless rows are free: an answer has ended with its first token, or prompts are long.
                is_filled = not queue.has_prompt_for(batch.count_free(batch_size))
                if is_filled and all(request.tokens_left for request in taking_part):
                    round_ = batch.run_round()
                    taking_part, emitted = round_.requests, emitted + round_.tokens

                # Hand out the answers that have ended.
                ended = [request for request in taking_part if not request.tokens_left]
                _raise_fault(ended)
                yield sum(map(len, emitted)), [(numbers.pop(id(request)), request.generation) for request in ended]

    def batch(self, generator: torch.Generator | None = None, *, max_rows: int = 1) -> Batch:
        """An empty batch for requests that come and go.

        generator: random numbers of requests without their own; max_rows: requests that may run at once
        """
        ends = Ends(frozenset(self.stop), self.stop_strings)
        return Batch(self.target, self.proposer, self.verify, ends, generator, max_rows)

    def expect(self, longest: int, *, batch_size: int) -> None:
        """Announces texts of at most `longest` tokens with their answers, so that one capacity serves all."""
        self.batch(max_rows=batch_size).expect(longest)

    def check(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Raises ValueError, with what to change, for a batch that `stream` does not decode."""
        if not prompts or not all(prompts) or max_new_tokens < 1:
            raise ValueError(
                "Decoding needs at least one prompt, every prompt at least one token, and max_new_tokens >= 1."
            )
        highest = max(map(max, prompts))
        if highest >= self.target.vocab_size or min(map(min, prompts)) < 0:
            raise ValueError(
                f"A prompt has the token {highest}, and {self.target.name} knows tokens from 0 to "
                f"{self.target.vocab_size - 1}: "
                "encode it with the tokenizer that belongs to the model."
            )
        limit = self.target.max_positions
        depth = self.proposer.depth if self.proposer else 0
        longest = max(len(prompt) for prompt in prompts)
        if limit is not None and longest + max_new_tokens + depth > limit:
            raise ValueError(
                f"A prompt of {format_count(longest, 'token')}, {max_new_tokens} new ones and "
                f"{format_count(depth, 'draft')} exceed the target's {limit:,} positions: shorten the prompt or "
                "lower max_new_tokens=."
            )
        boundary = self.target.rotary_boundary
        if boundary is not None and min(map(len, prompts)) <= boundary < longest + max_new_tokens + depth:
            raise ValueError(
                f"{self.target.name} turns keys by other angles in texts longer than {boundary} tokens (LongRoPE), and "
                "this text "
                "would cross that length: let prompt, answer and drafts stay below it, or give only longer prompts."
            )

    def _check_target(self) -> None:
        """Raises ValueError for drafts that this target cannot verify, or passes of it that cannot be compiled."""
        target, proposer = self.target, self.proposer
        if proposer is not None and not proposer.linear and target.recurrent:
            raise ValueError(f"{target.name} {CHAINS_ONLY}")
        reach = target.layer_kinds.reach
        if proposer is not None and reach is not None and proposer.depth >= reach:
            raise ValueError(
                f"{target.name} has layers that see {reach} positions, and {proposer.depth} drafts with the token "
                "before them "
                f"need {proposer.depth + 1}: lower depth= to {reach - 1} or less (of proposers that look at texts: "
                "num)."
            )
        if self.runner.compile and target.share.size > 1:
            raise ValueError(
                f"{target.name} is held by {target.share.size} processes together, and their exchanges in a layer "
                "are not compiled: set compile=false."
            )
        if self.runner.compile:
            try:
                check_layers(target, "set compile=false.")
            except ValueError as error:
                self.runner.stop_compiling(error)


def _raise_fault(requests: list[Request]) -> None:
    """Raises ValueError if an answer could not go on."""
    fault = next((request.fault for request in requests if request.fault), None)
    if fault:
        raise ValueError(fault)
