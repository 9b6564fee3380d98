"""A model's folder with its MTP modules repaired, or replaced by those of the model that it comes from.

It works on files alone, and all else stays byte for byte the same.
"""

import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec.core.dequantise import ACTIVATION_SCALES, find_form
from specdec.core.untrusted import read_tensors
from specdec.export.stitched import add_shard, copy_model, declare_layers, overwrite_tensors
from specdec.heads.native_modules.comparison import compare_copies, find_shifts, is_join_swapped, swap_halves
from specdec.heads.native_modules.diagnosis import NEED_BASE, NONE, Diagnosis, diagnose_module, open_model
from specdec.heads.native_modules.files import ModelFiles, StoredModule, name_plain, write_count


@dataclass
class Repair:
    """Modules as they are to be, and the model's tensors in whose place they come.

    config: the new config.json; tensors: all of the modules by name; changes: a sentence for each change
    declares: whether the layers come into the list of those in full precision, if the model is quantised
    """

    model: ModelFiles
    old_names: set[str]
    config: dict
    declares: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


def repair_model(diagnosis: Diagnosis, folder: Path, *, base: str | None, revision: str | None = None) -> list[str]:
    """Fills a new folder with the model and sound modules. Returns a sentence for each change; empty: nothing to do.

    diagnosis: the model's, made with the same base; base: model whose modules replace the model's where no repair helps
    Raises ValueError, with what to do, where the base's modules are needed and do not fit.
    """
    model = open_model(diagnosis.name, revision)
    base_model = None if base is None else open_model(base)
    states = {finding.state for finding in diagnosis.findings} | ({NONE} & {diagnosis.state})
    if states & {*NEED_BASE, NONE} or (base_model is not None and not is_readable(model)):
        if base_model is None:
            raise ValueError(
                f"{diagnosis.name}: {find_evidence(diagnosis)} Give source=BASE: the model that it comes from, a "
                "folder or a Hub name."
            )
        repair = graft_modules(model, base_model)
    else:
        repair = repair_modules(model, base_model, states)
    if repair.changes:
        write_model(repair, folder)
        check_repaired(diagnosis.name, folder, base)
    return repair.changes


def find_evidence(diagnosis: Diagnosis) -> str:
    """The sentence of the worst finding."""
    if diagnosis.findings:
        return diagnosis.findings[0].sentence
    return "It has no module, and counts none (the head `mtp` can be trained for it)."


def is_readable(model: ModelFiles) -> bool:
    """Whether all weights of the modules are plain, or in a form that is dequantised here."""
    names = {name_plain(name) for name in model.module_names if not ACTIVATION_SCALES.fullmatch(name)}
    try:
        return all(find_form(model.shards, name) is not None for name in names)
    except ValueError:
        return False


def check_repaired(name: str, folder: Path, base: str | None) -> None:
    """Raises ValueError, and removes the folder, if the repaired modules do not fit the model."""
    findings = [item for item in diagnose_module(str(folder)).findings if item.state in NEED_BASE]
    if findings:
        shutil.rmtree(folder)
        raise ValueError(
            f"source={base}: its module does not fit {name}. {findings[0].sentence} Give the model that it comes from."
        )


# A base's modules


def graft_modules(model: ModelFiles, base: ModelFiles) -> Repair:
    """The base's modules, whole, under the names that they have in the model. Copies become those of the model."""
    check_family(model, base)
    old_names = model.module_names | set(model.find_unknown())
    repair = Repair(model, old_names, copy.deepcopy(model.config), declares=True)
    for module in base.modules:
        prefix = model.prefix if module.prefix == base.prefix else module.prefix
        layer = None if module.layer is None else model.num_layers + module.number
        for name, new_name in module.rename(prefix, layer).items():
            original = model.find_original(new_name) if name in module.copies else None
            repair.tensors[new_name] = base.shards[name] if original is None else model.shards[original]
    field_name = base.modules[0].kind.kinds_field
    if field_name is not None and field_name in base.text_config:
        fields = repair.config.get("text_config") or repair.config
        fields[field_name] = base.text_config[field_name]
    write_count(repair.config, len(base.modules))
    copies = "; copies are the model's own" if any(module.copies for module in base.modules) else ""
    repair.changes.append(f"{len(repair.tensors)} tensors of {base.shards.name} are the module now{copies}.")
    return repair


