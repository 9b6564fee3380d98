"""OpenAI's /v1/completions over an engine that has no server: token ids in and out, greedily, one answer at a time.

It imports nothing but Python's own library, so it runs in the environment of any engine. Its answers have one event for
each round and `usage.speculation`, as those of `specdec serve`, so `specdec judge` counts rounds, not tokens.
"""

import abc
import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_BODY = 1 << 22  # bytes of a request
MAX_WAITING = 64  # requests that wait for their turn, at most
PATIENCE = 60  # seconds that a client may neither send nor read
END = object()  # mark behind the last round
# Fields that change a greedy answer, or none that can be given here, with their harmless values
HARMLESS: dict[str, tuple] = {
    "temperature": (0,), "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "stop": ([], ""),
    "suffix": ("",), "repetition_penalty": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "min_p": (0,),
}  # fmt: skip
FLAGS = ("stream", "ignore_eos", "speculate", "details", "return_token_ids")
UNREAD = ("top_p", "top_k", "seed", "user", "model", "prompt", "max_tokens", "stream_options")  # or read elsewhere


class Generator(abc.ABC):
    """An engine that answers greedily, one prompt at a time.

    owner: `owned_by` of its model: "transformers" or "openvino"; version: of the engine
    model: name or folder of the target; stop: token ids that end an answer
    max_length: tokens of a prompt and its answer; vocabulary: number of token ids
    longest: drafts of a round, at most; None: it does not draft
    drafted: drafts of the round that was yielded last; None where the engine does not say
    answer_drafts: drafts of the answer that ended last, for engines that say only this
    """

    owner: str
    version: str | None = None
    model: str
    stop: frozenset[int]
    max_length: int
    vocabulary: int
    longest: int | None = None
    drafted: int | None = None
    answer_drafts: int | None = None

    @abc.abstractmethod
    def generate(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        """Yields the tokens of each round of the target, first those of the prompt's own pass.

        An answer ends with a token of `stop`, or has `max_tokens` tokens.
        """

    def generate_plainly(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        """Yields as `generate`, without drafts."""
        raise FrontError("This engine cannot leave out drafts: start another one without them.")


class FrontError(Exception):
    """A request that cannot be answered. status: status code of HTTP"""

    def __init__(self, message: str, status: int = 400, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}

    def to_json(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None}}


def read_stop_tokens(folder: Path) -> frozenset[int]:
    """The end tokens in generation_config.json of a model's folder, or else in config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


class ClientGone(Exception):
    """Nobody waits for the answer any more. It ends an engine's call inside `put` of `yield_rounds`."""


def yield_rounds(call: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """Yields what call(put) puts, as it comes. `call` runs in another thread; its error is raised here.

    Where the rounds are not wanted any more, the next `put` raises ClientGone, and the call has ended afterwards.
    """
    rounds: queue.Queue = queue.Queue()
    gone = threading.Event()

    def put(round_: Any) -> None:
        if gone.is_set():
            raise ClientGone
        rounds.put(round_)

    def run() -> None:
        error = None
        try:
            call(put)
        except ClientGone:
            pass
        except Exception as caught:
            error = caught
        rounds.put((END, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while True:
            round_ = rounds.get()
            if isinstance(round_, tuple) and round_[0] is END:
                if round_[1] is not None:
                    raise round_[1]
                return
            yield round_
    finally:
        gone.set()
        thread.join()


class FrontAnswer:
    """A request, and the rounds of its answer so far.

    tokens: token ids; accepted: accepted drafts of each round behind the prompt's pass
    drafted: drafts of each round, None where the engine does not say
    """

    def __init__(self, generator: Generator, body: dict):
        self.generator, self.body = generator, body
        check_fields(generator, body)
        self.prompt, self.max_tokens = read_prompt(generator, body)
        self.stop = set() if body.get("ignore_eos") else set(generator.stop)
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self.drafted: list[int | None] = []
        self.common = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}

    @property
    def finish(self) -> str | None:
        """The reason of the end; None before it."""
        if self.tokens and self.tokens[-1] in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def yield_rounds(self) -> Iterator[tuple[list[int], dict]]:
        """Yields the tokens of each round, and its counts. An answer that an engine ends too early is an error."""
        speculate = self.body.get("speculate", True) or self.generator.longest is None
        run = self.generator.generate if speculate else self.generator.generate_plainly
        self.generator.drafted = self.generator.answer_drafts = None
        start = time.perf_counter()
        with contextlib.closing(run(self.prompt, self.max_tokens, self.stop)) as rounds:  # type: ignore[type-var]
            for round_ in rounds:
                tokens = self._cut_round(round_)
                seconds, start = time.perf_counter() - start, time.perf_counter()
                yield tokens, self._count_round(tokens, seconds)
                if self.finish:
                    break
            else:
                raise FrontError(f"The engine ended an answer after {len(self.tokens)} tokens.", 500)
            next(rounds, None)  # the engine's last counts come behind its last round

    def _cut_round(self, tokens: list[int]) -> list[int]:
        """The tokens up to the answer's end."""
        tokens = tokens[: self.max_tokens - len(self.tokens)]
        last = next((place for place, token in enumerate(tokens) if token in self.stop), len(tokens))
        return tokens[: last + 1]

    def _count_round(self, tokens: list[int], seconds: float) -> dict:
        first = not self.tokens
        self.tokens += tokens
        if first and len(tokens) <= 1:  # the prompt's own pass; an engine that drafts there has a round more
            return {"accepted": 0, "drafted": None, "milliseconds": 1e3 * seconds}
        self.accepted.append(max(0, len(tokens) - 1))
        self.drafted.append(self.generator.drafted)
        return {"accepted": self.accepted[-1], "drafted": self.drafted[-1], "milliseconds": 1e3 * seconds}

    def count_usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, and the counts of drafts in the words of `specdec serve`."""
        rounds = len(self.accepted)
        positions = range(1, max(self.accepted, default=0) + 1)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.tokens),
            "total_tokens": len(self.prompt) + len(self.tokens),
            "speculation": {
                "rounds": rounds,
                "drafted": self._count_drafts(),
                "accepted": sum(self.accepted),
                "accepted_by_position": [sum(map(least.__le__, self.accepted)) for least in positions],
                "tau": (len(self.tokens) - 1) / rounds if rounds else None,
            },
        }

    def _count_drafts(self) -> int | None:
        """The drafts of all rounds; None where the engine does not say."""
        if self.generator.answer_drafts is not None or self.generator.longest is None:
            return self.generator.answer_drafts or 0
        numbers = [num for num in self.drafted if num is not None]
        return sum(numbers) if len(numbers) == len(self.drafted) else None

    def write_event(self, tokens: list[int] | None, **fields: Any) -> dict:
        """A document. tokens: ids of its choice; None in one without a choice"""
        choices = []
        if tokens is not None:
            ids = {"token_ids": tokens} if self.body.get("return_token_ids") else {}
            choices = [{"index": 0, "text": "", **ids, "logprobs": None, "finish_reason": self.finish}]
        return {**self.common, "model": self.generator.model, "choices": choices, **fields}


def check_fields(generator: Generator, body: dict) -> None:
    """Raises FrontError for the first field that cannot be followed."""
    if body.get("model") not in (None, generator.model):
        raise FrontError(f"There is no model {body['model']!r} here, but {generator.model!r}.", 404)
    for name, value in body.items():
        if name in HARMLESS and value is not None and not is_harmless(name, value):
            raise FrontError(f"This server answers greedily and cannot do {name}={value!r}: leave it out.")
        if name not in (*HARMLESS, *FLAGS, *UNREAD):
            raise FrontError(f"There is no field {name!r} here.")
        if name in FLAGS and not isinstance(value, bool | None):
            raise FrontError(f"{name}={value!r} must be true or false.")
    if not isinstance(body.get("stream_options"), dict | None):
        raise FrontError(f"stream_options={body['stream_options']!r} must be an object.")
    if body.get("temperature") is None:
        raise FrontError("This server answers greedily: give temperature 0.")


def is_harmless(name: str, value: Any) -> bool:
    """Whether a value is that of a field which is left out. false is no number."""
    return any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in HARMLESS[name]
    )


def read_prompt(generator: Generator, body: dict) -> tuple[list[int], int]:
    """The prompt's token ids, and the most tokens of the answer. Raises FrontError for what cannot be answered."""
    prompt, size = body.get("prompt"), generator.vocabulary
    if not (isinstance(prompt, list) and prompt and all(is_number(token, 0, size - 1) for token in prompt)):
        raise FrontError(f"prompt must be the token ids of one prompt, from 0 to {size - 1}; texts are not read.")
    room = generator.max_length - len(prompt)
    max_tokens = room if body.get("max_tokens") is None else body["max_tokens"]
    if not is_number(max_tokens, 1, room):
        raise FrontError(
            f"max_tokens={max_tokens!r} beside a prompt of {len(prompt)} tokens: "
            f"the target has room for {generator.max_length}."
        )
    return prompt, max_tokens


def is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


class Front(ThreadingHTTPServer):
    """The server of one engine. Requests are answered one after the other."""

    daemon_threads = True

    def __init__(self, generator: Generator, host: str, port: int, max_waiting: int = MAX_WAITING):
        super().__init__((host, port), Handler)
        self.generator, self.max_waiting = generator, max_waiting
        self.turn, self.guard, self.num_waiting = threading.Lock(), threading.Lock(), 0

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    @contextlib.contextmanager
    def take_turn(self) -> Iterator[None]:
        """Waits until the engine is free, and holds it. Raises FrontError where too many wait."""
        with self.guard:
            if self.num_waiting > self.max_waiting:
                message = f"{self.max_waiting} requests are waiting already: ask again later."
                raise FrontError(message, 429, {"Retry-After": "1"})
            self.num_waiting += 1
        try:
            with self.turn:
                yield
        finally:
            with self.guard:
                self.num_waiting -= 1

    def describe_model(self) -> dict:
        generator = self.generator
        draft = {"drafts": generator.longest, "takes_weights": False}
        common = {"id": generator.model, "object": "model", "owned_by": generator.owner, "root": generator.model}
        return {**common, "version": generator.version, "max_model_len": generator.max_length, "draft": draft}


class Handler(BaseHTTPRequestHandler):
    server: Front
    began = False  # whether a stream has begun
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    disable_nagle_algorithm = True  # an event goes out when it is written

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"object": "list", "data": [self.server.describe_model()]})
        elif self.path == "/health":
            self._send({"status": "ok", "waiting": self.server.num_waiting})
        else:
            self._refuse_path()

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path == "/v1/chat/completions":
                raise FrontError("This server takes token ids, and no messages: send a prompt to /v1/completions.")
            if self.path != "/v1/completions":
                self._refuse_path()
                return
            answer = FrontAnswer(self.server.generator, body)
            with self.server.take_turn():
                self._answer(answer)
        except FrontError as error:
            self._send(error.to_json(), error.status, error.headers)

    def _read_body(self) -> dict:
        """The body as a JSON object. Raises FrontError for another one."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            raise FrontError(f"Send a body with its Content-Length, at most {MAX_BODY} bytes.", 413)
        content = self.rfile.read(int(length))
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise FrontError(f"The body is not JSON: {error}.") from None
        if not isinstance(body, dict):
            raise FrontError("The body must be a JSON object.")
        return body

    def _answer(self, answer: FrontAnswer) -> None:
        """Answers whole, or as a stream whose errors are events. Nothing is left to do where the client has gone."""
        streams, self.began = answer.body.get("stream"), False
        try:
            for tokens, counts in answer.yield_rounds():
                if streams:
                    self._send_round(answer, tokens, counts)
        except ClientGone:
            self.close_connection = True
        except Exception as error:
            refused = error if isinstance(error, FrontError) else FrontError(describe_error(error), 500)
            if not self.began:
                raise refused from error
            self._end_stream(refused.to_json())
        else:
            usage = answer.count_usage()
            if not streams:
                self._send(answer.write_event(answer.tokens, usage=usage))
            elif answer.body.get("details") or (answer.body.get("stream_options") or {}).get("include_usage"):
                self._end_stream(answer.write_event(None, usage=usage), "[DONE]")
            else:
                self._end_stream("[DONE]")

    def _send_round(self, answer: FrontAnswer, tokens: list[int], counts: dict) -> None:
        if not self.began:
            self._begin_stream()
        self.began = True
        self._send_event(answer.write_event(tokens, **({"round": counts} if answer.body.get("details") else {})))

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        with contextlib.suppress(OSError):  # the next event says it
            self.end_headers()

    def _end_stream(self, *events: dict | str) -> None:
        try:
            for event in events:
                self._send_event(event)
            self._write(b"0\r\n\r\n")
        except ClientGone:
            self.close_connection = True

    def _send_event(self, event: dict | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        content = f"data: {text}\n\n".encode()
        self._write(b"%x\r\n%b\r\n" % (len(content), content))

    def _write(self, content: bytes) -> None:
        try:
            self.wfile.write(content)
        except OSError:
            raise ClientGone from None

    def _send(self, document: dict, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(document).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
            for name, value in fields.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def _refuse_path(self) -> None:
        error = FrontError(f"There is no {self.command} {self.path} here; see /v1/models and /v1/completions.", 404)
        self._send(error.to_json(), error.status)

    def log_message(self, *_: Any) -> None:
        """Prints nothing: a line for each request would hide what the engine says."""


def describe_error(error: Exception) -> str:
    return f"The engine failed: {type(error).__name__}: {' '.join(str(error).split())}"


def serve(generator: Generator, host: str, port: int) -> None:
    """Serves until the process is stopped. The first line of its output has the URL."""
    with Front(generator, host, port) as running, contextlib.suppress(KeyboardInterrupt):
        print(running.url, flush=True)
        running.serve_forever()
