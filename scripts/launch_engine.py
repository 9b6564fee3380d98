"""Starts a vLLM server that gives answers and hidden states, for training and for specdec answer.

    specdec launch_engine target.name=Qwen/Qwen3-8B heads=eagle3

The server is for features.engine=URL of train.py and engine=URL of answer.py. It runs until it is stopped. With
print=true the command to run on another machine is printed instead. Hidden states are files: another machine needs a
folder= that both see.
"""

from specdec.options.command_line import read_command, split_list

import json
import shlex
import signal
import sys
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec import loading
from specdec.core.option_types import Text, describe_unknown_choice, prefix_option_names
from specdec.engines.launch import EngineOptions, check_interpreter, make_command, open_folder, run_server
from specdec.options import config_files
from specdec.options.run_command import run_command
from specdec.options.target import TargetOptions
from specdec.target.model import Target

MODULES = Path(__file__).resolve().parents[1] / "train" / "features" / "in_vllm"  # what vLLM imports by name


class LaunchOptions(EngineOptions):
    heads: str
    layers: Text | None
    folder: Text | None
    print: bool
    target: TargetOptions


def choose_layers(target: Target, *, heads: str, layers: str | None) -> list[int]:
    """The hidden states that the heads of conf/head read, or the given ones, and the last one, in order.

    heads: comma list; layers: list such as [2,15,28], which takes the place of heads
    Raises ValueError, naming the option.
    """
    if layers is not None:
        try:
            return sorted({*target.layer_ids(sorted(json.loads(layers))), target.num_layers})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers={layers} must be a list of numbers, such as [2,15,28]. {error}") from None
    layer_ids = {target.num_layers}
    for name in split_list(heads):
        files = config_files.list_files("head")
        if name not in files:
            raise ValueError(describe_unknown_choice("head", name, files))
        layer_ids |= set(
            instantiate(OmegaConf.load(files[name]).drafter, target, vocab=None, _convert_="all").target_layers
        )
    return sorted(layer_ids)


def main(arguments: list[str] | None = None) -> None:
    options = read_command("launch_engine", LaunchOptions, __doc__, arguments)
    name = options.target.name or loading.DEFAULT_TARGET
    with prefix_option_names("target"):
        target = Target.load_ends(
            name, dtype=options.target.dtype_here, trust_remote_code=options.target.trust_remote_code
        )
    layers = choose_layers(target, heads=options.heads, layers=options.layers)
    if options.print:
        folder = str(Path(options.folder or "engine-states").absolute())
        print(f"PYTHONPATH={MODULES} {shlex.join(make_command(options, target, layers, folder))}")
        return
    check_interpreter(options.python)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with open_folder(options.folder) as folder:
        status = run_server(options, target, layers, folder, MODULES)
    if status:
        raise ValueError(f"vLLM ended with status {status}; its last lines above say why.")


if __name__ == "__main__":
    run_command(main, LaunchOptions)
