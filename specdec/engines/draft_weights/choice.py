"""The way in which a server takes draft weights, by what it says about itself."""

from typing import Any

from specdec.engines.client import EngineClient
from specdec.engines.draft_weights.base import DraftWeights
from specdec.engines.draft_weights.sglang import SglangDraftWeights
from specdec.engines.draft_weights.specdec import OwnDraftWeights
from specdec.engines.draft_weights.vllm import VllmDraftWeights

KINDS: dict[str, type[DraftWeights]] = {  # by `owned_by` of a model
    "vllm": VllmDraftWeights,
    "sglang": SglangDraftWeights,
    "specdec": OwnDraftWeights,
}


def open_draft_weights(client: EngineClient, model: dict[str, Any]) -> DraftWeights:
    """The way into the servers of a client. Raises ValueError for servers that take no draft weights.

    model: a server's entry of /v1/models
    """
    kind = str(model.get("owned_by"))
    if kind not in KINDS:
        raise ValueError(
            f"{client.urls[0]} ({kind}) takes no draft weights while it runs: restart it with each head, or serve "
            f"with one of {', '.join(KINDS)}."
        )
    return KINDS[kind](client)
