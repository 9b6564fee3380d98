"""evaluate engine=URL: a running server under 1, 4, 16, .. requests at once, with drafts and plain in turn, resumable."""

from helpers import loading
from helpers.options import split

import copy
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import rich.table

from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.export.engines import make_form
from specdec.export.layout import draft_from_all
from specdec.heads.base import Drafter, Head
from specdec.heads.mtp import MTP
from specdec.measuring import referee
from specdec.measuring.measure import WARM_UP, split_turns
from specdec.measuring.referee import Counters, Served, Turn
from specdec.measuring.report import TAU, PromptCounts, by_depth, tau, tau_difference
from specdec.target.model import load_tokenizer
from specdec.unroll import replay
from train import progress, validate
from train.answers.engine_answers import check_tokenizer
from train.answers.resumable import Resumable, digest, resumable
from train.data import reading
from train.data import rows as data
from train.features.engine_client import BadAnswer, EngineClient, Event, GivenUp, Refused
from train.pages.page import write_figure
from train.validate import Written

OURS, VLLM, LLAMA_CPP, SGLANG = "specdec", "vllm", "llamacpp", "sglang"  # `owned_by` of their models
FIELDS: dict[str, dict] = {  # that make a server say more
    OURS: {"details": True, "return_token_ids": True},
    VLLM: {"return_token_ids": True},
    LLAMA_CPP: {"return_tokens": True, "verbose": True},
    SGLANG: {"return_token_ids": True, "return_spec_tokens_details": True},
}
SWITCHES: dict[str, dict] = {OURS: {"speculate": False}, LLAMA_CPP: {"speculative.n_max": 0}}  # newer builds of llama.cpp ignore theirs
FLAGS = {
    VLLM: "start it without --disable-log-stats, and for intervals with --per-request-spec-decode-metrics detailed",
    LLAMA_CPP: "start it with --metrics",
}
PATIENCE = 3  # times `timeout=`, after which an unreachable server ends the command
MOST = 4096  # requests at once
SETTLING = 2.0  # seconds that counters may be behind an answer
TOLERANCE = 0.02  # of tau, served against replayed
BUSY = 0.7  # share of the time that this process computed, above which it may be what is slow


@dataclass(frozen=True)
class Question:
    """A prompt as part of a request: token ids, or messages. id: of the prompt"""

    id: str
    body: dict


@dataclass(frozen=True)
class Setting:
    """How all requests are answered. body: what all have in common"""

    body: dict
    timeout: float
    say: Any


@dataclass
class Server:
    """A model of a server, asked by up to `in_flight` requests at once. body: of the server, beside the setting's"""

    url: str
    model: str
    kind: str
    root: str
    setting: Setting
    body: dict = field(default_factory=dict)
    in_flight: int = 1

    def __post_init__(self) -> None:
        minutes = self.setting.timeout / 60
        self.client = EngineClient(
            self.url, in_flight=self.in_flight, patience=PATIENCE * minutes, longest=minutes, say=self.setting.say
        )
        self.url = self.client.urls[0]

    def ask(self, question: Question, **more: Any) -> "Future[Served]":
        path = "v1/chat/completions" if "messages" in question.body else "v1/completions"
        body = {
            "model": self.model,
            **self.setting.body,
            **FIELDS.get(self.kind, {}),
            **self.body,
            **question.body,
            **more,
        }
        return self.client.pool.submit(self.client.stream, path, body, lambda events: read_served(question.id, events))

    def counters(self) -> Counters | None:
        try:
            answer = self.client.client.get(f"{self.url}/metrics")
        except httpx.HTTPError:
            return None
        return referee.read_counters(answer.text) if answer.status_code == 200 else None

    def serve(self, questions: Sequence[Question], **more: Any) -> Turn:
        """Sends all of them, as many at once as the client allows. Raises ValueError where none is answered."""
        before, begun, computed = self.counters(), time.perf_counter(), time.process_time()
        futures = [self.ask(question, **more) for question in questions]
        answers, failed = [], []
        for question, future in zip(questions, futures):
            try:
                answers.append(future.result())
            except (GivenUp, Refused) as error:
                failed.append({"prompt": question.id, "error": str(error)})
        seconds = time.perf_counter() - begun
        busy = (time.process_time() - computed) / seconds
        if not answers:
            raise ValueError(f"None of {len(questions)} requests was answered. The first one: {failed[0]['error']}")
        generated, counted = None, None
        tokens = sum(answer.tokens for answer in answers)
        if before is not None:
            deadline = time.monotonic() + SETTLING
            while (after := self.counters()) is not None and time.monotonic() < deadline:
                if after.since(before)[0] >= tokens:
                    break
                time.sleep(0.05)
            generated, counted = after.since(before) if after is not None else (None, None)
        return Turn(answers, failed, seconds, busy, generated, counted)


