"""Training with a server as the source of the target's outputs: the same losses as with the target in the process."""

import contextlib
import fcntl
import importlib
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import safetensors.torch
import torch

from scripts import answer as answer_script
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget
from specdec.target.model import Target
from tests.engines.tiny_engine import TinyEngine
from tests.support.commands import ROOT, write_rows
from tests.support.quantised import quantise
from tests.support.runs import losses_of
from tests.support.small_server import SmallServer

LAYERS = [2, 3, 4, 5, 6, 8]  # what these heads read of the tiny target's 8 layers, and the last


@pytest.fixture
def engine(folder, tmp_path):
    with TinyEngine(Target.load(str(folder / "target"), dtype="float32"), LAYERS, tmp_path) as engine:
        yield engine


def settings(engine: TinyEngine) -> tuple[str, ...]:
    return "features.mode=engine", f"features.engine={engine.url}"


@pytest.fixture
def ends(folder) -> Target:
    return Target.load_ends(str(folder / "target"), dtype="float32")


@pytest.mark.parametrize("head", ["eagle3", "mtp", "dflash", "medusa", "draft"])
def test_losses_and_tau_are_those_of_the_target_in_this_process(fit, engine, head, monkeypatch):
    fit("online", f"head={head}", "features.mode=online")
    monkeypatch.delattr(Target, "load")  # this process never holds the layers
    fit("engine", f"head={head}", *settings(engine))
    online, served = losses_of("online"), losses_of("engine")
    assert online.keys() == served.keys() and len(online) > 2
    assert all(abs(online[step] - served[step]) <= 1e-4 * online[step] + 1e-7 for step in online)
    run = Path("checkpoints/engine")
    assert (run / "best").exists() and list(run.glob("step_*/drafter.json")) and list(run.glob("step_*/report.json"))


def test_llama_cpp_is_refused_and_so_is_another_form_of_the_target(engine, ends, folder, tmp_path):
    def connect(**settings) -> EngineTarget:
        def reply(path, body):
            return (200, {"data": [{"id": "target", **settings}]}) if body is None else engine._reply(path, body)

        with SmallServer(reply) as server, contextlib.closing(EngineClient(server.url)) as client:
            return EngineTarget(client, ends, (4,))

    with pytest.raises(ValueError, match=r"is llama.cpp's server, which gives answers only .*use vLLM"):
        connect(owned_by="llamacpp")
    served = quantise(folder / "target", tmp_path / "w4a16", "w4a16")
    with pytest.raises(
        ValueError, match=r"serves compressed-tensors-4bit weights .*w4a16.* has unquantised .* give target.name="
    ):
        connect(root=str(served))
    for root in (str(folder / "target"), "/nowhere/else", "user/unknown"):
        assert connect(root=root).model == "target"


def test_a_folder_is_filled_once(fit, engine, tmp_path):
    options = (f"features.engine={engine.url}", "features.mode=cached", "features.folder=cache")
    fit("first", *options)
    num = len(engine.completions)
    fit("second", *options, "train.seed=3")
    assert len(engine.completions) - num <= 1 + 3  # the try at the start; prompts, which were answered before, are read
    assert losses_of("first").keys() == losses_of("second").keys()
    assert not [path for path in tmp_path.glob("*.safetensors") if path.parent == engine.folder]


def test_an_engine_that_dies_twice_loses_nothing(fit, engine, folder):
    fit("whole", *settings(engine))

    def die(number: int, reply: dict) -> None:
        if number in stops:
            reply["answer"] = None  # the connection ends
            threading.Thread(target=restart).start()

    def restart() -> None:
        engine.__exit__()
        time.sleep(0.3)
        engine.__enter__()

    first = len(engine.completions)
    stops = (first + 3, first + 12)
    engine.spoil = die
    fit("died", *settings(engine))
    assert losses_of("died") == losses_of("whole")


def test_answers_alone_leave_no_files_behind(engine, folder, tmp_path, monkeypatch):
    write_rows(folder / "asked.jsonl", [{"id": str(n), "prompt": f"Count from {n}."} for n in range(3)])
    monkeypatch.chdir(tmp_path)
    answer_script.main([f"prompts={folder}/asked.jsonl", "out=answers.jsonl", f"target.name={folder}/target",
                        "target.dtype=float32", "max_new_tokens=12", "decode.temperature=0",
                        f"engine={engine.url}"])  # fmt: skip
    assert not list(engine.folder.glob("*.safetensors")) and len(Path("answers.jsonl").read_text().splitlines()) == 3


# What is wrong with an answer, and what is said


def cut(reply):
    reply["tensors"] = {name: value[:-1] for name, value in reply["tensors"].items()}


def change(function, **settings):
    """A fault of the hidden states [t, layers, D]: what `function` makes of them. settings: the metadata"""

    def fault(reply):
        reply["tensors"]["hidden_states"] = function(reply["tensors"]["hidden_states"])
        reply["metadata"] = settings or reply["metadata"]

    return fault


def fill_token(number, value):
    return lambda states: states.index_fill(0, torch.tensor(number), value)


