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
from specdec.core import extensions, files, hub, untrusted
from specdec.core.compile import decodes_joined, join_products
from specdec.core.option_types import Text
from specdec.core.untrusted import read_tensors as read_tensors
from specdec.decoding.drafting import Drafting
from specdec.export import published
from specdec.heads.base import Head
from specdec.heads.dflash import BlockDrafter
from specdec.heads.native import NativeMTP
from specdec.heads.native_modules.layouts import LAYOUTS, find_engine
from specdec.proposers.base import Proposer
from specdec.target.adapter import check_unadapted, merge_adapter
from specdec.target.fingerprint import UNREAD, describe_difference, describe_outdated, is_outdated
from specdec.target.model import Target

HEAD_MODULES = ("specdec.heads.", "specdec.experiments.")
MOVED_CLASSES = {  # classes in files of earlier versions, and where they are now
    "train.objective.Objective": "train.objective.objective.Objective",
}
# Heads that only earlier versions have
REMOVED_CLASSES = {"specdec.heads.consistency.Consistency", "specdec.experiments.jacobi.head.Consistency"}
FACTS_FILE = "about.json"  # a file in the folder of a run: data, target and start
BEST_FILE = "best"  # a file in the folder of a run, with the name of a step's folder
MAX_BEST_CHARACTERS = 1000  # of the name in that file; folders' names have 255 at most
EXTRA_NUMBERS = 2**24  # numbers that a head may make beside its tensors, such as angles and maps of the vocabulary
RECORDED_FACTS = (
    "target",
    "target_fingerprint",
    "target_embeddings",
    "reads_layers",
    "published",
    "trained_length",
    "versions",
)
CHECKPOINT_ADVICE = (
    "A checkpoint is a folder with drafter.json and drafter.safetensors, such as checkpoints/<run>/step_000500 (or "
    "checkpoints/<run>/best, which names one), a published head (config.json and its weights), or the name of one of "
    "both on the Hugging Face Hub, such as user/name"
)


