"""Checkpoints on the Hugging Face Hub: user/name, or user/name@revision (a commit, a tag or a branch)."""

import functools
import os
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from specdec.core import untrusted

RECORDS = "record*.json"  # names of the records of a head in engines (specdec/measuring/record.py)
# Files of a checkpoint (docs/file-formats.md, section 2), by pattern. Nothing else of a repository is downloaded.
FILES = ("drafter.json", "drafter.safetensors", "SHA256SUMS", "report.json", RECORDS, "about.json")
# Files of a published head (specdec/export/published.py): small files, and weights
HEAD_FILES = ("config.json", "model.safetensors.index.json", "mask_embedding.pt", "token_map.pt")
HEAD_WEIGHTS = ("*.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
# Weights of a model, by pattern: all other files are small
MODEL_WEIGHTS = "*.safetensors *.bin *.pt *.pth *.gguf *.h5 *.msgpack onnx/* original/*".split()
# A tensor that only a whole model has
WHOLE_MODEL_TENSOR = re.compile(r".+\.(embed_tokens|embeddings|wte|word_embeddings|embed_in)\.weight")
ONLY_SHOWN = ("README.md", "report.html")  # uploaded for readers, never downloaded
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
COMMIT_SECONDS = 10  # limit for the Hub's answer about the commit of a name
REACH_SECONDS = 3  # limit for a connection to its host
TOKEN_ADVICE = "`hf auth login` keeps a token of yours, and the variable HF_TOKEN gives one"
REFUSALS = {
    RevisionNotFoundError: "{repo} on the Hugging Face Hub has no revision {revision!r}: give one of its "
    "commits, tags or branches.",
    GatedRepoError: "{repo} on the Hugging Face Hub asks you to accept its conditions, on its page: then try again. "
    f"{TOKEN_ADVICE}.",
    RepositoryNotFoundError: "There is neither a folder {name} nor a head of that name on the Hugging Face Hub that "
    f"you may read. If it is private, {TOKEN_ADVICE}.",
}


def looks_local(name: str) -> bool:
    """True if a name can only be that of a folder"""
    return name.startswith((".", "/", "~", "targets/", "checkpoints/")) or name.count("/") > 1


def is_hub_name(text: str) -> bool:
    """True if a text has the form of a name on the Hub. An existing folder may have it, too."""
    repo = text.partition("@")[0]
    return bool(NAME.fullmatch(text)) and not looks_local(repo) and "--" not in repo and ".." not in repo


def is_folder(name: str) -> bool:
    """True if a name stands for a folder of a target or head, and not for a repository on the Hub"""
    return looks_local(name) or os.path.exists(name)


def is_hub_head(name: str) -> bool:
    """True if a name stands for a head on the Hub. An existing folder comes first."""
    return is_hub_name(name) and not os.path.exists(name)  # which takes names that are too long for a file


@functools.cache
def is_hub_reachable() -> bool:
    """True if the Hub's host answers. It is asked once, as the libraries try for half a minute.

    A proxy counts as an answer.
    """
    if is_offline_mode():
        return False
    address = urllib.parse.urlsplit(ENDPOINT)
    if {address.scheme, "all"} & urllib.request.getproxies().keys():
        return True
    try:
        with socket.create_connection(
            (address.hostname, address.port or (80 if address.scheme == "http" else 443)), timeout=REACH_SECONDS
        ):
            return True
    except OSError:
        return False


def pin_commit(folder: Path) -> str:
    """user/name@commit of a folder in the Hub's cache; any other folder unchanged"""
    repo = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repo.startswith("models--"):
        return f"{repo.removeprefix('models--').replace('--', '/')}@{folder.name}"
    return str(folder)


@functools.cache
def fetch_checkpoint(name: str) -> Path:
    """The folder in the cache with the checkpoint of a name on the Hub. A process asks once for a name.

    A repository without drafter.json is a published head. Of a whole model in shards, only config.json and the index
    are downloaded. Without the Hub, or with HF_HUB_OFFLINE=1, the cache must have the checkpoint. Raises ValueError,
    with what to do, if there is none.
    """
    unreachable = _ask_for_commit(name)
    try:
        folder = _download(name, local_files_only=unreachable is not None)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"There is neither a folder {name} nor a head of that name in the cache of the Hugging Face Hub, and "
            f"{unreachable or describe_error(error)}. Check the name, or try again with the Hub in reach."
        ) from error
    except Exception as error:
        raise ValueError(f"{name} could not be downloaded: {describe_error(error)}. Try again.") from error
    if not any((folder / name).exists() for name in (FILES[0], HEAD_FILES[0])):
        raise ValueError(
            f"{name} on the Hugging Face Hub is neither a checkpoint of specdec nor a published head: "
            "it has no drafter.json and no config.json."
        )
    return folder


