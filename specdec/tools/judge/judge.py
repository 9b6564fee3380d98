"""evaluate engine=URL: a running server under 1, 4, 16, .. requests at once, with drafts and plain in turn, resumable."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from specdec.core import progress
from specdec.core.answer_text import TextDecoder
from specdec.core.resumable import Resumable, digest, resumable
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.engines.answers import check_tokenizer
from specdec.engines.client import BadAnswer, EngineClient, Event, GivenUp, Refused
from specdec.export.engines import make_form
from specdec.export.layout import draft_from_all
from specdec.export.mtp import with_first_zero
from specdec.heads.base import Drafter, Head
from specdec.heads.mtp import MTP
from specdec.measuring import evaluate, replay
from specdec.measuring.counting import AnswerCounts, find_end
from specdec.measuring.measure import WARM_UP, split_turns
from specdec.measuring.replay import Written
from specdec.measuring.report import TAU, PromptCounts, Report, tau, tau_difference
from specdec.measuring.results_page import Entry
from specdec.measuring.runs import load_runs
from specdec.options import decoding
from specdec.target.model import load_tokenizer
from specdec.text.messages import write_arguments
from specdec.tools.choose import choice
from specdec.tools.judge import referee
from specdec.tools.judge.referee import Counters, ServedAnswer, Turn
from specdec.tools.suites.suites import name_request

OURS, VLLM, LLAMA_CPP, SGLANG = "specdec", "vllm", "llamacpp", "sglang"  # `owned_by` of their models
FIELDS: dict[str, dict] = {  # of requests, so that a server says more
    OURS: {"details": True, "return_token_ids": True},
    VLLM: {"return_token_ids": True},
    LLAMA_CPP: {"return_tokens": True, "verbose": True},
    SGLANG: {"return_token_ids": True, "return_spec_tokens_details": True},
}
SWITCHES: dict[str, dict] = {
    OURS: {"speculate": False},
    LLAMA_CPP: {"speculative.n_max": 0},
}  # newer llama.cpp ignores it
FLAGS = {
    VLLM: "start it without --disable-log-stats, or with --per-request-spec-decode-metrics detailed",
    LLAMA_CPP: "start it with --metrics",
}
PATIENCE = 3  # times `timeout=`, after which an unreachable server ends the command
SETTLING = 2.0  # seconds that counters may be behind an answer
UNFIT = (400, 413, 422)  # statuses of requests that do not fit, such as a turn that is too long
TOLERANCE = 0.02  # of tau, served against replayed
BUSY = 0.7  # share of the time that this process computed, above which it may be what is slow
Request = tuple[str, dict]  # the prompt's id, and the part of a request's body that holds it


@dataclass(frozen=True)
class Server:
    """A model of a server. kind: `owned_by` of the model; root: its folder, as far as is known; body: what its requests share"""

    url: str
    model: str
    kind: str
    root: str
    body: dict
    timeout: float
    say: Callable[[str], None]

    @contextlib.contextmanager
    def open(self, in_flight: int = 1) -> Iterator["Connection"]:
        """For up to so many requests at once."""
        minutes = self.timeout / 60
        limits: dict[str, Any] = {"in_flight": in_flight, "patience": PATIENCE * minutes, "longest": minutes}
        with contextlib.closing(EngineClient(self.url, say=self.say, **limits)) as client:
            yield Connection(self, client)


@dataclass(frozen=True)
class Connection:
    server: Server
    client: EngineClient

    def counters(self) -> Counters | None:
        for _ in range(2):  # the server may have closed a connection
            with contextlib.suppress(httpx.HTTPError):
                answer = self.client.client.get(f"{self.client.urls[0]}/metrics")
                return referee.read_counters(answer.text) if answer.status_code == 200 else None
        return None

    def serve(self, questions: Sequence[Request], **more: Any) -> Turn:
        """The answers to all. more: fields of the requests. Raises ValueError where none is answered, unless the server refused all."""
        before, begun, computed = self.counters(), time.perf_counter(), time.process_time()
        body = {"model": self.server.model, **self.server.body, **more}
        answers, failed, futures, gone = [], [], [], False
        for name, asked in questions:
            path = "v1/chat/completions" if "messages" in asked else "v1/completions"
            read = lambda events, name=name: read_answer(name, events)
            futures.append(self.client.pool.submit(self.client.stream, path, body | asked, read))
        for (name, _), future in zip(questions, futures):
            try:
                answers.append(future.result())
            except (GivenUp, Refused) as error:
                failed.append({"prompt": name, "error": str(error)})
                gone = gone or not isinstance(error, Refused) or error.status not in UNFIT
        seconds = time.perf_counter() - begun
        busy = (time.process_time() - computed) / seconds
        if not answers and (gone or more):  # such as a turn that is too long: others may be answered
            raise ValueError(f"None of {len(questions)} requests was answered. {failed[0]['error']}")
        turn = Turn(answers, failed, seconds, busy, None, None)
        deadline = time.monotonic() + SETTLING
        while before and (after := self.counters()):
            generated, counted = after.since(before)
            turn = replace(turn, generated=generated, counted=counted)
            if turn.others >= 0 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return turn


def read_answer(prompt: str, events: list[Event]) -> ServedAnswer:
    """An answer from its stream. Raises BadAnswer for one that is not whole."""
    ids: list[int] = []
    sizes, times, given, finish, num = [], [], True, None, 0
    try:
        for seconds, event in events:
            num = (event.get("usage") or {}).get("completion_tokens") or num
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
                new = choice.get("token_ids", (event.get("__verbose") or {}).get("tokens"))
                finish = choice.get("finish_reason") or finish
                if new or text:
                    times.append(seconds)
                    sizes.append(len(new or ()))
                    given, ids = given and new is not None, ids + (new or [])
        said = referee.read_answer([event for _, event in events])
    except (AttributeError, KeyError, TypeError) as error:
        raise BadAnswer(f"a stream of another form ({type(error).__name__}: {error})") from error
    if finish is None or not times or not (num or given):
        raise BadAnswer("a stream without an answer, its finish_reason, or the number of its tokens")
    return ServedAnswer(
        prompt, num or len(ids), times[0], times[-1], ids if given else None, sizes, said, finish == "stop"
    )


def judge(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    levels, sampling = decoding.read_batches(chosen.batch), chosen.decode.sampling()
    asked, predictions = evaluate.read_questions(chosen), evaluate.read_predictions(chosen.predicted)
    runs = load_runs(chosen.checkpoint, chosen.target)
    if len(runs) > 1:
        raise ValueError("A server is compared with one head: give one checkpoint=DIR, that of the head it serves.")
    served = open_servers(chosen, asked, runs[0].drafter.target.name if runs else None, console)
    server, requests, first, notes, settings = (
        getattr(served, name) for name in ("server", "requests", "first", "notes", "settings")
    )
    console.say(f"{server.model} at {server.url}; tau: {TAU}")
    notes += evaluate.note_questions(asked, evaluate.find_heads(runs, {}))
    for note in notes:
        console.say(note)
    prompts: dict[int, dict[str, dict]] = {}
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice="Choose another out=FOLDER.") as results:
        for level in levels:
            prompts[level] = {}
            for turn in range(requests.turns):
                wave = requests.wave(turn, read_answers(results.rows, level))
                prompts[level] |= dict(wave)
                if wave:
                    measure_missing({"drafted": server, "plain": served.plain}, wave, level, turn, results)
    if requests.turns > 1 and not all(len(each) > len(first) for each in prompts.values()):
        cause = (
            "the target's tokenizer is not here (target.name=)"
            if requests.tokenizer is None
            else "no answer has token ids"
        )
        notes.append(f"Only first turns were asked, as {cause}.")
    found, entries = [], []
    fitting = evaluate.fit_predictions(predictions, runs[0].drafter.target, sampling, notes) if runs else None
    for level in levels:
        pairs = read_pairs(results.rows, level)
        turns = [turn for turn, _ in pairs]
        each = {"requests": level, **summarise(pairs, chosen.seed)}
        if runs:
            drafter = draft_as_engine(runs[0].drafter, server.kind)
            each["replay"] = compare_with_replay(chosen, drafter, prompts[level], turns)
        entry = make_entry(each, requests.count(turns) or [], sampling)
        if fitting:
            shape = f"chain of {len(each['survival'])}"
            entry = replace(entry, predicted=choice.predict(fitting, runs[0].name, shape, level))
        found.append(each)
        entries.append(entry)
    document = {"form": 1, "definition_of_tau": TAU, "settings": settings, "notes": notes}
    evaluate.write(out, console, entries, None, asked, document, levels=found)


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
    user = level.get("speedup_of_a_user"), level.get("speedup_of_a_user_ci")
    remarks = [*remark(level, greedy=sampling.greedy)]
    known = {"user_speedup": user, "first_token": drafted["first_token_seconds"], "remarks": remarks}
    return Entry("drafts of the server", sampling.temperature, level["requests"], report, counts, **known)


@dataclass(frozen=True)
class Requests:
    """The questions as a server gets them: token ids where the target's tokenizer is here, else messages, which the server encodes."""

    asked: evaluate.Asked
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def turns(self) -> int:
        return max(len(question.turns) for question in self.asked.questions)

    def wave(self, turn: int, answers: dict[str, list[int] | None]) -> list[Request]:
        """The requests of one turn, of the questions whose earlier turns have answers. answers: ids by the prompt's id"""
        found = []
        for question in self.asked.questions:
            if len(question.turns) <= turn:
                continue
            names = [name_request(question, earlier) for earlier in range(turn)]
            before = [ids for name in names if (ids := answers.get(name)) is not None]
            if len(before) < turn or (turn and self.tokenizer is None):
                continue
            if self.tokenizer is None:
                arguments, protocol = self.asked.arguments, self.asked.protocol
                if question.turns[0].get("plain") or (protocol and protocol.chat != "target"):
                    raise ValueError(
                        "This protocol sends no messages but text: give target.name=, whose tokenizer encodes it."
                    )
                body = {"messages": question.turns[0]["messages"], **write_arguments(arguments)}
                found.append((name_request(question, turn), body))
                continue
            texts = [TextDecoder.of(self.tokenizer).text(ids) for ids in before]
            prompt = self.asked.prompt(question, turn, texts, self.tokenizer)
            found.append((name_request(question, turn), {"prompt": prompt.tokens}))
        return found

    def count(self, turns: Sequence[Turn]) -> list[AnswerCounts] | None:
        """What other countings need; None where the server does not say enough."""
        counts = referee.count_answers(turns)
        of = {name_request(each, turn): each for each in self.asked.questions for turn in range(len(each.turns))}
        if not counts:
            return None
        answers = [answer for turn in turns for answer in turn.answers]
        ends = [find_end(answer.ended, answer.sizes[-1] == 1) for answer in answers]
        numbers = [(round(one.num_emitted - one.num_rounds), round(one.num_rounds)) for one in counts]
        return [
            AnswerCounts(answer.prompt, of[answer.prompt].id, *both, end)
            for answer, both, end in zip(answers, numbers, ends)
        ]


