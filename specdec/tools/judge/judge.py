"""judge: a running server under 1, 4, 16, .. requests at once, with drafts and plain in turn, resumable."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from specdec.core import progress
from specdec.core.option_types import SmallCount, Text
from specdec.core.resumable import Resumable, resumable
from specdec.core.sampling import Sampling
from specdec.measuring import results
from specdec.measuring.counting import AnswerCounts, find_end
from specdec.measuring.evaluate import Predict
from specdec.measuring.measure import WARM_UP, split_turns
from specdec.measuring.questions import QuestionSet, name_request
from specdec.measuring.report import TAU, Report
from specdec.measuring.results import Entry, Measurement
from specdec.measuring.results_page import write
from specdec.measuring.runs import Run, find_heads, load_runs
from specdec.options import decoding
from specdec.options.command_types import MEMORY, OutputFolder
from specdec.options.decoding import SamplingOptions
from specdec.tools.judge import referee
from specdec.tools.judge.referee import Turn
from specdec.tools.judge.server import Request, Server, ServerOptions, TriedServer, try_server
from specdec.tools.judge.verdict import compare_with_replay, draft_as_engine

BUSY = 0.7  # share of the time that this process computed, above which it may be what is slow


class JudgeDecodeOptions(SamplingOptions):
    depth: SmallCount


class JudgeOptions(ServerOptions):
    engine: Text
    checkpoint: str
    batch: Annotated[Text, MEMORY]
    predicted: Text | None
    out: OutputFolder
    decode: JudgeDecodeOptions


def judge(options: JudgeOptions, question_set: QuestionSet, predict: Predict, console: progress.Results) -> None:
    """Measures what has no row yet, and writes the results."""
    out, levels = Path(options.out), decoding.read_batches(options.batch)
    sampling = options.decode.sampling()
    runs = load_runs(options.checkpoint, options.target)
    if len(runs) > 1:
        raise ValueError("A server is compared with one head: give one checkpoint=DIR, that of the head it serves.")
    tried = try_server(options, question_set, runs[0].drafter.target.name if runs else None, console)
    server, notes = tried.server, [*tried.notes, *question_set.list_notes(find_heads(runs))]
    for sentence in (f"{server.model} at {server.url}; tau: {TAU}", *notes):
        console.say(sentence)
    with resumable(out / "settings.json", out / "rows.jsonl", tried.settings, advice=results.ADVICE) as rows:
        prompts = {level: measure_level(tried, level, rows) for level in levels}
    notes += note_missing_turns(tried, prompts)
    predict_speedup = predict(runs[0].drafter.target, sampling, notes) if runs else None
    judged, entries = [], []
    for level in levels:
        pairs = read_pairs(rows.rows, level)
        turns = [turn for turn, _ in pairs]
        figures = {"requests": level, **summarise(pairs, options.seed)}
        for run in runs:
            figures["replay"] = replay_level(options, run, server, turns, prompts[level])
        entry = make_entry(figures, count_answers(question_set, turns), sampling)
        if predict_speedup:
            shape = f"chain of {len(figures['survival'])}"
            entry = replace(entry, predicted=predict_speedup(runs[0].name, shape, level, None))
        judged.append(figures)
        entries.append(entry)
    title = "" if question_set.suite else f"{server.model} at {server.url}"
    parts = {"server": {"url": server.url, "model": server.model, "kind": server.kind, "levels": judged}}
    write(Measurement(tried.settings, question_set, entries, notes, title=title, parts=parts), out, console)


def note_missing_turns(tried: TriedServer, prompts: dict[int, dict[str, dict]]) -> list[str]:
    """prompts: what was asked, by level and by id"""
    fewest = min(len(asked) for asked in prompts.values())
    if tried.requests.question_set.num_turns == 1 or fewest > len(tried.first):
        return []
    no_tokenizer = tried.requests.tokenizer is None
    cause = "the target's tokenizer is not here (target.name=)" if no_tokenizer else "no answer has token ids"
    return [f"Only first turns were asked, as {cause}."]


def replay_level(
    options: JudgeOptions, run: Run, server: Server, turns: list[Turn], prompts: dict[str, dict]
) -> dict[str, Any]:
    """The head of the server along its answers. prompts: what was asked, by id"""
    drafter, depth = draft_as_engine(run.drafter, server.kind), options.decode.depth
    sampling = options.decode.sampling()
    return compare_with_replay(drafter, turns, prompts, sampling=sampling, depth=depth, seed=options.seed)


# Measuring


def measure_level(tried: TriedServer, level: int, rows: Resumable) -> dict[str, dict]:
    """Asks all turns of the questions, so many requests at once. -> what was asked, by the prompts' ids"""
    prompts: dict[str, dict] = {}
    for number in range(tried.requests.question_set.num_turns):
        requests = tried.requests.of_turn(number, read_ids(rows.rows, level))
        prompts |= dict(requests)
        if requests:
            measure_missing({"drafted": tried.server, "plain": tried.plain}, requests, level, number, rows)
    return prompts


def read_ids(rows: list[dict], level: int) -> dict[str, list[int] | None]:
    """Token ids of the plain answers of a level, or of the drafted ones where nothing answers plainly, by the prompt's id."""
    turns = [row.get("plain") or row["drafted"] for row in rows if row["requests"] == level]
    return {answer["prompt"]: answer["ids"] for turn in turns for answer in turn["answers"]}


