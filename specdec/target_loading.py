"""Loads a target's model and its tokenizer from a folder or the Hugging Face Hub, and refuses what cannot be a target."""

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import attention
from specdec.layer_kinds import check_supported

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}


def load_model(name: str, *, dtype: str, revision: str | None) -> PreTrainedModel:
    """name: a folder, or a name on the Hugging Face Hub; dtype: one of DTYPES. Raises ValueError with what to do."""
    config = _from_pretrained(AutoConfig, name, revision=revision)
    check_supported(config.get_text_config(), name)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} must be one of {', '.join(DTYPES)}.")
    # sdpa is required: eager attention would add a boolean mask to the scores instead of applying it.
    return _from_pretrained(
        AutoModelForCausalLM, name, revision=revision, dtype=DTYPES[dtype], attn_implementation=attention.NAME
    )


def load_tokenizer(name: str, *, revision: str | None = None) -> transformers.PreTrainedTokenizerBase:
    """name: a folder, or a name on the Hugging Face Hub. Raises ValueError with what to do."""
    return _from_pretrained(AutoTokenizer, name, revision=revision)


def _from_pretrained(factory, name: str, **kwargs):
    looks_local = name.startswith((".", "/", "~", "targets/", "checkpoints/")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"The folder {name} does not exist. Give the folder of a model, or the model's name on the Hugging Face Hub."
        )
    try:
        return factory.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} could not be loaded as a causal language model ({_first_line(error)}). Give a folder "
            "saved by save_pretrained (config.json, safetensors, tokenizer), or a Hub name with the network in reach."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
