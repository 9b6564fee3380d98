"""Save and load a drafter as a folder of safetensors and JSON. Nothing on the load path can run code from the folder.

drafter.safetensors   the drafter's own tensors
drafter.json          {_target_, arguments, target, target_fingerprint, versions}
SHA256SUMS            their checksums
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import specdec
from specdec import checkpoint
from specdec.core import extensions, files, hub, untrusted
from specdec.core.option_types import Text
from specdec.core.untrusted import read_tensors as read_tensors
from specdec.decoding.drafting import Drafting
from specdec.export import published
from specdec.heads.base import Head
from specdec.heads.native import NativeMTP
from specdec.proposers.base import Proposer
from specdec.target.adapter import check_unadapted, merge
from specdec.target.fingerprint import describe_difference
from specdec.target.model import Target

HEADS = ("specdec.heads.", "specdec.experiments.")
MOVED = {  # classes in files of earlier versions, and where they are now
    "specdec.heads.consistency.Consistency": "specdec.experiments.jacobi.head.Consistency",
    "train.objective.Objective": "train.objective.objective.Objective",
    "train.consistency.ConsistencyObjective": "specdec.experiments.jacobi.objective.ConsistencyObjective",
}
ABOUT = "about.json"  # of a run: what it was made of
BEST = "best"  # a file in the folder of a run, with the name of a step's folder
LONGEST_NAME = 1000  # of that name
SMALL_PARTS = 2**24  # numbers that a head may make beside its tensors, such as angles and maps of the vocabulary
RECORDED = (
    "target",
    "target_fingerprint",
    "target_embeddings",
    "reads_layers",
    "published",
    "versions",
)  # facts, not arguments
CHECKPOINT = (
    "A checkpoint is a folder with drafter.json and drafter.safetensors, such as checkpoints/<run>/step_000500 (or "
    "checkpoints/<run>/best, which names one), a published head (config.json and its weights), or the name of one of both on "
    "the Hugging Face Hub, such as user/name"
)


def save(folder: Path, drafter: Head, spec: dict, *, extra: dict[str, dict] | None = None) -> None:
    """spec: {"_target_": class under specdec.heads, arguments...}; extra: further JSON files, by name.

    A draft vocabulary is saved with the tensors, not in the arguments.
    """
    document = {
        **{key: value for key, value in spec.items() if key != "vocab"},
        **drafter.arguments(),
        "target": drafter.target.name,
        "target_fingerprint": drafter.target.fingerprint(),
        "target_embeddings": drafter.target.embeddings_fingerprint(),
        "reads_layers": list(drafter.target_layers),
        "versions": {lib.__name__: lib.__version__ for lib in (specdec, torch, transformers)},
    }
    tensors = {"drafter.safetensors": drafter.state_dict()}
    files.write_folder(folder, tensors=tensors, documents={"drafter.json": document, **(extra or {})})


def read_json(path: Path, *, what: str = CHECKPOINT) -> dict:
    """Raises ValueError, with what to do, for a missing or broken file; `what` ought to be there."""
    if not path.exists():
        raise ValueError(f"{path} does not exist. {what}.")
    return untrusted.read_json(path)


def read_document(folder: Path) -> dict:
    """drafter.json of a checkpoint, or of a published head what it says without its target (`published.describe`).

    Raises ValueError, with what to do, if there is none.
    """
    if published.is_published(folder):
        return published.describe(folder)
    document = read_json(untrusted.inside(folder, "drafter.json"))
    document.pop("native", None)  # the first MTP heads, the shipped one among them, have an argument that meant nothing
    path = find_class(document.get("_target_"))
    if hub.is_name(hub.pinned(folder)) and not str(path).startswith(HEADS):
        raise ValueError(f"{folder}: a head from the Hub has a class of {HEADS[0]}*, and this one has {path!r}.")
    return document | {"_target_": path}


def find_class(path: Any) -> Any:
    """Where the class of a `_target_` is now, if an earlier version had it elsewhere; anything else as it is."""
    return MOVED.get(path, path) if isinstance(path, str) else path


def read_facts(folder: Path) -> dict:
    """about.json of a run, or of the run that a step's folder belongs to; {} for older runs. Raises ValueError if it is damaged."""
    places = (folder / ABOUT, *([folder.parent / ABOUT] if folder.name.startswith("step_") else []))
    return next((read_json(path) for path in places if path.exists()), {})


def resolve(given: str | Path) -> Path:
    """A checkpoint's folder. A run's folder stands for its best step, and so does its file `best`.

    If there is no such folder, user/name and user/name@revision are checkpoints on the Hugging Face Hub, which are downloaded.
    Raises ValueError, with what to do, if that has none, and for any other file.
    """
    name = files.expand_home(str(given))
    if hub.is_head(name):
        return hub.fetch(name)
    folder = Path(name)
    if not (folder / "drafter.json").exists() and (folder / BEST).is_file():
        folder = folder / BEST
    if not folder.is_file():
        return folder
    if folder.name != BEST:
        inside = (folder.parent / "drafter.json").exists() or published.is_published(folder.parent)
        advice = f"Give its folder, {folder.parent}" if inside else CHECKPOINT
        raise ValueError(f"{folder} is a file, and no checkpoint. {advice}.")
    with folder.open(errors="replace") as best:
        return untrusted.inside(folder.parent, best.read(LONGEST_NAME).strip())


