"""Starting a vLLM server that gives hidden states, and ending it with all of its processes."""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from specdec.core.option_types import Count, Options, Text
from specdec.target.model import Target


class EngineOptions(Options):
    port: Annotated[int, Field(ge=0, le=65535)]
    host: Text
    max_model_len: Count
    more: str
    python: Text


def make_command(options: EngineOptions, target: Target, layers: list[int], folder: str) -> list[str]:
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
    flags = {
        "--model": target.name,
        "--dtype": str(target.dtype).removeprefix("torch."),
        "--max-model-len": str(min(options.max_model_len, target.max_positions or options.max_model_len)),
        "--host": options.host,
        "--port": str(options.port),
        "--speculative-config": json.dumps(speculative),
        "--kv-transfer-config": json.dumps(connector),
    }
    words = [options.python, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*flags.items())]
    words.append("--no-enable-prefix-caching")  # a cached prefix would have no hidden states
    return words + ["--trust-remote-code"] * target.trust_remote_code + shlex.split(options.more)


@contextlib.contextmanager
def open_folder(folder: str | None) -> Iterator[str]:
    """Gives the folder of hidden states. None: a new one, which is deleted at the end"""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield str(Path(folder).resolve())
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="specdec-states-", dir=memory, ignore_cleanup_errors=True) as temporary:
        yield temporary


def run_server(options: EngineOptions, target: Target, layers: list[int], folder: str, modules: Path) -> int:
    """Runs the server until it ends or is stopped, and returns its status. modules: folder that vLLM imports from"""
    url = f"http://localhost:{options.port}"
    print(f"{target.name} will be served at {url}, with layers {layers}, once vLLM says that its start is complete.")
    print(f"use: features.engine={url} (train.py), engine={url} (scripts/answer.py)", flush=True)
    # The first three variables matter on a CPU only
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")]))
    words = make_command(options, target, layers, folder)
    # A session of its own: Ctrl-C reaches this process, which then ends the server and all of its processes
    server = subprocess.Popen(words, env=environment | dict(os.environ) | {"PYTHONPATH": path}, start_new_session=True)
    try:
        return server.wait()
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(patience)


def check_interpreter(python: str) -> None:
    """Raises ValueError if there is no such interpreter."""
    if not Path(python).is_file() and shutil.which(python) is None:
        raise ValueError(
            f"There is no vLLM: {python} does not exist. `make engines` sets it up for a CPU (4 GB); on a GPU machine "
            "install vllm beside specdec and give python=python (docs/engines.md)."
        )
