"""Greedy decoding in OpenVINO GenAI, with an EAGLE-3 head or plainly, by its front, in an environment of its own.

Needs `make engines`. Weights are the target's own; kernels, keys and values have the precision of `dtype`.
"""

import json
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engines.front import openvino_front
from specdec.engines.installed import find_python


@dataclass(frozen=True)
class OpenVinoAnswer:
    """Token ids, and the counts of the rounds after the prompt's own pass."""

    tokens: list[int]
    rounds: int
    accepted: int
    drafted: int


class OpenVino:
    """One target, one sequence at a time, on the CPU.

    folder: place of converted models; head: folder of an export, None: no drafter; num: drafts of a round
    """

    def __init__(self, target: str, folder: str, *, head: str | None, num: int, dtype: str = "float32"):
        python = find_python("OpenVINO GenAI", "openvino")
        options = {"target": target, "head": head, "drafts": num, "dtype": dtype, "folder": folder}
        options["threads"] = torch.get_num_threads()
        words = [python, "-P", openvino_front.__file__, json.dumps(options)]
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() does
        self.process: Any = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, text=True)
        output: Any = self.process.stdout
        lines: Iterator[str] = iter(output.readline, "")
        self.url = next((line.strip() for line in lines if line.startswith("http")), None)
        if self.url is None:
            self.log.seek(0)
            last = " | ".join(self.log.read().strip().splitlines()[-4:])
            self.close()
            raise ValueError(f"OpenVINO GenAI cannot load {target}: {last}")

    def generate(self, prompt: list[int], max_new_tokens: int, stop: set[int]) -> OpenVinoAnswer:
        """The answer, up to and including one of `stop`, which must be the target's own end tokens or none."""
        body = {"prompt": prompt, "max_tokens": max_new_tokens, "temperature": 0, "return_token_ids": True}
        content = json.dumps(body | {"ignore_eos": not stop}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            document = json.load(reply)
        counts = document["usage"]["speculation"]
        tokens = document["choices"][0]["token_ids"]
        return OpenVinoAnswer(tokens, counts["rounds"], counts["accepted"], counts["drafted"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()
