"""Plain weights from the quantised tensors of safetensors files, and quantised tensors from plain weights.

A weight W [out, in] is stored as values and scales, and perhaps a global scale and zero points:

    W = (value - zero) * scale * global             weight_global_scale of compressed-tensors divides instead

    form    values                                     scales
    fp8     float8 [out, in]                           one, one for each row, or one for each block of rows and inputs
    mxfp8   float8 [out, in]                           powers of two, 32 inputs each
    nvfp4   two codes of E2M1 in a byte, low one first float8, 16 inputs each, and a global one
    mxfp4   the same                                   powers of two, 32 inputs each
    int8    int8 [out, in]                             as fp8
    packed  codes in int32, lowest bits first, with an  one for each group of inputs, or as `weight_g_idx` says
            offset of 2 ** (bits - 1)

Experts of gpt-oss are stored as [E, out, in / 32, 16] bytes and used as [E, in, out]. AWQ forms of ModelOpt multiply
the inputs by `pre_quant_scale`, which goes into the weight. Scales of inputs, keys and values are no part of weights.
A weight is computed in float32. At most its last operation rounds, but for the one with `pre_quant_scale`.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.core.shards import Shards

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0..7; bit 3 is the sign
E2M1_CODES = torch.tensor([*E2M1, *(-value for value in E2M1)])  # values of the codes 0..15
E2M1_PAIRS = torch.stack((E2M1_CODES.repeat(16), E2M1_CODES.repeat_interleave(16)), 1)  # two values of each byte
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors for weights without scales
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
INTEGERS = {"I8": "int8", "I32": "packed"}  # methods by dtype
POWERS = ("U8", "F8_E8M0")  # dtypes of scales that are powers of two: 2 ** (byte - 127)
# Method of a weight by its dtype: with powers of two as scales, and with numbers
POWER_METHODS = {"U8": "mxfp4", **dict.fromkeys(FLOAT8, "mxfp8")}
NUMBER_METHODS = {**dict.fromkeys(FLOAT8, "fp8"), **INTEGERS}
PACKED_BITS = (4, 8)  # bits of a value, of which 32 // bits are in an int32
BLOCK = 128  # rows and inputs of a block of FP8 where the configuration names no size
GROUPS = {"nvfp4": 16, "mxfp4": 32}  # inputs that share a scale
# Names of tensors that only quantised weights have, their scales and packed values
PARTS = re.compile(
    r".*([._]weight_(scale(_2|_inv)?|global_scale|zero_point|packed|shape|g_idx)|_proj_(blocks|scales?|scale_inv)|"
    r"\.(pre_quant_scale|qweight|qzeros|g_idx|SCB|svdquant_lora_[ab])|"
    r"\.weight\.(absmax|quant_map|nested_.*|quant_state\..*))"
)
ACTIVATION_SCALES = re.compile(r".*(\.|_proj_)(activation|input|output|[qkv]|kv)(_global)?_(scale|zero_point)")
PART_NAMES = {  # by role: ends of names, behind the plain name (_) or behind the module's (.)
    "scale": ("_scale", "_scale_inv", "_scales", "_weight_scale", ".scale"),
    "factor": ("_scale_2", "_weight_scale_2"),
    "divisor": ("_global_scale",),
    "zero": ("_zero_point",),
    "shape": ("_shape",),
    "groups": ("_g_idx",),
    "inputs": (".pre_quant_scale",),
}
WEIGHT_ENDS = ("weight", "_proj", "_packed", "_blocks")  # ends of names of values
FOREIGN = ("qweight", "weight.absmax", "SCB", "svdquant_lora_a")  # parts of forms that are not read here
ADVICE = "take a complete copy, or one that is quantised otherwise"


@dataclass(frozen=True)
class Form:
    """The stored form of a weight.

    name: plain name; method: plain, fp8, mxfp8, nvfp4, mxfp4, int8 or packed; stored: stored names by role
    dtypes: dtypes in the words of safetensors by role; shape: of the weight as it is stored, [.., out, in]
    """

    name: str
    method: str
    stored: dict[str, str]
    dtypes: dict[str, str]
    shape: tuple[int, ...]
    shards: Shards = field(repr=False, compare=False)

    def has(self, role: str) -> bool:
        return role in self.stored

    def read(self, role: str) -> Tensor:
        """A stored tensor."""
        return self.shards[self.stored[role]]

    def fail(self, role: str, words: str) -> ValueError:
        """An error that names a stored tensor."""
        return ValueError(f"{self.shards.name}: its tensor {self.stored[role]} {words}: {ADVICE}.")

    def compute(self) -> Tensor:
        """The plain weight, as `read_plain`."""
        return _compute(self)

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of the plain weight."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.swapped else self.shape

    @property
    def plain_dtype(self) -> str:
        """The dtype of the plain weight in the words of safetensors."""
        return self.dtypes["values"] if self.method == "plain" else "F32"

    @property
    def scale_names(self) -> set[str]:
        """Stored names of scales and all else besides the values."""
        return set(self.stored.values()) - {self.stored["values"]}

    @property
    def swapped(self) -> bool:
        """Whether a model has inputs before outputs: the experts of gpt-oss."""
        return self.stored["values"].endswith("_blocks")


def read_plain(shards: Shards, name: str) -> Tensor:
    """A weight by its plain name, in float32 if it is quantised, else as stored.

    Raises ValueError, which names a tensor, for an absent weight, a missing scale, and a shape or form that is unknown.
    """
    return require_form(shards, name).compute()


def require_form(shards: Shards, name: str) -> Form:
    """The form of a weight. Raises ValueError as `read_plain`."""
    form = find_form(shards, name)
    if form is None:
        raise ValueError(f"{shards.name} has no tensor {name}: take a complete copy of it.")
    return form


def find_form(shards: Shards, name: str) -> Form | None:
    """The form of a weight from names, dtypes and shapes; None: it is absent. Raises ValueError as `read_plain`."""
    stem = name.removesuffix(".weight")
    for part in FOREIGN:
        if f"{stem}.{part}" in shards.files:
            raise ValueError(f"{shards.name}: its tensor {stem}.{part} is of a form that is not read here: {ADVICE}.")
    stored = _find_stored(shards, name)
    if not stored:
        return None
    dtypes = {role: shards.dtype(key) for role, key in stored.items()}
    method = _find_method(shards, stored["values"], dtypes)
    form = Form(name, method, stored, dtypes, (), shards)
    form = Form(name, method, stored, dtypes, _find_shape(form), shards)
    if method != "plain":
        _check_parts(form)
    return form


def write_like(form: Form, value: Tensor) -> dict[str, Tensor]:
    """Stored tensors by name for a plain weight in a form, each value rounded to the nearest one.

    value: shape as of `read_plain`. A scale is the largest magnitude of its block over that of a stored value, rounded
    to nearest, or up to a power of two. A global scale stays that of the file, because engines want one for several
    weights. Values that exceed the range become the largest ones.
    """
    if form.method == "plain":
        return {form.name: value.to(form.read("values").dtype).contiguous()}
    weight = value.detach().float().cpu()
    weight = weight.transpose(-1, -2).contiguous() if form.swapped else weight
    if tuple(weight.shape) != form.shape:
        raise ValueError(f"{form.name} has the shape {list(form.shape)}, not {list(weight.shape)}.")
    if form.has("inputs"):
        weight = weight / form.read("inputs").float()
    if form.has("factor"):
        weight = weight / _fit(form, "factor")
    if form.has("divisor"):
        weight = weight * _fit(form, "divisor")
    rows, columns = _index_scales(form)
    if form.has("zero") and form.method in INTEGERS.values():
        return _write_asymmetric(form, weight, rows, columns)
    scale = _make_scale(form, _reduce(weight.abs(), _grid_shape(form), rows, columns))
    step = _expand(_decode_scale(scale), rows, columns)
    codes = torch.where(step > 0, weight / step, 0.0)
    return _name(form, {"values": _encode(form, codes), "scale": scale})


class PlainShards(Shards):
    """The weights of a model by plain name, shape and value, as if none were quantised.

    Forms are found at their first use, so files of the Hub that are not needed are not fetched.
    """

    def __init__(self, shards: Shards):
        self.name, self.revision, self.is_local = shards.name, shards.revision, shards.is_local
        self.stored, self.config, self.open = shards, shards.config, shards.open
        self.files = {
            _name_plain(key): file
            for key, file in shards.files.items()
            if not (PARTS.fullmatch(_name_plain(key)) or ACTIVATION_SCALES.fullmatch(key))
        }
        self.find_form = functools.cache(functools.partial(require_form, shards))

    def __getitem__(self, key: str) -> Tensor:
        return self.find_form(key).compute()

    def shape(self, key: str) -> tuple[int, ...]:
        return self.find_form(key).plain_shape

    def dtype(self, key: str) -> str:
        return self.find_form(key).plain_dtype

    def list_forms(self, is_wanted: Callable[[str], bool] = bool) -> dict[str, Form]:
        """The forms of all wanted weights by plain name.

        Raises ValueError as `read_plain`, and for a tensor that scales weights and that no weight takes.
        """
        forms = {name: self.find_form(name) for name in self.files if is_wanted(name)}
        scale_names = {key for form in forms.values() for key in form.scale_names}
        for key in self.stored.files:
            if PARTS.fullmatch(_name_plain(key)) and key not in scale_names and is_wanted(key):
                raise ValueError(f"{self.name}: no quantised weight takes its tensor {key}: {ADVICE}.")
        return {name: form for name, form in forms.items() if name not in scale_names}


def _name_plain(key: str) -> str:
    """The plain name of the weight whose values have this name, or the name itself."""
    return re.sub(r"(?<=\.weight)_packed$|(?<=_proj)_blocks$", "", key)


# What a form is, and whether its tensors fit together


def _find_stored(shards: Shards, name: str) -> dict[str, str]:
    """The stored names of a weight by role; empty: it is absent."""
    values = next((key for key in (name, f"{name}_packed", f"{name}_blocks") if key in shards.files), None)
    if values is None:
        return {}
    stored, module_name = {"values": values}, name.removesuffix(".weight")
    part_names = {} if shards.dtype(values) in PLAIN_DTYPES else PART_NAMES
    for role, suffixes in part_names.items():
        keys = [(name if suffix.startswith("_") else module_name) + suffix for suffix in suffixes]
        stored |= dict([(role, key) for key in keys if key in shards.files][:1])
    return stored


def _find_method(shards: Shards, key: str, dtypes: dict[str, str]) -> str:
    dtype, scale_dtype = dtypes["values"], dtypes.get("scale")
    if dtype in PLAIN_DTYPES:
        return "plain"
    if scale_dtype is None and dtype not in FLOAT8 and not key.endswith(WEIGHT_ENDS):
        return "plain"  # numbers that are no weights, such as counts
    if scale_dtype is None:
        raise ValueError(
            f"{shards.name}: its tensor {key} is quantised ({dtype}) and has no scale beside it, so its values are "
            f"unknown: {ADVICE}."
        )
    methods = POWER_METHODS if scale_dtype in POWERS else NUMBER_METHODS
    method = "nvfp4" if (dtype, scale_dtype) == ("U8", "F8_E4M3") else methods.get(dtype)
    if method is not None:
        return method
    raise ValueError(f"{shards.name}: its tensor {key} is of a form that is not read here ({dtype}): {ADVICE}.")


def _find_shape(form: Form) -> tuple[int, ...]:
    """The shape of a plain weight as it is stored."""
    shape = form.shards.shape(form.stored["values"])
    if form.swapped:
        return (*shape[:-2], 2 * shape[-2] * shape[-1])
    if form.method in GROUPS:
        return (*shape[:-1], 2 * shape[-1])
    if form.method == "packed" and not form.has("shape"):
        raise form.fail("values", "is packed and has no weight_shape beside it")
    return tuple(form.read("shape").tolist()) if form.method == "packed" else shape


def _check_parts(form: Form) -> None:
    """Raises ValueError for parts that are missing or whose shapes do not fit."""
    if form.method == "nvfp4" and form.has("factor") == form.has("divisor"):
        raise form.fail("values", "needs one of weight_scale_2 and weight_global_scale beside it")
    if form.has("zero") and form.method not in INTEGERS.values() and form.read("zero").float().any():
        raise form.fail("zero", "gives floating-point values a zero point, which is not read here")
    if len(form.shape) < 2:
        raise form.fail("values", f"is quantised and has the shape {list(form.shape)}, not that of a matrix")
    if form.method == "packed":
        _find_bits(form)
    _index_scales(form)
    for role in ("factor", "divisor"):
        if form.has(role):
            _fit(form, role)
    if form.has("inputs") and form.shards.shape(form.stored["inputs"]) != form.shape[-1:]:
        raise form.fail("inputs", f"has not the {form.shape[-1]} values of the inputs of {form.name}")


def _find_bits(form: Form) -> int:
    """The bits of a value that is packed in an int32."""
    columns = form.shards.shape(form.stored["values"])
    for bits in PACKED_BITS:
        if columns == (form.shape[0], math.ceil(form.shape[1] * bits / 32)):
            return bits
    raise form.fail(
        "values", f"has the shape {list(columns)}, which does not fit {PACKED_BITS} bits of {list(form.shape)}"
    )


def _grid_shape(form: Form) -> tuple[int, ...]:
    """The shape of the scales as one for each block of rows and columns, [.., R, C]."""
    stored, shape = form.shards.shape(form.stored["scale"]), form.shape
    if math.prod(stored) == 1:
        return (1, 1)
    grid = stored
    if len(stored) == 1 and stored == shape[:1]:  # one for each row, or for each expert
        grid = (*stored, *(1 for _ in shape[1:]))
    elif len(shape) == 2 and len(stored) == 4:  # blocks of ModelOpt: [R, 1, C, 1]
        grid = (stored[0] * stored[1], stored[2] * stored[3])
    if len(grid) != len(shape) or grid[:-2] != shape[:-2]:
        raise form.fail("scale", f"has the shape {list(stored)}, which does not fit {form.name} of {list(shape)}")
    return grid


def _index_scales(form: Form) -> tuple[Tensor, Tensor]:
    """The scale of each row and of each column, as indices into the last two dimensions of `_grid_shape`."""
    *_, num_rows, num_columns = _grid_shape(form)
    sizes = _find_block(form)
    *_, out_features, in_features = form.shape
    if form.has("groups"):
        columns = form.read("groups").long()
        if columns.shape != (in_features,) or int(columns.max()) >= num_columns or int(columns.min()) < 0:
            raise form.fail("groups", f"does not give one of {num_columns} groups for each of {in_features} inputs")
    else:
        columns = _index_blocks(form, in_features, num_columns, sizes[1:])
    if form.method in GROUPS and in_features != GROUPS[form.method] * num_columns:
        raise form.fail(
            "scale", f"has not one scale for each {GROUPS[form.method]} inputs of {form.name} {list(form.shape)}"
        )
    return _index_blocks(form, out_features, num_rows, sizes[:1]), columns


def _index_blocks(form: Form, size: int, num: int, sizes: tuple[int, ...]) -> Tensor:
    """The block of each of `size` positions. sizes: block sizes to try before size / num; the last block may be cut"""
    for block in sizes:
        if math.ceil(size / block) == num:
            return torch.arange(size) // block
    if num == 0 or size % num:
        stored = list(form.shards.shape(form.stored["scale"]))
        raise form.fail("scale", f"has the shape {stored}, which does not divide {form.name} of {list(form.shape)}")
    return torch.arange(size) // (size // num)


def _find_block(form: Form) -> tuple[int, ...]:
    """Rows and inputs of a block that the configuration names; else those of DeepSeek's FP8; else none."""
    settings = form.shards.config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    groups: list[Any] = list((settings.get("config_groups") or {}).values())
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups]
    default = (BLOCK, BLOCK) if form.dtypes["values"] in FLOAT8 else ()
    sizes = (settings.get("weight_block_size"), *structures)
    block = next((tuple(size) for size in sizes if isinstance(size, list) and len(size) == 2), default)
    group_size = _find_group_size(settings, groups)
    return (*(block[:1] or (1,)), group_size) if group_size > 0 else block


