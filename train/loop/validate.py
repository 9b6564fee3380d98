"""Validation of a drafter on held-out prompts during training: by replay often, by decoding when there is time.

The target answers the prompts once (`HeldoutAnswers`). Replay along these answers costs one pass and gives tau.
Decoding adds speed and losslessness. It takes many times as long, so it gets a share of the training time.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdec.core import fast, progress
from specdec.core.answer_text import TextDecoder
from specdec.core.compile import decodes_joined, join_products
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Drafter, Head
from specdec.measuring.answers import HeldoutAnswers
from specdec.measuring.measure import (
    FROZEN,
    MeasureSettings,
    Method,
    PromptReplay,
    PromptResult,
    check_prompts,
    make_plain_decoder,
    make_prompt_replay,
    measure,
)
from specdec.measuring.replay import AnsweredPrompt, replay_texts, sort_by_length
from specdec.measuring.report import (
    Report,
    add_categories,
    add_replays,
    compute_replayed_tau,
    make_undecoded_report,
    summarise,
    write_samples,
)
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer
from specdec.proposers.costs import Costs
from specdec.target.structure import find_experts
from specdec.text.conversations import Prompt
from train.loop.served_validation import MIN_PROMPTS, ServedValidation
from train.processes import ProcessGroup
from train.settings.options import ValidationConfig
from train.show import display

Result = TypeVar("Result")
AUTO_SHARE = 1 / 3  # share of the seconds of validation so far that auto may take at the end, at most
KEPT_FIGURES = ("candidates", "ema", "step", "training", "by_category", "by_tag", "served")  # besides those of replay


class Validation:
    """Validates drafters. All processes call it together. Each takes its share of the prompts.

    options: `validation` of the run; drafting: `decode` of the run; measuring: settings of decoding
    console: printer of reports and sentences
    engine: servers that read texts and write answers in place of a target here; with them nothing is decoded
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
        measuring: MeasureSettings,
        console: progress.Results,
        engine: EngineTarget | None = None,
    ):
        self.settings, self.drafting, self.measuring = options, drafting, measuring
        self.target, self.prompts, self.engine = drafter.target, prompts, engine
        self.console = console
        self.accelerator, self.group = accelerator, ProcessGroup.from_target(accelerator, drafter.target)
        self.adapts_target, self.is_drafter = drafter.adapts_target, isinstance(drafter, Drafter)
        self.replays = (
            self.settings.decode != "always"
            and not self.adapts_target
            and self.drafting.replayable(drafter, measuring.sampling)
        )
        # What later validations use again
        self.runner = drafting.runner()  # runner of the target's passes
        self.decoders: dict[str, Decoder] = {}  # decoders by their names in `measure`
        self.twin: Head | None = None  # drafter that decodes, if its passes are captured
        self.proposer: Proposer | None = None  # proposer of the twin
        self.costs: dict[Path, Costs] = {}  # measured costs of auto, by file
        self.texts: list[AnsweredPrompt] | None = None  # answers that are replayed
        self.text_decoder: TextDecoder | None = None  # decoder of answers that reports keep; None: they keep none
        self.num_trained = 0  # prompts that are trained on, too
        self.served: ServedValidation | None = None  # an engine that gets the head
        # Seconds of validation so far
        self.seconds = dict.fromkeys(("answers", "replay", "decode", "auto", "engine"), 0.0)
        self.prompt_seconds: float | None = (
            None  # seconds of decoding a prompt, plainly and drafted; None: not measured
        )

    @property
    def figure_name(self) -> str:
        """The figure of a report that chooses the best step."""
        return "replayed_tau" if self.replays else "tau"

    def __call__(
        self, candidates: dict[str, Head], *, step: int, trained: float, best: float | None, required: bool
    ) -> tuple[Head, Report] | None:
        """The best of the candidates, frozen drafters by name, and its report; None if there is no time to decode.

        trained: seconds of training so far; best: figure to beat; required: whether the validation may not be put off
        """
        if not self.replays:
            ((_, frozen),) = candidates.items()
            if required or self.settings.decode == "always" or self._affords_all_prompts(trained):
                report = self._ask_if_time(replace(self._decode_all(frozen), step=step), frozen, trained)
                return frozen, self._finish_report(report)
            self.console.say(
                f"step {step}: validation is put off: decoding takes more than is left of validation.share"
            )
            return None
        better, report = self._replay_all(candidates)
        report = self._ask_if_time(replace(report, step=step), candidates[better], trained)
        may_decode = self.engine is None and self.settings.decode == "best" and not required
        if may_decode and (best is None or getattr(report, self.figure_name) > best):
            num = self._count_affordable_prompts(self._count_seconds_left(trained))
            if num >= min(MIN_PROMPTS, len(self.prompts)):
                report = self._add_decoded(report, candidates[better], num)
        return candidates[better], self._finish_report(report)

    def _decode_all(self, frozen: Head) -> Report:
        """The report of decoding all prompts: figures of different prompts cannot be compared."""
        results = self._decode(frozen, len(self.prompts))
        return add_categories(self._summarise_decoded(results), results, self._summarise)

    def _replay_all(self, candidates: dict[str, Head]) -> tuple[str, Report]:
        """The name of the candidate with the larger replayed tau, and its report."""
        replays = {name: self.replay(frozen) for name, frozen in candidates.items()}
        taus = {name: compute_replayed_tau(results) for name, results in replays.items()}
        better = max(taus, key=taus.__getitem__)
        results = replays[better]
        report = add_categories(self._report_replays(results), results, self._report_replays)
        ema = {"kept": better, **taus} if len(candidates) > 1 else None
        return better, replace(report, ema=ema)

    def _report_replays(self, replays: list[PromptReplay]) -> Report:
        """The report of prompts that were replayed and not decoded."""
        return add_replays(make_undecoded_report(self.settings.temperature), replays)

    def needs_decoding(self, report: Report) -> bool:
        """Whether `decode_best` has something to add to the report of the best step."""
        decodes = self._is_partly_decoded(report) or (self._wants_auto(report) and not self.adapts_target)
        return decodes or (self.served is not None and self.served.is_partial(report))

    def decode_best(self, frozen: Head, report: Report, *, trained: float) -> Report:
        """At the end: the report of the best step with what decoding its checkpoint, here and in an engine, gives."""
        if self.served is not None and self.served.is_partial(report):
            with self._add_seconds("engine"):
                report = self.served(report, frozen, *self.served.plan(None))
        if self.engine is not None:
            return report
        if self._is_partly_decoded(report):
            num = self._count_affordable_prompts(self._count_seconds_left(trained))
            report = self._add_decoded(report, frozen, max(MIN_PROMPTS, num))
        return self._finish_report(self._add_auto(report, frozen))

    def describe_cost(self, trained: float) -> str:
        """One sentence on what validation took."""
        parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in self.seconds.items() if spent)
        percent = 100 * sum(self.seconds.values()) / trained if trained else 0
        return f"validation took {percent:.1f} % of the {trained:.0f} s of training ({parts})"

    # Replay

    def replay(self, frozen: Head) -> list[PromptReplay]:
        """Replays of a drafter along the target's answers, by prompt, the same in all processes."""
        frozen = self.drafting.limit_window(frozen)
        assert isinstance(frozen, Drafter)
        texts = self.texts = self.texts or self._get_answers()
        own_numbers = list(self.group.mine(sort_by_length(range(len(texts)), [text.length for text in texts])))
        with self._add_seconds("replay"):
            options: dict = {"depth": self.drafting.depth, "label": "validation: replay", "engine": self.engine}
            replayed_texts = replay_texts(frozen, [texts[number] for number in own_numbers], **options)
            prompts = [self.prompts[number] for number in own_numbers]
            return self._gather(list(zip(own_numbers, map(make_prompt_replay, prompts, replayed_texts))))

    def _get_answers(self) -> list[AnsweredPrompt]:
        """The target's answers, read from the disk or written now."""
        with self._add_seconds("answers"):
            heldout = HeldoutAnswers(
                self.target,
                self.measuring.sampling,
                self.measuring.max_new_tokens,
                self.measuring.stop,
                self.measuring.seed,
                Path(self.settings.answers),
                engine=self.engine,
                **{} if self.target.device.type == "cpu" else {"runner": self.runner},
            )
            answers, slowest = heldout.get(self.prompts, self.group)
        self.prompt_seconds = self.prompt_seconds or 2 * slowest  # drafting needs at most as many passes
        pairs = zip(self.prompts, answers, strict=True)
        return [AnsweredPrompt(prompt.tokens, answer, self.settings.temperature) for prompt, answer in pairs]

    # Decoding

    def _add_decoded(self, report: Report, frozen: Head, num: int) -> Report:
        """A report of replay and the decoding of the first `num` prompts."""
        is_kept = {name: name.startswith("replayed_") or name in KEPT_FIGURES for name in vars(report)}
        kept_figures = {name: value for name, value in vars(report).items() if is_kept[name]}
        return replace(self._summarise_decoded(self._decode(frozen, num)), **kept_figures)

    def _decode(self, frozen: Head, num: int) -> list[PromptResult]:
        """Decodes the first `num` prompts, if there are so many. -> the results of all processes"""
        own_numbers, results = list(self.group.mine(range(min(num, len(self.prompts))))), []
        with self._add_seconds("decode"):
            started = time.perf_counter()
            if own_numbers:
                replayed = None if self.replays else frozen
                results = self._measure(self._make_proposer(frozen), own_numbers, replayed, "drafted", "decoding")
                self.prompt_seconds = (time.perf_counter() - started) / len(results)
            return self._gather(results)

    def _is_partly_decoded(self, report: Report) -> bool:
        """Whether it was only replayed, or decoded in part."""
        return self.replays and report.num_prompts != report.replayed_prompts

    def _wants_auto(self, report: Report) -> bool:
        return report.auto is None and self.engine is None and self.is_drafter and self.settings.auto == "end"

    def _add_auto(self, report: Report, frozen: Head) -> Report:
        """The report with figures of auto on as many of the prompts that were decoded as AUTO_SHARE allows.

        Auto takes turns with plain decoding in a pass of its own, so nothing else in the report changes.
        """
        auto = self._make_auto(frozen) if self._wants_auto(report) else None
        if auto is None:
            return report
        num = max(MIN_PROMPTS, self._count_affordable_prompts(AUTO_SHARE * sum(self.seconds.values())))
        own_numbers = list(self.group.mine(range(min(report.num_prompts, num))))
        with self._add_seconds("auto"):
            results = self.group.gather(
                self._measure(auto, own_numbers, None, "auto", "decoding with auto") if own_numbers else []
            )
        auto_figures = self._summarise([replace(result, auto=result.drafted) for _, result in results]).auto
        assert auto_figures is not None
        return replace(report, auto={"num_prompts": len(results), **auto_figures})

    def _make_auto(self, frozen: Head) -> AutoProposer | None:
        """The proposer auto. Where it cannot draft, a sentence is printed and None returned: the run goes on."""
        try:
            auto = AutoProposer.make_default(self.target, self._make_proposer(frozen))
            auto.costs_by_file = self.costs
            auto.progress = functools.partial(progress.track_items, unit="sizes")
            sampling, stop = self.measuring.sampling, self.measuring.stop
            decoder = self.drafting.decoder(self.target, auto, sampling=sampling, stop=stop, runner=self.runner)
            check_prompts(
                decoder, self.prompts, self.measuring.max_new_tokens
            )  # prompts of all processes, which must agree
        except ValueError as error:
            self.console.say(f"speedup auto is left out: {error}")
            return None
        return auto

    def _make_proposer(self, frozen: Head) -> Proposer:
        """The proposer of a frozen drafter.

        If its passes are captured, it is one proposer in all validations: the weights are copied into its drafter, so
        that CUDA graphs stay valid.
        """
        device = self.target.device
        captures = self.drafting.cuda_graphs or (self.drafting.cuda_graphs is None and device.type == "cuda")
        repacks = device.type == "cpu" and self.drafting.compile  # compiled code has copies of the weights
        if not captures or repacks or self.adapts_target:
            return self.drafting.proposer(frozen)
        if self.twin is None or self.proposer is None:
            self.twin = frozen.frozen_copy()
            if decodes_joined(device):
                join_products(self.twin)
            self.proposer = self.drafting.proposer(self.twin)
        else:
            self.twin.load_state_dict(frozen.state_dict())
        return self.proposer

    def _measure(
        self, proposer: Proposer, numbers: list[int], replayed: Head | None, name: str, activity: str
    ) -> list[tuple[int, PromptResult]]:
        """Results of prompts, plainly and with the proposer's drafts, each behind its number.

        numbers: numbers of the prompts; replayed: head that is replayed, too
        name: name of the method; activity: words for the progress
        """
        if not self.decoders:
            self.decoders[FROZEN] = make_plain_decoder(self.target, self.measuring, self.runner)
        measured_groups = measure(
            [Method(name, self.target, proposer, self.drafting, head=replayed)],
            [self.prompts[number] for number in numbers],
            self.measuring,
            numbers=numbers,
            progress=functools.partial(progress.track_items, name=f"validation: {activity}", unit="prompts"),
            earlier=self.decoders,
            longest=max(len(prompt.tokens) for prompt in self.prompts),
        )
        return list(zip(numbers, [results[name] for group in measured_groups for results in group]))

    def _gather(self, results: list[tuple[int, Result]]) -> list[Result]:
        """The results of all processes in the order of their numbers."""
        return [result for _, result in sorted(self.group.gather(results), key=lambda pair: pair[0])]

    def _summarise(self, results: list[PromptResult]) -> Report:
        return summarise(
            results,
            depth=self.drafting.depth,
            temperature=self.settings.temperature,
            adapted=self.target.adapted,
        )

    def _summarise_decoded(self, results: list[PromptResult]) -> Report:
        """The report with the text of some answers."""
        samples = write_samples(results, self.text_decoder) if self.text_decoder else []
        return replace(self._summarise(results), samples=samples)

    def _finish_report(self, report: Report) -> Report:
        """Adds shape, experts and fast paths to a report, and prints it."""
        experts = find_experts(self.target.config.to_dict())
        numbers = None if experts is None else [experts.num, experts.per_token]
        report = replace(
            report,
            shape=str(self.drafting.shape),
            experts=numbers,
            fast=fast.describe_paths(self.target.device),
        )
        display.print_validation(self.console, report, self.drafting.shape)
        return report

    # In an engine

    def _ask_if_time(self, report: Report, frozen: Head, trained: float) -> Report:
        """The report with an engine's figures, of as many prompts as there is time for."""
        if self.served is None:
            return report
        num, loads = self.group.share(self.served.plan(self._count_seconds_left(trained)))
        all_loads = self.served.options.loads
        if len(loads) < len(all_loads):
            missing = f"with {', '.join(str(load) for load in all_loads if load not in loads)} requests at once"
            about = f"step {report.step}: the engine is not asked{(' ' + missing) * bool(loads)}"
            self.console.say(f"{about}: validation.share leaves too little time")
        if not loads:
            return report
        with self._add_seconds("engine"):
            return self.served(report, frozen, num, loads)

    # Time and processes

    def _count_seconds_left(self, trained: float) -> float | None:
        """The seconds that validation may still take; None without a limit."""
        return None if self.settings.share is None else self.settings.share * trained - sum(self.seconds.values())

    def _count_affordable_prompts(self, seconds_left: float | None) -> int:
        """The number of prompts that all processes can decode in this time, by the main one's clock. None: no limit"""
        if seconds_left is not None and self.prompt_seconds is None and self.replays and self.texts is None:
            self.texts = self._get_answers()  # this measures a prompt, in a run that was resumed at its end
        num = len(self.prompts)
        if seconds_left is not None:
            seconds, at_once = self.prompt_seconds, self.group.num
            affordable = int(seconds_left / seconds) * at_once if seconds else MIN_PROMPTS
            num = min(num, affordable) if seconds_left > 0 else 0
        return broadcast_object_list([num])[0]

    def _affords_all_prompts(self, trained: float) -> bool:
        """Whether there is time to decode all prompts, as far as is known. With decode=end, only without a limit."""
        seconds_left = self._count_seconds_left(trained)
        if seconds_left is None or self.settings.decode == "end":
            return seconds_left is None
        seconds_left += self.seconds["engine"]  # an engine must not put off the figure that chooses the best step
        rounds = -(-len(self.prompts) // self.group.num)
        return broadcast_object_list([seconds_left > 0 and (self.prompt_seconds or 0.0) * rounds <= seconds_left])[0]

    @contextmanager
    def _add_seconds(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - started
