"""Sentences on what limits the figures of a judgement."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.core.wording import format_count
from specdec.measuring.report import compute_tau, measure_tau_difference
from specdec.measuring.runs import ComparedHead
from specdec.measuring.servers.referee import ServedBatch
from specdec.measuring.servers.server import TriedServer
from specdec.tools.judge import checks
from specdec.tools.judge.document import MeasuredLoad, name_head

MIN_REPEATS = 3  # answers asked again below which an interval says nothing
CHANGES = {  # facts that rows record, in words
    "head": "checkpoint={}",
    "version": "version {} of the engine",
    "flags": "flags= of digest {}",
    "drafts": "{} drafts a round",
}


def list_notes(
    tried: TriedServer,
    heads: Sequence[ComparedHead],
    loads: Sequence[MeasuredLoad],
    rows: list[dict],
    facts: Mapping[str, Any],
    seed: int,
) -> list[str]:
    """Sentences on a measurement. heads: the head of the server, if it is here; facts: those of new rows, by CHANGES"""
    return [
        *note_other_name(tried, heads),
        *note_missing_turns(tried, loads),
        *note_changes(rows, facts),
        *note_drafts(loads, rows, heads),
        *note_history(rows, seed),
        *note_verdicts(loads),
    ]


def note_other_name(tried: TriedServer, heads: Sequence[ComparedHead]) -> Iterator[str]:
    """Yields a note where the server calls its head otherwise than checkpoint=."""
    served = (tried.server.entry.get("draft") or {}).get("checkpoint")
    if heads and served and Path(served).name != Path(heads[0].name).name:
        yield f"The server says that its head is {served}, and checkpoint= is {name_head(heads[0])}."


def note_missing_turns(tried: TriedServer, loads: Sequence[MeasuredLoad]) -> Iterator[str]:
    """Yields a note where only first turns were asked."""
    fewest = min(len(load.prompts) for load in loads)
    if tried.requests.question_set.num_turns > 1 and fewest <= len(tried.first):
        no_tokenizer = tried.requests.tokenizer is None
        cause = "the target's tokenizer is not here (target.name=)" if no_tokenizer else "no answer has token ids"
        yield f"Only first turns were asked, as {cause}."


def note_changes(rows: list[dict], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note for each of the facts that was another one when rows were measured."""
    for name, words in CHANGES.items():
        others = [row[name] for row in rows if row.get(name) not in (None, facts.get(name))]
        if others and name in facts:
            yield (
                f"{len(others)} of {format_count(len(rows), 'row')} were measured with {words.format(others[0])}, and "
                f"this is {words.format(facts[name])}: if the server was started anew in between, choose another "
                "out=FOLDER."
            )


def note_drafts(loads: Sequence[MeasuredLoad], rows: list[dict], heads: Sequence[ComparedHead]) -> Iterator[str]:
    """Yields notes where the server drafted nothing, and where the one without drafts drafted."""
    if {batch.drafts for load in loads for batch in load.batches} == {False}:
        head = f", and these are no figures of {name_head(heads[0])}" if heads else ""
        yield f"The server does not draft: tau is 1 by its own counters{head}."
    if any(ServedBatch.from_row(row["plain"]).drafts for row in rows if row.get("plain")):
        yield "The server without drafts drafted, too, so speedups are too small."


def note_history(rows: list[dict], seed: int) -> Iterator[str]:
    """Yields a note where answers asked again have a larger tau: then the server drafts from earlier answers."""
    first, again = checks.read_repeats(rows)
    pairs = [(first[name].counts, again[name].counts) for name in again if name in first]
    counts = [(before, after) for before, after in pairs if before and after]
    if len(counts) < MIN_REPEATS:
        return
    before, after = zip(*counts)
    _, (low, _) = measure_tau_difference(after, before, seed=seed)
    if low > 0:
        yield (
            f"Asked again, {format_count(len(counts), 'answer')} have tau {compute_tau(after):.2f}, and "
            f"{compute_tau(before):.2f} the first time: the server drafts from earlier answers, so later loads, which "
            "ask the same questions, flatter it."
        )


def note_verdicts(loads: Sequence[MeasuredLoad]) -> Iterator[str]:
    """Yields a note for each later load at which the head is not served as it was trained, unless the first says so."""
    first, *later = [load.figures.get("replay") or {} for load in loads]
    if first.get("served_is_trained") is not False:
        for load, replay in zip(loads[1:], later):
            if replay.get("served_is_trained") is False:
                yield f"At {format_count(load.figures['requests'], 'request')} at once {replay['verdict']}"
