"""Medusa heads: vLLM's names, those of the reference code, and the way back (docs/file-formats.md, section 7)."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.family import Clause, EngineRules, ExportFamily, PublishedFiles
from specdec.export.layout import Layout, Parsed, Tensors
from specdec.heads.medusa import Medusa, Medusa2
from specdec.target.model import Target

HEADS_FILE = "medusa_lm_head.pt"  # the weights of the reference code
VLLM_NOTE = Clause("vLLM drafts the chain of the heads' best guesses, not their tree. Since 0.33 it has no Medusa.")
ADAPTED_REFUSAL = Clause(
    "Medusa-2 heads were trained with an adapted target and draft badly beside the original one. Export both with "
    "merged_target=DIR, which writes the adapted model for the engine to serve."
)
# The names of both layouts: vLLM's, and those of the reference code
BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
LM_HEAD = re.compile(r"(\d+)\.\d+\.weight|lm_heads\.(\d+)\.weight")


def write_vllm(drafter: Medusa) -> Layout:
    """Medusa in vLLM's layout. Borrowed LM heads become one for all, over all V tokens: vLLM 0.32 loads no `token_map`.

    Raises ValueError for LM heads of their own over a draft vocabulary.
    """
    has_own_heads = len(drafter.lm_heads) > 0
    _check_vocab(drafter)
    tensors = _write_blocks(drafter, "blocks.{}.layers.{}.")
    if has_own_heads:
        tensors |= {f"lm_heads.{name}": value for name, value in drafter.lm_heads.state_dict().items()}
    else:
        tensors["lm_head.weight"] = drafter.target.lm_head.weight
    counts = {"num_heads": drafter.depth, "num_hidden_layers": len(drafter.blocks[0])}
    config = _make_config(drafter, counts, {"original_lm_head": not has_own_heads})
    return Layout(tensors, config)


def write_reference(drafter: Medusa) -> Layout:
    """Medusa in FasterDecoding's layout, which vLLM and TGI read, too, with an LM head [V, D] for each Medusa head.

    Raises ValueError for a head of several blocks, which share their weights there, and for LM heads of their own over
    a draft vocabulary.
    """
    if len(drafter.blocks[0]) > 1:
        raise ValueError(
            "The reference code repeats one block where a head has several. Train with num_blocks=1, or take "
            "format=vllm."
        )
    _check_vocab(drafter)
    tensors = _write_blocks(drafter, "{}.{}.linear.")
    lm_heads = [head.weight for head in drafter.lm_heads] or [drafter.target.lm_head.weight] * len(drafter.blocks)
    # without clones, safetensors refuses the shared storage
    tensors |= {f"{number}.1.weight": weight.detach().clone() for number, weight in enumerate(lm_heads)}
    counts = {"medusa_num_heads": drafter.depth, "medusa_num_layers": 1}
    config = _make_config(drafter, counts, {"base_model_name_or_path": drafter.target.name})
    return Layout(tensors, config, {HEADS_FILE: tensors})


def _make_config(drafter: Medusa, counts: dict, layout_fields: dict) -> dict:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        **counts,
        "medusa_fc_bias": True,
        **layout_fields,
        "torch_dtype": None,
    }


def _check_vocab(drafter: Medusa) -> None:
    if drafter.lm_heads and drafter.draft_to_target is not None:
        raise ValueError(
            "Engines run Medusa's own LM heads over the whole vocabulary only. Train with vocab_size=null or "
            "own_output=false."
        )


def _write_blocks(drafter: Medusa, prefix: str) -> Tensors:
    tensors = {}
    for name, value in drafter.blocks.state_dict().items():  # 0.1.linear.weight: head 0, block 1
        number, block, _, kind = name.split(".")
        tensors[prefix.format(number, block) + kind] = value
    return tensors


def map_medusa_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name. One LM head for all is the first one.

    Raises ValueError for other names.
    """
    own_names = {}
    for name in names:
        short_name = name.removeprefix("medusa_heads.")
        if short_name in ("lm_head.weight", "token_map"):
            own_names[name] = {"token_map": "draft_to_target"}.get(short_name, "lm_heads.0.weight")
        elif head := LM_HEAD.fullmatch(short_name):
            own_names[name] = f"lm_heads.{head[1] or head[2]}.weight"
        elif block := BLOCK.fullmatch(short_name):
            own_names[name] = f"blocks.{block[1] or block[3]}.{block[2] or block[4]}.linear.{block[5]}"
        else:
            raise ValueError(f"{name} belongs to no Medusa head.")
    return own_names


