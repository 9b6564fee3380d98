"""The loop of rounds: propose, verify, keep. Plain decoding is the same loop with trees of one node."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec import masks, rules
from specdec.cache import RowCache
from specdec.compile import Runner
from specdec.compiled_target import check_layers
from specdec.proposers.base import Proposer
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import Tree, root
from specdec.verifier import Verifier


@dataclass(frozen=True)
class Round:
    """The tokens that one round emitted in each row; a finished row emits none."""

    tokens: list[list[int]]  # [B][.] accepted drafts, then the target's own token, cut at the end of the answer
    accepted: list[int]  # [B] how many of these tokens are drafts


CHAINS_ONLY = (
    "has recurrent or convolution layers, whose state follows one chain of tokens, so it cannot verify a tree of drafts: set "
    "width=1, which drafts a chain, or choose another proposer of chains, such as ngram."
)
STAGES = ("draft", "verify", "keep", "other")


@dataclass
class Generation:
    """Answers, and counts and times of their rounds. The first token of an answer is read off the prompt, before any round."""

    tokens: list[list[int]]  # [B][.] the answers
    accepted: list[list[int]]  # [B][rounds] drafts that each round emitted; it emits one token more
    drafted: list[int] = field(default_factory=list)  # [rounds] nodes of each round's tree, without the root
    seconds: float = 0.0  # of all rounds: wall clock, without compiling
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # the parts of `seconds`

    def split(self) -> list["Generation"]:
        """One for each row; each gets an equal share of the times."""
        share = 1 / len(self.tokens)
        return [
            Generation(
                [tokens],
                [accepted],
                self.drafted,
                self.seconds * share,
                self.prefill_seconds * share,
                self.compile_seconds * share,
                {name: spent * share for name, spent in self.stages.items()},
            )
            for tokens, accepted in zip(self.tokens, self.accepted)
        ]


@dataclass(frozen=True)
class StopStrings:
    """Texts that end an answer: its last token is the one that completes a stop string. decode: token ids -> text"""

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def __post_init__(self):
        if not all(self.strings):
            raise ValueError("A stop string must hold a character: every text holds the empty one.")

    def end(self, written: list[int], new: list[int]) -> int | None:
        """How many of the `new` tokens, which follow `written`, belong to the answer; None if it does not end there."""
        longest = max(map(len, self.strings))
        tail = written[-4 * longest :] + new  # a token has at least one byte, a character at most four
        if not self._complete(tail):
            return None
        return next(num for num in range(1, len(new) + 1) if self._complete(tail[: len(tail) - len(new) + num]))

    def _complete(self, tokens: list[int]) -> bool:
        text = self.decode(tokens)
        return any(string in text for string in self.strings)


class Decoder:
    """Drafts and verifies without changing the target's distribution; `proposer=None` is plain decoding.

    stop: token ids that end an answer and belong to it; stop_strings: texts that end an answer
    rule: a key of rules.RULES. The rules in rules.LOSSY change the distribution, so they need lossy=True
    runner: compiles the target's passes; decoders of one target can share it. None: nothing is compiled

    Raises ValueError for a rule that does not exist or does not fit the other settings.
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
        lossy: bool = False,
        runner: Runner | None = None,
    ):
        rules.check(rule, lossy=lossy)
        if rule in rules.LOSSY and sampling.greedy:
            raise ValueError(f"rule={rule} needs temperature= above 0: it weighs the target's probabilities.")
        self.target, self.proposer = target, proposer
        self.sampling, self.stop, self.stop_strings = sampling, stop, stop_strings
        self.hidden_states = proposer.target_layers if proposer else ()
        self.runner = runner or Runner()
        self._check_target()
        self.verify = Verifier(
            target,
            sampling=sampling,
            rule=rule,
            runner=self.runner,
            hidden_states=self.hidden_states,
            choices=proposer is not None and proposer.watches,
        )
        if proposer is not None:
            proposer.meet(self.verify, sampling)

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, *, generator: torch.Generator | None = None
    ) -> Generation:
        """prompts: B lists of token ids -> answers of at most `max_new_tokens` tokens each. Raises ValueError as `stream`."""
        result = Generation([[] for _ in prompts], [[] for _ in prompts])
        for emitted in self.stream(prompts, max_new_tokens, generator=generator, result=result):
            for row, tokens in enumerate(emitted.tokens):
                result.tokens[row] += tokens
        return result

    @torch.inference_mode()
    def stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        generator: torch.Generator | None = None,
        result: Generation | None = None,
        penalised: Tensor | None = None,
    ) -> Iterator[Round]:
        """Yields the first tokens, read off the prompts, then the tokens of every round; fills the counts of `result`.

        penalised [B, V] bool: the tokens to which a repetition penalty applies from the start; None: the prompts' tokens
        Raises ValueError for prompts that are empty or do not fit into the target's positions.
        """
        result = result or Generation([[] for _ in prompts], [[] for _ in prompts])
        self.check(prompts, max_new_tokens)
        device = self.target.device
        start = self._clock()
        num = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
        rows = [torch.tensor(prompt) for prompt in prompts]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # [B, T]
        cache = self.target.cache(len(prompts))
        draws = rules.Draws(generator)
        marks = self._mark(padded, num) if penalised is None else penalised.clone()
        newest, features = self._prefill(padded, num, cache, marks, draws)  # [B], [B, T, F*D]
        if marks is not None:
            marks.scatter_(1, newest[:, None], True)
        if self.proposer:
            self.proposer.share(cache)
            self.proposer.begin(padded, num)
            following = torch.cat([padded[:, 1:], newest[:, None]], dim=1)  # [B, T]
            following[torch.arange(len(num), device=device), num - 1] = newest
            self.proposer.commit(following, features, num, [len(prompt) for prompt in prompts])
        left = [max_new_tokens] * len(prompts)
        written: list[list[int]] = [[] for _ in prompts]
        emitted = self._cut([[token] for token in newest.tolist()], left, written)
        nums = [len(row) for row in emitted]  # tokens emitted so far
        result.prefill_seconds += self._clock() - start
        yield Round(emitted, [0] * len(prompts))

        batch = list(range(len(prompts)))  # of each row of the batch, the number of its prompt; ended ones leave
        while any(left):
            start, compiled = self._clock(), self._compiling()
            staying = self._staying([left[number] > 0 for number in batch])
            if len(staying) < len(batch):
                index = torch.tensor(staying, device=device)
                cache.select(staying)
                newest, marks = newest[index], None if marks is None else marks[index]
                if self.proposer:
                    self.proposer.select(staying, [nums[number] for number in batch])
                batch = [batch[row] for row in staying]
            tree = self._propose(newest, generator)
            drafted = self._clock()
            verdict = self.verify(tree, cache, draws, marks)
            num_kept, newest = verdict.num_kept, verdict.next_token
            path, following = verdict.along(tree, self.proposer.depth if self.proposer else 0)  # [B, P] each
            # The only wait for the device in a round
            *lists, counts = torch.cat([following, num_kept[:, None]], dim=1).T.tolist()
            verified = self._clock()
            if not tree.linear:
                cache.keep(path)
            running = [left[number] > 0 for number in batch]
            # A row that has ended stands still: its text would outgrow the target's positions
            kept_here = num_kept if all(running) else num_kept * torch.tensor(running, device=device)
            cache.commit(kept_here, [count * on for count, on in zip(counts, running)])
            if self.proposer:
                if self.proposer.watches and verdict.choices is not None:
                    self.proposer.watch(tree, verdict.choices)
                features = verdict.output.features
                if not tree.linear:
                    features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
                self.proposer.commit(following, features, num_kept, counts)
            kept = self._clock()
            emitted = [[] for _ in prompts]
            for number, row, n in zip(batch, zip(*lists), counts):
                emitted[number] = list(row[:n])
            emitted = self._cut(emitted, left, written)
            drafts = [max(0, len(row) - 1) for row in emitted]
            for number, on in zip(batch, running):
                result.accepted[number] += [drafts[number]] * on
            result.drafted.append(tree.tokens.shape[1] - 1)
            if marks is not None:
                real = torch.arange(following.shape[1], device=device) < num_kept[:, None]
                marks.scatter_(1, torch.where(real, following, newest[:, None]), True)
            end = self._clock()
            compiling = self._compiling() - compiled
            result.compile_seconds += compiling
            result.seconds += end - start
            for stage, spent in zip(STAGES, (drafted - start, verified - drafted, kept - verified, end - kept)):
                result.stages[stage] += spent
            if self.proposer:
                self.proposer.timed(-1.0 if compiling else verified - drafted)
            nums = [num + len(row) for num, row in zip(nums, emitted)]
            yield Round(emitted, drafts)
        if self.proposer:
            self.proposer.finish([nums[number] for number in batch])

    def _staying(self, running: list[bool]) -> list[int]:
        """The rows with which the batch goes on: those that run. Where shapes are compiled, all: each would be a new one."""
        stay = (
            self.runner.by_shape or self.target.recurrent or (self.proposer is not None and not self.proposer.selects)
        )
        return [row for row, on in enumerate(running) if on or stay]

    def _propose(self, newest: Tensor, generator: torch.Generator | None) -> Tree:
        if self.proposer is None:
            return root(newest)
        tree = self.proposer.propose(self.sampling, generator)
        return tree.rounded(self.proposer.depth) if self.runner.by_shape and self.proposer.varies else tree

    def _prefill(
        self, padded: Tensor, num: Tensor, cache: RowCache, marks: Tensor | None, draws: rules.Draws
    ) -> tuple[Tensor, Tensor]:
        """Reads the prompts. padded [B, T], num [B] -> the first token of each answer [B], features [B, T, F*D]"""
        num_rows, length = padded.shape
        counts = num.tolist()
        cache.reserve(length, counts)
        positions = torch.arange(length, device=padded.device).expand(num_rows, -1)
        mask = masks.pending(masks.causal(length, padded.device), cache.lengths, cache.visible)
        output = self.target.read(padded, self.hidden_states, positions=positions, mask=mask, cache=cache)
        cache.commit(num, counts)
        logits = self.target.logits(output.final[cache.rows[:, 0], num - 1])  # [B, V]
        if marks is not None:
            logits = self.sampling.penalise(logits, marks)
        if self.sampling.greedy:
            return logits.argmax(-1), output.features
        law = self.sampling.law(logits)
        return draws.token(law, torch.ones_like(num, dtype=torch.bool)), output.features

    def _mark(self, padded: Tensor, num: Tensor) -> Tensor | None:
        """[B, V] bool: the prompts' tokens; None without a repetition penalty"""
        if self.sampling.repetition_penalty == 1:
            return None
        real = torch.arange(padded.shape[1], device=padded.device) < num[:, None]  # [B, T]
        marks = torch.zeros(len(num), self.target.vocab_size, dtype=torch.bool, device=padded.device)
        return marks.scatter_(1, torch.where(real, padded, padded[:, :1]), True)

    def _cut(self, emitted: list[list[int]], left: list[int], written: list[list[int]]) -> list[list[int]]:
        """Cuts each row at a stop token, at a stop string or at its budget.

        left [B]: tokens that each answer may still have, counted down here; 0 once it has ended
        written [B][.]: the answers so far, extended here; only needed for stop strings
        """
        for row, tokens in enumerate(emitted):
            tokens = tokens[: left[row]]
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
            tokens = tokens[:end]
            if self.stop_strings and tokens:
                last = self.stop_strings.end(written[row], tokens)
                tokens, end = tokens[:last], end if last is None else last
                written[row] += tokens
            emitted[row] = tokens
            left[row] = 0 if end is not None else left[row] - len(tokens)
        return emitted

    def _clock(self) -> float:
        """Seconds without those of compiling."""
        return self._now() - self._compiling()

    def _compiling(self) -> float:
        return self.runner.seconds + (self.proposer.compile_seconds if self.proposer else 0.0)

    def check(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Raises ValueError, with what to change, for a batch that `stream` does not decode."""
        if not prompts or not all(prompts) or max_new_tokens < 1:
            raise ValueError(
                "Decoding needs at least one prompt, every prompt at least one token, and max_new_tokens >= 1."
            )
        limit = self.target.max_positions
        depth = self.proposer.depth if self.proposer else 0
        longest = max(len(prompt) for prompt in prompts)
        if limit is not None and longest + max_new_tokens + depth > limit:
            raise ValueError(
                f"A prompt of {longest} tokens, {max_new_tokens} new ones and {depth} drafts exceed the target's "
                f"{limit} positions: shorten the prompt or lower max_new_tokens=."
            )
        boundary = self.target.rotary_boundary
        if boundary is not None and min(map(len, prompts)) <= boundary < longest + max_new_tokens + depth:
            raise ValueError(
                f"{self.target.name} turns keys by other angles in texts longer than {boundary} tokens (LongRoPE), and this text "
                "would cross that length: let prompt, answer and drafts stay below it, or give only longer prompts."
            )

    def _check_target(self) -> None:
        """Raises ValueError for drafts that this target cannot verify, or passes of it that cannot be compiled."""
        target, proposer = self.target, self.proposer
        if proposer is not None and not proposer.linear and target.recurrent:
            raise ValueError(f"{target.name} {CHAINS_ONLY}")
        reach = target.kinds.reach
        if proposer is not None and reach is not None and proposer.depth >= reach:
            raise ValueError(
                f"{target.name} has layers that see {reach} positions, and {proposer.depth} drafts with the token before them "
                f"need {proposer.depth + 1}: lower depth= to {reach - 1} or less (of proposers that look at texts: num)."
            )
        if self.runner.compile and target.share.size > 1:
            raise ValueError(
                f"{target.name} is held by {target.share.size} processes together, and their exchanges in a layer "
                "are not compiled: set compile=false."
            )
        if self.runner.compile:
            check_layers(target, "set compile=false.")

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
