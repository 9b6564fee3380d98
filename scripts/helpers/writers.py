"""What writes answers: the decoder of this project, a server, or vLLM in this process."""

from helpers import loading
from helpers.layers import layers_of
from helpers.options import option

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from specdec.core.compile import Runner
from specdec.target.model import Target
from train.answers import vllm_answers
from train.answers.answering import Job, Law, OwnDecoder, Writer
from train.answers.engine_answers import Server, ServerWriter, States
from train.data import rows as data
from train.features.engine_client import EngineClient
from train.features.engine_features import EngineTarget
from train.features.outputs import Folder
from train.ranges import named


@dataclass(frozen=True)
class FeatureOptions:
    folder: str | None = option(None, "also keep the hidden states, for train.py features.folder=; null: no")
    heads: str = option("eagle3", "comma list of the heads (conf/head) whose layers are kept")
    layers: str | None = option(None, "list such as [2,15,28] of the layers instead; the last one is always kept")
    bits: int | None = option(None, "8: integers with a scale for each token; null: as the target computes")


@dataclass(frozen=True)
class Source:
    """One of them, which is opened when the first writer is asked for."""

    engine: str | None  # URLs, "vllm", or None for this project's decoder
    target: loading.TargetOptions
    tokenizer: PreTrainedTokenizerBase
    batch: int
    in_flight: int
    features: FeatureOptions
    console: rich.console.Console
    compile: bool = False  # this project's decoder

    @property
    def kind(self) -> str | None:
        return self.engine if self.engine in (None, "vllm") else "server"


class Writers:
    """Gives a writer for each law; closes the connections at the end of a `with` block."""

    def __init__(self, source: Source):
        self.source = source
        self.opened: Any = None
        self.runner = Runner(source.compile)

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_) -> None:
        if isinstance(self.opened, Server):
            self.opened.client.close()

    def open(
        self, law: Law, *, example: Job, longest: int, name: str = "The longest prompt", ids: bool = False
    ) -> Writer:
        """longest: tokens of the longest prompt, which `name` names, and its answer. ids: refuse a server that does not give token ids"""
        source = self.source
        if source.engine is None:
            self.opened = self.opened or loading.load_target(source.target).target
            return OwnDecoder(self.opened, source.tokenizer, law, source.batch, self.runner)
        if source.engine == "vllm":
            self.opened = self.opened or vllm_answers.load(
                source.target.name,
                dtype=source.target.dtype_here,
                trust_remote_code=source.target.trust_remote_code,
                in_flight=source.in_flight,
                longest=longest,
            )
            return vllm_answers.VllmWriter(self.opened, source.tokenizer, law, source.in_flight)
        self.opened = self.opened or self._connect(example)
        self.opened.check_length(longest, name)
        if ids and self.opened.way != "ids":
            raise ValueError(
                "prompts=self needs a server that takes and gives token ids, such as vLLM 0.10.2 or newer. Give prompts=FILE."
            )
        states = None if ids or source.features.folder is None else self._keep_states()
        return ServerWriter(self.opened, law, source.in_flight, states)

    def weights(self) -> dict[str, str]:
        """What identifies the target that `open` has loaded, for Resumable.same; nothing where another process has it."""
        return {"target": self.opened.fingerprint()} if isinstance(self.opened, Target) else {}

    def _keep_states(self) -> States:
        """Raises ValueError if the server gives none, or not these layers."""
        source, chosen = self.source, self.source.features
        if self.opened.way != "ids":
            raise ValueError(
                "features.folder= needs a server that takes and gives token ids, such as vLLM 0.10.2 or newer."
            )
        options = source.target
        with named("target"):
            target = Target.load_ends(
                str(options.name), dtype=options.dtype_here, trust_remote_code=options.trust_remote_code
            )
        with named("features"):
            layers = layers_of(target, heads=chosen.heads, layers=chosen.layers)
            folder = Folder(target, tuple(layers), Path(str(chosen.folder)), bits=chosen.bits)
            states = States(EngineTarget(self.opened.client, target, tuple(folder.layers)), folder)
        folder.open()
        source.console.print(f"hidden states {list(folder.layers)} of every answer go to {chosen.folder}.")
        return states

    def _connect(self, example: Job) -> Server:
        source = self.source
        client = EngineClient(source.engine, in_flight=source.in_flight, say=source.console.print)
        try:
            server = Server(client, source.tokenizer, name=source.target.name, example=example)
        except BaseException:
            client.close()
            raise
        source.console.print(f"{server.model} at {', '.join(client.urls)} {WAYS[server.way]}.")
        return server


WAYS = {
    "ids": "takes and gives token ids, which are kept in the rows",
    "text": "takes token ids and gives text: training tokenises the answers again",
    "chat": "takes messages: its own chat template decides, and training tokenises the answers again",
}


def stop_tokens(tokenizer: PreTrainedTokenizerBase, target: loading.TargetOptions) -> set[int]:
    """Ids that end an answer, without loading the target."""
    name = str(target.name)
    try:
        config = GenerationConfig.from_pretrained(name)
    except OSError:
        config = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(name, trust_remote_code=target.trust_remote_code)
        )
    return data.stop_tokens(tokenizer, config)
