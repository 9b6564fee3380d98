"""Tests of real engines on a tiny random target: their drafts and acceptances. Skipped without `make engines`."""

import functools
import itertools
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine_clients import llamacpp_client
from engine_clients.llamacpp_client import LlamaCpp, convert
from engine_clients.vllm_client import Served, Vllm
from scripts import check_engines, get_engines
from specdec.measuring.served import Agreement
from tests.support import REAL_TARGET, ROOT

pytestmark = pytest.mark.slow

PYTHON = str(ROOT / "engines" / "bin" / "python")
engines = pytest.mark.skipif(
    not (ROOT / "engines" / "ready").is_file(), reason="the engines are not installed: make engines"
)
PROMPTS = [[11, 42, 7, 300, 5], [9, 400, 401], [77, 3, 3, 250, 18, 21, 90]]
NEW, K = 14, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a target and a draft model: the target with noise, so that many drafts are right and many wrong."""
    folder = tmp_path_factory.mktemp("engines")
    tokenizer = AutoTokenizer.from_pretrained(REAL_TARGET)  # needed by the converter of llama.cpp
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=6,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
                         initializer_range=0.1, bos_token_id=1, eos_token_id=2)  # fmt: skip
    model = LlamaForCausalLM(config)
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    return folder


@functools.cache
def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def greedy(folder: Path, prompt: list[int], num: int) -> list[int]:
    model, tokens = load(folder), list(prompt)
    for _ in range(num):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def plain(folder) -> list[list[int]]:
    return [greedy(folder / "target", prompt, NEW) for prompt in PROMPTS]


def vllm(folder: Path, draft: str) -> Vllm:
    speculative = {"method": "draft_model", "model": str(folder / draft), "num_speculative_tokens": K}
    return Vllm(
        str(folder / "target"), speculative=speculative, dtype="float32", max_model_len=64, python=PYTHON, threads=1
    )


def emitted(served: Served) -> list[list[int]]:
    """Tokens [P][rounds] that each round added to the answer, including the target's own token."""
    starts = [[len(before) for _, before in rounds] for rounds in served.rounds]
    return [
        [end - start for start, end in itertools.pairwise([*row, len(answer)])]
        for row, answer in zip(starts, served.answers)
    ]


@engines
def test_vllm_with_the_target_as_its_draft_model_accepts_everything(folder, plain):
    with vllm(folder, "target") as engine:
        served = engine.generate(PROMPTS, NEW, set())
        alone = [engine.generate([prompt], NEW, set()) for prompt in PROMPTS]
        stop = plain[0][5]
        cut = engine.generate(PROMPTS[:1], NEW, {stop})
        with pytest.raises(ValueError, match="max_model_len=64: give"):
            engine.generate(PROMPTS, 60, set())
    assert served.answers == plain == [single.answers[0] for single in alone]
    assert served.rounds == [single.rounds[0] for single in alone]
    for answer, rounds in zip(plain, served.rounds):
        assert [len(before) for _, before in rounds] == [1, 5, 9, 13]
        for drafted, before in rounds[:3]:
            assert drafted == answer[len(before) : len(before) + K]
    # The last of 14 tokens comes from a round whose drafts, after the end, were accepted too.
    assert emitted(served) == [[4, 4, 4, 1]] * 3
    assert (served.drafts, served.draft_tokens, served.accepted) == (12, 36, 36)
    assert served.accepted_per_position == [12] * K
    length = plain[0].index(stop) + 1
    assert cut.answers == [plain[0][:length]] and sum(emitted(cut)[0]) == length - 1


@engines
def test_vllm_records_what_a_draft_model_drafts(folder, plain):
    with vllm(folder, "draft") as engine:
        served = engine.generate(PROMPTS, NEW, set())
    assert served.answers == plain and 0 < served.accepted < served.draft_tokens
    for prompt, answer, rounds, counts in zip(PROMPTS, plain, served.rounds, emitted(served)):
        for (drafted, before), num in zip(rounds, counts):
            assert drafted == greedy(folder / "draft", prompt + before, K)
            right = next((i for i, (a, b) in enumerate(zip(drafted, answer[len(before) :])) if a != b), K)
            assert num == min(right + 1, len(answer) - len(before))


