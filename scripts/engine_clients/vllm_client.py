"""Greedy decoding in vLLM, with any drafter that vLLM can load, and a record of what it drafted.

Needs `make engines`. vLLM runs in a process of its own, with the Python of that environment, because it pins other
libraries than this project.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from engine_clients.child import Child

PYTHON = "engines/bin/python"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; 1 unless the environment says otherwise
MEMORY_SHARE = 0.2  # of the memory, that must be free when it starts; other engines may run beside it
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vllm_server.record needs the scheduler in the same process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Served:
    """What vLLM answered and drafted. P prompts, K drafts in a round.

    answers: [P][.] token ids, with the token that ended an answer
    rounds: [P][rounds] one for each pass of the target after the prompt's own, with or without drafts: the ids drafted
        for it, and the answer before it
    drafts, draft_tokens, accepted, accepted_per_position [K]: vLLM's own counters for these prompts. tau comes from
        `answers` and `rounds` instead: the counters include drafts accepted behind an answer's last token, and leave out
        rounds without drafts, which occur where method ngram finds nothing.
    """

    answers: list[list[int]]
    rounds: list[list[tuple[list[int], list[int]]]]
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: list[int]


def check(python: str) -> None:
    if not Path(python).is_file():
        raise ValueError(f"There is no vLLM: {python} does not exist. `make engines` sets it up (4 GB).")


class Vllm:
    """One target, and one drafter if `speculative` names it, on the CPU.

    target: folder; its tokenizer is not read
    speculative: vLLM's speculative config, such as {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3}
    dtype: float32 or bfloat16, of the target and the drafter
    max_model_len: tokens that a prompt, its answer and the drafts behind it may have together
    eager: whether nothing is compiled
    overrides: fields of the target's config to replace, such as {"num_nextn_predict_layers": 1} for method mtp
    Raises ValueError where the environment is absent, or vLLM refuses a folder.
    """

    def __init__(
        self,
        target: str,
        *,
        speculative: dict | None,
        dtype: str,
        max_model_len: int,
        overrides: dict | None = None,
        eager: bool = True,
        python: str = PYTHON,
        threads: int = 1,
    ):
        check(python)
        self.num_drafts = (speculative or {}).get("num_speculative_tokens", 0)
        self.max_model_len = max_model_len
        options = {"model": target, "speculative_config": speculative, "hf_overrides": overrides, "dtype": dtype,
                   "max_model_len": max_model_len, "enforce_eager": eager,
                   "gpu_memory_utilization": MEMORY_SHARE}  # fmt: skip
        loads = " with ".join(filter(None, [target, (speculative or {}).get("model")]))
        variables = {KV_SPACE: os.environ.get(KV_SPACE, "1"), "OMP_NUM_THREADS": str(threads), **ENVIRONMENT}
        program = Path(__file__).resolve().with_name("vllm_server.py")
        self.child = Child(program, options, python=python, name="vLLM", loads=loads, environment=variables)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, stop: set[int]) -> Served:
        """Greedy answers of all prompts, decoded as one batch; each ends with one of `stop` or at `max_new_tokens`."""
        if not all(prompts):
            raise ValueError("A prompt must hold a token.")
        needed = max(map(len, prompts), default=0) + max_new_tokens + self.num_drafts + 1
        if needed > self.max_model_len:  # vLLM would stop drafting, or end the answer, without a message
            raise ValueError(
                f"A prompt, {max_new_tokens} new tokens and the drafts are {needed} tokens and do not fit "
                f"max_model_len={self.max_model_len}: give Vllm a larger one."
            )
        reply = self.child.ask({"prompts": prompts, "max_tokens": max_new_tokens, "stop": sorted(stop)})
        reply["rounds"] = [
            [(drafted, answer[:num]) for drafted, num in rounds]
            for rounds, answer in zip(reply["rounds"], reply["answers"])
        ]
        return Served(**reply)

    def close(self) -> None:
        self.child.close()

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, *_) -> None:
        self.close()
