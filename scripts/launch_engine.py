"""Starts a vLLM server that gives answers and hidden states, for training and for specdec answer.

    specdec launch_engine target.name=Qwen/Qwen3-8B heads=eagle3

The server is for features.engine=URL of train.py and engine=URL of answer.py. It runs until it is stopped. With print=true the
command to run on another machine is printed instead. Hidden states are files in a folder; a machine that does not see the
folder fetches them from the server.
"""

from helpers import loading
from helpers.layers import layers_of
from helpers.options import option, options, run

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from specdec.target.model import Target
from train.ranges import named

MODULES = Path(__file__).resolve().parents[1] / "train" / "features" / "in_vllm"  # what vLLM imports by name
FOLDER = "SPECDEC_HIDDEN_STATES"  # the variable that names the folder to hidden_states_route.py
PYTHON = "engines/bin/python"  # where `make engines` installs vLLM
READY_WITHIN = 1800  # seconds; large targets load slowly


@dataclass(frozen=True)
class EngineOptions:
    heads: str = option("eagle3", "comma list of the heads to be trained (conf/head): their layers are given")
    layers: str | None = option(None, "list such as [2,15,28] of the layers to give instead; the last one always is")
    port: int = option(8000, "port of the server")
    host: str = option("127.0.0.1", "address that it listens on; 0.0.0.0: all, for other machines")
    folder: str | None = option(None, "where hidden states wait to be read; null: a new folder in memory (/dev/shm)")
    max_model_len: int = option(4096, "tokens that a text, or a prompt and its answer, may have")
    tensor_parallel: int = option(1, "GPUs that share one copy of the target")
    data_parallel: int = option(1, "copies of the target")
    more: str = option("", 'further arguments of vLLM, such as "--gpu-memory-utilization 0.8 --quantization fp8"')
    python: str = option(PYTHON, "interpreter with vLLM; `make engines` makes this one, for a CPU")
    print: bool = option(False, "print the command and start nothing")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


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
        "--middleware": "hidden_states_route.HiddenStatesRoute",  # for machines that do not see the folder
    }
    parallel = {"--tensor-parallel-size": chosen.tensor_parallel, "--data-parallel-size": chosen.data_parallel}
    given |= {name: str(number) for name, number in parallel.items() if number > 1}
    words = [
        chosen.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *(word for pair in given.items() for word in pair),
    ]
    words.append("--no-enable-prefix-caching")  # a cached prefix would have no hidden states
    return words + ["--trust-remote-code"] * target.trust_remote_code + shlex.split(chosen.more)


def make_environment(folder: str) -> dict[str, str]:
    """The variables that vLLM needs. The first three matter on a CPU only."""
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join(filter(None, [str(MODULES), os.environ.get("PYTHONPATH")]))
    return given | dict(os.environ) | {"PYTHONPATH": path, FOLDER: folder}


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


def check(chosen: EngineOptions) -> None:
    if not Path(chosen.python).is_file() and shutil.which(chosen.python) is None:
        raise ValueError(
            f"There is no vLLM: {chosen.python} does not exist. `make engines` sets it up for a CPU (4 GB); on a GPU machine "
            "install vllm and give python=, such as python=python3."
        )
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", chosen.port)) == 0:
            raise ValueError(
                f"port={chosen.port} is in use: another engine may run there. Stop it, or give another port=."
            )


def run_server(chosen: EngineOptions, target: Target, layers: list[int], folder: str) -> int:
    """Runs the server until it ends or is stopped. -> its exit status"""
    started = time.monotonic()
    # A session of its own: Ctrl-C reaches this process, which then ends the server and all of its processes
    words = make_command(chosen, target, layers, folder)
    server = subprocess.Popen(words, env=make_environment(folder), start_new_session=True)
    url = f"http://localhost:{chosen.port}"
    try:
        while server.poll() is None and time.monotonic() - started < READY_WITHIN:
            try:
                httpx.get(f"{url}/health", timeout=2, trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(1)
        if server.poll() is None:
            print(f"\n{target.name} is served at {url} after {time.monotonic() - started:.0f} s, with layers {layers}.")
            print(f"use: features.engine={url} (train.py), engine={url} (scripts/answer.py)", flush=True)
        return server.wait()
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(patience)


def main(arguments: list[str] | None = None) -> None:
    chosen = options(EngineOptions, __doc__, arguments)
    name = chosen.target.name or loading.default_target()
    with named("target"):
        target = Target.load_ends(
            name, dtype=chosen.target.dtype_here, trust_remote_code=chosen.target.trust_remote_code
        )
    layers = layers_of(target, heads=chosen.heads, layers=chosen.layers)
    if chosen.print:
        folder = str(Path(chosen.folder or "engine-states").absolute())
        words = shlex.join(make_command(chosen, target, layers, folder))
        print(f"PYTHONPATH={MODULES} {FOLDER}={shlex.quote(folder)} {words}")
        return
    check(chosen)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with open_folder(chosen) as folder:
        status = run_server(chosen, target, layers, folder)
    if status:
        raise ValueError(f"vLLM ended with status {status}; its last lines above say why.")


if __name__ == "__main__":
    run(main)
