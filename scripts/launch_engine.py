"""Starts an engine as a server: with an exported head, with its own look-up, plainly, or with hidden states.

    specdec launch_engine engine=vllm export=exported target.name=Qwen/Qwen3-8B
    specdec launch_engine engine=llamacpp draft=ngram target.name=models/qwen3-8b
    specdec launch_engine target.name=Qwen/Qwen3-8B heads=eagle3

Engines: vllm, llamacpp, transformers (its own generate, for draft models and n-grams), openvino. export= is a folder of
specdec export for that engine. llamacpp, openvino and the vllm of `make engines` run on the CPU. Without engine= vLLM
gives hidden states, for features.engine=URL of train.py and engine=URL of answer.py: these are files, so another
machine needs a folder= that both see. A server runs until it is stopped. With print=true the command is printed
instead, and nothing is converted.
"""

from specdec.options.command_line import read_command, split_list

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import Field, model_validator

from specdec import loading
from specdec.core.option_types import (
    Count,
    Options,
    Text,
    describe_unknown_choice,
    prefix_option_names,
    raise_first,
)
from specdec.engines.client import is_local
from specdec.engines.exported import ExportedHead
from specdec.engines.launch import EVERYWHERE, exit_at_signals, make_url, open_folder, run_server
from specdec.engines.start_lines import LINES, LOOKUPS, EngineStart, StartLine, make_states_line
from specdec.options import config_files
from specdec.options.run_command import run_command
from specdec.options.target import TargetOptions
from specdec.target.model import Target

DEFAULT_HEAD = "eagle3"
MODULES = config_files.HOME / "train" / "features" / "in_vllm"  # what vLLM imports by name
ON_CPU = ("llamacpp", "openvino")


