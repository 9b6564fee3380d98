"""Tests of new draft weights for running servers: stand-ins that hold the rules of their sessions, and faults.

vLLM itself is tested in test_swapped_heads.py, and specdec's own server in tests/tools/server/test_weights.py. SGLang
has no build for a CPU: its rules are those of its source.
"""

import base64
import contextlib
import json
import os
import pickle
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engines.client import EngineClient
from specdec.engines.draft_weights import base, sglang
from specdec.engines.draft_weights.choice import open_draft_weights
from specdec.engines.draft_weights.vllm import IN_VLLM, make_vllm_words
from tests.engines.test_served_heads import PYTHON, engines
from tests.support.commands import ROOT
from tests.support.small_server import Reply, SmallServer

LOST = None  # a reply that cuts the connection
TENSORS = {"fc.weight": torch.randn(4, 6, dtype=torch.bfloat16), "norm.weight": torch.randn(4), "d2t": torch.arange(3)}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(base, "LEAST_PAUSE", 0.01)


def save_head(folder: Path, *, fields: dict | None = None, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    save_file(TENSORS | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"} | (fields or {})))
    return folder


class Engine(SmallServer):
    """A server with draft weights, by the replies of a subclass.

    faults: replies in place of its own, by path; delays: seconds before its replies, by path
    """

    kind = ""

    def __init__(self):
        super().__init__(self.reply_or_fault)
        self.faults: dict[str, list[Reply | None]] = {}
        self.delays: dict[str, float] = {}
        self.version, self.paused = "", False

    def reply_or_fault(self, path: str, body: dict | None) -> Reply | None:
        time.sleep(self.delays.get(path, 0))
        if self.faults.get(path):
            return self.faults[path].pop(0)
        if path == "v1/models":
            return 200, {"data": [{"id": "target", "owned_by": self.kind}]}
        return self.reply_to(path, body)

    def reply_to(self, path: str, body: dict | None) -> Reply | None:
        return 404, {"error": {"message": "Not Found"}}


class Vllm(Engine):
    """The session of vLLM 0.32, with its messages."""

    kind = "vllm"

    def __init__(self):
        super().__init__()
        self.is_active, self.folder = False, "first"

    def fail(self, message: str) -> Reply:
        text = (
            f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace"
        )
        return 500, {"error": {"message": f"{text} above for the root cause", "code": 500}}

    def reply_to(self, path: str, body: dict | None) -> Reply | None:
        if path == "init_weight_transfer_engine" and body == {"init_info": {}}:
            return 200, {"message": "Weight transfer initialized"}
        if path in ("pause?mode=wait", "resume"):
            self.paused = path != "resume"
            return 200, {"status": path}
        if path == "start_draft_weight_update":
            if self.is_active:
                return self.fail("start_weight_update called while a weight update is already active.")
        elif path in ("update_weights", "finish_weight_update") and not self.is_active:
            return self.fail(f"start_weight_update must be called before {path}.")
        elif path == "update_weights":
            folder = body["update_info"]["folder"]
            if not Path(folder).is_dir():
                self.is_active = False
                return self.fail("<path> is no folder that this machine sees")
            self.folder = folder
        elif path == "finish_weight_update":
            self.version = body.get("weight_version", self.version)
        else:
            return super().reply_to(path, body)
        self.is_active = path != "finish_weight_update"
        return 200, {"message": path}


class Sglang(Engine):
    """The session of SGLang 0.5.23, with its messages. Payloads are read as its unpickler does."""

    kind = "sglang"

    def __init__(self, head: Path, num_ranks: int = 1, **settings):
        super().__init__()
        self.settings = {"speculative_draft_model_path": str(head), "tp_size": num_ranks, "dp_size": 1, **settings}
        self.is_open, self.flushed = False, 0
        self.ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]

    def reply_to(self, path: str, body: dict | None) -> Reply | None:
        if path == "server_info":
            return 200, self.settings
        if path in ("pause_generation", "continue_generation"):
            assert path == "continue_generation" or body == {"mode": "retract"}
            self.paused = path == "pause_generation"
            return 200, {"message": "ok", "status": "ok"}
        if path not in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update"):
            return super().reply_to(path, body)
        message = self.change(path, body)
        return (200 if message is None else 400), {"success": message is None, "message": message or "Success"}

    def change(self, path: str, body: dict) -> str | None:
        """-> the reason of a refusal"""
        begins = path == "begin_weight_update"
        if self.is_open == begins:
            return "a weight-update session is already open; call end_weight_update() first" if begins else (
                f"{path} must run between begin_weight_update() and end_weight_update()"
            )  # fmt: skip
        self.is_open = path != "end_weight_update"
        if path != "update_weights_from_tensor":
            return None if not begins or body == {"selector": "draft"} else "the target's weights"
        assert body["selector"] == "draft" and len(body["serialized_named_tensors"]) == len(self.ranks)
        for rank, payload in zip(self.ranks, body["serialized_named_tensors"]):
            rank |= dict(pickle.loads(base64.b64decode(payload, validate=True)))
        if body["flush_cache"]:
            if not self.paused:
                return "Weights were updated, but the cache was not flushed because requests are still running"
            self.flushed += 1
        self.version = body.get("weight_version", self.version)
        return None


class OwnServer(Engine):
    """specdec's own server, which takes weights or not."""

    def __init__(self, takes_weights: bool):
        super().__init__()
        self.entry = {"id": "target", "owned_by": "specdec", "draft": {"takes_weights": takes_weights}}

    def reply_or_fault(self, path: str, body: dict | None) -> Reply | None:
        return (200, {"data": [self.entry]}) if path == "v1/models" else super().reply_or_fault(path, body)


@contextlib.contextmanager
def opened(*servers: Engine):
    """The draft weights of running servers."""
    with contextlib.ExitStack() as stack:
        urls = ",".join(stack.enter_context(server).url for server in servers)
        client = stack.enter_context(contextlib.closing(EngineClient(urls, say=lambda _: None)))
        yield open_draft_weights(client, client.describe_models()[0][0])


def paths_behind(server: Engine, path: str) -> list[str]:
    """What a server was asked from its last request for `path` on."""
    paths = server.paths()
    return paths[len(paths) - 1 - paths[::-1].index(path) :]


def test_vllm_gets_a_folder_in_a_session_between_answers(tmp_path, monkeypatch):
    head, servers = save_head(tmp_path / "head"), [Vllm(), Vllm()]
    with opened(*servers) as weights:
        assert weights.format == "vllm" and 0 < weights.load(head, "step-1") < 5
        for server in servers:
            assert (server.folder, server.version, server.paused, server.is_active) == (
                str(head),
                "step-1",
                False,
                False,
            )
            assert paths_behind(server, "pause?mode=wait") == [
                "pause?mode=wait", "start_draft_weight_update", "update_weights", "finish_weight_update", "resume",
            ]  # fmt: skip
        servers[0].is_active = True  # by a client that was killed
        assert weights.load(head, "step-2") and servers[0].version == servers[1].version == "step-2"
        servers[0].delays["update_weights"] = 0.3
        with monkeypatch.context() as patch:
            patch.setattr(weights.client.client, "timeout", 0.1)
            with pytest.raises(ValueError, match=r"has not answered at /update_weights in time"):
                weights.load(head, "step-late")
        servers[0].delays.clear()
        servers[0].faults["update_weights"] = [(503, {"error": "busy"}, {"Retry-After": "0"}), (429, {}), (409, {})]
        assert weights.load(head, "step-3") and servers[0].version == "step-3"
        missing = tmp_path / "missing"
        with pytest.raises(
            ValueError, match=rf"/update_weights failed: {missing} is no folder that this machine sees\.$"
        ):
            weights.load(missing, "step-4")
        assert servers[0].folder == str(head) and not servers[0].paused and servers[1].version == "step-3"


def test_the_one_of_our_servers_that_takes_no_weights_is_named():
    servers = [OwnServer(True), OwnServer(False)]
    with pytest.raises(ValueError, match="takes no draft weights") as error, opened(*servers):
        pass
    assert str(error.value).startswith(servers[1].url)


def test_a_vllm_without_its_words_is_told_them(monkeypatch):
    environment, flags = make_vllm_words()
    assert Path(environment["PYTHONPATH"]) == IN_VLLM and flags[0] == "--weight-transfer-config"
    server = Vllm()
    not_configured = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
    no_head = "Draft model weight update requested, but no draft model is configured."
    for path, reply in (
        ("init_weight_transfer_engine", server.fail(not_configured)),
        ("start_draft_weight_update", server.fail(no_head)),
        ("init_weight_transfer_engine", (404, {"error": {"message": "Not Found"}})),
    ):
        server.faults[path] = [reply]
        with pytest.raises(ValueError) as error, opened(server):
            pass
        words = (*flags, *environment, "VLLM_SERVER_DEV_MODE=1", "--per-request-spec-decode-metrics detailed")
        assert all(word in str(error.value) for word in words)
        assert "specdec launch_engine engine=vllm export=FOLDER weights=true" in str(error.value)
        assert f"{server.url}/{path}" in str(error.value)
    server.faults["init_weight_transfer_engine"] = [(403, {"error": {"message": "no key"}})]
    with pytest.raises(ValueError, match=r"status 403: no key.*OPENAI_API_KEY"), opened(server):
        pass


@pytest.mark.parametrize("lost", ["pause?mode=wait", "update_weights", "resume"])
def test_a_vllm_that_ends_in_the_middle_is_named(tmp_path, lost):
    server, head = Vllm(), save_head(tmp_path / "head")
    with opened(server) as weights:
        server.faults = {path: [LOST] * 9 for path in (lost, "resume")}
        if lost == "resume":
            weights.load(head, "step-1")
            return
        with pytest.raises(ValueError, match=rf"{server.url} does not answer at /{lost[:5]}.*the head of its start"):
            weights.load(head, "step-1")
    with (
        pytest.raises(ValueError, match="No server with OpenAI's interface answers"),
        contextlib.closing(EngineClient(server.url, say=lambda _: None)) as client,
    ):
        client.describe_models()


def test_sglang_gets_the_tensors_in_pieces_once_a_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang, "PIECE_BYTES", 40)  # the first tensor is larger, and goes alone
    served = save_head(tmp_path / "served")
    changes = {name: torch.randn_like(tensor) for name, tensor in TENSORS.items() if tensor.is_floating_point()}
    head, server = save_head(tmp_path / "head", fields={"torch_dtype": "bfloat16"}, **changes), Sglang(served, 2)
    with opened(server) as weights:
        assert weights.format == "sglang" and weights.load(head, "step-7") > 0
        assert server.paths()[-6:] == ["pause_generation", "begin_weight_update", *2 * ["update_weights_from_tensor"],
                                       "end_weight_update", "continue_generation"]  # fmt: skip
        assert (server.version, server.flushed, server.paused, server.is_open) == ("step-7", 1, False, False)
        for rank in server.ranks:
            assert rank.keys() == changes.keys()  # d2t stays that of the start
            assert all(
                torch.equal(rank[name], tensor) and rank[name].dtype == tensor.dtype for name, tensor in changes.items()
            )
        server.is_open = True  # by a client that was killed
        assert weights.load(head, "step-8") and server.version == "step-8"
        assert server.reply_to("update_weights_from_tensor", {})[0] == 400  # without a session
        server.faults["update_weights_from_tensor"] = [(400, {"success": False, "message": "no memory"})]
        with pytest.raises(ValueError, match="no memory The served head may have parts of"):
            weights.load(head, "step-9")
        assert (server.version, server.paused, server.is_open) == ("step-8", False, False)