def read_served(prompt: str, events: list[Event]) -> Served:
    """An answer from its stream. Raises BadAnswer for one that is not whole."""
    ids: list[int] | None = []
    sizes, times, finish, num = [], [], None, None
    for seconds, event in events:
        num = (event.get("usage") or {}).get("completion_tokens", num)
        for choice in event.get("choices") or []:
            finish = choice.get("finish_reason") or finish
            new = choice.get("token_ids", (event.get("__verbose") or {}).get("tokens"))
            said = choice.get("text") or (choice.get("delta") or {})
            said = said if isinstance(said, str) else said.get("content") or said.get("reasoning_content")
            if new or said:
                times.append(seconds)
                sizes.append(len(new or []))
                ids = None if ids is None or new is None else ids + new
    if finish is None or not times:
        raise BadAnswer("a stream without " + ("an answer" if finish else "a finish_reason"))
    if num is None:
        num = len(ids or [])
    if not num:
        raise BadAnswer("a stream without usage and token ids, so its tokens cannot be counted")
    said_of = referee.read_answer([event for _, event in events])
    return Served(prompt, num, times[0], times[-1], ids or None, sizes if ids else None, finish, said_of)


def judge(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    levels = read_levels(chosen.requests)
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    if len(runs) > 1:
        raise ValueError("A server is compared with one head: give one checkpoint=DIR, that of the head it serves.")
    setting = Setting(make_body(chosen), chosen.timeout, console.say)
    server = open_server(chosen.engine, chosen, setting)
    questions = read_questions(chosen, server, runs)
    console.print(f"{server.model} at {server.url}; tau: {TAU}")
    plain, notes = probe(chosen, server, questions[0])
    for note in notes:
        console.say(note)
    settings = {
        **{name: getattr(chosen, name) for name in ("engine", "max_new_tokens", "ignore_stop", "seed")},
        "plain": plain and (chosen.plain or plain.body),
        "model": server.model,
        "owned_by": server.kind,
        "decode": asdict(chosen.decode.sampling()),
        "prompts": f"{chosen.prompts} {digest(repr(questions).encode())}",
    }
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice="Choose another out=FOLDER.") as results:
        for level in levels:
            measure_missing(server, plain, questions, level, results)
    pairs = {level: read_pairs(results.rows, level) for level in levels}
    document: dict[str, Any] = {
        "definition_of_tau": TAU,
        "settings": settings,
        "notes": notes,
        "levels": [{"requests": level, **summarise(pairs[level], chosen.seed)} for level in levels],
    }
    if runs:
        drafter = draft_as_engine(runs[0].drafter, server.kind)
        turns = [turn for level in levels for turn, _ in pairs[level]]
        document["replay"] = replay_served(chosen, drafter, questions, turns)
    files.write_text(out / "report.json", json.dumps(document, indent=1) + "\n")
    show(document, console)
    console.print(f"written: {out}/report.json")


def read_levels(text: str) -> list[int]:
    """requests=, in order. Raises ValueError for what is no list of numbers."""
    if not split(text) or not all(each.isdecimal() and 0 < int(each) <= MOST for each in split(text)):
        raise ValueError(f"requests={text}: give numbers from 1 to {MOST}, such as 1,4,16.")
    return sorted({int(each) for each in split(text)})


def make_body(chosen: Any) -> dict:
    """What all requests have in common; fields that OpenAI does not know are left out where they change nothing."""
    sampling: Sampling = chosen.decode.sampling()
    more = {"top_p": sampling.top_p, "top_k": 1 if sampling.greedy else sampling.top_k}
    if sampling.repetition_penalty != 1:
        more["repetition_penalty"] = sampling.repetition_penalty
    body = {"max_tokens": chosen.max_new_tokens, "temperature": sampling.temperature, "seed": chosen.seed}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return (
        body
        | {name: value for name, value in more.items() if value is not None}
        | ({"ignore_eos": True} if chosen.ignore_stop else {})
    )