FAULTS = {
    "cut": (cut, "prefix caching must be off"),
    "other model": (change(torch.randn_like), "differ by .* on average.* serves another model than .* other layers"),
    "shifted layers": (
        change(lambda states: states.roll(1, dims=1)),
        "do not give its own log-probabilities: over 127",
    ),
    "shifted inner layers": (
        change(lambda states: torch.cat([states[:, 1:-1], states[:, -2:]], dim=1)),
        r"hidden state 2 differs .* by [\d.]+ of its length .*, and from the layers beside it by",
    ),
    "noise": (change(lambda states: states * (1 + 0.01 * torch.randn_like(states))), "differ by .* on average"),
    "noise in one layer": (
        change(lambda states: states * (1 + 0.01 * (torch.arange(6) == 0)[:, None] * torch.randn_like(states))),
        r"hidden state 2 differs .* \(at most 0\.0001 is accepted\)",
    ),
    "no log-probabilities": (
        lambda reply: reply["answer"]["choices"][0].pop("prompt_logprobs", None),
        "gives no log-probabilities of a prompt",
    ),
    "no file": (lambda reply: reply.update(tensors=None), "cannot be read .* The engine's log says why"),
    "not finite": (change(fill_token(0, float("nan"))), "not finite, or all zero"),
    "zero": (change(fill_token(1, 0)), "not finite, or all zero"),
    "fewer layers": (
        change(lambda states: states[:, 1:], layers="[3, 4, 5, 6, 8]"),
        r"gives layers \[3, 4, 5, 6, 8\], and the head needs \[2, 4, 5, 8\].*'layers=\[2, 4, 5, 8\]'",
    ),
    "unnamed layers": (
        change(lambda states: states, other=""),
        "gives layers without their numbers, and the head needs",
    ),
    "narrow": (change(lambda states: states[..., 1:]), "it serves another model"),
    "no states": (
        lambda reply: reply["answer"].pop("kv_transfer_params"),
        r"gives no hidden states\. Start it again with specdec launch_engine\.",
    ),
    "no ids": (lambda reply: reply["answer"]["choices"][0].pop("token_ids"), "does not return token ids"),
}
TEXT = torch.tensor([5, 6, 7])


@pytest.fixture
def source(engine, ends, monkeypatch):
    """source(layer, ..., setting=...): the target in the engine; bad answers are asked for again at once"""
    monkeypatch.setattr("specdec.engines.client.LONGEST_PAUSE", 0.01)
    return lambda *layers, **settings: EngineTarget(EngineClient(engine.url, **settings), ends, layers)


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_is_not_right_is_refused_with_a_reason(engine, source, name):
    fault, what = FAULTS[name]
    good = source(2, 4, 5)
    engine.spoil = lambda number, reply: fault(reply)
    with pytest.raises(ValueError, match=what):
        source(2, 4, 5)
    if name not in ("cut", "no file", "not finite", "zero"):
        return
    num = len(engine.completions)  # such an answer is asked for again
    engine.spoil = lambda number, reply: fault(reply) if number == num else None
    states = good.submit(TEXT, (2, 8)).result()
    assert [tuple(state.shape) for state in states] == [(3, good.target.width)] * 2
    assert len(engine.completions) == num + 2


def test_a_server_that_has_applied_the_last_norm_is_refused(folder, tmp_path):
    whole = Target.load(str(folder / "target"), dtype="float32")
    whole.norm.weight.data.uniform_(0.5, 2.0)  # of ones it would change nothing
    whole.model.save_pretrained(tmp_path / "target")
    ends = Target.load_ends(str(tmp_path / "target"), dtype="float32")

    def apply_norm(number: int, reply: dict) -> None:
        states = reply["tensors"]["hidden_states"]
        reply["tensors"]["hidden_states"] = torch.cat([states[:, :-1], ends.norm(states[:, -1:])], dim=1)

    with TinyEngine(whole, LAYERS, tmp_path) as engine:
        EngineTarget(EngineClient(engine.url), ends, (2, 4, 5))
        engine.spoil = apply_norm
        with pytest.raises(ValueError, match="do not give its own log-probabilities"):
            EngineTarget(EngineClient(engine.url), ends, (2, 4, 5))


@pytest.mark.parametrize(("noise", "accepted"), [(0.0, True), (0.002, True), (0.3, False)])
def test_rounding_of_a_server_in_bfloat16_is_accepted_and_noise_is_not(folder, tmp_path, noise, accepted):
    """The noise of .002 is that of rounding to bfloat16."""
    name = str(folder / "target")
    with TinyEngine(Target.load(name, dtype="bfloat16"), LAYERS, tmp_path) as engine:
        engine.spoil = lambda number, reply: change(lambda states: states * (1 + noise * torch.randn_like(states)))(
            reply
        )
        ends = Target.load_ends(name, dtype="bfloat16")
        with contextlib.nullcontext() if accepted else pytest.raises(ValueError, match="differ by"):
            EngineTarget(EngineClient(engine.url), ends, (2, 4, 5))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("scale", [0.003, 0.1])