def read_answers(rows: list[dict], level: int) -> dict[str, list[int] | None]:
    """Token ids of the plain answers of a level, or of the drafted ones where nothing answers plainly, by the prompt's id."""
    turns = [row.get("plain") or row["drafted"] for row in rows if row["requests"] == level]
    return {answer["prompt"]: answer["ids"] for turn in turns for answer in turn["answers"]}


@dataclass(frozen=True)
class TriedServer:
    """A server that was tried with a request. plain: what serves without drafts; first: the requests of first turns

    longest: drafts of a round; notes: what is to be known of it; settings: what its answers and speeds depend on
    """

    server: Server
    plain: Server | None
    requests: Requests
    first: list[Request]
    longest: int | None
    notes: list[str]
    settings: dict[str, Any]


def open_servers(chosen: Any, asked: evaluate.Asked, target: str | None, console: progress.Results) -> TriedServer:
    """engine= and plain=. target: the name of that of the head, if there is one. Raises ValueError for what cannot be measured."""
    server = find_server(chosen.engine, chosen, console)
    if asked.stop:
        server.body["stop"] = asked.stop
    requests = Requests(asked, find_tokenizer(chosen, server, target))
    first = requests.wave(0, {})
    check_first(server, requests, first[0])
    plain, longest, notes = probe(chosen, server, first[0], console)
    if "seed" not in server.body:
        notes.append("Requests above temperature 0 are sent without a seed, as this server drafts otherwise with one.")
    settings = {
        **{name: getattr(chosen, name) for name in ("engine", "max_new_tokens", "ignore_stop", "seed")},
        "plain": plain and (chosen.plain or SWITCHES[server.kind]),
        "target": f"{server.model} of {server.kind}",
        **dict.fromkeys(("fingerprint", "dtype")),
        "decode": asdict(chosen.decode.sampling()),
        **evaluate.describe_questions(asked, requests.tokenizer),
        "prompts": f"{chosen.prompts or asked.source} {digest(repr(first).encode())}",
    }
    return TriedServer(server, plain, requests, first, longest, notes, settings)


