"""A running server: its model, its answers to several requests at once, and its answers without drafts."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from specdec.core import progress
from specdec.core.answer_text import TextDecoder
from specdec.core.option_types import Duration, Text
from specdec.core.resumable import digest_bytes
from specdec.core.sampling import Sampling
from specdec.engines.answers import check_tokenizer
from specdec.engines.client import BadAnswer, EngineClient, Event, GivenUp, Refused
from specdec.measuring import results
from specdec.measuring.measure import WARM_UP_TOKENS
from specdec.measuring.privacy import shorten_name
from specdec.measuring.questions import MeasureOptions, Question, QuestionSet, name_request
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import Counters, ServedAnswer, ServedBatch
from specdec.options.decoding import SamplingOptions
from specdec.target.model import load_tokenizer
from specdec.text import reading
from specdec.text.messages import write_arguments

SPECDEC, VLLM, LLAMA_CPP, SGLANG = "specdec", "vllm", "llamacpp", "sglang"  # `owned_by` of their models
TRANSFORMERS, OPENVINO = "transformers", "openvino"  # behind specdec/engines/front
EXTRA_FIELDS: dict[str, dict] = {  # of requests, so that a server says more
    **{kind: {"details": True, "return_token_ids": True} for kind in (SPECDEC, TRANSFORMERS, OPENVINO)},
    VLLM: {"return_token_ids": True},
    LLAMA_CPP: {"return_tokens": True, "verbose": True},
    SGLANG: {"return_token_ids": True, "return_spec_tokens_details": True},
}
PLAIN_FIELDS: dict[str, dict] = {  # of requests that are answered without drafts; newer llama.cpp ignores its own
    SPECDEC: {"speculate": False},
    TRANSFORMERS: {"speculate": False},
    LLAMA_CPP: {"speculative.n_max": 0},
}
PRESET = (VLLM, SGLANG, LLAMA_CPP)  # servers whose defaults are those of the model's folder, or limits of their own
UNLIMITED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}  # fields of requests to these above temperature 0
COUNTER_HINTS = {
    VLLM: "start it without --disable-log-stats, or with --per-request-spec-decode-metrics detailed",
    LLAMA_CPP: "start it with --metrics",
}
DEPTH_OPTIONS = {  # options for K drafts of a round
    SPECDEC: "proposer=head decode.depth={depth}",
    VLLM: '"num_speculative_tokens": {depth} in --speculative-config',
    SGLANG: "--speculative-num-steps {depth} --speculative-num-draft-tokens {depth} + 1",
}
PATIENCE_RATIO = 3  # an unreachable server ends the command after this many times `timeout=`
COUNTER_DELAY = 2.0  # seconds for which the counters of a server are awaited after its answers
REFUSED_STATUSES = (400, 413, 422)  # statuses of single requests that do not fit, such as a turn that is too long
# Options that change no answer
FREE = ("batch", "loads", "predicted", "timeout", "checkpoint", "control", "repeat", "flags", "machine")
Request = tuple[str, dict]  # the prompt's id, and the part of a request's body that holds it


class ServerOptions(MeasureOptions):
    """The server of a measurement, its requests, and how they are sampled."""

    engine: Text | None
    baseline: Text | None
    model: Text | None
    timeout: Duration
    decode: SamplingOptions


@dataclass(frozen=True)
class Server:
    """A model of a server.

    kind: `owned_by` of the model; root: its folder, empty where the server does not say
    body: fields that all requests share; timeout: seconds
    entry: the model's entry in /v1/models
    patience: multiple of `timeout` after which an unreachable server is given up
    """

    url: str
    model: str
    kind: str
    root: str
    body: dict
    timeout: float
    say: Callable[[str], None]
    entry: dict = field(default_factory=dict)
    patience: float = PATIENCE_RATIO

    @contextlib.contextmanager
    def open(self, in_flight: int = 1) -> Iterator["Connection"]:
        """A connection for up to `in_flight` requests at once."""
        minutes = self.timeout / 60
        limits: dict[str, Any] = {"in_flight": in_flight, "patience": self.patience * minutes, "longest": minutes}
        with contextlib.closing(EngineClient(self.url, say=self.say, **limits)) as client:
            yield Connection(self, client)


@dataclass(frozen=True)
class Connection:
    server: Server
    client: EngineClient

    def read_counters(self) -> Counters | None:
        """The counters of /metrics; None where there are none."""
        for _ in range(2):  # the server may have closed a connection
            with contextlib.suppress(httpx.HTTPError):
                answer = self.client.client.get(f"{self.client.urls[0]}/metrics")
                return referee.parse_counters(answer.text) if answer.status_code == 200 else None
        return None

    def read_document(self, path: str) -> dict[str, Any]:
        """The JSON object at a path; {} where there is none."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self.client.client.get(f"{self.client.urls[0]}/{path}")
            document = answer.json() if answer.status_code == 200 else {}
            return document if isinstance(document, dict) else {}
        return {}

    def send_requests(self, requests: Sequence[Request], **fields: Any) -> ServedBatch:
        """The answers to all requests, which are sent at once. fields: further fields of their bodies

        Raises ValueError where none is answered, unless the server refused all of them.
        """
        before, repeated = self.read_counters(), self.client.repeated
        start, computed = time.perf_counter(), time.process_time()
        futures = [self._submit(name, prompt | fields) for name, prompt in requests]
        answers, failed, unreachable = [], [], False
        for (name, _), future in zip(requests, futures):
            try:
                answers.append(future.result())
            except (GivenUp, Refused) as error:
                failed.append({"prompt": name, "error": str(error)})
                unreachable |= not isinstance(error, Refused) or error.status not in REFUSED_STATUSES
        seconds = time.perf_counter() - start
        client_share = (time.process_time() - computed) / seconds
        if not answers and (unreachable or fields):  # such as a turn that is too long: others may be answered
            raise ValueError(f"None of {len(requests)} requests was answered. {failed[0]['error']}")
        repeats = self.client.repeated - repeated
        return self._with_counters(ServedBatch(answers, failed, seconds, client_share, None, None, repeats), before)

    def _submit(self, name: str, fields: dict) -> Future[ServedAnswer]:
        path = "v1/chat/completions" if "messages" in fields else "v1/completions"
        body = {"model": self.server.model, **self.server.body, **fields}
        return self.client.pool.submit(self.client.stream, path, body, lambda events: read_answer(name, events))

    def _with_counters(self, batch: ServedBatch, before: Counters | None) -> ServedBatch:
        """The batch with the server's counts, once its counters have all tokens of the answers."""
        deadline = time.monotonic() + COUNTER_DELAY
        while before and (after := self.read_counters()):
            generated, counts = after.subtract(before)
            batch = replace(batch, generated=generated, server_counts=counts)
            if batch.foreign_tokens >= 0 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return batch