def _find_group_size(settings: dict[str, Any], groups: list[Any]) -> int:
    """Inputs with one scale, as the configuration says; 0: it does not."""
    sizes = [settings.get("group_size"), *((group.get("weights") or {}).get("group_size") for group in groups)]
    return next((size for size in sizes if isinstance(size, int)), 0)


# Reading


def _compute(form: Form) -> Tensor:
    if form.method == "plain":
        return form.read("values")
    if len(form.shape) == 2:
        return _compute_matrices(form, slice(None))
    weight = torch.empty(form.plain_shape)
    for number in range(form.shape[0]):  # so that the rest of the memory is that of one matrix
        weight[number] = _compute_matrices(form, slice(number, number + 1))[0]
    return weight


def _compute_matrices(form: Form, numbers: slice) -> Tensor:
    """The weight, or some matrices of it."""
    values, (rows, columns) = _read_values(form, numbers), _index_scales(form)
    if form.has("zero") and form.method in INTEGERS.values():
        values = values - _expand(_read_zeros(form), rows, columns)
    weight = _multiply(values, _take(_arrange(form, _decode_scale(form.read("scale"))), numbers), rows, columns)
    if form.has("factor"):
        weight *= _take(_fit(form, "factor"), numbers)
    if form.has("divisor"):
        weight /= _take(_fit(form, "divisor"), numbers)
    if form.has("inputs"):
        weight *= form.read("inputs").float()
    return weight.transpose(-1, -2) if form.swapped else weight


