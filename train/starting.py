"""What a run begins from: its precision, a checkpoint that is trained further, and the draft vocabulary."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from specdec import checkpoint
from specdec.core import hub, precision
from specdec.target.model import Target
from train import progress
from train.data.packing import Packs, draft_vocab
from train.pages import facts
from train.processes import by_main

PRECISIONS = {"bf16": "bf16", "fp32": "no"}  # of train.py, and what accelerate calls them


def recall_precision(config: Any, path: Path) -> None:
    """`auto` of a run that is resumed is what it was in the first launch, on whatever machine. path: of the run"""
    before = path / "config.yaml"
    if not config.resume or not before.exists():
        return
    then = yaml.safe_load(before.read_text()) or {}
    if config.precision == precision.AUTO:
        config.precision = then.get("precision", precision.AUTO)
    if config.target.dtype == precision.AUTO:
        config.target.dtype = then.get("target", {}).get("dtype", precision.AUTO)


def choose_precision(config: Any, device: torch.device) -> None:
    """Puts what the main process' device computes in, in the place of each `auto`, and says so."""
    asked = precision.AUTO in (config.precision, config.target.dtype)
    if not asked and device.type != "cpu":
        return
    choice = by_main(lambda: precision.choose(device), "what the device computes in", minutes=config.train.timeout)
    config.precision = (
        {"bfloat16": "bf16", "float32": "fp32"}[choice.dtype]
        if config.precision == precision.AUTO
        else config.precision
    )
    config.target.dtype = choice.dtype if config.target.dtype == precision.AUTO else config.target.dtype
    chosen = f"precision={config.precision} target.dtype={config.target.dtype}"
    if asked:
        progress.note(f"{chosen} ({choice.reason})")
    elif choice.dtype == "float32" and "bf" in f"{config.precision} {config.target.dtype}":
        progress.note(f"{chosen} is slow here ({choice.reason}); auto is fp32 and float32")


def pinned(start: str | None, path: Path, *, resume: bool | str, minutes: float) -> str | None:
    """Returns `start`. For a head on the Hub the commit is added: today's, or in a resumed run the one of its first launch.

    path: of the run; minutes: that the processes wait for the main one
    """
    if start is None:
        return None
    if not hub.is_head(start):
        checkpoint.read_json(checkpoint.resolve(start) / "drafter.json")  # refused now, before anything is loaded
        return start
    recorded = facts.read(path).get("start", {})
    if resume and recorded.get("given") == start:
        return recorded["used"]
    return by_main(lambda: hub.pinned(checkpoint.resolve(start)), "the head that training starts from", minutes=minutes)


def vocabulary(
    packs: Packs,
    target: Target,
    start: str | None,
    choice: str,
    size: int | None,
    *,
    minutes: float,
    before: Tensor | None = None,
) -> Tensor | None:
    """The draft vocabulary of a new head, or of a checkpoint `start`, which had `before`: increasing ids [W]; None: all tokens

    choice, size: start_vocab and head.vocab_size; minutes: that the processes wait for the main one
    Raises ValueError for a choice that a new head does not have.
    """
    if start is None:
        if choice != "keep":
            raise ValueError(f"start_vocab={choice} is for a checkpoint that is trained further: give start=, too.")
        choice = "data"
    vocab = by_main(
        lambda: draft_vocab(packs, choice, before, size=size, num_tokens=target.vocab_size),
        "the draft vocabulary",
        minutes=minutes,
    )
    if choice == "more" and before is not None and vocab is not None and len(vocab) == len(before):
        progress.note(
            f"start_vocab=more adds no token: the head drafts {len(before):,}, and an eighth more than head.vocab_size={size} are "
            "allowed, of tokens that are frequent here and could not be drafted"
        )
    return vocab
