"""What the scripts that decode share: the checkpoint, its target, the tree's shape."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.drafter import Drafter
from specdec.target import Target, load_tokenizer
from specdec.tree import TreeShape
from train import data


@dataclass(frozen=True)
class TargetOptions:
    name: str | None = field(
        default=None, metadata={"help": "folder or Hub name of the target; null: the checkpoint's"}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "bfloat16, float32, float16 or float64"})
    device: str | None = field(default=None, metadata={"help": "cpu or cuda; null: cuda if there is one"})


@dataclass(frozen=True)
class DecodeOptions:
    temperature: str = field(default="0", metadata={"help": "0 is greedy; a comma list measures each"})
    depth: int = field(default=2, metadata={"help": "drafts along a path"})
    width: int = field(default=1, metadata={"help": "nodes widened at each depth (EAGLE-2's tree); 1 is a chain"})
    nodes: int | None = field(
        default=None, metadata={"help": "drafts in a tree; null: depth for a chain, else depth x width"}
    )

    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.width, self.nodes or self.depth * self.width)

    def temperatures(self) -> list[float]:
        try:
            return [float(value) for value in self.temperature.split(",")]
        except ValueError:
            raise ValueError(f"decode.temperature={self.temperature}: give numbers, such as 0 or 0,1.") from None


@dataclass(frozen=True)
class Loaded:
    """A checkpoint beside its target."""

    folder: Path
    target: Target
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    stop: set[int]


def use_threads() -> None:
    """All cores, unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def load(folder: str, options: TargetOptions) -> Loaded:
    """Raises ValueError, with what to do, for a wrong folder or target."""
    use_threads()
    path = checkpoint.resolve(folder)
    document = checkpoint.read_json(path / "drafter.json")
    name = options.name or str(document.get("target"))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(name, dtype=options.dtype, device=device)
    tokenizer = load_tokenizer(name)
    drafter = checkpoint.load(path, target)
    if target.adapted:
        print(f"{path} adapts its target: all outputs are those of the adapted one.", file=sys.stderr)
    return Loaded(
        path,
        target,
        tokenizer,
        drafter,
        data.stop_tokens(tokenizer, target.model.generation_config),
    )
