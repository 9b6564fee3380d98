"""Checks of a server beside its figures: its rendering of prompts, a second plain server, and answers asked again."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.core.resumable import Resumable
from specdec.engines.client import LLAMA_CPP, GivenUp, Refused
from specdec.measuring.questions import Question, name_request
from specdec.measuring.record import RecordedChecks, RecordedControl, RecordedDifference
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch
from specdec.measuring.servers.server import Connection, TriedServer
from specdec.text import chat_template
from specdec.text.conversations import merge_arguments
from specdec.text.messages import write_arguments
from specdec.tools.judge.figures import take_figure
from specdec.tools.judge.rows import Key, measure_missing, read_answers

TEMPLATE_PROMPTS = 4  # prompts whose rendering is compared
SAME_IDS, OTHER_IDS = "same ids as tokenizer", "other ids than tokenizer"
FIRST_TIME = {"check": "repeat, first time", "requests": 1, "wave": 0}
SECOND_TIME = {"check": "repeat", "requests": 1, "wave": 0}


@dataclass
class Checked:
    """The checks of a record, by their names, and the reasons of those that were not made."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any, reason: str | None) -> None:
        """Adds a check, or the reason where its value is None."""
        self.values[name] = value
        if value is None:
            self.reasons[name] = reason or "the server does not say enough"

    def finish(self) -> RecordedChecks:
        return RecordedChecks(**self.values, unchecked=self.reasons)


def make_control_key(tried: TriedServer, concurrency: int) -> Key:
    """The fields of the rows of control=."""
    assert tried.control is not None
    return {"check": "control", "requests": concurrency, "wave": 0, "url": tried.control.url}


def measure_control(tried: TriedServer, concurrency: int, rows: Resumable, **facts: Any) -> None:
    """Asks the control, if there is one, for all first turns, as far as rows are missing."""
    if tried.control is not None:
        key = make_control_key(tried, concurrency)
        measure_missing({"control": tried.control}, tried.first, key, rows, **facts)


def measure_repeat(tried: TriedServer, repeat: int, rows: Resumable, **facts: Any) -> None:
    """Asks the server for `repeat` first turns again, as far as rows are missing."""
    requests = tried.first[:repeat]
    if requests:
        known = read_answers(rows.rows, "drafted", {"requests": 1, "wave": 0})
        keys = [SECOND_TIME] if all(name in known for name, _ in requests) else [FIRST_TIME, SECOND_TIME]
        for key in keys:
            measure_missing({"drafted": tried.server}, requests, key, rows, **facts)


# Rendering


def check_template(tried: TriedServer) -> tuple[str | None, str | None]:
    """Whether the server renders messages as the tokenizer's template does, or None and the reason."""
    question_set, tokenizer = tried.requests.question_set, tried.requests.tokenizer
    if tokenizer is None:
        return None, "the server renders the prompts, as the target's tokenizer is not here (target.name=)"
    if question_set.chat != "target" or question_set.protocol or not tokenizer.chat_template:
        return None, "the prompts are texts, which no chat template renders"
    questions = [question for question in question_set.questions if not question.turns[0].get("plain")]
    try:
        with tried.server.open() as connection:
            same = [*compare_rendering(tried, tokenizer, connection, questions[:TEMPLATE_PROMPTS])]
    except (Refused, GivenUp) as error:
        cause = f"status {error.status}" if isinstance(error, Refused) and error.status else str(error)
        return None, f"the server gives no token ids for messages ({cause})"
    if not same:
        return None, "no question has messages"
    return SAME_IDS if all(same) else OTHER_IDS, None


def compare_rendering(
    tried: TriedServer, tokenizer: PreTrainedTokenizerBase, connection: Connection, questions: Sequence[Question]
) -> Iterator[bool]:
    """Yields whether the server gives the ids that are sent as the prompt of each question.

    Raises Refused or GivenUp for a server that renders no messages.
    """
    ids = {name: fields["prompt"] for name, fields in tried.first}
    for question in questions:
        row = question.turns[0]
        arguments = merge_arguments(tokenizer, row, tried.requests.question_set.arguments)
        fields = write_arguments(chat_template.rename_mode(tokenizer, arguments))
        tokens = render_by_server(connection, {"messages": row["messages"], **fields})
        if not isinstance(tokens, list):
            raise Refused("an answer of another form")
        yield tokens == ids[name_request(question, 0)]


def render_by_server(connection: Connection, fields: dict[str, Any]) -> Any:
    """The token ids of messages by the server's own template. fields: messages, and arguments of the template

    Raises Refused or GivenUp for a server that renders none.
    """
    body = {"model": connection.server.model, **fields}
    if connection.server.kind == LLAMA_CPP:
        text = connection.client.post("apply-template", body, lambda answer: answer.get("prompt"))
        body = {"content": text, "add_special": True, "parse_special": True}
    return connection.client.post("tokenize", body, lambda answer: answer.get("tokens"))


