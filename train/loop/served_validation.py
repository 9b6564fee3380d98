"""Validation in a running engine: the head goes into it, and it answers the held-out prompts under load.

The main process asks, while training stands still. The others hear from it all the time
(`ProcessGroup.share_result`), so an engine may take as long as validation.timeout allows.
"""

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from specdec.core import files, progress
from specdec.core.wording import format_count
from specdec.engines.answers import check_tokenizer
from specdec.engines.client import check_weights
from specdec.engines.draft_weights.choice import open_draft_weights
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Head
from specdec.measuring.measure import WARM_UP_TOKENS, MeasureSettings, fill_batch, split_prompts
from specdec.measuring.report import Report
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedBatch
from specdec.measuring.servers.server import (
    COUNTER_HINTS,
    DEPTH_OPTIONS,
    Connection,
    Request,
    Server,
    check_plain,
    compare_models,
    find_longest,
    leave_out_drafts,
    make_body,
)
from specdec.measuring.servers.verdict import TOLERANCE, VERDICTS, compare_with_replay, draft_as_engine
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from specdec.text.reading import number_ids
from train.loop.served_heads import HeadFolders
from train.processes import ProcessGroup
from train.settings.options import ValidationConfig
from train.show.served import list_lines

BatchPair = tuple[ServedBatch, ServedBatch | None]  # with drafts, and the same requests without
OF_A_USER = ("speedup_of_a_user", "speedup_of_a_user_ci")
MIN_PROMPTS = 2  # prompts of a validation, however short the training was: one prompt has no interval
SERVE_ADVICE = "serve the model that is trained for"
LOST = (ValueError, OSError, httpx.HTTPError)  # errors of an engine, and of the disk between


