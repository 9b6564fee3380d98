"""SGLang 0.5.23: a session of draft weights whose requests hold the tensors. Written from its source, not run.

Each request has the same payload once for each rank of tensor parallelism, since a rank opens only its own:
base64 of a pickle of a list of (name, tensor). SGLang's own client pickles handles of GPU memory. Here tensors are in
the pickle itself, which SGLang's unpickler takes as well, so the two sides need not share a machine.
"""

import base64
import pickle
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from specdec.engines.draft_weights.base import DraftWeights
from specdec.engines.draft_weights.in_vllm.head_layout import read_layout, read_tensors

PIECE_BYTES = 256 << 20  # of the tensors in a request, at most, for a rank; one larger tensor goes alone
ID_MAPS = ("d2t", "t2d")  # SGLang reads these at its start only
NamedTensors = list[tuple[str, Tensor]]


class SglangDraftWeights(DraftWeights):
    """Running answers go back to the queue, with nothing lost, and are continued with the new head."""

    format = "sglang"
    advice = "Start SGLang 0.5.23 with its head: --speculative-algorithm .. --speculative-draft-model-path FOLDER."

    def check_server(self, url: str) -> None:
        self.read_settings(url)

    def read_settings(self, url: str) -> tuple[Path, int]:
        """-> the folder of the head with which the server was started, and the number of ranks"""
        try:
            answer = self.client.client.get(f"{url}/server_info")
            answer.raise_for_status()
            settings: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(
                f"{url}/server_info does not say how SGLang was started ({error}). {self.advice}"
            ) from None
        folder = settings.get("speculative_draft_model_path")
        if folder is None:
            raise ValueError(f"{url} drafts with no head that could get weights. {self.advice}")
        if settings.get("dp_size", 1) > 1:
            raise ValueError(f"{url} has {settings['dp_size']} replicas, and SGLang refuses weights then: --dp-size 1.")
        return Path(folder), settings.get("tp_size", 1)

    def load_into(self, url: str, folder: Path, version: str) -> None:
        served, num_ranks = self.read_settings(url)
        check_head(folder, served)
        try:
            self.ask(url, "pause_generation", {"mode": "retract"})
            self.begin(url)
            self.send(url, folder, version, num_ranks)
            self.ask(url, "end_weight_update", {})
        finally:
            self.release(url, "continue_generation")

    def begin(self, url: str) -> None:
        """Opens a session, in place of one that a lost client left open."""
        try:
            self.ask(url, "begin_weight_update", {"selector": "draft"})
        except ValueError as error:
            if "already open" not in str(error):
                raise
            self.ask(url, "end_weight_update", {})
            self.ask(url, "begin_weight_update", {"selector": "draft"})

    def send(self, url: str, folder: Path, version: str, num_ranks: int) -> None:
        """The cached states of the old head are dropped with the last piece, while no answer runs."""
        pieces = split_pieces(folder)
        for number, piece in enumerate(pieces, 1):
            body = {"serialized_named_tensors": [pack_tensors(piece)] * num_ranks, "selector": "draft"}
            last = {"flush_cache": True, "weight_version": version} if number == len(pieces) else {"flush_cache": False}
            try:
                self.ask(url, "update_weights_from_tensor", body | last)
            except ValueError as error:
                self.release(url, "end_weight_update")
                raise ValueError(f"{error} The served head may have parts of {folder}: put a whole one in.") from None


def check_head(folder: Path, served: Path) -> None:
    """Raises ValueError unless the head in `folder` can replace the served one. SGLang itself would end.

    Besides the layout it must have the draft vocabulary of the served head.
    """
    if not served.is_dir():
        raise ValueError(
            f"SGLang was started with the head {served}, which is not here. A head of another layout ends SGLang, "
            "so start it with a folder that this machine sees as well."
        )
    read_layout(folder).check(folder, read_layout(served))
    ids = read_id_maps(served)
    if any(not torch.equal(tensor, ids[name]) for name, tensor in read_id_maps(folder).items()):
        raise ValueError(f"{folder} has another draft vocabulary than {served}, which SGLang reads at its start only.")


def read_id_maps(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in read_tensors(folder) if name in ID_MAPS}


def split_pieces(folder: Path) -> list[NamedTensors]:
    """The tensors to be sent, in the pieces in which they are sent."""
    pieces: list[NamedTensors] = [[]]
    size = 0
    for name, tensor in read_tensors(folder):
        if name in ID_MAPS:
            continue
        if pieces[-1] and size + tensor.nbytes > PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append((name, tensor))
        size += tensor.nbytes
    return pieces


def pack_tensors(tensors: NamedTensors) -> str:
    """The payload of a rank."""
    return base64.b64encode(pickle.dumps(tensors)).decode()