def _take(scale: Tensor, numbers: slice) -> Tensor:
    """The scales of some matrices."""
    return scale[numbers] if scale.dim() == 3 else scale


def _multiply(values: Tensor, scale: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Values [.., out, in], multiplied in place by the scales of their blocks [.., R, C]."""
    by_row, num = scale.index_select(-2, rows), scale.shape[-1]
    if torch.equal(columns, torch.arange(len(columns)) // max(1, len(columns) // num)):  # columns of equal blocks
        values.unflatten(-1, (num, -1)).mul_(by_row[..., None])
        return values
    return values.mul_(by_row.index_select(-1, columns))


def _read_values(form: Form, numbers: slice) -> Tensor:
    """The values of a weight in float32, of its stored shape, without their offset. numbers: wanted matrices"""
    stored = form.read("values")[numbers]
    if form.method in GROUPS:
        pairs = E2M1_PAIRS[(stored.flatten(-2) if form.swapped else stored).int()]  # [.., in / 2, 2]
        return pairs.flatten(-2)
    if form.method == "packed":
        bits = _find_bits(form)
        return (_unpack(stored, bits, form.shape[1]) - 2 ** (bits - 1)).float()
    return stored.float()


def _read_zeros(form: Form) -> Tensor:
    """The zero points [.., R, C] in float32. Those of packed values are packed along the rows."""
    zeros = form.read("zero")
    if form.method == "packed" and zeros.dtype == torch.int32:
        bits = _find_bits(form)
        zeros = _unpack(zeros.T, bits, form.shape[0]).T - 2 ** (bits - 1)
    if zeros.numel() != math.prod(_grid_shape(form)):
        raise form.fail("zero", f"has the shape {list(form.read('zero').shape)}, which does not fit its scales")
    return _arrange(form, zeros.float())


def _unpack(packed: Tensor, bits: int, num: int) -> Tensor:
    """int32 [rows, n] -> codes [rows, num], lowest bits first"""
    codes = (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)
    return codes.flatten(-2)[..., :num]


def _decode_scale(scale: Tensor) -> Tensor:
    """Scales in float32; bytes are powers of two."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _arrange(form: Form, scale: Tensor) -> Tensor:
    return scale.reshape(_grid_shape(form))


def _expand(grid: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Values of blocks [.., R, C] for each element [.., out, in]."""
    return grid.index_select(-2, rows).index_select(-1, columns)


def _fit(form: Form, role: str) -> Tensor:
    """A global scale in float32, which broadcasts over the weight. Raises ValueError for more than one a matrix."""
    scale = form.read(role).float()
    if scale.numel() == 1:
        return scale.reshape(())
    if len(form.shape) == 3 and scale.numel() == form.shape[0]:
        return scale.reshape(-1, 1, 1)
    raise form.fail(role, f"has the shape {list(scale.shape)}, not one value for {form.name} of {list(form.shape)}")


# Writing


def _reduce(magnitudes: Tensor, grid: tuple[int, ...], rows: Tensor, columns: Tensor) -> Tensor:
    """The largest of each block [.., R, C] of values [.., out, in] that are not negative."""
    by_column = magnitudes.new_zeros(*magnitudes.shape[:-1], grid[-1])
    by_column.scatter_reduce_(-1, columns.expand_as(magnitudes), magnitudes, "amax")
    by_block = magnitudes.new_zeros(*magnitudes.shape[:-2], *grid[-2:])
    by_block.scatter_reduce_(-2, rows[:, None].expand_as(by_column), by_column, "amax")
    return by_block.amax(0) if by_block.dim() > len(grid) else by_block


def _find_largest(form: Form) -> float:
    """The largest magnitude of a stored value."""
    if form.method in GROUPS:
        return E2M1[-1]
    if form.method == "packed":
        return 2 ** (_find_bits(form) - 1) - 1
    return 127 if form.method == "int8" else torch.finfo(FLOAT8[form.dtypes["values"]]).max


def _make_scale(form: Form, peaks: Tensor) -> Tensor:
    """Scales [.., R, C] in their stored dtype for blocks with these largest magnitudes."""
    scale, stored = peaks / _find_largest(form), form.read("scale").dtype
    if form.dtypes["scale"] in POWERS:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2 ** exponent, 1 / 2 <= mantissa < 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        codes = torch.where(scale > 0, exponent + 127, 0).clamp(0, 254).to(torch.uint8)
        return codes if stored == torch.uint8 else codes.view(stored)
    return scale.clamp(max=torch.finfo(stored).max).to(stored)


def _encode(form: Form, codes: Tensor) -> Tensor:
    """Stored values of the weight divided by its scales, rounded to nearest, ties to even."""
    if form.method in GROUPS:
        nibbles = _round_e2m1(codes)
        return nibbles[..., ::2] | nibbles[..., 1::2] << 4
    if form.method == "packed":
        return _pack_offset(codes.round(), _find_bits(form))
    largest = _find_largest(form)
    codes = codes.clamp(-largest, largest)
    return codes.round().to(torch.int8) if form.method == "int8" else codes.to(FLOAT8[form.dtypes["values"]])


def _round_e2m1(values: Tensor) -> Tensor:
    """The codes of E2M1 nearest to values, ties to even codes."""
    table = torch.tensor(E2M1)
    middles = (table[1:] + table[:-1]) / 2
    magnitudes = values.abs()
    codes = torch.bucketize(magnitudes, middles)  # a tie to the lower one
    ties = magnitudes == middles[codes.clamp(max=len(middles) - 1)]
    return (codes + (ties & (codes % 2 == 1)) + 8 * torch.signbit(values)).to(torch.uint8)


def _pack_offset(codes: Tensor, bits: int) -> Tensor:
    """Signed codes [rows, n] in int32, lowest bits first, with the offset 2 ** (bits - 1)."""
    half, per_word = 2 ** (bits - 1), 32 // bits
    shifted = codes.clamp(-half, half - 1).to(torch.int64) + half
    shifted = torch.nn.functional.pad(shifted, (0, -shifted.shape[-1] % per_word))
    words = (shifted.unflatten(-1, (-1, per_word)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _write_asymmetric(form: Form, weight: Tensor, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
    """As `write_like` for integers with zero points: 0 and both ends of a block are in range."""
    bits = 8 if form.method == "int8" else _find_bits(form)
    half, grid = 2 ** (bits - 1), _grid_shape(form)
    top, bottom = (_reduce(part.clamp(min=0), grid, rows, columns) for part in (weight, -weight))
    scale = ((top + bottom) / (2**bits - 1)).to(form.read("scale").dtype)
    step = scale.float()
    zeros = torch.where(step > 0, -half + bottom / step, 0.0).round().clamp(-half, half - 1)
    wide_step, wide_zeros = _expand(step, rows, columns), _expand(zeros, rows, columns)
    codes = (torch.where(wide_step > 0, weight / wide_step, 0.0).round() + wide_zeros).clamp(-half, half - 1)
    packed = form.method == "packed"
    stored_zeros = form.read("zero")
    zeros = (
        _pack_offset(zeros.T, bits).T if packed and stored_zeros.dtype == torch.int32 else zeros.to(stored_zeros.dtype)
    )
    tensors = {"values": _pack_offset(codes, bits) if packed else codes.to(torch.int8), "scale": scale, "zero": zeros}
    return _name(form, tensors)


def _name(form: Form, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their stored names, with those that stay as they are."""
    unchanged = {role: form.read(role) for role in form.stored if role not in tensors}
    return {
        form.stored[role]: tensor.reshape(form.shards.shape(form.stored[role])).contiguous()
        for role, tensor in (unchanged | tensors).items()
    }
