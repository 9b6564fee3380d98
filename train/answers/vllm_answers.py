"""Answers of vLLM in this process, without a server: for one machine whose Python has vLLM."""

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from train.answers.answering import Job, Law, Written, written

CHUNK = 8  # jobs that vLLM gets at once, for each one in flight: between two chunks it runs empty


def load(name: str, *, dtype: str, trust_remote_code: bool, in_flight: int, longest: int, **more: Any) -> Any:
    """vLLM's engine. longest: tokens of the longest prompt and its answer; more: further arguments of vllm.LLM

    Raises ValueError if vLLM is not there, or does not start.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(
            f"engine=vllm needs vLLM in this Python ({error}): pip install vllm, or start a server with python "
            "scripts/launch_engine.py and give engine=URL."
        ) from error
    settings = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "max_model_len": longest,
        "max_num_seqs": in_flight,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own defaults of sampling do not count
    }
    try:
        return LLM(model=name, **settings | more)
    except Exception as error:  # of many kinds, some from its own processes
        raise ValueError(
            f"vLLM cannot load {name}: {' '.join(str(error).split())}. Its log above may say more."
        ) from error


class VllmWriter:
    """A `Writer` with an engine that `load` gave."""

    def __init__(self, engine: Any, tokenizer: PreTrainedTokenizerBase, law: Law, in_flight: int):
        self.engine, self.tokenizer, self.law, self.in_flight = engine, tokenizer, law, in_flight

    def write(self, jobs: Iterable[Job], finished: Collection[str] = ()) -> Iterator[list[tuple[Job, Written]]]:
        missing = (job for job in jobs if job.id not in finished)
        while chunk := list(itertools.islice(missing, CHUNK * self.in_flight)):
            prompts = [{"prompt_token_ids": job.tokens} for job in chunk]
            outputs = self.engine.generate(prompts, [self._sampling(job) for job in chunk], use_tqdm=False)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            texts = functools.partial(written, self.tokenizer, stop=self.law.stop)
            yield [(job, texts(new, before=job.before)) for job, new in zip(chunk, tokens, strict=True)]

    def _sampling(self, job: Job) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=job.temperature,
            top_p=self.law.top_p,
            seed=self.law.seed_of(job.id, bits=31),
            max_tokens=self.law.max_new_tokens,
            stop_token_ids=sorted(self.law.stop),
            ignore_eos=True,  # only `stop` ends an answer
            detokenize=False,
        )