def name_of(folder: Path) -> str:
    """What a checkpoint is called: run for a run's folder, run/step for a step's; on the Hub user/name, with @revision.

    A published head is called as its folder.
    """
    if (folder / "best").is_file():
        return folder.name
    name = hub.pinned(folder)
    if hub.is_name(name):
        return name
    return folder.name if published.is_published(folder) else f"{folder.parent.name}/{folder.name}"


def drafter_class(path: str) -> type[Head]:
    """The class that `_target_` names. Heads of specdec.heads and of experiments are accepted, others with trust_code=true."""
    path = find_class(path)
    module, _, name = path.rpartition(".")
    if (module.startswith(HEADS) or extensions.trusts_code()) and all(part.isidentifier() for part in path.split(".")):
        with contextlib.suppress(ImportError):
            found = vars(importlib.import_module(module)).get(name)
            if isinstance(found, type) and issubclass(found, Head) and found.__module__ == module:
                return found
    raise ValueError(
        f"_target_ {path!r} is not a drafter of {HEADS[0]}*; this folder was not made by specdec, or is unsafe. A class of your "
        f"own needs {extensions.TRUST_CODE}=true."
    )


def _arguments(spec: dict) -> dict:
    """Those of the drafter's constructor."""
    return {key: value for key, value in spec.items() if key not in ("_target_", *RECORDED)}


def build(spec: dict, tensors: dict[str, Tensor], target: Target, *, dtype: torch.dtype | None = None) -> Head:
    """A drafter with these tensors, on the target's device and in its dtype unless another is given; spec as in `save`.

    Raises RuntimeError or TypeError if they do not fit together.
    """
    found, arguments = drafter_class(str(spec.get("_target_"))), _arguments(spec)
    other = arguments.get("model") or arguments.get("source")
    if other is not None:
        raise ValueError(f"drafter.json names another model, {other}: checkpoints hold all of their weights.")
    if issubclass(found, NativeMTP):
        arguments["source"] = None
    given = sum(value.numel() for value in tensors.values()) + target.vocab_size * target.width
    with untrusted.Allowance(4 * given + SMALL_PARTS):
        drafter = found(target, vocab=tensors.get("draft_to_target"), **arguments)
    drafter.to(dtype=dtype or target.dtype).load_state_dict(tensors)
    return drafter.to(target.device)


def start(
    folder: str | Path, target: Target, given: dict, vocab: Callable[[Tensor | None], Tensor | None] | None = None
) -> tuple[Head, dict]:
    """The drafter to be trained further, in float32, and what `save` takes as its spec. Raises ValueError as `load`.

    given: settings of a head, as in the configuration; those that its class says are `changeable` replace the checkpoint's
    vocab: the checkpoint's draft vocabulary [W] -> another one; None: it is kept
    """
    drafter, document = _read(resolve(folder), target, torch.float32)
    if vocab is not None:
        drafter = with_vocab(drafter, document, vocab(drafter.draft_to_target))
    drafter = with_parts(drafter, document, given)
    drafter.pretrained = True
    for name in set(drafter.changeable) & set(given):
        setattr(drafter, name, given[name])
        document[name] = given[name]
    return drafter.train(), {key: value for key, value in document.items() if key == "published" or key not in RECORDED}


def with_parts(drafter: Head, spec: dict, given: dict) -> Head:
    """The same head with the parts (`Head.parts`) that the configuration `given` names and the checkpoint lacks, or has of another
    kind. A part starts as the identity where its method has such a start. spec: as `build` takes it; it gets them too

    Where drafts then depend on each other in another way, the alignment and the confidence head are the configuration's as well.
    """
    kind = lambda part: (part.get("kind"), part.get("form", "plain")) if isinstance(part, Mapping) else part
    changed = {name: given.get(name) for name in drafter.parts if given.get(name) is not None}
    changed = {name: part for name, part in changed.items() if kind(part) != kind(spec.get(name))}
    if not changed:
        return drafter
    if "dependence" in changed:
        changed |= {name: given[name] for name in ("confidence", "anchor_predicts") if name in given}
        if changed.get("anchor_predicts", False) != bool(spec.get("anchor_predicts")):
            warnings.warn(
                "Drafts of the checkpoint stand one place beside those that the head's settings ask for (anchor_predicts), so it is "
                "no good start before some training.",
                stacklevel=2,
            )
    spec.update(changed, published=None)
    new = type(drafter)(drafter.target, vocab=drafter.draft_to_target, **_arguments(spec))
    new = new.to(next(drafter.parameters()))
    fresh, replaced = new.state_dict(), tuple(f"{name}." for name in changed)
    for name, value in drafter.state_dict().items():
        if name in fresh and fresh[name].shape == value.shape and not name.startswith(replaced):
            fresh[name] = value
    new.load_state_dict(fresh)
    return new


