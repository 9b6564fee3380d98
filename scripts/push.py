"""Shares a checkpoint on the Hugging Face Hub, with a model card.

    specdec push checkpoint=checkpoints/eagle3-smollm2-135m repo=user/name base_model=HuggingFaceTB/SmolLM2-135M-Instruct

One commit holds the weights, figures, the page, and a model card: what the head is worth, how it was trained, and the commands
that use and serve it. Afterwards checkpoint=user/name loads it everywhere. Pushing needs a token that may write: `hf auth login`,
or the variable HF_TOKEN.
"""

from helpers import loading
from helpers.options import option, options, run

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from export import CardOptions
from specdec import checkpoint
from specdec.core import files, hub
from specdec.export.cards import make_card
from specdec.export.engines import make_forms
from train.pages import facts


@dataclass(frozen=True, kw_only=True)
class Push(CardOptions):
    repo: str = field(metadata={"help": "user/name on the Hub; it is made if it does not exist"})
    private: bool = option(False, "make a new repository private")
    base_model: str | None = option(
        None,
        "Hub name of the target, for drafter.json and the card; null: the name in drafter.json, which may be a folder",
    )
    dry_run: bool = option(False, "only list the files and write the card to `out`, without the network")
    out: str = option("model_card.md", "with dry_run=true: file for the card")


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Push, __doc__, arguments)
    for name, value in (("repo", chosen.repo), ("base_model", chosen.base_model)):
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
    card = compose_card(chosen, loaded, target)
    contents["README.md"] = card.encode()
    for name, content in contents.items():
        print(f"{name:<22} {len(content) if isinstance(content, bytes) else content.stat().st_size:>12,} bytes")
    if hub.is_folder(target):
        print(f"The target is the folder {target}, which others do not have: give base_model=, its name on the Hub.")
    if chosen.dry_run:
        files.write_text(Path(chosen.out), card)
        print(f"written: {chosen.out}, the model card; nothing was uploaded")
        return
    message = f"Add {type(loaded.drafter).__name__} for {target}"
    commit = hub.push(chosen.repo, contents, private=chosen.private, message=message)
    print(f"pushed: {commit.commit_url}")
    print(f"Next: specdec evaluate checkpoint={chosen.repo}@{commit.oid}")


def collect_files(folder: Path, document: dict) -> dict[str, Path | bytes]:
    """The files to share, by name. document: for drafter.json"""
    own = [folder / name for name in (*hub.FILES, "report.html")]
    contents: dict[str, Path | bytes] = {path.name: path for path in own if path.exists()}
    files.check(*own[:-1])
    if document != checkpoint.read_json(folder / "drafter.json"):
        contents |= files.changed_document(folder / "drafter.json", document)
    if about := facts.read(folder):
        contents[facts.ABOUT] = (json.dumps(about, indent=1) + "\n").encode()
    return contents


def compose_card(chosen: Push, loaded: loading.Loaded, target: str) -> str:
    """The model card. target: its name in the card"""
    provenance = loading.read_provenance(chosen, loaded, loaded.target)
    return make_card(
        replace(provenance, target=target, fingerprint=provenance.document["target_fingerprint"]),
        make_forms(loaded.drafter),
        repo=chosen.repo,
        adapts=loaded.drafter.adapts_target,
    )


if __name__ == "__main__":
    run(main)