class LaunchOptions(Options):
    engine: Text | None
    export: Text | None
    draft: Text | None
    drafts: Count | None
    weights: bool
    heads: Text | None
    layers: Text | None
    port: Annotated[int, Field(ge=1, le=65535)]
    host: Text
    folder: Text | None
    max_model_len: Count
    more: str
    python: Text | None
    print: bool
    target: TargetOptions

    @model_validator(mode="after")
    def check_engine(self) -> "LaunchOptions":
        settings = [self.export, self.draft, self.drafts, self.weights or None]
        raise_first(
            {
                "export=, draft=, drafts= and weights= are of a server that drafts: give engine=, too.": (
                    self.engine is None and any(setting is not None for setting in settings)
                ),
                "export= and draft= are two drafters: give one of them.": None not in (self.export, self.draft),
                "drafts= is of a drafter: give export= or draft=, too.": (
                    self.drafts is not None and self.export is None and self.draft is None
                ),
                "weights=true is of vLLM with a head: give engine=vllm and export=.": (
                    self.weights and (self.engine != "vllm" or self.export is None)
                ),
                "heads= and layers= are of a server with hidden states: leave engine= out.": (
                    self.engine is not None and (self.heads, self.layers) != (None, None)
                ),
                "target.device= is of engine=transformers: other engines run where their builds do.": (
                    self.engine not in (None, "transformers") and self.target.device is not None
                ),
            }
        )
        return self

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the engine runs on the CPU even where there is a GPU."""
        return self.engine in ON_CPU or (self.engine == "vllm" and self.python is None)


def choose_layers(target: Target, *, heads: str | None, layers: str | None) -> list[int]:
    """The hidden states that the heads of conf/head read, or the given ones, and the last one, in order.

    heads: comma list, None: DEFAULT_HEAD; layers: list such as [2,15,28], which takes the place of heads
    Raises ValueError, naming the option.
    """
    if layers is not None:
        try:
            return sorted({*target.layer_ids(sorted(json.loads(layers))), target.num_layers})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers={layers} must be a list of numbers, such as [2,15,28]. {error}") from None
    layer_ids = {target.num_layers}
    for name in split_list(heads or DEFAULT_HEAD):
        files = config_files.list_files("head")
        if name not in files:
            raise ValueError(describe_unknown_choice("head", name, files))
        layer_ids |= set(
            instantiate(OmegaConf.load(files[name]).drafter, target, vocab=None, _convert_="all").target_layers
        )
    return sorted(layer_ids)


def make_start(options: LaunchOptions) -> EngineStart:
    """The server of engine=. Raises ValueError, naming the option, for what cannot be started."""
    for name, value, choices in (("engine", options.engine, LINES), ("draft", options.draft, LOOKUPS)):
        if value is not None and value not in choices:
            raise ValueError(describe_unknown_choice(name, value, choices))
    head = None if options.export is None else ExportedHead.read(Path(options.export))
    name = options.target.name or (head.target if head else loading.DEFAULT_TARGET)
    folder = Path("converted") if head is None else head.folder.resolve().parent
    target = options.target.model_copy(update={"device": "cpu"}) if options.runs_on_cpu else options.target
    return EngineStart(
        str(head.folder) if head and head.whole else name,
        options.port,
        target.dtype_here,
        head,
        options.draft,
        options.drafts,
        weights=options.weights,
        folder=Path(options.folder) if options.folder else folder,
        device=options.target.device,
        **list_common(options),
    )


def list_common(options: LaunchOptions) -> dict[str, Any]:
    """What servers with drafts and with hidden states have in common."""
    return {
        "host": options.host,
        "max_length": options.max_model_len,
        "python": options.python,
        "flags": options.more,
        "trust_remote_code": options.target.trust_remote_code,
        "is_started": not options.print,
    }


def prepare_engine(options: LaunchOptions) -> tuple[StartLine, str]:
    """The command of engine=, and the sentence when it answers."""
    if options.runs_on_cpu and torch.cuda.is_available():
        text = f"note: {options.engine} runs on the CPU, though there is a GPU: `make engines` installs it for a CPU."
        print(text, file=sys.stderr)
    if options.weights and (options.host in EVERYWHERE or not is_local(make_url(options.host, options.port))):
        text = f"warning: anyone who reaches {options.host}:{options.port} can change this server: weights=true opens "
        print(f"{text}vLLM's endpoints for administration.", file=sys.stderr)
    start = make_start(options)
    drafter = f", which drafts with {options.export or options.draft}" if options.export or options.draft else ""
    url = make_url(options.host, options.port)
    return LINES[str(options.engine)](start), f"{start.target} is served at {url}{drafter}."


def prepare_states(options: LaunchOptions, folder: str) -> tuple[StartLine, str]:
    """vLLM's command with hidden states as files in `folder`, and the sentence when it answers."""
    name = options.target.name or loading.DEFAULT_TARGET
    with prefix_option_names("target"):
        target = Target.load_ends(
            name, dtype=options.target.dtype_here, trust_remote_code=options.target.trust_remote_code
        )
    layers = choose_layers(target, heads=options.heads, layers=options.layers)
    start = EngineStart(target.name, options.port, str(target.dtype).removeprefix("torch."), **list_common(options))
    if target.max_positions:
        start = dataclasses.replace(start, max_length=min(start.max_length, target.max_positions))
    url = make_url(options.host, options.port)
    sentence = (
        f"{target.name} is served at {url}, with layers {layers}.\n"
        f"use: features.engine={url} (train.py), engine={url} (scripts/answer.py)"
    )
    return make_states_line(start, layers, folder, MODULES), sentence


def main(arguments: list[str] | None = None) -> None:
    options = read_command("launch_engine", LaunchOptions, __doc__, arguments)
    if not options.print:
        exit_at_signals()  # a conversion ends, too
    with contextlib.ExitStack() as stack:
        if options.engine is not None:
            line, sentence = prepare_engine(options)
        elif options.print:
            line, sentence = prepare_states(options, str(Path(options.folder or "engine-states").absolute()))
        else:
            line, sentence = prepare_states(options, stack.enter_context(open_folder(options.folder)))
        if options.print:
            print(line.text)
        else:
            run_server(line, options.host, options.port, sentence)


if __name__ == "__main__":
    run_command(main, LaunchOptions)
