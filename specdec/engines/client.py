"""Inference servers over HTTP: a bounded number of requests in flight, sent again when an answer is lost or bad.

vLLM and every other server with OpenAI's interface (https://platform.openai.com/docs/api-reference) can be used.
"""

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
import urllib.request
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx

from specdec.core.resumable import digest_bytes
from specdec.core.shards import is_cached
from specdec.target.fingerprint import UNREAD, Fingerprint, describe_difference
from specdec.target.model import Target

Result = TypeVar("Result")
Event = tuple[float, dict]  # seconds since the request was sent, and the document
TRIES = 5  # bad answers in a row that end a request
LONGEST_PAUSE = 10.0  # seconds between two tries, at most
LONGEST_WAIT = 60.0  # seconds that a server may ask for with Retry-After, at most
CONNECT_SECONDS = 10.0  # seconds until a connection counts as failed
IDLE_SECONDS = 2.0  # seconds for which an idle connection is kept: servers close theirs after five
START = "Start one with specdec launch_engine, or give the URL of one that runs, such as http://localhost:8000."


class BadAnswer(ValueError):
    """An answer that cannot be used. The same request may have a better one next time, after `pause` seconds."""

    pause = 0.0
    status = 0  # where it is known


class GivenUp(ValueError):
    """A request that had TRIES bad answers in a row."""


class Refused(ValueError):
    """A request that the server does not understand or does not allow (status 4xx)."""

    status = 0  # where it is known