def open_server(url: str, chosen: Any, setting: Setting) -> Server:
    """Raises ValueError for what is no server, or has no model of that name."""
    server = Server(url, "", "", "", setting)
    with closing(server.client):
        (models,) = server.client.describe_models()
    found = next((model for model in models if chosen.model in (None, model["id"])), None)
    if found is None:
        names = ", ".join(str(model["id"]) for model in models)
        raise ValueError(f"{server.url} has no model {chosen.model}, but {names}: give model= as it is called there.")
    return replace(server, model=str(found["id"]), kind=str(found.get("owned_by")), root=str(found.get("root", "")))


def read_questions(chosen: Any, server: Server, runs: list[loading.Run]) -> list[Question]:
    """The prompts: as token ids where the target's tokenizer is here, else as messages, which the server encodes."""
    name = chosen.target.name or (runs[0].drafter.target.name if runs else server.root)
    mode = loading.mode_of(split(chosen.checkpoint)) if chosen.thinking is None else chosen.thinking
    if not (chosen.target.name or runs or Path(name, "tokenizer.json").is_file()):
        progress.note(
            "Prompts are sent as messages: give target.name= to send token ids, which the server must take as they are."
        )
        rows = reading.spread(reading.load_prompts(chosen.prompts, split=chosen.split), chosen.limit)
        more = {} if mode is None else {"chat_template_kwargs": {"enable_thinking": mode}}
        return [Question(row["id"], {"messages": row["messages"], **more}) for row in rows]
    tokenizer = load_tokenizer(name, trust_remote_code=chosen.target.trust_remote_code)
    prompts = data.load_prompts(chosen.prompts, tokenizer, split=chosen.split, limit=chosen.limit, thinking=mode)
    with closing(replace(server).client) as client:
        check_tokenizer(client, server.model, tokenizer, prompts[0].tokens)
    return [Question(prompt.id, {"prompt": prompt.tokens}) for prompt in prompts]


def probe(chosen: Any, server: Server, question: Question) -> tuple[Server | None, list[str]]:
    """A short request with drafts, and one without -> what serves plainly, and what is to be known of the server."""
    notes = []
    with closing(server.client):
        found = server.serve([question], max_tokens=WARM_UP)
    drafts = found.drafts
    if drafts is None:
        flag = FLAGS.get(server.kind, "its answers and /metrics have no counters that are known here")
        notes.append(f"{server.url} says nothing about drafts, so tau cannot be had: {flag}.")
    elif not drafts:
        notes.append(f"{server.url} does not draft: tau is 1 by its own counters.")
    if chosen.plain:
        plain = open_server(chosen.plain, chosen, server.setting)
    elif server.kind in SWITCHES and drafts:
        plain = replace(server, body=SWITCHES[server.kind])
    else:
        return None, notes
    with closing(plain.client):
        if not plain.serve([question], max_tokens=WARM_UP).drafts:
            return plain, notes
    if chosen.plain:
        raise ValueError(
            f"plain={chosen.plain} drafts, too: give the URL of a server of the same model without drafts."
        )
    return None, [
        *notes,
        "This server cannot switch drafts off for a request: plain=URL of one without drafts compares speeds.",
    ]


# Measuring


def measure_missing(
    server: Server, plain: Server | None, questions: list[Question], level: int, results: Resumable
) -> None:
    """The turns of one level that have no row: requests with drafts and the same without, after a warm-up.

    Prompts are repeated where there are fewer than requests.
    """
    repeated = list(itertools.islice(itertools.cycle(questions), max(len(questions), level)))
    done = {row["turn"] for row in results.rows if row["requests"] == level}
    missing = [(number, turn) for number, turn in enumerate(split_turns(repeated, level)) if number not in done]
    if not missing:
        return
    with ExitStack() as stack:
        servers = {"drafted": replace(server, in_flight=level)} | (
            {"plain": replace(plain, in_flight=level)} if plain else {}
        )
        for each in servers.values():
            stack.enter_context(closing(each.client))
            each.serve(repeated[:level], max_tokens=WARM_UP)
        track = progress.track(missing, f"{level} requests at once", unit="requests", size=lambda pair: len(pair[1]))
        for number, turn in track:
            order = sorted(servers, reverse=number % 2 == 1)
            results.append(
                {"requests": level, "turn": number, **{name: asdict(servers[name].serve(turn)) for name in order}}
            )
    if again := sum(each.client.repeated for each in servers.values()):
        progress.note(f"{level} requests at once: {again} were sent again, as their answers were lost or bad.")


