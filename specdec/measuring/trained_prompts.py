"""Digests of the prompts that a head was trained on, in the folder of its run, to find copies of held-out prompts.

    checkpoints/<run>/trained_prompts.safetensors   digests [N] int64, increasing

A digest is of a user's message, without case and blanks, so that a copy in another file, or a question that is asked
later in a conversation, is noticed. For a row of token ids alone it is of the prompt's ids. Text without a prompt has
no digest.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy
import safetensors.torch
import torch
from numpy import ndarray

from specdec import checkpoint
from specdec.core import files, untrusted
from specdec.text import reading

FILE = "trained_prompts.safetensors"
TENSOR = "digests"  # name of the tensor in it


def list_prompts(row: dict) -> list[str]:
    """The prompts of a row: every user's message, the prompt, or the prompt's ids. Values may be of any type."""
    messages = row.get("messages")
    if isinstance(messages, list):
        users = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
        return [message["content"] for message in users if isinstance(message.get("content"), str)]
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    if reading.has_ids(row) and isinstance(row["tokens"], list) and type(row["prompt_tokens"]) is int:
        return [" ".join(map(str, row["tokens"][: row["prompt_tokens"]]))]
    return []


def digest_text(text: str) -> int:
    """The digest of a text without case and blanks: eight bytes as a signed number."""
    normal = " ".join(text.casefold().split()).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(normal, digest_size=8).digest(), "little", signed=True)


def digest_row(row: dict) -> list[int]:
    """The digests of a row's prompts, without empty ones."""
    return [digest_text(text) for text in list_prompts(row) if text.strip()]


def digest_question(row: dict) -> list[int]:
    """The digests of a held-out row's question, before its first answer, and of its text before a protocol."""
    messages = row.get("messages")
    if isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        row = {**row, "messages": messages[:first]}
    published = {"prompt": row.get("original")}
    return [*digest_row(row)[-1:], *digest_row(published)]


def find_trained_rows(rows: Sequence[dict], digests: ndarray) -> list[str]:
    """The ids of the held-out rows whose question was trained on. digests [N]: increasing"""
    questions = [digest_question(row) for row in rows]
    numbers = [number for question in questions for number in question]
    copies = set(numpy.intersect1d(numpy.array(numbers, dtype=numpy.int64), digests).tolist())
    return [str(row["id"]) for row, question in zip(rows, questions, strict=True) if copies.intersection(question)]


def count_copies(ids: Sequence[str], num_prompts: int, noun: str) -> str:
    """The subject of a sentence: how many of `num_prompts` were trained on, and the first id. noun: for the prompts"""
    return f"{len(ids)} of {num_prompts} {noun} (first: {ids[0]})"


# In the folder of a run


def find_file(folder: Path) -> Path | None:
    """The file of digests for a step's or a run's folder; None without one."""
    folders = [folder, folder.parent] if folder.name.startswith("step_") else [folder]
    return next((run_folder / FILE for run_folder in folders if (run_folder / FILE).exists()), None)


def join_digests(digests: ndarray, start: str | None) -> ndarray:
    """The digests of a run, increasing [N]: of its rows (`digests`, increasing), and of its start, if those are known.

    start: checkpoint from which the run starts
    """
    start_digests = None if start is None else read_digests(checkpoint.resolve(start))
    return digests if start_digests is None else numpy.union1d(digests, start_digests)


def write_digests(run: Path, digests: ndarray) -> None:
    """Writes the digests into a run's folder. Raises ValueError if the disk is full."""
    files.write_bytes(run / FILE, safetensors.torch.save({TENSOR: torch.from_numpy(digests)}))


def read_digests(folder: Path) -> ndarray | None:
    """The digests of a step's or a run's folder, increasing [N]; None where the training prompts are not known.

    Raises ValueError for a damaged file.
    """
    path = find_file(folder)
    digests = untrusted.read_tensors(path).get(TENSOR) if path else None
    return None if digests is None else numpy.unique(digests.long().numpy())
