"""Checkpoints by their names on the Hugging Face Hub, against a stand-in of its interface (tests/support/hub.py)."""

import json
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch

from specdec import checkpoint
from specdec.core import files
from specdec.core import hub as names
from specdec.core.hub import fetch_checkpoint
from specdec.export import published
from specdec.heads.eagle import Eagle
from tests.support.exports import export, make_exact
from tests.support.hub import Hub

NAME = "user/head"
CARD = b"---\nlicense: mit\ntags: [a]\n---\n"
OFFLINE = (huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def save(target, folder: Path, seed: int = 0) -> Eagle:
    torch.manual_seed(seed)
    drafter = Eagle(target, vocab=torch.arange(0, 60, 4)).double()
    checkpoint.save(folder, drafter, {"_target_": "specdec.heads.eagle.Eagle"})
    return drafter


def push(folder: Path, **settings) -> str:
    """-> the commit"""
    contents = {path.name: path for path in folder.iterdir()} | {"README.md": CARD}
    return names.push_files(NAME, contents, message="Add a head", **settings).oid


def same(head, reference) -> bool:
    return all(torch.equal(value, reference.state_dict()[name]) for name, value in head.state_dict().items())


def refuse(sentence: str, name: str = NAME) -> None:
    with pytest.raises(ValueError, match=sentence):
        checkpoint.resolve(name)


@pytest.fixture
def pushed(hub, target, tmp_path) -> tuple[Eagle, str]:
    """A head at user/name, and its commit."""
    drafter = save(target, tmp_path / "saved" / "step_000001")
    return drafter, push(tmp_path / "saved" / "step_000001")


def test_what_was_pushed_is_loaded_by_name_and_then_from_the_cache(hub, target, pushed, monkeypatch):
    drafter, commit = pushed
    assert same(checkpoint.load(NAME, target), drafter)
    folder = checkpoint.resolve(NAME)
    assert names.pin_commit(folder) == checkpoint.name_checkpoint(folder) == f"{NAME}@{commit}"
    assert {path.name for path in folder.iterdir()} == {"drafter.json", "drafter.safetensors", files.CHECKSUMS}
    num = len(hub.requests)
    fetch_checkpoint.cache_clear()
    monkeypatch.setattr(*OFFLINE)
    for name in (NAME, f"{NAME}@{commit}"):
        assert same(checkpoint.load(name, target), drafter)
    assert len(hub.requests) == num


def test_a_revision_is_a_commit_a_tag_or_a_branch(hub, target, pushed, tmp_path):
    """A process keeps the commit of a name that it has resolved."""
    first, commit = pushed
    resolved = checkpoint.resolve(NAME)
    second, third = (save(target, tmp_path / "saved" / str(seed), seed) for seed in (1, 2))
    repository = hub.repositories[NAME]
    repository.refs["try/out"] = push(tmp_path / "saved" / "2")
    repository.refs["v2"] = push(tmp_path / "saved" / "1")
    assert checkpoint.resolve(NAME) == resolved
    fetch_checkpoint.cache_clear()  # as a new process
    assert checkpoint.resolve(NAME) != resolved
    for revision, drafter in {commit: first, "v2": second, "main": second, "try/out": third}.items():
        assert same(checkpoint.load(f"{NAME}@{revision}", target), drafter), revision
    assert same(checkpoint.load(NAME, target), second)
    refuse("no revision 'v3': give one of its commits, tags or branches", f"{NAME}@v3")


def test_one_commit_replaces_all_files(hub, target, pushed, tmp_path):
    """Figures of an earlier head must not stay beside a new one."""
    folder = tmp_path / "saved" / "1"
    save(target, folder, 1)
    (folder / "record-vllm.json").write_text("{}")
    push(folder)
    (folder / "record-vllm.json").unlink()
    push(folder)
    repository = hub.repositories[NAME]
    assert len(repository.commits) == 4  # the empty one, and one for each push
    last = repository.commits[repository.refs["main"]]
    assert set(last) == {".gitattributes", "README.md", "drafter.json", "drafter.safetensors", files.CHECKSUMS}


def test_a_published_head_is_downloaded_without_the_rest_of_its_repository(hub, target, tmp_path):
    drafter = make_exact(target, "dflash")
    export(drafter, "vllm", tmp_path / "out")
    others = {"run.py": b"1", "optimizer.pt": b"1", "more/model.safetensors": b"1", "README.md": CARD}
    contents = {path.name: path for path in (tmp_path / "out").iterdir()} | others
    commit = names.push_files(NAME, contents, message="Add a head").oid
    assert same(checkpoint.load(NAME, target, exact=True), drafter)
    folder = checkpoint.resolve(NAME)
    assert checkpoint.name_checkpoint(folder) == f"{NAME}@{commit}"
    assert published.read_published(folder, target)[0]["published"]["source"] == f"{NAME}@{commit}"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert found <= {"config.json", "model.safetensors", "mask_embedding.pt", files.CHECKSUMS}
    hub.failing = 500  # as without the Hub
    fetch_checkpoint.cache_clear()
    assert same(checkpoint.load(f"{NAME}@{commit}", target, exact=True), drafter)


def test_of_a_whole_model_in_shards_only_the_index_is_downloaded(hub, target, tmp_path):
    places = {"model.embed_tokens.weight": "model-1.safetensors"}
    index = json.dumps({"weight_map": places}).encode()
    contents = {"config.json": b"{}", "model-1.safetensors": b"large", published.INDEX: index, "README.md": CARD}
    names.push_files(NAME, contents, message="Add a model")
    assert {path.name for path in checkpoint.resolve(NAME).iterdir()} == {"config.json", published.INDEX}
    with pytest.raises(ValueError, match="ships no MTP modules"):
        checkpoint.load(NAME, target)


def test_a_damaged_download_is_refused(hub, target, pushed):
    hub.damaged = {"drafter.safetensors"}
    with pytest.raises(ValueError, match=rf"drafter.safetensors is damaged: .*{files.CHECKSUMS}"):
        checkpoint.load(NAME, target)


def test_a_folder_wins_over_a_name(hub, target, pushed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = save(target, tmp_path / "user" / "head", 5)
    num = len(hub.requests)
    assert same(checkpoint.load(NAME, target), own) and len(hub.requests) == num
    assert checkpoint.name_checkpoint(Path(NAME)) == NAME


def test_a_name_that_nobody_has(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for token in ("hf_user", None):
        if token is None:
            monkeypatch.delenv("HF_TOKEN")
        refuse("neither a folder runs/demo nor a head of that name on the Hugging Face Hub", "runs/demo")
    hub.repositories.clear()
    num = len(hub.requests)
    for path in ("checkpoints/demo", "./a/b", "a/b/c", "step_000001", "a--b/c"):  # only folders are called so
        with pytest.raises(
            ValueError,
            match=r"does not exist\. A checkpoint is a folder .* or the name of one of both on the Hugging Face",
        ):
            checkpoint.read_json(checkpoint.resolve(path) / "drafter.json")
    assert len(hub.requests) == num


def test_a_private_head_needs_a_token_of_its_owner(hub, target, tmp_path, monkeypatch):
    drafter = save(target, tmp_path / "saved")
    push(tmp_path / "saved", private=True)
    for token in ("hf_other", None):
        monkeypatch.delenv("HF_TOKEN")
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        refuse(r"If it is private, `hf auth login` keeps a token of yours")
        monkeypatch.setenv("HF_TOKEN", "hf_user")
    assert same(checkpoint.load(NAME, target), drafter)


def test_gated_heads_and_repositories_without_a_head(hub, pushed, monkeypatch):
    hub.gated = {NAME}
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    refuse("user/head on the Hugging Face Hub asks you to accept its conditions")
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    huggingface_hub.HfApi().create_repo("user/other")
    refuse(r"user/other on the .* Hub is neither a checkpoint of specdec nor a published head", "user/other")


def test_without_the_hub_the_cache_is_used(hub, target, pushed, monkeypatch):
    """Also if the Hub fails, and quickly."""
    hub.failing = 500
    begin = time.monotonic()
    message = r"neither a folder user/head nor a head of that name in the cache .* answers with error 500"
    refuse(message)
    hub.failing = None
    folder = checkpoint.resolve(NAME)
    fetch_checkpoint.cache_clear()
    hub.failing = 500
    assert checkpoint.resolve(NAME) == folder
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    fetch_checkpoint.cache_clear()
    assert checkpoint.resolve(NAME) == folder
    refuse(r"neither a folder user/none nor .* the Hub cannot be reached", "user/none")
    assert time.monotonic() - begin < 10
    monkeypatch.setattr(*OFFLINE)
    num = len(hub.requests)
    refuse(r"neither a folder user/other nor .* HF_HUB_OFFLINE=1 forbids to ask", "user/other")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE=1 forbids to reach the Hugging Face Hub: unset it"):
        names.push_files(NAME, {}, message="no")
    assert len(hub.requests) == num


@pytest.mark.parametrize(
    ("token", "status", "message"),
    [
        (None, None, "only with a token that may write: `hf auth login`"),
        ("hf_wrong", None, "does not know your token"),
        ("hf_other", None, r"your token does not allow it \(403\)"),
        ("hf_user", 500, "user/head was not pushed: the Hub answers with error 500"),
    ],
)
def test_pushes_that_the_hub_refuses(hub: Hub, monkeypatch, token, status, message):
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.failing = status
    with pytest.raises(ValueError, match=message):
        names.push_files(NAME, {"drafter.json": json.dumps({}).encode()}, message="no")
    assert not hub.repositories
