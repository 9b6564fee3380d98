"""Runs a function of a test in several processes that find each other, as a launcher starts them.

python -m tests.support.together tests.specdec.target.test_sharding:compare '["folder"]'
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile

import torch
from torch import distributed as dist

from tests.support.commands import ROOT, child_environment

SECONDS = 300  # until processes that wait for each other for ever are ended
SHOWN = 4000  # characters at the end of what each has printed
MARK = "result of the process: "


def free_ports(num: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


def printed_by(num: int, function: str, *arguments, cwd=None) -> list[str]:
    """What each of `num` processes prints that call MODULE:NAME(*arguments), all JSON; its result is in the last
    line.
    """
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
    }
    command = [sys.executable, "-m", "tests.support.together", function, json.dumps(arguments)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num)]  # a pipe would fill up
        processes = [
            subprocess.Popen(
                command,
                cwd=cwd or ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
            )
            for rank, file in enumerate(files)
        ]
        try:
            codes = [process.wait(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        printed = [file.seek(0) or file.read() for file in files]
    ends = [f"ended with {code}:\n{text[-SHOWN:]}" for code, text in zip(codes, printed)]
    assert all(f"\n{MARK}" in text for text in printed), "\n\n".join(ends)
    return printed


def together(num: int, function: str, *arguments) -> list:
    """What MODULE:NAME(*arguments), all JSON, returns in each of `num` processes, by rank."""
    return [json.loads(text.rpartition(f"\n{MARK}")[2]) for text in printed_by(num, function, *arguments)]


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
