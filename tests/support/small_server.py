"""A server whose answers a test decides about, and answers for it that need no weights."""

import json
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.targets import small_tokenizer

STOP = 2  # <|im_end|>
# status; a document, or text or bytes that are sent as they are, or a list of bytes that begins with b"", which come
# one by one; headers, if there are any
Reply = tuple[int, object] | tuple[int, object, dict[str, str]]


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait; more are refused

    def handle_error(self, *_):
        """Connections that a client cuts are part of the tests."""


class SmallServer:
    """Serves while it is used as a context manager, and again each time.

    reply: called with path and body (None for GET), in a thread for each request; None: the connection is cut
    protocol: with HTTP/1.1, connections stay for further requests, and none is cut
    """

    def __init__(self, reply: Callable[[str, dict | None], Reply | None], *, protocol: str = "HTTP/1.0"):
        self.reply, self.protocol, self.port = reply, protocol, 0
        self.guard = threading.Lock()
        self.requests: list[tuple[str, dict | None]] = []
        self.keys: set[str | None] = set()  # headers Authorization
        self.running, self.most_running = 0, 0  # requests that are under way now, and at most

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def __enter__(self) -> "SmallServer":
        self.server = Quiet(("127.0.0.1", self.port), self._handler())
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, body: dict | None) -> Reply | None:
        with self.guard:
            self.requests.append((path, body))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            return self.reply(path, body)
        finally:
            with self.guard:
                self.running -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        small = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = small.protocol

            def do_GET(self):
                self.send(small.answer(self.path.strip("/"), None))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(small.answer(self.path.strip("/"), body))

            def send(self, reply: Reply | None) -> None:
                small.keys.add(self.headers["Authorization"])
                if reply is None:
                    return
                status, document, *headers = reply
                is_stream = isinstance(document, list) and document[:1] == [b""]
                chunks = [encode(chunk) for chunk in (document if is_stream else [document])]
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                if len(chunks) == 1:
                    self.send_header("Content-Length", str(len(chunks[0])))
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(chunk)
                    self.wfile.flush()
                    time.sleep(0.002 * (len(chunks) > 1))

            def log_message(self, *_):
                pass

        return Handler


def encode(document) -> bytes:
    """Bytes as they are, text in UTF-8, anything else as JSON."""
    if isinstance(document, bytes):
        return document
    return (document if isinstance(document, str) else json.dumps(document)).encode()


class Model:
    """What a server says: an answer of some words, which depend on prompt, seed and temperature. No weights are needed.

    prompt_kind: "ids" as vLLM; "deaf": unknown fields are passed over; "chat": only messages are taken;
        "llama.cpp": as its server
    """

    def __init__(self, prompt_kind: str = "ids", *, length: int = 512, name: str = "target", **changes):
        self.prompt_kind, self.length, self.name = prompt_kind, length, name
        self.tokenizer = small_tokenizer()
        self.changes = changes  # of the fields of a choice
        self.fail_after: int | None = None  # requests
        self.num, self.guard = 0, threading.Lock()

    def __call__(self, path: str, body: dict | None):
        if path == "v1/models" and self.prompt_kind == "llama.cpp":
            meta = {
                "n_vocab": 90,
                "n_ctx": self.length,
                "n_params": 1000,
                "size": 700,
                "ftype": "Q4_K_M",
            } | self.changes
            return 200, {"data": [{"id": "/models/target", "owned_by": "llamacpp", "meta": meta}]}
        if path == "v1/models":
            return 200, {"data": [{"id": f"models/{self.name}", "max_model_len": self.length}]}
        if path == "tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return (200, {"tokens": ids}) if self.prompt_kind in ("ids", "llama.cpp") else (404, {})
        with self.guard:
            self.num += 1
            if self.fail_after is not None and self.num > self.fail_after:
                return 400, {"message": "that is enough"}
        if path == "completion":
            choice, _ = self.write(json.dumps(body["prompt"]), body | {"max_tokens": body["n_predict"]})
            limit = choice["finish_reason"] == "length"  # with words behind a stop token that its file does not name
            return 200, {
                "content": choice["text"],
                "stop_type": "limit",
                "tokens": choice["ids"] + [5, 6] * (not limit),
            }
        if path == "v1/chat/completions":
            choice, num = self.write(json.dumps(body["messages"]), body)
            choice |= {"message": {"content": choice.pop("text"), **self.changes}}
        elif self.prompt_kind == "chat":
            return 400, {"message": "unknown field"}
        else:
            choice, num = self.write(json.dumps(body["prompt"]), body)
        ids = choice.pop("ids")
        if self.prompt_kind == "ids":
            choice |= {"token_ids": ids}
        choice |= self.changes
        return 200, {
            "choices": [choice],
            "usage": {"prompt_tokens": len(body.get("prompt", [])), "completion_tokens": num},
        }

    def write(self, prompt: str, body: dict) -> tuple[dict, int]:
        number = zlib.crc32(f"{prompt} {body['seed'] if body['temperature'] else 0}".encode())
        text = f"The answer is {number} \u00e9."
        ids = [*self.tokenizer(text)["input_ids"], STOP]
        time.sleep(number % 7 / 1000)  # so answers come in another order than their requests
        cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": said, "ids": ids, "finish_reason": "length" if cut else "stop"}, len(ids)