def read_pairs(rows: list[dict], level: int) -> list[tuple[Turn, Turn | None]]:
    """The turns of a level, with drafts and plain."""
    chosen = sorted((row for row in rows if row["requests"] == level), key=lambda row: row["turn"])
    read = lambda row, name: Turn.from_row(row[name]) if name in row else None
    return [(Turn.from_row(row["drafted"]), read(row, "plain")) for row in chosen]


def summarise(pairs: list[tuple[Turn, Turn | None]], seed: int) -> dict[str, Any]:
    """The figures of a level."""
    turns, both = [turn for turn, _ in pairs], [(turn, plain) for turn, plain in pairs if plain is not None]
    every = turns + [plain for _, plain in both]
    return {
        "answers": sum(len(turn.answers) for turn in turns),
        "failed": [failure for turn in every for failure in turn.failed],
        "tokens_of_others": sum(turn.others for turn in every),
        **referee.summarise_drafts(turns, seed),
        "drafted": referee.summarise_speed(turns, seed),
        "plain": referee.summarise_speed([plain for _, plain in both], seed) if both else None,
        **(referee.summarise_speedup(both, seed) if both else {}),
    }


# Beside what is replayed


def draft_as_engine(drafter: Head, kind: str) -> Head:
    """The drafter as an engine runs it: llama.cpp without a draft vocabulary, vLLM with the first embedding at zero."""
    if kind == LLAMA_CPP and isinstance(drafter, Drafter) and make_form(drafter, "gguf").whole_vocabulary:
        return draft_from_all(drafter)
    if kind == VLLM and isinstance(drafter, MTP) and not drafter.zero_first:
        drafter = copy.copy(drafter)
        drafter.zero_first = True
    return drafter


def replay_served(chosen: Any, drafter: Head, questions: list[Question], turns: list[Turn]) -> dict[str, Any]:
    """tau of the head along the answers that were served, beside tau as served; at temperature 0 also where they part."""
    sampling = chosen.decode.sampling()
    answers = [answer for turn in turns for answer in turn.answers]
    prompts = {each.id: each.body["prompt"] for each in questions if "prompt" in each.body}
    sizes = [said.longest for turn in turns for said in (turn.counted, *(each.said for each in turn.answers)) if said]
    depth = max((size for size in sizes if size), default=chosen.decode.depth)
    drafting = replace(chosen.decode.drafting(TreeShape(depth, 1, depth)), rule="token", lossy=False)
    if not isinstance(drafter, Drafter) or not drafting.replayable(drafter, sampling):
        return {
            "verdict": f"A chain of {depth} of this head cannot be replayed with these settings, so nothing is compared."
        }
    texts = {(each.prompt, tuple(each.ids)): Written(prompts[each.prompt], each.ids, sampling.temperature)
             for each in answers if each.ids and len(each.ids) > 1 and each.prompt in prompts}  # fmt: skip
    counts = referee.count_answers(turns)
    if not texts or counts is None:
        return {
            "verdict": "The server gives no token ids, or no counts for each answer, so nothing is compared with replay."
        }
    accepts = dict(zip(texts, validate.accept_texts(drafter, list(texts.values()), depth=depth, what="replay")))
    served, own, compared, differing = [], [], 0, []
    for answer, count in zip(answers, counts):
        accept = accepts.get((answer.prompt, tuple(answer.ids or ())))
        if accept is None:
            continue
        rounds, accepted = replay.rounds(accept)
        served.append(count)
        own.append(PromptCounts(rounds, rounds + float(accepted.sum())))
        if sampling.greedy and answer.said and answer.said.steps is not None:
            compared += 1
            steps = referee.walk(accept)
            if found := referee.first_difference(answer.said.steps, steps, accept.shape[1]):
                number, token = found
                differing.append({"prompt": answer.prompt, "token": token, "round": number,
                                  "served": answer.said.steps[number], "replayed": steps[number]})  # fmt: skip
    difference, span = tau_difference(served, own, seed=chosen.seed)
    same = sum(round(one.num_rounds) == round(other.num_rounds) for one, other in zip(served, own))
    figures = {"depth": depth, "answers": len(own), "served_tau": tau(served), "replayed_tau": tau(own),
               "difference": difference, "difference_ci": span, "same_number_of_rounds": same if sampling.greedy else None,
               "compared_by_round": compared, "differences": differing}  # fmt: skip
    return {"verdict": say_verdict(figures), **figures}


