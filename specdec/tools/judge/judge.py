"""judge: measures a running server under 1, 4, 16, .. requests at once, with drafts and plain in turn, resumable."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from specdec.core import progress
from specdec.core.option_types import SmallCount, Text
from specdec.core.resumable import Resumable, open_resumable
from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.measuring import results
from specdec.measuring.counting import AnswerCounts, classify_end
from specdec.measuring.evaluate import Predict
from specdec.measuring.measure import WARM_UP_TOKENS, split_prompts
from specdec.measuring.questions import QuestionSet, name_request
from specdec.measuring.report import TAU, Report
from specdec.measuring.results import Entry, Measurement
from specdec.measuring.results_page import write_results
from specdec.measuring.runs import find_head_folders, load_heads
from specdec.options import decoding
from specdec.options.command_types import MEMORY, OutputFolder
from specdec.options.decoding import SamplingOptions
from specdec.tools.judge import referee
from specdec.tools.judge.referee import ServedBatch
from specdec.tools.judge.server import Request, Server, ServerOptions, TriedServer, try_server
from specdec.tools.judge.verdict import compare_with_replay, draft_as_engine

MAX_CLIENT_SHARE = 0.7  # share of the time in which this process computes; above it the client may limit the speed


class JudgeDecodeOptions(SamplingOptions):
    depth: SmallCount


class JudgeOptions(ServerOptions):
    engine: Text
    checkpoint: str
    batch: Annotated[Text, MEMORY]
    predicted: Text | None
    out: OutputFolder
    decode: JudgeDecodeOptions


def judge_server(options: JudgeOptions, question_set: QuestionSet, predict: Predict, console: progress.Results) -> None:
    """Measures what has no row yet, and writes the results.

    Raises ValueError for a server that cannot be measured, and where nothing was answered.
    """
    out, concurrencies = Path(options.out), decoding.read_batches(options.batch)
    sampling = options.decode.make_sampling()
    runs = load_heads(options.checkpoint, options.target)
    if len(runs) > 1:
        raise ValueError("A server is compared with one head: give one checkpoint=DIR, that of the head it serves.")

    # Try the server, then measure each concurrency
    tried = try_server(options, question_set, runs[0].drafter.target.name if runs else None, console)
    server, notes = tried.server, [*tried.notes, *question_set.list_notes(find_head_folders(runs))]
    title = f"{server.model} at {server.url}"
    for sentence in (f"{title}; tau: {TAU}", *notes):
        console.say(sentence)
    with open_resumable(out / "settings.json", out / "rows.jsonl", tried.settings, advice=results.ADVICE) as rows:
        prompts = {concurrency: measure_concurrency(tried, concurrency, rows) for concurrency in concurrencies}
    notes += note_missing_turns(tried, prompts)

    # Figures of each concurrency, beside the replay of the head and the predicted speedup
    predict_speedup = predict(runs[0].drafter.target, sampling, notes) if runs else None
    levels, entries = [], []
    for concurrency in concurrencies:
        pairs = read_batch_pairs(rows.rows, concurrency)
        batches = [drafted for drafted, _ in pairs]
        figures = {"requests": concurrency, **summarise_pairs(pairs, options.seed)}
        for run in runs:
            head, asked = draft_as_engine(run.drafter, server.kind), prompts[concurrency]
            figures["replay"] = compare_with_replay(
                head, batches, asked, sampling=sampling, depth=options.decode.depth, seed=options.seed
            )
        entry = make_entry(figures, count_answers(question_set, batches), sampling)
        if predict_speedup:
            shape = f"chain of {len(figures['survival'])}"
            entry = replace(entry, predicted=predict_speedup(runs[0].name, shape, concurrency, None))
        levels.append(figures)
        entries.append(entry)

    pages = results.list_pages(find_head_folders(runs), prediction=options.predicted)
    parts = {"server": {"url": server.url, "model": server.model, "kind": server.kind, "levels": levels}}
    title = "" if question_set.suite else title
    measurement = Measurement(tried.settings, question_set, entries, notes, title=title, pages=pages, extra=parts)
    write_results(measurement, out, console, verbose=options.verbose)


def note_missing_turns(tried: TriedServer, prompts: dict[int, dict[str, dict]]) -> list[str]:
    """A note where only first turns were asked. prompts: parts of request bodies, by concurrency and prompt id"""
    fewest = min(map(len, prompts.values()))
    if tried.requests.question_set.num_turns == 1 or fewest > len(tried.first):
        return []
    no_tokenizer = tried.requests.tokenizer is None
    cause = "the target's tokenizer is not here (target.name=)" if no_tokenizer else "no answer has token ids"
    return [f"Only first turns were asked, as {cause}."]


# Measuring


def measure_concurrency(tried: TriedServer, concurrency: int, rows: Resumable) -> dict[str, dict]:
    """Asks all turns of the questions, `concurrency` requests at once.

    Returns the part of each request's body that holds the prompt, by the prompt's id.
    """
    prompts: dict[str, dict] = {}
    for turn in range(tried.requests.question_set.num_turns):
        requests = tried.requests.make_requests(turn, read_ids(rows.rows, concurrency))
        prompts |= dict(requests)
        if requests:
            measure_missing({"drafted": tried.server, "plain": tried.baseline}, requests, concurrency, turn, rows)
    return prompts


def read_ids(rows: list[dict], concurrency: int) -> dict[str, list[int] | None]:
    """Token ids of answers by the prompt's id: of plain answers, or of drafted ones where nothing answers plainly."""
    batches = [row.get("plain") or row["drafted"] for row in rows if row["requests"] == concurrency]
    return {answer["prompt"]: answer["ids"] for batch in batches for answer in batch["answers"]}


