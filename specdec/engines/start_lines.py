"""The command that starts an engine as a server: plainly, with an exported head, with the engine's own look-up, or with
hidden states.
"""

import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.engines import gguf
from specdec.engines.draft_weights.vllm import COUNTS, make_vllm_words
from specdec.engines.exported import ExportedHead
from specdec.engines.installed import find_python

FRONT = Path(__file__).with_name("front")
LOOKUPS = ("ngram", "suffix")
LOOKUP_DRAFTS = 10  # drafts of a round without drafts=, at most
LOOKUP_SIZES = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # tokens that vLLM's n-grams have
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class EngineStart:
    """What is started.

    target: folder or name; head: an export; lookup: one of LOOKUPS
    drafts: drafts of a round; None: the export's, or LOOKUP_DRAFTS
    dtype: float32, bfloat16 or float16; max_length: tokens of a prompt and its answer
    weights: whether vLLM takes new weights of its head; folder: place of converted models
    python: interpreter with the engine; None: that of `make engines`; flags: further arguments of vLLM
    device: transformers' device; None: CUDA's, if there is one
    is_started: whether the server starts now; else nothing is converted, and the interpreter may be on another machine
    """

    target: str
    port: int
    dtype: str
    head: ExportedHead | None = None
    lookup: str | None = None
    drafts: int | None = None
    host: str = "127.0.0.1"
    max_length: int = 4096
    weights: bool = False
    folder: Path = Path("converted")
    python: str | None = None
    flags: str = ""
    trust_remote_code: bool = False
    device: str | None = None
    is_started: bool = True

    @property
    def limit(self) -> int:
        """Drafts of a round."""
        return self.drafts or (self.head.drafts if self.head else LOOKUP_DRAFTS)

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer, at most the target's positions: vLLM refuses more."""
        file = Path(self.target, "config.json")
        config = json.loads(file.read_text()) if file.is_file() else {}
        positions = config.get("text_config", config).get("max_position_embeddings")
        return min(self.max_length, positions or self.max_length)


@dataclass(frozen=True)
class StartLine:
    """A command and its environment. PYTHONPATH is put before the present one."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The command for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])


def make_vllm_line(start: EngineStart) -> StartLine:
    settings: dict[str, Any] = {}
    flags: list[str] = []
    if start.head is not None:
        settings, flags = start.head.read_vllm_settings()
    elif start.lookup is not None:
        settings = {"method": start.lookup, **(LOOKUP_SIZES if start.lookup == "ngram" else {})}
    environment: dict[str, str] = {}
    if settings:
        settings["num_speculative_tokens"] = start.limit
        flags += ["--speculative-config", json.dumps(settings), *COUNTS]
    if start.weights:
        environment, more = make_vllm_words()
        flags += more
    return add_vllm_flags(start, flags, environment)


def make_states_line(start: EngineStart, layers: list[int], folder: str, modules: Path) -> StartLine:
    """vLLM's command line, with the hidden states of `layers` as files in `folder`.

    modules: folder of the modules that vLLM imports by name
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "hidden_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    flags = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    flags.append("--no-enable-prefix-caching")  # a cached prefix would have no hidden states
    return add_vllm_flags(start, flags, {"PYTHONPATH": str(modules)})


def add_vllm_flags(start: EngineStart, flags: list[str], environment: dict[str, str]) -> StartLine:
    """vLLM's command line. flags: behind those that every server has"""
    named = {
        "--model": start.target,
        "--dtype": start.dtype,
        "--max-model-len": str(start.length),
        "--generation-config": "vllm",  # what a request leaves out is neutral, not as in the model's folder
        "--host": start.host,
        "--port": str(start.port),
    }
    python = find_engine(start, "vLLM")
    words = [python, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*named.items())]
    words += flags + ["--trust-remote-code"] * start.trust_remote_code + shlex.split(start.flags)
    return StartLine(words, environment)


