"""Tests of helpers/vllm_weights.py and of adapt.py vllm=, before a server with the part of vLLM's routes that they use."""

from helpers import loading, vllm_weights

import importlib
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_server import Reply, SmallServer
from tests.support import ROOT, save_eagle, save_target

SENT = ["init_weight_transfer_engine", "start_draft_weight_update", "update_weights", "finish_weight_update"]
FLOAT32 = loading.TargetOptions(dtype="float32")


class TinyVllm(SmallServer):
    """As vLLM in development mode, with draft_folder in it: what is sent out of order fails, and a failure ends the update.

    refuse: the route that fails, and what it says
    """

    def __init__(self):
        super().__init__(self._reply)
        self.version, self.active, self.tensors = "default", False, None
        self.refuse: tuple[str, str] | None = None

    def _reply(self, path: str, body: dict | None) -> Reply:
        if self.refuse is not None and path == self.refuse[0]:
            self.active = False
            return self._failed(self.refuse[1])
        if path == "weight_info":
            return 200, {"weight_version": self.version}
        if path == SENT[0]:
            return (200, {}) if body == {"init_info": {"reads": "folders"}} else self._failed("Invalid init_info")
        if path not in SENT:
            return 404, {"detail": "Not Found"}
        if self.active == (path == "start_draft_weight_update"):
            return self._failed("an update is active" if self.active else "no update is active")
        if path == "update_weights":
            self.tensors = load_file(Path(body["update_info"]["folder"], "model.safetensors"))
        else:
            self.active = path == "start_draft_weight_update"
        if path == "finish_weight_update":
            self.version = body.get("weight_version", self.version)
        return 200, {"message": "done"}

    def _failed(self, message: str) -> Reply:
        return 500, {"error": {"message": message, "code": 500}}


@pytest.fixture
def server():
    with TinyVllm() as server:
        yield server


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save_eagle(folder / "head", save_target(folder / "target"))
    return folder / "head"


@pytest.fixture(scope="module")
def exported(head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "0001"
    vllm_weights.export(head, folder, FLOAT32)
    return folder


def test_an_export_is_sent_in_the_order_of_an_update(server, exported):
    vllm_weights.Server(server.url + "/").send(exported, "heads/0001")
    assert server.paths() == SENT
    assert Path(server.requests[2][1]["update_info"]["folder"]).is_absolute()
    assert server.version == vllm_weights.Server(server.url).version() == "heads/0001"
    assert server.tensors.keys() == load_file(exported / "model.safetensors").keys() != set()


def test_an_update_that_another_sender_left_is_ended_first(server, exported):
    server.active = True
    vllm_weights.Server(server.url).send(exported, "heads/0001")
    assert server.version == "heads/0001" and not server.active


@pytest.mark.parametrize(
    "route, sent", [(SENT[0], 1), (SENT[1], 3), (SENT[2], 3)]
)  # after a start that fails, the end of another update is tried
def test_what_the_server_says_is_told(server, exported, route, sent):
    server.refuse = route, "of another shape"
    with pytest.raises(ValueError, match=f"{route} answers with status 500: of another shape"):
        vllm_weights.Server(server.url).send(exported, "heads/0001")
    assert server.version == "default" and len(server.requests) == sent and server.tensors is None


def test_servers_that_cannot_be_used_are_named(exported):
    with SmallServer(lambda path, body: (404, {})) as other, pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
        vllm_weights.Server(other.url).version()
    with pytest.raises(ValueError, match="does not answer"):
        vllm_weights.Server(other.url).version()  # it has ended
    with pytest.raises(ValueError, match="does not answer"):
        vllm_weights.Server("localhost:8000").version()
    with SmallServer(lambda path, body: (500, "no JSON")) as other, pytest.raises(ValueError, match="500: no JSON"):
        vllm_weights.Server(other.url).version()


def test_a_version_is_of_the_content(head, tmp_path):
    first = vllm_weights.version_of(head)
    other = tmp_path / head.parent.name / head.name
    shutil.copytree(head, other)
    assert vllm_weights.version_of(other) == first
    tensors = (other / "drafter.safetensors").read_bytes()
    (other / "drafter.safetensors").write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
    assert vllm_weights.version_of(other) != first


# The part that runs in vLLM, with a stand-in for vLLM: what it reads, and what it refuses before anything has changed


Init, Update = TypeVar("Init"), TypeVar("Update")


class Transport(Generic[Init, Update]):
    """As vLLM's base class of transports."""

    def __init__(self, config, vllm_config, device, model):
        self.model = self._default_model = model
        self.model_config = None


class Draft(torch.nn.Module):
    """A drafter whose embedding is the target's."""

    def __init__(self, target: torch.nn.Module):
        super().__init__()
        self.embed_tokens, self.loaded = target.embed_tokens, []

    def load_weights(self, tensors):
        self.loaded = list(tensors)
        if not self.loaded[0][1].isfinite().all():
            raise RuntimeError("in the middle")


@pytest.fixture
def replaced(monkeypatch, tmp_path):
    """-> the transport for a drafter that was read from tmp_path/served, and what it did"""
    done: list[str] = []
    parts = {
        "distributed.weight_transfer.base": {
            "WeightTransferEngine": Transport,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, _: done.append(name))
        },
        "model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": nullcontext},
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _: done.append("begin"),
            "finalize_layerwise_reload": lambda *_: done.append("end"),
        },
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.syspath_prepend(str(ROOT / "train" / "in_vllm"))
    monkeypatch.delitem(sys.modules, "draft_folder", raising=False)
    write(tmp_path / "served")
    module = importlib.import_module("draft_folder")
    target = torch.nn.Module()
    target.embed_tokens = torch.nn.Embedding(4, 2)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(model=str(tmp_path / "served")))
    )
    transport = module.DraftFolder(None, config, "cpu", target)
    transport.model = Draft(target)
    yield SimpleNamespace(take=lambda folder: transport.receive_weights(module.Folder(str(folder))), all=transport,
                          done=done, module=module, config=config)  # fmt: skip
    sys.modules.pop("draft_folder", None)