def measure_missing(
    servers: dict[str, Server | None], requests: list[Request], concurrency: int, turn: int, rows: Resumable
) -> None:
    """Sends the batches of requests that have no row to each of the servers, after a warm-up.

    requests: repeated where there are fewer than `concurrency`; turn: number of the questions' turn, from 0
    """
    repeated = list(itertools.islice(itertools.cycle(requests), max(len(requests), concurrency)))
    key = {"requests": concurrency, "wave": turn}
    missing = list_missing_batches(repeated, key, rows.rows)
    if not missing:
        return
    label = f"{format_count(concurrency, 'request')} at once"
    with contextlib.ExitStack() as stack:
        connections = {
            name: stack.enter_context(server.open(concurrency)) for name, server in servers.items() if server
        }
        for connection in connections.values():
            connection.send_requests(repeated[:concurrency], max_tokens=WARM_UP_TOKENS)
        for number, batch in progress.track_items(missing, label, unit="requests", size=lambda pair: len(pair[1])):
            order = sorted(connections, reverse=number % 2 == 1)
            answered = {name: asdict(connections[name].send_requests(batch)) for name in order}
            rows.append({**key, "turn": number, **answered})
        num_repeated = sum(connection.client.repeated for connection in connections.values())
    if num_repeated:
        repeated_requests = format_count(num_repeated, "request")
        progress.print_note(f"{label}: {repeated_requests} sent again, for answers that were lost or bad.")


def list_missing_batches(requests: list[Request], key: dict[str, int], rows: list[dict]) -> list[tuple[int, list]]:
    """(number, requests) of each batch without a row. key: concurrency and turn, as rows have them"""
    measured = {row["turn"] for row in rows if key.items() <= row.items()}
    return [pair for pair in enumerate(split_prompts(requests, key["requests"])) if pair[0] not in measured]


# Figures


def read_batch_pairs(rows: list[dict], concurrency: int) -> list[tuple[ServedBatch, ServedBatch | None]]:
    """The batches of a concurrency in order, with drafts and without."""
    pairs = []
    for row in sorted(rows, key=lambda row: (row["wave"], row["turn"])):
        if row["requests"] == concurrency:
            baseline = ServedBatch.from_row(row["plain"]) if "plain" in row else None
            pairs.append((ServedBatch.from_row(row["drafted"]), baseline))
    return pairs


