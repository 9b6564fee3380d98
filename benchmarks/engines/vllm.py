"""Greedy decoding in vLLM, with any drafter that vLLM can load, and a record of what it drafted.

Needs `make engines`. vLLM runs in a process of its own, with the Python of that environment, because it pins other
libraries than this project.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engines.child import Child
from specdec.engines.installed import find_python
from specdec.export.mtp import TARGET_OVERRIDES

KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; 1 unless the environment says otherwise
MEMORY_SHARE = 0.2  # share of the memory that must be free at its start, as other engines may run beside it
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vllm_server.record needs the scheduler in the same process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


LATENT_ATTENTION = "kv_lora_rank"  # field of the configuration of models that have it
# Not compiled, vLLM 0.32 turns queries of latent attention by an operator that takes them for one head on a CPU
LATENT_OPERATORS = {"custom_ops": ["all", "-rotary_embedding"]}


@dataclass(frozen=True)
class VllmReply:
    """vLLM's answers and drafts for P prompts.

    answers: [P][.] token ids, with the token that ended an answer
    rounds: [P][rounds] one for each pass of the target after the prompt's own: the ids drafted for it, which may be
    none,
        and the length of the answer before it
    """

    answers: list[list[int]]
    rounds: list[list[tuple[list[int], int]]]


class Vllm:
    """One target, and one drafter if `speculative` names it, on the CPU, with torch's number of threads.

    target: folder; its tokenizer is not read
    speculative: vLLM's speculative config, such as {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3}
    dtype: float32 or bfloat16, of the target and the drafter
    max_model_len: tokens that a prompt, its answer and the drafts behind it may have together
    eager: whether nothing is compiled
    Raises ValueError where the environment is absent, or vLLM refuses a folder.
    """

    def __init__(
        self,
        target: str,
        *,
        speculative: dict | None,
        dtype: str,
        max_model_len: int,
        eager: bool = True,
        python: str | None = None,
    ):
        python = find_python("vLLM", python=python)
        settings = speculative or {}
        self.num_drafts, self.max_model_len = settings.get("num_speculative_tokens", 0), max_model_len
        options: dict = {"model": target, "speculative_config": speculative, "dtype": dtype, "enforce_eager": eager}
        options |= {"max_model_len": max_model_len, "gpu_memory_utilization": MEMORY_SHARE}
        options |= {
            "hf_overrides": TARGET_OVERRIDES if settings.get("method") == "mtp" and "model" in settings else None
        }
        if eager and LATENT_ATTENTION in json.loads(Path(target, "config.json").read_text()):
            options["compilation_config"] = LATENT_OPERATORS
        threads = {KV_SPACE: os.environ.get(KV_SPACE, "1"), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        program = Path(__file__).resolve().with_name("vllm_server.py")
        loads = " with ".join(filter(None, [target, settings.get("model")]))
        self.child = Child(program, options, python=python, name="vLLM", loads=loads, environment=threads | ENVIRONMENT)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, stop: set[int]) -> VllmReply:
        """Greedy answers of all prompts, decoded as one batch; each ends with one of `stop` or at `max_new_tokens`."""
        needed = max(map(len, prompts), default=0) + max_new_tokens + self.num_drafts + 1
        if needed > self.max_model_len:  # vLLM would stop drafting, or end the answer, without a message
            raise ValueError(f"A prompt, its answer and the drafts ({needed} tokens) exceed {self.max_model_len}.")
        return VllmReply(**self.child.ask({"prompts": prompts, "max_tokens": max_new_tokens, "stop": sorted(stop)}))

    def close(self) -> None:
        self.child.close()
