"""llama.cpp, for a Python that has xllamacpp. It imports nothing of this project.

With `port` it is llama.cpp's own HTTP server, for engine=llamacpp of `specdec launch_engine`. Without, it reads one
request per line of standard input and answers each with one line of JSON, for benchmarks/engines/llamacpp.py.
"""

import json
import os
import re
import sys
import time


def serve_http(*, host: str, port: int, model: str, parallel: int, **settings) -> None:
    """Serves until the process ends. model: name of the model for requests; parallel: requests at once"""
    import xllamacpp

    params = make_params(**settings)
    params.hostnames, params.port, params.model_alias = [host], port, {model}
    params.n_ctx, params.n_parallel = params.n_ctx * parallel, parallel
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


def serve(*, kind: str | None, **settings) -> None:
    """Answers requests until standard input ends. kind: speculation, None for none; settings: as for `make_params`"""
    import xllamacpp

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints itself goes to standard error
    server = xllamacpp.Server(make_params(kind=kind, **settings))
    print("{}", file=replies, flush=True)
    before = read_counters(server)
    for line in sys.stdin:
        reply = server.handle_completions(json.loads(line))
        if "error" in reply:
            reply = {"error": f"{reply['error']['message']}. Give token ids of the GGUF file's target."}
        elif kind:
            after = read_counters(server)
            reply["counts"] = [subtract(new, old) for new, old in zip(after, before)]
            before = after
        print(json.dumps(reply), file=replies, flush=True)


def make_params(
    *, gguf: str, threads: int, context: int, draft: str | None, kind: str | None, num: int, cache: str,
    settings: dict[str, int],
):  # fmt: skip
    """llama.cpp's parameters: one slot with all the context, on the CPU. Arguments as of llamacpp.LlamaCpp"""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers = gguf, 0
    # llama.cpp enters all drafts of a round before it checks whether the context is full
    params.n_ctx, params.n_parallel, params.fit_params = context + (num + 2 if kind else 0), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads  # a token's pass, the prompt's pass
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0  # calls share nothing
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.verbosity, params.endpoint_metrics = 1, True  # errors only; for `read_counters`
    if kind:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        for name, value in settings.items():
            setattr(getattr(params.speculative, kind.lower()), name, value)
    if draft or kind == "DRAFT_MTP":
        drafting = params.speculative.draft
        drafting.mparams.path, drafting.n_gpu_layers = draft or "", 0
        drafting.n_max, drafting.n_min, drafting.p_min = num, 0, 0.0  # 0.0: unsure drafts are not cut short
        drafting.backend_sampling = kind != "DRAFT_EAGLE3"  # else all slots draft the tokens of one (docs/serving.md)
        drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = threads
        drafting.cache_type_k = drafting.cache_type_v = params.cache_type_k
    return params


def subtract(new: list[int], old: list[int]) -> list[int]:
    """The growth of counters; those that are new began at 0."""
    return [after - before for after, before in zip(new, old + [0] * (len(new) - len(old)))]


def read_counters(server) -> list[list[int]]:
    """Rounds with drafts, drafted tokens and accepted tokens, since the server was loaded.

    llama.cpp prints them with six digits: beyond a million they are rounded.
    """
    text, counters = server.handle_metrics(), []
    for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total"):
        values = re.findall(rf"^llamacpp:spec_decode_num_{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)
        counters.append([int(float(value)) for value in values])
    return counters


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    (serve_http if "port" in options else serve)(**options)
