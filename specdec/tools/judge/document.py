"""The record of a judgement, from its rows, its figures and its checks."""

import collections
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.core import files, hub
from specdec.core.sampling import Sampling
from specdec.engines.client import LLAMA_CPP
from specdec.measuring.privacy import hide_places, shorten_name
from specdec.measuring.questions import QuestionSet
from specdec.measuring.record import (
    SCHEMA,
    CountSource,
    Record,
    RecordedCounting,
    RecordedDrafter,
    RecordedEngine,
    RecordedProtocol,
    RecordedTarget,
)
from specdec.measuring.runs import ComparedHead
from specdec.measuring.servers import identity, referee
from specdec.measuring.servers.referee import ServedBatch
from specdec.measuring.servers.server import EXTRA_FIELDS, TriedServer, find_longest, name_penalty
from specdec.measuring.servers.verdict import draft_as_engine
from specdec.text.messages import EFFORT, MODE
from specdec.tools.judge import checks
from specdec.tools.judge.checks import Checked
from specdec.tools.judge.figures import group_answers, list_turns, make_load
from specdec.tools.judge.options import JudgeOptions
from specdec.tools.judge.rows import find_busy_share, select_rows

UNKNOWN = "unknown"  # name and method of a drafter that nobody names


@dataclass(frozen=True)
class MeasuredLoad:
    """A load all of whose requests were sent.

    figures: see referee.summarise_pairs, with `requests` and, for a head, `replay`
    batches: answers with drafts; prompts: parts of request bodies, by the prompt's id
    """

    figures: dict[str, Any]
    batches: list[ServedBatch]
    prompts: dict[str, dict]

    @property
    def prompt_lengths(self) -> dict[str, int]:
        """Tokens of the prompts that were sent as token ids, by id."""
        return {name: len(fields["prompt"]) for name, fields in self.prompts.items() if "prompt" in fields}


@dataclass(frozen=True)
class ServerFacts:
    """What only the running server can tell: it may be gone when the record is made.

    template: result of checks.check_template
    """

    target: RecordedTarget
    engine: RecordedEngine
    template: tuple[str | None, str | None]

    @classmethod
    def read(cls, options: JudgeOptions, tried: TriedServer, heads: Sequence[ComparedHead]) -> "ServerFacts":
        """Asks the server. heads: the head of the server, if it is here"""
        target = identity.describe_target(tried.server, name_target(options, heads), options.target.dtype)
        engine = identity.describe_engine(tried.server, options.flags)
        return cls(target, engine, checks.check_template(tried))


