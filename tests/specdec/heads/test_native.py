"""MTP modules of a target's checkpoint are loaded: names, order of the concatenated inputs, biases, refusals."""

import pytest
import safetensors.torch
import torch

from specdec.checkpoint import read_tensors
from specdec.heads.mtp import MTP
from specdec.target.model import Target
from tests.support import make_target

MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
DEEPSEEK = {"norm": "shared_head.norm"}


def add_modules(folder, modules: list[MTP], layout: str) -> None:
    """Adds MTP modules to a target's folder, under the names that the target's family uses."""
    tensors = read_tensors(folder / "model.safetensors")
    for number, module in enumerate(modules):
        for name, value in module.state_dict().items():
            first, _, rest = name.partition(".")
            if layout == "mimo":
                if name == "eh_proj.weight":
                    value = torch.cat([value[:, 32:], value[:, :32]], dim=1)  # hidden first
                first = MIMO.get(first, first)
                prefix = f"model.mtp_layers.{number}."
            else:
                first = DEEPSEEK.get(first, first)
                prefix = f"model.layers.{8 + number}."
            tensors[prefix + (rest if first == "block" else f"{first}.{rest}")] = value.contiguous()
        if layout == "deepseek":
            tensors[f"model.layers.{8 + number}.embed_tokens.weight"] = torch.zeros(1)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
@pytest.mark.parametrize("bias", [False, True])
def test_native_modules_are_loaded(tmp_path, layout, bias):
    target = make_target(61)
    target.model.save_pretrained(tmp_path)
    head = MTP(target, num_modules=2, attention_bias=bias)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter)
    add_modules(tmp_path, list(head.modules_by_depth), layout)
    loaded = MTP(Target(target.model, name=str(tmp_path)), num_modules=2, native=True)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.arguments() == {"native": False, "attention_bias": bias} and not loaded.solve([])
    with pytest.raises(ValueError, match="ships 2 MTP modules"):
        MTP(Target(target.model, name=str(tmp_path)), num_modules=3, native=True)


def test_missing_and_unknown_native_modules_are_refused(tmp_path):
    target = make_target(61)
    target.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ships no MTP modules.*native=false"):
        MTP(Target(target.model, name=str(tmp_path)), native=True)
    module = MTP(target).modules_by_depth[0]
    module.block.mlp = torch.nn.Linear(3, 3)  # not the dense block of this project
    add_modules(tmp_path, [module], "mimo")
    with pytest.raises(ValueError, match=r"(?s)not made of one dense block.*native=false"):
        MTP(Target(target.model, name=str(tmp_path)), native=True)
