"""A tiny Llama in a folder, for tests of loading."""

import json
from pathlib import Path

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.heads.eagle import Eagle
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target

SIZES = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2}  # fmt: skip
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
          "image_size": 16, "patch_size": 8}  # fmt: skip
PROMPT = [5, 9, 2, 44, 17]
SHAPES = (None, TreeShape(3, 1, 3), TreeShape(3, 3, 7))  # no drafts, a chain, a tree


def save(folder: Path, **arguments) -> Path:
    """A tiny Llama -> folder"""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **arguments})).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields) -> Path:
    """Replaces fields of config.json -> folder"""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def edit_tensors(folder: Path, change) -> Path:
    """Changes the tensors of model.safetensors by a function of their dict -> folder"""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    path.unlink()  # the file may be mapped
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(contiguous, path, metadata={"format": "pt"})
    return folder


def check_decoding(target: Target, shapes=SHAPES) -> None:
    """Plain decoding, a chain and a tree write what the model's own generate writes."""
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    written = target.model.generate(torch.tensor([PROMPT]), attention_mask=mask, do_sample=False, max_new_tokens=12)
    head = Eagle(target, vocab=torch.arange(0, 61, 2)).to(target.dtype)
    for shape in shapes:
        decoder = Decoder(target, HeadProposer(head, shape) if shape else None, sampling=Sampling(0), stop=set())
        assert decoder.generate([PROMPT], 12).tokens[0] == written[0, len(PROMPT) :].tolist()
