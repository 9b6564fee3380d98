"""Inference servers over HTTP: a bounded number of requests in flight, sent again when an answer is lost or bad.

vLLM and every other server with OpenAI's interface (https://platform.openai.com/docs/api-reference) can be used.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx

from specdec.core.resumable import digest
from specdec.core.shards import is_cached
from specdec.engines import loopback
from specdec.target.fingerprint import Fingerprint
from specdec.target.model import Target

Result = TypeVar("Result")
Event = tuple[float, dict]  # seconds since the request was sent, and the document
TRIES = 5  # of one request whose answers are bad
LONGEST_PAUSE = 10.0  # seconds between two tries
LONGEST_WAIT = 60.0  # seconds that a server may ask to wait, with Retry-After
CONNECTING = 10.0  # seconds
IDLE = 2.0  # seconds for which a connection is kept; servers close theirs after five
START = (
    "Start one with python scripts/launch_engine.py, or give the URL of one that runs, such as http://localhost:8000."
)


class BadAnswer(ValueError):
    """An answer that cannot be used. The same request may have a better one next time, after `pause` seconds."""

    pause = 0.0


class GivenUp(ValueError):
    """A request that had TRIES bad answers in a row."""


class Refused(ValueError):
    """A request that the server does not understand or does not allow (status 4xx)."""

    status = 0  # where it is known


class EngineClient:
    """One or several servers with the same model, used in turn.

    urls: comma list such as http://localhost:8000, with or without /v1
    in_flight: requests that are under way at once
    patience: minutes without any answer after which a request gives up; a server that was restarted meanwhile is used again
    longest: minutes that one answer may take before the request is sent again; None: no limit
    say: prints a sentence, when servers stop to answer and when they answer again
    Raises ValueError, here and in every request, with what to do. A request that a server refuses raises Refused.
    """

    def __init__(
        self,
        urls: str,
        *,
        in_flight: int = 16,
        patience: float = 10.0,
        longest: float | None = None,
        say: Callable[[str], None] = print,
    ):
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
        self.urls = [_base_url(url) for url in urls.split(",")]
        self.in_flight, self.patience, self.say = in_flight, patience, say
        key = os.environ.get("OPENAI_API_KEY")
        self.client = httpx.Client(
            **loopback.client_options(*self.urls),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None if longest is None else 60 * longest, connect=CONNECTING),
            limits=httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight, keepalive_expiry=IDLE),
            event_hooks={"request": [lambda request: request.extensions.update(trace=self._trace)]},
        )
        self.pool = ThreadPoolExecutor(in_flight, "engine")
        self.turns = itertools.cycle(self.urls)
        self.closed = threading.Event()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.silent: set[str] = set()  # servers that did not answer last time
        self.repeated = 0  # requests that were sent again
        self.guard = threading.Lock()

    def submit(self, path: str, body: dict, read: Callable[[dict], Result]) -> "Future[Result]":
        """`post` in another thread."""
        return self.pool.submit(self.post, path, body, read)

    def post(self, path: str, body: dict, read: Callable[[dict], Result]) -> Result:
        """The result of POST `path`, such as v1/completions.

        read: makes the result of the answer's JSON; raises BadAnswer for an answer that must be requested again
        """
        return self._repeat(lambda url: read(self._send(url, path, body)))

    def stream(self, path: str, body: dict, read: Callable[[list[Event]], Result]) -> Result:
        """`post` for an answer that comes as server-sent events, each with the seconds since the request was sent."""
        return self._repeat(lambda url: read(self._receive(url, path, body)))

    def _repeat(self, ask: Callable[[str], Result]) -> Result:
        """What `ask` makes of a server's URL, asked again where an answer is lost or bad. Raises GivenUp."""
        begun, bad = time.monotonic(), 0
        for number in itertools.count():
            with self.guard:
                url = next(self.turns)
                self.repeated += number > 0
            pause = 0.0
            try:
                result = ask(url)
            except httpx.TransportError as error:
                if number == 0 and isinstance(error, httpx.RemoteProtocolError) and not self.closed.is_set():
                    continue  # servers close connections that were idle
                self._lost(url, error, begun)
            except BadAnswer as error:
                begun, bad, pause = time.monotonic(), bad + 1, error.pause
                if bad == TRIES:
                    raise GivenUp(f"{url} gave {TRIES} bad answers in a row. The last one: {error}") from error
            else:
                self._change(url, silent=False)
                return result
            usual = min(LONGEST_PAUSE, 0.25 * 2 ** min(number // len(self.urls), 16))
            if self.closed.wait(max(pause, usual)):
                break
        raise ValueError("The client of the engine was closed.")

    def describe_models(self) -> list[list[dict]]:
        """What each server says about its models: `id`, and vLLM also `max_model_len`.

        Raises ValueError at once if a server does not answer.
        """
        found = []
        for url in self.urls:
            try:
                answer = self.client.get(f"{url}/v1/models")
                if answer.status_code == 401:
                    raise Refused(f"{url} does not know the key (401): set OPENAI_API_KEY.")
                answer.raise_for_status()
                models = answer.json()["data"]
                if not models or not all(isinstance(model, dict) and "id" in model for model in models):
                    raise ValueError("it names no models")
                found.append(models)
            except Refused:
                raise
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"No server with OpenAI's interface answers at {url}{loopback.through(url)} ({_reason(error)}). {START}"
                ) from None
        return found

    def close(self) -> None:
        """Ends all requests, also those that wait for an answer."""
        self.closed.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for each in list(self.sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # closing it would not wake a thread that reads from it
        self.client.close()

    def _trace(self, event: str, info: dict) -> None:
        """Called by httpcore: remembers the sockets of new connections."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self.sockets.add(info["return_value"].get_extra_info("socket"))

    def _send(self, url: str, path: str, body: dict) -> dict:
        answer = self.client.post(f"{url}/{path}", json=body)
        _check(answer, f"{url}/{path}{loopback.through(url)}")
        try:
            document = answer.json()
        except ValueError as error:
            raise BadAnswer(f"no JSON ({error})") from error
        if not isinstance(document, dict):
            raise BadAnswer("no JSON object")
        return document

    def _receive(self, url: str, path: str, body: dict) -> list[Event]:
        begun, parts = time.perf_counter(), []
        with self.client.stream("POST", f"{url}/{path}", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            _check(answer, f"{url}/{path}{loopback.through(url)}")
            try:
                for part in answer.iter_bytes():  # read later, as that takes time
                    parts.append((time.perf_counter() - begun, part))
            except httpx.TransportError as error:
                if parts:
                    raise BadAnswer(f"a stream that was lost ({_reason(error)})") from error
                raise
        return read_events(parts)

    def _lost(self, url: str, error: Exception, begun: float) -> None:
        proxy = loopback.through(url)
        why = f"({_reason(error)}); it is asked again for up to {self.patience:g} minutes"
        self._change(url, silent=True, what=f"does not answer{proxy} {why}")
        if time.monotonic() - begun > 60 * self.patience and not self.closed.is_set():
            raise ValueError(
                f"No server has answered for {self.patience:g} minutes ({url}{proxy}: {_reason(error)}). {START}"
            )

    def _change(self, url: str, *, silent: bool, what: str = "answers again") -> None:
        """Says when a server stops to answer, and when it answers again."""
        with self.guard:
            changed = silent != (url in self.silent)
            (self.silent.add if silent else self.silent.discard)(url)
        if changed and not self.closed.is_set():
            self.say(f"{url} {what}.")


def _base_url(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the URL of a server. {START}")
    return base


def _check(answer: httpx.Response, where: str) -> None:
    """Raises BadAnswer or Refused for what is no answer."""
    if answer.status_code in (408, 429) or answer.status_code >= 500:
        error = BadAnswer(f"status {answer.status_code}, {_message(answer)}")
        with contextlib.suppress(ValueError):  # it may also be a date
            error.pause = min(LONGEST_WAIT, float(answer.headers.get("retry-after", 0)))
        raise error
    if answer.status_code >= 400:
        refused = Refused(f"{where} refuses the request with status {answer.status_code}: {_message(answer)}")
        refused.status = answer.status_code
        raise refused


def read_events(parts: list[tuple[float, bytes]]) -> list[Event]:
    """Server-sent events from the pieces in which they came. Raises BadAnswer for an error, and for a stream without its end."""
    events: list[Event] = []
    rest = b""
    for seconds, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if line == b"[DONE]":
                return events
            try:
                document = json.loads(line)
            except ValueError as error:
                raise BadAnswer(f"an event that is no JSON ({error})") from error
            if not isinstance(document, dict) or document.get("error"):
                raise BadAnswer(f"an event with an error: {str(document)[:300]}")
            events.append((seconds, document))
    raise BadAnswer(f"a stream that was cut after {len(events)} events")


def _message(answer: httpx.Response) -> str:
    """What a server says is wrong, in one line."""
    try:
        document = answer.json()
        error = document.get("error", document)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:500]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


LLAMA_CPP = "llamacpp"  # as /v1/models names the owner of its models


def find_fingerprint(model: dict) -> Fingerprint | None:
    """Of the weights behind an entry of /v1/models; None: neither the server nor this machine can tell.

    llama.cpp's server tells sizes and the type of its file. vLLM tells a folder or a name, which is read if it is here.
    """
    if model.get("owned_by") == LLAMA_CPP:
        meta = {key: value for key, value in (model.get("meta") or {}).items() if key != "n_ctx"}
        text = f"{digest(json.dumps(meta, sort_keys=True).encode())}-gguf-{str(meta.get('ftype')).lower()}"
        return Fingerprint.known(text)
    root = model.get("root")
    if not isinstance(root, str) or not (Path(root).is_dir() or is_cached(root)):
        return None
    with contextlib.suppress(ValueError, OSError):
        return Target.load_ends(root).identity.fix()
    return None
