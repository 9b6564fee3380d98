"""The folder of an export."""

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec.core import files
from specdec.export.engines import ExportForm

STITCHED_CARD = "MTP.md"  # a stitched model keeps its own README.md


def write_folder(form: ExportForm, out: Path, *, dtype: torch.dtype, num_drafts: int, card: str) -> int:
    """Makes the folder `out`. -> bytes of the tensors

    num_drafts: drafts in a round when the engine starts; card: text of the model card
    Raises ValueError, and writes nothing, if `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    if form.layout.fill_folder is not None:
        with files.replace_folder(out) as partial:
            size = form.layout.fill_folder(partial)
            (partial / STITCHED_CARD).write_text(card)
        return size
    num = form.limit_drafts(num_drafts)
    config = json.loads(json.dumps(form.layout.config).replace('"<num>"', str(num)))
    if "torch_dtype" in config and not form.layout.keeps_dtypes:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    tensor_dtype = None if form.layout.keeps_dtypes else dtype
    tensors = _cast_tensors(form.layout.tensors, tensor_dtype)
    try:
        with files.replace_folder(out) as partial:
            path = partial / form.layout.weights
            if path.suffix == ".safetensors":  # older transformers load nothing without this format
                safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
            else:
                torch.save(tensors, path)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name, value in form.layout.pickles.items():
                torch.save(_cast_tensors(value, tensor_dtype), partial / name)
            if form.layout.write_companions is not None:
                form.layout.write_companions(partial, num)
            (partial / "README.md").write_text(card)
    except RuntimeError as error:  # torch.save on a full disk
        raise files.describe_write_error(out, error) from error
    return sum(value.nbytes for value in tensors.values())


def _cast_tensors(value, dtype: torch.dtype | None):
    """Tensors, alone and in dictionaries, as they are written; other values as they are.

    dtype: None: each keeps its own
    """
    if isinstance(value, dict):
        return {key: _cast_tensors(entry, dtype) for key, entry in value.items()}
    if not isinstance(value, Tensor):
        return value
    return (value.to(dtype) if dtype and value.is_floating_point() else value).detach().cpu().contiguous()
