"""The demo: a head beside plain decoding, a training that follows a service, and a table of what both heads reach."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch

from specdec import checkpoint, loading
from specdec.core import files, progress
from specdec.core.lock import hold_lock
from specdec.core.option_types import FREE, Duration, Options, Text
from specdec.core.progress import format_duration
from specdec.core.resumable import check_settings
from specdec.core.wording import format_count
from specdec.heads.base import Drafter
from specdec.loading import LoadedHead
from specdec.measuring.questions import read_answers
from specdec.measuring.replay import AnsweredPrompt, encode_answered_prompt
from specdec.options.command_types import PROSE, OutputFolder
from specdec.options.target import TargetOptions
from specdec.text import conversations, reading
from specdec.tools.adapt.adapt import find_head_option
from specdec.tools.demo import comparison, training
from specdec.tools.demo.budget import (
    COMPARED_TOKENS,
    JUDGING_SHARE,
    NUM_CHOOSING,
    NUM_VALIDATIONS,
    OVERRUN,
    DemoPlan,
    TextSizes,
    find_depth,
    measure_speeds,
    plan_demo,
)
from specdec.tools.demo.service import read_service

PACK_MULTIPLE, LONGEST_PACK = 64, 2048  # tokens of a pack, which holds the longest row: its multiple, and at most


class DemoOptions(Options):
    checkpoint: Text
    prompts: Text
    answers: Text
    elsewhere: Text
    question: Annotated[str, PROSE]
    minutes: Duration
    out: Annotated[OutputFolder, FREE]
    fresh: Annotated[bool, FREE]
    target: TargetOptions


def run_demo(options: DemoOptions, console: progress.Results) -> None:
    """Runs the parts that have not been done. Raises ValueError for rows, heads and settings that do not fit."""
    out = Path(options.out)
    record = DemoRecord(out / "demo.json")
    with hold_lock(out / "lock", resource=out):
        if options.fresh and record.path.exists():
            record.path.unlink()
            for name in ("head", "features"):
                shutil.rmtree(out / name, ignore_errors=True)
        settings = {name: value for name, value in options.model_dump().items() if name not in ("out", "fresh")}
        advice = "Give those again, or fresh=true to begin anew."
        record.open(settings, advice=advice)
        if len(record.finished_parts) < len(PARTS):
            Demo(options, record, console).run()
        comparison_part = record.finished_parts["3"]
        console.print(comparison.make_table(comparison_part["ways"], comparison_part["questions"]))
        console.say(comparison_part["verdict"])
        console.say(f"All of it is in {record.path}. The same command shows it again; fresh=true begins anew.")


class DemoRecord:
    """What was measured and done, in a file that is written after each part."""

    def __init__(self, path: Path):
        self.path = path
        self.document: dict[str, Any] = {}

    @property
    def finished_parts(self) -> dict[str, dict[str, Any]]:
        """The results of the finished parts, by number."""
        return self.document["parts"]

    def open(self, settings: dict[str, Any], *, advice: str) -> None:
        """Reads the file, if there is one. Raises ValueError if it is of other settings."""
        self.document = {"settings": settings, "parts": {}}
        if self.path.exists():
            self.document = checkpoint.read_json(self.path, advice=advice)
            check_settings(self.path, self.document["settings"], settings, advice=advice)

    def write(self, **values: Any) -> None:
        self.document |= values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self.path, json.dumps(self.document, indent=1) + "\n")


class Demo:
    """The parts on this machine, with target and head loaded."""

    def __init__(self, options: DemoOptions, record: DemoRecord, console: progress.Results):
        self.options, self.record, self.console = options, record, console
        self.out, self.run_folder = Path(options.out), Path(options.out).resolve() / "head"
        self.service = read_service(options.prompts, options.answers)
        self.opened: LoadedHead = loading.load_head(options.checkpoint, options.target)
        self.start_seconds = time.process_time()
        drafter = self.opened.drafter
        if not isinstance(drafter, Drafter) or drafter.adapts_target:
            raise ValueError(f"checkpoint={options.checkpoint}: the demo needs a head that drafts by steps.")
        self.drafter = drafter
        self.texts = self._encode(self.service.judging)
        self.plan = self._make_plan()

    def _encode(self, rows: list[dict]) -> list[AnsweredPrompt]:
        """The rows as token ids, without answers of a single token."""
        texts = [encode_answered_prompt(self.opened.tokenizer, reading.name_row(row, 0)) for row in rows]
        return [text for text in texts if len(text.answer) > 1]

    def _make_plan(self) -> DemoPlan:
        """The plan of the first launch; it is made from the speeds of this machine."""
        if "plan" in self.record.document:
            return DemoPlan(**self.record.document["plan"])
        with progress.start_task("measuring this machine"):
            text = sorted(self.texts, key=lambda text: text.length)[len(self.texts) // 2]
            speeds = measure_speeds(self.drafter, text)
        speeds = dataclasses.replace(speeds, start=self.start_seconds)
        trained = self._encode(self.service.training)
        sizes = TextSizes(
            rows=len(trained),
            row_tokens=sum(text.length for text in trained) / len(trained),
            heldout=len(self.texts),
            prompt_tokens=sum(len(text.prompt) for text in self.texts) / len(self.texts),
            compared_tokens=sum(min(COMPARED_TOKENS, len(text.answer)) for text in self.texts) / len(self.texts),
            pack=min(LONGEST_PACK, PACK_MULTIPLE * -(-max(text.length for text in trained) // PACK_MULTIPLE)),
        )
        plan = plan_demo(speeds, sizes, minutes=self.options.minutes)
        self.record.write(speeds=dataclasses.asdict(speeds), plan=dataclasses.asdict(plan))
        return plan

    def run(self) -> None:
        """Says what the parts do and how long they take, and runs those that have not been done."""
        speeds, console = self.record.document["speeds"], self.console
        threads = format_count(torch.get_num_threads(), "thread")
        console.say(
            f"This machine: {1 / speeds['token']:.1f} tokens/s of plain decoding, "
            f"{1 / speeds['read']:.0f} tokens/s of replay, {threads}."
        )
        plan, finished = self.plan, self.record.finished_parts
        titles = (
            f"{self.options.checkpoint} beside plain decoding, {plan.shown_tokens} tokens",
            f"{plan.steps} steps of training on recorded answers of a service, judged on its last days",
            f"four ways to decode {plan.questions} questions of these days, in turn",
        )
        total = 0.0
        for number, (title, seconds) in enumerate(zip(titles, plan.seconds), start=1):
            is_finished = str(number) in finished
            state = "done before" if is_finished else f"about {format_duration(seconds)}"
            console.say(f"  {number}  {title}: {state}")
            total += 0.0 if is_finished else seconds
        console.say(
            f"In all about {format_duration(total)}. After Ctrl-C the same command goes on; fresh=true begins anew."
        )
        for number, (action, title) in enumerate(zip(PARTS, titles), start=1):
            if str(number) not in finished:
                self._run_part(number, title, action)

    def _run_part(self, number: int, title: str, action: Callable[["Demo", float], dict[str, Any]]) -> None:
        """Runs a part, and records its results and its time."""
        self.console.say(f"\n== {number}  {title} ==")
        start, expected = time.perf_counter(), self.plan.seconds[number - 1]
        result = action(self, expected * OVERRUN)
        seconds = time.perf_counter() - start
        self.record.write(parts=self.record.finished_parts | {str(number): result | {"seconds": seconds}})
        self.console.say(f"Part {number} took {format_duration(seconds)}, of {format_duration(expected)} expected.")

    def show_head(self, seconds: float) -> dict[str, Any]:
        """Part 1."""
        messages = [{"role": "user", "content": self.options.question}]
        row = {"id": "question=", "prompt": self.options.question, "messages": messages}
        prompt = conversations.encode_row(self.opened.tokenizer, row)
        return comparison.show_head(self.opened, self.options.checkpoint, prompt, self.plan.shown_tokens, self.console)

    def train_head(self, seconds: float) -> dict[str, Any]:
        """Part 2."""
        deadline, console = time.perf_counter() + seconds, self.console
        console.say(self.service.describe_split(self.plan.rows))
        files_of_rows = {"train": self.service.training[-self.plan.rows :], "choosing": self.service.choosing}
        for name, rows in files_of_rows.items():
            files.write_text(self.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if not (self.run_folder / "finished").exists():
            training.run_training(self._list_training_options(), self.run_folder, seconds=(1 - JUDGING_SHARE) * seconds)
        trained = self._load_trained()
        elsewhere = read_answers(self.options.elsewhere, arguments={}, temperature=0.0, limit=self.plan.other_answers)
        groups = {
            "on the last days": reading.spread_rows(self.texts, self.plan.judged_answers),
            "elsewhere": self._encode([question.turns[0] for question in elsewhere.questions]),
        }
        changes = {}
        for name, texts in groups.items():
            share = max(0.0, deadline - time.perf_counter()) * (2 / 3 if name != "elsewhere" else 1)
            change = training.judge_heads(self.drafter, trained, texts, name, seconds=share, least=min(4, len(texts)))
            console.say(f"{name}: {change}")
            changes[name] = dataclasses.asdict(change)
        return {"changes": changes}

    def _list_training_options(self) -> list[str]:
        """The arguments of train.py."""
        steps = self.plan.steps
        values: dict[str, Any] = {
            "head": find_head_option(checkpoint.resolve(self.options.checkpoint)),
            "experiment": "service",
            "start": self.options.checkpoint,
            "run": self._name_run(),
            "data.train": self.out / "train.jsonl",
            "validation.answers": self.out / "choosing.jsonl",
            "validation.num_prompts": NUM_CHOOSING,
            "features.folder": self.out / "features",
            "data.length": self.plan.pack,
            "head.objective.depth": find_depth(self.drafter),
            "train.steps": steps,
            "train.validate_every": -(-steps // NUM_VALIDATIONS),
            "train.log_every": max(1, steps // 8),
            "resume": "auto",
        }
        name = self.opened.target.name
        target = self.options.target.model_dump() | {"name": None if name == loading.DEFAULT_TARGET else name}
        values |= {f"target.{key}": value for key, value in target.items() if value not in (None, False, "auto")}
        return [f"{name}={value}" for name, value in values.items()]

    def _name_run(self) -> str:
        """The run's folder as train.py takes it: by its name in checkpoints/, else absolute."""
        home = Path("checkpoints").resolve()
        is_inside = self.run_folder.is_relative_to(home)
        return str(self.run_folder.relative_to(home) if is_inside else self.run_folder)

    def _load_trained(self) -> Drafter:
        drafter = checkpoint.load(self.run_folder, self.opened.target)
        assert isinstance(drafter, Drafter)
        return drafter

    def compare_ways(self, seconds: float) -> dict[str, Any]:
        """Part 3."""
        heads = {
            checkpoint.name_checkpoint(Path(self.options.checkpoint)): self.drafter,
            "trained": self._load_trained(),
        }
        prompts = []
        for number, text in enumerate(reading.spread_rows(self.texts, self.plan.questions)):
            prompts.append(conversations.Prompt(f"question {number + 1}", "all", text.prompt))
        ways, num = comparison.compare_ways(self.opened, heads, self.run_folder, prompts, seconds=seconds)
        verdict = describe_verdict(self.record.finished_parts["2"]["changes"], ways)
        return {"ways": ways, "questions": num, "verdict": verdict}


def describe_verdict(changes: dict[str, dict[str, Any]], ways: list[list[str]]) -> str:
    """The sentence on the trained head. ways: rows of `comparison.compare_ways`"""
    last, elsewhere = changes["on the last days"], changes["elsewhere"]
    gain, low, high = (value / last["before"] for value in (last["change"], *last["change_ci"]))
    return (
        f"Verdict: on days that it has not seen, training gives the head {gain:+.0%} tokens a pass (95 %: {low:+.0%} "
        f".. {high:+.0%}), elsewhere {elsewhere['change'] / elsewhere['before']:+.0%}; it decodes "
        f"{find_speedup(ways, 2)} times as fast as plain decoding where the shipped one has {find_speedup(ways, 1)}, "
        f"with auto {find_speedup(ways, 3)}."
    )


def find_speedup(ways: list[list[str]], row: int) -> str:
    """The speedup of a way, without its interval."""
    return ways[row][3].partition(" ")[0]


PARTS = (Demo.show_head, Demo.train_head, Demo.compare_ways)