def say_verdict(figures: dict[str, Any]) -> str:
    """Whether the server drafts as the head was trained to, in a sentence or two."""
    served, own, (low, high) = figures["served_tau"], figures["replayed_tau"], figures["difference_ci"]
    close = abs(served / own - 1) < TOLERANCE
    said = "served = trained" if close else "served is NOT what was trained"
    said += f": tau {served:.3f} served, {own:.3f} replayed along the same {figures['answers']} answers with chains of "
    said += f"{figures['depth']} ({figures['difference']:+.3f}, {low:+.3f} .. {high:+.3f})"
    if figures["same_number_of_rounds"] is not None:
        said += f"; {figures['same_number_of_rounds']} took as many rounds"
    if not figures["compared_by_round"]:
        return f"{said}."
    if not figures["differences"]:
        return f"{said}; all rounds of {figures['compared_by_round']} answers accept as many drafts."
    first = min(figures["differences"], key=lambda each: each["round"])
    return (f"{said}. Rounds of {len(figures['differences'])} of {figures['compared_by_round']} answers differ, first prompt "
            f"{first['prompt']} at token {first['token']}: round {first['round'] + 1} accepts {first['served']} drafts served, "
            f"{first['replayed']} replayed.")  # fmt: skip


# What is printed


def show(document: dict[str, Any], console: progress.Results) -> None:
    """A table with a row for each level, and sentences on what is to be known."""
    heads = ["requests at once", "tau", "accepted by position", "tokens/s of a user", "plain", "speedup",
             "tokens/s of all", "plain", "speedup", "first token, s"]  # fmt: skip
    table = rich.table.Table(*heads)
    for level in document["levels"]:
        drafted, plain = level["drafted"], level["plain"] or {}
        rate = lambda found, name: write_figure(found.get(name), found.get(f"{name}_ci"), digits=1)
        user, every = "tokens_per_second_of_a_user", "tokens_per_second"
        table.add_row(
            str(level["requests"]),
            write_figure(level["tau"], level["tau_ci"]) or "unknown",
            by_depth(level["survival"]) if level["survival"] else "",
            *(rate(drafted, user), rate(plain, user)),
            write_figure(level.get("speedup_of_a_user"), level.get("speedup_of_a_user_ci")),
            *(rate(drafted, every), rate(plain, every)),
            write_figure(level.get("speedup"), level.get("speedup_ci")),
            write_figure(drafted["first_token_seconds"]),
        )
    console.print(table)
    for level in document["levels"]:
        for sentence in remark(level, greedy=document["settings"]["decode"]["temperature"] == 0):
            console.say(f"{level['requests']} at once: {sentence}")
    if "replay" in document:
        console.say(document["replay"]["verdict"])


def remark(level: dict[str, Any], *, greedy: bool) -> Iterator[str]:
    """What limits the figures of a level."""
    if level["failed"]:
        first = level["failed"][0]
        yield f"{len(level['failed'])} requests failed, first prompt {first['prompt']}: {first['error']}"
    if level["tokens_of_others"]:
        yield (f"the server generated {level['tokens_of_others']} tokens more than were received: it served others, or requests that "
               "were sent again; its counters are left out then.")  # fmt: skip
    if max(each["busy"] for each in (level["drafted"], level["plain"]) if each) > BUSY:
        yield "this client was busy most of the time, so speeds may be its own: measure from another machine."
    if greedy and level.get("compared_answers"):
        yield f"{level['same_answers']} of {level['compared_answers']} answers are the same with drafts and without."
