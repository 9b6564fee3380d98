"""llama.cpp beside our decoders: greedy decoding of the same weights, plainly or with its own speculation.

Needs the xllamacpp wheel, here (`pip install xllamacpp`) or in the engines' environment (`make engines`), and a GGUF
file of the target, which `convert` makes. The matrices are then the target's own, bit for bit; the cache is float16.
It runs in a process of its own: torch and the wheel would share one OpenMP runtime, whose threads then sleep at every
barrier, which halves llama.cpp's speed and costs torch a third (measured on two cores with two threads each).
The wheel is one build for every machine: `xllamacpp.get_system_info()` names the instruction sets that it uses, and a
llama.cpp compiled for this machine can be faster.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

ENGINES = Path("engines")
KINDS = {
    "simple": "DRAFT_SIMPLE",  # a draft model
    "eagle3": "DRAFT_EAGLE3",
    "dflash": "DRAFT_DFLASH",
    "dspark": "DRAFT_DSPARK",
}


def find_python() -> str:
    """A Python that has the wheel: this one, or else the engines'. Raises ValueError if neither has."""
    if importlib.util.find_spec("xllamacpp") is not None:
        return sys.executable
    if (ENGINES / "ready").is_file():
        return str(ENGINES / "bin" / "python")
    raise ValueError("llama.cpp needs its wheel: pip install xllamacpp, or `make engines`.")