# Answers that are compared


def compare_answers(
    answers: Mapping[str, ServedAnswer], reference: Mapping[str, ServedAnswer], names: Sequence[str]
) -> list[bool]:
    """Whether the ids of two answers are equal, for each prompt. names: prompts that are compared"""
    return [answers[name].ids == reference[name].ids for name in names]


def find_comparable(*answers_of_servers: Mapping[str, ServedAnswer]) -> list[str]:
    """The prompts to which all servers have an answer with token ids."""
    first, *rest = answers_of_servers
    names = [name for name in first if all(name in answers for answers in rest)]
    return [name for name in names if all(answers[name].ids for answers in answers_of_servers)]


def check_control(
    tried: TriedServer, concurrency: int, rows: list[dict], *, greedy: bool
) -> tuple[RecordedControl | None, str | None]:
    """How many answers two plain servers share, beside those that drafts leave as they are; or None and the reason."""
    if tried.control is None:
        return None, "there is no second server without drafts (control=URL), so other answers may be usual for it"
    if not greedy:
        return None, "answers above temperature 0 are draws"
    key = {"requests": concurrency, "wave": 0}
    drafted, plain = (read_answers(rows, name, key) for name in ("drafted", "plain"))
    control = read_answers(rows, "control", make_control_key(tried, concurrency))
    names = find_comparable(drafted, plain, control)
    if not names:
        no_plain = tried.baseline is None
        return None, "there is no server without drafts (baseline=URL)" if no_plain else "no answer has token ids"
    plain_plain, drafted_plain = (compare_answers(plain, answers, names) for answers in (control, drafted))
    return make_control(plain_plain, drafted_plain), None


def make_control(plain_plain: list[bool], drafted_plain: list[bool]) -> RecordedControl:
    """The counts of equal answers, with the chance of as few for drafts. The lists: equal or not, by prompt"""
    lost = sum(before and not after for before, after in zip(plain_plain, drafted_plain))
    won = sum(after and not before for before, after in zip(plain_plain, drafted_plain))
    num = lost + won
    p_value = sum(math.comb(num, count) for count in range(lost, num + 1)) / 2**num
    compared = len(plain_plain)
    return RecordedControl(
        plain_plain=(sum(plain_plain), compared), drafted_plain=(sum(drafted_plain), compared), p_value=p_value
    )


def check_repeat(repeat: int, rows: list[dict], *, greedy: bool) -> tuple[tuple[int, int] | None, str | None]:
    """How many answers are equal when they are asked again at load 1, and how many were; or None and the reason."""
    if not repeat:
        return None, "repeat=0"
    if not greedy:
        return None, "answers above temperature 0 are draws"
    first, again = read_repeats(rows)
    names = find_comparable(first, again)
    same = compare_answers(first, again, names)
    return ((sum(same), len(same)), None) if same else (None, "no answer has token ids")


def read_repeats(rows: list[dict]) -> tuple[dict[str, ServedAnswer], dict[str, ServedAnswer]]:
    """The first answers at load 1, and those that were asked again, by the prompt's id."""
    first = read_answers(rows, "drafted", FIRST_TIME) | read_answers(rows, "drafted", {"requests": 1, "wave": 0})
    return first, read_answers(rows, "drafted", SECOND_TIME)


def check_traffic(rows: list[dict]) -> tuple[int | None, str | None]:
    """The tokens that the servers generated for others, by their counters; or None and the reason."""
    servers = {"drafted": "the server", "plain": "the server without drafts", "control": "the control"}
    total = 0
    for row, (name, server) in itertools.product(rows, servers.items()):
        if not row.get(name):
            continue
        batch = ServedBatch.from_row(row[name])
        if batch.generated is None:
            return None, f"{server} has no counter of its tokens"
        if batch.foreign_tokens < 0:
            return None, f"the counter of {server} has fewer tokens than its answers, as if it began anew"
        total += batch.foreign_tokens
    return total, None


def check_replay(replay: dict[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """The fields of a record on replay, and the reason where they are None. replay: figures of `compare_with_replay`"""
    if replay is None:
        return {}, "the head is not here (checkpoint=)"
    if "replayed_tau" not in replay:
        return {}, replay["verdict"].removesuffix(".")
    first = min(replay["differences"], key=lambda difference: difference["round"], default=None)
    fields = {
        "replay_tau": take_figure(replay, "replayed_tau"),
        "served_is_trained": replay["served_is_trained"],
        "first_difference": RecordedDifference(**first) if first else None,
    }
    doubt = "the interval of the difference of the two tau is too wide"
    if replay["difference_ci"] is None:
        doubt = "one question alone says too little"
    return fields, None if fields["served_is_trained"] is not None else doubt
