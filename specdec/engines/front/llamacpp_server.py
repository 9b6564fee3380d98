"""llama.cpp's own HTTP server, for engine=llamacpp of `specdec launch_engine`, in a Python that has xllamacpp.

It imports nothing of this project.
"""

import json
import sys
import time


def serve(*, host: str, port: int, model: str, parallel: int, **settings) -> None:
    """Serves until the process ends. model: name of the model for requests; parallel: requests at once"""
    import xllamacpp

    params = make_params(**settings)
    params.hostnames, params.port, params.model_alias = [host], port, {model}
    params.n_ctx, params.n_parallel = params.n_ctx * parallel, parallel
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


def make_params(
    *, gguf: str, threads: int, context: int, draft: str | None, kind: str | None, num: int, cache: str,
    settings: dict[str, int],
):  # fmt: skip
    """llama.cpp's parameters: one slot with all the context, on the CPU.

    gguf, draft: files of the target and of a drafter, which drafts `num` tokens in every round, and fewer only if the
        answer has no room for more; context: tokens of a prompt and its answer
    kind: speculation, such as DRAFT_EAGLE3; None for none; settings: its own; cache: type of stored keys and values
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers = gguf, 0
    # llama.cpp enters all drafts of a round before it checks whether the context is full
    params.n_ctx, params.n_parallel, params.fit_params = context + (num + 2 if kind else 0), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads  # a token's pass, the prompt's pass
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0  # calls share nothing
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.verbosity, params.endpoint_metrics = 1, True  # errors only; counts of drafts
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


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