def read_answer(prompt: str, events: list[Event]) -> ServedAnswer:
    """An answer from its stream. Raises BadAnswer for one that is not whole."""
    stream = AnswerStream()
    try:
        for seconds, document in events:
            stream.read(seconds, document)
        server_counts = referee.read_answer([document for _, document in events])
    except (AttributeError, KeyError, TypeError) as error:
        raise BadAnswer(f"a stream of another form ({type(error).__name__}: {error})") from error
    if stream.finish is None or not stream.times or not (stream.num_tokens or stream.has_ids):
        raise BadAnswer("a stream without an answer, its finish_reason, or the number of its tokens")
    num_tokens, ids = stream.num_tokens or len(stream.ids), stream.ids if stream.has_ids else None
    first, last = stream.times[0], stream.times[-1]
    return ServedAnswer(
        prompt,
        num_tokens,
        first,
        last,
        ids,
        stream.sizes,
        server_counts,
        ended=stream.finish == "stop",
        prompt_tokens=stream.prompt_tokens,
    )


@dataclass
class AnswerStream:
    """The content of the events of an answer so far.

    sizes: token ids of each event with text; times: seconds of these events from the request on
    has_ids: whether all of these events have token ids
    """

    ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    has_ids: bool = True
    finish: str | None = None
    num_tokens: int = 0
    prompt_tokens: int | None = None

    def read(self, seconds: float, document: dict) -> None:
        """Adds an event."""
        usage, verbose = document.get("usage") or {}, document.get("__verbose") or {}
        self.num_tokens = usage.get("completion_tokens") or self.num_tokens
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        for choice in document.get("choices") or []:
            self.finish = choice.get("finish_reason") or self.finish
            self._add_tokens(seconds, find_text(choice), choice.get("token_ids", verbose.get("tokens")))

    def _add_tokens(self, seconds: float, text: str | None, ids: list[int] | None) -> None:
        if ids or text:
            self.times.append(seconds)
            self.sizes.append(len(ids or ()))
            self.ids += ids or ()
            self.has_ids &= ids is not None


