"""The layouts of Medusa heads: vLLM's names and those of the reference code (docs/file-formats.md, section 7)."""

import re

import torch
from torch import Tensor

from specdec.export.layouts import base
from specdec.export.layouts.base import Layout, Shapes
from specdec.heads.medusa import Medusa
from specdec.target.model import Target

FILE = "medusa_lm_head.pt"
ADAPTED = (
    "Medusa-2 heads were trained with an adapted target and draft badly beside the original one. Export both with "
    "merged_target=DIR, which writes the adapted model for the engine to serve."
)
FIELDS = frozenset(
    "architectures model_type hidden_size vocab_size num_heads num_hidden_layers medusa_fc_bias "
    "original_lm_head torch_dtype".split()
)
REFERENCE_FIELDS = frozenset(
    "architectures model_type hidden_size vocab_size medusa_num_heads medusa_num_layers medusa_fc_bias "
    "base_model_name_or_path torch_dtype".split()
)


def vllm(drafter: Medusa) -> Layout:
    """Borrowed LM heads become one for all, over all V tokens: vLLM 0.32 cannot load a `token_map`.

    Raises ValueError for LM heads of their own over a draft vocabulary.
    """
    own = len(drafter.lm_heads) > 0
    check_whole(drafter)
    tensors = _blocks(drafter, "blocks.{}.layers.{}.")
    if own:
        tensors |= {f"lm_heads.{name}": value for name, value in drafter.lm_heads.state_dict().items()}
    else:
        tensors["lm_head.weight"] = drafter.target.lm_head.weight
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        "num_heads": drafter.depth,
        "num_hidden_layers": len(drafter.blocks[0]),  # type: ignore[arg-type]
        "medusa_fc_bias": True,
        "original_lm_head": not own,
        "torch_dtype": None,
    }
    return Layout(tensors, config, shapes(config), FIELDS)


def check_whole(drafter: Medusa) -> None:
    if drafter.lm_heads and drafter.draft_to_target is not None:
        raise ValueError(
            "Engines run Medusa's own LM heads over the whole vocabulary only. Train with vocab_size=null or own_output=false."
        )


def _blocks(drafter: Medusa, prefix: str) -> dict[str, Tensor]:
    tensors = {}
    for name, value in drafter.blocks.state_dict().items():  # 0.1.linear.weight: head 0, block 1
        number, layer, _, kind = name.split(".")
        tensors[prefix.format(number, layer) + kind] = value
    return tensors


def shapes(config: dict) -> Shapes:
    width, num, rows = config["hidden_size"], config["num_heads"], config["vocab_size"]
    manifest: Shapes = {}
    for number in range(num):
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{number}.layers.{layer}."
            manifest |= {f"{name}weight": (width, width), f"{name}bias": (width,)}
    heads = ["lm_head.weight"] if config["original_lm_head"] else [f"lm_heads.{n}.weight" for n in range(num)]
    return manifest | dict.fromkeys(heads, (rows, width))


def reference(drafter: Medusa) -> Layout:
    """FasterDecoding's layout, which vLLM and TGI read too: an LM head for each Medusa head, over the whole vocabulary.

    Raises ValueError for a head of several blocks, which share their weights there, and for LM heads of their own over a
    draft vocabulary.
    """
    if len(drafter.blocks[0]) > 1:
        raise ValueError(
            "The reference code repeats one block where a head has several. Train with num_blocks=1, or take format=vllm."
        )
    check_whole(drafter)
    tensors = _blocks(drafter, "{}.{}.linear.")
    own = [head.weight for head in drafter.lm_heads] or [drafter.target.lm_head.weight] * len(drafter.blocks)
    # without clones, safetensors refuses the shared storage
    tensors |= {f"{number}.1.weight": weight.detach().clone() for number, weight in enumerate(own)}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        "medusa_num_heads": drafter.depth,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "base_model_name_or_path": drafter.target.name,
        "torch_dtype": None,
    }
    return Layout(tensors, config, reference_shapes(config), REFERENCE_FIELDS, {FILE: tensors})


def reference_shapes(config: dict) -> Shapes:
    width = config["hidden_size"]
    manifest: Shapes = {}
    for number in range(config["medusa_num_heads"]):
        manifest |= {
            f"{number}.0.linear.weight": (width, width),
            f"{number}.0.linear.bias": (width,),
            f"{number}.1.weight": (config["vocab_size"], width),
        }
    return manifest


def read(config: dict, tensors: dict[str, Tensor], target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.medusa.Medusa`, its tensors. Raises ValueError if they are no Medusa heads of this target.

    Reads both layouts. LM heads that are copies of the target's are not kept.
    """
    own: dict[str, Tensor] = {}
    heads: dict[int, Tensor] = {}
    shared = vocab = None
    for name, value in tensors.items():
        name = name.removeprefix("medusa_heads.")
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
        block = block or re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        head = re.fullmatch(r"(\d+)\.\d+\.weight", name) or re.fullmatch(r"lm_heads\.(\d+)\.weight", name)
        if block:
            own[f"blocks.{block[1]}.{block[2]}.linear.{block[3]}"] = value
        elif head:
            heads[int(head[1])] = value
        elif name == "lm_head.weight":
            shared = value
        elif name == "token_map":
            vocab = value
        else:
            raise ValueError(f"{name} belongs to no Medusa head.")
    if not own:
        raise ValueError("There are no Medusa heads among the tensors.")
    num = 1 + max(int(name.split(".")[1]) for name in own)
    num_blocks = 1 + max(int(name.split(".")[2]) for name in own)
    for name in [name for name in own if name.endswith(".weight")]:
        own.setdefault(name.replace("weight", "bias"), torch.zeros_like(own[name][:, 0]))
    if vocab is not None:  # a draft vocabulary is increasing here
        vocab, order = vocab.sort()
        heads = {number: value[order] for number, value in heads.items()}
        shared = None if shared is None else shared[order]
    original = target.lm_head.weight if vocab is None else target.lm_head.weight[vocab]
    borrowed = all(
        base.is_copy(value, original) for value in [*heads.values(), *([shared] if shared is not None else [])]
    )
    if not borrowed:
        each = heads or dict.fromkeys(range(num), shared)
        own |= {f"lm_heads.{number}.weight": value for number, value in each.items() if value is not None}
    width, rows = target.width, len(original)
    shapes = {
        f"blocks.{n}.{b}.linear.{kind}": (width, width) if kind == "weight" else (width,)
        for n in range(num)
        for b in range(num_blocks)
        for kind in ("weight", "bias")
    }
    shapes |= {} if borrowed else {f"lm_heads.{number}.weight": (rows, width) for number in range(num)}
    base.check_tensors(own, shapes)
    if vocab is not None:
        own["draft_to_target"] = vocab
    arguments = {"num_heads": num, "num_blocks": num_blocks, "own_output": not borrowed}
    return {"_target_": "specdec.heads.medusa.Medusa", **arguments}, own
