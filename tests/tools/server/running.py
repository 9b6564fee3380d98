"""An ASGI application that is served while a test uses it."""

import contextlib
import socket
import threading
import time

import uvicorn


@contextlib.contextmanager
def running(app):
    """-> its URL. Afterwards its requests have ended, and so has the server."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