def find_server(url: str, chosen: Any, console: progress.Results) -> Server:
    """Raises ValueError for what is no server, or has no model of that name."""
    if "," in url:
        raise ValueError(f"{url}: one server is judged at a time, so give one URL.")
    sampling = chosen.decode.sampling()
    body = {"max_tokens": chosen.max_new_tokens, "temperature": sampling.temperature, "seed": chosen.seed}
    more = {"top_p": sampling.top_p, "top_k": sampling.top_k, "ignore_eos": chosen.ignore_stop or None}
    more["repetition_penalty"] = sampling.repetition_penalty if sampling.repetition_penalty != 1 else None
    body |= {name: value for name, value in more.items() if value is not None}  # OpenAI's servers refuse some of them
    server = Server(url, "", "", "", body, chosen.timeout, console.say)
    with server.open() as connection:
        (models,) = connection.client.describe_models()
    model = next((model for model in models if chosen.model in (None, model["id"])), None)
    if model is None:
        names = ", ".join(str(model["id"]) for model in models)
        raise ValueError(f"{url} has no model {chosen.model}, but {names}: give model= as it is called there.")
    kind = str(model.get("owned_by"))
    if kind == OURS and not sampling.greedy:
        del body["seed"]  # with one, drafts have a fixed shape, or there are none
    body |= {"stream": True, "stream_options": {"include_usage": True}, **FIELDS.get(kind, {})}
    return replace(server, model=str(model["id"]), kind=kind, root=str(model.get("root")), body=body)


