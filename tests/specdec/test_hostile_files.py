"""Files that a stranger made to run code, to take memory or to reach other files: each is refused with a sentence."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.medusa import Medusa
from specdec.target.loading import load_config, load_tokenizer
from specdec.target.model import Target
from tests.support.exports import refuse
from tests.support.hostile import DEEP, HUGE, Touch, change
from tests.support.targets import save_target


@pytest.fixture
def saved(target, tmp_path):
    """A good checkpoint, to be made hostile."""
    torch.manual_seed(0)
    folder = tmp_path / "run" / "step_000001"
    checkpoint.save(folder, Eagle(target).double(), {"_target_": "specdec.heads.eagle.Eagle"})
    return folder


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def safetensors_of(header: bytes, size: int | None = None, content: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + content


def entry(shape: list, stop: int, dtype: str = "F32") -> bytes:
    return json.dumps({"fc.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]}}).encode()


# Checkpoints

TENSORS = {
    "pickle": None,
    "empty": b"",
    "header of 2^60 bytes": safetensors_of(b"{}", 2**60),
    "header of 100 MB": safetensors_of(b"{" + b" " * 100_000_000 + b"}"),
    "header behind the end": safetensors_of(b"{}", 5000),
    "offsets behind the end": safetensors_of(entry([10**9], 4 * 10**9)),
    "offsets of the whole file twice": safetensors_of(entry([2], 8, "F64"), content=b"\0" * 8),
    "negative offsets": safetensors_of(entry([2], -8), content=b"\0" * 8),
    "shape that overflows": safetensors_of(entry([2**62, 2**62], 16), content=b"\0" * 16),
    "deep JSON": safetensors_of(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "no JSON": safetensors_of(b"\xff" * 100),
    "another dtype": safetensors_of(entry([2], 8, "OBJECT"), content=b"\0" * 8),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(saved, target, marker, little_memory, kind):
    content = pickle.dumps({"fc.weight": Touch(marker)}) if kind == "pickle" else TENSORS[kind]
    (saved / "drafter.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"missing, truncated or damaged"):
        checkpoint.load(saved, target)


JSON = {
    "deep": DEEP,
    "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "list": "[1, 2]",
    "number": "1e999",
    "long number": '{"width": ' + "9" * 10_000 + "}",
    "no text": b"\xff\xfe\x00",
    "empty": "",
    "Python": "__import__('os').system('true')",
}


@pytest.mark.parametrize("kind", [*JSON, "of any size"])
def test_json(saved, published, target, kind):
    """Of a checkpoint and of a published head."""
    content = JSON.get(kind, "{}")
    for path in (saved / "drafter.json", published / "config.json"):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if kind not in JSON:
            os.truncate(path, 2**40)  # takes no place on the disk
    message = r"is not valid JSON|is not a JSON object" if kind in JSON else "larger than"
    refuse(published, target, message)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, target)


NAMED = ["os.system", "builtins.exec", "torch.load", "subprocess.Popen", "hydra.utils.call", "Eagle3",
   "specdec.checkpoint.load",
         "specdec.target.model.Target", "specdec.heads.os.system", "specdec.heads.nothing.Eagle3",
         "specdec.heads..eagle.X",
         *(f"specdec.heads.eagle{name}" for name in ("", ".torch", ".torch.load", ".Drafter", ".Eagle3.load")),
         "specdec.heads.draft.AutoModelForCausalLM", ["os.system"], {"_target_": "os.system"}, None, ""]  # fmt: skip


@pytest.mark.parametrize("name", NAMED, ids=str)
def test_classes_elsewhere(saved, target, name):
    change(saved, _target_=name)
    with pytest.raises(ValueError, match="not a drafter"):
        checkpoint.load(saved, target)


@pytest.mark.parametrize("field", ["block", "intermediate_size", "vocab", "target_layers", "unknown", "fc_bias"])
def test_a_target_inside_arguments_is_not_called(saved, target, marker, field):
    call = {"_target_": "pathlib.PosixPath.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": [str(marker)]}]}
    change(saved, **{field: call})
    with pytest.raises(ValueError):
        checkpoint.load(saved, target)


NUMBERS = (HUGE, 2**63 - 1, 2**64, -5, 1e300, float("inf"), float("nan"))
SIZES = [
    *((Eagle, {"intermediate_size": size}) for size in NUMBERS),
    (Eagle, {"block": {"num_attention_heads": HUGE, "head_dim": 2}}),
    (Eagle, {"block": {"head_dim": 0}}),
    (Eagle3, {"target_layers": [1, HUGE]}),
    (Eagle3, {"block": {"num_key_value_heads": 0}}),
    (Medusa, {"num_heads": HUGE}),
    (Medusa, {"num_blocks": HUGE}),
]


@pytest.mark.parametrize(("head", "arguments"), SIZES, ids=str)
def test_sizes_are_compared_with_the_tensors_before_memory_is_taken(target, tmp_path, little_memory, head, arguments):
    folder = tmp_path / "step"
    extra = {"target_layers": [1, 2, 4]} if head is Eagle3 else {}
    checkpoint.save(folder, head(target, **extra), {"_target_": f"{head.__module__}.{head.__name__}", **extra})
    assert checkpoint.load(folder, target)
    change(folder, **arguments)
    with pytest.raises(ValueError, match=r"do not fit together|sizes ask for|target_layers="):
        checkpoint.load(folder, target)


@pytest.mark.parametrize(
    "fields",
    [{"hidden_size": HUGE}, {"vocab_size": HUGE}, {"num_hidden_layers": HUGE}, {"intermediate_size": HUGE},
     {"model_type": "no such"}, {"num_attention_heads": 0}],
    ids=str,
)  # fmt: skip
def test_sizes_of_a_draft_model(target, tmp_path, little_memory, fields):
    folder = tmp_path / "step"
    drafter = Draft(target, num_layers=1, copy_layers=[])
    checkpoint.save(folder, drafter, {"_target_": "specdec.heads.draft.Draft"})
    assert checkpoint.load(folder, target)
    document = json.loads((folder / "drafter.json").read_text())
    change(folder, config=document["config"] | fields)
    with pytest.raises(ValueError):
        checkpoint.load(folder, target)


def test_code_for_a_draft_model(target, tmp_path, marker):
    folder = tmp_path / "step"
    checkpoint.save(folder, Draft(target, num_layers=1), {"_target_": "specdec.heads.draft.Draft"})
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    document = json.loads((folder / "drafter.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": f"{tmp_path}/evil--modeling.Evil"}, "_name_or_path": f"{tmp_path}/evil"}
    change(folder, config=document["config"] | own)
    checkpoint.load(folder, target)  # the class of transformers
    change(folder, config=None, model=f"{tmp_path}/evil")
    with pytest.raises(ValueError, match="names another model"):
        checkpoint.load(folder, target)


# Names and links that lead out of a folder


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "..", "", "step/../../elsewhere", "step\0"])
def test_best_names_a_step_of_its_own_run(saved, target, name):
    (saved.parents[1] / "elsewhere").mkdir()
    (saved.parent / "best").write_text(name + "\n")
    for given in (saved.parent, saved.parent / "best"):
        with pytest.raises(ValueError, match="not inside it"):
            checkpoint.resolve(given)


@pytest.mark.parametrize("name", ["drafter.json", "drafter.safetensors"])
def test_links_out_of_a_checkpoint(saved, target, tmp_path, name):
    outside = tmp_path / "outside"
    (saved / name).rename(outside)
    (saved / name).symlink_to(outside)
    with pytest.raises(ValueError, match="Links out of a folder are not followed"):
        checkpoint.load(saved, target)


def test_links_of_the_hub_cache_are_followed(saved, target, tmp_path):
    """There, snapshots/COMMIT/FILE is a link to blobs/HASH."""
    model = tmp_path / "models--someone--head"
    snapshot = model / "snapshots" / "0123abcd" / "step_000001"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for number, path in enumerate(saved.iterdir()):
        path.rename(model / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../../blobs/{number}")
    assert checkpoint.load(snapshot, target)
    (tmp_path / "link").symlink_to(snapshot)
    assert checkpoint.load(tmp_path / "link", target)
    (snapshot / "drafter.json").unlink()
    (snapshot / "drafter.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="Links out of a folder"):
        checkpoint.load(snapshot, target)


# Published heads


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "model.safetensors"])
def test_pickles(published, target, marker, name, legacy):
    torch.save({"fc.weight": Touch(marker)}, published / name, _use_new_zipfile_serialization=not legacy)
    refuse(published, target, "damaged" if name == "model.safetensors" else "cannot be read as plain tensors")


@pytest.mark.parametrize("name", ["mask_embedding.pt", "token_map.pt"])
def test_pickles_beside_tensors(published, target, marker, name):
    block = {"layers.0.self_attn.q_norm.weight": torch.ones(2), "hidden_norm.weight": torch.ones(2)}
    torch.save(block if "mask" in name else {"fc.weight": torch.ones(2, 2)}, published / "pytorch_model.bin")
    torch.save({"embedding": Touch(marker)}, published / name)
    refuse(published, target, "cannot be read as plain tensors")
    torch.save({"other": [["x"]]}, published / name)
    refuse(published, target, "do not make a drafter|which cannot be imported")


def test_compressed_archives(published, target, little_memory):
    path = published / "pytorch_model.bin"
    torch.save({"fc.weight": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, bytes(2**25) if name.endswith("data/0") else content)
    assert path.stat().st_size < 2**20
    refuse(published, target, "it is compressed")


def test_archives_that_claim_more_than_they_hold(published, target, little_memory):
    path = published / "pytorch_model.bin"
    torch.save({"fc.weight": torch.zeros(4)}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (info,) = [info for info in archive.infolist() if info.filename.endswith("data/0")]
    place = content.rindex(info.filename.encode()) - 46  # its entry in the directory at the end
    assert content[place : place + 4] == b"PK\x01\x02"
    content[place + 20 : place + 28] = struct.pack("<II", 2**32 - 2, 2**32 - 2)  # both of its sizes
    path.write_bytes(content)
    refuse(published, target, "cannot be read as plain tensors|holds something other|layout")


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "..", ""])
def test_an_index_names_files_of_its_own_folder(published, target, tmp_path, name):
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(safetensors_of(b"{}"))
    index = {"weight_map": {"fc.weight": name.format(outside=outside)}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(published, target, "not inside it")


@pytest.mark.parametrize("places", [None, [1], "x", {"fc.weight": 3}])
def test_an_index_of_another_form(published, target, places):
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refuse(published, target, "weight_map|damaged")


def test_links_out_of_a_published_head(published, target, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (published / "config.json").unlink()
    (published / "config.json").symlink_to(tmp_path / "config.json")
    refuse(published, target, "Links out of a folder")


# Targets and tokenizers with code


def bring_code(folder: Path, marker: Path) -> Path:
    """A target whose folder brings the code of its model. -> folder"""
    save_target(folder)
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (folder / "configuration_own.py").write_text(
        code + "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder, "config.json", model_type="own", auto_map=places, architectures=["OwnForCausalLM"])
    return folder


def test_code_of_a_target_runs_only_by_the_users_word(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked"))
    marker = tmp_path / "code-has-run"
    folder = str(bring_code(tmp_path / "target", marker))
    for load in (load_config, Target.load):
        with pytest.raises(ValueError, match=r"brings Python code of its own.*give trust_remote_code=true"):
            load(folder)
    assert not marker.exists()
    target = Target.load(folder, dtype="float32", trust_remote_code=True)
    assert marker.exists() and type(target.model).__name__ == "OwnForCausalLM" and target.trust_remote_code


def test_code_of_a_family_that_transformers_has_is_not_run(tmp_path, marker):
    folder = bring_code(tmp_path / "target", marker)
    change(folder, "config.json", model_type="llama")
    assert type(Target.load(str(folder)).model).__module__.startswith("transformers.")


def test_code_of_a_tokenizer(tmp_path, marker):
    save_target(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change(tmp_path, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    with pytest.raises(ValueError, match="trust_remote_code=true"):
        load_tokenizer(str(tmp_path))


def test_a_pickle_as_the_weights_of_a_target(tmp_path, marker):
    save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Touch(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|loaded"):
        Target.load(str(tmp_path))
