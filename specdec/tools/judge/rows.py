"""The rows of a judgement: batches of requests that were answered, with drafts and plain in turn, resumable.

A row has `requests` (at once), `wave` (the questions' turn), `turn` (number of the batch), the batch of each server by
its name, `others`, the share of the CPU that other programs took meanwhile, and `when` it was answered. Rows of a check
have its name, too. Newer rows have facts of the server, such as its version (judge.Judgement.row_facts).
"""

import contextlib
import datetime
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from specdec.core import progress
from specdec.core.resumable import Resumable
from specdec.core.wording import format_count
from specdec.measuring.measure import WARM_UP_TOKENS, fill_batch, split_prompts
from specdec.measuring.servers.cpu_share import CpuMeter
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch
from specdec.measuring.servers.server import Connection, Request, Server, TriedServer

Key = dict[str, Any]  # fields that all rows of a load, or of a check, share


def measure_load(tried: TriedServer, concurrency: int, rows: Resumable, *, in_turn: bool = True, **facts: Any) -> None:
    """Asks all turns of the questions, `concurrency` requests at once. in_turn, facts: see `measure_missing`"""
    servers = {"drafted": tried.server, "plain": tried.baseline}
    for key, requests in list_waves(tried, concurrency, rows.rows):
        measure_missing(servers, requests, key, rows, in_turn=in_turn, **facts)


def find_prompts(tried: TriedServer, concurrency: int, rows: list[dict]) -> dict[str, dict] | None:
    """The part of each request's body that holds the prompt, by the prompt's id; None for a load that lacks rows."""
    prompts: dict[str, dict] = {}
    for key, requests in list_waves(tried, concurrency, rows):
        if list_missing_batches(requests, key, rows):
            return None
        prompts |= dict(requests)
    return prompts


def list_waves(tried: TriedServer, concurrency: int, rows: list[dict]) -> Iterator[tuple[Key, list[Request]]]:
    """Yields the key and the requests of each turn, once those of earlier turns are among the rows."""
    for turn in range(tried.requests.question_set.num_turns):
        requests = tried.requests.make_requests(turn, read_ids(rows, concurrency))
        if requests:
            yield {"requests": concurrency, "wave": turn}, requests


def read_ids(rows: list[dict], concurrency: int) -> dict[str, list[int] | None]:
    """Token ids of answers by the prompt's id: of plain answers, or of drafted ones where nothing answers plainly."""
    selected = select_rows(rows, {"requests": concurrency})
    batches = [row.get("plain") or row["drafted"] for row in selected]
    return {answer["prompt"]: answer["ids"] for batch in batches for answer in batch["answers"]}


def select_rows(rows: list[dict], key: Key) -> list[dict]:
    """The rows with the fields of a key, in order. Rows of checks are left out, unless the key names the check."""
    key = {"check": None, **key}
    selected = [row for row in rows if all(row.get(name) == value for name, value in key.items())]
    return sorted(selected, key=lambda row: (row["wave"], row["turn"]))


def measure_missing(
    servers: dict[str, Server | None],
    requests: list[Request],
    key: Key,
    rows: Resumable,
    *,
    in_turn: bool = True,
    **facts: Any,
) -> None:
    """Sends the batches of requests that have no row to each of the servers, after a warm-up.

    in_turn: whether the servers begin in turn; otherwise the one with drafts does, which may learn from plain answers
    facts: further fields of the rows
    """
    concurrency = key["requests"]
    missing = list_missing_batches(requests, key, rows.rows)
    if not missing:
        return
    label = f"{format_count(concurrency, 'request')} at once" + f", {key.get('check')}" * ("check" in key)
    with contextlib.ExitStack() as stack:
        connections = {
            name: stack.enter_context(server.open(concurrency)) for name, server in servers.items() if server
        }
        for connection in connections.values():
            connection.send_requests(fill_batch(requests, concurrency)[:concurrency], max_tokens=WARM_UP_TOKENS)
        meter = CpuMeter.watch([connection.server.url for connection in connections.values()])
        for number, batch in progress.track_items(missing, label, unit="requests", size=lambda pair: len(pair[1])):
            names = sorted(connections, reverse=in_turn and number % 2 == 1)
            row = answer_batch({name: connections[name] for name in names}, batch, meter)
            rows.append({**key, "turn": number, **row, **facts})
        num_repeated = sum(connection.client.repeated for connection in connections.values())
    if num_repeated:
        repeated_requests = format_count(num_repeated, "request")
        progress.print_note(f"{label}: {repeated_requests} sent again, for answers that were lost or bad.")


def list_missing_batches(requests: list[Request], key: Key, rows: list[dict]) -> list[tuple[int, list[Request]]]:
    """(number, requests) of each batch without a row."""
    measured = {row["turn"] for row in select_rows(rows, key)}
    batches = split_prompts(fill_batch(requests, key["requests"]), key["requests"])
    return [pair for pair in enumerate(batches) if pair[0] not in measured]


def answer_batch(connections: dict[str, Connection], batch: list[Request], meter: CpuMeter | None) -> dict[str, Any]:
    """The answers of the servers, one after the other, as fields of a row. meter: None where servers are elsewhere"""
    before = meter and meter.read()
    answered = {name: asdict(connection.send_requests(batch)) for name, connection in connections.items()}
    others = meter.read().find_others(before) if meter and before else None
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**answered, "others": others, "when": when}


def read_batch_pairs(rows: list[dict], concurrency: int) -> list[tuple[ServedBatch, ServedBatch | None]]:
    """The batches of a load in order, with drafts and without. Raises ValueError where a server answered nothing."""
    selected = select_rows(rows, {"requests": concurrency})
    drafted = [ServedBatch.from_row(row["drafted"]) for row in selected]
    baseline = [ServedBatch.from_row(row["plain"]) if "plain" in row else None for row in selected]
    for batches in (drafted, [batch for batch in baseline if batch is not None]):
        if batches and not any(batch.answers for batch in batches):
            raise ValueError(f"None of the requests was answered. {batches[0].failed[0]['error']}")
    return [*zip(drafted, baseline)]


def read_answers(rows: list[dict], name: str, key: Key) -> dict[str, ServedAnswer]:
    """The answers of a server by the prompt's id. name: drafted, plain or control"""
    batches = [ServedBatch.from_row(row[name]) for row in select_rows(rows, key) if row.get(name)]
    return {answer.prompt: answer for batch in batches for answer in batch.answers}


def find_busy_share(rows: Sequence[dict]) -> float | None:
    """The mean share of the CPU that other programs took, over the rows' batches; None where it is not known."""
    shares = [row.get("others") for row in rows]
    known = [share for share in shares if share is not None]
    return statistics.mean(known) if known and len(known) == len(shares) else None
