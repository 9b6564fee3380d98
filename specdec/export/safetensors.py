"""Our own tensors under their own names, with everything a reader needs to know in config.json."""

from pathlib import Path

import torch
from torch import Tensor

from specdec import checkpoint
from specdec.drafter import Drafter


def export(drafter: Drafter, source: Path, out: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Writes model.safetensors and config.json into `out` and reads them back. -> the tensors

    The draft vocabulary becomes the two maps that serving engines expect: d2t [W] int64, an offset
    (target id = draft id + d2t[draft id]), and t2d [V] bool.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    tensors = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in drafter.state_dict().items()
    }
    vocab = tensors.pop("draft_to_target", None)
    if vocab is not None and drafter.target_to_draft is not None:
        tensors["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
        tensors["t2d"] = drafter.target_to_draft >= 0
    document = checkpoint.read_json(source / "drafter.json")
    config = {
        **document,
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    checkpoint.write_folder(out, tensors={"model.safetensors": tensors}, documents={"config.json": config})
    read = checkpoint.read_tensors(out / "model.safetensors")
    assert read.keys() == tensors.keys() and all(
        torch.equal(read[name], value.cpu()) for name, value in tensors.items()
    )
    return read
