"""Tests of scripts/adapt.py with whole models: a lost module comes from the base, is healed and stitched."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from scripts import adapt as command
from specdec.core.untrusted import read_tensors
from specdec.heads.native_modules.diagnosis import diagnose_module
from specdec.target.model import Target
from specdec.tools.adapt import adapt
from specdec.tools.adapt.folder import AdaptationFolder
from tests.support import quantised
from tests.support.commands import write_rows
from tests.support.hub import Repository
from tests.support.native import list_shards, save_native
from tests.support.runs import train_in_process
from tests.support.saved_targets import edit, edit_tensors
from tests.support.targets import small_tokenizer

OPTIONS = """
    traffic=null prompts=prompts.jsonl old= out=rescued target.dtype=float32 min_tokens=50 epochs=40 lr=2e-2
    answer.max_new_tokens=12 answer.batch=16 answer.decode.temperature=0 tolerance=0.9
    training.precision=fp32 training.threads=1 progress=quiet training.validation.num_prompts=6
    training.data.heldout=prompts.jsonl
""".split()


def interrupt(*_):
    raise KeyboardInterrupt


def drop_module(tensors: dict) -> None:
    for key in [key for key in tensors if "mtp" in key]:
        del tensors[key]


def tune(tensors: dict) -> None:
    """Other layers than the base's."""
    torch.manual_seed(3)
    for key in [key for key in tensors if key.startswith("model.layers.") and key.endswith("down_proj.weight")]:
        tensors[key] += 0.3 * torch.randn_like(tensors[key])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base with a module, a tuned model that lost it, and prompts."""
    folder = tmp_path_factory.mktemp("rescue")
    tokenizer = small_tokenizer()
    fields = {"vocab_size": len(tokenizer), "eos_token_id": None, "max_position_embeddings": 1024}
    save_native(folder / "base", "qwen3_5_text", fields=fields)
    tokenizer.save_pretrained(folder / "base")
    edit_tensors(shutil.copytree(folder / "base", folder / "tuned"), tune)
    edit_tensors(shutil.copytree(folder / "tuned", folder / "lost"), drop_module)
    write_rows(folder / "prompts.jsonl", [{"id": f"p{n}", "prompt": f"Count to {n}."} for n in range(60)])
    return folder


@pytest.fixture
def run_rescue(models, tmp_path, monkeypatch, run_script, blank_charts):
    """run_rescue("lost", "key=value", ...) -> what was printed; the working directory has copies of the models"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 12)
    for path in models.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)

    monkeypatch.setattr(adapt, "run_train", train_in_process)
    return lambda model, *changes: run_script(command, f"checkpoint={model}", *OPTIONS, *changes)


def read_record() -> dict:
    return json.loads(Path("rescued/adaptations/0002.json").read_text())


def train_nothing(arguments: list[str]) -> int:
    """A run whose best step is its start."""
    options = dict(argument.split("=", 1) for argument in arguments)
    run = Path(options["run"])
    shutil.copytree(options["start"], run / "step_000000")
    (run / "finished").touch()
    (run / "best").write_text("step_000000")
    return 0


@pytest.mark.full
def test_a_lost_module_is_grafted_healed_and_stitched(run_rescue, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adapt, "run_train", interrupt)
        run_rescue("lost", "source=base")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adapt, "export_checkpoint", interrupt)
        run_rescue("lost", "source=base")
    assert "after" not in read_record()["diagnosis"]
    with pytest.raises(ValueError, match="has no rows that are newer"):  # after what was left to do
        run_rescue("lost", "source=base")
    record = read_record()
    assert record["decision"] == "accepted" and record["slices"]["new"]["change_ci"][0] > 0
    assert (record["diagnosis"]["before"]["state"], record["diagnosis"]["after"]["state"]) == ("lost", "sound")
    assert json.loads(Path("rescued/heads/0002/adaptation.json").read_text()) == record
    check_result(Path("rescued/export/0002"))


def test_a_graft_that_training_did_not_help_stays(run_rescue, monkeypatch):
    with pytest.raises(ValueError, match=r"lost: config.json counts 1 .* Give source=BASE: the model that it comes"):
        run_rescue("lost")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AdaptationFolder, "record_diagnosis", interrupt)
        run_rescue("lost", "source=base")
    out = run_rescue("lost", "source=base", "dry_run=true")
    assert "MTP module of lost: lost (1 declared" in out and "15 tensors of base are the module now" in out
    with pytest.raises(ValueError, match=r"was begun with checkpoint=lost source=base: give those again"):
        run_rescue("tuned", "source=base")
    monkeypatch.setattr(adapt, "run_train", train_nothing)
    out = run_rescue("./lost/", f"source={Path('base').absolute()}")
    assert "the adaptation 0002 goes on" in out and "refused: " in out
    assert "MTP module of lost: lost" in out and "MTP module of rescued/export/0001: stale" in out
    assert read_record()["diagnosis"]["after"]["state"] == "stale"
    base, graft = Path("base/model.safetensors"), Path("rescued/export/0001/model-00002-of-00002.safetensors")
    assert {name: value.tolist() for name, value in read_tensors(graft).items()} == {
        name: value.tolist() for name, value in read_tensors(base).items() if name.startswith("mtp.")
    }


