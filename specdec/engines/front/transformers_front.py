"""transformers' own `generate` as a server, for engine=transformers of `specdec launch_engine`.

    python transformers_front.py '{"target": FOLDER, "assistant": FOLDER, "port": 8000}'

It drafts with a draft model, whose generation_config.json says how many tokens, with a prompt lookup, or with the
target's own MTP modules (`use_mtp`). It needs torch and transformers 5.17 or later, and nothing of this project but
front.py beside it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

if __package__:
    from specdec.engines.front import front
else:  # run as a program, in an environment without this project
    sys.path.insert(0, str(Path(__file__).parent))
    import front  # type: ignore[no-redef]


@dataclass(frozen=True)
class TransformersOptions:
    """The server of one target.

    target, assistant: folders or names; assistant: a draft model
    drafts: drafts of a round; None: as the assistant's folder says, or the modules of an MTP
    lookup: whether drafts are looked up in the prompt and the answer; mtp: whether the target's MTP modules draft
    device: name of torch, or auto: the layers on all GPUs; None: CUDA's, if there is one
    dtype: name of a torch dtype, or auto; port: 0 takes a free one; max_length: tokens of a prompt and its answer
    """

    target: str
    assistant: str | None = None
    drafts: int | None = None
    lookup: bool = False
    mtp: bool = False
    device: str | None = None
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    max_length: int = 4096
    trust_remote_code: bool = False


class Transformers(front.Generator):
    """transformers' generate, greedily, with its own speculation.

    Drafts begin behind the prompt's own pass, so that a round means the same as in other engines: an assistant of
    transformers drafts in that pass already. `drafted` is the number of candidates that the target verified.
    """

    owner, version = "transformers", transformers.__version__

    def __init__(self, options: TransformersOptions):
        target = load_model(options.target, options)
        self.target, self.model = target, options.target
        ends = target.generation_config.eos_token_id
        self.stop = frozenset([ends] if isinstance(ends, int) else ends or [])
        text = target.config.get_text_config()
        self.vocabulary = text.vocab_size
        self.max_length = min(options.max_length, getattr(text, "max_position_embeddings", options.max_length))
        self.arguments: dict[str, Any] = {}
        if options.assistant is not None:
            assistant = load_model(options.assistant, options)
            if options.drafts is not None:
                assistant.generation_config.num_assistant_tokens = options.drafts
            self.longest = assistant.generation_config.num_assistant_tokens
            self.arguments = {"assistant_model": assistant}
        elif options.lookup:
            self.longest = options.drafts or 10  # as in transformers' documentation
            self.arguments = {"prompt_lookup_num_tokens": self.longest}
        elif options.mtp:
            self.longest = getattr(text, "num_mtp_layers", None)
            if not self.longest:
                raise ValueError(
                    f"{options.target} has no MTP modules that transformers {transformers.__version__} reads."
                )
            self.arguments = {"use_mtp": True}
        self.make_candidates = target._get_candidate_generator

    def generate(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        yield from self._yield_rounds(prompt, max_tokens, stop, self.arguments)

    def generate_plainly(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        yield from self._yield_rounds(prompt, max_tokens, stop, {})

    def _yield_rounds(self, prompt: list[int], max_tokens: int, stop: set[int], arguments: dict) -> Iterator[list[int]]:
        ids = torch.tensor([prompt], device=self.target.device)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
        limits = {"max_new_tokens": max_tokens, "max_length": None, "eos_token_id": sorted(stop) or None}
        common = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **greedy, **limits}

        def call(put: Callable[[Any], None]) -> None:
            candidates: list[int] = []
            self.target._get_candidate_generator = lambda **fields: Counted(self.make_candidates(**fields), candidates)
            with torch.inference_mode():
                self.target.generate(**common, **arguments, streamer=Rounds(put, candidates))

        for tokens, self.drafted in front.yield_rounds(call):
            yield tokens


def load_model(name: str, options: TransformersOptions) -> Any:
    """A target or an assistant, on the device."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    load = transformers.AutoModelForCausalLM.from_pretrained
    place = {"device_map": "auto"} if device == "auto" else {}
    model = load(name, dtype=options.dtype, trust_remote_code=options.trust_remote_code, **place).eval()
    return model if place else model.to(device)


class Rounds(transformers.generation.streamers.BaseStreamer):
    """Puts the tokens of each round, with the number of candidates before it; the first call has the prompt."""

    def __init__(self, put: Callable[[Any], None], candidates: list[int]):
        self.deliver, self.candidates, self.has_prompt = put, candidates, False

    def put(self, value: torch.Tensor) -> None:
        if self.has_prompt:
            self.deliver((value.flatten().tolist(), self.candidates[-1] if self.candidates else 0))
        self.has_prompt = True

    def end(self) -> None:
        pass


class Counted:
    """Another candidate generator, whose candidates are counted; none are asked for in the prompt's own pass."""

    def __init__(self, generator: Any, counts: list[int]):
        self.generator, self.counts = generator, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def get_candidates(self, input_ids: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, logits = input_ids, None
        if self.counts or self.generator.requires_model_outputs:  # those draft nothing in that pass by themselves
            self._extend_inputs(input_ids)
            ids, logits = self.generator.get_candidates(input_ids, **fields)
        self.counts.append(ids.shape[1] - input_ids.shape[1])
        return ids, logits

    def _extend_inputs(self, input_ids: torch.Tensor) -> None:
        """Makes an assistant's first inputs as long as the prompt and its first token."""
        inputs = getattr(self.generator, "assistant_kwargs", None)
        if inputs is not None and "past_key_values" not in inputs:
            inputs.pop("position_ids", None)
            inputs["attention_mask"] = torch.ones_like(input_ids)


def main() -> None:
    options = TransformersOptions(**json.loads(sys.argv[1]))
    transformers.logging.set_verbosity_error()
    front.serve(Transformers(options), options.host, options.port)


if __name__ == "__main__":
    main()