def save(folder: Path, drafter: Head, spec: dict, *, extra: dict[str, dict] | None = None) -> None:
    """Writes a drafter as a checkpoint. A draft vocabulary is saved with the tensors, not in the arguments.

    spec: {"_target_": class under specdec.heads, arguments...}; extra: further JSON files, by name
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


def read_json(path: Path, *, advice: str = CHECKPOINT_ADVICE) -> dict:
    """The content of a JSON file. Raises ValueError for a damaged file, and with `advice` for a missing one."""
    if not path.exists():
        raise ValueError(f"{path} does not exist. {advice}.")
    return untrusted.read_json(path)


def read_document(folder: Path) -> dict:
    """drafter.json of a checkpoint, or the facts of a published head that need no target.

    Raises ValueError, with what to do, if there is none.
    """
    if published.is_published(folder):
        return published.describe_published(folder)
    document = read_json(untrusted.find_inside(folder, "drafter.json"))
    path = document.get("_target_")
    path = MOVED_CLASSES.get(str(path), path)
    if hub.is_hub_name(hub.pin_commit(folder)) and not str(path).startswith(HEAD_MODULES):
        raise ValueError(f"{folder}: a head from the Hub has a class of {HEAD_MODULES[0]}*, and this one has {path!r}.")
    return document | {"_target_": path}


def read_facts(folder: Path) -> dict:
    """about.json of a run, or of the run that a step's folder belongs to; {} without one.

    Raises ValueError if it is damaged.
    """
    folders = (folder, folder.parent) if folder.name.startswith("step_") else (folder,)
    return next((read_json(path / FACTS_FILE) for path in folders if (path / FACTS_FILE).exists()), {})


def find_trained_length(folder: Path) -> int | None:
    """Tokens of the longest text that a head may have been trained on; None: unknown. folder: see `resolve`

    drafter.json says it, or the record of the run. Raises ValueError as `read_document` and `read_facts`.
    """
    data_facts = read_facts(folder).get("data")
    length = read_document(folder).get("trained_length") or (isinstance(data_facts, dict) and data_facts.get("length"))
    return length if isinstance(length, int) and length > 0 else None


def keeps_windows(document: dict) -> bool:
    """Whether a head may have windows of its model, which stay. document: see `read_document`"""
    layout = LAYOUTS.get(str(document.get("layout")))
    return layout is not None and layout.kinds_field is not None


def advise_window(folder: Path) -> str:
    """A sentence on texts longer than those of training; empty where a layer sees no more, or it is unknown."""
    length, document = find_trained_length(folder), read_document(folder)
    window = None if document.get("full_layers") else document.get("window")
    has_attention = getattr(read_head_class(folder), "context_kind", "path") != "none"
    takes_window = has_attention and not keeps_windows(document)
    if length is None or not takes_window or (window is not None and window <= length):
        return ""
    return (
        f"Trained on texts of at most {length:,} tokens. For longer ones try decode.window={length}: specdec choose "
        "measures whether it pays."
    )


def resolve(location: str | Path) -> Path:
    """A checkpoint's folder. A run's folder stands for its best step, and so does its file `best`.

    If there is no such folder, user/name and user/name@revision are checkpoints on the Hugging Face Hub, which are
    downloaded.
    Raises ValueError, with what to do, if the Hub has none, and for any other file.
    """
    name = files.expand_home(str(location))
    if hub.is_hub_head(name):
        return hub.fetch_checkpoint(name)
    folder = Path(name)
    if not (folder / "drafter.json").exists() and (folder / BEST_FILE).is_file():
        folder = folder / BEST_FILE
    if not folder.is_file():
        refuse_folder_of_checkpoints(folder)
        return folder
    if folder.name != BEST_FILE:
        inside = (folder.parent / "drafter.json").exists() or published.is_published(folder.parent)
        advice = f"Give its folder, {folder.parent}" if inside else CHECKPOINT_ADVICE
        raise ValueError(f"{folder} is a file, and no checkpoint. {advice}.")
    with folder.open(errors="replace") as best:
        return untrusted.find_inside(folder.parent, best.read(MAX_BEST_CHARACTERS).strip())


def refuse_folder_of_checkpoints(folder: Path) -> None:
    """Raises ValueError for a folder that is no checkpoint, but has some inside."""
    if (folder / "drafter.json").exists() or published.is_published(folder):
        return
    inside = sorted(path.parent for name in ("drafter.json", BEST_FILE) for path in folder.glob(f"*/{name}"))
    if inside:
        raise ValueError(f"{folder} is no checkpoint, but a folder with some: give one, such as {inside[0]}.")


def name_checkpoint(folder: Path) -> str:
    """The name of a checkpoint: run for a run's folder, run/step for a step's, user/name@revision on the Hub.

    A published head has its folder's name.
    """
    if (folder / BEST_FILE).is_file():
        return folder.name
    name = hub.pin_commit(folder)
    if hub.is_hub_name(name):
        return name
    return folder.name if published.is_published(folder) else f"{folder.parent.name}/{folder.name}"


def load_head_class(path: str) -> type[Head]:
    """The class that `_target_` names.

    Heads of specdec.heads and of experiments are accepted, others with trust_code=true.
    Raises ValueError for any other path.
    """
    if path in REMOVED_CLASSES:
        raise ValueError(f"{path} was removed: an earlier version of specdec loads this head.")
    module, _, name = path.rpartition(".")
    trusted = module.startswith(HEAD_MODULES) or extensions.trusts_code()
    if trusted and all(word.isidentifier() for word in path.split(".")):
        with contextlib.suppress(ImportError):
            head_type = vars(importlib.import_module(module)).get(name)
            if isinstance(head_type, type) and issubclass(head_type, Head) and head_type.__module__ == module:
                return head_type
    raise ValueError(
        f"_target_ {path!r} is not a drafter of {HEAD_MODULES[0]}*; this folder was not made by specdec, or is unsafe. "
        f"A class of your own needs {extensions.TRUST_CODE}=true."
    )


def _list_arguments(spec: dict) -> dict:
    """The arguments of the drafter's constructor."""
    return {key: value for key, value in spec.items() if key not in ("_target_", *RECORDED_FACTS)}


def build(spec: dict, tensors: dict[str, Tensor], target: Target, *, dtype: torch.dtype | None = None) -> Head:
    """A drafter with these tensors, on the target's device. spec: see `save`; dtype: None for the target's

    Raises RuntimeError or TypeError if spec and tensors do not fit together.
    """
    head_type, arguments = load_head_class(str(spec.get("_target_"))), _list_arguments(spec)
    other_model = arguments.get("model") or arguments.get("source")
    if other_model is not None:
        raise ValueError(f"drafter.json names another model, {other_model}: checkpoints hold all of their weights.")
    if issubclass(head_type, NativeMTP):
        arguments["source"] = None
    num_numbers = sum(value.numel() for value in tensors.values()) + target.vocab_size * target.width
    with untrusted.Allowance(4 * num_numbers + EXTRA_NUMBERS):
        drafter = head_type(target, vocab=tensors.get("draft_to_target"), **arguments)
    drafter.to(dtype=dtype or target.dtype).load_state_dict(tensors)
    return drafter.to(target.device)


