"""HTTP: OpenAI's interface, the state of the server and the page, in front of the engine."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from specdec.core.answer_text import StoppedText, StopStrings, TextDecoder, TextStream
from specdec.core.constraint import Constraint
from specdec.core.generation import Ends, count_rounds_reaching
from specdec.core.wording import format_count
from specdec.text import token_text
from specdec.tools.grammar.grammar import Grammar
from specdec.tools.server.engine import Engine
from specdec.tools.server.lane import End, Event, Job, ServedDrafter, ServedRound
from specdec.tools.server.protocol import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    RequestSettings,
    WeightsRequest,
    parse_request,
)
from specdec.tools.server.record import Exchange, Recorder
from specdec.tools.server.weights import WeightsFolder

MAX_BODY = 1 << 22  # bytes of a request: above the text of any prompt that a target can read
NO_RETRY = {"x-should-retry": "false"}  # header for OpenAI's clients, which otherwise ask again after such an error


@dataclass(frozen=True)
class ServerContext:
    """The parts of the server, and its limits.

    tokenizer: tokenizer for the thread of the event loop; engine_tokenizer: a copy of it for the engine's thread
    encode_chat: function of messages and of the fields of a row that say how they are rendered. Returns the token ids,
        and these fields with the server's defaults. Raises ValueError if the template refuses them.
    compile_grammar: raises ValueError for a grammar that cannot be used
    stop: token ids that end an answer
    model: name of the target, which requests may give
    max_length: tokens of a prompt and its answer; timeout: seconds of a request
    note_length: function that is called with the tokens of each prompt
    render_page: function of what drafts. Returns the HTML of the live page
    recorder: writer of answered requests; None: nothing is recorded
    weights: folder of heads that may be loaded; None: none may be
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    engine_tokenizer: PreTrainedTokenizerBase
    encode_chat: Callable[[list[dict], dict[str, Any]], tuple[list[int], dict[str, Any]]]
    compile_grammar: Callable[[Grammar], Constraint | None]
    stop: frozenset[int]
    model: str
    max_length: int = 4096
    timeout: float = 600.0
    note_length: Callable[[int], object] = lambda length: None
    render_page: Callable[[ServedDrafter], str] = lambda drafter: drafter.title
    recorder: Recorder | None = None
    weights: WeightsFolder | None = None

    @cached_property
    def decoder(self) -> TextDecoder:
        return TextDecoder.from_tokenizer(self.tokenizer)

    @cached_property
    def engine_decoder(self) -> TextDecoder:
        return TextDecoder.from_tokenizer(self.engine_tokenizer)


