"""Checks that SGLang's own classes, on a CPU, read a folder of format=sglang: each tensor finds its parameter.

    python -m benchmarks.engines.sglang_names exported

Nothing is served: SGLang needs a GPU. `make engines` unpacks its wheel without what it requires; modules that are
missing then stand empty while its code is imported, and only its own code decides what is read. The second half runs
in that environment.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ENGINES = Path(__file__).parents[2] / "engines"
EMPTY = ("orjson", "IPython", "torchvision", "gguf")  # required by SGLang, needless here
MASK = "mask_embedding.pt"


def read_folder(folder: Path, *, engines: Path = ENGINES) -> dict[str, Any]:
    """Returns SGLang's reading of the folder.

    model: name of its class; places: tensors that fill each parameter, in the order of its rows
    unset: parameters that nothing fills, which come from the target; unused: tensors that are not read
    tokens: target ids of the draft vocabulary, or None
    A block drafter also has drafts (of a round), layers (target layers whose outputs it reads), mask (its token), and
    merged: the mask's embedding, as SGLang puts it into the target's table, or None.
    Raises ValueError if SGLang is not there, or refuses the folder.
    """
    if not (engines / "sglang").is_dir():
        raise ValueError("SGLang's wheel is not unpacked: `make engines` does it (40 MB).")
    command = [str(engines / "bin" / "python"), "-P", __file__, str(folder), "--wheel", str(engines / "sglang")]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    if process.returncode:
        raise ValueError(
            f"SGLang does not read {folder}: {(process.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return json.loads(process.stdout.splitlines()[-1])


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of EMPTY that are not installed, with everything in them."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in EMPTY else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: MagicMock()  # type: ignore[method-assign]
        return module

    def exec_module(self, module):
        pass


def _prepare(wheel: str, scratch: str) -> None:
    """One process, one part, no server."""
    import transformers.models.auto.processing_auto  # noqa: F401  # it asks for torchvision before that seems to be there

    sys.path.insert(0, wheel)
    sys.meta_path.append(EmptyModules())
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="none", device="cpu"), role="names", ranks=SpawnRanks(world_rank=0))
    given = {"backend": "gloo", "distributed_init_method": f"file://{scratch}/store"}
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, **given)
    parallel_state.initialize_model_parallel(backend="gloo")


def _class_of(config: Any, wheel: str) -> type:
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._config_draft_model(MagicMock(is_draft_model=True, hf_config=config, hf_text_config=config))
    (name,) = config.architectures
    for path in Path(wheel, "sglang", "srt", "models").glob("*.py"):
        if re.search(rf"^class {name}\b", path.read_text(), re.M):
            return getattr(importlib.import_module(f"sglang.srt.models.{path.stem}"), name)
    raise ValueError(f"SGLang has no class {name}.")


def _load(folder: Path, wheel: str) -> dict[str, Any]:
    from safetensors.torch import load_file
    from sglang.srt.utils.hf_transformers_utils import get_config

    config, tensors = get_config(str(folder), trust_remote_code=False), load_file(folder / "model.safetensors")
    if any(name.startswith("confidence_head") for name in tensors):
        os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"  # a mode with a confidence head
    model = _class_of(config, wheel)(config)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(float("nan"))
    names = list(tensors)
    model.load_weights(_number_tensors(tensors, names))
    places = {name: _find_sources(parameter, names) for name, parameter in parameters.items()}
    tokens = getattr(model, "hot_token_id", None)
    used = set().union(*places.values())
    if tokens is not None:
        used |= {"d2t", "t2d"}
    return {
        "model": type(model).__name__,
        "places": {name: sources for name, sources in places.items() if sources},
        "unset": [name for name, parameter in parameters.items() if bool(parameter.isnan().any())],
        "unused": sorted(tensors.keys() - used),
        "tokens": None if tokens is None else tokens.tolist(),
        **(_block(folder, config, model) if hasattr(model, "set_block_size") else {}),
    }


def _number_tensors(tensors: dict[str, Any], names: list[str]) -> list[tuple[str, Any]]:
    """The tensors, those of floating point filled with the number of their name, from 1 on."""
    import torch

    numbered, integers = [], []
    for number, name in enumerate(names, start=1):
        if tensors[name].is_floating_point():
            numbered.append((name, torch.full_like(tensors[name], number)))
        else:
            integers.append((name, tensors[name]))
    return [*numbered, *integers]


def _find_sources(parameter: Any, names: list[str]) -> list[str]:
    """The tensors that fill a parameter, in the order of its rows: tensor n was filled with the number n + 1."""
    values = parameter.detach().flatten(1)[:, 0] if parameter.dim() > 1 else parameter.detach()
    return [names[int(value) - 1] for value in values.unique_consecutive() if value > 0]


def _block(folder: Path, config: Any, model: Any) -> dict[str, Any]:
    """SGLang's reading of the fields of a block drafter."""
    import torch
    from sglang.srt.speculative import dflash_utils, dflash_worker_v2
    from sglang.srt.speculative.dspark_components import dspark_config

    parsed = dflash_utils.parse_dflash_draft_config(draft_hf_config=config)
    if hasattr(model, "markov_head"):
        given = {
            "draft_hf_config": config,
            "speculative_num_draft_tokens": None,
            "target_vocab_size": config.vocab_size,
        }
        found = dspark_config.resolve_runtime_config(**given)
        fields = {
            "drafts": found.gamma,
            "mask": found.mask_token_id,
            "anchor": model.sample_from_anchor,
            "merged": None,
        }
        return {**fields, "layers": parsed.target_layer_ids}
    table = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    table.weight.data.fill_(float("nan"))
    runner = types.SimpleNamespace(model=types.SimpleNamespace(get_input_embeddings=lambda: table))
    worker = types.SimpleNamespace(
        server_args=types.SimpleNamespace(speculative_draft_model_path=str(folder)), device="cpu",
        _mask_token_id=parsed.mask_token_id, _target_worker=types.SimpleNamespace(model_runner=runner))  # fmt: skip
    from sglang.srt.arg_groups import overrides

    overrides.resolving_view = lambda arguments: arguments
    dflash_worker_v2.DFlashWorkerV2._maybe_merge_trained_mask_embedding(worker)
    rows = table.weight.isfinite().all(dim=1).nonzero().flatten().tolist()
    merged = table.weight[rows[0]].tolist() if rows == [parsed.mask_token_id] else None
    return {
        "drafts": parsed.block_size - 1,
        "mask": parsed.mask_token_id,
        "layers": parsed.target_layer_ids,
        "merged": merged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", help="where SGLang's wheel is unpacked; without it the engines' environment is used")
    arguments = parser.parse_args()
    if arguments.wheel is None:
        try:
            read = read_folder(arguments.folder)
        except ValueError as error:
            sys.exit(str(error))
        read["merged"] = read.get("merged") is not None
        print(json.dumps({name: value for name, value in read.items() if name != "tokens"}, indent=1))
        return
    with tempfile.TemporaryDirectory() as scratch:
        _prepare(arguments.wheel, scratch)
        print(json.dumps(_load(arguments.folder, arguments.wheel)))


if __name__ == "__main__":
    main()
