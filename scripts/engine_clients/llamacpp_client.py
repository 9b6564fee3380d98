"""Greedy decoding in llama.cpp, plainly or with its own speculation, of the same weights as this project's target.

Needs the xllamacpp wheel, here (`pip install xllamacpp`) or in the engines' environment (`make engines`), and a GGUF file
of the target, which `convert` makes. The weights are then the target's own, bit for bit; the cache is float16.
llama.cpp runs in a process of its own. In one process, torch and the wheel would share one OpenMP runtime, whose threads
then sleep at every barrier: that halves llama.cpp's speed and costs torch a third (two cores, two threads each).
The wheel is one build for all machines; a llama.cpp that is compiled for this machine can be faster.
`xllamacpp.get_system_info()` names the instruction sets that the wheel uses.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine_clients.child import Child

ENGINES = Path("engines")
KINDS = {
    "simple": "DRAFT_SIMPLE",  # a draft model
    "eagle3": "DRAFT_EAGLE3",
    "dflash": "DRAFT_DFLASH",
    "dspark": "DRAFT_DSPARK",
}
LOOKUPS = {  # without a drafter, from the text itself
    "ngram-simple": "NGRAM_SIMPLE",
    "ngram-map-k": "NGRAM_MAP_K",
    "ngram-map-k4v": "NGRAM_MAP_K4V",
    "ngram-mod": "NGRAM_MOD",
    "ngram-cache": "NGRAM_CACHE",
}
MOST_LOOKED_UP = 64  # drafts in a round, of llama.cpp's defaults


def find_python() -> str:
    """A Python that has the wheel: this one, or else that of the engines. Raises ValueError if neither has it."""
    if importlib.util.find_spec("xllamacpp") is not None:
        return sys.executable
    if (ENGINES / "ready").is_file():
        return str(ENGINES / "bin" / "python")
    raise ValueError("llama.cpp needs its wheel: pip install xllamacpp, or `make engines`.")


@dataclass(frozen=True)
class Counts:
    """What llama.cpp counted for one answer.

    rounds: passes of the target after the prompt's own, so that tau is (len(tokens) - 1) / rounds; None where llama.cpp's
        counters do not tell: for a look-up whose answer ended early
    drafted, accepted, accepted_per_position [num]: llama.cpp's own counters. 1 + accepted / (rounds with drafts), which
        its logs call the mean length, is not tau: where an end token was drafted, it includes accepted drafts behind it,
        and it leaves out the round without drafts that decodes the last token an answer may have.
    """

    rounds: int | None = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()


def count(counters: list[list[int]], *, num: int | None, num_tokens: int, max_new_tokens: int) -> Counts:
    """counters: of rounds with drafts, drafted tokens, accepted tokens, accepted tokens at each position

    num: drafts in a round; None: any number, also none
    Raises ValueError if rounds drafted fewer than `num` tokens where the answer had room for them.
    """
    (drafts,), (drafted,), (accepted,), per_position = counters
    full = num_tokens == max_new_tokens  # only then has an answer no draft behind its end
    if num is None:
        return Counts(num_tokens - 1 - accepted if full else None, drafted, accepted, tuple(per_position))
    rounds = num_tokens - 1 - accepted if full else drafts
    # Each round gives a token at least, and may draft one token less than the answer can still hold. So the k-th round before
    # the last one may draft `room + k` tokens or more.
    room = max_new_tokens - num_tokens
    if drafted < sum(min(num, room + k) for k in range(rounds)):
        raise ValueError(
            f"llama.cpp drafted {drafted} tokens in {drafts} rounds, not {num} in each: its log says why; "
            "a block drafter drafts at most its block."
        )
    return Counts(rounds, drafted, accepted, tuple(per_position))


class LlamaCpp:
    """One model, one sequence at a time, on the CPU; `context` must hold a prompt and its answer.

    draft: GGUF file of a drafter of the given `kind` (one of KINDS), which drafts `num` tokens in every round, and fewer
        only where the answer has no room for more
    kind: without a draft also one of LOOKUPS, with llama.cpp's defaults, which settings replace: {"size_n": 3}
    cache: what keys and values are stored in, f16 or f32
    python: one that has xllamacpp; None: `find_python`

    With a draft or a look-up, `generate` sets `self.counts`. If an answer passed one of `stop` that the GGUF file does not
    name as an end token, they also count what is cut off behind it.
    """

    def __init__(
        self,
        gguf: str,
        *,
        threads: int,
        context: int,
        draft: str | None = None,
        kind: str = "simple",
        num: int = 3,
        cache: str = "f16",
        settings: dict[str, int] | None = None,
        python: str | None = None,
    ):
        python = python or find_python()
        if kind not in (KINDS if draft else KINDS | LOOKUPS):
            raise ValueError(f"kind={kind} must be one of {', '.join(KINDS)}; without a draft {', '.join(LOOKUPS)}.")
        files = [gguf, draft] if draft else [gguf]
        for path in files:
            if not Path(path).is_file():
                raise ValueError(
                    f"There is no file {path}: make it with llama.cpp's converter, "
                    "convert_hf_to_gguf.py TARGET --outtype bf16 --outfile FILE."
                )
        looks_up = kind in LOOKUPS
        num = MOST_LOOKED_UP if looks_up else num
        self.context, self.counts = context, Counts()
        self.counted = bool(draft) or looks_up
        self.num = None if looks_up else num
        options = {"gguf": gguf, "threads": threads, "context": context, "draft": draft,
                   "kind": (KINDS | LOOKUPS)[kind] if self.counted else None,
                   "num": num, "cache": cache, "settings": settings or {}}  # fmt: skip
        program = Path(__file__).resolve().with_name("llamacpp_server.py")
        loads = f"{' with '.join(files)} (if a file is damaged, convert again)"
        self.child = Child(program, options, python=python, name="llama.cpp", loads=loads, environment={})

    def generate(self, prompt: list[int], max_new_tokens: int, stop: set[int]) -> tuple[list[int], float]:
        """The answer's tokens, up to and including one of `stop`, and the seconds of decoding them.

        The first token comes from the prompt's pass, whose time is not included. llama.cpp ends an answer at the end
        tokens that the GGUF file names; if it went past one of `stop`, the mean time of a pass is subtracted for each
        token behind it.
        """
        if len(prompt) + max_new_tokens > self.context:  # llama.cpp would end the answer early, without a message
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {max_new_tokens} new ones do not fit a context of {self.context}: "
                "give LlamaCpp a larger one."
            )
        request = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        # Without `verbose` the reply holds the answer's text and not its tokens.
        reply = self.child.ask(request | {"return_tokens": True, "verbose": True})
        timings, tokens = reply["timings"], reply["__verbose"]["tokens"]
        if timings["prompt_n"] != len(prompt) or timings["predicted_n"] != len(tokens):
            raise ValueError(
                f"llama.cpp read {timings['prompt_n']} of {len(prompt)} prompt tokens and counts "
                f"{timings['predicted_n']} new ones, not {len(tokens)}: try another version of xllamacpp."
            )
        if self.counted:
            self.counts = count(reply["counts"], num=self.num, num_tokens=len(tokens), max_new_tokens=max_new_tokens)
        length = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[:length], timings["predicted_ms"] / 1000 * (length - 1) / max(len(tokens) - 1, 1)

    def close(self) -> None:
        self.child.close()

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def convert(model: str, out: str, *, target: str | None = None, outtype: str = "f32") -> None:
    """Writes a folder of transformers' layout as a GGUF file, with the engines' converter; needs its tokenizer.

    target: folder of the target, for a drafter of kind eagle3 or dflash; outtype: f32, f16, bf16, ...
    Raises ValueError with the converter's last lines.
    """
    converter = ENGINES / "llama.cpp" / "convert_hf_to_gguf.py"
    if not converter.is_file():
        raise ValueError(f"There is no converter: {converter} does not exist. `make engines` sets it up (4 GB).")
    command = [ENGINES / "bin" / "python", converter, model, "--outfile", out, "--outtype", outtype]
    command += ["--target-model-dir", target] if target else []
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode:
        last = " | ".join(finished.stdout.strip().splitlines()[-4:])
        raise ValueError(f"llama.cpp's converter refuses {model}: {last}")