def load_for_training(
    folder: str | Path,
    target: Target,
    head_options: dict,
    vocab: Callable[[Tensor | None], Tensor | None] | None = None,
) -> tuple[Head, dict]:
    """The drafter to be trained further, in float32, and the spec that `save` takes. Raises ValueError as `load`.

    head_options: settings of a head, as in the configuration. The class's `changeable_arguments` ones replace the
    checkpoint's.
    vocab: the checkpoint's draft vocabulary [W] -> another one; None: it is kept
    """
    drafter, document = _read_drafter(resolve(folder), target, torch.float32)
    if vocab is not None:
        drafter = replace_vocab(drafter, document, vocab(drafter.draft_to_target))
    drafter = _replace_window(replace_parts(drafter, document, head_options), document, head_options.get("window"))
    drafter.pretrained = True
    for name in set(drafter.changeable_arguments) & set(head_options):
        setattr(drafter, name, head_options[name])
        document[name] = head_options[name]
    return drafter.train(), {
        key: value for key, value in document.items() if key == "published" or key not in RECORDED_FACTS
    }


def _replace_window(drafter: Head, spec: dict, window: int | None) -> Head:
    """The same head with another window; None: its own. spec: drafter.json, which gets the window, too"""
    if window in (None, drafter.window):
        return drafter
    if spec.get("full_layers"):
        raise ValueError(f"window={window}: layers of this checkpoint have unlike windows, which stay: give null.")
    changed = drafter.with_window(window)
    spec["window"] = window
    if isinstance(changed, BlockDrafter):
        spec["window_causal"] = changed.window_causal
    return changed


def replace_parts(drafter: Head, spec: dict, head_options: dict) -> Head:
    """The same head with the configuration's parts where the checkpoint lacks them, or has them of another kind.

    A part starts as the identity where its method has such a start. With another dependence, the alignment and the
    confidence head are the configuration's, too.
    spec: drafter.json (see `build`), which gets the parts, too
    """
    changed = _list_changed_parts(drafter, spec, head_options)
    if not changed:
        return drafter
    if "dependence" in changed:
        changed |= {name: head_options[name] for name in ("confidence", "anchor_predicts") if name in head_options}
        _warn_of_alignment(changed, spec)
    spec.update(changed, published=None)
    new = type(drafter)(drafter.target, vocab=drafter.draft_to_target, **_list_arguments(spec))
    new = new.to(next(drafter.parameters()))
    tensors, replaced = new.state_dict(), tuple(f"{name}." for name in changed)
    kept = {name: value for name, value in drafter.state_dict().items() if not name.startswith(replaced)}
    tensors |= {name: value for name, value in kept.items() if name in tensors and tensors[name].shape == value.shape}
    new.load_state_dict(tensors)
    return new


def _list_changed_parts(drafter: Head, spec: dict, head_options: dict) -> dict:
    """The parts of the configuration that are of another kind than the checkpoint's."""
    options = {name: head_options[name] for name in drafter.exchangeable_parts if head_options.get(name) is not None}
    return {name: part for name, part in options.items() if _name_kind(part) != _name_kind(spec.get(name))}


def _warn_of_alignment(changed: dict, spec: dict) -> None:
    """Warns if the configuration's drafts stand at other positions than the checkpoint's."""
    if changed.get("anchor_predicts", False) != bool(spec.get("anchor_predicts")):
        warnings.warn(
            "Drafts of the checkpoint stand one place beside those that the head's settings ask for (anchor_predicts), "
            "so it is no good start before some training.",
            stacklevel=3,
        )


def _name_kind(options: Any) -> Any:
    """The kind and the form of a part's settings; settings without kinds as they are."""
    return (options.get("kind"), options.get("form", "plain")) if isinstance(options, Mapping) else options


def replace_vocab(drafter: Head, spec: dict, vocab: Tensor | None) -> Head:
    """The same head with another draft vocabulary: increasing ids [W], or None for all of the target's tokens.

    Tensors with a row for each token (`Head.token_row_prefixes`) keep the rows of tokens that stay. Rows of further
    tokens are a new head's.
    spec: drafter.json, see `build`
    Raises ValueError for a head that changes its target.
    """
    if drafter.adapts_target:
        raise ValueError("A head that changes its target keeps its draft vocabulary.")
    changed = type(drafter)(drafter.target, vocab=vocab, **_list_arguments(spec)).to(next(drafter.parameters()))
    all_tokens = torch.arange(drafter.target.vocab_size)
    old_vocab = all_tokens if drafter.draft_to_target is None else drafter.draft_to_target.cpu()
    new_vocab = all_tokens if vocab is None else vocab.cpu()
    kept_mask = torch.isin(new_vocab, old_vocab)
    old_rows = torch.searchsorted(old_vocab, new_vocab[kept_mask])
    tensors = changed.state_dict()
    for name, value in drafter.state_dict().items():
        if name.startswith(drafter.token_row_prefixes):
            tensors[name][kept_mask] = value[old_rows]
        elif name != "draft_to_target":
            tensors[name] = value
    changed.load_state_dict(tensors)
    return changed


