"""A running vLLM is given another head: its export, which the server reads in the place of its drafter's weights.

train/in_vllm/draft_folder.py runs in the server and has the routes; docs/adapting.md has the line that starts it.
"""

from helpers import loading

import hashlib
from dataclasses import dataclass
from pathlib import Path

import httpx

from specdec import checkpoint
from specdec.core import loopback
from specdec.export.cards import Provenance
from specdec.export.engines import make_form
from specdec.export.folder import write_export
from specdec.heads.base import Drafter

FORMAT = "vllm"
PATIENCE = 300  # seconds for one request: the server reads the weights within one


@dataclass(frozen=True)
class Server:
    """url: such as http://localhost:8000. All methods raise ValueError with what the server said."""

    url: str

    def version(self) -> str:
        """The name that was sent with the weights in use; vLLM's own until any were sent."""
        return str(self._ask("GET", "weight_info").json().get("weight_version"))

    def send(self, folder: Path, version: str) -> None:
        """Lets the server read an export. Afterwards it has all of the weights, or, after an error, the old ones."""
        # Other backends do not know these words. They would take the drafter apart in the next step, and keep it so.
        self._ask("POST", "init_weight_transfer_engine", {"init_info": {"reads": "folders"}})
        try:
            self._ask("POST", "start_draft_weight_update")
        except ValueError as error:  # perhaps a sender died after its own start; the server waits for the end of that
            try:
                self._ask("POST", "finish_weight_update")
            except ValueError:
                raise error from None
            self._ask("POST", "start_draft_weight_update")
        self._ask("POST", "update_weights", {"update_info": {"folder": str(folder.absolute())}})
        self._ask("POST", "finish_weight_update", {"weight_version": version})

    def _ask(self, method: str, route: str, body: dict | None = None) -> httpx.Response:
        given = {"json": body or {}} if method == "POST" else {}
        try:
            with httpx.Client(timeout=PATIENCE, **loopback.client_options(self.url)) as client:
                reply = client.request(method, f"{self.url.rstrip('/')}/{route}", **given)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self.url} does not answer{loopback.through(self.url)} ({error}).") from None
        if reply.status_code == 404:
            raise ValueError(f"{self.url} has no /{route}: start vLLM with VLLM_SERVER_DEV_MODE=1.")
        if reply.status_code != 200:
            raise ValueError(f"{self.url}/{route} answers with status {reply.status_code}: {_message(reply)}")
        return reply


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]


def version_of(head: Path) -> str:
    """The name that a head's weights have in the server: of its folder and its content."""
    with (head / "drafter.safetensors").open("rb") as file:
        return f"{checkpoint.name_of(head)} {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def export(head: Path, out: Path, target: loading.TargetOptions) -> None:
    """Makes the folder `out`, in the precision of target.dtype; vLLM takes it into its own."""
    loaded = loading.load(str(head), target)
    if not isinstance(loaded.drafter, Drafter):
        raise ValueError(f"{head} is only an adapter of its target: vLLM has no such drafters.")
    form = make_form(loaded.drafter, FORMAT)
    provenance = Provenance.read(head, target=loaded.target, license="other", data=None, num_drafts=None)
    write_export(form, out, dtype=loaded.target.dtype, provenance=provenance)