class LlamaCpp:
    """One model, one sequence at a time, on the CPU; `context` has to hold a prompt and its answer.

    draft: GGUF file of a drafter, which is a `kind` (one of KINDS) and drafts `num` tokens in every round,
        fewer only where the answer may have no more
    cache: what keys and values are stored in, f16 or f32
    python: one that has xllamacpp; None: `find_python`

    With a draft, every `generate` sets what it counted:
    rounds: passes of the target after the prompt's own, so that tau is (len(tokens) - 1) / rounds
    drafted, accepted, accepted_per_position [num]: llama.cpp's own counters. 1 + accepted / (rounds with drafts) is
        what its logs call the mean length. It is not tau: where an end token was drafted, accepted drafts behind it
        count too; and the last token that an answer may have is decoded in a round without drafts.
    Past one of `stop` that the GGUF file does not name as an end token, all of these count what is cut off as well.
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
        python: str | None = None,
    ):
        python = python or find_python()
        if kind not in KINDS:
            raise ValueError(f"kind={kind} must be one of {', '.join(KINDS)}.")
        for path in filter(None, [gguf, draft]):
            if not Path(path).is_file():
                raise ValueError(
                    f"There is no file {path}: make it with llama.cpp's converter, "
                    "convert_hf_to_gguf.py TARGET --outtype bf16 --outfile FILE."
                )
        self.context, self.num = context, num if draft else 0
        self.rounds = self.drafted = self.accepted = 0
        self.accepted_per_position: list[int] = []
        options = {"gguf": gguf, "threads": threads, "context": context, "draft": draft, "kind": KINDS[kind],
                   "num": num, "cache": cache}  # fmt: skip
        command = [python, "-P", str(Path(__file__).resolve()), json.dumps(options)]  # -P: vllm.py beside it is no vllm
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.child.stdout.readline() != "ready\n":
            self.close()
            raise ValueError(
                f"llama.cpp cannot load {' with '.join(filter(None, [gguf, draft]))}, see above: convert again."
            )

    def generate(self, prompt: list[int], max_new_tokens: int, stop: set[int]) -> tuple[list[int], float]:
        """The answer's tokens, up to and including one of `stop`, and the seconds of decoding them.

        The first token comes from the prompt's pass, which is not counted: the seconds are those of the passes after
        it. llama.cpp ends an answer at the end tokens that the GGUF file names; where it went on past one of `stop`,
        the passes after it are taken off at their mean.
        """
        if len(prompt) + max_new_tokens > self.context:  # llama.cpp would end the answer early, without a word
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {max_new_tokens} new ones do not fit a context of {self.context}: "
                "give LlamaCpp a larger one."
            )
        request = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        request |= {"return_tokens": True, "verbose": True}  # without the second the answer is text only
        print(json.dumps(request), file=self.child.stdin, flush=True)
        answer = json.loads(self.child.stdout.readline() or '{"error": {"message": "its process has ended"}}')
        if "error" in answer:
            raise ValueError(f"llama.cpp: {answer['error']['message']}. Give token ids of the GGUF file's target.")
        timings, tokens = answer["timings"], answer["__verbose"]["tokens"]
        if timings["prompt_n"] != len(prompt) or timings["predicted_n"] != len(tokens):
            raise ValueError(
                f"llama.cpp read {timings['prompt_n']} of {len(prompt)} prompt tokens and counts "
                f"{timings['predicted_n']} new ones, not {len(tokens)}: try another version of xllamacpp."
            )
        if self.num:
            self._count(answer["counts"], len(tokens), max_new_tokens)
        length = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[:length], timings["predicted_ms"] / 1000 * (length - 1) / max(len(tokens) - 1, 1)

    def _count(self, counts: list[list[int]], num_tokens: int, max_new_tokens: int) -> None:
        """counts: of rounds with drafts, drafted tokens, accepted ones, accepted ones at each position"""
        (drafts,), (self.drafted,), (self.accepted,), self.accepted_per_position = counts
        # An answer of full length has no draft behind its end. Its last rounds may have drafted less: each had at most
        # one token less than the answer could still hold.
        full = num_tokens == max_new_tokens
        self.rounds = num_tokens - 1 - self.accepted if full else drafts
        short = min(self.rounds, self.num) if full else 0
        fewest = (self.rounds - short) * self.num + short * (short - 1) // 2
        if self.drafted < fewest:
            raise ValueError(
                f"llama.cpp drafted {self.drafted} tokens in {drafts} rounds, not {self.num} in each: its log says why; "
                "a block drafter drafts at most its block."
            )

    def close(self) -> None:
        self.child.communicate()  # the end of its input ends it

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
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = " | ".join(done.stdout.strip().splitlines()[-4:])
        raise ValueError(f"llama.cpp's converter refuses {model}: {last}")


# What follows runs in the process of its own.


def serve(*, gguf: str, threads: int, context: int, draft: str | None, kind: str, num: int, cache: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers = gguf, 0
    # One slot, of all the context. A round enters all its drafts before llama.cpp looks whether the context is full.
    params.n_ctx, params.n_parallel, params.fit_params = context + (num + 2 if draft else 0), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads  # a token's pass, the prompt's pass
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0  # calls share nothing
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.verbosity, params.endpoint_metrics = 1, True  # errors only; for `counters`
    if draft:
        kinds, drafting = xllamacpp.common_speculative_type, params.speculative.draft
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        drafting.mparams.path, drafting.n_gpu_layers = draft, 0
        drafting.n_max, drafting.n_min, drafting.p_min = num, 0, 0.0  # 0.0: unsure drafts are not cut short
        drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = threads
        drafting.cache_type_k = drafting.cache_type_v = params.cache_type_k
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    before = counters(server)
    for line in sys.stdin:
        answer = server.handle_completions(json.loads(line))
        if draft and "error" not in answer:
            after = counters(server)
            before = [old + [0] * (len(new) - len(old)) for old, new in zip(before, after)]
            answer["counts"] = [[b - a for a, b in zip(*pair)] for pair in zip(before, after)]
            before = after
        print(json.dumps(answer), flush=True)


def counters(server) -> list[list[int]]:
    """Since it was loaded: rounds with drafts, drafted tokens, accepted ones, accepted ones at each position.

    llama.cpp prints them with six digits: beyond a million they are rounded.
    """
    text = server.handle_metrics()
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total", "accepted_tokens_per_pos_total")
    found = [re.findall(rf"^llamacpp:spec_decode_num_{name}(?:{{.*}})? (\S+)", text, re.MULTILINE) for name in names]
    return [[int(float(value)) for value in values] for values in found]


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