def test_each_of_several_servers_is_checked_alone(folder, ends, tmp_path, wrong, scale):
    """Another model's error must not widen what is accepted as the difference of two passes of one server."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            whole = Target.load(str(folder / "target"), dtype="float32")
            if number == wrong:
                whole.lm_head.weight.data += scale * torch.randn_like(whole.lm_head.weight)
            servers.append(stack.enter_context(TinyEngine(whole, LAYERS, tmp_path / str(number))))
        urls = ",".join(server.url for server in servers)
        with pytest.raises(ValueError, match="do not give its own log-probabilities"):
            EngineTarget(EngineClient(urls), ends, (2, 4, 5))


@pytest.mark.parametrize(("served", "here"), [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float16")])
def test_a_server_may_compute_in_a_coarser_dtype(folder, tmp_path, served, here):
    name = str(folder / "target")
    with TinyEngine(Target.load(name, dtype=served), LAYERS, tmp_path) as engine:
        EngineTarget(EngineClient(engine.url), Target.load_ends(name, dtype=here), (2, 4, 5))


def test_what_is_not_compared_is_said(folder, tmp_path, capsys):
    """Of the layers 2, 4 and 5 the files give 2 and 4; noise in layer 4 is refused, too."""
    name, ends = str(folder / "target"), Target.load_ends(str(folder / "target"), dtype="float32")
    with TinyEngine(Target.load(name, dtype="float32"), LAYERS, tmp_path) as engine:
        EngineTarget(EngineClient(engine.url), ends, (2, 4, 5))
        assert "hidden state 5 of the engine is not compared with the target's" in capsys.readouterr().out
        EngineTarget(EngineClient(engine.url), ends, (2, 4))
        assert "not compared" not in capsys.readouterr().out
        noise = 0.01 * (torch.tensor(LAYERS) == 4)[:, None]
        engine.spoil = lambda number, reply: change(lambda states: states * (1 + noise * torch.randn_like(states)))(
            reply
        )
        with pytest.raises(ValueError, match="hidden state 4 differs"):
            EngineTarget(EngineClient(engine.url), ends, (2, 4, 5))


def test_trees_are_refused(fit, engine):
    with pytest.raises(ValueError, match="judged by replay, which needs a chain"):
        fit("refused", *settings(engine), "decode=tree")


# The connector inside vLLM


@pytest.fixture
def connector(monkeypatch):
    """-> the connector of an engine with LAYERS, over the part of vLLM's own that it uses"""

    class OfVllm:
        """Writes in a thread, by its own `_write_tensors`, which is a static method there."""

        _is_tp_rank_zero, _block_size = True, 4

        def __init__(self):
            config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(reversed(LAYERS)))
            draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
            self._vllm_config = SimpleNamespace(speculative_config=draft)
            self._lock_fds, self._req_copy_events, self._executor = {}, {}, ThreadPoolExecutor(1)

        def _submit_async_write(self, pending):
            tensors = {"hidden_states": self._kv_cache, "token_ids": pending.token_ids}
            event = SimpleNamespace(synchronize=lambda: None)
            lock = self._lock_fds.pop(pending.req_id, None)
            self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock).result()

        @staticmethod
        def _write_tensors(tensors, event, filename, lock_fd):
            event.synchronize()
            safetensors.torch.save_file(tensors, filename)
            os.close(lock_fd)

    module = ModuleType("example_hidden_states_connector")
    module.ExampleHiddenStatesConnector, module.logger = OfVllm, logging.getLogger("vllm")
    module.extract_from_kv_cache = lambda cache, slots, num: cache[:num]
    parts = "vllm.distributed.kv_transfer.kv_connector.v1".split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    sys.modules[".".join(parts)].example_hidden_states_connector = module
    monkeypatch.syspath_prepend(str(ROOT / "train" / "features" / "in_vllm"))
    monkeypatch.delitem(sys.modules, "hidden_states_connector", raising=False)
    yield importlib.import_module("hidden_states_connector").HiddenStatesConnector()
    sys.modules.pop("hidden_states_connector", None)


@pytest.mark.parametrize("gpu", [False, True])
def test_an_engine_with_more_layers_than_the_head_reads_serves_it(engine, source, connector, monkeypatch, gpu):
    """On a GPU vLLM's own writer runs."""
    expected = source(2, 4).submit(TEXT, (2, 8)).result()

    def write(number, reply):
        tensors, path = reply["tensors"], reply["answer"]["kv_transfer_params"]["hidden_states_path"]
        connector._kv_cache = tensors["hidden_states"].contiguous()
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        connector._lock_fds["one"] = lock
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: gpu)
            pending = SimpleNamespace(req_id="one", filename=path, token_ids=tensors["token_ids"], block_ids=[0, 1, 2])
            connector._submit_async_write(pending)
        assert not connector._lock_fds
        reply["tensors"] = None  # it is written

    engine.spoil = write
    found = source(2, 4).submit(TEXT, (2, 8)).result()
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
