"""The folder of an export; and a published folder in any known layout, read as a head of ours."""

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec import checkpoint
from specdec.core import files
from specdec.core.untrusted import inside, read_json, read_pickle, read_tensors
from specdec.export import block_drafter, eagle, medusa, mtp
from specdec.export.cards import Provenance, make_card
from specdec.export.engines import ExportForm
from specdec.heads.base import Head
from specdec.target.model import Target

# Of a Speculators container, by type: a field that it must have
CONTAINERS = {
    "eagle3": "norm_before_residual",
    "peagle": "mask_token_id",
    "dflash": None,
    "dspark": "sample_from_anchor",
}
WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.FILE, "medusa_lm_head.safetensors")


def write_export(form: ExportForm, out: Path, *, dtype: torch.dtype, provenance: Provenance) -> int:
    """Makes the folder `out`. -> bytes of the tensors. Raises ValueError, and writes nothing, if `out` exists."""
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    if form.layout.folder is not None:
        with files.whole_folder(out) as partial:
            size = form.layout.folder(partial)
            (partial / "MTP.md").write_text(make_card(provenance, {form.name: form}, out=str(out)))
        return size
    num = form.num_drafts(provenance.num_drafts)
    config = json.loads(json.dumps(form.layout.config).replace('"<num>"', str(num)))
    if "torch_dtype" in config:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    tensors = _cast(form.layout.tensors, dtype)
    try:
        with files.whole_folder(out) as partial:
            # older transformers load nothing without this format
            safetensors.torch.save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name, value in form.layout.pickles.items():
                torch.save(_cast(value, dtype), partial / name)
            if form.layout.more is not None:
                form.layout.more(partial)
            (partial / "README.md").write_text(make_card(provenance, {form.name: form}, out=str(out)))
    except RuntimeError as error:  # torch.save on a full disk
        raise files.unwritable(out, error) from error
    return sum(value.nbytes for value in tensors.values())


def _cast(value, dtype: torch.dtype):
    """Tensors, alone and in dictionaries, as they are written; other values as they are."""
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    if not isinstance(value, Tensor):
        return value
    return (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()


def read_published(folder: Path, target: Target) -> tuple[dict, Head]:
    """-> the drafter's class and arguments, as checkpoint.save takes them, and the drafter, in the dtype of its file

    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}: give source= a local copy of a published head.")
    path = inside(folder, "config.json")
    config = checkpoint.read_json(path, what="A published head is a folder with config.json and its weights")
    # older versions of transformers saved rotary frequencies, which follow from the configuration
    tensors = {name: value for name, value in _tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    try:
        spec, tensors = _read_family(folder, config, tensors, target)
        dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())  # nothing is rounded
        return spec, checkpoint.build(spec, tensors, target, dtype=dtype).eval()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except Exception as error:  # fields and tensors of a file may fail in any way
        what = error.args[0] if isinstance(error, KeyError) else error
        reason = f"{what} is missing" if isinstance(error, KeyError) else " ".join(str(what).split())
        raise ValueError(f"{folder}: its config.json and weights do not make a drafter ({reason}).") from error


def _read_family(folder: Path, config: dict, tensors: dict[str, Tensor], target: Target) -> tuple[dict, dict]:
    if "model.embed_tokens.weight" in tensors:
        raise ValueError("This is a whole language model: train it further as a draft model, with model=DIR.")
    if "drafter" in config:
        raise ValueError(
            "This is format=safetensors, which is for other readers: use the checkpoint that it was exported from."
        )
    if config.get("speculators_model_type") is not None:
        config = {**config.get("transformer_layer_config", {}), **config}
        _check_container(config)
    if any("linear" in name or name.startswith("blocks.") for name in tensors):
        return medusa.read_medusa(tensors, target)
    if any("mtp_layers" in name for name in tensors):
        return mtp.read_mtp(config, tensors, target)
    if "layers.0.self_attn.q_norm.weight" in tensors and "hidden_norm.weight" in tensors:
        return block_drafter.read_block_drafter(config, tensors, _mask(folder), target)
    if "norm.weight" in tensors and "fc.weight" in tensors:
        return eagle.read_eagle3(config, tensors, target)
    if "fc.weight" in tensors:
        return eagle.read_eagle1(config, tensors, _token_map(folder), target)
    raise ValueError(
        f"its tensors ({', '.join(sorted(tensors)[:3])}, ...) belong to none of the known layouts: EAGLE-1, EAGLE-3, P-EAGLE, Medusa, "
        "DFlash, DSpark, MTP in MiMo's layout, and the Speculators container."
    )


def _check_container(config: dict) -> None:
    """Raises ValueError for a Speculators container that is unknown, or that its readers understand differently."""
    kind = config["speculators_model_type"]
    if kind not in CONTAINERS:
        raise ValueError(f"Speculators of type {kind} cannot be imported; {', '.join(CONTAINERS)} can.")
    needed = CONTAINERS[kind]
    if needed is not None and config.get(needed) is None:
        raise ValueError(f"write {needed} into config.json: vLLM and Speculators guess differently without it.")


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors.index.json").exists():
        places = read_json(inside(folder, "model.safetensors.index.json")).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder}: model.safetensors.index.json has no weight_map.")
        files = [inside(folder, str(name)) for name in sorted(set(map(str, places.values())))]
        return {key: value for file in files for key, value in read_tensors(file).items()}
    for name in WEIGHTS:
        if (folder / name).exists():
            path = inside(folder, name)
            if name.endswith(".safetensors"):
                return read_tensors(path)
            content = read_pickle(path)
            if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
                return content
            raise ValueError(f"{path} holds something other than named tensors.")
    raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")


def _mask(folder: Path) -> Tensor | None:
    """The embedding of the mask, [D], if it has a file."""
    if not (folder / block_drafter.MASK).exists():
        return None
    state = read_pickle(inside(folder, block_drafter.MASK))
    return (state["embedding"] if isinstance(state, dict) else state).reshape(-1)


def _token_map(folder: Path) -> Tensor | None:
    """The ids of the draft vocabulary, [W] increasing, if they have a file."""
    if not (folder / eagle.TOKEN_MAP).exists():
        return None
    return torch.as_tensor(read_pickle(inside(folder, eagle.TOKEN_MAP)), dtype=torch.long).sort().values