@engines
def test_sglang_itself_reads_what_it_is_sent(tmp_path):
    """Its classes of requests, and its unpickler, which takes few kinds of objects."""
    head, server = save_head(tmp_path / "head"), Sglang(tmp_path / "head", 2)
    with opened(server) as weights:
        num = len(server.requests)
        weights.load(head, "step-1")
        requests = [request for request in server.requests[num:] if request[0] != "server_info"]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    command = [PYTHON, ROOT / "tests/engines/sglang_requests.py", ROOT / "engines/sglang", tmp_path / "requests.json"]
    subprocess.run([*command, tmp_path / "read"], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    read = load_file(tmp_path / "read")
    assert read.keys() == TENSORS.keys() - {"d2t"}
    assert all(
        torch.equal(tensor, TENSORS[name]) and tensor.dtype == TENSORS[name].dtype for name, tensor in read.items()
    )


def test_a_head_that_would_end_sglang_is_not_sent(tmp_path):
    served = save_head(tmp_path / "served")
    with opened(server := Sglang(served)) as weights:
        num = len(server.requests)
        for changes, message in (
            ({"norm.weight": torch.ones(5)}, r"norm\.weight \(tensors\) is \[5\], and that of the served head \[4\]"),
            ({"more": torch.ones(1)}, r"more \(tensors\) is \[1\], and that of the served head None"),
            ({"fields": {"rope_theta": 5}}, r"rope_theta \(config\.json\) is 5, and .* None"),
            ({"d2t": torch.ones(3, dtype=torch.long)}, "another draft vocabulary than"),
        ):
            folder = save_head(tmp_path / message[:4].strip("\\"), **changes)
            with pytest.raises(ValueError, match=message):
                weights.load(folder, "step")
        with pytest.raises(ValueError, match=rf"{tmp_path} has no config\.json"):
            weights.load(tmp_path, "step")
        assert {path for path, _ in server.requests[num:]} == {"server_info"}
        server.settings["speculative_draft_model_path"] = "user/head"
        with pytest.raises(ValueError, match="SGLang was started with the head user/head, which is not here"):
            weights.load(served, "step")
    for settings, message in (
        ({"speculative_draft_model_path": None}, "drafts with no head .* --speculative-draft-model-path"),
        ({"dp_size": 2}, "has 2 replicas, and SGLang refuses weights then: --dp-size 1"),
    ):
        with pytest.raises(ValueError, match=message), opened(Sglang(served, **settings)):
            pass


def test_another_server_has_to_be_restarted():
    server = Engine()
    server.kind = "llamacpp"
    with pytest.raises(ValueError, match=r"\(llamacpp\) takes no draft weights while it runs"), opened(server):
        pass