def find_tokenizer(chosen: Any, server: Server, target: str | None) -> PreTrainedTokenizerBase | None:
    """The target's; None where it is not here."""
    name = chosen.target.name or target or server.root
    if not (chosen.target.name or target or Path(name, "tokenizer.json").is_file()):
        progress.note(
            "Prompts are sent as messages; with target.name= token ids are sent, which all servers read alike."
        )
        return None
    return load_tokenizer(name, trust_remote_code=chosen.target.trust_remote_code)


def check_first(server: Server, requests: Requests, first: Request) -> None:
    """Raises ValueError where the server has another tokenizer."""
    if requests.tokenizer is not None:
        with server.open() as connection:
            check_tokenizer(connection.client, server.model, requests.tokenizer, first[1]["prompt"])


def probe(
    chosen: Any, server: Server, question: Request, console: progress.Results
) -> tuple[Server | None, int | None, list[str]]:
    """A short request with drafts, and one without -> what serves plainly, drafts of a round, what is to be known of the server."""
    notes = []
    with server.open() as connection:
        turn = connection.serve([question], max_tokens=WARM_UP)
        drafts, longest = turn.drafts, find_longest([turn])
    if drafts is None:
        flag = FLAGS.get(server.kind, "it has no counters that are known here")
        notes.append(f"{server.url} says nothing about drafts, so tau cannot be had: {flag}.")
    elif not drafts:
        notes.append(f"{server.url} does not draft: tau is 1 by its own counters.")
    if chosen.plain:
        plain = find_server(chosen.plain, chosen, console)
    elif server.kind in SWITCHES and drafts:
        plain = replace(server, body=server.body | SWITCHES[server.kind])
    else:
        return None, longest, notes
    with plain.open() as connection:
        if not connection.serve([question], max_tokens=WARM_UP).drafts:
            return plain, longest, notes
    if chosen.plain:
        raise ValueError(
            f"plain={chosen.plain} drafts, too: give the URL of a server of the same model without drafts."
        )
    notes.append("This server cannot leave out drafts for a request: give plain=URL of one without, to compare speeds.")
    return None, longest, notes


