"""Greedy decoding in llama.cpp, plainly or with its own speculation, of the same weights as this project's target.

Needs the xllamacpp wheel, here (`pip install xllamacpp`) or in the engines' environment (`make engines`), and a GGUF
file of the target, which `convert_to_gguf` makes. The weights are then the target's own, bit for bit; the cache is
float16. It runs in a process of its own: with torch in one process both would share one OpenMP runtime, and be slow.
The wheel is one build for all machines; a llama.cpp that is compiled for this machine can be faster.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engines.child import Child

ENGINES = Path("engines")
KINDS = {
    "simple": "DRAFT_SIMPLE",  # a draft model
    "eagle3": "DRAFT_EAGLE3",
    "dflash": "DRAFT_DFLASH",
    "dspark": "DRAFT_DSPARK",
    "mtp": "DRAFT_MTP",  # a module of the target's own, in its file
}
LOOKUPS = {  # without a drafter, from the text itself
    "ngram-simple": "NGRAM_SIMPLE",
    "ngram-map-k": "NGRAM_MAP_K",
    "ngram-map-k4v": "NGRAM_MAP_K4V",
    "ngram-mod": "NGRAM_MOD",
    "ngram-cache": "NGRAM_CACHE",
}
MAX_LOOKUP_DRAFTS = 64  # drafts in a round, of llama.cpp's defaults


def find_python() -> str:
    """A Python that has the wheel: this one, or else that of the engines. Raises ValueError if neither has it."""
    if importlib.util.find_spec("xllamacpp") is not None:
        return sys.executable
    if (ENGINES / "ready").is_file():
        return str(ENGINES / "bin" / "python")
    raise ValueError("llama.cpp needs its wheel: pip install xllamacpp, or `make engines`.")


@dataclass(frozen=True)
class Counts:
    """llama.cpp's counts for one answer.

    rounds: passes of the target after the prompt's own, so that tau is (len(tokens) - 1) / rounds; None where
    llama.cpp's
        counters do not tell: for a look-up whose answer ended early
    drafted, accepted: llama.cpp's own counters, which include drafts behind the end of an answer
    """

    rounds: int | None = 0
    drafted: int = 0
    accepted: int = 0


def read_counters(counters: list[list[int]], *, fixed: bool, num_tokens: int, max_new_tokens: int) -> Counts:
    """Counts of an answer.

    counters: llama.cpp's counts of rounds with drafts, drafted tokens and accepted tokens
    fixed: whether every round has drafts if there is room
    """
    (drafts,), (drafted,), (accepted,) = counters
    if num_tokens == max_new_tokens:  # only then has an answer no draft behind its end
        return Counts(num_tokens - 1 - accepted, drafted, accepted)
    return Counts(drafts if fixed else None, drafted, accepted)


class LlamaCpp:
    """One model, one sequence at a time, on the CPU; `context` must hold a prompt and its answer.

    draft: GGUF file of a drafter of this `kind` (one of KINDS), which drafts `num` tokens in every round, and fewer
        only if the answer has no room for more
    kind: one of KINDS; without a draft also one of LOOKUPS, with llama.cpp's defaults, which `settings` replace
    cache: type of stored keys and values, f16 or f32
    With a draft or a look-up, `generate` sets `self.counts`.
    """

    def __init__(
        self,
        gguf: str,
        *,
        context: int,
        draft: str | None = None,
        kind: str = "simple",
        num: int = 3,
        cache: str = "f16",
        settings: dict[str, int] | None = None,
    ):
        looks_up = kind in LOOKUPS
        self.context, self.counts = context, Counts()
        self.has_counts, self.fixed = bool(draft) or looks_up or kind == "mtp", not looks_up
        options = {"gguf": gguf, "threads": torch.get_num_threads(), "context": context, "draft": draft, "cache": cache}
        options |= {"num": MAX_LOOKUP_DRAFTS if looks_up else num, "settings": settings or {}}
        options |= {"kind": (KINDS | LOOKUPS)[kind] if self.has_counts else None}
        program = Path(__file__).resolve().with_name("llamacpp_server.py")
        loads = " with ".join(filter(None, [gguf, draft]))
        self.child = Child(program, options, python=find_python(), name="llama.cpp", loads=loads, environment={})

    def generate(self, prompt: list[int], max_new_tokens: int, stop: set[int]) -> list[int]:
        """The answer's tokens, up to and including one of `stop`."""
        if len(prompt) + max_new_tokens > self.context:  # llama.cpp would end the answer early, without a message
            raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens do not fit a context of {self.context}.")
        request = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        # Without `verbose` the reply holds the answer's text and not its tokens.
        reply = self.child.ask(request | {"return_tokens": True, "verbose": True})
        tokens = reply["__verbose"]["tokens"]
        if self.has_counts:
            sizes = {"num_tokens": len(tokens), "max_new_tokens": max_new_tokens}
            self.counts = read_counters(reply["counts"], fixed=self.fixed, **sizes)
        return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))]

    def close(self) -> None:
        self.child.close()


def convert_to_gguf(model: str, out: str, *, target: str | None = None, outtype: str = "f32") -> None:
    """Writes a folder of transformers' layout as a GGUF file, with the engines' converter; needs its tokenizer.

    target: folder of the target, for a drafter of kind eagle3 or dflash; outtype: f32, f16, bf16, ...
    Raises ValueError with the converter's last lines.
    """
    converter = ENGINES / "llama.cpp" / "convert_hf_to_gguf.py"
    if not converter.is_file():
        raise ValueError(f"There is no converter: {converter} does not exist. `make engines` sets it up (4 GB).")
    command = [str(ENGINES / "bin" / "python"), str(converter), model, "--outfile", out, "--outtype", outtype]
    command += ["--target-model-dir", target] if target else []
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode:
        last = " | ".join(finished.stdout.strip().splitlines()[-4:])
        raise ValueError(f"llama.cpp's converter refuses {model}: {last}")