@engines
def test_vllm_names_the_reason_for_refusing_a_folder(folder):
    with pytest.raises(ValueError, match=r"cannot load .*target with .*nowhere: .*nowhere"):
        vllm(folder, "nowhere")


@engines
def test_llama_cpp_gives_plain_answers_and_counts_drafts(folder, plain, monkeypatch):
    monkeypatch.setattr(llamacpp_client, "ENGINES", ROOT / "engines")
    for name in ("target", "draft"):
        convert(str(folder / name), str(folder / f"{name}.gguf"))
    counts = {}
    for draft in ("target", "draft", None):
        with LlamaCpp(str(folder / "target.gguf"), threads=1, context=7 + NEW, cache="f32", python=PYTHON,
                      draft=draft and str(folder / f"{draft}.gguf"), num=K) as engine:  # fmt: skip
            for prompt, answer in zip(PROMPTS, plain):
                tokens, seconds = engine.generate(prompt, NEW, set())
                assert tokens == answer and seconds > 0
                counts[draft, len(prompt)] = engine.counts.rounds, engine.counts.drafted, engine.counts.accepted
                if draft:
                    assert sum(engine.counts.accepted_per_position) == engine.counts.accepted
    # Four rounds emit 4, 4, 4 and 1: llama.cpp drafts nothing for the last token of an answer.
    assert all(counts["target", len(prompt)] == (4, 9, 9) for prompt in PROMPTS)
    assert all(4 < counts["draft", len(prompt)][0] < NEW for prompt in PROMPTS)
    assert all(counts[None, len(prompt)] == (0, 0, 0) for prompt in PROMPTS)


@engines
def test_llama_cpp_looks_up_drafts_without_a_drafter(folder, monkeypatch):
    monkeypatch.setattr(llamacpp_client, "ENGINES", ROOT / "engines")
    convert(str(folder / "target"), str(folder / "looked-up.gguf"))
    prompt = [11, 42, 7, 300, 5] * 4
    answers = {}
    for kind in ("simple", *llamacpp_client.LOOKUPS):
        settings = {"size_n": 2, "size_m": 4} if kind == "ngram-simple" else None
        with LlamaCpp(str(folder / "looked-up.gguf"), threads=1, context=len(prompt) + NEW, cache="f32", python=PYTHON,
                      kind=kind, settings=settings) as engine:  # fmt: skip
            answers[kind] = engine.generate(prompt, NEW, set())[0]
            assert engine.counted is (kind != "simple")
            assert engine.counts.rounds == (NEW - 1 - engine.counts.accepted if engine.counted else 0)
    assert all(answer == answers["simple"] for answer in answers.values())


def test_llama_cpp_with_fewer_drafts_than_requested_is_refused():
    """A block drafter drafts at most its block; llama.cpp reports a smaller number of drafts in its log only."""
    count = functools.partial(llamacpp_client.count, num=5, max_new_tokens=12)
    # eleven rounds, drafting 5, ..., 5, 4, 3, 2, 1, 0
    assert count([[10], [40], [0], [0] * 5], num_tokens=12).rounds == 11
    # an end token was drafted, and two drafts after it
    assert count([[2], [10], [6], [2, 2, 1, 1, 0]], num_tokens=7).rounds == 2
    # an answer that ended with room for four more tokens: its last round drafted four
    assert count([[2], [9], [5], [2, 1, 1, 1, 0]], num_tokens=8).rounds == 2
    # a look-up drafts whatever it finds; where an end token was drafted, its rounds are not known
    assert count([[2], [20], [7], [2, 2, 2, 1]], num=None, num_tokens=12).rounds == 4
    assert count([[2], [20], [7], [2, 2, 2, 1]], num=None, num_tokens=9).rounds is None
    for counters, length in (
        ([[10], [27], [0], [0] * 5], 12),
        ([[6], [18], [0], [0] * 5], 7),
        ([[2], [8], [5], [0] * 5], 8),
    ):
        with pytest.raises(ValueError, match="not 5 in each"):
            count(counters, num_tokens=length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vllm("t", speculative=None, dtype="float32", max_model_len=8, python="nowhere"), "make engines"),
        (lambda: LlamaCpp("no.gguf", threads=1, context=8, python="python"), "There is no file no.gguf"),
        (lambda: LlamaCpp("no.gguf", threads=1, context=8, python="python", kind="x"), "kind=x must be one of simple"),
        (lambda: convert("model", "out"), "make engines"),
    ],
)
def test_missing_engines_are_refused(monkeypatch, make, message):
    monkeypatch.setattr(llamacpp_client, "ENGINES", Path("nowhere"))
    with pytest.raises(ValueError, match=message):
        make()


