"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes.

The decoder of this project (`OwnDecoder`) or a server (engine_answers.AnswerServer) writes them. `write` of both takes
jobs and yields what was written, some jobs at a time. `HeldoutAnswers` are those that validation replays: plain, and kept for later runs.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from specdec.core import files
from specdec.core.answer_text import BROKEN, TextDecoder
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import Prompt, seeded_generator
from specdec.target.model import Target
from train import progress
from train.answers.resumable import digest
from train.data import chat_template, reading
from train.data import rows as data
from train.data.messages import read_arguments, write_arguments
from train.distributed import Group
from train.features.engine_features import EngineTarget

HELDOUT_ROWS = 8  # held-out prompts that the target answers at once


@dataclass(frozen=True)
class AnswerJob:
    """One answer to write."""

    id: str
    category: str
    temperature: float
    messages: list[dict]
    tokens: list[int]  # the rendered prompt
    tags: tuple[str, ...] = ()
    arguments: dict = field(default_factory=dict)  # of the chat template, and `tools`
    place: str = ""  # file and line of the prompt
    prompt: str | None = None  # the text that a model without a chat template continues; None: it answers messages

    @property
    def before(self) -> list[int]:
        """The tokens that the text of the answer goes on from; none for the answer to messages."""
        return [] if self.prompt is None else self.tokens


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are sampled, and where they end. The random seed of an answer follows from `seed` and the id of its job."""

    stop: frozenset[int]  # tokens that end an answer
    max_new_tokens: int
    top_p: float = 1.0
    seed: int = 0

    def seed_of(self, name: str, bits: int) -> int:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:7], "big") % 2**bits


@dataclass(frozen=True)
class WrittenAnswer:
    """What the target wrote for one job."""

    text: str
    finish: str  # "stop", or "length" if it was cut
    tokens: list[int]  # with the token that ended it


def list_jobs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    temperatures: list[float],
    arguments: dict[str, Any] | None = None,
) -> list[AnswerJob]:
    """One job for each prompt and temperature.

    prompts: rows of reading.load_prompts; arguments: of the chat template, for prompts that do not say them
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
            "place": prompt.get("place", ""),
        }
        for temperature in temperatures:
            job = AnswerJob(id=f"{prompt['id']}@{temperature:g}", temperature=temperature, **shared)
            if (first := jobs.setdefault(job.id, job)) is not job:
                raise ValueError(
                    f"Two prompts have the same id, {prompt['id']} ({first.place}; {job.place}). Make the ids unique."
                )
    return list(jobs.values())


def make_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: Collection[int], before: list[int] | None = None
) -> WrittenAnswer:
    """tokens: what the target wrote, with the token that ended it; before: AnswerJob.before, as spaces may depend on it"""
    finish = "stop" if tokens[-1] in stop else "length"
    said = tokens[:-1] if finish == "stop" else tokens
    text = TextDecoder.of(tokenizer).text(said, before or ())
    text = text.rstrip(BROKEN) if finish == "length" else text  # the cut may fall inside a character
    return WrittenAnswer(text, finish, tokens)


