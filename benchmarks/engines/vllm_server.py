"""vLLM's half of vllm.py: runs in the engines' environment and imports nothing of this project.

Reads one request per line of standard input and answers each with one line of JSON on standard output.
"""

import json
import os
import re
import sys


def serve(options: dict) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints itself goes to standard error

    def say(reply: dict) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    try:
        from vllm import LLM

        llm = LLM(
            **{name: value for name, value in options.items() if value is not None},
            skip_tokenizer_init=True,
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
    """The error in one line, without pydantic's copy of the arguments."""
    text = re.sub(r"\[type=.*", "", str(error), flags=re.DOTALL) or repr(error)
    return " ".join(f"{type(error).__name__}: {text}".split())


def record(scheduler) -> dict[str, list[tuple[list[int], int]]]:
    """The rounds of each answer by request id: the drafted ids, and the answer's length before the round.

    The scheduler receives the drafts of every method as lists, after the target's pass over them. Drafts behind the
    end of an answer do not reach it; passes over a prompt are left out, because there is no answer yet.
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
    # ignore_eos: only `stop` ends an answer, whatever the target's config names
    more = {"stop_token_ids": stop, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **more)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    # inside the engine, a dash and random letters follow a request's name
    by_request = {name.partition("-")[0]: rounds for name, rounds in passes.items()}
    rounds = [by_request.get(output.request_id, []) for output in outputs]
    if any(len(tokens) > 1 and not row for tokens, row in zip(answers, rounds)):
        raise RuntimeError(f"unknown request names {list(passes)}: `make engines` installs the version that is known")
    return {"answers": answers, "rounds": rounds}


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # an ordinary exit takes vLLM five seconds
