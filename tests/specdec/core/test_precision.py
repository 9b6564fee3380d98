"""The dtype of `auto` on pretended devices, and the faster of two products of few rows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.core import precision
from specdec.target.model import Target
from tests.support.targets import save_target
from tests.train.composing import compose_options
from train.prepare import build
from train.settings.decide import decide_precision
from train.settings.options import RunOptions


def tell(monkeypatch, *, onednn=True, avx512=False, amx=False, machine="x86_64", limit=None):
    """The answers of oneDNN, of the CPU, and of a user's limit of instruction sets."""
    operators = type("Operators", (), {"_is_mkldnn_bf16_supported": staticmethod(lambda: onednn)})
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit or "default")


@pytest.mark.parametrize(
    ("units", "dtype"),
    [
        ({"onednn": False}, "float32"),  # AVX2 only
        ({"avx512": True}, "bfloat16"),
        ({"amx": True}, "bfloat16"),
        ({}, "float32"),  # AVX-512 without units: oneDNN takes it, and converts
        ({"machine": "aarch64"}, "bfloat16"),
        ({"avx512": True, "limit": "AVX2"}, "float32"),
        ({"avx512": True, "limit": "avx512_core_bf16"}, "bfloat16"),
    ],
)
def test_a_cpu_says_what_it_computes_in(monkeypatch, units, dtype):
    tell(monkeypatch, **units)
    choice = precision.choose_dtype("cpu")
    assert choice.dtype == dtype and choice.reason


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float32")])
def test_a_gpu_computes_in_bfloat16_from_ampere_on(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    assert precision.choose_dtype("cuda").dtype == dtype


@pytest.mark.parametrize(("onednn", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_targets_are_loaded_in_what_the_device_computes_in(monkeypatch, tmp_path, onednn, dtype):
    tell(monkeypatch, onednn=onednn, avx512=onednn)
    name = save_target(tmp_path).name
    assert Target.load(name).dtype == Target.load_ends(name).dtype == dtype
    assert Target.load(name, dtype="float64").dtype == torch.float64
    for load in (Target.load, Target.load_ends):
        with pytest.raises(ValueError, match="dtype=half must be auto, or one of bfloat16"):
            load(name, dtype="half")


def decide_here(options: RunOptions) -> list[str]:
    facts = SimpleNamespace(choose_dtype=lambda: precision.choose_dtype("cpu"))
    return [decision.value for decision in decide_precision(options, facts)]


def test_a_run_takes_what_the_device_computes_in_unless_told(monkeypatch):
    tell(monkeypatch, onednn=False)
    assert decide_here(compose_options()) == ["fp32", "float32"]
    assert decide_here(compose_options("precision=bf16")) == ["bf16", "float32"]
    assert decide_here(compose_options("precision=bf16", "target.dtype=float64")) == ["bf16", "float64"]


def test_a_resumed_run_keeps_its_precision_on_another_machine(monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("precision: bf16\ntarget: {dtype: bfloat16}\n")
    tell(monkeypatch, onednn=False)
    for resume, kept in (("true", True), ("auto", True), ("false", False)):
        options = build.fill_from_first_launch(compose_options(f"resume={resume}"), tmp_path)
        assert decide_here(options) == (["bf16", "bfloat16"] if kept else ["fp32", "float32"])


# Products of few rows


@pytest.fixture(params=[True, False])
def faster(monkeypatch, request):
    """True if the transposed product is pretended to be faster. -> the measured shapes"""
    asked = []
    monkeypatch.setattr(precision, "is_transposed_faster", lambda *shape: asked.append(shape[:3]) or request.param)
    return asked


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (2, 2), (5,), (0,)])
def test_both_ways_give_the_same(faster, shape, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=bias), nn.Linear(512, 8))
    x = torch.randn(*shape, 512)
    wanted = model(x)
    precision.prepare_few_rows(model)
    with torch.no_grad():
        found = model(x)
    torch.testing.assert_close(found, wanted.detach())
    rows = x.numel() // 512
    assert faster == ([(rows, 512, 512)] if 2 <= rows <= 4 else [])  # the small matrix is left alone


def test_gradients_other_dtypes_traces_and_several_processes_keep_the_usual_product(faster, monkeypatch):
    layer = nn.Linear(512, 512)
    precision.prepare_few_rows(layer)
    layer(torch.randn(3, 512, requires_grad=True)).sum().backward()
    with torch.no_grad():
        precision.multiply_few_rows(torch.randn(3, 512).double(), layer.weight.double())
        precision.multiply_few_rows(torch.randn(3, 512).bfloat16(), layer.weight.bfloat16())
        graph = make_fx(lambda x: precision.multiply_few_rows(x, layer.weight.detach()))(torch.randn(3, 512)).graph
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # those of one run multiply alike
        precision.multiply_few_rows(torch.randn(3, 512), layer.weight)
    assert faster == []
    assert not any("mm" in str(node.target) and node.args[0].op == "get_attr" for node in graph.nodes)


def test_what_is_faster_is_measured():
    assert precision.is_transposed_faster.__wrapped__(3, 512, 512, 1) in (True, False)