def load(folder: str | Path, target: Target, *, exact: bool = False) -> Head:
    """The drafter in the target's dtype and on its device. CHANGES THE TARGET if the drafter adapts it.

    The adapter of such a drafter is merged into the target's weights, so all later outputs of `target` are those of the
    adapted target.
    folder: a folder or a name, see `resolve`; exact: whether the dtype must round none of the file's values
    Raises ValueError if the target is not the one that the drafter was trained for, or is adapted already.
    """
    drafter, _ = _read_drafter(resolve(folder), target, None, exact=exact)
    if drafter.adapts_target:
        merge_adapter(target)
    if decodes_joined(target.device):
        join_products(drafter)
    return drafter.eval()


def load_proposer(target: Target, *, checkpoint: Text, decode: dict) -> Proposer:
    """The proposer of a checkpoint's drafter. decode: arguments of Drafting. Raises ValueError as `load`."""
    return Drafting(**decode).proposer(load(checkpoint, target))


def _read_drafter(folder: Path, target: Target, dtype: torch.dtype | None, *, exact: bool = False) -> tuple[Head, dict]:
    """The drafter, and drafter.json or the spec of a published head. dtype: None: the target's"""
    is_published = published.is_published(folder)
    if is_published:
        document, tensors = published.read_published(folder, target)
    else:
        document = read_document(folder)
        tensors = read_tensors(untrusted.find_inside(folder, "drafter.safetensors"))
        if "recycle_norm" in document:  # of native modules before they named their engine
            raw_state = not document.pop("recycle_norm")
            document["engine"] = find_engine(target.config.model_type, raw_state=raw_state)
        _check_target(folder, document, target)
    check_unadapted(target)
    if exact:
        dtype = functools.reduce(torch.promote_types, (v.dtype for v in tensors.values() if v.is_floating_point()))
    try:
        drafter = build(document, tensors, target, dtype=dtype)
        drafter.published = document.get("published")
        if is_published:
            published.check_output(drafter)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except Exception as error:  # with sizes from a file, a constructor may fail in any way
        names = "config.json and its weights" if is_published else "drafter.json and drafter.safetensors"
        raise ValueError(f"{folder}: {names} do not fit together: {' '.join(str(error).split())}") from error
    if not is_published:
        _check_files(folder, document, drafter)
    return drafter, document


def _check_files(folder: Path, document: dict, drafter: Head) -> None:
    """Raises ValueError for other hidden states than the head was trained on, and for files unlike SHA256SUMS."""
    layers, trained = list(drafter.target_layers), document.get("reads_layers")
    if layers != trained:
        raise ValueError(f"{folder}: trained on target layers {trained}, not {layers}.")
    files.check_files(folder / "drafter.json", folder / "drafter.safetensors")  # last: other refusals say more


def _check_target(folder: Path, document: dict, target: Target) -> None:
    """Raises ValueError for another target than the head was trained for.

    Warns if only the quantised weights differ, if no more than the embedding and the final norm can be compared, or if
    an earlier version recorded the target. Then the loaded target still verifies all drafts, so its answers stay its
    own. Only acceptance changes a little.
    """
    trained, name = str(document.get("target_fingerprint")), document.get("target")
    fingerprint = target.fingerprint()
    if target.matches(trained):
        return
    unread, outdated = UNREAD in trained + fingerprint, is_outdated(trained)
    may_differ = outdated or target.quantisation is not None or "-" in trained + fingerprint
    is_unknown = outdated and document.get("target_embeddings") is None
    has_embeddings = is_unknown or document.get("target_embeddings") == target.embeddings_fingerprint()
    if not (may_differ and has_embeddings):
        raise ValueError(
            f"{folder} was trained for {name} (fingerprint {trained}), not for {target.name} ({fingerprint}). Use it "
            "with its own target."
        )
    if outdated:
        difference = describe_outdated(f"names its target {name}", target.name)
    elif unread:
        difference = (
            f"only the embedding and the final norm of {target.name} were compared with those of {name}, for which it "
            "was trained, because layers were not read on one side"
        )
    else:
        difference = describe_difference(f"was trained against {{}} weights of {name}", trained, fingerprint)
    warnings.warn(f"{folder}: {difference}. Answers stay the target's own; acceptance may be lower.", stacklevel=2)


def read_head_class(folder: str | Path) -> type[Head]:
    """The class of a checkpoint's head."""
    return load_head_class(str(read_document(resolve(folder)).get("_target_")))