def with_vocab(drafter: Head, spec: dict, vocab: Tensor | None) -> Head:
    """The same head, which can draft other tokens: increasing ids [W], or None for all of the target's.

    spec: as `build` takes it. Of tensors with a row for each token (`Head.by_token`) the rows of tokens that stay are kept, and those of
    further tokens are what a new head has. Raises ValueError for a head that changes its target.
    """
    if drafter.adapts_target:
        raise ValueError("A head that changes its target keeps its draft vocabulary.")
    changed = type(drafter)(drafter.target, vocab=vocab, **_arguments(spec)).to(next(drafter.parameters()))
    every = torch.arange(drafter.target.vocab_size)
    before, after = (every if each is None else each.cpu() for each in (drafter.draft_to_target, vocab))
    stays = torch.isin(after, before)
    rows = torch.searchsorted(before, after[stays])
    tensors = changed.state_dict()
    for name, value in drafter.state_dict().items():
        if name.startswith(drafter.by_token):
            tensors[name][stays] = value[rows]
        elif name != "draft_to_target":
            tensors[name] = value
    changed.load_state_dict(tensors)
    return changed


def load(folder: str | Path, target: Target, *, exact: bool = False) -> Head:
    """The drafter in the target's dtype and on its device. CHANGES THE TARGET if the drafter adapts it.

    folder: as `resolve` takes it; exact: in a dtype that rounds none of the file's values

    The adapter of such a drafter is merged into the target's weights, so all later outputs of `target` are those of the
    adapted target. Raises ValueError if the target is not the one that the drafter was trained for, or is adapted already.
    """
    drafter, _ = _read(resolve(folder), target, None, exact=exact)
    if drafter.adapts_target:
        merge(target)
    return drafter.eval()


def load_proposer(target: Target, *, checkpoint: Text, decode: dict) -> Proposer:
    """The drafter of a checkpoint as a proposer. decode: arguments of Drafting. Raises ValueError as `load`."""
    return Drafting(**decode).proposer(load(checkpoint, target))


def _read(folder: Path, target: Target, dtype: torch.dtype | None, *, exact: bool = False) -> tuple[Head, dict]:
    """-> the drafter, and drafter.json, or what stands for it. dtype: None: the target's"""
    foreign = published.is_published(folder)
    if foreign:
        document, tensors = published.read(folder, target)
    else:
        document = read_document(folder)
        tensors = read_tensors(untrusted.inside(folder, "drafter.safetensors"))
        _check_target(folder, document, target)
    check_unadapted(target)
    if exact:
        dtype = functools.reduce(torch.promote_types, (v.dtype for v in tensors.values() if v.is_floating_point()))
    try:
        drafter = build(document, tensors, target, dtype=dtype)
        drafter.published = document.get("published")
        if foreign:
            published.check_output(drafter)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except Exception as error:  # with sizes from a file, a constructor may fail in any way
        what = "config.json and its weights" if foreign else "drafter.json and drafter.safetensors"
        raise ValueError(f"{folder}: {what} do not fit together: {' '.join(str(error).split())}") from error
    if foreign:
        return drafter, document
    layers, trained = list(drafter.target_layers), document.get("reads_layers")
    if layers != trained:
        raise ValueError(f"{folder}: trained on target layers {trained}, not {layers}.")
    files.check(folder / "drafter.json", folder / "drafter.safetensors")  # last: other refusals say more
    return drafter, document


def _check_target(folder: Path, document: dict, target: Target) -> None:
    """Raises ValueError for another target than the head was trained for.

    Warns if only the quantised weights differ, or if no more than the embedding and the final norm can be compared. Then the
    loaded target still verifies all drafts, so its answers stay its own; only acceptance changes a little.
    """
    trained, here, name = str(document.get("target_fingerprint")), target.fingerprint(), document.get("target")
    if target.matches(trained):
        return
    unread = not target.identity.compares(trained)
    quantised = target.quantisation is not None or "-" in trained or unread
    if not (quantised and document.get("target_embeddings") == target.embeddings_fingerprint()):
        raise ValueError(
            f"{folder} was trained for {name} (fingerprint {trained}), not for {target.name} ({here}). Use it with its own "
            "target."
        )
    if unread:
        differs = (
            f"only the embedding and the final norm of {target.name} were compared with those of {name}, for which it was trained, "
            "because layers were not read on one side"
        )
    else:
        differs = describe_difference(f"was trained against {{}} weights of {name}", trained, here)
    warnings.warn(f"{folder}: {differs}. Answers stay the target's own; acceptance may be lower.", stacklevel=2)


def head_class(folder: str | Path) -> type[Head]:
    """The class of a checkpoint's head."""
    document = checkpoint.read_document(checkpoint.resolve(folder))
    return checkpoint.drafter_class(str(document.get("_target_")))
