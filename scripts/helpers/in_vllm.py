"""A drafter's export, served by vLLM at temperature 0."""

from pathlib import Path

import torch

from engine_clients import vllm_client
from specdec.export.engines import ExportForm
from specdec.export.mtp import OVERRIDE
from specdec.measuring import served


def start(target: str, settings: dict | None, *, longest: int, **given) -> vllm_client.Vllm:
    """vLLM with this project's number of threads.

    settings: its speculative configuration; longest: of a prompt, its answer and the drafts; given: more arguments of `Vllm`
    """
    overrides = OVERRIDE if settings is not None and settings["method"] == "mtp" else None
    threads = torch.get_num_threads()
    return vllm_client.Vllm(
        target, speculative=settings, max_model_len=longest, threads=threads, overrides=overrides, **given
    )


def decode(
    target: str,
    form: ExportForm,
    folder: Path,
    prompts: list[list[int]],
    *,
    num_drafts: int,
    max_new_tokens: int,
    stop: set[int],
    dtype: str,
    python: str = vllm_client.PYTHON,
) -> served.Decoding:
    """What vLLM does with the export in `folder`, which `write_export` made of `form`. target: folder or Hub name"""
    settings = form.settings_for(str(folder), num_drafts)
    longest = max(map(len, prompts)) + max_new_tokens + num_drafts + 9
    with start(target, settings, longest=longest, dtype=dtype, python=python) as engine:
        reply = engine.generate(prompts, max_new_tokens, stop)
    drafted = {
        (row, len(before)): list(ids) for row, rounds in enumerate(reply.rounds) for ids, before in rounds if ids
    }
    return served.Decoding(
        reply.answers, list(map(len, reply.rounds)), drafted, reply.accepted, offered=reply.draft_tokens
    )
