"""MTP modules in files, compared with the model's own layers, and with the model that it comes from."""

import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.core.dequantise import PLAIN_DTYPES
from specdec.heads.native_modules.files import EXPERT, ModelFiles, StoredModule

# Families whose norms multiply by 1 + weight. Conversions add 1 to these weights, or add it twice.
ZERO_CENTRED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "step3p5", "step3p7", "minimax_m3")
SHIFT_ERROR = 0.25  # bound of the distance between a difference of norms and the shift by 1 that it is taken for
# Tensors of the last layer that tuning of any kind changes, and that show what a model is
SAMPLE = ("down_proj.weight", "o_proj.weight", "q_proj.weight", "norm.weight", "layernorm.weight")


def pair_with_base(model: ModelFiles, module: StoredModule, base: ModelFiles) -> dict[str, str]:
    """The module's plain tensors, each with that of the base's module; {} where the base has no such module."""
    origin = next((candidate for candidate in base.modules if candidate.number == module.number), None)
    if origin is None or origin.layout != module.layout:
        return {}
    pairs = {module.outer[label]: origin.outer[label] for label in module.outer}
    pairs |= {name: origin.stem + name.removeprefix(module.stem) for name in module.names if name not in pairs}
    return select_plain(model, {name: pairs[name] for name in pairs if name not in module.copies}, base)


def select_plain(model: ModelFiles, pairs: dict[str, str], base: ModelFiles) -> dict[str, str]:
    """The pairs of tensors of which both files have both in full precision."""
    return {name: pairs[name] for name in pairs if is_plain(model, name) and is_plain(base, pairs[name])}


def is_plain(model: ModelFiles, name: str) -> bool:
    """Whether the files have a tensor in full precision."""
    return name in model.shards.files and model.shards.dtype(name) in PLAIN_DTYPES


def equals(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes."""
    if value.shape != expected.shape:
        return False
    dtype = min(value.dtype, expected.dtype, key=lambda kind: kind.itemsize)
    return torch.equal(value.to(dtype), expected.to(dtype))


def equal_pairs(model: ModelFiles, pairs: dict[str, str], base: ModelFiles) -> bool:
    """Whether the tensors of all pairs are equal."""
    return all(equals(model.shards[name], base.shards[pairs[name]]) for name in pairs)


def is_same_trunk(model: ModelFiles, base: ModelFiles) -> bool | None:
    """Whether the last layer is the base's, as far as a few tensors tell; None: the forms in the files do not tell."""
    last = model.num_layers - 1
    stem, base_stem = (f"{files.prefix}layers.{last}." for files in (model, base))
    pairs = {}
    for role, names in model.layers.get(last, {}).items():
        if role.endswith(SAMPLE) and not EXPERT.search(names[0]):
            pairs[names[0]] = base_stem + names[0].removeprefix(stem)
    pairs = select_plain(model, pairs, base)
    if not equal_pairs(model, pairs, base):
        return False
    return True if any(not name.endswith("norm.weight") for name in pairs) else None


def find_origin(model: ModelFiles, module: StoredModule, base: ModelFiles) -> str | None:
    """`stale` for the base's module beside tuned layers, `tuned` for another one beside the base's layers, or None."""
    pairs = pair_with_base(model, module, base)
    same_trunk = is_same_trunk(model, base)
    if not pairs or same_trunk is None:
        return None
    same_module = equal_pairs(model, pairs, base)
    if same_module == same_trunk:
        return None
    return "stale" if same_module else "tuned"


def find_shifts(model: ModelFiles, module: StoredModule, base: ModelFiles | None) -> dict[str, int]:
    """How much the module's norms lie above (1) or below (-1) the values that the family has; {}: no shift.

    With a base each norm is compared with the base's. Without one, norms that the model's own layers have, too, decide
    for all.
    """
    if model.model_type not in ZERO_CENTRED:
        return {}
    norms = list_norms(model, module)
    pairs = {} if base is None else pair_with_base(model, module, base)
    if base is None or not pairs:
        shift = compare_norms(model, module)
        return dict.fromkeys(norms, shift) if shift else {}
    shifts = {
        name: round_shift(subtract_medians(model.shards[name], base.shards[pairs[name]]))
        for name in norms
        if name in pairs
    }
    return {name: shift for name, shift in shifts.items() if shift}


def round_shift(difference: float) -> int:
    """The shift that a difference between norms is: 1, -1, or 0 for none."""
    shift = round(difference)
    return shift if abs(shift) == 1 and abs(difference - shift) < SHIFT_ERROR else 0


def list_norms(model: ModelFiles, module: StoredModule) -> list[str]:
    """The weights of the module's norms."""
    names = list(module.outer_norms)
    for block in module.blocks.values():
        names += [names_of_role[0] for role, names_of_role in block.items() if role.endswith("norm.weight")]
    return [name for name in names if is_plain(model, name)]


def subtract_medians(value: Tensor, expected: Tensor) -> float:
    """The difference between the medians of two vectors."""
    return float(value.float().median() - expected.float().median())


def compare_norms(model: ModelFiles, module: StoredModule) -> int:
    """The shift of a module's norms by the median over norms of its layers of differences between means.

    The norms before the join and the last one are left out, as the model has none that are like them. A norm of queries
    or keys without that shift refutes it.
    """
    differences, queries_and_keys = [], []
    for stem, block in module.blocks.items():
        original_stem, _ = model.find_alike(block)
        for role in block:
            name, original = stem + role, original_stem + role
            if role.endswith("norm.weight") and is_plain(model, name) and is_plain(model, original):
                difference = float(model.shards[name].float().mean() - model.shards[original].float().mean())
                differences.append(difference)
                if role.endswith(("q_norm.weight", "k_norm.weight")):
                    queries_and_keys.append(difference)
    shift = round_shift(statistics.median(differences)) if differences else 0
    return shift if all(round_shift(difference) == shift for difference in queries_and_keys) else 0


def is_join_swapped(model: ModelFiles, module: StoredModule, base: ModelFiles) -> bool:
    """Whether the halves of the join stand in the base's other order, tuned or not."""
    name = module.outer["join"]
    pairs = pair_with_base(model, module, base)
    if name not in pairs:
        return False
    join, expected = model.shards[name].float(), base.shards[pairs[name]].float()
    if join.shape != expected.shape:
        return False
    return bool((swap_halves(join) - expected).norm() < 0.5 * (join - expected).norm())


def swap_halves(join: Tensor) -> Tensor:
    """A join [D, 2 D] with its halves in the other order."""
    return join.roll(join.shape[1] // 2, dims=1)


def compare_copies(model: ModelFiles, module: StoredModule) -> Iterator[tuple[str, str, float | None]]:
    """Yields copies that differ from the model's tensor: (copy, tensor, largest difference); None: other rows."""
    for copy in module.copies:
        original = model.find_original(copy)
        if original is None or not (is_plain(model, copy) and is_plain(model, original)):
            continue
        value, expected = model.shards[copy], model.shards[original]
        if value.shape != expected.shape:
            yield copy, original, None
        elif not equals(value, expected):
            yield copy, original, float((value.float() - expected.float()).abs().max())
