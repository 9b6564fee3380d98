"""Tests of `specdec inspect`: what it says of folders, names on the Hub, adapters, GGUF files and damaged models."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy
import pytest
from safetensors.torch import load_file
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM

from scripts import inspect_
from specdec import loading
from specdec.core import hub as hub_names
from specdec.core.shards import INDEX
from specdec.tools.inspect import support
from specdec.tools.inspect.model_files import find_model_files
from tests.support.families import configuration, find_family
from tests.support.hub import Repository
from tests.support.saved_targets import SIZES, edit, save
from tests.support.targets import small_tokenizer

SECTIONS = ["files", "model", "target", "layers", "heads", "template", "quantisation", "MTP module", "memory", "next"]


def inspect(name: Path | str, capsys, **options: object) -> tuple[int, str]:
    """The exit status and the page."""
    arguments = [f"target.name={name}", *(f"{key}={value}" for key, value in options.items())]
    with pytest.raises(SystemExit) as ended:
        inspect_.main(arguments)
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer, in three shards."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(folder, max_shard_size="400KB")
    small_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def test_a_sound_model_can_be_a_target_and_the_document_says_all_that_the_page_says(folder, tmp_path, capsys):
    status, page = inspect(folder, capsys, out=tmp_path / "facts.json")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert status == 0 and facts["can_be_target"] and facts["name"] == str(folder)
    assert [name for name in facts if name in SECTIONS] == SECTIONS
    assert all(line.startswith((*SECTIONS, " ")) for line in page.splitlines())
    assert facts["files"]["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    parameters = sum(value.numel() for path in folder.glob("*.safetensors") for value in load_file(path).values())
    assert facts["model"]["parameters"] == facts["model"]["active_parameters"] == parameters
    assert facts["layers"]["kinds"] == {"full_attention": 4} and facts["layers"]["verifies"] == "chains and trees"
    assert facts["memory"]["cache_per_token"] == 4 * 2 * 2 * 32 * 2  # layers, K and V, heads, width, bytes
    assert facts["heads"]["eagle3"]["vLLM"] == "yes" and facts["heads"]["medusa"]["llama.cpp"].startswith("format=gguf")
    assert facts["target"]["family_is_tested"] and facts["template"]["chat_template"]


def test_loading_is_asked_for(folder, capsys):
    assert "loaded in" not in inspect(folder, capsys)[1]
    status, page = inspect(folder, capsys, run="true", **{"target.dtype": "float32"})
    assert status == 0 and "as float32 on cpu: logits equal those of its own forward pass" in " ".join(page.split())


@pytest.mark.parametrize("name", ["mamba", "deepseek_v32", "jamba", "gemma3n_text"])
def test_a_refused_family_is_refused_with_its_reason(name, tmp_path, capsys):
    configuration(find_family(name)).save_pretrained(tmp_path / "model")
    status, page = inspect(tmp_path / "model", capsys)
    reason = support.examine_config(configuration(find_family(name)), name).reason
    assert status == 2 and " ".join(reason.split()[1:8]) in " ".join(page.split())
    assert "next" not in page


def test_layers_with_states_verify_chains(tmp_path, capsys):
    configuration(find_family("qwen3_5_text")).save_pretrained(tmp_path / "model")
    _, page = inspect(tmp_path / "model", capsys)
    assert "2 linear attention, 2 full attention" in page and "verifies chains;" in page


# Damaged models


def test_a_shard_that_is_missing_is_an_incomplete_download(folder, capsys):
    lost = sorted(folder.glob("*.safetensors"))[1]
    names = list(load_file(lost))
    lost.unlink()
    status, page = inspect(folder, capsys)
    page = " ".join(page.split())
    assert status == 2 and "The download is incomplete: 1 file of" in page and lost.name in page
    assert any(name in page for name in names) and "next" not in page and "Its files are not whole" in page


def find_problem(folder: Path) -> str:
    (problem,) = find_model_files(str(folder)).problems
    return problem


def test_a_truncated_shard_names_a_tensor_that_is_cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    assert re.search(rf"{path.name} is truncated: .* and 1 tensor \(.*weight\) are cut off", find_problem(folder))


def test_an_index_that_lies_names_the_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.9.input_layernorm.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{file} lacks the tensor model.layers.9.input_layernorm.weight" in find_problem(folder)
    (folder / INDEX).write_text("{}")
    assert "has no weight_map" in find_problem(folder)


@pytest.mark.parametrize("content", [b"", b"\x08", b"\x02" + bytes(7) + b"[]", b"\xff" * 8])
def test_a_file_without_a_header_is_damaged(content, folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(content)
    assert "etch it again" in find_problem(folder)


def test_weights_of_another_form_are_named(folder):
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "it has pytorch_model.bin" in find_problem(folder)


# Other things at a name


def test_an_adapter_names_its_base(tmp_path, capsys):
    fields = {"base_model_name_or_path": "user/base", "r": 8, "peft_type": "LORA", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    status, page = inspect(tmp_path, capsys)
    assert status == 2 and "LORA adapter of rank 8 on user/base (q_proj)" in page and "merge" in page


@pytest.mark.parametrize("window, advised", [(None, True), (512, True), (64, False)])
def test_a_head_names_the_longest_text_of_its_training(tmp_path, capsys, window, advised):
    head = {"_target_": "specdec.heads.mtp.MTP", "target": "user/base", "window": window, "trained_length": 64}
    (tmp_path / "drafter.json").write_text(json.dumps(head))
    status, page = inspect(tmp_path, capsys)
    assert status == 2 and "MTP for user/base, trained on texts of at most 64 tokens" in page
    assert ("try decode.window=64" in page) == advised


@pytest.mark.parametrize("layout, advised", [("qwen", True), ("exaone", False)])
def test_no_window_is_advised_for_modules_that_may_have_their_own(tmp_path, capsys, layout, advised):
    head = {"_target_": "specdec.heads.native.NativeMTP", "layout": layout, "trained_length": 64}
    (tmp_path / "drafter.json").write_text(json.dumps(head))
    _, page = inspect(tmp_path, capsys)
    assert ("try decode.window=64" in page) == ("layers see all positions" in page) == advised


def test_a_head_names_its_layers_without_a_window(tmp_path, capsys):
    head = {"_target_": "specdec.heads.eagle.Eagle3", "window": 64, "full_layers": [1], "trained_length": 64}
    (tmp_path / "drafter.json").write_text(json.dumps(head))
    _, page = inspect(tmp_path, capsys)
    assert "layers see 64 positions, but layers [1] all" in page and "try decode.window=64" in page


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    writer.add_tensor("token_embd.weight", numpy.zeros((16, 8), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_read_and_is_no_target(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf")
    status, page = inspect(tmp_path / "model.gguf", capsys)
    assert status == 2 and "llama: 2 layers of width 8" in page and "no target" in page
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    status, page = inspect(tmp_path / "damaged.gguf", capsys)
    assert status == 2 and "damaged.gguf is no whole GGUF file" in " ".join(page.split())


def test_a_model_on_the_hub_is_inspected_without_its_weights(folder, hub, monkeypatch, capsys):
    monkeypatch.setattr(hub_names, "is_hub_reachable", lambda: True)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["user/model"] = Repository(private=False)
    hub.repositories["user/model"].commit("main", contents)
    status, page = inspect("user/model", capsys)
    assert status == 0 and "on the Hub, not here" in page and "EAGLE-3" in page


def test_an_outline_stands_for_a_model_that_is_out_of_reach(capsys):
    status, page = inspect("Qwen/Qwen3-8B", capsys)
    assert status == 0 and "its outline in conf/target" in " ".join(page.split()) and "8.19 B parameters" in page


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", "is no folder: give the folder of a model"),
        ("nothing.gguf", "There is no file nothing.gguf"),
        ("user/nothing", "the Hugging Face Hub cannot be reached"),
    ],
)
def test_a_name_without_a_model_is_a_mistake_in_the_command(name, message):
    with pytest.raises(ValueError, match=message):
        inspect_.main([f"target.name={name}"])


def test_an_unknown_machine_lists_those_that_there_are(folder):
    with pytest.raises(ValueError, match="h100x8"):
        inspect_.main([f"target.name={folder}", "machine=h1000"])


def test_what_is_no_model_of_a_target_is_refused_with_a_sentence(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf")
    status, page = inspect(tmp_path, capsys, out=tmp_path / "facts.json")
    assert status == 2 and "give one of its GGUF files" in " ".join(page.split())
    assert json.loads((tmp_path / "facts.json").read_text())["can_be_target"] is False
    status, page = inspect(edit(save(tmp_path), model_type="t5", is_encoder_decoder=True), capsys)
    assert status == 2 and "a target must be a causal language model" in " ".join(page.split())
    BertConfig(**{key: SIZES[key] for key in ("hidden_size", "num_attention_heads")}).save_pretrained(tmp_path / "bert")
    status, page = inspect(tmp_path / "bert", capsys)
    assert status == 2 and "It is an encoder" in page


@pytest.mark.parametrize(
    ("fields", "tensor"),
    [
        ({"num_hidden_layers": 5}, r"model\.layers\.4\.\S+"),
        ({"vocab_size": 99}, r"model\.embed_tokens\.weight of shape \[99, 128\]"),
        ({"quantization_config": "fp8"}, "could not be loaded as a causal language model"),
        ({"num_attention_heads": 0}, "integer modulo by zero|configuration"),
    ],
)
def test_a_configuration_of_another_model_names_a_tensor(fields, tensor, folder, capsys):
    status, page = inspect(edit(folder, **fields), capsys)
    assert status == 2 and re.search(tensor, " ".join(page.split())) and "specdec answer" not in page


def test_a_tokenizer_that_cannot_be_read_is_a_problem(folder, capsys):
    (folder / "tokenizer.json").write_text("{")
    status, page = inspect(folder, capsys)
    assert status == 2 and "Its tokenizer cannot be read" in page
    lost = sorted(folder.glob("*.safetensors"))[0]
    lost.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "is a pointer of Git LFS" in find_model_files(str(folder)).problems[0]


def test_a_load_that_fails_is_the_verdict(folder, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_target", fail)
    status, page = inspect(folder, capsys, run="true")
    assert status == 2 and "no. a reason" in page


def fail(*arguments, **settings):
    raise ValueError("a reason")
