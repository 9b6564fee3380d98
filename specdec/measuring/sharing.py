"""A checkpoint with its model card, as a repository of the Hugging Face Hub."""

import json
from dataclasses import replace
from pathlib import Path

from specdec import checkpoint
from specdec.core import files, hub
from specdec.core.option_types import Text
from specdec.export.engines import make_forms
from specdec.loading import LoadedHead, load_head
from specdec.measuring.model_card import CardOptions, make_card, read_provenance

CARD = "README.md"  # as the Hub calls a model card
REPORT = "report.json"


class ShareOptions(CardOptions):
    push: Text | None
    private: bool
    base_model: Text | None
    dry_run: bool
    out: Text | None


def share_checkpoint(options: ShareOptions) -> None:
    """Pushes a checkpoint in one commit; with dry_run only writes its card into the folder `out`.

    Raises ValueError for names that the Hub cannot have, and for heads that are no checkpoints of this project.
    """
    for name, value in (("push", options.push), ("base_model", options.base_model)):
        if value is not None and ("@" in value or not hub.is_hub_name(value)):
            raise ValueError(f"{name}={value} must be a name on the Hugging Face Hub, such as user/name.")
    loaded = load_head(options.checkpoint, options.target)  # a damaged checkpoint is not shared
    folder, document = loaded.folder, checkpoint.read_document(loaded.folder)
    if not (folder / "drafter.json").exists():
        raise ValueError(
            f"{options.checkpoint} is a published head in its own layout: only checkpoints of specdec are shared."
        )
    target, repository = options.base_model or str(document["target"]), str(options.push)
    contents = collect_files(folder, document | {"target": target})
    card = compose_card(options, loaded, target)
    contents[CARD] = card.encode()
    for name, content in contents.items():
        print(f"{name:<22} {len(content) if isinstance(content, bytes) else content.stat().st_size:>12,} bytes")
    if hub.is_folder(target):
        print(f"The target is the folder {target}, which others do not have: give base_model=, its name on the Hub.")
    if options.dry_run:
        path = Path(options.out or "shared") / CARD
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, card)
        print(f"written: {path}, the model card; nothing was uploaded")
        return
    message = f"Add {type(loaded.drafter).__name__} for {target}"
    commit = hub.push_files(repository, contents, private=options.private, message=message)
    print(f"pushed: {commit.commit_url}")
    print(f"Next: specdec evaluate checkpoint={repository}@{commit.oid}")


def collect_files(folder: Path, document: dict) -> dict[str, Path | bytes]:
    """The files to share, as paths or changed contents, by name. document: contents of drafter.json

    Texts of held-out prompts stay here: report.html, and the samples of report.json.
    Raises ValueError for a damaged file.
    """
    contents: dict[str, Path | bytes] = {path.name: path for name in hub.FILES for path in sorted(folder.glob(name))}
    files.check_files(*(folder / name for name in hub.FILES))
    documents = {"drafter.json": document}
    if (folder / REPORT).exists():
        documents[REPORT] = checkpoint.read_json(folder / REPORT)
        documents[REPORT].pop("samples", None)
    texts = {name: files.encode_document(changed) for name, changed in documents.items()}
    contents |= files.encode_files(folder, texts)
    if run_facts := checkpoint.read_facts(folder):
        contents[checkpoint.FACTS_FILE] = (json.dumps(run_facts, indent=1) + "\n").encode()
    return contents


def compose_card(options: ShareOptions, loaded: LoadedHead, target: str) -> str:
    """The model card. target: name of the target in the card"""
    provenance = read_provenance(options, loaded, loaded.target)
    return make_card(
        replace(provenance, target=target, fingerprint=provenance.document["target_fingerprint"]),
        make_forms(loaded.drafter),
        repo=options.push,
        adapts=loaded.drafter.adapts_target,
    )