def check_result(folder: Path) -> None:
    """The stitched model is the tuned one, but for the healed module."""
    tensors = {}
    for file in set(list_shards(folder).values()):
        tensors |= read_tensors(folder / file)
    expected, base = (read_tensors(Path(name, "model.safetensors")) for name in ("tuned", "base"))
    assert tensors.keys() == expected.keys()
    differing = {name for name in tensors if not torch.equal(tensors[name], expected[name])}
    assert differing and all(name.startswith("mtp.") for name in differing)
    assert not torch.equal(tensors["mtp.fc.weight"], base["mtp.fc.weight"])
    assert diagnose_module(str(folder), base="base").state == "sound"
    assert (folder / "MTP.md").exists()


def shift_norms(tensors: dict) -> None:
    for key in [key for key in tensors if key.startswith("mtp.") and "norm" in key]:
        tensors[key] += 1


def test_a_repair_alone_needs_no_base(run_rescue):
    edit_tensors(edit(Path("tuned"), mtp_num_hidden_layers=0), shift_norms)
    out = run_rescue("tuned", "dry_run=true")
    assert "undeclared: " in out and "shifted norms: " in out
    sentence = "7 norms are shifted back by 1. config.json counts 1 now."
    assert f"Repaired in rescued/export/0001: {sentence}" in out
    assert diagnose_module("rescued/export/0001").state == "sound"


def share(hub, name: str, *folders: str) -> None:
    """Pushes folders to the stand-in of the Hub: the first one as the branch `first`, the last one as `main`."""
    hub.repositories[name] = Repository(private=False)
    for branch, folder in zip(("first", "main"), folders, strict=True):
        contents = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        hub.repositories[name].commit(branch, contents)


def test_a_revision_on_the_hub_is_the_target_once_it_is_repaired(run_rescue, hub, monkeypatch):
    monkeypatch.setattr("specdec.core.hub.is_hub_reachable", lambda: True)
    edit_tensors(Path("tuned"), shift_norms)
    share(hub, "user/model", "tuned", "base")
    out = run_rescue("user/model@first", "dry_run=true")
    assert "MTP module of user/model@first: shifted norms" in out
    copied, given = (read_tensors(Path(folder, "model.safetensors")) for folder in ("rescued/export/0001", "tuned"))
    assert {name for name in given if not torch.equal(given[name], copied[name])} == {
        name for name in given if name.startswith("mtp.") and "norm" in name
    }
    record = json.loads(Path("rescued/source.json").read_text())
    assert record["target"] == str(Path("rescued/export/0001").resolve())
    assert record["target_fingerprint"] == Target.load("tuned", dtype="float32").fingerprint()
    answers = json.loads(Path("rescued/answers/answers.jsonl").read_text().splitlines()[0])
    assert answers["target_fingerprint"] == record["target_fingerprint"]


def test_a_revision_on_the_hub_that_needs_no_repair_is_refused(run_rescue, hub, monkeypatch):
    monkeypatch.setattr("specdec.core.hub.is_hub_reachable", lambda: True)
    share(hub, "user/model", "tuned", "base")
    with pytest.raises(ValueError, match=r"user/model@first needs no repair, .*: download that revision into a folder"):
        run_rescue("user/model@first")
    assert not Path("rescued/diagnosis.json").exists()


def test_a_quantised_model_gets_a_plain_module_that_engines_know_of(run_rescue, monkeypatch):
    folder = quantised.quantise(Path("lost"), Path("small"), "fp8")
    settings = quantised.CONFIGS["fp8"] | {"ignore": ["lm_head", "re:.*in_proj.*"]}
    edit(folder, quantization_config=settings)
    monkeypatch.setattr(adapt, "run_train", train_nothing)
    out = run_rescue("small", "source=base")
    assert "MTP module of small: lost" in out and "refused" in out
    assert diagnose_module("rescued/export/0001", base="base").findings == ()
    stitched = json.loads(Path("rescued/export/0001/config.json").read_text())["quantization_config"]["ignore"]
    assert stitched[:2] == settings["ignore"] and {"mtp.fc", "mtp.layers.0.mlp.up_proj"} <= set(stitched)


def test_a_sound_module_needs_no_source(run_rescue):
    out = run_rescue("tuned", "source=base", "dry_run=true")
    assert "MTP module of tuned: stale" in out and "The module of tuned needs no repair" in out
    assert not Path("rescued/export").exists()


@pytest.mark.parametrize(
    ("sentence", "model", "arguments"),
    [
        ("source= gives an MTP module to a whole model.*leave target.name= out", "lost", ["target.name=base"]),
        ("source= gives an MTP module to a whole model.*give such a model", "rescued", []),
        ("source=other is a qwen3_5_moe_text model and lost a qwen3_5_text one", "lost", ["source=other"]),
        ("source=wide has states of width 64 and lost of 32", "lost", ["source=wide"]),
        (r"source=lost has no module to give \(lost\)", "lost", ["source=lost"]),
        ("nowhere", "lost", ["source=./nowhere"]),
    ],
)
def test_sources_that_cannot_be_used_are_refused(run_rescue, sentence, model, arguments):
    save_native(Path("other"), "qwen3_5_moe_text")
    save_native(Path("wide"), "qwen3_5_text", fields={"hidden_size": 64})
    Path("rescued").mkdir()
    with pytest.raises(ValueError, match=sentence):
        run_rescue(model, "source=base", *arguments)
