"""What writes answers: the decoder of this project, a server, or vLLM in this process."""

from dataclasses import dataclass
from typing import Any

import rich.console
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from helpers import loading
from train import data, vllm_answers
from train.answering import Job, Law, OwnDecoder, Writer
from train.engine_answers import Server, ServerWriter
from train.engine_client import EngineClient


@dataclass(frozen=True)
class Source:
    """One of them, which is opened when the first writer is asked for."""

    engine: str | None  # URLs, "vllm", or None for this project's decoder
    target: loading.TargetOptions
    tokenizer: PreTrainedTokenizerBase
    batch: int
    in_flight: int
    thinking: bool | None
    console: rich.console.Console

    @property
    def kind(self) -> str | None:
        return self.engine if self.engine in (None, "vllm") else "server"


class Writers:
    """Gives a writer for each law; closes the connections at the end of a `with` block."""

    def __init__(self, source: Source):
        self.source = source
        self.opened: Any = None

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_) -> None:
        if isinstance(self.opened, Server):
            self.opened.client.close()

    def open(self, law: Law, *, example: Job, longest: int, ids: bool = False) -> Writer:
        """longest: tokens of the longest prompt and its answer. ids: refuse a server that does not give token ids"""
        source = self.source
        if source.engine is None:
            self.opened = self.opened or loading.load_target(source.target).target
            return OwnDecoder(self.opened, source.tokenizer, law, source.batch)
        if source.engine == "vllm":
            self.opened = self.opened or vllm_answers.load(
                source.target.name,
                dtype=source.target.dtype,
                trust_remote_code=source.target.trust_remote_code,
                in_flight=source.in_flight,
                longest=longest,
            )
            return vllm_answers.VllmWriter(self.opened, source.tokenizer, law, source.in_flight)
        self.opened = self.opened or self._connect(example)
        self.opened.check_length(longest)
        if ids and self.opened.way != "ids":
            raise ValueError(
                "prompts=self needs a server that takes and gives token ids, such as vLLM 0.10.2 or newer. Give prompts=FILE."
            )
        return ServerWriter(self.opened, law, source.in_flight)

    def _connect(self, example: Job) -> Server:
        source = self.source
        client = EngineClient(source.engine, in_flight=source.in_flight, say=source.console.print)
        try:
            server = Server(
                client, source.tokenizer, name=source.target.name, example=example, thinking=source.thinking
            )
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
