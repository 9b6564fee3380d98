"""The target's own folder with a native MTP module written back into it. All else stays byte for byte the same."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec.core import hub
from specdec.core.dequantise import find_form, write_like
from specdec.core.files import CHECKSUMS
from specdec.core.shards import INDEX, SINGLE, Shards, fetch_file, read_header
from specdec.core.untrusted import read_json
from specdec.export.family import Clause, EngineRules, ExportFamily, note_full_attention
from specdec.export.layout import Layout, Tensors
from specdec.heads.native import NativeMTP, list_checkpoint_places
from specdec.heads.native_modules.files import MODELOPT_FILE, write_count
from specdec.heads.native_modules.layouts import ENGINES, LAYOUTS, RUN_FAMILIES, find_layout
from specdec.heads.native_modules.plain_layers import OLD_MODELOPT_FIELD, declare_plain
from specdec.target.model import Target


def make_stitched_layout(drafter: NativeMTP) -> Layout:
    """The target's folder with the module inside. Raises ValueError for a module that engines would run otherwise."""
    if drafter.draft_to_target is not None:
        raise ValueError("Engines draft from all tokens with a native MTP module: train it with head.vocab_size=null.")
    layout = LAYOUTS[str(drafter.layout)]
    all_modules = getattr(drafter.target.config, "num_nextn_predict_layers", None) or drafter.depth
    differs = {
        "zero_first": drafter.zero_first != layout.zero_first,
        "num_modules": drafter.depth not in ((all_modules,) if layout.distinct else (None, 1)),
    }
    settings = [name for name, is_other in differs.items() if is_other]
    if settings:
        raise ValueError(
            f"Engines run such a module with other {', '.join(settings)} than this one has: train it with "
            f"{settings[0]}=null."
        )
    return Layout({}, {}, fill_folder=lambda folder: write_stitched(drafter, drafter.target, folder))


def write_stitched(drafter: NativeMTP, target: Target, folder: Path) -> int:
    """Fills the folder with the target's files and the module -> bytes of the module.

    A target with such modules keeps the names, the forms and the shards of their tensors. Another one gets a further
    shard, an index, and the number of modules in its configuration. They are plain there, and listed so.
    Raises ValueError before it writes anything.
    """
    shards = Shards(target.name)
    module_layout = find_layout(shards, target.num_layers, target.config.model_type)
    source = Path(target.name) if Path(target.name).is_dir() else shards.path("config.json").parent
    if module_layout is None:
        tensors = _name_tensors(drafter, None, LAYOUTS[str(drafter.layout)].prefix)
        documents = _make_documents(drafter, shards, tensors)
        copy_model(shards, source, folder, changed=set())
        for file, document in documents.items():
            (folder / file).write_text(json.dumps(document, indent=2) + "\n")
        written = {name: _cast_tensor(value, target.dtype) for name, value in tensors.items()}
        add_shard(shards.files, folder, written)
    else:
        tensors = _store_tensors(shards, _name_tensors(drafter, shards, module_layout[1]))
        changed = {shards.files[name] for name in tensors}
        copy_model(shards, source, folder, changed=changed)
        for file in changed:
            names = [name for name in tensors if shards.files[name] == file]
            overwrite_tensors(folder / file, {name: tensors[name] for name in names})
    return sum(value.nbytes for value in tensors.values())


def _name_tensors(drafter: NativeMTP, shards: Shards | None, prefix: str) -> Tensors:
    """The module's tensors under the plain names that they have in the target's files."""
    state = drafter.state_dict()
    tensors: Tensors = {}
    for key, places in list_checkpoint_places(drafter, shards, prefix).items():
        tensors |= {name: state[key][place] for name, place in places}
    return tensors


def copy_model(shards: Shards, source: Path, folder: Path, *, changed: set[str]) -> None:
    """Puts the target's files into the folder.

    Unchanged weights may be links; other files are copies, as users edit them. What is not here is fetched.
    """
    if not hub.is_folder(shards.name):
        hub.fetch_small_files(shards.name, source)
    weights = set(shards.files.values())
    for file in weights:
        shards.path(file)
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if path.is_file() and not name.startswith(".") and name != CHECKSUMS:
            _place_file(path, folder / name, link=name in weights - changed)


def _store_tensors(shards: Shards, tensors: Tensors) -> Tensors:
    """The module's tensors as the target stores them: by stored name, in the same dtypes, quantised as they are there.

    A quantised weight that training left alone is not written again.
    tensors: the module's tensors by plain name
    Raises ValueError for a tensor of the target that is missing, of another shape, or of an unknown form.
    """
    stored: Tensors = {}
    for name, value in tensors.items():
        form = find_form(shards, name)
        original = None if form is None else form.compute()
        if form is None or original is None or original.shape != value.shape:
            difference = "is missing" if original is None else f"has the shape {list(original.shape)}"
            raise ValueError(
                f"{shards.name}: {name} {difference}, so the tuned module cannot take its place. Stitch it into a copy "
                "of the target without MTP modules."
            )
        if form.method == "plain" or not torch.equal(original.to(value), value):
            stored |= write_like(form, value.cpu())
    return stored


def _cast_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it is written. Biases that choose experts are exact, and stay so."""
    exact = value.dtype == torch.float32 and value.dim() == 1
    return value.detach().cpu().to(torch.float32 if exact else dtype).contiguous()


def _place_file(path: Path, out: Path, *, link: bool) -> None:
    """Puts a file at another place, as a hard link if `link` is set and the disk allows it, else as a copy."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if link:
            return os.link(path.resolve(), out)
    except OSError:  # another disk
        pass
    shutil.copyfile(path, out)


