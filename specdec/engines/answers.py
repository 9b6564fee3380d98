"""Answers of servers: many requests at once, and results in the order of the jobs.

vLLM (v1/completions) and llama.cpp (completion) take and give token ids.
"""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.core.answer_text import REPLACEMENT, TextDecoder
from specdec.core.wording import format_count
from specdec.engines.client import LLAMA_CPP, BadAnswer, EngineClient, Refused, find_fingerprint
from specdec.engines.hidden_states import discard_states
from specdec.text import chat_template
from specdec.text import conversations as data
from specdec.text.messages import read_arguments, write_arguments

WAITING_PER_REQUEST = 4  # answers that may wait for an earlier one, for each request in flight: they take memory


@dataclass(frozen=True)
class AnswerJob:
    """One answer to write."""

    id: str
    category: str
    temperature: float
    messages: list[dict]
    tokens: list[int]  # token ids of the rendered prompt
    tags: tuple[str, ...] = ()
    arguments: dict = field(default_factory=dict)  # variables of the chat template, and `tools`
    location: str = ""  # file and line of the prompt
    prompt: str | None = None  # text that a model without a chat template continues; None: messages are answered

    @property
    def context(self) -> list[int]:
        """The tokens before the answer's text; none for an answer to messages."""
        return [] if self.prompt is None else self.tokens


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of sampling, and the end of answers. An answer's random seed follows from `seed` and its job's id."""

    stop: frozenset[int]  # token ids that end an answer
    max_new_tokens: int
    top_p: float = 1.0
    seed: int = 0

    def seed_of(self, name: str, bits: int) -> int:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:7], "big") % 2**bits


@dataclass(frozen=True)
class WrittenAnswer:
    """The target's answer to one job."""

    text: str
    finish: str  # "stop", or "length" if it was cut
    tokens: list[int]  # token ids, with the token that ended the answer


