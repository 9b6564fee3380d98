"""vLLM 0.32: a session of draft weights, through this project's own transport (in_vllm/draft_files.py)."""

import json
import re
import shlex
from pathlib import Path

from specdec.engines.client import BadAnswer, Refused
from specdec.engines.draft_weights.base import DraftWeights

IN_VLLM = Path(__file__).with_name("in_vllm")  # vLLM finds the transport there, by its entry point
COUNTS = ["--per-request-spec-decode-metrics", "detailed"]  # drafts of each answer
WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)


def make_vllm_words() -> tuple[dict[str, str], list[str]]:
    """The environment and the flags with which vLLM takes draft weights. PYTHONPATH may have further folders."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(IN_VLLM)}
    return environment, ["--weight-transfer-config", json.dumps({"backend": "files"})]


def describe_start() -> str:
    environment, flags = make_vllm_words()
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    return (
        "Start vLLM again, with its head: specdec launch_engine engine=vllm export=FOLDER weights=true, which is "
        f"{variables} vllm serve ... --speculative-config ... {shlex.join([*COUNTS, *flags])}"
    )


class VllmDraftWeights(DraftWeights):
    """Running answers are finished first, and others wait meanwhile: a head's cached states are those of one head."""

    format = "vllm"
    advice = describe_start()

    def check_server(self, url: str) -> None:
        """An empty session: vLLM says there whether it has a head."""
        self.ask(url, "init_weight_transfer_engine", {"init_info": {}})
        self.start(url)
        self.ask(url, "finish_weight_update", {})

    def load_into(self, url: str, folder: Path, version: str) -> None:
        try:
            self.ask(url, "pause?mode=wait", {})
            self.start(url)
            self.ask(url, "update_weights", {"update_info": {"folder": str(folder)}})
            self.ask(url, "finish_weight_update", {"weight_version": version})
        except ValueError as error:
            raise ValueError(str(error).replace("<path>", str(folder))) from None  # vLLM leaves paths out
        finally:
            self.release(url, "resume")

    def start(self, url: str) -> None:
        """Opens a session. One that a lost client left open is closed, which loads nothing."""
        try:
            self.ask(url, "start_draft_weight_update", {})
        except ValueError as error:
            if "already active" not in str(error):
                raise
            self.ask(url, "finish_weight_update", {})
            self.ask(url, "start_draft_weight_update", {})

    def explain(self, address: str, error: BadAnswer | Refused) -> str:
        found = WORKER_ERROR.search(str(error))
        if found is None:
            return super().explain(address, error)
        reason = found.group(1).rstrip(".")
        needs_words = any(sign in reason for sign in ("not configured", "no draft model", "init info", "has no head"))
        return f"{address} failed: {reason}.{needs_words * f' {self.advice}'}"
