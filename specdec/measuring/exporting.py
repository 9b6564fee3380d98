"""The export of a checkpoint, with its model card, as a folder for an engine."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from specdec import loading
from specdec.core import progress
from specdec.core.option_types import Text, Window, describe_unknown_choice, raise_first
from specdec.core.wording import format_count
from specdec.export.engines import FORMATS, ExportForm, make_form
from specdec.heads.base import Drafter, Head
from specdec.heads.medusa import Medusa2
from specdec.measuring.model_card import read_provenance, write_export
from specdec.measuring.sharing import ShareOptions
from specdec.options.command_types import OUTPUT_FOLDER
from specdec.target.adapter import save_merged
from specdec.target.model import DTYPES, Target


class ExportOptions(ShareOptions):
    out: Annotated[Text | None, OUTPUT_FOLDER]
    format: Text
    merged_target: Text | None
    window: Window | None

    @model_validator(mode="after")
    def check_output(self) -> "ExportOptions":
        raise_first(
            {
                "push= shares the checkpoint as it is: leave format= and merged_target= out.": (
                    self.push is not None and (self.merged_target is not None or self.format != "safetensors")
                ),
                f"window={self.window} is written into what an engine reads: give the format= of one, too.": (
                    self.window is not None and self.format in ("safetensors", "published")
                ),
                "base_model=, private= and dry_run= are of push=user/name: give that, too, or leave them out.": (
                    self.push is None and (self.base_model is not None or self.private or self.dry_run)
                ),
                "Give a value for: out. See --help.": self.push is None and self.out is None,
            }
        )
        return self


def export_checkpoint(options: ExportOptions) -> None:
    """Writes the folder of an export, and prints how engines serve it. Raises ValueError for what cannot be."""
    if options.format not in FORMATS:
        raise ValueError(describe_unknown_choice("format", options.format, FORMATS))
    out = Path(str(options.out))
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    loaded = loading.load_head(options.checkpoint, options.target, exact=options.format == "published")
    drafter: Head | None = loaded.drafter
    if options.merged_target is not None:
        drafter = merge_target(options, loaded)
        if drafter is None:
            print("The adapted target is the whole drafter: there is nothing else to export.")
            return
    if not isinstance(drafter, Drafter):
        raise ValueError(f"{options.checkpoint} is only an adapter of its target: give merged_target=DIR.")
    form = make_form(drafter.with_window(options.window), options.format)
    provenance = read_provenance(options, loaded, drafter.target, limited=options.window is not None)
    num_drafts = form.limit_drafts(provenance.num_drafts)
    if options.num_drafts not in (None, num_drafts):
        reason = "a block is drafted whole" if form.whole_block else "it has no more steps"
        raise ValueError(
            f"num_drafts={options.num_drafts}: this drafter drafts {format_count(num_drafts, 'token')} per round, "
            f"because {reason}."
        )
    with progress.start_task("writing the tensors"):
        size = write_export(form, out, dtype=DTYPES[options.target.dtype_here], provenance=provenance)
    num_tensors = len(drafter.state_dict() if form.layout.fill_folder else form.layout.tensors)
    print(f"written: {out}, {num_tensors} tensors, {size / 1e6:.1f} MB")
    print_launch_lines(form, drafter.target.name, str(out), num_drafts)


def merge_target(options: ExportOptions, loaded: loading.LoadedHead) -> Drafter | None:
    """Writes the adapted target to merged_target=, and returns the heads for it; None for an adapter without heads."""
    folder = str(options.merged_target)
    if not loaded.drafter.adapts_target:
        raise ValueError(f"merged_target={folder}: this drafter does not adapt its target.")
    with progress.start_task("writing the adapted target"):
        save_merged(loaded.target, folder)
    loaded.tokenizer.save_pretrained(folder)
    print(f"written: {folder}, the adapted target")
    if not isinstance(loaded.drafter, Medusa2):
        return None
    merged = Target.load(folder, dtype=options.target.dtype, device=loaded.target.device)
    return loaded.drafter.make_merged_heads(merged)


def print_launch_lines(form: ExportForm, target: str, out: str, num_drafts: int) -> None:
    """Prints how engines serve an export: launch lines, the configuration, notes. target: its name"""
    for engine, line in form.launch_lines(target=target, out=out, num=num_drafts).items():
        print(f"\n{engine}, {format_count(num_drafts, 'draft')} a round:\n{line}")
    if form.settings:
        print(f"\nas a configuration: {json.dumps(form.engine_settings(out, num_drafts))}")
    if form.notes:
        print("\n" + "\n".join(f"- {note}" for note in form.notes))
