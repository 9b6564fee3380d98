"""Runs inside vLLM's server, which imports it by its name: hands the files of hidden states out over HTTP.

    GET     /v1/hidden_states/NAME    the file, once it is written
    DELETE  /v1/hidden_states/NAME    deletes it

vLLM checks the key (--api-key) of these requests, as of all others under /v1.
"""

import asyncio
import contextlib
import fcntl
import os
import re
from pathlib import Path

from starlette.responses import FileResponse, Response

FOLDER = "SPECDEC_HIDDEN_STATES"  # environment variable with the folder of the files
ROUTE = "/v1/hidden_states/"
NAME = re.compile(r"[\w-][\w.-]*\.safetensors")


class HiddenStatesRoute:
    """ASGI middleware."""

    def __init__(self, app):
        self.app, self.folder = app, Path(os.environ[FOLDER])

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(ROUTE):
            await self.app(scope, receive, send)
            return
        respond = await self._response(scope, receive)
        await respond(scope, receive, send)

    async def _response(self, scope, receive) -> Response:
        if await self._status(scope, receive) == 401:
            return Response(status_code=401)
        name = scope["path"].removeprefix(ROUTE)
        path, lock = self.folder / name, self.folder / f"{name}.lock"
        if not NAME.fullmatch(name) or not (path.exists() or lock.exists()):
            return Response(status_code=404)
        if scope["method"] == "DELETE":
            for each in (path, lock):
                each.unlink(missing_ok=True)
            return Response(status_code=204)
        await asyncio.to_thread(_wait, lock)
        return FileResponse(path) if path.exists() else Response(status_code=404)

    async def _status(self, scope, receive) -> int:
        """What vLLM itself answers: it does not know the route (404), or does not know the key (401)."""
        found = []

        async def keep(message) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        await self.app(scope, receive, keep)
        return found[0]


def _wait(lock: Path) -> None:
    """Returns when the connector has released a file's lock."""
    with contextlib.suppress(FileNotFoundError), lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
