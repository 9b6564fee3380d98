"""Judging a drafter on held-out prompts while it is trained: by replay often, by decoding when there is time.

The target answers the prompts once (`HeldoutAnswers`). Replay along these answers costs one pass over them and gives tau.
Decoding adds speed and losslessness, and takes many times as long, so it is given a share of the training time.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from specdec.core import rules
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.measuring import figures
from specdec.measuring.measurement import Prompt, PromptReplay, PromptResult, check_prompts, measure
from specdec.measuring.report import Report, in_parts, prompt_counts, summarise, undecoded, with_replays
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer
from specdec.proposers.costs import Conditions, Costs
from specdec.target.experts import experts_of
from specdec.target.model import TargetOutput
from specdec.unroll import replay
from train import progress, replaying
from train.answers.answering import HeldoutAnswers
from train.features.engine_features import EngineTarget
from train.group import Group
from train.validation_settings import ValidationSettings

AUTO_SHARE = 1 / 3  # of what validation has taken so far: the most that auto may take at the end
MOST_KEPT = 2**28  # bytes of the target's states for these texts
LEAST = 2  # prompts that are decoded at the end, however short the training was: one has no interval


class Validation:
    """Judges drafters. All processes call it together; each does a part of the prompts, the same as those it holds a target with.

    show: prints a report; say: prints a sentence
    engine: reads texts and writes the target's answers in place of a target here; then nothing is decoded
    Where replay applies (`replays`), it decides which step is the best. Where it does not (trees, heads that adapt the
    target, best_by=speedup), all prompts are decoded, if there is time for it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: Head,
        drafting: Drafting,
        prompts: list[Prompt],
        *,
        settings: ValidationSettings,
        best_by: str,
        stop: set[int],
        seed: int,
        show: Callable[[Report], None],
        say: Callable[[str], None],
        engine: EngineTarget | None = None,
    ):
        self.engine = engine
        self.accelerator, self.target, self.drafting, self.prompts = accelerator, drafter.target, drafting, prompts
        self.group = Group.in_step(accelerator, drafter.target)
        self.settings, self.best_by, self.stop, self.seed = settings, best_by, stop, seed
        self.show, self.say = show, say
        self.sampling = Sampling(temperature=settings.temperature)
        self.replays = (
            settings.decode != "always"
            and best_by == "tau"
            and not drafter.adapts_target
            and drafting.replayable(drafter, self.sampling)
        )
        self.drafts = isinstance(drafter, Drafter)
        self.adapts = drafter.adapts_target
        self.costs: dict[Conditions, Costs] = {}  # of auto, as far as they are known
        self.answers: list[list[int]] | None = None
        self.read: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # features and final states, by the number of a batch's first prompt
        self.seconds = dict.fromkeys(("answers", "replay", "decode", "auto"), 0.0)  # spent so far
        self.each: float | None = None  # seconds of decoding a prompt plainly and with drafts, as far as is known

    @property
    def figure(self) -> str:
        """The figure of a report that chooses the best step."""
        return "replayed_tau" if self.replays else self.best_by

    def __call__(
        self, candidates: dict[str, Head], *, step: int, trained: float, best: float | None, required: bool
    ) -> tuple[Head, Report] | None:
        """The best of the candidates, frozen drafters by name, and its report; None if there is no time to decode.

        trained: seconds of training so far; best: the figure to beat; required: whether it may not be put off
        """
        if not self.replays:
            ((_, frozen),) = candidates.items()
            results = self._decode_all(frozen, step, self._left(trained), required)
            if results is None:
                return None
            report = in_parts(self._summarise(results), results, self._summarise)
            report = replace(report, by_prompt=prompt_counts(results))
            return frozen, self._finished(self._with_auto(report, frozen), step)
        replays = {name: self.replay(frozen) for name, frozen in candidates.items()}
        taus = {name: figures.replayed_tau(each) for name, each in replays.items()}
        kept = max(taus, key=lambda name: taus[name])
        replayed = lambda part: with_replays(undecoded(self.settings.temperature), part)
        report = in_parts(replayed(replays[kept]), replays[kept], replayed)
        report = replace(report, by_prompt=prompt_counts(replays[kept]))
        if len(candidates) > 1:
            report = replace(report, ema={"kept": kept, **taus})
        left = self._left(trained)
        better = (
            self.engine is None
            and self.settings.decode == "best"
            and (best is None or taus[kept] > best)
            and not required
        )
        if self._agreed(better and (left is None or LEAST * (self.each or 0.0) <= left)):
            report = self._with_decoded(report, candidates[kept], left)
        return candidates[kept], self._finished(report, step)

    @property
    def traceable(self) -> bool:
        """Whether replay can say what was drafted along the answers, in this process alone."""
        alone = self.engine is None and self.target.share.size == 1
        return alone and self.answers is not None and self.sampling.greedy and self.drafting.stopping is None

    def unfinished(self, report: Report) -> bool:
        """Whether `decode_best` has something to add to the report of the best step."""
        return self._partly(report) or (self._wants_auto(report, end=True) and not self.adapts)

    def decode_best(self, frozen: Head, report: Report, *, trained: float) -> Report:
        """At the end: the report of the best step with what decoding its checkpoint gives."""
        if self.engine is not None:
            return report
        if self._partly(report):
            report = self._with_decoded(report, frozen, self._left(trained))
        return self._finished(self._with_auto(report, frozen, end=True), report.step)

    def replay(self, frozen: Head) -> list[PromptReplay]:
        """tau along the target's answers, the same in all processes."""
        assert isinstance(frozen, Drafter)
        if self.answers is None:
            with self._timed("answers"):
                answers = HeldoutAnswers(
                    self.target,
                    self.sampling,
                    self.settings.max_new_tokens,
                    self.stop,
                    self.seed,
                    Path(self.settings.answers),
                    engine=self.engine,
                )
                self.answers, slowest = answers.get(self.prompts, self.group)
            self.each = self.each or 2 * slowest  # drafting needs at most as many passes
        with self._timed("replay"):
            done = []
            for numbers in progress.track(self._batches(), "validation: replay", unit="prompts", size=len):
                texts = [(self.prompts[number].tokens, self.answers[number]) for number in numbers]
                accepts = replay.acceptances(
                    frozen,
                    texts,
                    depth=self.drafting.depth,
                    temperature=self.settings.temperature,
                    output=self._read(frozen, numbers, texts),
                )
                for number, accept in zip(numbers, accepts):
                    rounds, accepted = replay.rounds(accept)
                    done.append((number, PromptReplay(self.prompts[number], rounds, accepted.tolist())))
            return [each for _, each in sorted(self.group.gather(done), key=lambda pair: pair[0])]

    def _read(self, frozen: Drafter, numbers: list[int], texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
        """What the target reads in a batch, in memory from the second time on if all batches take at most MOST_KEPT bytes."""
        device = self.target.device
        if numbers[0] in self.read:
            features, final = (each.to(device) for each in self.read[numbers[0]])
            return TargetOutput(features, final)
        output = self.engine.read(frozen, texts) if self.engine else replay.read(frozen, texts)
        kept = output.features.cpu(), output.final[..., : 0 if self.sampling.greedy else None].cpu()
        if sum(each.nbytes for pair in [*self.read.values(), kept] for each in pair) <= MOST_KEPT:
            self.read[numbers[0]] = kept
        return output

    def cost(self, trained: float) -> str:
        """One sentence on what validation took."""
        parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in self.seconds.items() if spent)
        total = sum(self.seconds.values())
        return f"validation took {100 * total / trained if trained else 0:.1f} % of the {trained:.0f} s of training ({parts})"

    # Decoding

    def _with_decoded(self, report: Report, frozen: Head, left: float | None) -> Report:
        """A report of replay and the decoding of as many prompts as there is time for, but at least LEAST."""
        results = self._decode(frozen, self._within(left, at_least=LEAST, whole=False))
        known = {name: value for name, value in vars(report).items() if name.startswith("replayed_")}
        known |= {
            name: getattr(report, name) for name in ("ema", "step", "training", "by_category", "by_tag", "by_prompt")
        }
        return self._with_auto(replace(self._summarise(results), **known), frozen)

    def _decode_all(self, frozen: Head, step: int, left: float | None, required: bool) -> list[PromptResult] | None:
        """All prompts, as figures of different prompts cannot be compared; None if that takes longer than is left."""
        if required or left is None or self.settings.decode == "always":
            return self._decode(frozen, iter)
        if self.settings.decode == "end":
            return None
        if self._agreed(left > 0 and (self.each or 0.0) * self._share_of_prompts() <= left):
            results = self._decode(frozen, self._within(left, at_least=1, whole=True))
            if len(results) == len(self.prompts):
                return results
        self.say(f"step {step}: validation is put off: decoding takes more than is left of validation.share")
        return None

    def _decode(self, frozen: Head, take: Callable) -> list[PromptResult]:
        """Decodes what `take` gives this process of its prompts. -> the results of all processes"""
        mine = self._mine()
        with self._timed("decode"):
            begun, done = time.perf_counter(), []
            if mine:
                done = self._measure(
                    self.drafting.proposer(frozen), mine, None if self.replays else frozen, take, "decoding"
                )
                self.each = (time.perf_counter() - begun) / max(1, len(done))
            return [result for _, result in sorted(self.group.gather(done), key=lambda pair: pair[0])]

    def _partly(self, report: Report) -> bool:
        """Whether it was only replayed, or decoded in part."""
        return self.replays and report.num_prompts != report.replayed_prompts

    # Decoding with auto

    def _wants_auto(self, report: Report, *, end: bool) -> bool:
        known = report.auto is not None or self.engine is not None or not self.drafts
        return not known and self.settings.auto in (("end", "always") if end else ("always",))

    def _with_auto(self, report: Report, frozen: Head, *, end: bool = False) -> Report:
        """The report with figures of auto on the prompts that were decoded, or at the end on as many as AUTO_SHARE allows.

        Auto takes turns with plain decoding in a pass of its own, so nothing else in the report changes.
        """
        if not self._wants_auto(report, end=end):
            return report
        auto = self._make_auto(frozen)
        if auto is None:
            return report
        mine = self._mine()[: -(-report.num_prompts // self.group.num)]
        left = AUTO_SHARE * sum(self.seconds.values()) if end and self.settings.auto == "end" else None
        take = self._within(left, at_least=LEAST, whole=False)
        with self._timed("auto"):
            results = self.group.gather(self._measure(auto, mine, None, take, "decoding with auto") if mine else [])
        figures = self._summarise([replace(result, auto=result.drafted) for _, result in results]).auto
        assert figures is not None
        return replace(report, auto={"num_prompts": len(results), **figures})

    def _make_auto(self, frozen: Head) -> Auto | None:
        """None, with a sentence, where it cannot draft: a run does not end for it."""
        head = self.drafting.proposer(frozen)
        try:
            auto = Auto.usual(self.target, head)
            auto.opened = self.costs
            auto.progress = functools.partial(progress.track, unit="sizes")
            decoder = self.drafting.decoder(
                self.target, auto, sampling=self.sampling, stop=self.stop, runner=self.drafting.runner()
            )
            check_prompts(decoder, self.prompts, self.settings.max_new_tokens)  # of all processes: all must agree
        except ValueError as error:
            self.say(f"speedup auto is left out: {error}")
            return None
        return auto

    # Prompts, one after the other

    def _measure(
        self, proposer: Proposer, mine: list[int], replayed: Head | None, take: Callable, what: str
    ) -> list[tuple[int, PromptResult]]:
        """Prompts of these numbers, plainly and with the proposer's drafts. -> as many as `take` gives, numbered

        what: is done, for the progress
        """
        results = measure(
            self.target,
            proposer,
            self.drafting,
            [self.prompts[number] for number in mine],
            replayed=replayed,
            sampling=self.sampling,
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.stop,
            seed=self.seed,
            numbers=mine,
            progress=lambda groups: progress.track(
                take(groups), f"validation: {what}", unit="prompts", total=len(groups)
            ),
        )
        return list(zip(mine, results))

    def _within(self, left: float | None, *, at_least: int, whole: bool) -> Callable[[list], Iterator]:
        """What gives `measure` its prompts as long as the next one, or all of them (`whole`), fit into `left` seconds."""
        at_least = -(-at_least // self.group.num)

        def take(groups: list) -> Iterator:
            begun = time.perf_counter()
            for number, group in enumerate(groups):
                wanted = (len(groups) if whole else number + 1) * (time.perf_counter() - begun) / max(1, number)
                late = left is not None and number >= at_least and wanted > left
                if self.group.share.all_say(late)[0]:
                    return
                yield group

        return take

    def _summarise(self, results: list[PromptResult]) -> Report:
        return summarise(
            results,
            depth=self.drafting.depth,
            temperature=self.settings.temperature,
            adapted=self.target.adapted,
            lossy=self.drafting.rule in rules.LOSSY,
        )

    def _finished(self, report: Report, step: int | None) -> Report:
        experts = experts_of(self.target.config.to_dict())
        numbers = None if experts is None else [experts.num, experts.per_token]
        report = replace(report, shape=str(self.drafting.shape), step=step, experts=numbers)
        self.show(report)
        return report

    # Time and processes

    def _left(self, trained: float) -> float | None:
        """Seconds that validation may still take; None: any number."""
        return None if self.settings.share is None else self.settings.share * trained - sum(self.seconds.values())

    def _agreed(self, decision: bool) -> bool:
        """The main process's decision, whose clock counts."""
        return broadcast_object_list([decision])[0]

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - begun

    def _mine(self) -> list[int]:
        """Numbers of the prompts that this process decodes."""
        return list(self.group.mine(range(len(self.prompts))))

    def _share_of_prompts(self) -> int:
        return -(-len(self.prompts) // self.group.num)

    def _batches(self) -> list[list[int]]:
        """Numbers of the prompts that this process replays, those of similar lengths together."""
        assert self.answers is not None
        lengths = [len(prompt.tokens) + len(answer) for prompt, answer in zip(self.prompts, self.answers)]
        mine = self.group.mine(replaying.by_length(range(len(lengths)), lengths))
        return replaying.batches(mine, lengths, self.target)
