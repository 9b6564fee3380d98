"""A drafter's folder: written completely or not at all, loaded for its own target only, and without running code."""

import copy
import hashlib
import os
from pathlib import Path

import pytest
import torch

import specdec
from specdec import checkpoint
from specdec.core import files
from specdec.core.compile import is_joined, join_products
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3
from specdec.heads.mtp import MTP
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target, load_tokenizer
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import load_head, make_drafter, save_eagle
from tests.support.hostile import change as change_document
from tests.support.targets import save_target

VOCAB = torch.arange(0, 60, 3)
SPEC = {"_target_": "specdec.heads.eagle.Eagle3", "target_layers": [1, 2, 4], "norm_output": True}


@pytest.fixture
def saved(target, tmp_path):
    torch.manual_seed(0)
    drafter = Eagle3(target, vocab=VOCAB, target_layers=[1, 2, 4], norm_output=True).double()
    checkpoint.save(tmp_path / "step_000001", drafter, SPEC)
    return tmp_path / "step_000001", drafter


def test_load_gives_the_same_drafter(saved, target):
    folder, drafter = saved
    loaded = checkpoint.load(folder, target)
    assert loaded.norm_output and loaded.target_layers == (1, 2, 4)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(loaded.target_to_draft, drafter.target_to_draft)


def join_a_copy(drafter):
    """A frozen copy with joined products, none of which touches a weight of the target."""
    joined = drafter.frozen_copy()
    places = [parameter.data_ptr() for parameter in drafter.target.model.parameters()]
    join_products(joined)
    assert [parameter.data_ptr() for parameter in drafter.target.model.parameters()] == places
    return joined


def test_a_joined_head_drafts_and_is_saved_as_before(small_drafter, tmp_path):
    """As on CUDA; exactly the same numbers in float64, and the same bytes in its file."""
    target, depth = small_drafter.target, min(3, small_drafter.depth or 3)
    heads = {"plain": small_drafter.frozen_copy(), "joined": join_a_copy(small_drafter)}
    generations = []
    for name, head in heads.items():
        checkpoint.save(tmp_path / name, head, {})
        generation = greedy(target, HeadProposer(head, chain_of(depth))).generate([[1, 2, 3], [4, 5]], 16)
        generations.append((generation.tokens, generation.accepted, generation.drafted))
    files_of_heads = [(tmp_path / name / "drafter.safetensors").read_bytes() for name in heads]
    assert generations[0] == generations[1] and files_of_heads[0] == files_of_heads[1]


@pytest.mark.parametrize("joins", [False, True])
def test_heads_are_joined_where_they_are_loaded_for_decoding_on_cuda_only(saved, target, monkeypatch, joins):
    monkeypatch.setattr(checkpoint, "decodes_joined", lambda device: joins)
    attention = checkpoint.load(saved[0], target).block.self_attn
    assert is_joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) == joins
    attention = checkpoint.load_for_training(saved[0], target, {})[0].block.self_attn
    assert not is_joined([attention.q_proj.weight, attention.k_proj.weight])
    monkeypatch.undo()
    assert not checkpoint.decodes_joined(target.device) and checkpoint.decodes_joined(torch.device("cuda:0"))


PARTS = {
    "dflash2": {"dependence": {"kind": "selector", "rank": 4, "top": 6}, "convolution": 2},
    "domino": {"dependence": {"kind": "domino", "hidden": 8, "rank": 4}},
    "dspark": {"dependence": {"kind": "markov", "rank": 4, "form": "rnn"}},
}


def save_block(folder, target, name: str, arguments: dict | None = None):
    drafter = make_drafter(target, name, True, arguments)
    checkpoint.save(folder, drafter, {**load_head(name)["drafter"], **(arguments or {})})
    return drafter


def draft(drafter, target) -> list[list[int]]:
    """Greedy drafts behind some texts"""
    proposer = HeadProposer(drafter.double().eval(), chain_of(4))
    return greedy(target, proposer).generate([random_tokens(seed, 9, 61) for seed in range(3)], 24).accepted


