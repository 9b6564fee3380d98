"""vLLM beside our decoders: greedy decoding of a target, with whatever drafter vLLM can load, and what it drafted.

Needs `make engines`. vLLM runs in a process of its own, with the Python of that environment: it pins other libraries.
`Vllm` is this project's half; the end of the file is vLLM's, which talks JSON lines over its standard input and output.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PYTHON = "engines/bin/python"
KV_SPACE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, unless it is set outside
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler has to be in reach, see serve
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Served:
    """What vLLM answered and drafted. P prompts, K drafts in a round.

    answers: [P][.] token ids, the token that ended an answer included
    rounds: [P][rounds] one for each pass of the target after the prompt's own: the ids drafted for it, and the answer
        as far as it was then. A round without drafts is a round too
    drafts, draft_tokens, accepted, accepted_per_position [K]: what vLLM's own counters say of these prompts.
        tau is not theirs but of `answers` and `rounds`: drafts that were accepted behind an answer's last token count in
        the counters, and rounds without drafts, as where method ngram finds nothing, do not.
    """

    answers: list[list[int]]
    rounds: list[list[tuple[list[int], list[int]]]]
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: list[int]


class Vllm:
    """One target, and one drafter if `speculative` names it, on the CPU.

    target: folder; its tokenizer is not read
    speculative: vLLM's speculative config, such as {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3}
    dtype: float32 or bfloat16, of the target and the drafter
    max_model_len: tokens that a prompt, its answer and the drafts behind it have to fit
    overrides: fields of the target's config to be replaced, such as {"num_nextn_predict_layers": 1} for method mtp
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
        python: str = PYTHON,
        threads: int = 1,
    ):
        if not Path(python).is_file():
            raise ValueError(f"There is no vLLM: {python} does not exist. `make engines` sets it up (4 GB).")
        self.num_drafts = (speculative or {}).get("num_speculative_tokens", 0)
        self.max_model_len = max_model_len
        options = {"model": target, "speculative_config": speculative, "hf_overrides": overrides, "dtype": dtype,
                   "max_model_len": max_model_len}  # fmt: skip
        # -P: or this file would be what `import vllm` finds
        command = [python, "-P", str(Path(__file__).resolve()), json.dumps(options)]
        self.scratch = tempfile.TemporaryDirectory()  # vLLM leaves files behind
        own = {"OMP_NUM_THREADS": str(threads), "TMPDIR": self.scratch.name}
        environment = KV_SPACE | os.environ | SETTINGS | own
        self.log = open(Path(self.scratch.name, "log"), "w+", errors="replace")  # noqa: SIM115  # close() does
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        try:
            self._read("cannot load " + " with ".join(filter(None, [target, (speculative or {}).get("model")])))
        except ValueError:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], max_new_tokens: int, stop: set[int]) -> Served:
        """Greedy answers of all prompts, decoded as one batch; each ends with one of `stop` or at `max_new_tokens`."""
        if not all(prompts):
            raise ValueError("A prompt must hold a token.")
        needed = max(map(len, prompts), default=0) + max_new_tokens + self.num_drafts + 1
        if needed > self.max_model_len:  # vLLM would stop drafting, or end the answer, without a word
            raise ValueError(
                f"A prompt, {max_new_tokens} new tokens and the drafts are {needed} tokens and do not fit "
                f"max_model_len={self.max_model_len}: give Vllm a larger one."
            )
        request = {"prompts": prompts, "max_tokens": max_new_tokens, "stop": sorted(stop)}
        with contextlib.suppress(BrokenPipeError):  # _read says why
            print(json.dumps(request), file=self.child.stdin, flush=True)
        reply = self._read("cannot answer")
        reply["rounds"] = [
            [(drafted, answer[:num]) for drafted, num in rounds]
            for rounds, answer in zip(reply["rounds"], reply["answers"])
        ]
        return Served(**reply)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.communicate()  # the end of its input ends it
        self.log.close()
        self.scratch.cleanup()

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _read(self, failed: str) -> dict:
        line = self.child.stdout.readline()
        if not line:
            self.child.wait()
            self.log.seek(0)
            last = " | ".join(self.log.read().strip().splitlines()[-8:])
            raise ValueError(f"vLLM {failed}: its process ended with {self.child.returncode}. It said: {last}")
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"vLLM {failed}: {reply['error']}")
        return reply


