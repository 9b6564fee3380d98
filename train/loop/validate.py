"""Judging a drafter on held-out prompts while it is trained: by replay often, by decoding when there is time.

The target answers the prompts once (`HeldoutAnswers`). Replay along these answers costs one pass over them and gives tau.
Decoding adds speed and losslessness, and takes many times as long, so it is given a share of the training time.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdec.core import fast, progress
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Drafter, Head
from specdec.measuring import report as figures
from specdec.measuring import served
from specdec.measuring.answers import HeldoutAnswers
from specdec.measuring.measure import (
    MeasureSettings,
    Method,
    PromptReplay,
    PromptResult,
    check_prompts,
    measure,
    prompt_replay,
)
from specdec.measuring.replay import Written, replay_texts, sort_by_length
from specdec.measuring.report import Report, in_parts, prompt_counts, summarise, undecoded, with_replays
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer
from specdec.proposers.costs import Costs
from specdec.target.structure import experts_of
from specdec.text.conversations import Prompt
from train.processes import ProcessGroup
from train.settings.options import ValidationConfig
from train.show import display

AUTO_SHARE = 1 / 3  # of what validation has taken so far: the most that auto may take at the end
LEAST = 2  # prompts that are decoded at the end, however short the training was: one has no interval


class Validation:
    """Judges drafters. All processes call it together; each does a part of the prompts, the same as those it holds a target with.

    drafting: how drafts are decoded and verified
    console: prints reports and sentences
    engine: reads texts and writes the target's answers in place of a target here; then nothing is decoded
    Where replay applies (`replays`), it decides which step is the best. Where it does not (trees, heads that adapt the
    target), all prompts are decoded, if there is time for it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: Head,
        prompts: list[Prompt],
        *,
        options: ValidationConfig,
        drafting: Drafting,
        seed: int,
        stop: set[int],
        console: progress.Results,
        engine: EngineTarget | None = None,
    ):
        self.settings, self.drafting, self.seed = options, drafting, seed
        self.target, self.prompts, self.stop, self.engine = drafter.target, prompts, stop, engine
        self.console = console
        self.accelerator, self.group = accelerator, ProcessGroup.of(accelerator, drafter.target)
        self.sampling = Sampling(temperature=self.settings.temperature)
        self.adapts, self.drafts = drafter.adapts_target, isinstance(drafter, Drafter)
        self.replays = (
            self.settings.decode != "always" and not self.adapts and self.drafting.replayable(drafter, self.sampling)
        )
        # What later validations use again
        self.costs: dict[Path, Costs] = {}  # of auto, as far as they are known
        self.served: list[served.ServedCosts | None] = []  # empty: not measured yet
        self.texts: list[Written] | None = None  # what is replayed
        self.num_trained = 0  # prompts that are trained on, too
        self.seconds = dict.fromkeys(("answers", "replay", "decode", "auto"), 0.0)  # spent so far
        self.each: float | None = None  # seconds of decoding a prompt plainly and with drafts, as far as is known

    @property
    def figure(self) -> str:
        """The figure of a report that chooses the best step."""
        return "replayed_tau" if self.replays else "tau"

    def __call__(
        self, candidates: dict[str, Head], *, step: int, trained: float, best: float | None, required: bool
    ) -> tuple[Head, Report] | None:
        """The best of the candidates, frozen drafters by name, and its report; None if there is no time to decode.

        trained: seconds of training so far; best: the figure to beat; required: whether it may not be put off
        """
        if not self.replays:
            ((_, frozen),) = candidates.items()
            if not (required or self.settings.decode == "always" or self._all_fit(trained)):
                self.console.say(
                    f"step {step}: validation is put off: decoding takes more than is left of validation.share"
                )
                return None
            results = self._decode(frozen, len(self.prompts))  # figures of different prompts cannot be compared
            report = self._with_served(in_parts(self._summarise(results), results, self._summarise), frozen)
            report = replace(report, by_prompt=prompt_counts(results))
            return frozen, self._finish(report, step)
        replays = {name: self.replay(frozen) for name, frozen in candidates.items()}
        taus = {name: figures.replayed_tau(each) for name, each in replays.items()}
        kept = max(taus, key=lambda name: taus[name])
        replayed = lambda part: with_replays(undecoded(self.settings.temperature), part)
        report = in_parts(replayed(replays[kept]), replays[kept], replayed)
        report = replace(report, by_prompt=prompt_counts(replays[kept]))
        if len(candidates) > 1:
            report = replace(report, ema={"kept": kept, **taus})
        wanted = self.engine is None and self.settings.decode == "best" and not required
        num = self._fitting(self._left(trained)) if wanted and (best is None or taus[kept] > best) else 0
        if num >= min(LEAST, len(self.prompts)):
            report = self._with_decoded(report, candidates[kept], num)
        return candidates[kept], self._finish(report, step)

    def unfinished(self, report: Report) -> bool:
        """Whether `decode_best` has something to add to the report of the best step."""
        return self._partly_decoded(report) or (self._wants_auto(report) and not self.adapts)

    def decode_best(self, frozen: Head, report: Report, *, trained: float) -> Report:
        """At the end: the report of the best step with what decoding its checkpoint gives."""
        if self.engine is not None:
            return report
        if self._partly_decoded(report):
            report = self._with_decoded(report, frozen, max(LEAST, self._fitting(self._left(trained))))
        return self._finish(self._with_auto(report, frozen), report.step)

    def cost(self, trained: float) -> str:
        """One sentence on what validation took."""
        parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in self.seconds.items() if spent)
        total = sum(self.seconds.values())
        return f"validation took {100 * total / trained if trained else 0:.1f} % of the {trained:.0f} s of training ({parts})"

    # Replay

    def replay(self, frozen: Head) -> list[PromptReplay]:
        """tau along the target's answers, the same in all processes."""
        assert isinstance(frozen, Drafter)
        texts = self.texts = self.texts or self._answer()
        mine = list(self.group.mine(sort_by_length(range(len(texts)), [text.length for text in texts])))
        with self._timed("replay"):
            wanted: dict = {"depth": self.drafting.depth, "what": "validation: replay", "engine": self.engine}
            found = replay_texts(frozen, [texts[number] for number in mine], **wanted)
            done = [(number, prompt_replay(self.prompts[number], each)) for number, each in zip(mine, found)]
            return [each for _, each in sorted(self.group.gather(done), key=lambda pair: pair[0])]

    def _answer(self) -> list[Written]:
        """The target's answers, read from the disk or written now."""
        with self._timed("answers"):
            kept = HeldoutAnswers(
                self.target,
                self.sampling,
                self.settings.max_new_tokens,
                self.stop,
                self.seed,
                Path(self.settings.answers),
                engine=self.engine,
            )
            answers, slowest = kept.get(self.prompts, self.group)
        self.each = self.each or 2 * slowest  # drafting needs at most as many passes
        pairs = zip(self.prompts, answers, strict=True)
        return [Written(prompt.tokens, answer, self.settings.temperature) for prompt, answer in pairs]

    # Decoding

    def _with_decoded(self, report: Report, frozen: Head, num: int) -> Report:
        """A report of replay and the decoding of the first `num` prompts."""
        kept = [name for name in vars(report) if name.startswith("replayed_")]
        kept += ["candidates", "ema", "step", "training", "by_category", "by_tag", "by_prompt"]
        known = {name: getattr(report, name) for name in kept}
        return self._with_served(replace(self._summarise(self._decode(frozen, num)), **known), frozen)

    def _with_served(self, report: Report, frozen: Head) -> Report:
        """On a GPU with the speedup of an engine; what it is made of depends on sizes only, and is measured once."""
        if not self.served:
            with self._timed("decode"):
                self.served.append(served.measure(self.target, self.drafting.proposer(frozen)))
        costs = self.served[0]
        return costs.add_to(report) if costs else report

    def _decode(self, frozen: Head, num: int) -> list[PromptResult]:
        """Decodes the first `num` prompts, if there are so many. -> the results of all processes"""
        mine, done = list(self.group.mine(range(min(num, len(self.prompts))))), []
        with self._timed("decode"):
            begun = time.perf_counter()
            if mine:
                replayed = None if self.replays else frozen
                done = self._measure(self.drafting.proposer(frozen), mine, replayed, "decoding")
                self.each = (time.perf_counter() - begun) / len(done)
            return [result for _, result in sorted(self.group.gather(done), key=lambda pair: pair[0])]

    def _partly_decoded(self, report: Report) -> bool:
        """Whether it was only replayed, or decoded in part."""
        return self.replays and report.num_prompts != report.replayed_prompts

    def _wants_auto(self, report: Report) -> bool:
        return report.auto is None and self.engine is None and self.drafts and self.settings.auto == "end"

    def _with_auto(self, report: Report, frozen: Head) -> Report:
        """The report with figures of auto on as many of the prompts that were decoded as AUTO_SHARE allows.

        Auto takes turns with plain decoding in a pass of its own, so nothing else in the report changes.
        """
        auto = self._make_auto(frozen) if self._wants_auto(report) else None
        if auto is None:
            return report
        num = max(LEAST, self._fitting(AUTO_SHARE * sum(self.seconds.values())))
        mine = list(self.group.mine(range(min(report.num_prompts, num))))
        with self._timed("auto"):
            results = self.group.gather(self._measure(auto, mine, None, "decoding with auto") if mine else [])
        found = self._summarise([replace(result, auto=result.drafted) for _, result in results]).auto
        assert found is not None
        return replace(report, auto={"num_prompts": len(results), **found})

    def _make_auto(self, frozen: Head) -> Auto | None:
        """None, with a sentence, where it cannot draft: a run does not end for it."""
        try:
            auto = Auto.usual(self.target, self.drafting.proposer(frozen))
            auto.opened = self.costs
            auto.progress = functools.partial(progress.track, unit="sizes")
            runner = self.drafting.runner()
            decoder = self.drafting.decoder(self.target, auto, sampling=self.sampling, stop=self.stop, runner=runner)
            check_prompts(decoder, self.prompts, self.settings.max_new_tokens)  # of all processes: all must agree
        except ValueError as error:
            self.console.say(f"speedup auto is left out: {error}")
            return None
        return auto

    def _measure(
        self, proposer: Proposer, mine: list[int], replayed: Head | None, what: str
    ) -> list[tuple[int, PromptResult]]:
        """Prompts of these numbers, plainly and with the proposer's drafts, numbered. what: is done, for the progress"""
        found = measure(
            [Method("drafted", self.target, proposer, self.drafting, head=replayed)],
            [self.prompts[number] for number in mine],
            MeasureSettings(self.sampling, self.stop, self.settings.max_new_tokens, seed=self.seed),
            numbers=mine,
            progress=functools.partial(progress.track, what=f"validation: {what}", unit="prompts"),
        )
        return list(zip(mine, [each["drafted"] for group in found for each in group]))

    def _summarise(self, results: list[PromptResult]) -> Report:
        return summarise(
            results,
            depth=self.drafting.depth,
            temperature=self.settings.temperature,
            adapted=self.target.adapted,
        )

    def _finish(self, report: Report, step: int | None) -> Report:
        """Adds what was judged, and prints the report."""
        experts = experts_of(self.target.config.to_dict())
        numbers = None if experts is None else [experts.num, experts.per_token]
        report = replace(
            report, shape=str(self.drafting.shape), step=step, experts=numbers, fast=fast.describe(self.target.device)
        )
        display.validation(self.console, report, self.drafting.shape)
        return report

    # Time and processes

    def _left(self, trained: float) -> float | None:
        """Seconds that validation may still take; None: any number."""
        return None if self.settings.share is None else self.settings.share * trained - sum(self.seconds.values())

    def _fitting(self, left: float | None) -> int:
        """How many prompts all processes decode in so many seconds, as the main one says, whose clock counts. None: all"""
        num = len(self.prompts)
        if left is not None:
            if self.each is None and self.replays and self.texts is None:
                self.texts = self._answer()  # which says what a prompt takes, in a run that was resumed at its end
            num = min(num, int(left / self.each) * self.group.num if self.each else LEAST) if left > 0 else 0
        return broadcast_object_list([num])[0]

    def _all_fit(self, trained: float) -> bool:
        """Whether there is time to decode all prompts, as far as is known. Where `decode` is end, only if time has no limit."""
        left = self._left(trained)
        if left is None or self.settings.decode == "end":
            return left is None
        rounds = -(-len(self.prompts) // self.group.num)
        return broadcast_object_list([left > 0 and (self.each or 0.0) * rounds <= left])[0]

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - begun


# Replay of many answers: those of similar lengths in one batch
