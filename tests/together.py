"""Runs a function of a test in several processes that find each other, as a launcher starts them.

python -m tests.together tests.specdec.target.test_parallel:decode '["folder"]'
"""

import importlib
import json
import os
import socket
import subprocess
import sys

import torch
from torch import distributed as dist

from tests.support import ROOT, child_environment

SECONDS = 150  # until processes that wait for each other for ever are ended
SHOWN = 4000  # characters at the end of what each has printed
MARK = "result of the process: "


def together(num: int, function: str, *arguments, cwd=None) -> list:
    """What MODULE:NAME(*arguments), all JSON, returns in each of `num` processes, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num)}
    command = [sys.executable, "-m", "tests.together", function, json.dumps(arguments)]
    processes = [
        subprocess.Popen(command, cwd=cwd or ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         env=child_environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(num)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    last = [text.strip().splitlines()[-1] if text.strip() else "" for text in printed]
    ends = [f"process {rank} of {num} ended with {process.returncode}:\n{text[-SHOWN:]}"
            for rank, (process, text) in enumerate(zip(processes, printed))]  # fmt: skip
    assert all(line.startswith(MARK) for line in last), "\n\n".join(ends)
    return [json.loads(line.removeprefix(MARK)) for line in last]


def main() -> None:
    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    print(f"\n{MARK}{json.dumps(result)}", flush=True)
    os._exit(0)  # without the threads of process groups, which may wait for each other


if __name__ == "__main__":
    main()