# What follows runs in the engines' environment.


def serve(options: dict) -> None:
    """Answers every line of standard input with one line. What vLLM prints itself goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(reply: dict) -> None:
        print(json.dumps(reply), file=answers, flush=True)

    try:
        from vllm import LLM

        llm = LLM(
            **{name: value for name, value in options.items() if value is not None},
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,  # else there are no counters
            enable_prefix_caching=False,  # calls share nothing
            async_scheduling=False,  # else the scheduler sees placeholders instead of drafts
            generation_config="vllm",
        )
        passes = record(llm.llm_engine.engine_core.engine_core.scheduler)
    except Exception as error:
        say({"error": explain(error)})
        return
    say({})
    for line in sys.stdin:
        try:
            say(answer(llm, passes, **json.loads(line)))
        except Exception as error:
            say({"error": explain(error)})


def explain(error: Exception) -> str:
    """One line, and without pydantic's copy of the arguments."""
    text = re.sub(r"\[type=.*", "", str(error), flags=re.DOTALL) or repr(error)
    return " ".join(f"{type(error).__name__}: {text}".split())


def record(scheduler) -> dict[str, list[tuple[list[int], int]]]:
    """-> request id -> the rounds of its answer so far: ids drafted, tokens of the answer before the round

    The scheduler is where every method's drafts pass by as lists, after the target's pass over them: what is drafted
    behind the end of an answer never arrives there, and passes over a prompt have no answer yet.
    """
    passes: dict[str, list[tuple[list[int], int]]] = {}
    update = scheduler.update_from_output

    def update_and_record(scheduled, output):
        for name in scheduled.num_scheduled_tokens:
            request = scheduler.requests.get(name)
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            if request is not None and request.num_output_tokens and sampled:
                drafted = list(scheduled.scheduled_spec_decode_tokens.get(name, ()))
                passes.setdefault(name, []).append((drafted, request.num_output_tokens))
        return update(scheduled, output)

    scheduler.update_from_output = update_and_record
    return passes


def answer(llm, passes: dict, *, prompts: list[list[int]], max_tokens: int, stop: list[int]) -> dict:
    from vllm import SamplingParams

    passes.clear()
    before = counters(llm)
    # ignore_eos: only `stop` ends an answer, whatever the target's config names
    how = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    after = counters(llm)
    answers = [list(output.outputs[0].token_ids) for output in found]
    # inside the engine a request's name is followed by a dash and random letters
    by_request = {name.partition("-")[0]: rounds for name, rounds in passes.items()}
    rounds = [by_request.get(output.request_id, []) for output in found]
    if any(len(tokens) > 1 and not row for tokens, row in zip(answers, rounds)):
        raise RuntimeError(f"requests are called {list(passes)}: this version of vLLM is not the one of `make engines`")
    counted = {
        name: [b - a for a, b in zip(before[name], value)] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }
    return {"answers": answers, "rounds": rounds, **counted}


def counters(llm) -> dict:
    """vLLM's counts since it was loaded."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}

    def value(name: str):
        metric = metrics.get(f"vllm:spec_decode_num_{name}")
        return 0 if metric is None else metric.value

    positions = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "drafts": value("drafts"),
        "draft_tokens": value("draft_tokens"),
        "accepted": value("accepted_tokens"),
        "accepted_per_position": list(positions.values) if positions else [],
    }


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # leaving in the usual way takes vLLM five seconds
