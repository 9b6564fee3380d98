"""python scripts/export.py checkpoint=DIR format=vllm out=DIR

Writes a drafter for others to load: the weights in safetensors, config.json and a model card with the launch line of each
engine, checked against the format's manifest and read back. Formats: vllm, sglang, speculators, eagle, medusa,
transformers, gguf (what llama.cpp's converter takes), safetensors (our own names).
"""

import importlib
import json
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path

import specdec.export
from helpers import loading
from helpers.options import options, run
from specdec import serving
from specdec.drafter import Drafter
from specdec.heads.medusa import Medusa2
from specdec.target import DTYPES, Target
from specdec.target_adapter import save_merged


@dataclass(frozen=True)
class Export:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    out: str = field(metadata={"help": "folder to make"})
    format: str = field(default="safetensors", metadata={"help": "one of the files in specdec/export"})
    num_drafts: int | None = field(
        default=None,
        metadata={"help": "drafts a round, for the launch lines; null: fastest by the checkpoint's report"},
    )
    license: str = field(default="other", metadata={"help": "licence of the weights, for the model card"})
    data: str | None = field(
        default=None, metadata={"help": "what it was trained on, for the model card; null: from the run's config.yaml"}
    )
    merged_target: str | None = field(
        default=None, metadata={"help": "of an adapted target (medusa2): folder to make with the merged model"}
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def main() -> None:
    chosen = options(Export, __doc__)
    formats = [module.name for module in pkgutil.iter_modules(specdec.export.__path__)]
    if chosen.format not in formats:
        raise ValueError(f"There is no format {chosen.format!r}; there are: {', '.join(formats)}.")
    if chosen.num_drafts is not None and chosen.num_drafts < 1:
        raise ValueError(f"num_drafts={chosen.num_drafts} must be at least 1.")
    out = Path(chosen.out)
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    loaded = loading.load(chosen.checkpoint, chosen.target)
    drafter, target = loaded.drafter, loaded.target
    if chosen.merged_target is not None:
        if not drafter.adapts_target:
            raise ValueError(f"merged_target={chosen.merged_target}: this drafter does not adapt its target.")
        save_merged(target, chosen.merged_target)
        loaded.tokenizer.save_pretrained(chosen.merged_target)
        if not isinstance(drafter, Medusa2):
            print(f"{chosen.merged_target}: the adapted target, merged, which is all of this drafter")
            return
        target = Target.load(chosen.merged_target, dtype=chosen.target.dtype, device=target.device)
        drafter = drafter.heads_for(target)
        print(f"{chosen.merged_target}: the adapted target, merged")
    if not isinstance(drafter, Drafter):
        raise ValueError(f"{chosen.checkpoint} is an adapter of its target and nothing else: give merged_target=DIR.")
    form = importlib.import_module(f"specdec.export.{chosen.format}").form(drafter)
    provenance = serving.Provenance.read(
        loaded.folder,
        target=target,
        license=chosen.license,
        data=chosen.data or loading.trained_on(loaded.folder),
        num_drafts=chosen.num_drafts,
    )
    num = serving.num_drafts(form, provenance)
    if chosen.num_drafts not in (None, num):
        reason = "a block is drafted whole" if form.whole_block else "it has no more steps"
        raise ValueError(f"num_drafts={chosen.num_drafts}: this drafter drafts {num} tokens a round, because {reason}.")
    tensors = serving.write(form, out, dtype=DTYPES[chosen.target.dtype], provenance=provenance)
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    print(f"{out}: {len(tensors)} tensors, {size / 1e6:.1f} MB, as the manifest asks, read back and equal")
    for engine, line in form.engines.items():
        print(f"\n{engine}, {num} drafts a round:\n{serving.filled(line, chosen.out, num)}")
    if form.settings:
        print(f"\nas a configuration: {json.dumps(serving.settings(form, chosen.out, num))}")


if __name__ == "__main__":
    run(main)