class EngineClient:
    """One or several servers with the same model, used in turn.

    urls: comma list such as http://localhost:8000, with or without /v1
    in_flight: largest number of requests under way
    patience: minutes without any answer after which a request gives up; a server may be restarted meanwhile
    longest: minutes that one answer may take before the request is sent again; None: no limit
    say: function that prints a sentence, when servers stop to answer and when they answer again
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
        self.in_flight, self.patience, self.longest, self.say = in_flight, patience, longest, say
        key = os.environ.get("OPENAI_API_KEY")
        self.client = httpx.Client(
            **make_client_options(*self.urls),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None if longest is None else 60 * longest, connect=CONNECT_SECONDS),
            limits=httpx.Limits(
                max_connections=in_flight, max_keepalive_connections=in_flight, keepalive_expiry=IDLE_SECONDS
            ),
            event_hooks={"request": [lambda request: request.extensions.update(trace=self._trace)]},
        )
        self.pool = ThreadPoolExecutor(in_flight, "engine")
        self.url_cycle = itertools.cycle(self.urls)
        self.closed = threading.Event()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.silent: set[str] = set()  # URLs that did not answer last time
        self.repeated = 0  # requests that were sent again
        self.guard = threading.Lock()

    def select(self, url: str) -> "EngineClient":
        """A client of one of these servers, with the same limits."""
        limits: dict[str, Any] = {"in_flight": self.in_flight, "patience": self.patience, "longest": self.longest}
        return EngineClient(url, say=self.say, **limits)

    def submit(self, path: str, body: dict, read: Callable[[dict], Result]) -> "Future[Result]":
        """Calls `post` in another thread."""
        return self.pool.submit(self.post, path, body, read)

    def post(self, path: str, body: dict, read: Callable[[dict], Result]) -> Result:
        """Returns the result of POST `path`, such as v1/completions.

        read: makes the result of the answer's JSON; raises BadAnswer for an answer that must be requested again
        """
        return self._repeat(lambda url: read(self.post_once(url, path, body)))

    def stream(self, path: str, body: dict, read: Callable[[list[Event]], Result]) -> Result:
        """Calls `post` for an answer in server-sent events, each with the seconds since the request was sent."""
        return self._repeat(lambda url: read(self._receive(url, path, body)))

    def _repeat(self, ask: Callable[[str], Result]) -> Result:
        """Returns ask(URL of a server), called again if an answer is lost or bad. Raises GivenUp."""
        silent_since, bad = time.monotonic(), 0
        for number in itertools.count():
            with self.guard:
                url = next(self.url_cycle)
                self.repeated += number > 0
            pause = 0.0
            try:
                result = ask(url)
            except httpx.TransportError as error:
                if number == 0 and isinstance(error, httpx.RemoteProtocolError) and not self.closed.is_set():
                    continue  # servers close connections that were idle
                self._note_loss(url, error, silent_since)
            except BadAnswer as error:
                silent_since, bad, pause = time.monotonic(), bad + 1, error.pause
                if bad == TRIES:
                    raise GivenUp(f"{url} gave {TRIES} bad answers in a row. The last one: {error}") from error
            else:
                self._note_change(url, silent=False)
                return result
            usual = min(LONGEST_PAUSE, 0.25 * 2 ** min(number // len(self.urls), 16))
            if self.closed.wait(max(pause, usual)):
                break
        raise ValueError("The client of the engine was closed.")

    def describe_models(self) -> list[list[dict]]:
        """The entries of each server's /v1/models: `id`, and vLLM also `max_model_len`.

        Raises ValueError at once if a server does not answer.
        """
        return list(map(self.describe_server, self.urls))

    def describe_server(self, url: str) -> list[dict]:
        """The entries of one server, as `describe_models` gives them."""
        try:
            answer = self.client.get(f"{url}/v1/models")
            if answer.status_code == 401:
                raise Refused(f"{url} does not know the key (401): set OPENAI_API_KEY.")
            answer.raise_for_status()
            models = answer.json()["data"]
            if not models or not all(isinstance(model, dict) and "id" in model for model in models):
                raise ValueError("it names no models")
        except Refused:
            raise
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"No server with OpenAI's interface answers at {url}{describe_proxy(url)} "
                f"({_describe_error(error)}). {START}"
            ) from None
        return models

    def close(self) -> None:
        """Ends all requests, also those that wait for an answer."""
        self.closed.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a close alone would not wake a reading thread
        self.client.close()

    def _trace(self, event: str, details: dict) -> None:
        """Called by httpcore: remembers the sockets of new connections."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self.sockets.add(details["return_value"].get_extra_info("socket"))

    def post_once(self, url: str, path: str, body: dict, **headers: str) -> dict:
        """The JSON of one POST to one of the servers. Raises BadAnswer, Refused, httpx.TransportError."""
        answer = self.client.post(f"{url}/{path}", json=body, headers=headers)
        _check_status(answer, f"{url}/{path}{describe_proxy(url)}")
        try:
            document = answer.json()
        except ValueError as error:
            raise BadAnswer(f"no JSON ({error})") from error
        if not isinstance(document, dict):
            raise BadAnswer("no JSON object")
        return document

    def _receive(self, url: str, path: str, body: dict) -> list[Event]:
        start, chunks = time.perf_counter(), []
        with self.client.stream("POST", f"{url}/{path}", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            _check_status(answer, f"{url}/{path}{describe_proxy(url)}")
            try:
                for chunk in answer.iter_bytes():  # read later, as that takes time
                    chunks.append((time.perf_counter() - start, chunk))
            except httpx.TransportError as error:
                if chunks:
                    raise BadAnswer(f"a stream that was lost ({_describe_error(error)})") from error
                raise
        return read_events(chunks)

    def _note_loss(self, url: str, error: Exception, silent_since: float) -> None:
        proxy = describe_proxy(url)
        reason = f"({_describe_error(error)}); it is asked again for up to {self.patience:g} minutes"
        self._note_change(url, silent=True, message=f"does not answer{proxy} {reason}")
        if time.monotonic() - silent_since > 60 * self.patience and not self.closed.is_set():
            raise ValueError(
                f"No server has answered for {self.patience:g} minutes ({url}{proxy}: {_describe_error(error)}). "
                f"{START}"
            )

    def _note_change(self, url: str, *, silent: bool, message: str = "answers again") -> None:
        """Prints when a server stops to answer, and when it answers again."""
        with self.guard:
            changed = silent != (url in self.silent)
            (self.silent.add if silent else self.silent.discard)(url)
        if changed and not self.closed.is_set():
            self.say(f"{url} {message}.")


def _base_url(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1")
    with contextlib.suppress(httpx.InvalidURL):  # such as a port that is no number
        address = httpx.URL(base)
        if base.startswith(("http://", "https://")) and address.host and (address.port or 0) < 2**16:
            return base
    raise ValueError(f"{url!r} is not the URL of a server. {START}")


def _check_status(answer: httpx.Response, address: str) -> None:
    """Raises BadAnswer or Refused for a status that is no answer."""
    if answer.status_code in (408, 429) or answer.status_code >= 500:
        error = BadAnswer(f"status {answer.status_code}, {_read_message(answer)}")
        error.status = answer.status_code
        with contextlib.suppress(ValueError):  # it may also be a date
            error.pause = min(LONGEST_WAIT, float(answer.headers.get("retry-after", 0)))
        raise error
    if answer.status_code >= 400:
        refused = Refused(f"{address} refuses the request with status {answer.status_code}: {_read_message(answer)}")
        refused.status = answer.status_code
        raise refused


def read_events(chunks: list[tuple[float, bytes]]) -> list[Event]:
    """The server-sent events in the chunks of a stream. Raises BadAnswer for an error, or without the end."""
    events: list[Event] = []
    remainder = b""
    for seconds, chunk in chunks:
        *lines, remainder = (remainder + chunk).split(b"\n")
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


def _read_message(answer: httpx.Response) -> str:
    """The error message of a server, in one line."""
    try:
        document = answer.json()
        error = document.get("error", document)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:500]


def _describe_error(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


LLAMA_CPP = "llamacpp"  # owner of llama.cpp's models in /v1/models


def find_fingerprint(model: dict) -> Fingerprint | None:
    """Fingerprint of the weights of an entry of /v1/models; None: neither the server nor this machine can tell.

    llama.cpp's server tells sizes and the type of its file. vLLM tells a folder or a name, which is read if it is here.
    """
    if model.get("owned_by") == LLAMA_CPP:
        meta = {key: value for key, value in (model.get("meta") or {}).items() if key != "n_ctx"}
        text = f"{digest_bytes(json.dumps(meta, sort_keys=True).encode())}-gguf-{str(meta.get('ftype')).lower()}"
        return Fingerprint.from_text(text)
    root = model.get("root")
    if not isinstance(root, str) or not (Path(root).is_dir() or is_cached(root)):
        return None
    with contextlib.suppress(ValueError, OSError):
        return Target.load_ends(root).identity.compute()
    return None


def check_weights(url: str, model: dict, target: Target, *, advice: str) -> None:
    """Raises ValueError, with advice, for a server of other weights than the target's, as far as this machine can tell.

    model: its entry in /v1/models
    """
    served, here = find_fingerprint(model), target.fingerprint()
    if served is not None and served.text != here and UNREAD not in f"{served.text} {here}":
        clause = describe_difference(f"{url} serves {{}} weights ({model.get('root')})", served.text, here)
        raise ValueError(f"{clause} ({target.name}): {advice}.")


# Proxies of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY). A server on this machine never needs one.


def is_local(url: str) -> bool:
    """Whether a URL is on this machine, whatever the environment says about proxies."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def find_address(url: str) -> tuple[str | None, int, str]:
    """Host, port and path of a server's URL, the same for all loopback names. Raises ValueError for no URL."""
    address = urllib.parse.urlsplit(_base_url(url))
    host = "localhost" if is_local(_base_url(url)) else address.hostname
    return host, address.port or (443 if address.scheme == "https" else 80), address.path


def make_client_options(*urls: str) -> dict[str, Any]:
    """Arguments of an httpx client for these servers.

    For local servers alone it reads nothing of the environment, so that a broken proxy does no harm.
    """
    local = [url for url in urls if is_local(url)]
    if len(local) == len(urls):
        return {"trust_env": False}
    hosts = [urllib.parse.urlsplit(url).hostname or "" for url in local]
    return {"mounts": {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in hosts}}


def describe_proxy(url: str) -> str:
    """A clause with the variable whose proxy is used for this URL; else nothing. Its value may hold a password."""
    address = urllib.parse.urlsplit(url)
    if is_local(url) or urllib.request.proxy_bypass(address.netloc):
        return ""
    set_names = {name.lower(): name for name, value in os.environ.items() if value}
    name = set_names.get(f"{address.scheme}_proxy") or set_names.get("all_proxy")
    return f" (through the proxy of {name}; NO_PROXY={address.hostname} asks it directly)" if name else ""
