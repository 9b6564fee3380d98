"""scripts/bench.py with rivals: stand-ins for llama.cpp and vLLM answer as the tiny target does, or fail."""

from helpers import loading, rivals

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_clients import llamacpp_client, vllm_client
from engine_clients.child import Child
from engine_clients.vllm_client import Served
from scripts import bench
from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.measuring.benchmark import Timed
from specdec.target.model import Target
from tests.support import save_eagle, save_target, write_prompts

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    target = save_target(folder / "target")
    torch.manual_seed(0)
    checkpoint.save(folder / "draft", Draft(target, num_layers=1), {"_target_": "specdec.heads.draft.Draft"})
    save_eagle(folder / "eagle", target)
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


@pytest.fixture
def engines(monkeypatch, folder) -> list[tuple]:
    """Stand-ins for both engines. -> what happened to them, in order; methods named in FAILING fail at the second prompt"""
    target, events = Target.load(str(folder / "target"), dtype="float32"), []

    def greedy(prompt: list[int], num: int, stop: set[int]) -> list[int]:
        text = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=num, do_sample=False, eos_token_id=sorted(stop)
        )
        return text[0, len(prompt) :].tolist()

    class FakeLlamaCpp:
        def __init__(self, gguf, *, threads, context, draft=None, kind="simple", num=3, settings=None):
            assert Path(gguf).is_file() and (draft is None or Path(draft).is_file())
            self.kind, self.counted = kind, draft is not None or kind != "simple"
            events.append(("start", kind, num if draft else 0))

        def generate(self, prompt, max_new_tokens, stop):
            if self.kind == "ngram-mod" and prompt != [0]:
                raise ValueError("it is out of memory")
            tokens = greedy(prompt, max_new_tokens, stop)
            self.counts = llamacpp_client.Counts((len(tokens) - 1) // 2 if self.kind == "simple" else None)
            return (tokens if self.kind != "ngram-cache" else [*tokens[:-1], 5]), 0.0

        def close(self):
            events.append(("close", self.kind, 0))

    class FakeVllm:
        def __init__(self, target, *, speculative, dtype, max_model_len, threads, overrides, eager):
            assert dtype == "float32" and eager
            self.num = (speculative or {}).get("num_speculative_tokens", 0)
            if speculative and speculative["method"] == "suffix":
                raise ValueError("Arctic Inference [1] is required")
            if speculative and "model" in speculative:
                assert json.loads(Path(speculative["model"], "config.json").read_text())

        def generate(self, prompts, max_new_tokens, stop):
            (answer,) = [greedy(prompt, max_new_tokens, stop) for prompt in prompts]
            return Served([answer], [[([], [])] * (len(answer) - 1)], 0, 0, 0, [])

        def close(self):
            events.append(("close", "vllm", self.num))

    def convert(model, out, *, target=None, outtype):
        assert outtype == "f32" and Path(model, "config.json").is_file()
        Path(out).write_text("GGUF")
        events.append(("convert", Path(out).name, 0))

    monkeypatch.setattr(llamacpp_client, "find_python", lambda: "python")
    monkeypatch.setattr(llamacpp_client, "convert", convert)
    monkeypatch.setattr(rivals, "LlamaCpp", FakeLlamaCpp)
    monkeypatch.setattr(vllm_client, "check", lambda python: None)
    monkeypatch.setattr(vllm_client, "Vllm", FakeVllm)
    return events


@pytest.fixture
def run(folder, run_script):
    """run(...) -> what bench.py printed, and the methods of its JSON"""

    def run(*arguments: str) -> tuple[str, dict]:
        out = folder / "figures.json"
        printed = run_script(
            bench, "target.dtype=float32", "target.device=cpu", f"target.name={folder}/target", "decode.compile=false",
            f"prompts={folder}/prompts.jsonl", "limit=2", f"max_new_tokens={NEW}", "repeats=2", "trees=", f"out={out}", *arguments,
        )  # fmt: skip
        return printed, json.loads(out.read_text())["methods"]

    return run


def test_one_table_of_all_rivals_that_outlives_those_that_fail(run, folder, engines):
    printed, methods = run(f"checkpoint={folder}/draft", "rivals=transformers,llamacpp,vllm")
    name = f"{folder.name}/draft"
    failures = {key: cell["failure"] for key, cell in methods.items() if "failure" in cell}
    assert failures == {
        "llama.cpp (f32 GGUF), ngram-mod": "it is out of memory",
        "vLLM, suffix": "Arctic Inference [1] is required",
    }
    assert "ngram-mod: it is" in printed and "Arctic Inference [1]" in printed
    for key in ("transformers generate", f"generate, assistant_model {name}, dynamic schedule (heuristic)",
                "generate, prompt_lookup_num_tokens=10, n-grams of up to 2", "llama.cpp (f32 GGUF), plain",
                f"llama.cpp (f32 GGUF), {name}, 3 drafts", "vLLM, plain", f"vLLM, {name}, 3 drafts", "plain",
                f"{name}, chain of 3", f"{name}, auto"):  # fmt: skip
        cell = methods[key]
        assert cell["same_as_plain"] == 2 and cell["tokens_per_second"] > 0 and cell["tau"] > 0
        assert cell["to_plain"] > 0 and cell["to_generate"] > 0
    assert methods["llama.cpp (f32 GGUF), plain"]["tau"] == 1 and methods["vLLM, plain"]["tau"] == 1
    assert methods[f"llama.cpp (f32 GGUF), {name}, 3 drafts"]["tau"] > 1
    changed = methods["llama.cpp (f32 GGUF), ngram-cache"]  # its last token is another one; its rounds are not known
    assert changed["same_as_plain"] == changed["same_as_own_plain"] == 0 and "tau" not in changed
    assert methods["vLLM, plain"].keys() == methods["plain"].keys() - {"ms_per_round"}
    assert methods[f"vLLM, {name}, 3 drafts"].keys() - methods["vLLM, plain"].keys() == {
        "same_as_own_plain", "to_own_plain",
    }  # fmt: skip
    # Each file is made once, look-ups start again before each of the two repeats, and everything is closed at the end.
    assert [event[1] for event in engines if event[0] == "convert"] == [
        "target.gguf",
        f"{folder.name}-draft-gguf-3.gguf",
    ]
    starts = [kind for event, kind, _ in engines if event == "start"]
    assert starts.count("ngram-cache") == 3 and starts.count("simple") == 2
    closed = [kind for event, kind, _ in engines if event == "close"]
    assert sorted(starts) == sorted(kind for kind in closed if kind != "vllm") and closed.count("vllm") == 3


def test_a_head_that_an_engine_cannot_serve_says_so_and_prompt_lookup_needs_no_proposer(run, folder, engines):
    _, methods = run(f"checkpoint={folder}/eagle", "rivals=llamacpp", "limit=1", "repeats=1")
    failure = methods[f"llama.cpp (f32 GGUF), {folder.name}/eagle, 3 drafts"]["failure"]
    assert "llama.cpp cannot run Eagle" in failure and "draft models" in failure
    assert not any("prompt_lookup" in name or "vLLM" in name for name in methods)
    _, methods = run("limit=1", "repeats=1", "proposers=ngram")
    assert sum("prompt_lookup" in name for name in methods) == 2  # of generate's defaults, and of this ngram
    assert methods["ngram"]["same_as_plain"] == 1


def test_missing_engines_are_one_row_each(run, folder, monkeypatch):
    monkeypatch.setattr(llamacpp_client, "ENGINES", Path("nowhere"))
    monkeypatch.setattr(llamacpp_client.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(vllm_client, "PYTHON", "nowhere/python")
    _, methods = run("rivals=llamacpp,vllm", "limit=1", "repeats=1")
    failures = {name: cell["failure"] for name, cell in methods.items() if "failure" in cell}
    assert failures.keys() == {"llama.cpp", "vLLM"} and all("`make engines`" in text for text in failures.values())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("rivals=", "nothing to time: give checkpoint="),
        ("rivals=llama", "rivals=llama: there are transformers, llamacpp, vllm"),
        ("gguf=x.gguf", "gguf= is for llama.cpp: give rivals=transformers,llamacpp"),
        ("gguf_type=q4_0", "gguf_type=q4_0 must be one of bf16, f16, f32"),
    ],
)
def test_wrong_options_are_refused(refuse, argument, message):
    refuse(message, argument)