def check_family(model: ModelFiles, base: ModelFiles) -> None:
    """Raises ValueError for a base whose modules cannot be those of the model."""
    names = f"source={base.shards.name}", model.shards.name
    advice = "give the model that it comes from"
    if base.model_type != model.model_type:
        raise ValueError(f"{names[0]} is a {base.model_type} model and {names[1]} a {model.model_type} one: {advice}.")
    widths = [files.text_config.get("hidden_size") for files in (base, model)]
    if widths[0] != widths[1]:
        raise ValueError(f"{names[0]} has states of width {widths[0]} and {names[1]} of {widths[1]}: {advice}.")
    diagnosis = diagnose_module(base.shards.name, revision=base.shards.revision)
    if diagnosis.state in (*NEED_BASE, NONE, "quantised"):
        raise ValueError(f"{names[0]} has no module to give ({diagnosis.state}): {find_evidence(diagnosis)}")


# The model's own modules, repaired


def repair_modules(model: ModelFiles, base: ModelFiles | None, states: set[str]) -> Repair:
    """The model's own modules with other names, keys or values. states: all states that the diagnosis found"""
    declares = "plain undeclared" in states
    repair = Repair(model, model.module_names, copy.deepcopy(model.config), declares)
    for module in model.modules:
        values = {name: model.shards[name] for name in module.names}
        repair.changes += change_values(model, module, base, values)
        layer = None if module.layer is None else model.num_layers + module.number
        names = module.rename(module.prefix, layer)
        if layer != module.layer:
            repair.changes.append(f"Its tensors are renamed from layer {module.layer} to {layer}.")
        repair.tensors |= {names[name]: value for name, value in values.items()}
    if "undeclared" in states:
        write_count(repair.config, len(model.modules))
        repair.changes.append(f"config.json counts {len(model.modules)} now.")
    if declares:
        repair.changes.append("All of its layers are in the list of plain ones.")
    return repair


def change_values(
    model: ModelFiles, module: StoredModule, base: ModelFiles | None, values: dict[str, Tensor]
) -> list[str]:
    """Changes values of a module: join, norms, copies. Returns a sentence for each change."""
    changes, join = [], module.outer["join"]
    if base is not None and is_join_swapped(model, module, base):
        values[join] = swap_halves(values[join])
        changes.append(f"The halves of {join} are swapped back.")
    shifts = find_shifts(model, module, base)
    for name, shift in shifts.items():
        values[name] = (values[name].float() - shift).to(values[name].dtype)
    if shifts:
        changes.append(f"{len(shifts)} norms are shifted back by 1.")
    for name, original, _ in compare_copies(model, module):
        values[name] = model.shards[original]
        changes.append(f"{name} is {original} now.")
    return changes


# Files


def write_model(repair: Repair, folder: Path) -> None:
    """Fills the folder with the model's files, the modules, and the configuration that names their layers.

    Tensors of the same names, dtypes and shapes are overwritten in their shards; others get a further shard.
    """
    shards, in_place, names = repair.model.shards, fits_in_place(repair), repair.old_names
    if in_place:
        names = {name for name in names if not torch.equal(repair.tensors[name], shards[name])}
    changed_files = {shards.files[name] for name in names}
    configs = make_configs(repair)  # raises ValueError before anything is written
    copy_model(shards, shards.path("config.json").parent, folder, changed=changed_files)
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n")
    if not in_place:
        replace_tensors(repair, folder)
    for file in changed_files if in_place else ():
        tensors = {name: repair.tensors[name] for name in names if shards.files[name] == file}
        overwrite_tensors(folder / file, tensors)


def fits_in_place(repair: Repair) -> bool:
    """Whether the modules have the names, dtypes and shapes of the old ones."""
    shards = repair.model.shards
    return repair.old_names == repair.tensors.keys() and all(
        (shards[name].shape, shards[name].dtype) == (value.shape, value.dtype) for name, value in repair.tensors.items()
    )


def make_configs(repair: Repair) -> dict[str, dict]:
    """The configuration by file. Raises ValueError for an unknown method of quantisation."""
    if not repair.declares:
        return {"config.json": repair.config}
    weights = [name for name, value in repair.tensors.items() if is_plain_linear(name, value)]
    return declare_layers(repair.model.shards, repair.config, weights)


def is_plain_linear(name: str, value: Tensor) -> bool:
    """Whether a tensor is the plain weight of a linear, or of experts."""
    return value.dim() > 1 and value.is_floating_point() and value.element_size() > 1 and name_plain(name) == name


def replace_tensors(repair: Repair, folder: Path) -> None:
    """Takes the old tensors out of the files of the folder, and adds a shard with the modules.

    A file without other tensors is deleted.
    """
    files, names = repair.model.shards.files, repair.old_names
    for path in {folder / files[name] for name in names}:
        rest = {name: value.clone() for name, value in read_tensors(path).items() if name not in names}
        path.unlink()
        if rest:
            safetensors.torch.save_file(rest, path, {"format": "pt"})
    modules = {name: value.contiguous() for name, value in repair.tensors.items()}
    add_shard({name: file for name, file in files.items() if name not in names}, folder, modules)