def make_record(
    options: JudgeOptions,
    tried: TriedServer,
    facts: ServerFacts,
    heads: Sequence[ComparedHead],
    loads: Sequence[MeasuredLoad],
    rows: list[dict],
    notes: Sequence[str],
    failures: dict[str, str],
) -> Record:
    """The record of the loads. heads: the head of the server, if it is here; rows: all rows; notes: sentences

    failures: reasons of checks that ended before their end, by name
    """
    question_set, first = tried.requests.question_set, loads[0]
    batches = [batch for load in loads for batch in load.batches]
    urls, servers = [server.url for server in tried.servers], name_servers(tried)
    measured = [row for load in loads for row in select_rows(rows, {"requests": load.figures["requests"]})]
    times = [row["when"] for row in rows if "when" in row]
    document = {
        "schema": SCHEMA,
        "when": max(times, default=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")),
        "target": facts.target,
        "drafter": describe_drafter(options, tried, heads, batches),
        "engine": facts.engine,
        "machine": identity.describe_machine(urls, options.machine, find_busy_share(measured)),
        "protocol": describe_protocol(
            tried, batches, options.decode.make_sampling(), num_turns=count_turns(question_set, first)
        ),
        "counting": RecordedCounting(source=find_source(tried.server.kind, batches)),
        "loads": [make_load(load.figures, load.batches) for load in loads],
        "by": group_answers(question_set, first.batches, first.prompt_lengths, options.seed),
        "checks": make_checks(options, tried, facts, loads, rows, failures).finish(),
        "notes": [hide_places(note, servers) for note in notes],
    }
    return Record.model_validate(document)


def make_checks(
    options: JudgeOptions,
    tried: TriedServer,
    facts: ServerFacts,
    loads: Sequence[MeasuredLoad],
    rows: list[dict],
    failures: dict[str, str],
) -> Checked:
    """The checks, made on the first of the loads. failures: see `make_record`"""
    checked, greedy = Checked(), options.decode.make_sampling().greedy
    figures = loads[0].figures
    fields, reason = checks.check_replay(figures.get("replay"))
    checked.values |= fields
    checked.add("served_is_trained", fields.get("served_is_trained"), reason)
    checked.add("template", *facts.template)
    checked.add("control", *checks.check_control(tried, figures["requests"], rows, greedy=greedy))
    checked.add("repeat", *checks.check_repeat(options.repeat, rows, greedy=greedy))
    checked.add("others_traffic", *checks.check_traffic(rows))
    for name, reason in failures.items():
        checked.add(name, None, reason)
    servers = name_servers(tried)
    checked.reasons = {name: hide_places(reason, servers) for name, reason in checked.reasons.items()}
    return checked


def name_servers(tried: TriedServer) -> dict[str, str]:
    """The part of each server, by its URL."""
    servers = {"the control": tried.control, "the server without drafts": tried.baseline, "the server": tried.server}
    return {server.url: name for name, server in servers.items() if server}


def name_target(options: JudgeOptions, heads: Sequence[ComparedHead]) -> str | None:
    """The target's name by the options, or that of the head; None where nobody names it."""
    return options.target.name or (heads[0].drafter.target.name if heads else None)


# The drafter


def describe_drafter(
    options: JudgeOptions, tried: TriedServer, heads: Sequence[ComparedHead], batches: Sequence[ServedBatch]
) -> RecordedDrafter | None:
    """The drafter as the head, the user or the server names it; None for a server that does not draft."""
    if heads:
        return describe_head(heads[0], options.drafter, tried.server.kind)
    if options.drafter is None and {batch.drafts for batch in batches} == {False}:
        return None
    served = shorten_name((tried.server.entry.get("draft") or {}).get("checkpoint") or UNKNOWN)
    return RecordedDrafter(name=options.drafter or served, method=options.drafter or UNKNOWN)


def describe_head(head: ComparedHead, name: str | None, kind: str) -> RecordedDrafter:
    """A head by its checkpoint, as a kind of server runs it. name: the user's name for it; None: the checkpoint's"""
    drafter, settings = head.drafter, checkpoint.read_document(head.folder)
    _, _, revision = hub.pin_commit(head.folder).partition("@")
    vocab = drafter.draft_to_target
    return RecordedDrafter(
        name=name or name_head(head).partition("@")[0],
        method=type(drafter).__name__.lower(),
        revision=revision or None,
        digest=digest_weights(head.folder),
        layers=count_layers(settings),
        window=draft_as_engine(drafter, kind).window,
        trained_length=checkpoint.find_trained_length(head.folder),
        draft_vocab=None if vocab is None else len(vocab),
    )


def name_head(head: ComparedHead) -> str:
    """The name of a head, without the folder around it where checkpoint= is not a folder below the present one."""
    is_outside = head.folder.is_absolute() or ".." in head.folder.parts
    return head.name.rpartition("/")[2] if is_outside and "@" not in head.name else head.name


def count_layers(settings: dict[str, Any]) -> int | None:
    """The layers, or modules, of a head by its settings; None where these do not say."""
    for name in ("num_layers", "num_modules"):
        if isinstance(settings.get(name), int):
            return settings[name]
    return None


def digest_weights(folder: Path) -> str | None:
    """The SHA-256 of a checkpoint's file of weights; None for several files."""
    paths = [folder / "drafter.safetensors", *folder.glob("*.safetensors")]
    found = {path for path in paths if path.is_file()}
    return files.hash_file(found.pop()) if len(found) == 1 else None


def name_weights(heads: Sequence[ComparedHead]) -> str | None:
    """The name and the digest of the head, as rows record them; None without a head."""
    return f"{name_head(heads[0])} {str(digest_weights(heads[0].folder))[:16]}" if heads else None


# Protocol and counting


def describe_protocol(
    tried: TriedServer, batches: Sequence[ServedBatch], sampling: Sampling, *, num_turns: int
) -> RecordedProtocol:
    """What was asked, and how."""
    question_set, tokenizer, body = tried.requests.question_set, tried.requests.tokenizer, tried.server.body
    ids = [fields["prompt"] for _, fields in tried.first if "prompt" in fields]
    is_known = tried.server.kind in EXTRA_FIELDS
    source, arguments = question_set.source, question_set.describe(tokenizer)
    has_template = question_set.chat == "target" and tokenizer is not None and tokenizer.chat_template
    suite = question_set.suite or {"name": Path(source).stem, "digest": arguments["questions_digest"]}
    return RecordedProtocol(
        suite=suite["name"],
        file=Path(source).name if Path(source).exists() else source,
        revision=suite["digest"],
        licence=question_set.licence,
        ids_sha256=digest_json(ids) if ids else None,
        endpoint="v1/completions" if ids else "v1/chat/completions",
        template_sha256=digest_text(str(tokenizer.chat_template)) if tokenizer and has_template else None,
        thinking=arguments["template"].get(MODE),
        effort=arguments["template"].get(EFFORT),
        system=find_system(question_set),
        temperature=body["temperature"],
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty if is_known else body.get(name_penalty(tried.server.kind)),
        max_tokens=body["max_tokens"],
        drafts=find_longest(batches),
        stop=list(question_set.stop),
        ignore_stop=bool(body.get("ignore_eos")),
        turns=num_turns,
        seed=body.get("seed"),
    )


def digest_json(value: Any) -> str:
    return digest_text(json.dumps(value, separators=(",", ":")))


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def find_system(question_set: QuestionSet) -> str | None:
    """The system message that all questions share; None where they have none, or different ones."""
    texts = set()
    for question in question_set.questions:
        message = (question.turns[0].get("messages") or [{}])[0]
        content = message.get("content")
        texts.add(content if message.get("role") == "system" and isinstance(content, str) else None)
    return (texts.pop() or None) if len(texts) == 1 else None


def count_turns(question_set: QuestionSet, load: MeasuredLoad) -> int:
    """The turns that were asked of the longest question."""
    questions = list_turns(question_set)
    asked = collections.Counter(questions[name].id for name in load.prompts)
    return max(asked.values())


def find_source(kind: str, batches: Sequence[ServedBatch]) -> CountSource | None:
    """The source of the counts; None without any. kind: kind of the server"""
    counts = [answer.server_counts for answer in referee.list_answers(batches)]
    if None not in counts:
        return "timings" if kind == LLAMA_CPP else "per_request"
    if referee.count_answers(batches):
        return "stream"
    return "counters" if any(batch.server_counts for batch in batches) else None
