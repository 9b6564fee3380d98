"""Greedy decoding in llama.cpp, plainly or with its own speculation, of the same weights as this project's target.

Needs the xllamacpp wheel, here (`pip install xllamacpp`) or in the engines' environment (`make engines`), and a GGUF
file of the target, which specdec.engines.gguf makes. The weights are then the target's own, bit for bit; the cache is
float16. It runs in a process of its own: with torch in one process both would share one OpenMP runtime, and be slow.
The wheel is one build for all machines; a llama.cpp that is compiled for this machine can be faster.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engines.child import Child
from specdec.engines.front import llamacpp_server
from specdec.engines.installed import find_python

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
        program, is_here = Path(llamacpp_server.__file__), importlib.util.find_spec("xllamacpp") is not None
        python = find_python("llama.cpp", python=sys.executable if is_here else None)
        loads = " with ".join(filter(None, [gguf, draft]))
        self.child = Child(program, options, python=python, name="llama.cpp", loads=loads, environment={})

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