def _ask_for_commit(name: str) -> str | None:
    """None if the Hub has the name's commit, else why it could not be asked. Raises ValueError if the Hub lacks it.

    Without this question, snapshot_download would wait for minutes.
    """
    repo, _, revision = name.partition("@")
    if is_offline_mode():
        return "HF_HUB_OFFLINE=1 forbids to ask for it"
    try:
        HfApi().model_info(repo, revision=revision or None, timeout=COMMIT_SECONDS)
    except (RevisionNotFoundError, GatedRepoError, RepositoryNotFoundError) as error:
        raise ValueError(REFUSALS[type(error)].format(name=name, repo=repo, revision=revision)) from error
    except Exception as error:  # those of the HTTP library, whose name depends on the version of huggingface_hub
        return describe_error(error)
    return None


def _download(name: str, *, local_files_only: bool) -> Path:
    """The folder in the cache: small files first, then the weights of a published head."""
    repo, _, revision = name.partition("@")
    get = functools.partial(snapshot_download, repo, local_files_only=local_files_only)
    folder = Path(get(revision=revision or None, allow_patterns=[*FILES, *HEAD_FILES]))
    is_checkpoint, is_published = ((folder / name).exists() for name in (FILES[0], HEAD_FILES[0]))
    if not is_checkpoint and is_published and not indexes_whole_model(folder):
        get(revision=folder.name, allow_patterns=list(HEAD_WEIGHTS), ignore_patterns="*/*")
    return folder


def indexes_whole_model(folder: Path) -> bool:
    """True if an index names the tensors of a language model, which are not all downloaded"""
    path = untrusted.find_inside(folder, HEAD_FILES[1])
    files_by_tensor = untrusted.read_json(path).get("weight_map") if path.exists() else None
    return isinstance(files_by_tensor, dict) and any(map(WHOLE_MODEL_TENSOR.fullmatch, files_by_tensor))


def fetch_small_files(name: str, folder: Path) -> None:
    """Downloads what a repository has beside weights: tokenizer, chat template, generation_config.json, ..

    folder: folder of its commit in the cache, which without the Hub stays as it is
    Raises ValueError if the download fails.
    """
    try:
        snapshot_download(
            name,
            revision=folder.name,
            cache_dir=folder.parents[2],
            ignore_patterns=MODEL_WEIGHTS,
            local_files_only=not is_hub_reachable(),
        )
    except Exception as error:  # those of the HTTP library too
        raise ValueError(f"{name} could not be downloaded: {describe_error(error)}. Try again.") from error


def push_files(repo: str, contents: dict[str, Path | bytes], *, private: bool = False, message: str) -> CommitInfo:
    """Pushes files, by name, in one commit. A missing repository is made. private: True for a private new repository

    Files of `FILES` and `ONLY_SHOWN` of an earlier head are deleted. Raises
    ValueError, with what to do, if the Hub refuses or cannot be reached.
    """
    if is_offline_mode():
        raise ValueError("HF_HUB_OFFLINE=1 forbids to reach the Hugging Face Hub: unset it, or use dry_run=true.")
    if get_token() is None:
        raise ValueError(f"The Hugging Face Hub takes files only with a token that may write: {TOKEN_ADVICE}.")
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        names = filter_repo_objects(api.list_repo_files(repo), allow_patterns=[*FILES, *ONLY_SHOWN])
        old = set(names) - contents.keys()
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        deleted = [CommitOperationDelete(name) for name in sorted(old)]
        return api.create_commit(repo, operations=[*added, *deleted], commit_message=message)
    except Exception as error:  # those of the HTTP library too
        raise ValueError(f"{repo} was not pushed: {describe_error(error)}.") from error


def describe_error(error: Exception) -> str:
    """Why the Hub failed, as a part of a sentence"""
    if not isinstance(error, HfHubHTTPError):
        text = " ".join(str(error).split()).rstrip(".")
        return f"the Hub cannot be reached, or the transfer failed ({type(error).__name__}: {text})"
    status = error.response.status_code
    if status == 401:
        return f"the Hub does not know your token, or there is none (401). {TOKEN_ADVICE}"
    if status == 403:
        return "your token does not allow it (403). Take one that may write to this repository"
    return f"the Hub answers with error {status}"