def summarise_pairs(pairs: list[tuple[ServedBatch, ServedBatch | None]], seed: int) -> dict[str, Any]:
    """The figures of a concurrency. Raises ValueError where nothing was answered."""
    compared = [(drafted, baseline) for drafted, baseline in pairs if baseline is not None]
    drafted = [batch for batch, _ in pairs]
    baseline = [batch for _, batch in compared]
    batches = drafted + baseline
    failed = [failure for batch in batches for failure in batch.failed]
    for batches_of_server in (drafted, baseline):
        if batches_of_server and not referee.list_answers(batches_of_server):
            raise ValueError(f"None of the requests was answered. {failed[0]['error']}")
    figures = {
        "answers": len(referee.list_answers(drafted)),
        "failed": failed,
        "tokens_of_others": sum(batch.foreign_tokens for batch in batches),
        **referee.summarise_drafts(drafted, seed),
        "drafted": referee.summarise_speed(drafted, seed),
        "plain": None,
    }
    if compared:
        figures |= {"plain": referee.summarise_speed(baseline, seed), **referee.summarise_speedup(compared, seed)}
    return figures


def count_answers(question_set: QuestionSet, batches: Sequence[ServedBatch]) -> list[AnswerCounts]:
    """The counts that other ways of counting need; none where the server does not say enough."""
    question_ids = {
        name_request(question, turn): question.id
        for question in question_set.questions
        for turn in range(len(question.turns))
    }
    answer_counts = []
    for answer, count in zip(referee.list_answers(batches), referee.count_answers(batches) or ()):
        end = classify_end(answer.ended, answer.sizes[-1] == 1)
        accepted, rounds = round(count.num_emitted - count.num_rounds), round(count.num_rounds)
        answer_counts.append(AnswerCounts(answer.prompt, question_ids[answer.prompt], accepted, rounds, end))
    return answer_counts


def make_entry(figures: dict[str, Any], counts: list[AnswerCounts], sampling: Sampling) -> Entry:
    """The figures of a concurrency as a row of results."""
    drafted, baseline = figures["drafted"], figures["plain"] or {}
    report = Report(
        sampling.temperature,
        num_prompts=figures["answers"],
        num_rounds=figures["rounds"],
        **{name: figures[name] for name in ("tau", "tau_ci", "survival", "acceptance")},
        tokens_per_second=drafted["tokens_per_second"],
        tokens_per_second_ci=drafted["tokens_per_second_ci"],
        baseline_tokens_per_second=baseline.get("tokens_per_second"),
        speedup=figures.get("speedup"),
        speedup_ci=figures.get("speedup_ci"),
        user_tokens_per_second=drafted["tokens_per_second_of_a_user"],
        baseline_user_tokens_per_second=baseline.get("tokens_per_second_of_a_user"),
    )
    return Entry(
        "drafts of the server",
        sampling.temperature,
        figures["requests"],
        report,
        counts,
        user_speedup=(figures.get("speedup_of_a_user"), figures.get("speedup_of_a_user_ci")),
        first_token=drafted["first_token_seconds"],
        remarks=[*list_remarks(figures, greedy=sampling.greedy)],
    )


def list_remarks(figures: dict[str, Any], *, greedy: bool) -> Iterator[str]:
    """Sentences on what limits the figures of a concurrency, and the verdict of the replay."""
    failed, foreign_tokens = figures["failed"], figures["tokens_of_others"]
    if failed:
        yield f"{format_count(len(failed), 'request')} failed, first prompt {failed[0]['prompt']}: {failed[0]['error']}"
    if foreign_tokens:
        yield (
            f"the server generated {format_count(foreign_tokens, 'token')} for others, or for requests that were sent "
            "again: its counters then do not count."
        )
    if max(speeds["busy"] for speeds in (figures["drafted"], figures["plain"]) if speeds) > MAX_CLIENT_SHARE:
        yield "this client was busy most of the time, so speeds may be its own: measure from another machine."
    if greedy and figures.get("compared_answers"):
        compared = figures["compared_answers"]
        yield f"{figures['same_answers']} of {compared} answers are the same with drafts and without."
    if "replay" in figures:
        yield figures["replay"]["verdict"]