@dataclass(eq=False)
class Answer:
    """An answer on its way from the engine to a client."""

    served: ServerContext
    settings: RequestSettings
    job: Job
    text: StoppedText
    events: asyncio.Queue[Event]
    rendering: dict[str, Any]  # template arguments and tools of the prompt, as fields of a row
    recorded_as: str | None = None  # id of its row; None: it is not recorded
    text_so_far: str = ""

    async def read_pieces(self) -> AsyncIterator[tuple[list[str], ServedRound | None, str | None]]:
        """Yields the text of each token, the round that they came from, and at the end the reason of the end.

        Raises RequestError if the request failed.
        """
        while True:
            event = await self.events.get()
            if isinstance(event, End):
                if event.reason in ("timeout", "error"):
                    status = 504 if event.reason == "timeout" else 500
                    raise RequestError(event.message, status=status, headers=NO_RETRY)
                remaining = self.text.end()
                self.text_so_far += remaining
                self._record(event.reason)
                yield [remaining], None, event.reason
                return
            ends = self.job.ends.tokens
            pieces = ["" if token in ends else self.text.add(token) for token in event.tokens]
            self.text_so_far += "".join(pieces)
            yield pieces, event, None

    def _record(self, reason: str) -> None:
        recorder, settings, job = self.served.recorder, self.settings, self.job
        if self.recorded_as is None or recorder is None:
            return
        generation, grammar = job.request.generation, settings.grammar()
        (tokens,), (accepted,) = generation.tokens, generation.accepted
        drafter = job.drafter or ServedDrafter()
        fields: dict[str, Any] = {
            "id": self.recorded_as,
            "finish": reason,
            "seed": settings.seed,
            "grammar": grammar and grammar.to_row(),
            "head": drafter.checkpoint,
            "head_version": drafter.version,
            **self.rendering,
        }
        exchange = Exchange(
            job.prompt + tokens,
            len(job.prompt),
            job.sampling,
            accepted,
            sum(generation.drafted),
            fields,
            self.text_so_far,
            messages=settings.list_messages() if isinstance(settings, ChatRequest) else None,
            conversation=(settings.metadata or {}).get("conversation"),
        )
        recorder.record(exchange)

    def count_usage(self) -> dict[str, Any]:
        """OpenAI's `usage` with the counts of drafts. The answer must have ended, as the engine counts until then."""
        generation = self.job.request.generation
        (tokens,), (accepted,), drafted = generation.tokens, generation.accepted, sum(generation.drafted)
        shape = self.job.shape if self.job.speculate else None  # words on drafts that a seed changes
        return {
            "prompt_tokens": len(self.job.prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(self.job.prompt) + len(tokens),
            "speculation": {
                "rounds": len(accepted),
                "drafted": drafted,
                "accepted": sum(accepted),
                "accepted_by_position": count_rounds_reaching(accepted, max(accepted, default=0)),
                "tau": (len(tokens) - 1) / len(accepted) if accepted else None,
                **({} if shape is None else {"shape": shape}),
            },
        }


class AnswerForm:
    """The form of answers to chats, or to prompts."""

    def __init__(self, chat: bool, model: str):
        self.chat, self.model = chat, model
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def write_whole(self, text: str, reason: str, usage: dict, ids: dict) -> dict:
        """The answer as one document. ids: further fields of the choice"""
        choice = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self.write("chat.completion", choice | ids, reason, usage=usage)

    def write_chunk(self, text: str | None, reason: str | None = None, ids: dict | None = None, **fields: Any) -> dict:
        """A document of a stream. text: None in one without a choice; ids: further fields of the choice"""
        if text is None:
            return self.write("chat.completion.chunk", None, reason, **fields)
        delta = {"content": text} if text else {}
        choice: dict = {"delta": delta} if self.chat else {"text": text}
        return self.write("chat.completion.chunk", choice | (ids or {}), reason, **fields)

    def write(self, kind: str, choice: dict | None, reason: str | None, **fields: Any) -> dict:
        """A document. kind: `object` of a chat; choice: its fields, None in a document without a choice"""
        choices = [] if choice is None else [{"index": 0, **choice, "logprobs": None, "finish_reason": reason}]
        kind = kind if self.chat else "text_completion"
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**common, "choices": choices, **fields}


def make_app(served: ServerContext) -> Starlette:
    """The application, with which the engine starts and stops."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.engine.start()
        yield
        await asyncio.to_thread(served.engine.stop)

    async def page(_: Request) -> Response:
        return HTMLResponse(served.render_page(served.engine.drafts.drafter))

    async def health(_: Request) -> Response:
        engine = served.engine
        state: dict[str, Any] = {
            "status": "ok" if engine.alive else "dead",
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "draft_version": engine.drafts.drafter.version,
        }
        if served.recorder:
            state["recording"] = not served.recorder.stopped
        return JSONResponse(state, 200 if engine.alive else 503)

    async def models(_: Request) -> Response:
        model = {"id": served.model, "object": "model", "owned_by": "specdec", "max_model_len": served.max_length}
        model["rows"] = served.engine.plain.max_requests
        model["draft"] = {**served.engine.drafts.drafter.to_json(), "takes_weights": served.weights is not None}
        return JSONResponse({"object": "list", "data": [model]})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", partial(_complete, served, ChatRequest), methods=["POST"]),
            Route("/v1/completions", partial(_complete, served, CompletionRequest), methods=["POST"]),
            Route("/v1/draft_weights", partial(_load_weights, served), methods=["POST"]),
            Route("/tokenize", partial(_tokenize, served), methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={RequestError: _refuse, 404: _refuse_path, 405: _refuse_path},
    )


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.to_json(), error.status, headers=error.headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = (
        f"There is no {request.method} {request.url.path} here; see /v1/models, /v1/chat/completions, /v1/completions."
    )
    return JSONResponse(RequestError(message, status=status).to_json(), status)


async def _tokenize(served: ServerContext, request: Request) -> Response:
    """The token ids of the prompt that messages become, as vLLM's path of that name gives them."""
    tokens, _ = _encode_prompt(served, parse_request(ChatRequest, await _read_body(request)))
    return JSONResponse({"tokens": tokens, "count": len(tokens)})