def make_llamacpp_line(start: EngineStart) -> StartLine:
    """Converts the target and the head where their files are absent or of other files."""
    python = find_engine(start, "llama.cpp")
    kind = choose_llamacpp_kind(start)
    model, draft = convert_models(start, kind)
    options = {
        "host": start.host,
        "port": start.port,
        "model": start.target,
        "parallel": 4,  # as llama-server's default
        "gguf": model,
        "draft": draft,
        "kind": kind and kind.replace("-", "_").upper(),
        "num": start.limit,
        "threads": int(os.environ.get(THREADS) or os.cpu_count() or 1),
        "context": start.length,
        "cache": "f32" if start.dtype == "float32" else "f16",
        "settings": {"size_m": start.limit} if start.lookup else {},
    }
    return StartLine([python, "-P", str(FRONT / "llamacpp_server.py"), json.dumps(options)])


def choose_llamacpp_kind(start: EngineStart) -> str | None:
    """The --spec-type of llama.cpp; None for a plain server. Raises ValueError for what it does not have."""
    refuse_suffix(start, "llama.cpp", "look-up")
    if start.head is not None:
        return start.head.read_llamacpp_kind()
    return None if start.lookup is None else "ngram-simple"


def convert_models(start: EngineStart, kind: str | None) -> tuple[str, str | None]:
    """The GGUF files of the target and of the head; the latter is None where the target's file has it."""
    options: dict[str, Any] = {
        "outtype": gguf.TYPES[start.dtype],
        "python": start.python,
        "is_started": start.is_started,
    }
    model = str(gguf.keep_gguf(start.target, start.folder, **options))
    if start.head is None or start.head.whole:
        return model, None
    source = None if kind == "draft-simple" else start.target
    return model, str(gguf.keep_gguf(str(start.head.folder), start.folder, target=source, **options))


def make_transformers_line(start: EngineStart) -> StartLine:
    refuse_suffix(start, "transformers", "prompt lookup")
    if start.head is not None:
        start.head.find_words("transformers", "assistant")
    options = {
        "target": start.target,
        "assistant": start.head and str(start.head.folder),
        "drafts": start.limit if start.head or start.lookup else None,
        "lookup": start.lookup is not None,
        "device": start.device,
        "trust_remote_code": start.trust_remote_code,
        **list_front_options(start),
    }
    python = start.python or sys.executable
    return StartLine([python, "-P", str(FRONT / "transformers_front.py"), json.dumps(options)])


def make_openvino_line(start: EngineStart) -> StartLine:
    refuse_suffix(start, "OpenVINO GenAI", "prompt lookup")
    if start.head is not None:
        start.head.find_words("OpenVINO GenAI", "python openvino_convert.py")
    options = {
        "target": start.target,
        "head": start.head and str(start.head.folder),
        "drafts": start.limit,
        "lookup": start.lookup is not None,
        "folder": str(start.folder),
        **list_front_options(start),
    }
    python = find_engine(start, "OpenVINO GenAI", "openvino")
    return StartLine([python, "-P", str(FRONT / "openvino_front.py"), json.dumps(options)])


def refuse_suffix(start: EngineStart, engine: str, lookup: str) -> None:
    """Raises ValueError for draft=suffix. lookup: words for the n-grams of the engine"""
    if start.lookup == "suffix":
        raise ValueError(f"{engine} has no suffix tree: draft=ngram is its {lookup}.")


def list_front_options(start: EngineStart) -> dict[str, Any]:
    """The options that all programs of FRONT share."""
    return {"dtype": start.dtype, "host": start.host, "port": start.port, "max_length": start.length}


def find_engine(start: EngineStart, engine: str, folder: str = "") -> str:
    return find_python(engine, folder, python=start.python, check=start.is_started)


LINES: dict[str, Callable[[EngineStart], StartLine]] = {
    "vllm": make_vllm_line,
    "llamacpp": make_llamacpp_line,
    "transformers": make_transformers_line,
    "openvino": make_openvino_line,
}
