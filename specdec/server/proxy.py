"""A proxy in front of any server with OpenAI's interface: everything passes unchanged, and conversations are recorded."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from specdec.core import loopback
from specdec.server import traffic
from specdec.server.asgi import read_body, refuse, wait_until_gone
from specdec.server.overheard import read_answered, read_asked
from specdec.server.protocol import RequestError

LOG = logging.getLogger(__name__)
CHAT, BARE = "/v1/chat/completions", "/v1/completions"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
OF_ONE_CONNECTION = {  # RFC 9110, section 7.6.1
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
CONNECTING = 10.0  # seconds


@dataclass(frozen=True)
class Proxy:
    """upstream: URL of the server, without /v1
    chat_end, bare_end: the tokens behind answers to chats and to bare prompts, where ids are made of texts
    token_ids: asks the server for token ids, as vLLM gives them; max_body: bytes of a request
    """

    upstream: str
    recorder: traffic.Recorder
    chat_end: int | None
    bare_end: int | None
    token_ids: bool = False
    max_body: int = 1 << 25


@dataclass(frozen=True)
class Overheard:
    """A request that is to be recorded. body: of it"""

    proxy: Proxy
    asked: traffic.Asked
    body: dict
    chat: bool

    def answer(self, content: bytes, *, whole: bool) -> None:
        """Records an answer. No failure reaches the client. whole: False if the client left before the last byte was sent"""
        end = self.proxy.chat_end if self.chat else self.proxy.bare_end
        try:
            answered = read_answered(content, self.body, self.asked, end)
        except Exception as error:  # its message may hold parts of the answer
            if whole:
                self.proxy.recorder.say("form", f"An answer is not of OpenAI's form ({type(error).__name__}).")
            return
        if answered is not None:
            self.proxy.recorder.record(self.asked, answered)


def make_proxy(proxy: Proxy) -> Starlette:
    """The application. It closes the recorder when it ends."""
    timeout = httpx.Timeout(None, connect=CONNECTING)
    no_cookies = CookieJar(
        DefaultCookiePolicy(allowed_domains=[])
    )  # what one client is given is not sent with another's request
    limits = httpx.Limits(max_connections=None)
    own = loopback.client_options(proxy.upstream)
    client = httpx.AsyncClient(timeout=timeout, limits=limits, cookies=no_cookies, **own)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield
        await asyncio.to_thread(proxy.recorder.close)

    async def forward(request: Request) -> Response:
        return await _forward(proxy, client, request)

    return Starlette(
        routes=[Route("/{path:path}", forward, methods=METHODS)],
        lifespan=lifespan,
        exception_handlers={RequestError: refuse},
    )


async def _forward(proxy: Proxy, client: httpx.AsyncClient, request: Request) -> Response:
    body = await read_body(request, proxy.max_body)
    overheard = _overhear(proxy, request, body)
    left_out = OF_ONE_CONNECTION | {"host", "content-length"}
    if overheard or "accept-encoding" not in request.headers:
        left_out = left_out | {"accept-encoding"}
    headers = _without(left_out, request.headers.raw)
    if "accept-encoding" in left_out:
        headers.append((b"accept-encoding", b"identity"))
    if overheard and proxy.token_ids:
        body = json.dumps({**overheard.body, "return_token_ids": True}).encode()
    query = f"?{request.url.query}" if request.url.query else ""
    url = proxy.upstream + request.scope["raw_path"].decode() + query
    sent = client.build_request(request.method, url, headers=headers, content=body)
    answering = asyncio.ensure_future(client.send(sent, stream=True))
    gone = asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)
        answer = answering.result()
    except httpx.TransportError as error:
        where = f"{proxy.upstream}{loopback.through(proxy.upstream)}"
        why = f"The server at {where} does not answer ({type(error).__name__}): start it, or give another upstream=."
        return JSONResponse(RequestError(why, status=502).to_json(), 502)
    finally:
        gone.cancel()
        answering.cancel()
    passed = Passed(_pass(answer, overheard), answer.status_code)
    passed.raw_headers = _without(OF_ONE_CONNECTION, answer.headers.raw)
    return passed


class Passed(StreamingResponse):
    """If the server dies, the answer ends without its last chunk, so that the client does not take it for a whole one."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except httpx.TransportError as error:
            LOG.warning(
                "The server has not ended an answer (%s): its client gets the part that came.", type(error).__name__
            )


def _without(names: set[str], headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in names]


def _overhear(proxy: Proxy, request: Request, body: bytes) -> Overheard | None:
    """None for a request that is not to be recorded."""
    if request.method != "POST" or request.url.path not in (CHAT, BARE) or not proxy.recorder.alive:
        return None
    try:
        document = json.loads(body)
        chat = request.url.path == CHAT
        asked = read_asked(document, chat)
        wanted = asked is not None and traffic.allowed(request.headers, document.get("store"))
    except Exception:  # the server says what is wrong with such a request
        return None
    return Overheard(proxy, asked, document, chat) if wanted and asked else None


async def _pass(answer: httpx.Response, overheard: Overheard | None) -> AsyncIterator[bytes]:
    """The bytes as they come. If the client leaves, the request to the server is closed."""
    parts: list[bytes] = []
    whole = died = False
    try:
        async for part in answer.aiter_raw():
            if overheard:
                parts.append(part)
            yield part
        whole = True
    except httpx.TransportError:
        died = True
        raise
    finally:  # also if the client leaves, as many do at the last line
        if overheard and answer.status_code == 200 and not died:
            overheard.answer(b"".join(parts), whole=whole)
        await answer.aclose()
