"""New draft weights for a running engine: the interface, and requests that change a server."""

import contextlib
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import httpx

from specdec.engines.client import TRIES, BadAnswer, EngineClient, Refused

BUSY = (409, 429, 503)  # statuses of a server that asks to come again
FORBIDDEN = (401, 403)
LEAST_PAUSE = 0.5  # seconds between two tries


class DraftWeights(ABC):
    """Puts trained heads into the servers of a client, one after another.

    format: layout of the folders, as `specdec export format=` names it; "checkpoint" for a checkpoint itself
    Raises ValueError for a server that takes none, with how to start it.
    """

    format: ClassVar[str]
    advice: str  # how to start a server that takes draft weights

    def __init__(self, client: EngineClient):
        self.client = client
        for url in client.urls:
            self.check_server(url)

    def load(self, folder: Path, version: str) -> float:
        """-> seconds until all servers draft with the head in `folder`, with those in which they finish answers

        version: any text by which the server names the weights from now on
        Raises ValueError with the reason. The sentence says whether the head that was served before still is.
        """
        start = time.perf_counter()
        for url in self.client.urls:
            self.load_into(url, folder.absolute(), version)
        return time.perf_counter() - start

    @abstractmethod
    def check_server(self, url: str) -> None: ...

    @abstractmethod
    def load_into(self, url: str, folder: Path, version: str) -> None: ...

    def ask(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a POST, sent again only while the server is busy. Raises ValueError with its reason."""
        for number in range(TRIES):
            try:
                return self.client.post_once(url, path, body, Connection="close")  # vLLM cuts those of failures
            except httpx.ReadTimeout:
                raise ValueError(
                    f"{url} has not answered at /{path} in time: requests that it finishes first may still run."
                ) from None
            except httpx.TransportError as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(
                    f"{url} does not answer at /{path} ({reason}). Started again, it serves the head of its start."
                ) from None
            except (BadAnswer, Refused) as error:
                if error.status not in BUSY or number == TRIES - 1:
                    raise ValueError(self.explain(f"{url}/{path}", error)) from None
                self.client.closed.wait(max(LEAST_PAUSE, getattr(error, "pause", 0.0)))
        raise AssertionError

    def explain(self, address: str, error: BadAnswer | Refused) -> str:
        """A sentence about an answer that is none."""
        if error.status in (404, 405):
            return f"{address} does not exist there, so this server takes no draft weights. {self.advice}"
        if error.status in FORBIDDEN:
            return f"{error}. Set OPENAI_API_KEY to the server's key. {self.advice}"
        return str(error) if isinstance(error, Refused) else f"{address} failed: {error}"

    def release(self, url: str, path: str) -> None:
        """POST without a body for a server that may be gone: its loss is not the news."""
        with contextlib.suppress(ValueError):
            self.ask(url, path, {})