@pytest.mark.parametrize("added_parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_drafter_is_trained_further_with_another_dependence(target, tmp_path, name, added_parts):
    """It drafts as without one at first: a part starts as the identity."""
    part = {} if name == "dflash" else {"dependence": None, "confidence": False, "anchor_predicts": True}
    known = save_block(tmp_path / "head", target, name, part)
    given = {**load_head(name)["drafter"], **part, **added_parts}
    further, spec = checkpoint.load_for_training(tmp_path / "head", target, given)
    assert further.dependence is not None and spec["dependence"] == added_parts["dependence"]
    assert (further.layers[0].mlp_conv is not None) == ("convolution" in added_parts)
    assert draft(further, target) == draft(known, target)
    checkpoint.save(tmp_path / "more", further, spec)
    again = checkpoint.load(tmp_path / "more", target)
    assert again.state_dict().keys() == further.state_dict().keys()
    same, _ = checkpoint.load_for_training(tmp_path / "more", target, load_head(name)["drafter"] | {"dependence": None})
    assert same.state_dict().keys() == further.state_dict().keys()


def test_another_alignment_is_said_and_the_confidence_head_goes(target, tmp_path):
    save_block(tmp_path / "head", target, "dspark")
    with pytest.warns(UserWarning, match="stand one place beside"):
        further, spec = checkpoint.load_for_training(tmp_path / "head", target, load_head("dflash2")["drafter"])
    assert not (further.has_confidence or further.anchor_predicts or spec["anchor_predicts"])
    assert checkpoint.load_for_training(tmp_path / "head", target, load_head("dspark")["drafter"])[0].has_confidence


@pytest.mark.parametrize(
    "dependence, sentence",
    [
        ({"kind": "selektor"}, "choose one of domino, lilicorr, markov, selector"),
        ({"kind": "base"}, "choose one of"),
        ({"kind": "selector", "rank": -1}, r"dependence.rank=-1 must be above 0"),
        ({"kind": "selector", "top": 2.5}, "must be a whole number of at least 2"),
        ({"kind": "markov", "rank": 4, "form": "gatet"}, "must be plain, gated or rnn"),
        ({"kind": "domino", "rank": 0.5}, "does not take these settings"),
        ({"kind": "markov", "rang": 4}, "has no rang but rank, table, form"),
        ({"kind": "lilicorr", "logit_scale": float("nan")}, "must be above 0"),
    ],
)
def test_wrong_parts_get_a_sentence(target, dependence, sentence):
    with pytest.raises(ValueError, match=sentence):
        BlockDrafter(target, dependence=dependence)


def test_training_further_sets_anew_what_has_no_weights(target, tmp_path):
    spec = {"_target_": "specdec.heads.mtp.MTP", "num_modules": None, "zero_first": False}
    checkpoint.save(tmp_path / "step_000001", MTP(target, vocab=VOCAB), spec)
    given = {"num_modules": 2, "zero_first": True}
    drafter, kept = checkpoint.load_for_training(tmp_path / "step_000001", target, given)
    assert drafter.zero_first and (kept["zero_first"], kept["num_modules"]) == (True, None)


def test_only_the_drafters_own_tensors_are_saved(saved, target):
    names = checkpoint.read_tensors(saved[0] / "drafter.safetensors")
    target_pointers = {value.data_ptr() for value in target.model.state_dict().values()}
    assert not any("embed" in name for name in names)
    assert not any(parameter.data_ptr() in target_pointers for parameter in saved[1].parameters())


def test_a_run_folder_resolves_to_its_best_step(saved, target):
    folder, _ = saved
    (folder.parent / "best").write_text("step_000001\n")
    assert checkpoint.resolve(folder.parent) == folder == checkpoint.resolve(folder.parent / "best")


@pytest.mark.parametrize("name", ["drafter.safetensors", "drafter.json", "SHA256SUMS"])
def test_a_file_of_a_checkpoint_is_refused_by_name(saved, target, name):
    folder, _ = saved
    for use in (
        checkpoint.resolve,
        lambda path: checkpoint.load(path, target),
        lambda path: checkpoint.load_for_training(path, target, {}),
    ):
        with pytest.raises(ValueError) as refused:
            use(folder / name)
        assert str(refused.value) == f"{folder / name} is a file, and no checkpoint. Give its folder, {folder}."


def test_a_file_elsewhere_is_no_checkpoint(tmp_path):
    (tmp_path / "README.md").write_text("A text, and no folder.\n")
    with pytest.raises(ValueError, match=r"README.md is a file, and no checkpoint\. A checkpoint is a folder"):
        checkpoint.resolve(tmp_path / "README.md")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "drafter.json").write_text("{}")
    with pytest.raises(ValueError, match=f"no checkpoint, but a folder with some: give one, such as {tmp_path}/head"):
        checkpoint.resolve(tmp_path)


