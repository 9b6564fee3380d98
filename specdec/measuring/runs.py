"""The trained heads that are compared, and the target that they share."""

from specdec.options.command_line import split_list

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec import checkpoint, loading
from specdec.core import hub
from specdec.core.resumable import digest_bytes
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Head
from specdec.measuring.contexts import TrainedLength
from specdec.measuring.measure import FROZEN
from specdec.measuring.report import Training, read_report
from specdec.options import proposers
from specdec.options.target import TargetOptions
from specdec.target.model import Target


@dataclass(frozen=True)
class ComparedHead:
    """One of several checkpoints that are compared."""

    name: str
    folder: Path
    drafter: Head
    baseline: str  # name of its target's plain decoding: FROZEN, or its own if it adapts the target
    training: Training | None  # training costs of its report; None for older checkpoints


def load_heads(listed: str, options: TargetOptions, drafting: Drafting | None = None) -> list[ComparedHead]:
    """The checkpoints of a comma list beside one frozen target. A head that adapts its target has a copy for itself.

    drafting: settings whose window the heads get; None: they keep theirs
    Raises ValueError as `loading.load_head`, and if two have the same name.
    """
    folders = [Path(folder) for folder in split_list(listed)]
    names = [checkpoint.name_checkpoint(folder) for folder in folders]
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        raise ValueError(f"Two runs are called {', '.join(repeated_names)}: list each once, or rename a folder.")
    heads: list[ComparedHead] = []
    targets: dict[str, Target] = {}
    for name, folder in zip(names, map(checkpoint.resolve, folders)):
        baseline = f"the target adapted by {name}" if checkpoint.read_head_class(folder).adapts_target else FROZEN
        if baseline not in targets:
            targets[baseline] = loading.load_target(
                options, default=loading.find_target_name(folder, options.name)
            ).target
        drafter = (drafting or Drafting()).limit_window(checkpoint.load(folder, targets[baseline]))
        report = read_report(folder)
        heads.append(ComparedHead(name, folder, drafter, baseline, report.training if report else None))
    return heads


def open_shared_target(
    heads: list[ComparedHead], options: TargetOptions, *, head: str | None = None
) -> loading.OpenTarget:
    """The frozen target of the heads. If all of them adapt theirs, it is loaded: of the first head, or of `head`."""
    frozen_targets = [compared_head.drafter.target for compared_head in heads if compared_head.baseline == FROZEN]
    if frozen_targets:
        return loading.open_target(frozen_targets[0])
    folder = heads[0].folder if heads else head and checkpoint.resolve(head)
    return loading.load_target(options, default=loading.find_target_name(folder, options.name) if folder else None)


def find_head_folders(heads: Iterable[ComparedHead], configs: Iterable[proposers.Config] = ()) -> dict[str, Path]:
    """The folders of all trained heads, compared ones and those inside proposers, by name."""
    folders = [Path(head) for config in configs for head in proposers.list_heads(config)]
    names = {folder: checkpoint.name_checkpoint(folder) for folder in folders} | {
        compared_head.folder: compared_head.name for compared_head in heads
    }
    return {name: folder for folder, name in names.items()}


def list_long_prompts(heads: Iterable[ComparedHead], lengths: Sequence[int]) -> list[str]:
    """Sentences on heads that were trained on shorter texts than some prompts. lengths: tokens of each prompt"""
    sentences = []
    for head in heads:
        tokens = checkpoint.find_trained_length(head.folder)
        sentences += TrainedLength.from_head(head.name, tokens, head.drafter).describe_longer(lengths)
    return sentences


def describe_weights(heads: Sequence[ComparedHead]) -> dict[str, str]:
    """The revision and the digest of each head's weights, as text, by name."""
    weights = {head.name: digest_bytes((head.folder / "drafter.safetensors").read_bytes()) for head in heads}
    return {head.name: f"{hub.pin_commit(head.folder)} {weights[head.name]}" for head in heads}