def find_text(choice: dict) -> str | None:
    """The text of a choice in a stream of completions or of a chat."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content")


# Questions as requests


@dataclass(frozen=True)
class Requests:
    """The questions as a server gets them.

    They are token ids where the target's tokenizer is here, and else messages, which the server encodes.
    """

    question_set: QuestionSet
    tokenizer: PreTrainedTokenizerBase | None

    def make_requests(self, turn: int, ids_by_prompt: dict[str, list[int] | None]) -> list[Request]:
        """The requests of one turn of the questions whose earlier turns have answers. ids_by_prompt: ids of answers"""
        requests = []
        for question in self.question_set.questions:
            earlier = [ids_by_prompt.get(name_request(question, number)) for number in range(turn)]
            answers = [ids for ids in earlier if ids is not None]
            if len(question.turns) > turn and len(answers) == turn:
                fields = self._encode(question, turn, answers)
                requests += [(name_request(question, turn), fields)] if fields else []
        return requests

    def _encode(self, question: Question, turn: int, answers: list[list[int]]) -> dict | None:
        """The part of a request's body with the prompt; None for a later turn that cannot be encoded here."""
        if self.tokenizer is not None:
            decoder = TextDecoder.from_tokenizer(self.tokenizer)
            texts = [decoder.text(ids) for ids in answers]
            return {"prompt": self.question_set.make_prompt(question, turn, texts, self.tokenizer).tokens}
        if turn:
            return None
        if question.turns[0].get("plain") or self.question_set.chat != "target":
            raise ValueError("This protocol sends no messages but text: give target.name=, whose tokenizer encodes it.")
        return {"messages": question.turns[0]["messages"], **write_arguments(self.question_set.arguments)}


# Trying a server


@dataclass(frozen=True)
class TriedServer:
    """A server that was tried with a request.

    baseline: the server without drafts; None where nothing answers without drafts
    control: a second server without drafts, to compare answers; None: there is none
    first: requests of first turns; longest: drafts of a round, None where the server does not say
    notes: sentences on the server; settings: options and facts that its answers and speeds depend on
    """

    server: Server
    baseline: Server | None
    requests: Requests
    first: list[Request]
    longest: int | None
    notes: list[str]
    settings: dict[str, Any]
    control: Server | None = None

    @property
    def servers(self) -> list[Server]:
        """All servers that are asked."""
        return [server for server in (self.server, self.baseline, self.control) if server]


