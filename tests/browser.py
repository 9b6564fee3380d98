"""A headless Chromium that opens pages and says what is on them, by its debugging pipe."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needed = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "about:blank"]
# The browser reads from descriptor 3 and writes to 4
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(3, 4); os.execv(sys.argv[2], sys.argv[2:])"
SECONDS = 60  # after which it is ended


class Browser:
    """One page of a browser, as a context manager. profile: a folder that is its own

    errors: what the page's console was told as an error or a warning, and exceptions that nothing caught
    """

    def __init__(self, profile: Path):
        assert PROGRAM is not None
        self.socket, other = socket.socketpair()
        start = [sys.executable, "-c", START, str(other.fileno()), PROGRAM, f"--user-data-dir={profile}", *OPTIONS]
        self.process = subprocess.Popen(start, pass_fds=[other.fileno()], stderr=subprocess.DEVNULL)
        other.close()
        self.errors: list[str] = []
        self.number, self.session = 0, {}
        self.late = threading.Timer(SECONDS, self.process.kill)

    def __enter__(self) -> "Browser":
        self.late.start()
        self.replies = self.socket.makefile("rb")
        page = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self.late.cancel()
        self.process.kill()
        self.process.wait()
        self.replies.close()
        self.socket.close()

    def call(self, method: str, **parameters: Any) -> dict:
        """Calls a method of the DevTools protocol -> its result"""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **self.session}
        self.socket.sendall(json.dumps(message).encode() + b"\0")
        while (event := self._next()).get("id") != self.number:
            self._note(event)
        assert "result" in event, event
        return event["result"]

    def open(self, url: str, *, width: int, scheme: str) -> None:
        """Goes to a page, and returns before it is loaded. width: of the window; scheme: light or dark"""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What a script in the page gives; it may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _next(self) -> dict:
        text = b""
        while not text.endswith(b"\0"):
            part = self.replies.read(1)
            assert part, f"the browser has ended, or took longer than {SECONDS} s"
            text += part
        return json.loads(text[:-1])

    def _note(self, event: dict) -> None:
        given = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        if event.get("method") == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))
        if event.get("method") == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
