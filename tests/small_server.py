"""A server whose answers a test decides about."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, object]  # status; a document, or text that is sent as it is


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Connections that a client cuts are part of the tests."""


class SmallServer:
    """Serves while it is used as a context manager, and again each time.

    reply: called with path and body (None for GET), in a thread for each request; None: the connection is cut
    """

    def __init__(self, reply: Callable[[str, dict | None], Reply | None]):
        self.reply, self.port = reply, 0
        self.guard = threading.Lock()
        self.requests: list[tuple[str, dict | None]] = []
        self.running, self.most = 0, 0  # requests that are under way now, and at most

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
            self.most = max(self.most, self.running)
        try:
            return self.reply(path, body)
        finally:
            with self.guard:
                self.running -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send(small.answer(self.path.strip("/"), None))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(small.answer(self.path.strip("/"), body))

            def send(self, reply: Reply | None) -> None:
                if reply is None:
                    return
                status, document = reply
                content = (document if isinstance(document, str) else json.dumps(document)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        return Handler
