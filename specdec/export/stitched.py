"""The target's own folder with a native MTP module written back into it. All else stays byte for byte the same."""

import json
import os
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec.core.files import CHECKSUMS
from specdec.core.shards import INDEX, SINGLE, Shards
from specdec.core.untrusted import read_json
from specdec.export.family import ExportFamily
from specdec.export.layout import Layout, Tensors
from specdec.heads.native import LAYOUTS, UNNORMED_FAMILIES, NativeMTP, find_layout, list_checkpoint_places
from specdec.target.model import Target

UNQUANTISED_FIELDS = {  # by quantisation method: the field that names layers in full precision
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
}


def make_stitched_layout(drafter: NativeMTP) -> Layout:
    """The target's folder with the module inside. Raises ValueError for a module that engines would run otherwise."""
    if drafter.draft_to_target is not None:
        raise ValueError("Engines draft from all tokens with a native MTP module: train it with head.vocab_size=null.")
    differs = {
        "zero_first": drafter.zero_first != LAYOUTS[str(drafter.layout)].zero_first,
        "recycle_norm": drafter.recycle_norm != (drafter.target.config.model_type not in UNNORMED_FAMILIES),
        "num_modules": drafter.depth not in (None, 1),
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

    A target with such modules keeps the names, the dtypes and the shards of their tensors. Another one gets a further
    shard, an index, and the number of modules in its configuration.
    Raises ValueError before it writes anything.
    """
    shards = Shards(target.name)
    module_layout = find_layout(shards, target.num_layers)
    source = Path(target.name) if Path(target.name).is_dir() else shards.path("config.json").parent
    if module_layout is None:
        tensors = _name_tensors(drafter, None, LAYOUTS[str(drafter.layout)].prefix)
        config = _add_module_count(read_json(source / "config.json"), drafter, tensors)
        _copy_target(shards, source, folder, changed=set())
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _add_shard(shards, folder, {name: _cast_tensor(value, target.dtype) for name, value in tensors.items()})
    else:
        tensors = _name_tensors(drafter, shards.files, module_layout[1])
        _check_replaceable(shards, tensors)
        changed = {shards.files[name] for name in tensors}
        _copy_target(shards, source, folder, changed=changed)
        for file in changed:
            names = [name for name in tensors if shards.files[name] == file]
            _overwrite_tensors(folder / file, {name: tensors[name].to(shards[name].dtype) for name in names})
    return sum(value.nbytes for value in tensors.values())


def _name_tensors(drafter: NativeMTP, files: dict[str, str] | None, prefix: str) -> Tensors:
    """The module's tensors under the names that they have in the target's files."""
    state = drafter.state_dict()
    tensors: Tensors = {}
    for key, places in list_checkpoint_places(drafter, files, prefix).items():
        tensors |= {name: state[key][place] for name, place in places}
    return tensors


def _copy_target(shards: Shards, source: Path, folder: Path, *, changed: set[str]) -> None:
    """Puts the target's files into the folder.

    Unchanged weights may be links; other files are copies, as users edit them.
    """
    weights = set(shards.files.values())
    for file in weights:
        shards.path(file)  # fetched, if it is not here
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if path.is_file() and not name.startswith(".") and name != CHECKSUMS:
            _place_file(path, folder / name, link=name in weights - changed)


def _check_replaceable(shards: Shards, tensors: Tensors) -> None:
    """Raises ValueError for a tensor of the target that is missing, quantised, or of another shape."""
    for name, value in tensors.items():
        if name not in shards.files:
            difference = "is missing"
        else:
            original = shards[name]
            if original.shape == value.shape and original.is_floating_point() and original.element_size() >= 2:
                continue
            difference = f"is {str(original.dtype).removeprefix('torch.')} {list(original.shape)}"
        raise ValueError(
            f"{shards.name}: {name} {difference}, so the tuned module cannot take its place. Stitch it into a copy of "
            "the target without MTP modules, or with unquantised ones."
        )


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


def _overwrite_tensors(path: Path, tensors: Tensors) -> None:
    """Replaces the values of these tensors in a safetensors file. They have the file's dtypes and shapes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, value in tensors.items():
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            begin, end = header[name]["data_offsets"]
            assert len(content) == end - begin
            file.seek(8 + size + begin)
            file.write(content)


def _add_shard(shards: Shards, folder: Path, tensors: Tensors) -> None:
    """Writes the module as a further shard, with an index over all shards."""
    files, extra = dict(shards.files), "model-mtp.safetensors"
    if (folder / SINGLE).exists():  # with an index beside it, some readers would see this file alone
        renamed = "model-00001-of-00002.safetensors"
        (folder / SINGLE).rename(folder / renamed)
        files, extra = dict.fromkeys(files, renamed), "model-00002-of-00002.safetensors"
    (folder / extra).unlink(missing_ok=True)  # it may be a link to the target's own
    safetensors.torch.save_file(tensors, folder / extra, {"format": "pt"})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    document = {"metadata": {"total_size": size}, "weight_map": files | dict.fromkeys(tensors, extra)}
    (folder / INDEX).unlink(missing_ok=True)
    (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n")


def _add_module_count(config: dict, drafter: NativeMTP, tensors: Tensors) -> dict:
    """The configuration of a target that has modules now. Raises ValueError for an unknown method of quantisation."""
    text_config = config.get("text_config", config)
    qwen = "qwen3_5" in drafter.target.config.model_type
    text_config["mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"] = len(drafter.modules_by_depth)
    quantised = config.get("quantization_config")
    if quantised is None:
        return config
    method = quantised.get("quant_method")
    field = UNQUANTISED_FIELDS.get(method or "")
    if field is None:
        raise ValueError(
            f"{drafter.target.name} is quantised ({method}), and where such a model names layers that are not is "
            f"unknown: take one of {', '.join(UNQUANTISED_FIELDS)}."
        )
    layers = [name.removesuffix(".weight") for name, value in tensors.items() if value.dim() > 1]
    unquantised = quantised.get(field)
    if unquantised is None:  # transformers leaves out the LM head only where there is no list
        unquantised = [] if field == "ignore" else ["lm_head"]
    quantised[field] = [*unquantised, *layers]
    return config


NATIVE = ExportFamily(
    kind="native",
    head_class=NativeMTP,
    labels={"native": "a model's own MTP (`native_mtp`), by `format=stitched`"},
    inputs="last_state",
    draft_vocabulary=False,
    writers={"stitched": make_stitched_layout},
)
FAMILIES = (NATIVE,)
