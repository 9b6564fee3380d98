"""Starts a vLLM server that gives answers and hidden states, for training and for specdec answer.

    specdec launch_engine target.name=Qwen/Qwen3-8B heads=eagle3

The server is for features.engine=URL of train.py and engine=URL of answer.py. It runs until it is stopped. With print=true the
command to run on another machine is printed instead. Hidden states are files: another machine needs a folder= that both see.
"""

from specdec.options.command_line import option, options, run, split

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdec import loading
from specdec.core.ranges import named
from specdec.options import config_files
from specdec.target.model import Target

MODULES = Path(__file__).resolve().parents[1] / "train" / "features" / "in_vllm"  # what vLLM imports by name
PYTHON = "engines/bin/python"  # where `make engines` installs vLLM


@dataclass(frozen=True)
class EngineOptions:
    heads: str = option("eagle3", "comma list of the heads to be trained (conf/head): their layers are given")
    layers: str | None = option(None, "list such as [2,15,28] of the layers to give instead; the last one always is")
    port: int = option(8000, "port of the server")
    host: str = option("127.0.0.1", "address that it listens on; 0.0.0.0: all, for other machines")
    folder: str | None = option(
        None, "where hidden states wait, under the same path for all; null: a new one in memory (/dev/shm)"
    )
    max_model_len: int = option(4096, "tokens that a text, or a prompt and its answer, may have")
    more: str = option("", 'further arguments of vLLM, such as "--tensor-parallel-size 4 --gpu-memory-utilization 0.8"')
    python: str = option(PYTHON, "interpreter with vLLM; `make engines` makes this one, for a CPU")
    print: bool = option(False, "print the command and start nothing")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def choose_layers(target: Target, *, heads: str, layers: str | None = None) -> list[int]:
    """The hidden states that the heads of conf/head read, or the given ones, and the last one, in order.

    heads: comma list; layers: list such as [2,15,28], which takes the place of heads
    Raises ValueError, naming the option.
    """
    if layers is not None:
        try:
            return sorted({*target.layer_ids(sorted(json.loads(layers))), target.num_layers})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers={layers} must be a list of numbers, such as [2,15,28]. {error}") from None
    found = {target.num_layers}
    for name in split(heads):
        files = config_files.list_files("head")
        if name not in files:
            raise ValueError(f"heads={name}: there is no head of that name. There are {', '.join(files)}.")
        found |= set(
            instantiate(OmegaConf.load(files[name]).drafter, target, vocab=None, _convert_="all").target_layers
        )
    return sorted(found)


def make_command(chosen: EngineOptions, target: Target, layers: list[int], folder: str) -> list[str]:
    """vLLM's command line, with the hidden states of `layers` as files in `folder`."""
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
    given = {
        "--model": target.name,
        "--dtype": str(target.dtype).removeprefix("torch."),
        "--max-model-len": str(min(chosen.max_model_len, target.max_positions or chosen.max_model_len)),
        "--host": chosen.host,
        "--port": str(chosen.port),
        "--speculative-config": json.dumps(speculative),
        "--kv-transfer-config": json.dumps(connector),
    }
    words = [chosen.python, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*given.items())]
    words.append("--no-enable-prefix-caching")  # a cached prefix would have no hidden states
    return words + ["--trust-remote-code"] * target.trust_remote_code + shlex.split(chosen.more)


@contextlib.contextmanager
def open_folder(chosen: EngineOptions) -> Iterator[str]:
    """Where hidden states are written; a new folder is deleted at the end."""
    if chosen.folder is not None:
        Path(chosen.folder).mkdir(parents=True, exist_ok=True)
        yield str(Path(chosen.folder).resolve())
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="specdec-states-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield folder


def run_server(chosen: EngineOptions, target: Target, layers: list[int], folder: str) -> int:
    """Runs the server until it ends or is stopped. -> its exit status"""
    url = f"http://localhost:{chosen.port}"
    print(f"{target.name} will be served at {url}, with layers {layers}, once vLLM says that its start is complete.")
    print(f"use: features.engine={url} (train.py), engine={url} (scripts/answer.py)", flush=True)
    # The first three variables matter on a CPU only
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join(filter(None, [str(MODULES), os.environ.get("PYTHONPATH")]))
    words = make_command(chosen, target, layers, folder)
    # A session of its own: Ctrl-C reaches this process, which then ends the server and all of its processes
    server = subprocess.Popen(words, env=given | dict(os.environ) | {"PYTHONPATH": path}, start_new_session=True)
    try:
        return server.wait()
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(patience)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(EngineOptions, __doc__, arguments)
    name = chosen.target.name or loading.DEFAULT_TARGET
    with named("target"):
        target = Target.load_ends(
            name, dtype=chosen.target.dtype_here, trust_remote_code=chosen.target.trust_remote_code
        )
    layers = choose_layers(target, heads=chosen.heads, layers=chosen.layers)
    if chosen.print:
        folder = str(Path(chosen.folder or "engine-states").absolute())
        print(f"PYTHONPATH={MODULES} {shlex.join(make_command(chosen, target, layers, folder))}")
        return
    if not Path(chosen.python).is_file() and shutil.which(chosen.python) is None:
        raise ValueError(
            f"There is no vLLM: {chosen.python} does not exist. `make engines` sets it up for a CPU (4 GB); on a GPU machine "
            "install vllm and give python=, such as python=python3."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with open_folder(chosen) as folder:
        status = run_server(chosen, target, layers, folder)
    if status:
        raise ValueError(f"vLLM ended with status {status}; its last lines above say why.")


if __name__ == "__main__":
    run(main)