def find_longest(turns: Sequence[Turn]) -> int | None:
    """The most drafts of a round; None where the server does not say."""
    said = [each for turn in turns for each in (turn.counted, *(answer.said for answer in turn.answers)) if each]
    return max((each.longest for each in said if each.longest), default=None)


# Measuring


def measure_missing(
    given: dict[str, Server | None], questions: list[Request], level: int, wave: int, results: Resumable
) -> None:
    """The groups of requests of a level and a turn of the questions that have no row: the same requests to each of the servers that are given, after a warm-up.

    Prompts are repeated where there are fewer than requests.
    """
    repeated = list(itertools.islice(itertools.cycle(questions), max(len(questions), level)))
    same = {"requests": level, "wave": wave}
    done = {row["turn"] for row in results.rows if same.items() <= {"wave": 0, **row}.items()}
    missing = [pair for pair in enumerate(split_turns(repeated, level)) if pair[0] not in done]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server.open(level)) for name, server in given.items() if server}
        for each in servers.values():
            each.serve(repeated[:level], max_tokens=WARM_UP)
        what = f"{level} requests at once"
        for number, turn in progress.track(missing, what, unit="requests", size=lambda pair: len(pair[1])):
            order = sorted(servers, reverse=number % 2 == 1)
            results.append({**same, "turn": number, **{name: asdict(servers[name].serve(turn)) for name in order}})
        if again := sum(each.client.repeated for each in servers.values()):
            progress.note(f"{what}: {again} were sent again, as their answers were lost or bad.")


def read_pairs(rows: list[dict], level: int) -> list[tuple[Turn, Turn | None]]:
    """The turns of a level, with drafts and plain."""
    chosen = sorted(
        (row for row in rows if row["requests"] == level), key=lambda row: (row.get("wave", 0), row["turn"])
    )
    return [(Turn.from_row(row["drafted"]), Turn.from_row(row["plain"]) if "plain" in row else None) for row in chosen]


