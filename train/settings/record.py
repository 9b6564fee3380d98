"""The record of a run, for its page and the model card: about.json in its folder."""

import json
import platform
import shlex
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec import checkpoint
from specdec.core import files
from specdec.core.option_types import format_value
from specdec.heads.base import Head
from specdec.options import config_files
from train.settings.options import LENGTH_OPTIONS, list_auto_options


def write_facts(
    run: Path,
    config: dict,
    drafter: Head,
    packs: dict[str, Any],
    *,
    start: str | None,
    arguments: list[str],
    num_processes: int,
) -> None:
    """Writes about.json of a run: target, data, drafter, environment, and the command that repeats it.

    config: document of the options; packs: figures of the data; arguments: of train.py
    start: checkpoint that the run starts from, as it was given. `config` has it with the commit of a head on the Hub.
    """
    target, data_options = drafter.target, config["data"]
    launcher = "accelerate launch" if num_processes == 1 else f"torchrun --nproc_per_node {num_processes}"
    facts: dict[str, Any] = {
        "command": shlex.join([*launcher.split(), "train.py", *spell_out_options(config, arguments)]),
        "target": {
            "name": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "fingerprint": target.fingerprint(),
        },
        "drafter": {
            "class": type(drafter).__name__,
            "parameters": drafter.num_parameters(),
            "draft vocabulary": drafter.vocab_size,
        },
        "data": {
            "train": ", ".join(map(str, data_options["train"]))
            if isinstance(data_options["train"], list)
            else str(data_options["train"]),
            "heldout": data_options["heldout"],
            "length": data_options["length"],
            **packs,
        },
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "threads": torch.get_num_threads(),
            "processes": num_processes,
            "seed": config["train"]["seed"],
        },
    }
    if start is not None:
        facts["start"] = {"given": start, "used": config["start"]}
    files.write_text(run / checkpoint.FACTS_FILE, json.dumps(facts, indent=1) + "\n")


def spell_out_options(config: dict, arguments: list[str]) -> list[str]:
    """The arguments with the run's own decisions, which may differ elsewhere. `train.steps` replaces LENGTH_OPTIONS."""
    option_values, given_options = config_files.flatten(config), {each.partition("=")[0]: each for each in arguments}
    left_out = (*LENGTH_OPTIONS, "resume", "hydra.searchpath")
    kept_arguments = [each for name, each in given_options.items() if name not in left_out]
    names = [
        name for name in list_auto_options() if name in option_values and name not in (*LENGTH_OPTIONS, *given_options)
    ]
    return [*kept_arguments, *(f"{name}={format_value(option_values[name])}" for name in names)]