def read_medusa(files: PublishedFiles, target: Target) -> Parsed:
    """The arguments of `heads.medusa.Medusa`, and its tensors, from both layouts.

    LM heads like the target's are left out.
    Raises ValueError if they are no Medusa heads of this target.
    """
    head = {name: files.tensors[public] for public, name in map_medusa_names(files.flat, files.tensors).items()}
    blocks = _select_tensors(head, "blocks.")
    if not blocks:
        raise ValueError("There are no Medusa heads among the tensors.")
    numbers = [tuple(map(int, name.split(".")[1:3])) for name in blocks]  # of the head, and of its block
    num_heads, num_blocks = (1 + max(column) for column in zip(*numbers))
    for name in _select_tensors(blocks, "", ".weight"):  # without biases they are zero
        blocks.setdefault(name.replace("weight", "bias"), torch.zeros_like(blocks[name][:, 0]))
    lm_heads, vocab = _sort_vocabulary(_select_tensors(head, "lm_heads."), head.get("draft_to_target"))
    original = layout.select_lm_head(target, vocab)
    own_output = not all(layout.is_copy(value, original) for value in lm_heads.values())
    if own_output:
        shared = any(name.endswith("lm_head.weight") for name in files.tensors)
        blocks |= _share_lm_head(lm_heads, num_heads) if shared else lm_heads
    if vocab is not None:
        blocks["draft_to_target"] = vocab
    arguments = {"num_heads": num_heads, "num_blocks": num_blocks, "own_output": own_output}
    return {"_target_": MEDUSA.head, **arguments}, blocks


def _select_tensors(tensors: Tensors, prefix: str, ending: str = "") -> Tensors:
    return {name: value for name, value in tensors.items() if name.startswith(prefix) and name.endswith(ending)}


def _sort_vocabulary(lm_heads: Tensors, vocab: Tensor | None) -> tuple[Tensors, Tensor | None]:
    """The LM heads and the draft vocabulary [W] with increasing ids, as they are here."""
    if vocab is None:
        return lm_heads, None
    vocab, order = vocab.sort()
    return {name: value[order] for name, value in lm_heads.items()}, vocab


def _share_lm_head(lm_heads: Tensors, num_heads: int) -> Tensors:
    """The first LM head for each Medusa head."""
    return {f"lm_heads.{number}.weight": lm_heads["lm_heads.0.weight"] for number in range(num_heads)}


def is_medusa(files: PublishedFiles) -> bool:
    """Whether the tensors are those of Medusa heads."""
    return any("linear" in name or name.startswith("blocks.") for name in files.tensors)


MEDUSA = ExportFamily(
    kind="medusa",
    head_class=Medusa,
    labels={"medusa": "Medusa"},
    inputs="last_state",
    recognises=is_medusa,
    read=read_medusa,
    public_names=map_medusa_names,
    draft_vocabulary=False,
    writers={"medusa": write_reference, "vllm": write_vllm},
    engines={"vllm": EngineRules(notes=[VLLM_NOTE])},
)
ADAPTED_RULES = EngineRules([ADAPTED_REFUSAL])
MEDUSA2 = ExportFamily(
    kind="medusa2",
    head_class=Medusa2,
    labels={},
    inputs="last_state",
    engines={"medusa": ADAPTED_RULES, "vllm": ADAPTED_RULES},
)
FAMILIES = (MEDUSA2, MEDUSA)  # a Medusa-2 head is a Medusa head, too