class AnswerServer:
    """The target in one server, or in several that are used in turn. They answer jobs in their order.

    name: the target's name, which the server's model is compared with
    example: a job, by whose prompt the servers' tokenizer is compared
    `fingerprint`: fingerprint of the weights that answer; None: unknown
    Raises ValueError, with what to do, if a server does not answer or has another tokenizer.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        settings: AnswerSettings,
        *,
        name: str,
        example: AnswerJob,
    ):
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        model_entry = self._choose_model(name)
        self.model, self.of_llama_cpp = str(model_entry["id"]), model_entry.get("owned_by") == LLAMA_CPP
        self.fingerprint = find_fingerprint(model_entry)
        check_tokenizer(client, self.model, tokenizer, example.tokens)

    def write(self, jobs: Iterable[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Yields the jobs with their answers, some at a time."""
        return yield_in_order(self._submit, iter(jobs), max_waiting=WAITING_PER_REQUEST * self.client.in_flight)

    def _submit(self, job: AnswerJob) -> "Future[WrittenAnswer]":
        settings = self.settings
        seed = settings.seed_of(job.id, bits=31)
        if self.of_llama_cpp:
            body = {
                "prompt": job.tokens,
                "n_predict": settings.max_new_tokens,
                "samplers": ["temperature", "top_p"],  # no others, in the order of vLLM
                "temperature": job.temperature,
                "top_p": settings.top_p,
                "seed": seed,
                "return_tokens": True,
                "cache_prompt": False,  # answers do not depend on those before
            }
            return self.client.submit("completion", body, lambda answer: self.read_answer(self._as_vllm(answer), job))

        def read(answer: dict) -> WrittenAnswer:
            written = self.read_answer(answer, job)
            discard_states(answer, job.tokens + written.tokens)
            return written

        body = {  # all settings that the interface leaves open, so that the model's defaults do not count
            "model": self.model,
            "prompt": job.tokens,
            "max_tokens": settings.max_new_tokens,
            "temperature": job.temperature,
            "top_p": settings.top_p,
            "seed": seed,
            "stop_token_ids": sorted(settings.stop),
            "ignore_eos": True,  # only `stop` ends an answer
            "return_token_ids": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return self.client.submit("v1/completions", body, read)

    def _as_vllm(self, answer: dict) -> dict:
        """An answer of llama.cpp in vLLM's form, cut at the first stop token: it knows only those of its file."""
        tokens = answer.get("tokens") or []
        end = next((n + 1 for n, token in enumerate(tokens) if token in self.settings.stop), None)
        finish = "length" if end is None and answer.get("stop_type") == "limit" else "stop"
        return {"choices": [{"token_ids": tokens[:end], "finish_reason": finish}]}

    def read_answer(self, answer: dict, job: AnswerJob) -> WrittenAnswer:
        """The answer to a job. Raises BadAnswer for one that may be right the next time."""
        settings = self.settings
        try:
            choice = answer["choices"][0]
            tokens, finish = choice.get("token_ids"), choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadAnswer(f"it has no answer of the interface's form ({type(error).__name__}: {error})") from error
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise BadAnswer(f"the answer to {job.id} has no token ids, which vLLM and llama.cpp give")
        ended = tokens[-1] in settings.stop
        if finish not in ("stop", "length") or (finish == "stop" and not ended):
            raise BadAnswer(
                f"the answer to {job.id} ended because of {finish!r} with token {tokens[-1]}, which is none of the "
                f"target's stop tokens {sorted(settings.stop)}"
            )
        if not ended and len(tokens) != settings.max_new_tokens:
            raise BadAnswer(
                f"the answer to {job.id} was cut after {format_count(len(tokens), 'token')}, not "
                f"{settings.max_new_tokens}"
            )
        return make_answer(self.tokenizer, tokens, settings.stop, job.context)

    # What the servers are

    def _choose_model(self, name: str) -> dict:
        """The first server's entry for the target's model, whose name all servers must have."""
        listings = []
        for models in self.client.describe_models():
            listings.append({str(model["id"]): model for model in models})
        common = [model_id for model_id in listings[0] if all(model_id in models for models in listings)]
        if not common:
            names = "; ".join(", ".join(models) for models in listings)
            raise ValueError(f"The servers have no model in common ({names}). Give those of one target.")
        last = PurePosixPath(name).name.lower()
        model = next((model_id for model_id in common if PurePosixPath(model_id).name.lower() == last), None)
        if model is None:
            model = common[0]
            warnings.warn(
                f"The server's model is called {model}, and target.name={name}: make sure that they are the same.",
                stacklevel=2,
            )
        return listings[0][model]


def check_tokenizer(client: EngineClient, model: str, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> None:
    """Compares token ids if servers have /tokenize, as vLLM and llama.cpp do. tokens: ids of an example prompt

    Raises ValueError for a server with another tokenizer.
    """
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    expected_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    try:
        for _ in client.urls:  # they are asked in turn
            server_ids = client.post("tokenize", body, lambda answer: answer.get("tokens"))
            if isinstance(server_ids, list) and server_ids and server_ids != expected_ids:
                raise ValueError(
                    f"The server's tokenizer is not the target's: it gives {len(server_ids)} ids for a prompt that has "
                    f"{len(expected_ids)}, or other ids. Serve the model that target.name= names."
                )
    except Refused:
        return


def yield_in_order(
    submit: Callable[[AnswerJob], "Future[WrittenAnswer]"], jobs: Iterator[AnswerJob], *, max_waiting: int
) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
    """Yields results in the order of the jobs, as soon as they come. max_waiting: number of jobs under way"""
    waiting: deque[tuple[AnswerJob, Future[WrittenAnswer]]] = deque()
    try:
        while True:
            while len(waiting) < max_waiting and (job := next(jobs, None)) is not None:
                waiting.append((job, submit(job)))
            if not waiting:
                return
            ready = [(waiting[0][0], waiting[0][1].result())]
            waiting.popleft()
            while waiting and waiting[0][1].done() and waiting[0][1].exception() is None:  # else it raises next time
                job, future = waiting.popleft()
                ready.append((job, future.result()))
            yield ready
    finally:
        for _, future in waiting:
            future.cancel()


def list_jobs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    temperatures: list[float],
    arguments: dict[str, Any] | None = None,
) -> list[AnswerJob]:
    """One job for each prompt and temperature.

    prompts: rows of reading.load_prompts; arguments: variables of the chat template, for prompts without their own
    Raises ValueError if two prompts have the same id, or for an argument that the chat template does not read.
    """
    chat_template.check_arguments(tokenizer, arguments or {})
    jobs: dict[str, AnswerJob] = {}
    for prompt in prompts:
        shared: dict = {
            "category": prompt["category"],
            "messages": prompt["messages"],
            "tokens": data.encode_row(tokenizer, prompt, arguments),
            "tags": tuple(prompt["tags"]),
            "prompt": None if tokenizer.chat_template else prompt.get("prompt"),
            "arguments": {**(arguments or {}), **read_arguments(prompt)},
            "location": prompt.get("place", ""),
        }
        for temperature in temperatures:
            job = AnswerJob(id=f"{prompt['id']}@{temperature:g}", temperature=temperature, **shared)
            if (first := jobs.setdefault(job.id, job)) is not job:
                raise ValueError(
                    f"Two prompts have the same id, {prompt['id']} ({first.location}; {job.location}). Make the ids "
                    "unique."
                )
    return list(jobs.values())


def make_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: Collection[int], context: list[int] | None = None
) -> WrittenAnswer:
    """Makes an answer of the token ids that the target wrote, with the token that ended it.

    context: AnswerJob.context; spaces at the start of the text may depend on it
    """
    finish = "stop" if tokens[-1] in stop else "length"
    answer_tokens = tokens[:-1] if finish == "stop" else tokens
    text = TextDecoder.from_tokenizer(tokenizer).text(answer_tokens, context or ())
    text = text.rstrip(REPLACEMENT) if finish == "length" else text  # the cut may fall inside a character
    return WrittenAnswer(text, finish, tokens)


def make_row(job: AnswerJob, answer: WrittenAnswer, *, tokenizer: str, writer: str | None = None) -> dict:
    """Makes a row to train on. tokenizer: digest of the vocabulary that the ids belong to (data.vocabulary)

    writer: fingerprint of the target that wrote the answer; None: unknown
    """
    row = {"id": job.id, "category": job.category, "temperature": job.temperature, "finish": answer.finish}
    row |= write_arguments(job.arguments)
    if job.tags:
        row["tags"] = list(job.tags)
    if job.prompt is None:
        row["messages"] = [*job.messages, {"role": "assistant", "content": answer.text}]
    else:
        row |= {"prompt": job.prompt, "completion": answer.text}
    if writer is not None:
        row["target_fingerprint"] = writer
    ids = {"tokens": job.tokens + answer.tokens, "prompt_tokens": len(job.tokens), "tokenizer": tokenizer}
    return row | ids