def test_the_output_of_a_failed_converter_is_shown(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text("import sys; print('one\\ntwo'); sys.exit('three')")
    monkeypatch.setattr(llamacpp_client, "ENGINES", tmp_path)
    with pytest.raises(ValueError, match=r"converter refuses model: .*one \| two"):
        convert("model", "out")


def test_get_engines_skips_packages_without_a_cpu_build_and_finished_installs(tmp_path, monkeypatch, capsys):
    requires = ["numpy", "torch==2.12", "torchvision", "hs_connectors==1", "click>=8; python_version > '3'",
                "ray; extra == 'x'"]  # fmt: skip
    for name, lines in (("a", requires), ("hs-connectors", ["torch>=2", "fastapi[standard]<1"])):
        metadata = f"Name: {name}\n" + "".join(f"Requires-Dist: {line}\n" for line in lines) + "\nAbout torch.\n"
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", metadata)
    assert get_engines.requirements(tmp_path) == ["click>=8; python_version > '3'", "fastapi[standard]<1", "numpy"]
    (tmp_path / "ready").write_text(get_engines.PINS)
    monkeypatch.setattr("sys.argv", ["get_engines.py", f"out={tmp_path}"])
    get_engines.main()
    assert "already there" in capsys.readouterr().out
    (tmp_path / "ready").write_text("other pins")
    monkeypatch.setattr(get_engines, "PYTHONS", ((3, 1), (3, 2)))
    with pytest.raises(ValueError, match=r"need Linux and Python 3\.1 to 3\.1; this is"):
        get_engines.main()


GOOD = {"tau": 4.0, "served_tau": 4.0, "difference": 0.0, "largest_gap_at_difference": None,
        "difference_of_same_answers": 0.0, "same_answers": 4, "num_prompts": 4, "offered": 12, "accepted": 12, "same_drafts": 4, "rounds_compared": 4,
        "difference_as_run_there": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "changes", "wanted"),
    [
        (True, {}, True),
        (True, {"same_drafts": None, "rounds_compared": None}, True),  # llama.cpp does not report its drafts
        (True, {"accepted": 11}, False),
        (True, {"offered": 0, "accepted": 0}, False),
        (True, {"same_answers": 3}, False),
        (True, {"same_drafts": 0, "rounds_compared": 0}, False),
        (False, {"accepted": 5}, True),
        (False, {"same_drafts": 3}, False),
        (False, {"same_drafts": None, "accepted": 5}, True),
        (False, {"same_drafts": None, "accepted": 5, "difference_as_run_there": 0.01}, False),
    ],
)
def test_faithful_agreement(whole, changes, wanted):
    assert Agreement(**{**GOOD, **changes}).faithful(exact=whole) is wanted


def test_check_engines_refuses_unknown_heads_and_formats(monkeypatch):
    for arguments, message in [(["only=egle"], "the tiny heads are"), (["formats=onnx"], "engines on a CPU take")]:
        monkeypatch.setattr(sys, "argv", ["check_engines.py", *arguments])
        with pytest.raises(ValueError, match=message):
            check_engines.main()


@engines
def test_a_tiny_head_is_served_as_it_was_trained(monkeypatch, tmp_path):
    arguments = ["only=medusa", "formats=medusa", "max_new_tokens=12", f"out={tmp_path}/engines.json"]
    monkeypatch.setattr(sys, "argv", ["check_engines.py", *arguments])
    check_engines.main()
    exact, noisy = json.loads((tmp_path / "engines.json").read_text())
    assert exact["accepted"] == exact["offered"] > 0 and noisy["accepted"] < noisy["offered"]
    assert noisy["same_drafts"] == noisy["rounds_compared"] > 0
