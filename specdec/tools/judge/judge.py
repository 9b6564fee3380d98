"""judge: measures a running server under 1, 4, 16, .. requests at once, with drafts and plain in turn, resumable."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.core import progress
from specdec.core.resumable import Resumable, digest_bytes, open_resumable
from specdec.decoding.drafting import Drafting
from specdec.measuring import results
from specdec.measuring.evaluate import Predict
from specdec.measuring.questions import QuestionSet
from specdec.measuring.record import RECORD_FILE, write_record
from specdec.measuring.records import describe_checks, tabulate_protocol
from specdec.measuring.report import TAU
from specdec.measuring.results import Entry, Measurement
from specdec.measuring.results_page import write_results
from specdec.measuring.runs import ComparedHead, find_head_folders, load_heads
from specdec.measuring.servers import referee
from specdec.measuring.servers.server import TriedServer, try_server
from specdec.measuring.servers.verdict import compare_with_replay, draft_as_engine
from specdec.options import decoding
from specdec.tools.judge.checks import measure_control, measure_repeat
from specdec.tools.judge.document import MeasuredLoad, ServerFacts, make_record, name_weights
from specdec.tools.judge.figures import count_answers, list_turns, make_entry, summarise_batches
from specdec.tools.judge.notes import list_notes
from specdec.tools.judge.options import JudgeOptions
from specdec.tools.judge.rows import find_prompts, measure_load, read_batch_pairs


@dataclass(frozen=True)
class Judgement:
    """A judgement under way: its options, the servers, and the head that they serve, if it is here.

    failures: reasons of checks that ended before their end, by name
    """

    options: JudgeOptions
    tried: TriedServer
    heads: Sequence[ComparedHead]
    server_facts: ServerFacts
    failures: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def row_facts(self) -> dict[str, Any]:
        """What rows record of the server, by notes.CHANGES."""
        flags, served = shlex.join(self.server_facts.engine.flags), self.tried.server.entry.get("draft") or {}
        facts = {
            "head": name_weights(self.heads),
            "version": self.server_facts.engine.version,
            "flags": digest_bytes(flags.encode()) if flags else None,
            "drafts": (served.get("drafts") or self.tried.longest) if self.heads else None,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def measure(
        self, concurrencies: Sequence[int], rows: Resumable
    ) -> tuple[dict[int, dict[str, dict]], ValueError | None]:
        """Measures all loads that have no row yet, and the checks beside the first.

        Returns the prompts of each load that has all rows, those of earlier calls included, and the error that ended
        the measurement, if any.
        """
        facts, ending = self.row_facts, None
        in_turn = bool(self.heads) or self.options.drafter is None
        try:
            for concurrency in concurrencies:
                measure_load(self.tried, concurrency, rows, in_turn=in_turn, **facts)
                if concurrency == concurrencies[0]:
                    self._measure_checks(concurrency, rows)
        except ValueError as error:
            ending = error
        earlier = {row["requests"] for row in rows.rows if "check" not in row} - {*concurrencies}
        loads = (*concurrencies, *sorted(earlier))
        prompts = {concurrency: find_prompts(self.tried, concurrency, rows.rows) for concurrency in loads}
        return {concurrency: asked for concurrency, asked in prompts.items() if asked is not None}, ending

    def _measure_checks(self, concurrency: int, rows: Resumable) -> None:
        """Measures the checks that have no row yet. One that fails ends alone."""
        facts = self.row_facts
        for name, measure, number in (
            ("control", measure_control, concurrency),
            ("repeat", measure_repeat, self.options.repeat),
        ):
            try:
                measure(self.tried, number, rows, **facts)
            except ValueError as error:
                self.failures[name] = f"it ended early, and the same command goes on: {error}"

    def summarise(self, concurrency: int, prompts: dict[str, dict], rows: list[dict]) -> MeasuredLoad:
        """The figures of a load, beside the replay of the head."""
        options, server = self.options, self.tried.server
        pairs = read_batch_pairs(rows, concurrency)
        batches = [drafted for drafted, _ in pairs]
        turns = list_turns(self.tried.requests.question_set)
        questions = {name: question.id for name, question in turns.items()}
        figures = {"requests": concurrency, **referee.summarise_pairs(pairs, options.seed, questions)}
        for head in self.heads:
            figures["replay"] = compare_with_replay(
                draft_as_engine(head.drafter, server.kind),
                batches,
                prompts,
                sampling=options.decode.make_sampling(),
                depth=options.decode.depth,
                seed=options.seed,
                questions=questions,
            )
        return MeasuredLoad(figures, batches, prompts)

    def make_entry(self, load: MeasuredLoad) -> Entry:
        """A load as a row of results."""
        question_set = self.tried.requests.question_set
        counts = count_answers(question_set, load.batches)
        contexts = summarise_batches(question_set, load.batches, load.prompt_lengths, self.options.seed)
        return make_entry(load.figures, counts, contexts, self.options.decode.make_sampling())


def judge_server(options: JudgeOptions, question_set: QuestionSet, predict: Predict, console: progress.Results) -> None:
    """Measures what has no row yet, and writes the results and the record.

    Raises ValueError for a server that cannot be measured, where nothing was answered, and for one that ends in
    between: then the results and the record of the loads before are written.
    """
    out, concurrencies = Path(options.out), decoding.read_batches(options.batch)
    heads = load_served_head(options)

    # Try the servers, then measure each load
    target = heads[0].drafter.target.name if heads else None
    tried = try_server(options, question_set, target, console, control=options.control)
    judgement = Judgement(options, tried, heads, ServerFacts.read(options, tried, heads))
    notes = [*tried.notes, *question_set.list_notes(find_head_folders(heads))]
    title = f"{tried.server.model} at {tried.server.url}"
    for sentence in (f"{title}; tau: {TAU}", *notes):
        console.say(sentence)
    with open_resumable(out / "settings.json", out / "rows.jsonl", tried.settings, advice=results.ADVICE) as resumable:
        prompts, error = judgement.measure(concurrencies, resumable)
    if not prompts and error is not None:
        raise error
    rows = resumable.rows
    if error is not None:
        notes.append(f"The measurement ended before all loads were measured (batch={options.batch}): {error}")

    # Figures and the record
    loads = [judgement.summarise(concurrency, prompts[concurrency], rows) for concurrency in prompts]
    notes += list_notes(tried, heads, loads, rows, judgement.row_facts, options.seed)
    record = make_record(options, tried, judgement.server_facts, heads, loads, rows, notes, judgement.failures)
    server = {"url": tried.server.url, "model": tried.server.model, "kind": tried.server.kind}
    entries = [judgement.make_entry(load) for load in loads]
    if heads:
        entries = add_predictions(judgement, predict, entries, notes)
    write_record(out / RECORD_FILE, record)
    measurement = Measurement(
        tried.settings,
        question_set,
        entries,
        notes,
        title="" if question_set.suite else title,
        checks=[*describe_checks(record, with_meanings=True)],
        facts=tabulate_protocol(record),
        pages=results.list_pages(find_head_folders(heads), prediction=options.predicted),
        extra={"server": {**server, "levels": [load.figures for load in loads]}},
    )
    write_results(measurement, out, console, verbose=options.verbose)
    console.print(f"written: {out}/{RECORD_FILE} (to publish)")
    if error is not None:
        complete = ",".join(map(str, prompts))
        raise ValueError(f"{error} {out} has the results of batch={complete}; the same command goes on.") from error


def load_served_head(options: JudgeOptions) -> list[ComparedHead]:
    """The head of checkpoint=, if it is given. Raises ValueError for several."""
    heads = load_heads(options.checkpoint, options.target, Drafting(window=options.decode.window))
    if len(heads) > 1:
        raise ValueError("A server is compared with one head: give one checkpoint=DIR, that of the head it serves.")
    return heads


def add_predictions(judgement: Judgement, predict: Predict, entries: Sequence[Entry], notes: list[str]) -> list[Entry]:
    """The entries with the speedups that predicted= has for the head. notes: get those on the prediction"""
    (head,) = judgement.heads
    find_speedup = predict(head.drafter.target, judgement.options.decode.make_sampling(), notes)
    predicted = []
    for entry in entries:
        shape = f"chain of {len(entry.report.survival or ())}"
        predicted.append(replace(entry, predicted=find_speedup(head.name, shape, entry.batch, None)))
    return predicted
