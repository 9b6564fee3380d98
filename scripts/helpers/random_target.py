"""Targets with random weights, made on the device in bfloat16: figures of speed and memory need no file of real ones."""

import re
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec.target import attention
from specdec.target.model import Target


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in vars(self).items())


SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 14336, 128256),  # Llama-3.1-8B
    "1b": Shape(2048, 16, 32, 8, 8192, 128256),  # Llama-3.2-1B, but for its tied embedding
    "tiny": Shape(64, 8, 4, 2, 128, 256),
}


def read_shape(text: str) -> Shape:
    """A key of SHAPES, or sizes as hidden4096-layers32-heads32-kv_heads8-intermediate14336-vocab128256, in any order.

    Raises ValueError for anything else.
    """
    if text in SHAPES:
        return SHAPES[text]
    parts = [re.fullmatch(r"([a-z_]+)(\d+)", part) for part in text.split("-")]
    sizes = {part[1]: int(part[2]) for part in parts if part}
    if len(sizes) != len(parts) or set(sizes) != set(Shape.__dataclass_fields__) or min(sizes.values()) < 1:
        raise ValueError(f"shape={text} must be one of {', '.join(SHAPES)}, or sizes such as {SHAPES['8b']}.")
    shape = Shape(**sizes)
    if shape.hidden % (2 * shape.heads) or shape.heads % shape.kv_heads:
        raise ValueError(f"shape={text}: hidden must be an even multiple of heads, and heads a multiple of kv_heads.")
    return shape


def random_target(shape: Shape, *, device: torch.device | str, positions: int, dtype: str = "bfloat16") -> Target:
    """positions: the longest text that it has to read"""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=max(positions, 8192),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention.NAME
        )
    return Target(model, name=f"random Llama {shape}")