def measure_missing(
    servers: dict[str, Server | None], requests: list[Request], level: int, wave: int, rows: Resumable
) -> None:
    """Sends the groups of requests that have no row to each of the servers, after a warm-up.

    Requests are repeated where there are fewer than `level`. wave: the turn of the questions
    """
    repeated = list(itertools.islice(itertools.cycle(requests), max(len(requests), level)))
    key = {"requests": level, "wave": wave}
    measured = {row["turn"] for row in rows.rows if key.items() <= row.items()}
    missing = [pair for pair in enumerate(split_turns(repeated, level)) if pair[0] not in measured]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        connections = {name: stack.enter_context(server.open(level)) for name, server in servers.items() if server}
        for connection in connections.values():
            connection.serve(repeated[:level], max_tokens=WARM_UP)
        label = f"{level} requests at once"
        for number, group in progress.track(missing, label, unit="requests", size=lambda pair: len(pair[1])):
            order = sorted(connections, reverse=number % 2 == 1)
            turns = {name: asdict(connections[name].serve(group)) for name in order}
            rows.append({**key, "turn": number, **turns})
        num_repeated = sum(connection.client.repeated for connection in connections.values())
        if num_repeated:
            progress.note(f"{label}: {num_repeated} were sent again, as their answers were lost or bad.")


# Figures


def read_pairs(rows: list[dict], level: int) -> list[tuple[Turn, Turn | None]]:
    """The turns of a level, with drafts and plain."""
    of_level = sorted((row for row in rows if row["requests"] == level), key=lambda row: (row["wave"], row["turn"]))
    pairs = []
    for row in of_level:
        plain = Turn.from_row(row["plain"]) if "plain" in row else None
        pairs.append((Turn.from_row(row["drafted"]), plain))
    return pairs


def summarise(pairs: list[tuple[Turn, Turn | None]], seed: int) -> dict[str, Any]:
    """The figures of a level. Raises ValueError where nothing was answered."""
    drafted = [turn for turn, _ in pairs]
    compared = [(turn, plain) for turn, plain in pairs if plain is not None]
    plain_turns = [plain for _, plain in compared]
    failed = [failure for turn in drafted + plain_turns for failure in turn.failed]
    for turns in (drafted, plain_turns):
        if turns and not any(turn.answers for turn in turns):
            raise ValueError(f"None of the requests was answered. {failed[0]['error']}")
    figures = {
        "answers": sum(len(turn.answers) for turn in drafted),
        "failed": failed,
        "tokens_of_others": sum(turn.others for turn in drafted + plain_turns),
        **referee.summarise_drafts(drafted, seed),
        "drafted": referee.summarise_speed(drafted, seed),
        "plain": None,
    }
    if compared:
        figures |= {"plain": referee.summarise_speed(plain_turns, seed), **referee.summarise_speedup(compared, seed)}
    return figures


def count_answers(question_set: QuestionSet, turns: Sequence[Turn]) -> list[AnswerCounts]:
    """What other countings need; nothing where the server does not say enough."""
    question_of = {
        name_request(question, turn): question.id
        for question in question_set.questions
        for turn in range(len(question.turns))
    }
    answers = [answer for turn in turns for answer in turn.answers]
    counted = []
    for answer, count in zip(answers, referee.count_answers(turns) or ()):
        end = find_end(answer.ended, answer.sizes[-1] == 1)
        accepted, rounds = round(count.num_emitted - count.num_rounds), round(count.num_rounds)
        counted.append(AnswerCounts(answer.prompt, question_of[answer.prompt], accepted, rounds, end))
    return counted


def make_entry(level: dict[str, Any], counts: list[AnswerCounts], sampling: Sampling) -> Entry:
    """The figures of a level as a row of results."""
    drafted, plain = level["drafted"], level["plain"] or {}
    report = Report(
        sampling.temperature,
        num_prompts=level["answers"],
        num_rounds=level["rounds"],
        **{name: level[name] for name in ("tau", "tau_ci", "survival", "acceptance")},
        tokens_per_second=drafted["tokens_per_second"],
        tokens_per_second_ci=drafted["tokens_per_second_ci"],
        baseline_tokens_per_second=plain.get("tokens_per_second"),
        speedup=level.get("speedup"),
        speedup_ci=level.get("speedup_ci"),
        user_tokens_per_second=drafted["tokens_per_second_of_a_user"],
        baseline_user_tokens_per_second=plain.get("tokens_per_second_of_a_user"),
    )
    return Entry(
        "drafts of the server",
        sampling.temperature,
        level["requests"],
        report,
        counts,
        user_speedup=(level.get("speedup_of_a_user"), level.get("speedup_of_a_user_ci")),
        first_token=drafted["first_token_seconds"],
        remarks=[*remark(level, greedy=sampling.greedy)],
    )


def remark(level: dict[str, Any], *, greedy: bool) -> Iterator[str]:
    """What limits the figures of a level."""
    failed, others = level["failed"], level["tokens_of_others"]
    if failed:
        yield f"{len(failed)} requests failed, first prompt {failed[0]['prompt']}: {failed[0]['error']}"
    if others:
        yield f"the server generated {others} tokens for others, or for requests that were sent again: its counters then do not count."
    if max(speeds["busy"] for speeds in (level["drafted"], level["plain"]) if speeds) > BUSY:
        yield "this client was busy most of the time, so speeds may be its own: measure from another machine."
    if greedy and level.get("compared_answers"):
        compared = level["compared_answers"]
        yield f"{level['same_answers']} of {compared} answers are the same with drafts and without."
    if "replay" in level:
        yield level["replay"]["verdict"]