def write(folder: Path, *, value: float = 1.0, width: int = 2, embedding: float = 0.0, **config) -> Path:
    folder.mkdir()
    tensors = {"fc.weight": torch.full((2, width), value), "model.embed_tokens.weight": torch.full((4, 2), embedding)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 2, "torch_dtype": "float32"} | config))
    return folder


def test_weights_of_another_folder_are_loaded(replaced, tmp_path):
    replaced.take(write(tmp_path / "new", value=3.0, torch_dtype="bfloat16"))
    assert replaced.done == ["draft_folder", "begin", "end"]
    assert dict(replaced.all.model.loaded)["fc.weight"].mean() == 3


def test_folders_that_do_not_fit_change_nothing(replaced, tmp_path):
    for number, (change, message) in enumerate(
        [
            ({"width": 3}, "other names or shapes"),
            ({"hidden_size": 3}, "another config.json"),
            ({"embedding": 1.0}, "shares with its target"),
        ]
    ):
        with pytest.raises(ValueError, match=message):
            replaced.take(write(tmp_path / str(number), **change))
    with pytest.raises(ValueError, match="has no tensors"):
        replaced.take(tmp_path / "nowhere")
    assert replaced.done == ["draft_folder"] and replaced.all.model.loaded == []
    replaced.all.model.embed_tokens = torch.nn.Embedding(4, 2)  # its own
    replaced.take(tmp_path / "2")


def test_the_target_is_whole_again_after_an_error(replaced, tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"):
        replaced.take(write(tmp_path / "new", value=float("nan")))
    assert replaced.done[1:] == ["begin", "end"]


def test_only_a_drafter_from_a_folder_is_replaced(replaced):
    replaced.all.start_weight_update()
    replaced.all.model = replaced.all._default_model
    with pytest.raises(ValueError, match="start_draft_weight_update"):
        replaced.all.start_weight_update()
    for draft in (None, SimpleNamespace(model="user/name")):
        replaced.config.speculative_config.draft_model_config = draft
        with pytest.raises(ValueError, match="was read from a folder"):
            replaced.module.DraftFolder(None, replaced.config, "cpu", torch.nn.Module())