def try_server(
    options: ServerOptions,
    question_set: QuestionSet,
    target: str | None,
    console: progress.Results,
    *,
    control: str | None = None,
) -> TriedServer:
    """Tries engine=, baseline= and control=. target: name of the head's target; None without a head

    Raises ValueError for a server that cannot be measured.
    """
    assert options.engine is not None
    server = find_server(options.engine, options, question_set, console)
    tokenizer = find_tokenizer(options, server, target)
    requests = Requests(question_set, tokenizer)
    first = requests.make_requests(0, {})
    if tokenizer is not None:  # raises ValueError for another tokenizer of the server
        with server.open() as connection:
            check_tokenizer(connection.client, server.model, tokenizer, first[0][1]["prompt"])
    plain, longest, notes = probe_server(options, server, question_set, first[0], console)
    if "seed" not in server.body:
        notes.append("Requests above temperature 0 are sent without a seed, as this server drafts otherwise with one.")
    settings = {
        **results.describe_options(options, free_options=FREE),
        **question_set.describe(tokenizer),
        "prompts": f"{question_set.source} {digest_bytes(repr(first).encode())}",
        "decode": asdict(options.decode.make_sampling()),
        "target": f"{server.model} of {server.kind}",
        "baseline": plain and (options.baseline or PLAIN_FIELDS[server.kind]),
    }
    draft = server.entry.get("draft") or {}  # another head at the same URL is refused where the server names it
    settings |= {f"served {name}": draft[name] for name in ("checkpoint", "version") if draft.get(name)}
    second_plain = None
    if control is not None:
        second_plain = leave_out_drafts(find_server(control, options, question_set, console))
        check_kind("control", second_plain, server)
        check_plain(f"control={control}", second_plain, first[0])
    for name, plain_server in (("baseline", plain if options.baseline else None), ("control", second_plain)):
        if plain_server is not None:
            notes += compare_models(name, plain_server, server, tokenizer, first[0])
    return TriedServer(server, plain, requests, first, longest, notes, settings, second_plain)


def find_server(url: str, options: ServerOptions, question_set: QuestionSet, console: progress.Results) -> Server:
    """The server at a URL, with its model. Raises ValueError for several URLs, and for an unknown model."""
    if "," in url:
        raise ValueError(f"{url}: one server is judged at a time, so give one URL.")
    server = Server(url, "", "", "", {}, options.timeout, console.say)
    with server.open() as connection:
        (models,) = connection.client.describe_models()
    model = next((model for model in models if options.model in (None, model["id"])), None)
    if model is None:
        names = ", ".join(str(model["id"]) for model in models)
        raise ValueError(f"{url} has no model {options.model}, but {names}: give model= as it is called there.")
    kind = str(model.get("owned_by"))
    body = make_body(
        kind,
        options.decode.make_sampling(),
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        ignore_stop=options.ignore_stop,
        stop=question_set.stop,
    )
    root = str(model.get("root") or "")
    return replace(server, model=str(model["id"]), kind=kind, root=root, body=body, entry=model)