def overwrite_tensors(path: Path, tensors: Tensors) -> None:
    """Replaces the values of these tensors in a safetensors file. They have the file's dtypes and shapes."""
    with path.open("r+b") as file:
        header, start = read_header(file)
        for name, value in tensors.items():
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            begin, end = header[name]["data_offsets"]
            assert len(content) == end - begin
            file.seek(start + begin)
            file.write(content)


def count_tensor_bytes(path: Path) -> int:
    """Bytes of the tensors of a safetensors file, by its header."""
    with path.open("rb") as file:
        header, _ = read_header(file)
    return sum(end - begin for begin, end in (entry["data_offsets"] for entry in header.values()))


def add_shard(files: dict[str, str], folder: Path, tensors: Tensors) -> None:
    """Writes the module as a further shard, with an index over all shards. files: file of each other tensor"""
    extra = "model-mtp.safetensors"
    while extra in set(files.values()):  # it holds other tensors, too
        extra = f"further-{extra}"
    if (folder / SINGLE).exists():  # with an index beside it, some readers would see this file alone
        renamed = "model-00001-of-00002.safetensors"
        (folder / SINGLE).rename(folder / renamed)
        files, extra = dict.fromkeys(files, renamed), "model-00002-of-00002.safetensors"
    (folder / extra).unlink(missing_ok=True)  # it may be a link to the target's own
    safetensors.torch.save_file(tensors, folder / extra, {"format": "pt"})
    size = sum(count_tensor_bytes(folder / file) for file in {*files.values(), extra})
    document = {"metadata": {"total_size": size}, "weight_map": files | dict.fromkeys(tensors, extra)}
    (folder / INDEX).unlink(missing_ok=True)
    (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n")


def _make_documents(drafter: NativeMTP, shards: Shards, tensors: Tensors) -> dict[str, dict]:
    """The configuration files of a target that has modules now. ModelOpt has a file of its own beside config.json.

    Raises ValueError for an unknown method of quantisation.
    """
    config, layout = read_json(shards.path("config.json")), LAYOUTS[str(drafter.layout)]
    write_count(config, len(drafter.modules_by_depth))
    if layout.kinds_field is not None:
        kinds = layout.list_kinds(drafter.target.config)
        repeats = 1 if layout.chain else len(drafter.modules_by_depth)
        config.get("text_config", config)[layout.kinds_field] = kinds * repeats
    return declare_layers(shards, config, [name for name, value in tensors.items() if value.dim() > 1])


def declare_layers(shards: Shards, config: dict, weights: list[str]) -> dict[str, dict]:
    """The configuration by file, with the layers of these weights in the lists of those in full precision.

    config: config.json, which is changed, too. Raises ValueError for an unknown method of quantisation.
    """
    documents, layers = {"config.json": config}, [name.removesuffix(".weight") for name in weights]
    settings = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if settings:
        declare_plain(settings, layers, shards.name)
    path = fetch_file(shards.name, MODELOPT_FILE, revision=shards.revision)
    if path is not None:
        documents[MODELOPT_FILE] = read_json(path)
        settings = documents[MODELOPT_FILE].setdefault("quantization", {"quant_method": "modelopt"})
        settings.setdefault(OLD_MODELOPT_FIELD, [])
        declare_plain(settings, layers, shards.name)
    return documents


LABELS = {"vllm": "vLLM", "sglang": "SGLang"}  # engines of launch lines, by `head.drafter.engine`


def name_other_engine(drafter: NativeMTP) -> str | None:
    """The engine whose next step reads another state of the module than the one that it was trained for; None: none."""
    others = (name for name in ENGINES if drafter.reads_raw_states(name) != drafter.reads_raw_states(drafter.engine))
    return LABELS.get(next(others, ""))


def has_not_run(drafter: NativeMTP) -> bool:
    """Whether no engine has loaded a module of the family."""
    return drafter.target.config.model_type not in RUN_FAMILIES


def repeats_module(drafter: NativeMTP) -> bool:
    """Whether engines run one module at every draft."""
    return not LAYOUTS[str(drafter.layout)].distinct


STITCHED_RULES = EngineRules(
    notes=[
        Clause("vLLM and SGLang use module 0 for every draft.", repeats_module),
        Clause("Trained as {value} runs it (head.drafter.engine).", lambda drafter: LABELS[drafter.engine]),
        Clause(
            "{value} gives back another state of the module from the second draft on, so it has no line: its drafts "
            "would be worse.",
            name_other_engine,
        ),
        replace(
            note_full_attention("the engine"),
            find=lambda drafter: None if drafter.layout_window else drafter.window,
        ),
        Clause("No engine has run a module of a {drafter.target.config.model_type} model.", has_not_run),
    ],
    unfit_engines=[Clause("{value}", name_other_engine)],
)
NATIVE = ExportFamily(
    kind="native",
    head_class=NativeMTP,
    labels={"native": "a model's own MTP (`native_mtp`), by `format=stitched`"},
    inputs="last_state",
    draft_vocabulary=False,
    writers={"stitched": make_stitched_layout},
    engines={"stitched": STITCHED_RULES},
)
FAMILIES = (NATIVE,)