async def _complete(served: ServerContext, kind: type[RequestSettings], request: Request) -> Response:
    """Answers a request of either kind, whole or as a stream."""
    settings = parse_request(kind, await _read_body(request))
    grammar = settings.grammar()
    # In a thread of its own, as compiling may take a second
    constraint = await asyncio.to_thread(_make_constraint, served, grammar) if grammar else None
    answer = _queue_request(served, settings, constraint)
    form = AnswerForm(isinstance(settings, ChatRequest), served.model)
    answer.recorded_as = form.id if settings.store is not False else None
    if settings.stream:
        return StreamingResponse(_write_stream(answer, form), media_type="text/event-stream")
    client_gone = asyncio.ensure_future(_wait_until_gone(request))
    whole = asyncio.ensure_future(_write_whole(answer, form))
    try:
        await asyncio.wait({client_gone, whole}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await whole) if whole.done() else Response(status_code=499)
    finally:
        client_gone.cancel()
        whole.cancel()
        served.engine.give_up(answer.job)


async def _load_weights(served: ServerContext, request: Request) -> Response:
    """Loads a head that drafts from now on."""
    if served.weights is None:
        raise RequestError("This server takes no weights: start it with allow_weights=FOLDER.", status=403)
    weights = parse_request(WeightsRequest, await _read_body(request))
    seconds = await asyncio.to_thread(served.weights.load, weights.folder, weights.version)
    return JSONResponse({"version": weights.version, "seconds": seconds})


async def _read_body(request: Request) -> bytes:
    """The body of a request. Raises RequestError for another type than JSON, and early for one that is too long."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("Send the body with the header Content-Type: application/json.", status=415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise RequestError(f"The body is longer than the {MAX_BODY} bytes that this server takes.", status=413)
    return bytes(body)


async def _wait_until_gone(request: Request) -> None:
    """Waits until the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _queue_request(served: ServerContext, settings: RequestSettings, constraint: Constraint | None) -> Answer:
    """Queues a request. Raises RequestError for one that cannot be answered, and for a full queue."""
    if settings.model not in (None, served.model):
        raise RequestError(
            f"There is no model {settings.model!r} here, but {served.model!r}.", status=404, parameter="model"
        )
    prompt, rendering = _encode_prompt(served, settings)
    tokens_left = served.max_length - len(prompt)
    if tokens_left < 1 or (settings.token_limit or 0) > tokens_left:
        new_ones = f" and {settings.token_limit} new ones" if settings.token_limit else ""
        raise RequestError(
            f"A prompt of {format_count(len(prompt), 'token')}{new_ones} exceeds the {served.max_length} tokens "
            "that this server allows "
            "(max_length=).",
            parameter="max_tokens" if tokens_left >= 1 else "messages",
        )
    served.note_length(len(prompt))
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(
        prompt,
        settings.token_limit or tokens_left,
        settings.sampling(),
        _make_ends(served, settings),
        deliver,
        seed=settings.seed,
        speculate=settings.speculate,
        deadline=time.monotonic() + served.timeout,
        constraint=constraint,
    )
    with refuse_errors(None):
        queued = served.engine.submit(job)
    if not queued:
        raise RequestError(
            f"{served.engine.max_waiting} requests are waiting already: ask again later.",
            status=429,
            headers={"Retry-After": "1"},
        )
    before = prompt if isinstance(settings, CompletionRequest) else ()
    text = StoppedText(TextStream(served.decoder, before), settings.stop_strings)
    return Answer(served, settings, job, text, events, rendering)


