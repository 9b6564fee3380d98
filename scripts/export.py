"""Exports a drafter for an engine: weights in safetensors, config.json, and a model card with the launch line.

    specdec export checkpoint=checkpoints/shipped/eagle3 format=vllm out=exported
    specdec export checkpoint=checkpoints/eagle3-smollm2-135m push=user/name base_model=HuggingFaceTB/SmolLM2-135M-Instruct

Formats: vllm, sglang, speculators, eagle, medusa,
transformers, gguf (for llama.cpp's converter), stitched (the target's folder with its own MTP module, head=native_mtp),
safetensors (this project's own tensor names), published (a head that another project published, in the layout that it came in).

With push= the checkpoint itself goes to the Hugging Face Hub, in one commit with its figures, its page and a model card. Afterwards
checkpoint=user/name loads it everywhere. It needs a token that may write: `hf auth login`, or the variable HF_TOKEN.
"""

from specdec.options.command_line import option, options, run

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from specdec import checkpoint, loading
from specdec.core import files, hub, progress
from specdec.export.engines import FORMATS, make_form, make_forms
from specdec.heads.base import Drafter, Head
from specdec.heads.medusa import Medusa2
from specdec.measuring.model_card import make_card, read_provenance, write_export
from specdec.options import command_line
from specdec.target.adapter import save_merged
from specdec.target.model import DTYPES, Target


@dataclass(frozen=True, kw_only=True)
class Export:
    checkpoint: str = field(metadata={"help": command_line.CHECKPOINT})
    out: str | None = option(
        None, "folder to make; with push= and dry_run=true: of the card, default: shared", folder=True
    )
    format: str = option("safetensors", f"one of {', '.join(FORMATS)}")
    merged_target: str | None = option(
        None, "for a head that adapts its target (medusa2): folder for the adapted model"
    )
    push: str | None = option(None, "user/name on the Hub, which gets the checkpoint; it is made if it does not exist")
    base_model: str | None = option(
        None,
        "of push=: Hub name of the target, for drafter.json and the card; null: the name in drafter.json, which may be a folder",
    )
    private: bool = option(False, "of push=: make a new repository private")
    dry_run: bool = option(False, "of push=: only list the files and write the card to `out`, without the network")
    num_drafts: int | None = option(
        None, "drafts per round in the launch lines; null: the fastest by the checkpoint's report"
    )
    license: str = option("other", "licence of the weights, for the model card")
    data: str | None = option(None, "training data, for the model card; null: as the run recorded it")
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="bfloat16"))


def push_checkpoint(chosen: Export, repo: str) -> None:
    """Uploads the checkpoint with a model card, or only writes the card. repo: a name on the Hub."""
    for name, value in (("push", repo), ("base_model", chosen.base_model)):
        if value is not None and ("@" in value or not hub.is_name(value)):
            raise ValueError(f"{name}={value} must be a name on the Hugging Face Hub, such as user/name.")
    loaded = loading.load(chosen.checkpoint, chosen.target)  # a damaged checkpoint is not shared
    folder, document = loaded.folder, checkpoint.read_document(loaded.folder)
    if not (folder / "drafter.json").exists():
        raise ValueError(
            f"{chosen.checkpoint} is a published head in its own layout: only checkpoints of specdec are shared."
        )
    target = chosen.base_model or str(document["target"])
    contents = collect_files(folder, document | {"target": target})
    provenance = read_provenance(chosen, loaded, loaded.target)
    provenance = replace(provenance, target=target, fingerprint=provenance.document["target_fingerprint"])
    card = make_card(provenance, make_forms(loaded.drafter), repo=repo, adapts=loaded.drafter.adapts_target)
    contents["README.md"] = card.encode()
    for name, content in contents.items():
        print(f"{name:<22} {len(content) if isinstance(content, bytes) else content.stat().st_size:>12,} bytes")
    if hub.is_folder(target):
        print(f"The target is the folder {target}, which others do not have: give base_model=, its name on the Hub.")
    if chosen.dry_run:
        path = Path(chosen.out or "shared") / "README.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, card)
        print(f"written: {path}, the model card; nothing was uploaded")
        return
    message = f"Add {type(loaded.drafter).__name__} for {target}"
    commit = hub.push(repo, contents, private=chosen.private, message=message)
    print(f"pushed: {commit.commit_url}")
    print(f"Next: specdec evaluate checkpoint={repo}@{commit.oid}")


def collect_files(folder: Path, document: dict) -> dict[str, Path | bytes]:
    """The files to share, by name. document: for drafter.json"""
    own = [folder / name for name in (*hub.FILES, "report.html")]
    contents: dict[str, Path | bytes] = {path.name: path for path in own if path.exists()}
    files.check(*own[:-1])
    if document != checkpoint.read_json(folder / "drafter.json"):
        contents |= files.changed_document(folder / "drafter.json", document)
    if about := checkpoint.read_facts(folder):
        contents[checkpoint.ABOUT] = (json.dumps(about, indent=1) + "\n").encode()
    return contents


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
    if chosen.push is not None:
        if chosen.merged_target is not None or chosen.format != "safetensors":
            raise ValueError("push= shares the checkpoint as it is: leave format= and merged_target= out.")
        push_checkpoint(chosen, chosen.push)
        return
    if chosen.base_model is not None or chosen.private or chosen.dry_run:
        raise ValueError("base_model=, private= and dry_run= are of push=user/name: give that, too, or leave them out.")
    if chosen.out is None:
        raise ValueError("Give a value for: out. See --help.")
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
    provenance = read_provenance(chosen, loaded, drafter.target)
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
