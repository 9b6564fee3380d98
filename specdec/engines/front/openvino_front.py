"""OpenVINO GenAI as a server, for engine=openvino of `specdec launch_engine`.

    python openvino_front.py '{"target": FOLDER, "head": FOLDER, "port": 8000}'

It drafts with an EAGLE-3 head of `specdec export format=openvino`, or looks drafts up in the prompt and the answer. It
needs openvino-genai and optimum-intel, and nothing of this project but the files beside it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__:
    from specdec.engines.front import front
    from specdec.engines.front.openvino_convert import keep_openvino
else:  # run as a program, in an environment without this project
    sys.path.insert(0, str(Path(__file__).parent))
    import front  # type: ignore[no-redef]
    from openvino_convert import keep_openvino  # type: ignore[no-redef]

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names


@dataclass(frozen=True)
class OpenvinoOptions:
    """The server of one target.

    target, head: folders or names, converted already or not; head: None: no drafter
    folder: place of what is converted here; drafts: drafts of a round
    lookup: whether drafts are looked up in the prompt and the answer
    dtype, cache: names of PRECISIONS, for the kernels and for keys and values; cache: None: as dtype
    threads: None: as OpenVINO chooses; port: 0 takes a free one; max_length: tokens of a prompt and its answer
    """

    target: str
    head: str | None = None
    folder: str = "openvino"
    drafts: int = 3
    lookup: bool = False
    dtype: str = "float32"
    cache: str | None = None
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int = 0
    max_length: int = 4096


class OpenVino(front.Generator):
    """OpenVINO GenAI's pipeline, greedily. Its streamer gets the tokens of each round of the target at once."""

    owner = "openvino"

    def __init__(self, options: OpenvinoOptions):
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        self.version = getattr(openvino_genai, "__version__", None)
        target = keep_openvino(options.target, Path(options.folder))
        config = json.loads((target / "config.json").read_text())
        self.model, self.stop = options.target, front.read_stop_tokens(target)
        self.vocabulary = config["vocab_size"]
        self.max_length = min(options.max_length, config.get("max_position_embeddings", options.max_length))
        self.drafts, properties = options.drafts, choose_properties(options)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # answers share nothing
        arguments: dict[str, Any] = {"scheduler_config": scheduler, **properties}
        if options.head is not None:
            head = keep_openvino(options.head, Path(options.folder))
            arguments["draft_model"] = openvino_genai.draft_model(str(head), "CPU", **properties)
        elif options.lookup:
            arguments["prompt_lookup"] = True
        self.has_head = options.head is not None
        self.longest = options.drafts if self.has_head or options.lookup else None
        self.pipeline = openvino_genai.LLMPipeline(str(target), "CPU", **arguments)

    def generate(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        if self.longest and len(prompt) < 2:
            raise front.FrontError("OpenVINO GenAI drafts behind prompts of two tokens or more only.")
        settings = self.genai.GenerationConfig()
        settings.max_new_tokens, settings.do_sample = max_tokens, False
        settings.stop_token_ids, settings.ignore_eos = set(stop), not stop
        if self.longest:
            settings.num_assistant_tokens = self.drafts
            settings.max_ngram_size = 3
        ids = self.openvino.Tensor(to_matrix(prompt))
        streamer = make_streamer(self.genai)

        def call(put: Callable[[Any], None]) -> None:
            metrics = self.pipeline.generate(ids, settings, streamer(put)).extended_perf_metrics
            if self.has_head and metrics is not None:  # drafts of a look-up are not counted
                self.answer_drafts = metrics.get_num_draft_tokens()

        accepted = 0
        for tokens in front.yield_rounds(call):
            yield tokens
            accepted = len(tokens) - 1
        if self.answer_drafts is not None:
            self.answer_drafts += accepted  # its count leaves out the last round, whose other drafts are not known


def choose_properties(options: OpenvinoOptions) -> dict[str, Any]:
    """OpenVINO's properties of a model. Raises ValueError for an unknown precision."""
    cache = options.cache or options.dtype
    for name in (options.dtype, cache):
        if name not in PRECISIONS:
            raise ValueError(f"OpenVINO has no precision {name!r} here: take one of {', '.join(PRECISIONS)}.")
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[options.dtype],
        "KV_CACHE_PRECISION": PRECISIONS[cache],
    }
    if options.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    return properties


def to_matrix(prompt: list[int]) -> Any:
    import numpy

    return numpy.array([prompt], dtype=numpy.int64)


def make_streamer(genai: Any) -> type:
    """The class of streamers that put the tokens of each round."""

    class Rounds(genai.StreamerBase):
        def __init__(self, put: Callable[[list[int]], None]):
            super().__init__()
            self.put = put

        def write(self, tokens: Any) -> Any:
            try:
                self.put([tokens] if isinstance(tokens, int) else list(tokens))
            except front.ClientGone:
                return genai.StreamingStatus.CANCEL
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Rounds


def main() -> None:
    options = OpenvinoOptions(**json.loads(sys.argv[1]))
    front.serve(OpenVino(options), options.host, options.port)


if __name__ == "__main__":
    main()
