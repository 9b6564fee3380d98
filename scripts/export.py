"""Exports a drafter for an engine: weights in safetensors, config.json, and a model card with the launch line.

    specdec export checkpoint=checkpoints/shipped/eagle3 format=vllm out=exported

Formats: vllm, sglang, speculators, eagle, medusa,
transformers, gguf (for llama.cpp's converter), stitched (the target's folder with its own MTP module, head=native_mtp),
safetensors (this project's own tensor names), published (a head that another project published, in the layout that it came in).
"""

from helpers import loading
from helpers.options import option, options, run

import json
from dataclasses import dataclass, field
from pathlib import Path

from specdec.export.engines import FORMATS, make_form
from specdec.export.folder import write_export
from specdec.heads.base import Drafter, Head
from specdec.heads.medusa import Medusa2
from specdec.target.adapter import save_merged
from specdec.target.model import DTYPES, Target
from train import progress


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """What a model card says."""

    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    num_drafts: int | None = option(
        None, "drafts per round in the launch lines; null: the fastest by the checkpoint's report"
    )
    license: str = option("other", "licence of the weights, for the model card")
    data: str | None = option(None, "training data, for the model card; null: as the run recorded it")
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Export(CardOptions):
    out: str = field(metadata={"help": "folder to make", "folder": True})
    format: str = option("safetensors", f"one of {', '.join(FORMATS)}")
    merged_target: str | None = option(
        None, "for a head that adapts its target (medusa2): folder for the adapted model"
    )


def merge_target(chosen: Export, loaded: loading.Loaded) -> Drafter | None:
    """Writes the adapted target to merged_target. -> the heads for it; None if the adapter is all of the drafter"""
    folder = str(chosen.merged_target)
    if not loaded.drafter.adapts_target:
        raise ValueError(f"merged_target={folder}: this drafter does not adapt its target.")
    with progress.start("writing the adapted target"):
        save_merged(loaded.target, folder)
    loaded.tokenizer.save_pretrained(folder)
    print(f"written: {folder}, the adapted target")
    if not isinstance(loaded.drafter, Medusa2):
        return None
    merged = Target.load(folder, dtype=chosen.target.dtype, device=loaded.target.device)
    return loaded.drafter.heads_for(merged)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Export, __doc__, arguments)
    if chosen.format not in FORMATS:
        raise ValueError(f"There is no format {chosen.format!r}; there are: {', '.join(FORMATS)}.")
    out = Path(chosen.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    loaded = loading.load(chosen.checkpoint, chosen.target, exact=chosen.format == "published")
    drafter: Head | None = loaded.drafter
    if chosen.merged_target is not None:
        drafter = merge_target(chosen, loaded)
        if drafter is None:
            print("The adapted target is the whole drafter: there is nothing else to export.")
            return
    if not isinstance(drafter, Drafter):
        raise ValueError(f"{chosen.checkpoint} is only an adapter of its target: give merged_target=DIR.")
    form = make_form(drafter, chosen.format)
    provenance = loading.read_provenance(chosen, loaded, drafter.target)
    num = form.num_drafts(provenance.num_drafts)
    if chosen.num_drafts not in (None, num):
        reason = "a block is drafted whole" if form.whole_block else "it has no more steps"
        raise ValueError(
            f"num_drafts={chosen.num_drafts}: this drafter drafts {num} tokens per round, because {reason}."
        )
    with progress.start("writing the tensors"):
        size = write_export(form, out, dtype=DTYPES[chosen.target.dtype_here], provenance=provenance)
    num_tensors = len(drafter.state_dict() if form.layout.folder else form.layout.tensors)
    print(f"written: {out}, {num_tensors} tensors, {size / 1e6:.1f} MB")
    for engine, line in form.launch_lines(target=drafter.target.name, out=chosen.out, num=num).items():
        print(f"\n{engine}, {num} drafts a round:\n{line}")
    if form.settings:
        print(f"\nas a configuration: {json.dumps(form.settings_for(chosen.out, num))}")
    if form.notes:
        print("\n" + "\n".join(f"- {note}" for note in form.notes))


if __name__ == "__main__":
    run(main)