@dataclass
class ServedValidation:
    """Asks an engine the held-out prompts, with the head that is validated. All processes call it together.

    options: `validation` of the run; depth: drafts of a round; measuring: settings of answers
    spec: drafter's class and arguments, as `checkpoint.save` writes them; folder: the run's folder
    reader: servers that read texts in place of a target here
    request_seconds: seconds of a request in the last validation; None: not measured
    """

    options: ValidationConfig
    depth: int
    measuring: MeasureSettings
    prompts: list[Prompt]
    spec: dict
    folder: Path
    group: ProcessGroup
    console: progress.Results
    reader: EngineTarget | None = None
    request_seconds: float | None = None
    heads: HeadFolders = field(init=False)

    def __post_init__(self):
        options, run = self.options, self.folder
        parent = Path(options.engine_folder, run.name) if options.engine_folder else run / "served"
        self.heads = HeadFolders(run, parent.resolve(), self.spec, self.console)

    # Before the first step, in the main process

    def check_servers(self, target: Target, tokenizer: PreTrainedTokenizerBase, drafter: Head | None = None) -> str:
        """A sentence on the servers, which were tried with a request. Raises ValueError for those that will not do.

        drafter: head that is put into the engine, as each validation will do; None: none is
        """
        options, (request,) = self.options, self._list_requests(1)
        with self._name_option("engine"):
            engine = self._find_server(str(options.engine), target)
            with engine.open() as connection:
                open_draft_weights(connection.client, engine.entry)
                check_weights(engine.url, engine.entry, target, advice=SERVE_ADVICE)
                check_tokenizer(connection.client, engine.model, tokenizer, request[1]["prompt"])
                batch = connection.send_requests([request])
            if batch.failed:
                raise ValueError(batch.failed[0]["error"])
            self._check_drafts(engine, [batch])
        notes = self._note_rows(engine)
        if options.baseline is not None:
            with self._name_option("baseline"):
                baseline = leave_out_drafts(self._find_server(options.baseline, target))
                check_weights(baseline.url, baseline.entry, target, advice=SERVE_ADVICE)
                check_plain("it", baseline, request)
            notes += compare_models("validation.baseline", baseline, engine, tokenizer, request)
        if drafter is not None:
            with self._name_option("engine"):
                self._swap(drafter, 0)
        comparison = f", beside {options.baseline} without drafts" if options.baseline else ""
        loads = ", ".join(map(str, options.loads))
        sentence = (
            f"{engine.model} of {engine.kind} at {engine.url} gets the head of each validation; "
            f"{format_count(self.depth, 'draft')} a round, {loads} requests at once{comparison}"
        )
        return ". ".join([sentence, *notes])

    def _note_rows(self, engine: Server) -> list[str]:
        """A note on loads of which the engine answers only a part at once, as far as it says."""
        rows, load = engine.entry.get("rows"), max(self.options.loads)
        if rows is None or load <= rows:
            return []
        return [f"Of {load} requests it answers {rows} at once, and the others wait: start it with rows={load}"]

    def _find_server(self, url: str, target: Target) -> Server:
        """The server at a URL with its model. Raises ValueError where none answers.

        Of several models it is the one with the target's name, else the first.
        """
        if "," in url:
            raise ValueError("one engine is asked at a time, so give one URL.")
        server = Server(url, "", "", "", {}, self.options.timeout, self.console.say, patience=1)
        with server.open() as connection:
            (models,) = connection.client.describe_models()
        name = PurePosixPath(target.name).name.lower()
        entry = next((model for model in models if PurePosixPath(str(model["id"])).name.lower() == name), models[0])
        kind, measuring = str(entry.get("owned_by")), self.measuring
        body = make_body(kind, measuring.sampling, max_new_tokens=measuring.max_new_tokens, seed=measuring.seed)
        return replace(server, model=str(entry["id"]), kind=kind, root=str(entry.get("root")), body=body, entry=entry)

    def _check_drafts(self, engine: Server, batches: list[ServedBatch]) -> None:
        """Raises ValueError unless the engine drafts as many tokens a round as the run. batches: answers of it"""
        depth, url = self.depth, engine.url
        num = find_longest(batches) or (engine.entry.get("draft") or {}).get("drafts")
        if all(batch.drafts is None for batch in batches):
            hint = COUNTER_HINTS.get(engine.kind, "it has no counters that are known here")
            raise ValueError(f"{url} says nothing about drafts, so tau cannot be had: {hint}.")
        if not num:
            raise ValueError(f"{url} does not draft: start it with a head of this kind.")
        if num != depth:
            option = DEPTH_OPTIONS.get(engine.kind, "{depth} drafts a round").format(depth=depth)
            raise ValueError(
                f"{url} drafts {format_count(num, 'token')} a round, and decode.depth={depth}: give "
                f"decode.depth={num}, or start the engine with {option}."
            )

    @contextlib.contextmanager
    def _name_option(self, name: str) -> Iterator[None]:
        """Within, errors of a server name its option."""
        try:
            yield
        except LOST as error:
            text = files.describe_error(error) if isinstance(error, OSError) else error
            raise ValueError(f"validation.{name}={getattr(self.options, name)}: {text}") from error

    # A validation, in all processes

    def is_partial(self, report: Report) -> bool:
        """Whether the engine has not answered all prompts for a report."""
        served = report.served
        if served is None or "error" in served or len(served["loads"]) < len(self.options.loads):
            return True
        return served["prompts"] < len(self.prompts)

    def plan(self, seconds_left: float | None) -> tuple[int, list[int]]:
        """The number of prompts and the loads for this time, no loads where it is too short. None: all of them

        The first time, as nothing was measured, there are few requests, and so no large loads.
        """
        num, loads = len(self.prompts), self.options.loads
        if seconds_left is None:
            return num, loads
        requests_left = len(loads) * max(MIN_PROMPTS, min(loads))
        if self.request_seconds is not None:
            requests_left = int(seconds_left / self.request_seconds)
        num = min(num, requests_left // len(loads))
        if seconds_left <= 0 or num < min(MIN_PROMPTS, len(self.prompts)):
            return 0, []
        chosen = []
        for load in loads:
            if max(num, load) <= requests_left:
                requests_left -= max(num, load)
                chosen.append(load)
        return num, chosen

    def __call__(self, report: Report, frozen: Head, num: int, loads: Sequence[int]) -> Report:
        """The report with figures of the head in the engine, the same in all processes. num: prompts that are asked

        The report keeps figures of an earlier call where the engine fails now, and answers less than then.
        """
        assert report.step is not None
        figures = self._measure(frozen, report.step, num, loads)
        if self.group.main:
            self._tell(report.step, figures)
        if "error" in figures and report.served and count_answered(report.served) > count_answered(figures):
            return report
        return replace(report, served=figures)

    def _measure(self, frozen: Head, step: int, num: int, loads: Sequence[int]) -> dict[str, Any]:
        """The figures of the engine, by load.

        An engine that fails ends this, with a sentence as `error`; figures of batches before it are kept.
        """
        started = time.perf_counter()
        servers: dict[str, Server] = {}
        figures = self.group.share_result(functools.partial(self._start, servers, frozen, step))
        levels: dict[str, dict] = {}
        for load in loads:
            if "error" in figures:
                break
            pairs = []
            answers = self._ask(servers, load, num, figures["version"], frozen.target)  # begins in the main process
            while (item := self.group.share_result(functools.partial(next, answers, None))) is not None:
                if isinstance(item, str):
                    figures["error"] = item
                else:
                    pairs.append(item)
            if pairs:
                summarise = functools.partial(self._summarise, frozen, figures["kind"], pairs)
                divided = frozen.target.share.size > 1  # all processes read with it
                levels[str(load)] = summarise() if divided else self.group.share_result(summarise)
                if load > (figures["rows"] or load):
                    levels[str(load)]["rows"] = figures["rows"]
        figures |= {"prompts": num, "seconds": time.perf_counter() - started, "loads": levels}
        figures = self.group.share(figures)
        if "error" not in figures:
            self.request_seconds = figures["seconds"] / sum(max(num, load) for load in loads)
        return figures

    def _start(self, servers: dict[str, Server], frozen: Head, step: int) -> dict[str, Any]:
        """Puts the head into the engine. -> facts of the engine or an `error`. servers: gets the engine and baseline"""
        facts: dict[str, Any] = {"url": self.options.engine, "baseline": self.options.baseline, "drafts": self.depth}
        try:
            engine, facts["version"], facts["swap_seconds"] = self._swap(frozen, step)
            facts |= {"kind": engine.kind, "model": engine.model, "rows": engine.entry.get("rows")}
        except LOST as error:
            return facts | {"error": str(error)}
        servers["drafted"] = engine
        try:
            if self.options.baseline is not None:
                servers["plain"] = leave_out_drafts(self._find_server(self.options.baseline, frozen.target))
        except LOST as error:
            self.console.say(f"step {step}: nothing is compared with plain answers: {error}")
        return facts

    def _swap(self, frozen: Head, step: int) -> tuple[Server, str, float]:
        """Puts a head into the engine. -> the engine, the version, and seconds of the change

        Raises ValueError for an engine that does not take it.
        """
        name = f"step-{step}"
        version = f"{self.folder.name}/{name}"
        engine = self._find_server(str(self.options.engine), frozen.target)
        with engine.open() as connection, progress.start_task("validation: the head goes into the engine"):
            weights = open_draft_weights(connection.client, engine.entry)
            folder = self.heads.write(name, frozen, weights.format, self.depth)
            seconds = weights.load(folder, version)
        self.heads.remove_others(folder)
        return engine, version, seconds

    def _list_requests(self, num: int) -> list[Request]:
        """The first prompts as parts of requests, by their ids."""
        ids = number_ids([prompt.id for prompt in self.prompts[:num]])
        return [(id, {"prompt": prompt.tokens}) for id, prompt in zip(ids, self.prompts)]

    def _ask(
        self, servers: dict[str, Server], load: int, num: int, version: str, target: Target
    ) -> Iterator[BatchPair | str]:
        """Yields batches of answers, with drafts and without in turn, and the sentence of an error that ends them.

        Prompts are repeated where there are fewer than `load`. A baseline that is lost is removed from `servers`.
        """
        requests = fill_batch(self._list_requests(num), load)
        label = f"validation: engine, {format_count(load, 'request')} at once"
        try:
            with contextlib.ExitStack() as stack:
                connections = {name: stack.enter_context(server.open(load)) for name, server in servers.items()}
                first = [(id, body | {"max_tokens": WARM_UP_TOKENS}) for id, body in requests[:load]]
                answers = [self._send(connections, first, plain_first=False)[0]]
                batches = split_prompts(requests, load)
                for number, batch in enumerate(progress.track_items(batches, label, unit="requests", size=len)):
                    drafted, plain = self._send(connections, batch, plain_first=number % 2 == 1)
                    check_ids(drafted, target)
                    answers.append(drafted)
                    yield drafted, plain
                self._check_head(connections["drafted"], version, answers)
                if "plain" not in connections:
                    servers.pop("plain", None)
        except LOST as error:
            yield str(error)

    def _send(self, connections: dict[str, Connection], requests: list[Request], *, plain_first: bool) -> BatchPair:
        """The answers with drafts and without. A baseline that is lost is removed from `connections`."""
        answered: dict[str, ServedBatch] = {}
        for name in sorted(connections, reverse=plain_first):
            try:
                answered[name] = connections[name].send_requests(requests)
            except LOST as error:
                if name == "drafted":
                    raise
                del connections[name]
                self.console.say(f"nothing more is compared with plain answers: {error}")
        return answered["drafted"], answered.get("plain")

    def _check_head(self, connection: Connection, version: str, batches: list[ServedBatch]) -> None:
        """Raises ValueError if the engine drafts otherwise by now, as after a change by another run."""
        server = connection.server
        if any(batch.answers for batch in batches):
            self._check_drafts(server, batches)
        (models,) = connection.client.describe_models()
        draft = next((model.get("draft") or {} for model in models if model["id"] == server.model), {})
        present = draft.get("version") or connection.read_document("weight_info").get("weight_version")
        if present not in (None, version):
            raise ValueError(
                f"{server.url} drafts with {present} by now, not with {version}: let one run at a time use it. These "
                "figures are of more than one head."
            )

    # Figures

    @property
    def _questions(self) -> dict[str, str]:
        """The question of each prompt of several turns, by the id of its requests."""
        pairs = zip(self._list_requests(len(self.prompts)), self.prompts)
        return {id: prompt.question for (id, _), prompt in pairs if prompt.question}

    def _summarise(self, frozen: Head, kind: str, pairs: list[BatchPair]) -> dict[str, Any]:
        """The figures of a load. kind: kind of the engine"""
        batches = [batch for batch, _ in pairs]
        served = referee.summarise_pairs(pairs, self.measuring.seed, self._questions)
        figures: dict[str, Any] = {
            "answers": served["answers"],
            "prompts": len({answer.prompt for answer in referee.list_answers(batches)}),
            "failed": list(itertools.chain.from_iterable(batch.failed for batch in batches)),
            "tokens_of_others": sum(max(0, batch.foreign_tokens) for batch in batches),
        }
        if not served["answers"]:
            return figures
        figures |= {name: served[name] for name in ("tau", "tau_ci", "survival")}
        figures["user_tokens_per_second"] = served["drafted"]["tokens_per_second_of_a_user"]
        figures["tokens_per_second"] = served["drafted"]["tokens_per_second"]
        if served["plain"]:
            figures["plain_user_tokens_per_second"] = served["plain"]["tokens_per_second_of_a_user"]
            figures["user_speedup"], figures["user_speedup_ci"] = (served[name] for name in OF_A_USER)
            figures |= {name: served[name] for name in ("speedup", "speedup_ci")}
        return figures | self._compare(draft_as_engine(frozen, kind), batches)

    def _compare(self, head: Head, batches: list[ServedBatch]) -> dict[str, Any]:
        """tau of replay along the answers, the difference, the verdict, and the first round that differs."""
        prompts, measuring = dict(self._list_requests(len(self.prompts))), self.measuring
        settings: dict[str, Any] = {"sampling": measuring.sampling, "depth": self.depth, "seed": measuring.seed}
        settings["questions"] = self._questions
        try:
            replayed = compare_with_replay(head, batches, prompts, engine=self.reader, **settings)
        except LOST as error:  # the servers that read texts
            replayed = {"verdict": f"nothing is compared with replay: {error}"}
        names = ("replayed_tau", "replayed_tau_ci", "difference", "difference_ci", "verdict")
        differences = replayed.get("differences", [])
        first = min(differences, key=lambda difference: difference["round"], default=None)
        return {name: replayed.get(name) for name in names} | {"first_difference": first}

    def _tell(self, step: int, figures: dict[str, Any]) -> None:
        """Prints the figures, and warns of a load whose tau is not that of replay."""
        for line in list_lines(figures):
            self.console.say(f"step {step}, {line}")
        for load, level in figures["loads"].items():
            low, high = level.get("difference_ci") or (0.0, 0.0)
            if not (low > 0 or high < 0):
                continue
            if level["verdict"].startswith(VERDICTS[True]):
                self.console.say(
                    f"step {step}, {load} at once: the difference from replay is real, and below the {TOLERANCE:.0%} "
                    "of tau - 1 that count as equal"
                )
            else:
                first = level["first_difference"]
                where = f" Round {first['round'] + 1} of prompt {first['prompt']} is the first." if first else ""
                warnings.warn(f"step {step}, {load} at once: {level['verdict']}{where}", stacklevel=2)


def count_answered(served: dict[str, Any]) -> tuple[int, int]:
    """The number of loads at which all prompts were asked, and that of all answers."""
    levels = served["loads"].values()
    complete = sum(level["answers"] + len(level["failed"]) >= served["prompts"] for level in levels)
    return complete, sum(level["answers"] for level in levels)


def check_ids(batch: ServedBatch, target: Target) -> None:
    """Raises ValueError for a batch with tokens that the target does not have."""
    highest = max((max(answer.ids) for answer in batch.answers if answer.ids), default=0)
    if highest >= target.vocab_size:
        raise ValueError(
            f"An answer of the engine has token {highest}, and {target.name} has {target.vocab_size} tokens: it serves "
            "another model."
        )