@contextlib.contextmanager
def refuse_errors(parameter: str | None) -> Iterator[None]:
    """Within, a ValueError becomes a RequestError. parameter: field of the request that is wrong"""
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), parameter=parameter) from None


def _make_ends(served: ServerContext, settings: RequestSettings) -> Ends:
    """The ends of an answer. Raises RequestError for a stop string that no answer's text can hold."""
    tokens = frozenset[int]() if settings.ignore_eos else served.stop
    if not settings.stop_strings:
        return Ends(tokens)
    continues = isinstance(settings, CompletionRequest)
    with refuse_errors("stop"):
        return Ends(tokens, StopStrings(settings.stop_strings, served.engine_decoder, continues=continues))


def _make_constraint(served: ServerContext, grammar: Grammar) -> Constraint | None:
    """The constraint of a new answer. Raises RequestError for a grammar that cannot be used."""
    with refuse_errors("response_format"):
        return served.compile_grammar(grammar)


def _encode_prompt(served: ServerContext, settings: RequestSettings) -> tuple[list[int], dict[str, Any]]:
    """The prompt's token ids, at least one, and the template arguments and tools that made it, as fields of a row.

    Raises RequestError for a prompt that cannot be encoded.
    """
    if isinstance(settings, ChatRequest):
        if not served.tokenizer.chat_template:
            raise RequestError(
                f"{served.model} has no chat template, so it takes no messages: send a prompt to /v1/completions.",
                parameter="messages",
            )
        with refuse_errors("messages"):
            return served.encode_chat(settings.list_messages(), settings.template_row())
    assert isinstance(settings, CompletionRequest)
    tokens = settings.prompt
    if isinstance(tokens, str):
        with refuse_errors("prompt"):
            tokens = token_text.encode_text(served.tokenizer, tokens)
    size = token_text.count_ids(served.tokenizer)
    if not tokens or not all(0 <= token < size for token in tokens):
        raise RequestError(
            f"prompt must be one text that is not empty, or token ids from 0 to {size - 1}.", parameter="prompt"
        )
    return tokens, {}


async def _write_whole(answer: Answer, form: AnswerForm) -> dict:
    """The whole answer as one document."""
    async for _, _, reason in answer.read_pieces():
        if reason is not None:
            ids = {"token_ids": answer.job.request.generation.tokens[0]} if answer.settings.return_token_ids else {}
            return form.write_whole(answer.text_so_far, reason, answer.count_usage(), ids)
    raise AssertionError("an answer ends with a reason")


async def _write_stream(answer: Answer, form: AnswerForm) -> AsyncIterator[str]:
    """Yields server-sent events. The request is given up if the client leaves."""
    settings = answer.settings
    try:
        if form.chat:
            opening = {"delta": {"role": "assistant", "content": ""}}
            yield _format_event(form.write("chat.completion.chunk", opening, None))
        async for pieces, round_, reason in answer.read_pieces():
            chunk = _make_chunk(settings, form, pieces, round_, reason)
            if chunk is not None:
                yield _format_event(chunk)
        if settings.details or (settings.stream_options and settings.stream_options.include_usage):
            yield _format_event(form.write_chunk(None, usage=answer.count_usage()))
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield _format_event(error.to_json())
    finally:
        answer.served.engine.give_up(answer.job)


def _format_event(document: dict) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _make_chunk(
    settings: RequestSettings, form: AnswerForm, pieces: list[str], round_: ServedRound | None, reason: str | None
) -> dict | None:
    """The document of a stream for a round, or for the end with its reason; None where it would say nothing."""
    text = "".join(pieces)
    fields: dict[str, Any] = {}
    ids: dict[str, Any] = {}
    if settings.details and round_:  # for the live page
        counts = {"accepted": round_.accepted, "drafted": round_.drafted, "milliseconds": round_.milliseconds}
        fields["round"] = {"tokens": pieces, **counts}
    if settings.return_token_ids:
        ids["token_ids"] = round_.tokens if round_ else []
    if text or reason or fields or (ids and round_):
        return form.write_chunk(text, reason, ids, **fields)
    return None
