"""Tests of benchmarks/rivals.py: stand-ins for llama.cpp and vLLM answer as the tiny target does, or fail."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import rivals
from benchmarks.engines import llamacpp, vllm
from benchmarks.engines.vllm import VllmReply
from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.target.model import Target
from tests.support.commands import write_prompts
from tests.support.drafters import save_eagle
from tests.support.targets import save_target


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
    """Stand-ins for both engines -> events in order; ngram-mod fails at its first prompt, suffix at its start."""
    target, events = Target.load(str(folder / "target"), dtype="float32"), []

    def greedy(prompt: list[int], num: int, stop: set[int]) -> list[int]:
        text = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=num, do_sample=False, eos_token_id=sorted(stop)
        )
        return text[0, len(prompt) :].tolist()

    class FakeLlamaCpp:
        def __init__(self, gguf, *, context, draft=None, kind="simple", num=3):
            assert Path(gguf).is_file() and (draft is None or Path(draft).is_file())
            self.kind, self.has_counts = kind, draft is not None or kind != "simple"
            events.append(("start", kind))

        def generate(self, prompt, max_new_tokens, stop):
            if self.kind == "ngram-mod":
                raise ValueError("it is out\nof memory")
            tokens = greedy(prompt, max_new_tokens, stop)
            self.counts = llamacpp.Counts((len(tokens) - 1) // 2 if self.kind == "simple" else None)
            return tokens if self.kind != "ngram-cache" else [*tokens[:-1], 5]

        def close(self):
            events.append(("close", self.kind))

    class FakeVllm:
        def __init__(self, target, *, speculative, dtype, max_model_len, eager):
            assert dtype == "float32" and eager
            if speculative and speculative["method"] == "suffix":
                raise ValueError("Arctic Inference [1] is required")
            if speculative and "model" in speculative:
                assert json.loads(Path(speculative["model"], "config.json").read_text())
            events.append(("start", "vllm"))

        def generate(self, prompts, max_new_tokens, stop):
            answer = greedy(prompts[0], max_new_tokens, stop)
            return VllmReply([answer], [[([], 1)] * (len(answer) - 1)])

        def close(self):
            events.append(("close", "vllm"))

    def convert(model, out, *, target=None, outtype):
        assert outtype == "f32" and Path(model, "config.json").is_file()
        Path(out).write_text("GGUF")
        events.append(("convert", Path(out).name))

    monkeypatch.setattr(llamacpp, "find_python", lambda: "python")
    monkeypatch.setattr(llamacpp, "convert_to_gguf", convert)
    monkeypatch.setattr(llamacpp, "LlamaCpp", FakeLlamaCpp)
    monkeypatch.setattr(vllm, "check_vllm", lambda python: None)
    monkeypatch.setattr(vllm, "Vllm", FakeVllm)
    return events


@pytest.fixture
def run(folder, capsys):
    """run(...) -> what rivals.py printed, and the methods of its JSON"""

    def run(*arguments: str) -> tuple[str, dict]:
        out = folder / "figures.json"
        shared = ["target.dtype=float32", "target.device=cpu", f"target.name={folder}/target", "compile=false"]
        shared += [f"prompts={folder}/prompts.jsonl", "limit=2", "max_new_tokens=6", "repeats=2", f"out={out}"]
        rivals.main([*shared, *arguments])
        return capsys.readouterr().out, json.loads(out.read_text())["methods"]

    return run


def test_one_table_of_all_rivals_that_outlives_those_that_fail(run, folder, engines):
    printed, methods = run(f"checkpoint={folder}/draft", "rivals=transformers,llamacpp,vllm", "proposers=ngram")
    name = f"{folder.name}/draft"
    failures = {key: cell["failure"] for key, cell in methods.items() if "failure" in cell}
    arctic = "Arctic Inference [1] is required"
    assert failures == {"llama.cpp, ngram-mod": "it is out of memory", "vLLM, suffix": arctic}
    assert "it is out of memory" in printed and "Arctic Inference [1]" in printed
    for key in ("transformers generate", f"generate, assistant_model {name}, 2 drafts", "generate, prompt lookup",
                f"generate, custom_generate {name}, chain of 2", "llama.cpp, plain", f"llama.cpp, {name}, 2 drafts",
                "vLLM, plain", f"vLLM, {name}, 2 drafts", "plain", f"{name}, chain of 2", f"{name}, auto",
                "ngram"):  # fmt: skip
        cell = methods[key]
        assert cell["same_as_plain"] == cell["same_as_own_plain"] == 2
        assert min(cell[key] for key in ("tau", "tokens_per_second", "to_plain", "to_own_plain", "to_generate")) > 0
    assert methods["llama.cpp, plain"]["tau"] == methods["vLLM, plain"]["tau"] == methods["plain"]["tau"] == 1
    assert methods[f"llama.cpp, {name}, 2 drafts"]["tau"] > 1
    changed = methods["llama.cpp, ngram-cache"]  # its last token is another one; its rounds are not known
    assert changed["same_as_plain"] == changed["same_as_own_plain"] == 0 and "tau" not in changed
    check_starts(engines, f"{folder.name}-draft-gguf.gguf")


def check_starts(engines: list[tuple], draft: str) -> None:
    """Each file is made once, and look-ups start again before each of the two repeats; all are closed."""
    events = {"convert": [], "start": [], "close": []}
    for event, name in engines:
        events[event].append(name)
    assert events["convert"] == ["target.gguf", draft]
    for kind, count in (("ngram-cache", 2), ("simple", 2), ("vllm", 3)):
        assert events["start"].count(kind) == count
    assert sorted(events["start"]) == sorted(events["close"])


def test_missing_engines_are_one_row_each(run, monkeypatch):
    monkeypatch.setattr(llamacpp, "ENGINES", Path("nowhere"))
    monkeypatch.setattr(llamacpp.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(vllm, "PYTHON", "nowhere/python")
    _, methods = run("rivals=llamacpp,vllm", "limit=1", "repeats=1")
    failures = {name: cell["failure"] for name, cell in methods.items() if "failure" in cell}
    assert failures.keys() == {"llamacpp", "vllm"} and all("`make engines`" in text for text in failures.values())
