"""The list of layers in full precision in a quantised model's configuration: its entries, and new ones."""

import fnmatch
import re
from collections.abc import Iterable

PLAIN_FIELDS = {  # by quantisation method: the field that names layers in full precision
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
    "mxfp4": "modules_to_not_convert",
    "modelopt": "ignore",
}
OLD_MODELOPT_FIELD = "exclude_modules"  # in hf_quant_config.json and in older configurations
FUSED = (  # linears that engines hold as one
    (re.compile(r"\b[qkv]_proj$"), "qkv_proj"),
    (re.compile(r"\b(gate|up)_proj$"), "gate_up_proj"),
    (re.compile(r"\b(q_a_proj|kv_a_proj_with_mqa)$"), "fused_qkv_a_proj"),
    (re.compile(r"\bexperts\..+$"), "experts"),
)


def is_plain_layer(settings: dict, layer: str) -> bool | None:
    """Whether a quantised model's configuration leaves a layer in full precision; None: its method is unknown here.

    settings: quantization_config, or `quantization` of hf_quant_config.json; layer: name of a linear or of experts
    Single and fused names count, wildcards (ModelOpt), and regular expressions behind `re:` (compressed-tensors).
    """
    method = find_method(settings)
    if method not in PLAIN_FIELDS:
        return None
    names = [layer, *(pattern.sub(fused, layer) for pattern, fused in FUSED if pattern.search(layer))]
    entries = [*(settings.get(PLAIN_FIELDS[method]) or ()), *(settings.get(OLD_MODELOPT_FIELD) or ())]
    whole = method == "compressed-tensors"  # there an entry is no part of a name
    if any(matches_entry(entry, name, whole=whole) for entry in entries for name in names):
        return True
    targets = list_targets(settings)
    return bool(targets) and not any(matches_entry(entry, name, whole=whole) for entry in targets for name in names)


def find_method(settings: dict) -> str:
    """The name of the quantisation method; that of ModelOpt where only an algorithm is named."""
    method = settings.get("quant_method") or ("modelopt" if "quant_algo" in settings else "")
    return str(method).lower()


def list_targets(settings: dict) -> list[str]:
    """The layers that a configuration quantises; empty where it quantises all linears."""
    layers = list(settings.get("quantized_layers") or ())  # of mixed precision in ModelOpt
    for group in (settings.get("config_groups") or {}).values():
        layers += group.get("targets") or ["Linear"]
    return [] if "Linear" in layers else layers


def matches_entry(entry: str, layer: str, *, whole: bool) -> bool:
    """Whether an entry names a layer, with or without the beginning of its name. whole: no entry names a part"""
    if entry.startswith("re:"):
        return re.match(entry[3:], layer) is not None
    if "*" in entry:
        return fnmatch.fnmatch(layer, entry)
    if f".{entry}".endswith(f".{layer}") or f".{layer}".endswith(f".{entry}"):
        return True
    return not whole and f".{entry}." in f".{layer}."


def declare_plain(settings: dict, layers: Iterable[str], name: str) -> None:
    """Adds layers to the list of those in full precision. name: the model's, for errors

    Raises ValueError for a method whose list is unknown.
    """
    method = find_method(settings)
    if method not in PLAIN_FIELDS:
        raise ValueError(
            f"{name} is quantised ({method}), and where such a model names layers that are not is unknown: take one of "
            f"{', '.join(PLAIN_FIELDS)}."
        )
    field = OLD_MODELOPT_FIELD if OLD_MODELOPT_FIELD in settings else PLAIN_FIELDS[method]
    entries = settings.get(field)
    if entries is None:  # transformers leaves out the LM head only where there is no list
        entries = [] if method in ("compressed-tensors", "modelopt") else ["lm_head"]
    added = [layer for layer in layers if layer not in entries]
    groups = {re.sub(r"\bexperts\..+$", "experts", layer) for layer in added} - {*added, *entries}
    settings[field] = [*entries, *added, *sorted(groups)]