def make_body(
    kind: str,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    ignore_stop: bool = False,
    stop: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields that all requests to a server share. kind: see `Server`; stop: texts that end an answer"""
    body: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": sampling.temperature}
    if kind != SPECDEC or sampling.greedy:  # with a seed it would draft in a fixed shape, or not at all
        body["seed"] = seed
    if kind in PRESET and not sampling.greedy:
        body |= UNLIMITED
    has_penalty = kind in PRESET or sampling.repetition_penalty != 1
    optional = {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": ignore_stop or None,
        name_penalty(kind): sampling.repetition_penalty if has_penalty else None,
        "stop": list(stop) or None,
    }
    body |= {name: value for name, value in optional.items() if value is not None}  # OpenAI's servers refuse some
    return body | {"stream": True, "stream_options": {"include_usage": True}, **EXTRA_FIELDS.get(kind, {})}


def name_penalty(kind: str) -> str:
    """The field of a request's body with the repetition penalty."""
    return "repeat_penalty" if kind == LLAMA_CPP else "repetition_penalty"


def find_tokenizer(options: ServerOptions, server: Server, target: str | None) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer; None where it is not here."""
    name = options.target.name or target or server.root
    if not (options.target.name or target or (name and Path(name, "tokenizer.json").is_file())):
        progress.print_note(
            "Prompts are sent as messages; with target.name= token ids are sent, which all servers read alike."
        )
        return None
    return load_tokenizer(name, trust_remote_code=options.target.trust_remote_code)


def probe_server(
    options: ServerOptions, server: Server, question_set: QuestionSet, request: Request, console: progress.Results
) -> tuple[Server | None, int | None, list[str]]:
    """Sends a short request with drafts, and one without.

    Returns the server without drafts, the drafts of a round, and notes. Raises ValueError where baseline= drafts, too,
    or is another engine.
    """
    notes = []
    with server.open() as connection:
        batch = connection.send_requests([request], max_tokens=WARM_UP_TOKENS)
    longest = find_longest([batch])
    if batch.drafts is None:
        hint = COUNTER_HINTS.get(server.kind, "it has no counters that are known here")
        notes.append(f"{server.url} says nothing about drafts, so tau cannot be had: {hint}.")
    if options.baseline:
        baseline = leave_out_drafts(find_server(options.baseline, options, question_set, console))
    elif server.kind in PLAIN_FIELDS and (batch.drafts or server.kind != LLAMA_CPP):  # a short text may have no drafts
        baseline = leave_out_drafts(server)
    else:
        return None, longest, notes
    if options.baseline:
        check_kind("baseline", baseline, server)
        check_plain(f"baseline={options.baseline}", baseline, request)
    elif answers_with_drafts(baseline, request):
        notes.append(
            "This server cannot leave out drafts for a request: give baseline=URL of one without, to compare speeds."
        )
        return None, longest, notes
    return baseline, longest, notes


def leave_out_drafts(server: Server) -> Server:
    """The server with requests that are answered without drafts, as far as its kind has such requests."""
    return replace(server, body=server.body | PLAIN_FIELDS.get(server.kind, {}))


def answers_with_drafts(server: Server, request: Request) -> bool:
    """Whether the server drafts for a short request, as far as it says."""
    with server.open() as connection:
        return bool(connection.send_requests([request], max_tokens=WARM_UP_TOKENS).drafts)


def check_kind(option: str, plain: Server, server: Server) -> None:
    """Raises ValueError for a server without drafts of another engine. option: name of the option with its URL"""
    if plain.kind != server.kind:
        raise ValueError(
            f"{option}={plain.url} is a server of {plain.kind}, and engine={server.url} one of {server.kind}: answers "
            "and speeds of drafts are compared within one engine, so give that engine without drafts."
        )


def check_plain(option: str, server: Server, request: Request) -> None:
    """Raises ValueError for a server that drafts. option: the option with its URL, for the message"""
    if answers_with_drafts(server, request):
        raise ValueError(f"{option} drafts, too: give the URL of a server of the same model without drafts.")


def compare_models(
    option: str, plain: Server, server: Server, tokenizer: PreTrainedTokenizerBase | None, request: Request
) -> list[str]:
    """A note where a server without drafts calls its model otherwise. option: name of the option with its URL

    Raises ValueError for one with another tokenizer.
    """
    if tokenizer is not None:
        with plain.open() as connection, reading.name_location(f"{option}={plain.url}"):
            check_tokenizer(connection.client, plain.model, tokenizer, request[1]["prompt"])
    if Path(plain.model).name == Path(server.model).name:
        return []
    names = [shorten_name(model) for model in (plain.model, server.model)]
    return [f"{option}= serves {names[0]}, and engine= {names[1]}: make sure that they are the same."]


def find_longest(batches: Sequence[ServedBatch]) -> int | None:
    """The most drafts of a round; None where the server does not say."""
    return max((counts.longest or 0 for batch in batches for counts in batch.draft_counts), default=0) or None
