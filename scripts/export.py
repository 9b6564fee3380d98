"""python scripts/export.py checkpoint=DIR format=safetensors out=DIR

Writes a drafter for others to load: model.safetensors and config.json, checked by reading them back.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib
import pkgutil

import specdec.export
from scripts import common
from scripts.cli import options, run
from specdec.target import DTYPES


@dataclass(frozen=True)
class Export:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    out: str = field(metadata={"help": "folder to make"})
    format: str = field(default="safetensors", metadata={"help": "one of the files in specdec/export"})
    target: common.TargetOptions = field(default_factory=common.TargetOptions)


def main() -> None:
    chosen = options(Export, __doc__)
    formats = [module.name for module in pkgutil.iter_modules(specdec.export.__path__)]
    if chosen.format not in formats:
        raise ValueError(f"There is no format {chosen.format!r}; there are: {', '.join(formats)}.")
    loaded = common.load(chosen.checkpoint, chosen.target)
    exporter = importlib.import_module(f"specdec.export.{chosen.format}")
    tensors = exporter.export(loaded.drafter, loaded.folder, Path(chosen.out), dtype=DTYPES[chosen.target.dtype])
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    print(f"{chosen.out}: {len(tensors)} tensors, {size / 1e6:.1f} MB, read back and equal")


if __name__ == "__main__":
    run(main)
