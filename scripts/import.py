"""Imports a published head as a checkpoint, to evaluate, compare and train it further.

    specdec import source=FOLDER target.name=FOLDER out=checkpoints/NAME

Reads EAGLE-1 and EAGLE-3 (SafeAILab, SGLang, vLLM), P-EAGLE, Medusa (reference and vLLM), DFlash, DSpark, MTP in MiMo's
layout, and the Speculators container.
"""

from helpers import loading
from helpers.options import options, run

from dataclasses import dataclass, field
from pathlib import Path

from specdec import checkpoint
from specdec.export.folder import read_published
from specdec.target.model import Target


@dataclass(frozen=True)
class Import:
    source: str = field(metadata={"help": "folder of the head, with config.json and its weights"})
    out: str = field(metadata={"help": "checkpoint to make, such as checkpoints/NAME", "folder": True})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Import, __doc__, arguments)
    loading.use_threads()
    out = Path(chosen.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    if chosen.target.name is None:
        raise ValueError("target.name= must name the model that the head was trained for, a folder or a Hub name.")
    target = Target.load(
        chosen.target.name,
        dtype=chosen.target.dtype,
        device=chosen.target.device or "cpu",
        trust_remote_code=chosen.target.trust_remote_code,
    )
    spec, drafter = read_published(Path(chosen.source), target)
    checkpoint.save(out, drafter, spec)
    print(f"written: {out}, {type(drafter).__name__}, {drafter.num_parameters() / 1e6:.2f} M parameters, reads hidden states "
          f"{list(drafter.target_layers)}, drafts from {drafter.vocab_size:,} of {target.vocab_size:,} tokens")  # fmt: skip
    print(f"Next: specdec evaluate checkpoint={out}, or train it further: train.py head=... start={out}")


if __name__ == "__main__":
    run(main)
