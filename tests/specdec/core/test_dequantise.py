"""Every stored form of a weight against its definition, element by element, in Python's own float64 numbers."""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import safetensors.torch
import torch
from torch import Tensor

from specdec.core.dequantise import PlainShards, find_form, read_plain, write_like
from specdec.core.shards import Shards

FP8 = torch.float8_e4m3fn


def e4m3(byte: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa"""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 128 else magnitude


def e2m1(code: int) -> float:
    """Sign, 2 bits of exponent with bias 1, 1 bit of mantissa"""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -magnitude if code & 8 else magnitude


def bits_at(words: list[int], number: int, bits: int) -> int:
    """Field number `number` of a row of 32-bit words, lowest bits first"""
    whole = sum((word % 2**32) << 32 * place for place, word in enumerate(words))
    return whole >> bits * number & 2**bits - 1


def byte_at(tensor: Tensor, index: tuple) -> int:
    return tensor.view(torch.uint8)[index].item()


E4M3_LEVELS = [e4m3(byte) for byte in range(256) if byte & 127 != 127]
E2M1_LEVELS = [e2m1(code) for code in range(16)]
Tensors = dict[str, Tensor]
Place = tuple[int, ...]


@dataclass
class Example:
    """A stored weight and its definition: level * step at each place.

    levels: all values of `level` at a place; config: fields of config.json
    """

    name: str
    method: str
    tensors: Tensors
    shape: tuple[int, ...]
    level: Callable[[Tensors, Place], float]
    step: Callable[[Tensors, Place], float]
    levels: Callable[[Tensors, Place], Iterable[float]]
    plain: str = "a.weight"
    config: dict = field(default_factory=dict)

    def places(self) -> Iterable[Place]:
        return itertools.product(*map(range, self.shape))

    def reference(self, tensors: Tensors) -> Tensor:
        """The weight in float64"""
        values = [self.level(tensors, index) * self.step(tensors, index) for index in self.places()]
        return torch.tensor(values, dtype=torch.float64).reshape(self.shape)


def save(folder, tensors: Tensors, config: dict | None = None) -> Shards:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return Shards(str(folder))


RNG = torch.Generator().manual_seed(5)


def random(*shape: int, low: float = 0.01) -> Tensor:
    return low + (1 - low) * torch.rand(shape, generator=RNG)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, generator=RNG).to(dtype)


def words(*shape: int) -> Tensor:
    return integers(-(2**31), 2**31, *shape, dtype=torch.int32)


# Scales at a place [row, input]


def grid(key: str, rows: int, inputs: int) -> Callable[[Tensors, Place], float]:
    """One scale for each block of rows and inputs"""
    return lambda tensors, index: float(tensors[key][index[0] // rows, index[1] // inputs])


def powers(tensors: Tensors, index: Place) -> float:
    return 2.0 ** (byte_at(tensors["a.weight_scale"], (index[0], index[1] // 32)) - 127)


def e4m3_groups(tensors: Tensors, index: Place) -> float:
    return e4m3(byte_at(tensors["a.weight_scale"], (index[0], index[1] // 16)))


def times_scale_2(tensors: Tensors, index: Place) -> float:
    return e4m3_groups(tensors, index) * float(tensors["a.weight_scale_2"])


def expert_level(tensors: Tensors, index: Place) -> float:
    """An element of gpt-oss' experts at [expert, input, output]"""
    expert, inputs, outputs = index
    byte = tensors["x.experts.down_proj_blocks"][expert, outputs, inputs // 32, inputs % 32 // 2].item()
    return e2m1(byte >> 4 if inputs % 2 else byte & 15)


def expert_step(tensors: Tensors, index: Place) -> float:
    return 2.0 ** (byte_at(tensors["x.experts.down_proj_scales"], (index[0], index[2], index[1] // 32)) - 127)


# Kinds of values


def fp8(name: str, scales: Tensors, step: Callable, *, shape: Place = (10, 15), plain="a.weight", **fields) -> Example:
    values = (40 * torch.randn(shape, generator=RNG)).to(FP8)
    method = fields.pop("method", "fp8")
    return Example(
        name, method, {plain: values, **scales}, shape,
        lambda tensors, index: e4m3(byte_at(tensors[plain], index)), step, lambda *_: E4M3_LEVELS, plain, fields,
    )  # fmt: skip


def fp4(name: str, key: str, scales: Tensors, step: Callable, method: str = "nvfp4") -> Example:
    def level(tensors: Tensors, index: Place) -> float:
        byte = tensors[key][index[0], index[1] // 2].item()
        return e2m1(byte >> 4 if index[1] % 2 else byte & 15)

    tensors = {key: integers(0, 256, 6, 32), **scales}
    return Example(name, method, tensors, (6, 64), level, step, lambda *_: E2M1_LEVELS)


def packed(name: str, bits: int, inputs: int, scales: Tensors, step: Callable, zero=lambda *_: 0) -> Example:
    half = 2 ** (bits - 1)

    def level(tensors: Tensors, index: Place) -> float:
        code = bits_at(tensors["a.weight_packed"][index[0]].tolist(), index[1], bits)
        return code - half - zero(tensors, index)

    def levels(tensors: Tensors, index: Place) -> list[int]:
        return [code - zero(tensors, index) for code in range(-half, half)]

    values = {"a.weight_packed": words(10, math.ceil(inputs * bits / 32)), "a.weight_shape": torch.tensor([10, inputs])}
    return Example(name, "packed", values | scales, (10, inputs), level, step, levels)


def packed_zero(tensors: Tensors, index: Place) -> int:
    return bits_at(tensors["a.weight_zero_point"][:, index[1] // 32].tolist(), index[0], 4) - 8


def int8(name: str, zeros: Tensors) -> Example:
    def zero(tensors: Tensors, index: Place) -> float:
        return tensors["a.weight_zero_point"][index[0], 0].item() if zeros else 0

    values = {"a.weight": integers(-128, 128, 10, 15, dtype=torch.int8), "a.weight_scale": random(10, 1)}
    return Example(
        name, "int8", values | zeros, (10, 15),
        lambda tensors, index: tensors["a.weight"][index].item() - zero(tensors, index),
        grid("a.weight_scale", 1, 15),
        lambda tensors, index: [code - zero(tensors, index) for code in range(-128 if zeros else -127, 128)],
    )  # fmt: skip


SCALE, INVERSE, EXPERTS = "a.weight_scale", "a.weight_scale_inv", "x.experts.down_proj"
NVFP4_SCALE = {SCALE: (200 * random(6, 4)).to(FP8)}
MODELOPT = NVFP4_SCALE | {"a.weight_scale_2": torch.tensor(0.0123)}
BLOCKS = {"config_groups": {"g": {"weights": {"block_structure": [4, 6]}}}}
EXAMPLES = [
    fp8("fp8, one scale", {SCALE: torch.tensor(0.3)}, lambda tensors, _: float(tensors[SCALE])),
    fp8("fp8, one scale in a list", {SCALE: torch.tensor([0.3])}, lambda tensors, _: float(tensors[SCALE])),
    fp8("fp8, rows", {SCALE: random(10)}, lambda tensors, index: float(tensors[SCALE][index[0]])),
    fp8("fp8, rows of compressed-tensors", {SCALE: random(10, 1).bfloat16()}, grid(SCALE, 1, 15)),
    fp8("fp8, blocks with edges", {INVERSE: random(3, 3)}, grid(INVERSE, 4, 6),
        quantization_config={"weight_block_size": [4, 6]}),
    fp8("fp8, blocks of compressed-tensors", {SCALE: random(3, 3)}, grid(SCALE, 4, 6), quantization_config=BLOCKS),
    fp8("fp8, blocks of 128", {INVERSE: random(2, 1)}, grid(INVERSE, 128, 128), shape=(130, 10)),
    fp8("fp8, blocks of ModelOpt", {SCALE: random(2, 1, 3, 1)},
        lambda tensors, index: float(tensors[SCALE][index[0] // 5, 0, index[1] // 5, 0])),
    fp8("fp8, powers of two", {"a.scale": integers(120, 130, 2, 3).view(torch.float8_e8m0fnu)},
        lambda tensors, index: 2.0 ** (byte_at(tensors["a.scale"], (index[0] // 5, index[1] // 5)) - 127),
        method="mxfp8"),
    fp8("fp8, fused experts", {f"{EXPERTS}_scale_inv": random(2, 2, 1)},
        lambda tensors, index: float(tensors[f"{EXPERTS}_scale_inv"][index[0], index[1] // 4, 0]),
        shape=(2, 8, 5), plain=EXPERTS),
    fp8("mxfp8", {SCALE: integers(110, 140, 4, 2)}, powers, shape=(4, 64), method="mxfp8"),
    fp4("nvfp4 of ModelOpt", "a.weight", MODELOPT, times_scale_2),
    fp4("nvfp4 of ModelOpt, AWQ", "a.weight", MODELOPT | {"a.pre_quant_scale": random(64, low=0.5).bfloat16()},
        lambda tensors, index: times_scale_2(tensors, index) * float(tensors["a.pre_quant_scale"][index[1]])),
    fp4("nvfp4 of compressed-tensors", "a.weight_packed",
        NVFP4_SCALE | {"a.weight_global_scale": torch.tensor([777.0])},
        lambda tensors, index: e4m3_groups(tensors, index) / float(tensors["a.weight_global_scale"])),
    fp4("mxfp4 of compressed-tensors", "a.weight_packed", {SCALE: integers(110, 140, 6, 2)}, powers, "mxfp4"),
    Example("mxfp4 of gpt-oss", "mxfp4",
            {f"{EXPERTS}_blocks": integers(0, 256, 2, 6, 2, 16), f"{EXPERTS}_scales": integers(110, 140, 2, 6, 2)},
            (2, 64, 6), expert_level, expert_step, lambda *_: E2M1_LEVELS, EXPERTS),
    packed("int4", 4, 60, {SCALE: random(10, 2).bfloat16()}, grid(SCALE, 1, 30)),
    packed("8 bits in int32", 8, 60, {SCALE: random(10, 1)}, grid(SCALE, 1, 60)),
    packed("int4 with zero points", 4, 64, {SCALE: random(10, 2), "a.weight_zero_point": words(2, 2)},
           grid(SCALE, 1, 32), packed_zero),
    packed("int4 in another order", 4, 64,
           {SCALE: random(10, 2), "a.weight_g_idx": torch.randperm(64, generator=RNG).to(torch.int32) % 2},
           lambda tensors, index: float(tensors[SCALE][index[0], tensors["a.weight_g_idx"][index[1]]])),
    int8("int8", {}),
    int8("int8 with zero points", {"a.weight_zero_point": integers(-9, 9, 10, 1, dtype=torch.int8)}),
]  # fmt: skip
BY_NAME = {example.name: example for example in EXAMPLES}
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


@every_example
def test_a_form_is_its_definition(tmp_path, example):
    """The result is the float64 value, rounded once to float32."""
    shards = save(tmp_path, example.tensors, example.config)
    weight, form = read_plain(shards, example.plain), find_form(shards, example.plain)
    assert weight.dtype == torch.float32 and form.method == example.method
    expected = example.reference(example.tensors)
    limit = 2**-23 if form.has("inputs") else 0.0  # two roundings
    assert ((weight.double() - expected.float().double()).abs() <= limit * expected.abs()).all()
    assert set(form.stored.values()) == set(example.tensors)
    view = PlainShards(shards)
    assert example.plain in view.files and view.shape(example.plain) == tuple(weight.shape)
    assert list(view.list_forms()) == [example.plain]


@every_example
def test_writing_rounds_to_the_nearest_level(tmp_path, example):
    shards = save(tmp_path / "first", example.tensors, example.config)
    form = find_form(shards, example.plain)
    deviation = example.reference(example.tensors).std().item() / 3  # so that no global scale is exceeded
    value = deviation * torch.randn(example.shape, generator=torch.Generator().manual_seed(3))
    tensors = write_like(form, value)
    assert {key: (entry.shape, entry.dtype) for key, entry in tensors.items()} == {
        key: (entry.shape, entry.dtype) for key, entry in example.tensors.items()
    }
    written = read_plain(save(tmp_path / "second", tensors, example.config), example.plain)
    assert torch.equal(written, example.reference(tensors).float()) or form.has("inputs")
    for index in example.places():
        step, wanted = example.step(tensors, index), value[index].item()
        nearest = min(abs(wanted - level * step) for level in example.levels(tensors, index))
        assert abs(wanted - written[index].item()) <= nearest + 1e-5 * abs(wanted), index
    assert (written - value).norm() < (0.2 if example.method in ("nvfp4", "mxfp4", "packed") else 0.05) * value.norm()


@pytest.mark.parametrize(
    ("magnitude", "code"),
    [(0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (2.6, 5), (3.5, 6), (5.0, 6), (5.1, 7), (9.0, 7)],
)
def test_ties_of_e2m1_go_to_even_codes(tmp_path, magnitude, code):
    """Hand-made bytes: the scale of 6 is 1, and the two codes of a byte are those of inputs 0 and 1, low one first."""
    tensors = {"a.weight_packed": torch.zeros(1, 16, dtype=torch.uint8), "a.weight_scale": torch.tensor([[127]])}
    tensors["a.weight_scale"] = tensors["a.weight_scale"].to(torch.uint8)
    value = torch.zeros(1, 32)
    value[0, :3] = torch.tensor([-min(magnitude, 6), 0.5, 6.0])
    stored = write_like(find_form(save(tmp_path, tensors), "a.weight"), value)
    assert stored["a.weight_scale"].item() == 127
    assert stored["a.weight_packed"][0, :2].tolist() == [8 + min(code, 7) | 1 << 4, 7]


def test_hand_made_bytes(tmp_path):
    """0xB2 is 1 and then -1.5; 0x7F of E4M3 is no number, 0x7E is 448; the exponent 129 is a factor of 4."""
    packed = torch.tensor([[0xB2] + 15 * [0]], dtype=torch.uint8)
    shards = save(
        tmp_path,
        {
            "a.weight": packed.clone(),
            "a.weight_scale": torch.tensor([[0x7E, 0x38]], dtype=torch.uint8).view(FP8),
            "a.weight_scale_2": torch.tensor(0.5),
            "b.weight_packed": packed.clone(),
            "b.weight_scale": torch.tensor([[129]], dtype=torch.uint8),
            "c.weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32),
            "c.weight_scale": torch.tensor([[2.0]]),
            "c.weight_shape": torch.tensor([1, 8]),
            "d.weight": torch.tensor([[0x7E, 0xFE, 0x01]], dtype=torch.uint8).view(FP8),
            "d.weight_scale": torch.tensor(2.0),
        },
    )
    assert read_plain(shards, "a.weight")[0, :3].tolist() == [224.0, -336.0, 0.0]
    assert read_plain(shards, "b.weight")[0, :3].tolist() == [4.0, -6.0, 0.0]
    assert read_plain(shards, "c.weight")[0].tolist() == [-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0]
    assert read_plain(shards, "d.weight")[0].tolist() == [896.0, -896.0, 2.0**-8]


def test_plain_weights_and_absent_ones(tmp_path):
    shards = save(
        tmp_path, {"a.weight": torch.ones(2, 3).bfloat16(), "a.k_scale": torch.ones(1), "n": torch.ones(1).int()}
    )
    form = find_form(shards, "a.weight")
    assert form.method == "plain" and read_plain(shards, "a.weight").dtype == torch.bfloat16
    assert write_like(form, torch.zeros(2, 3))["a.weight"].dtype == torch.bfloat16
    assert find_form(shards, "b.weight") is None
    assert set(PlainShards(shards).files) == {"a.weight", "n"}
    with pytest.raises(ValueError, match=r"has no tensor b\.weight: take a complete copy"):
        read_plain(shards, "b.weight")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("fp8, one scale", {"a.weight_scale": None}, r"its tensor a\.weight is quantised \(F8_E4M3\) and has no scale"),
        ("fp8, rows", {"a.weight_scale": torch.ones(9)}, r"a\.weight_scale has the shape \[9\], which does not fit"),
        ("fp8, rows", {"a.weight_scale": torch.ones(10, 4)}, r"\[10, 4\], which does not divide a\.weight"),
        ("fp8, rows", {"a.weight_scale": torch.ones(2, 10, 1)}, r"shape \[2, 10, 1\], which does not fit"),
        ("fp8, fused experts", {"x.experts.down_proj_scale_inv": torch.ones(2, 8)}, r"shape \[2, 8\]"),
        ("nvfp4 of ModelOpt", {"a.weight_scale_2": None}, r"a\.weight needs one of weight_scale_2"),
        ("nvfp4 of ModelOpt", {"a.weight_scale_2": torch.ones(2)}, r"a\.weight_scale_2 has the shape \[2\]"),
        ("nvfp4 of ModelOpt", {"a.weight_scale": torch.ones(6, 2).to(FP8)}, "has not one scale for each 16 inputs"),
        ("nvfp4 of ModelOpt", {"a.weight_scale": torch.ones(6, 4)}, r"a\.weight is of a form that .* \(U8\)"),
        ("nvfp4 of ModelOpt, AWQ", {"a.pre_quant_scale": torch.ones(3)}, r"a\.pre_quant_scale has not the 64 values"),
        ("mxfp4 of gpt-oss", {"x.experts.down_proj_scales": None}, r"down_proj_blocks is quantised \(U8\)"),
        ("int4", {"a.weight_shape": None}, r"a\.weight_packed is packed and has no weight_shape"),
        ("int4", {"a.weight_shape": torch.tensor([10, 99])}, r"a\.weight_packed has the shape \[10, 8\]"),
        ("int4 with zero points", {"a.weight_zero_point": torch.zeros(3)}, "weight_zero_point has"),
        ("fp8, rows", {"a.weight_zero_point": torch.ones(10)}, "weight_zero_point gives floating-point"),
        ("int4 in another order", {"a.weight_g_idx": torch.full((64,), 2)}, r"a\.weight_g_idx does not give"),
        ("fp8, one scale", {"a.qweight": torch.ones(2)}, r"a\.qweight is of a form that is not read here"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(tmp_path, name, change, sentence):
    example = BY_NAME[name]
    tensors = {key: value for key, value in (example.tensors | change).items() if value is not None}
    shards = save(tmp_path, tensors, example.config)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_plain(shards, example.plain)
    assert "\n" not in str(caught.value) and "take a complete copy, or one that" in str(caught.value)


def test_a_scale_that_no_weight_takes_is_refused(tmp_path):
    tensors = {"a.weight": torch.ones(2, 3), "a.weight_scale": torch.ones(2), "b.input_scale": torch.ones(1)}
    view = PlainShards(save(tmp_path, tensors))
    with pytest.raises(ValueError, match=r"no quantised weight takes its tensor a\.weight_scale"):
        view.list_forms()
    assert list(view.list_forms(lambda name: not name.startswith("a."))) == []


def test_a_global_scale_of_the_file_stays_and_limits_values(tmp_path):
    """Engines want one for several weights, such as those of queries, keys and values."""
    example = BY_NAME["nvfp4 of ModelOpt"]
    form = find_form(save(tmp_path, example.tensors), "a.weight")
    tensors = write_like(form, torch.full(example.shape, 1e6))
    assert torch.equal(tensors["a.weight_scale_2"], example.tensors["a.weight_scale_2"])
    largest = 6 * 448 * float(example.tensors["a.weight_scale_2"])
    assert math.isclose(example.reference(tensors).max().item(), largest, rel_tol=1e-6)