def make_row(job: AnswerJob, answer: WrittenAnswer, *, tokenizer: str, writer: str | None = None) -> dict:
    """A row to train on. tokenizer: digest of the vocabulary that the ids belong to (data.vocabulary)

    writer: fingerprint of the target that wrote it, if it is known
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


@dataclass(frozen=True)
class OwnDecoder:
    """Decodes in this process, `batch` jobs at once: when an answer ends, the next job takes its place.

    The random numbers of an answer follow from the id of its job, whatever is decoded beside it.
    runner: compiles the target's passes
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    settings: AnswerSettings
    batch: int
    runner: Runner = field(default_factory=Runner)

    def write(self, jobs: Iterable[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Of each temperature the longest prompts come first, so that too little memory shows at once."""
        ordered = sorted(jobs, key=lambda job: -len(job.tokens))
        plain = Decoder(self.target, None, sampling=Sampling(), stop=set())
        for job in ordered:  # now, not after the others are answered
            with reading.at(", ".join(filter(None, (job.place, f"prompt {job.id}")))):
                plain.check([job.tokens], self.settings.max_new_tokens)
        for temperature in sorted({job.temperature for job in ordered}):
            yield from self._answer([job for job in ordered if job.temperature == temperature])

    def _answer(self, jobs: list[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Jobs of one temperature, in their order. An answer that ends early waits for those before it."""

        def generator(number: int) -> torch.Generator:
            seed = self.settings.seed_of(jobs[number].id, bits=56)
            return torch.Generator(self.target.device).manual_seed(seed)

        chosen, stop = self.settings, set(self.settings.stop)
        sampling = Sampling(jobs[0].temperature, top_p=chosen.top_p)
        decoder = Decoder(self.target, None, sampling=sampling, stop=stop, runner=self.runner)
        prompts = [job.tokens for job in jobs]
        early: dict[int, list[int]] = {}
        num_done = 0
        for number, answer in decoder.answers(prompts, chosen.max_new_tokens, rows=self.batch, generator=generator):
            early[number] = answer.tokens[0]
            done = []
            while num_done in early:
                job = jobs[num_done]
                done.append((job, make_answer(self.tokenizer, early.pop(num_done), stop, job.before)))
                num_done += 1
            if done:
                yield done


@dataclass(frozen=True)
class HeldoutAnswers:
    """The target's plain answers to held-out prompts, kept in a file of `folder` that runs share.

    engine: writes them in place of the target here
    """

    target: Target
    sampling: Sampling
    max_new_tokens: int
    stop: set[int]
    seed: int
    folder: Path
    engine: EngineTarget | None = None

    def get(self, prompts: list[Prompt], group: Group) -> tuple[list[list[int]], float]:
        """-> the answers, read from the disk or written now; the longest seconds that HELDOUT_ROWS of them took to write

        All processes call it together; each group of them writes a part.
        """
        about = {
            "target": self.target.fingerprint(),
            "dtype": str(self.target.dtype),
            "prompts": digest(json.dumps([prompt.tokens for prompt in prompts]).encode()),
            "sampling": asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "stop": sorted(self.stop),
            "seed": None if self.sampling.greedy else self.seed,
            **({} if self.engine is None else {"engine": True}),  # in another process, numbers are rounded otherwise
        }
        path = self.folder / f"{digest(json.dumps(about).encode())}.json"
        main = PartialState().is_main_process
        (known,) = broadcast_object_list([_read_kept(path, about, len(prompts)) if main else None])
        if known is not None:
            return known
        written = []
        starts = group.mine(range(0, len(prompts), HELDOUT_ROWS))
        size = lambda start: min(HELDOUT_ROWS, len(prompts) - start)
        for start in progress.track(starts, "answers of the target", unit="prompts", size=size):
            begun = time.perf_counter()
            tokens = [prompt.tokens for prompt in prompts[start : start + HELDOUT_ROWS]]
            written.append((start, self._write(start, tokens), time.perf_counter() - begun))
        groups = sorted(group.gather(written))
        answers, seconds = [each for _, some, _ in groups for each in some], max(took for *_, took in groups)
        if main:
            kept = {"about": about, "answers": answers, "seconds": seconds, "digest": _digest_of(answers)}
            files.keep_document(path, kept, "The target's answers to held-out prompts")
        return answers, seconds

    def _write(self, start: int, prompts: list[list[int]]) -> list[list[int]]:
        """start: number of the first prompt"""
        seed = self.seed + start
        if self.engine is not None:
            return self.engine.answer(
                prompts, sampling=self.sampling, max_new_tokens=self.max_new_tokens, stop=self.stop, seed=seed
            )
        decoder = Decoder(self.target, None, sampling=self.sampling, stop=self.stop)
        return decoder.generate(prompts, self.max_new_tokens, generator=seeded_generator(self.target, seed)).tokens


def _read_kept(path: Path, about: dict, num: int) -> tuple[list[list[int]], float] | None:
    """None if there is no such file, or a damaged one, which is written again."""
    try:
        document = json.loads(path.read_text())
        answers = document["answers"]
        whole = _digest_of(answers) == document["digest"] and document["about"] == about and len(answers) == num
        return (answers, document["seconds"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_of(answers: list[list[int]]) -> str:
    return digest(json.dumps(answers).encode())
