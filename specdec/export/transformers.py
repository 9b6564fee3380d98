"""A draft model as an ordinary transformers folder, for `generate(assistant_model=...)` and for servers."""

import shutil
from pathlib import Path

import torch
import transformers
from torch import Tensor

from specdec import checkpoint
from specdec.drafter import Drafter
from specdec.heads.draft import Draft
from specdec.target import load_tokenizer


def export(drafter: Drafter, source: Path, out: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Writes config, safetensors, generation config and the target's tokenizer into `out`, and reads them back.

    -> the model's tensors
    The target's embeddings are written where the draft borrows them, and all V rows of the output layer even if the
    draft was trained on fewer: there is no draft vocabulary in this format.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    if not isinstance(drafter, Draft):
        raise ValueError(
            f"{source} holds a {type(drafter).__name__}, which is no language model of its own: format=transformers is "
            "for head=draft. Use format=safetensors."
        )
    model = drafter.language_model(dtype)
    tokenizer = load_tokenizer(drafter.target.name)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    read = transformers.AutoModelForCausalLM.from_pretrained(partial, dtype=dtype).state_dict()
    written = model.state_dict()
    assert read.keys() == written.keys() and all(torch.equal(read[name], written[name].cpu()) for name in read)
    partial.rename(out)
    return checkpoint.read_tensors(out / "model.safetensors")