def test_engines_refuse_a_target_elsewhere_and_one_that_a_head_adapts():
    def setting(device: str, adapts: bool) -> rivals.Setting:
        opened = SimpleNamespace(target=SimpleNamespace(device=torch.device(device)))
        runs = [loading.Run("a", Path(), SimpleNamespace(adapts_target=adapts), "", None)]
        return rivals.Setting(opened, runs, [3], 9, 4, Path())

    with pytest.raises(ValueError, match=r"rivals=vllm run on the CPU"):
        rivals.make(["vllm"], setting("cuda", False))
    with pytest.raises(ValueError, match=r"adapts its target"):
        rivals.make(["llamacpp"], setting("cpu", True))


def test_a_rival_that_fails_while_it_starts_again_is_closed_and_keeps_the_reason():
    class Method(Timed):
        def __call__(self, prompt):
            return prompt, 1.0

        def restart(self):
            raise RuntimeError("lost\nits process")

    rival = rivals.Rival(Method)
    assert rival([1, 2])[0] == []  # not opened
    rival.open()
    assert rival([1, 2]) == ([1, 2], 1.0)
    rival.restart()
    assert rival.failure == "lost its process" and len(rival([1, 2])[0]) == 0


COUNTING = """
import json, os, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps({"pid": os.getpid(), "child": child.pid}), flush=True)
"""


def state(pid: int) -> str:
    """The letter of /proc for a process: T is stopped; Z has ended. Empty: there is none"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for(pid: int, *states: str) -> None:
    end = time.monotonic() + 10
    while state(pid) not in states:
        assert time.monotonic() < end, f"process {pid} is {state(pid)!r}, not one of {states}"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_engines_are_stopped_between_requests_and_end_with_all_their_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COUNTING)
    child = Child(program, {}, python=sys.executable, name="it", loads="nothing", environment={})
    for _ in range(2):
        reply = child.ask({})
        for pid in reply.values():
            wait_for(pid, "T")
    assert os.getpgid(reply["child"]) == reply["pid"]
    child.close()
    child.close()
    wait_for(reply["pid"], "")
    wait_for(reply["child"], "", "Z")
    program.write_text("import os, signal; print('{}', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    child = Child(program, {}, python=sys.executable, name="it", loads="nothing", environment={})
    with pytest.raises(ValueError, match=f"it cannot answer: its process ended with -{signal.SIGKILL:d}"):
        child.ask({})
    child.close()