@pytest.mark.parametrize("name", ["drafter.safetensors", "drafter.json"])
def test_a_flipped_bit_is_refused(saved, target, name):
    path = saved[0] / name
    content = bytearray(path.read_bytes())
    place = content.index(b'"torch": "') + 10 if name == "drafter.json" else -3  # of what nothing else would notice
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged.*delete {files.CHECKSUMS}"):
        checkpoint.load(saved[0], target)
    (saved[0] / files.CHECKSUMS).unlink()  # as in checkpoints of earlier versions
    checkpoint.load(saved[0], target)


def test_checksums_are_those_of_sha256sum(saved):
    lines = (saved[0] / files.CHECKSUMS).read_text().splitlines()
    wanted = {f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in saved[0].glob("drafter.*")}
    assert set(lines) == wanted and len(lines) == 2


def test_another_target_is_refused(saved, target):
    model = copy.deepcopy(target.model)
    model.get_input_embeddings().weight.data += 1
    with pytest.raises(ValueError, match="fingerprint"):
        checkpoint.load(saved[0], Target(model, name="other"))


@pytest.mark.parametrize("fingerprint", ["0" * 16, "0" * 16 + "-fp8"])
def test_a_target_in_the_form_of_an_earlier_version_is_compared_by_its_embeddings(saved, target, fingerprint):
    change_document(saved[0], target_fingerprint=fingerprint)
    words = "names its target .* in the form of an earlier version, which cannot be compared with .*acceptance may be"
    with pytest.warns(UserWarning, match=words):
        checkpoint.load(saved[0], target)
    change_document(saved[0], target_embeddings=None)
    with pytest.warns(UserWarning, match=words):
        checkpoint.load(saved[0], target)
    change_document(saved[0], target_embeddings="0" * 16)
    with pytest.raises(ValueError, match=r"was trained for .* \(fingerprint 0000.*its own target"):
        checkpoint.load(saved[0], target)


@pytest.mark.parametrize("module", ["specdec.heads.consistency", "specdec.experiments.jacobi.head"])
def test_a_head_of_an_earlier_version_is_told_from_an_unsafe_one(saved, target, module):
    change_document(saved[0], _target_=f"{module}.Consistency")
    with pytest.raises(ValueError, match="Consistency was removed: an earlier version of specdec loads this head"):
        checkpoint.load(saved[0], target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "do not fit"),
        ({"norm_features": True}, "do not fit"),
        ({"target_layers": [1, 2, 5]}, "trained on"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(saved, target, change, message):
    change_document(saved[0], **change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved[0], target)


def test_a_full_disk_leaves_the_old_checkpoint(saved, monkeypatch):
    folder, drafter = saved
    before = (folder / "drafter.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="Free some disk space"):
        checkpoint.save(folder, drafter, SPEC)
    assert (folder / "drafter.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# Folders of the home folder


def test_a_tilde_stands_for_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = save_target(tmp_path / "target")
    save_eagle(tmp_path / "head", own)
    target = specdec.load_target("~/target", dtype="float32", device="cpu")
    assert target.name == str(tmp_path / "target") and target.fingerprint() == own.fingerprint()
    assert Target.load_ends("~/target").name == load_tokenizer("~/target").name_or_path == target.name
    for name in ("~/head", Path("~/head")):
        assert specdec.load_head(name, target).num_parameters() > 0
        assert checkpoint.resolve(name) == tmp_path / "head"
    for load in (Target.load, Target.load_ends, load_tokenizer):
        with pytest.raises(ValueError, match=rf"^The folder {tmp_path}/none does not exist\."):
            load("~/none")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/none/drafter\.json does not exist\."):
        specdec.load_head("~/none", target)
