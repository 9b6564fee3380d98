"""llama.cpp beside our decoders: greedy decoding of the same weights, through the xllamacpp wheel.

Needs `pip install xllamacpp` and a GGUF file of the target, from llama.cpp's converter:
`convert_hf_to_gguf.py TARGET --outtype bf16`. The matrices are then the target's own, bit for bit; the cache is float16.
It runs in a process of its own: torch and the wheel would share one OpenMP runtime, whose threads then sleep at every
barrier, which halves llama.cpp's speed and costs torch a third (measured on two cores with two threads each).
The wheel is one build for every machine: `xllamacpp.get_system_info()` names the instruction sets that it uses, and a
llama.cpp compiled for this machine can be faster.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path


class LlamaCpp:
    """One model, one sequence at a time, on the CPU; `context` has to hold a prompt and its answer."""

    def __init__(self, gguf: str, *, threads: int, context: int):
        if importlib.util.find_spec("xllamacpp") is None:
            raise ValueError("Timing llama.cpp needs its wheel: pip install xllamacpp")
        if not Path(gguf).is_file():
            raise ValueError(
                f"There is no file {gguf}: make it with llama.cpp's converter, "
                "convert_hf_to_gguf.py TARGET --outtype bf16 --outfile FILE."
            )
        self.context = context
        command = [sys.executable, str(Path(__file__).resolve()), gguf, str(threads), str(context)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.child.stdout.readline() != "ready\n":
            self.close()
            raise ValueError(f"llama.cpp cannot load {gguf}, see above: convert the target again.")

    def generate(self, prompt: list[int], max_new_tokens: int, stop: set[int]) -> tuple[list[int], float]:
        """The answer's tokens, up to and including one of `stop`, and the seconds of decoding them.

        The first token comes from the prompt's pass, which is not counted: the seconds are those of
        `len(tokens) - 1` passes. llama.cpp ends an answer at the end tokens that the GGUF file names; where it went on
        past one of `stop`, the passes after it are taken off at their mean.
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
        length = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[:length], timings["predicted_ms"] / 1000 * (length - 1) / max(len(tokens) - 1, 1)

    def close(self) -> None:
        self.child.communicate()  # the end of its input ends it


def serve(gguf: str, threads: int, context: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers = gguf, 0
    params.n_ctx, params.n_parallel, params.fit_params = context, 1, False  # one slot, of all the context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads  # a token's pass, the prompt's pass
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0  # calls share nothing
    params.verbosity = 1  # errors only
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(server.handle_completions(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
