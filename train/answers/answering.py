"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes.

Three things write them: the decoder of this project (OwnDecoder), a server (engine_answers.py), vLLM in this process
(vllm_answers.py). All of them take jobs and yield what was written, some jobs at a time.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.target.model import Target
from train.data import chat_template, reading
from train.data import rows as data


@dataclass(frozen=True)
class Job:
    """One answer to write."""

    id: str
    category: str
    temperature: float
    messages: list[dict]
    tokens: list[int]  # the rendered prompt
    tags: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)  # what beside messages makes the prompt: `thinking`, `tools`
    place: str = ""  # file and line of the prompt
    prompt: str | None = None  # the text that a model without a chat template continues; None: it answers messages

    @property
    def before(self) -> list[int]:
        """The tokens that the text of the answer goes on from; none for the answer to messages."""
        return [] if self.prompt is None else self.tokens

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prompt: dict,
        temperatures: Iterable[float],
        *,
        thinking: bool | None = None,
        tags: tuple[str, ...] = (),
    ) -> "list[Job]":
        """Of a row of reading.load_prompts, one for each temperature. thinking: its mode, if it does not say it"""
        shared: dict = {
            "category": prompt["category"],
            "messages": prompt["messages"],
            "tokens": data.encode_row(tokenizer, prompt, thinking=thinking),
            "tags": tuple(dict.fromkeys([*prompt["tags"], *tags])),
            "prompt": None if tokenizer.chat_template else prompt.get("prompt"),
            "options": ({} if thinking is None else {"thinking": thinking}) | chat_template.options_of(prompt),
            "place": prompt.get("place", ""),
        }
        return [cls(id=f"{prompt['id']}@{each:g}", temperature=each, **shared) for each in temperatures]


@dataclass(frozen=True)
class Law:
    """How texts are sampled, and where they end. Each text has a random seed of its own, which follows from `seed` and its id."""

    stop: frozenset[int]  # tokens that end a text
    max_new_tokens: int
    top_p: float = 1.0
    seed: int = 0

    def seed_of(self, name: str, bits: int) -> int:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:7], "big") % 2**bits


@dataclass(frozen=True)
class Written:
    """What the target wrote for one job."""

    text: str
    finish: str  # "stop", or "length" if it was cut
    tokens: list[int] | None  # with the token that ended it; None where only the text is known
    num_tokens: int


class Writer(Protocol):
    def write(self, jobs: Iterable[Job], finished: Collection[str] = ()) -> Iterator[list[tuple[Job, Written]]]:
        """What was written for the jobs, some of them at a time. finished: ids of jobs that are left out"""
        ...


def list_jobs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    temperatures: list[float],
    *,
    thinking: bool | None = None,
    tags: tuple[str, ...] = (),
) -> list[Job]:
    """One job for each prompt and temperature. tags: added to those of the prompts; thinking: mode of prompts that do not say theirs

    Raises ValueError if two prompts have the same id, or for a thinking mode that the chat template does not have.
    """
    chat_template.check_mode(tokenizer, thinking)
    jobs = [job for prompt in prompts for job in Job.of(tokenizer, prompt, temperatures, thinking=thinking, tags=tags)]
    if len({job.id for job in jobs}) < len(jobs):
        known: dict[str, Job] = {}
        first, second = next((known[job.id], job) for job in jobs if known.setdefault(job.id, job) is not job)
        raise ValueError(
            f"Two prompts have the same id, {first.id.rpartition('@')[0]} ({first.place}; {second.place}). Make the ids unique."
        )
    return jobs


def written(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: Collection[int], before: list[int] | None = None
) -> Written:
    """tokens: what the target wrote, with the token that ended it; before: Job.before, as spaces may depend on it"""
    finish = "stop" if tokens[-1] in stop else "length"
    said, before = tokens[:-1] if finish == "stop" else tokens, before or []
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text = str(decode(before + said))[len(str(decode(before))) :]
    text = text.rstrip("\ufffd") if finish == "length" else text  # the cut may fall inside a character
    return Written(text, finish, tokens, len(tokens))


def conversation(job: Job, answer: Written, *, tokenizer: str) -> dict:
    """A row to train on. tokenizer: digest of the vocabulary that the ids belong to (data.vocabulary)"""
    row = {"id": job.id, "category": job.category, "temperature": job.temperature, "finish": answer.finish}
    row |= job.options
    if job.tags:
        row["tags"] = list(job.tags)
    if job.prompt is None:
        row["messages"] = [*job.messages, {"role": "assistant", "content": answer.text}]
    else:
        row |= {"prompt": job.prompt, "completion": answer.text}
    if answer.tokens is not None:
        row |= {
            "tokens": job.tokens + answer.tokens,
            "prompt_tokens": len(job.tokens),
            "tokenizer": tokenizer,
        }
    return row


@dataclass(frozen=True)
class OwnDecoder:
    """A `Writer` that decodes in this process, `batch` jobs at once: when an answer ends, the next job takes its place.

    An answer's random numbers follow from its job's id, whatever is decoded beside it. runner: compiles the target's passes
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    law: Law
    batch: int
    runner: Runner = field(default_factory=Runner)

    def write(self, jobs: Iterable[Job], finished: Collection[str] = ()) -> Iterator[list[tuple[Job, Written]]]:
        """Of each temperature the longest prompts come first, so that too little memory shows at once."""
        missing = sorted((job for job in jobs if job.id not in finished), key=lambda job: -len(job.tokens))
        plain = Decoder(self.target, None, sampling=Sampling(), stop=set())
        for job in missing:  # now, not after the others are answered
            with reading.at(", ".join(filter(None, (job.place, f"prompt {job.id}")))):
                plain.check([job.tokens], self.law.max_new_tokens)
        for temperature in sorted({job.temperature for job in missing}):
            yield from self._answer([job for job in missing if job.temperature == temperature])

    def _answer(self, jobs: list[Job]) -> Iterator[list[tuple[Job, Written]]]:
        """Jobs of one temperature, in their order. An answer that ends early waits for those before it."""

        def generator(number: int) -> torch.Generator:
            seed = self.law.seed_of(jobs[number].id, bits=56)
            return torch.Generator(self.target.device).manual_seed(seed)

        sampling = Sampling(jobs[0].temperature, top_p=self.law.top_p)
        decoder = Decoder(self.target, None, sampling=sampling, stop=set(self.law.stop), runner=self.runner)
        prompts = [job.tokens for job in jobs]
        waiting: dict[int, list[int]] = {}
        num_done = 0
        for number, answer in decoder.answers(prompts, self.law.max_new_tokens, rows=self.batch, generator=generator):
            waiting[number] = answer.tokens[0]
            done = []
            while num_done in waiting:
                tokens = waiting.pop(num_done)
                done.append((jobs[num_done], written(self.tokenizer, tokens, self.law.stop, jobs[num_done].before)))
                num_done += 1
            if done:
                yield done