def summarise(pairs: list[tuple[Turn, Turn | None]], seed: int) -> dict[str, Any]:
    """The figures of a level."""
    turns, both = [turn for turn, _ in pairs], [(turn, plain) for turn, plain in pairs if plain is not None]
    every = turns + [plain for _, plain in both]
    failed = [failure for turn in every for failure in turn.failed]
    for some in (turns, [plain for _, plain in both]):
        if some and not any(turn.answers for turn in some):
            raise ValueError(f"None of the requests was answered. {failed[0]['error']}")
    return {
        "answers": sum(len(turn.answers) for turn in turns),
        "failed": failed,
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
    return with_first_zero(drafter) if kind == VLLM and isinstance(drafter, MTP) else drafter


def compare_with_replay(chosen: Any, drafter: Head, prompts: dict[str, dict], turns: list[Turn]) -> dict[str, Any]:
    """tau of the head along the answers of a level, beside tau as served; at temperature 0 also where they part."""
    sampling, answers = chosen.decode.sampling(), [answer for turn in turns for answer in turn.answers]
    depth = find_longest(turns) or chosen.decode.depth
    drafting = replace(chosen.decode.drafting(TreeShape(depth, 1, depth)), rule="token")
    if not isinstance(drafter, Drafter) or not drafting.replayable(drafter, sampling):
        return {
            "verdict": f"a chain of {depth} of this head cannot be replayed with these settings: nothing is compared."
        }
    usable = [pair for pair in zip(answers, referee.count_answers(turns) or ()) if pair[0].ids and len(pair[0].ids) > 1]
    if not usable:
        return {
            "verdict": "the server gives no token ids, or no counts of each answer: nothing is compared with replay."
        }
    texts = [Written(prompts[answer.prompt]["prompt"], answer.ids or [], sampling.temperature) for answer, _ in usable]
    own, compared, differences = [], 0, []
    for (answer, _), each in zip(usable, replay.replay_texts(drafter, texts, depth=depth, what="replay")):
        (rounds, accepted), accept = each.counted, each.accept
        own.append(PromptCounts(rounds, rounds + float(accepted.sum())))
        if sampling.greedy and answer.said and answer.said.steps is not None:
            compared, steps = compared + 1, referee.walk(accept)
            if place := referee.first_difference(answer.said.steps, steps, accept.shape[1]):
                counted = {"served": answer.said.steps[place[0]], "replayed": steps[place[0]]}
                differences.append({"prompt": answer.prompt, "round": place[0], "token": place[1], **counted})
    names, served = [answer.prompt for answer, _ in usable], [count for _, count in usable]
    difference, span = tau_difference(referee.merge(names, served), referee.merge(names, own), seed=chosen.seed)
    same = sum(round(one.num_rounds) == round(other.num_rounds) for one, other in zip(served, own))
    found = {"depth": depth, "answers": len(own), "served_tau": tau(served), "replayed_tau": tau(own)}
    found |= {
        "difference": difference,
        "difference_ci": span,
        "same_number_of_rounds": same if sampling.greedy else None,
    }
    found |= {"compared_by_round": compared, "differences": differences}
    return {"verdict": say_verdict(found), **found}


def say_verdict(found: dict[str, Any]) -> str:
    """Whether the server drafts as the head was trained to, in some sentences."""
    served, own, (low, high), compared = (
        found[name] for name in ("served_tau", "replayed_tau", "difference_ci", "compared_by_round")
    )
    said = "served = trained"
    if (
        abs(served / own - 1) >= TOLERANCE
    ):  # above temperature 0 served tau is one draw, and replayed tau an expectation
        surely = low > 0 or high < 0
        said = (
            "served is NOT what was trained" if surely else "whether served = trained cannot be told from these answers"
        )
    said += f": tau {served:.3f} served, {own:.3f} replayed along the same {found['answers']} answers with chains of "
    said += f"{found['depth']} ({found['difference']:+.3f}, {low:+.3f} .. {high:+.3f})"
    if found["same_number_of_rounds"] is not None:
        said += f"; {found['same_number_of_rounds']} took as many rounds"
    if not found["differences"]:
        return said + (f"; all rounds of {compared} answers accept as many drafts." if compared else ".")
    first = min(found["differences"], key=lambda each: each["round"])
    said += f". {len(found['differences'])} of {compared} answers part, prompt {first['prompt']} first, with the draft for token "
    return said + f"{first['token']}: that round accepts {first['served']} drafts served, {first['replayed']} replayed."


def remark(level: dict[str, Any], *, greedy: bool) -> Iterator[str]:
    """What limits the figures of a level."""
    if failed := level["failed"]:
        yield f"{len(failed)} requests failed, first prompt {failed[0]['prompt']}: {failed[0]['error']}"
    if more := level["tokens_of_others"]:
        yield f"the server generated {more} tokens for others, or for requests that were sent again: its counters then do not count."
    if max(each["busy"] for each in (level["drafted"], level["plain"]) if each) > BUSY:
        yield "this client was busy most of the time, so speeds may be its own: measure from another machine."
    if greedy and (compared := level.get("compared_answers")):
        yield f"{level['same_answers']} of {compared} answers are the same with drafts and without."
    if "replay" in level:
        yield level["replay"]["verdict"]
