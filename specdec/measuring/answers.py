"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes.

The decoder of this project (`OwnDecoder`) or a server (engine_answers.AnswerServer) writes them. `write` of both takes
jobs and yields what was written, some jobs at a time. `HeldoutAnswers` are those that validation replays: plain, and kept for later runs.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specdec.core import files, progress
from specdec.core.compile import Runner
from specdec.core.group import Group
from specdec.core.resumable import digest_bytes
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.engines.answers import AnswerJob, AnswerSettings, WrittenAnswer, make_answer
from specdec.engines.engine_target import EngineTarget
from specdec.measuring.measure import seeded_generator
from specdec.target.model import Target
from specdec.text import reading
from specdec.text.conversations import Prompt

HELDOUT_ROWS = 8  # held-out prompts that the target answers at once


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
            with reading.name_location(", ".join(filter(None, (job.location, f"prompt {job.id}")))):
                plain.check([job.tokens], self.settings.max_new_tokens)
        for temperature in sorted({job.temperature for job in ordered}):
            yield from self._answer([job for job in ordered if job.temperature == temperature])

    def _answer(self, jobs: list[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Jobs of one temperature, in their order. An answer that ends early waits for those before it."""

        def generator(number: int) -> torch.Generator:
            seed = self.settings.seed_of(jobs[number].id, bits=56)
            return torch.Generator(self.target.device).manual_seed(seed)

        settings, stop = self.settings, set(self.settings.stop)
        sampling = Sampling(jobs[0].temperature, top_p=settings.top_p)
        decoder = Decoder(self.target, None, sampling=sampling, stop=stop, runner=self.runner)
        prompts = [job.tokens for job in jobs]
        waiting_answers: dict[int, list[int]] = {}
        num_finished = 0
        for number, answer in decoder.answers(
            prompts, settings.max_new_tokens, batch_size=self.batch, generator=generator
        ):
            waiting_answers[number] = answer.tokens[0]
            finished = []
            while num_finished in waiting_answers:
                job = jobs[num_finished]
                finished.append(
                    (job, make_answer(self.tokenizer, waiting_answers.pop(num_finished), stop, job.context))
                )
                num_finished += 1
            if finished:
                yield finished


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
        key = {
            "target": self.target.fingerprint(),
            "dtype": str(self.target.dtype),
            "prompts": digest_bytes(json.dumps([prompt.tokens for prompt in prompts]).encode()),
            "sampling": asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "stop": sorted(self.stop),
            "seed": None if self.sampling.greedy else self.seed,
            **({} if self.engine is None else {"engine": True}),  # in another process, numbers are rounded otherwise
        }
        path = self.folder / f"{digest_bytes(json.dumps(key).encode())}.json"
        stored = group.share(_read_stored(path, key, len(prompts)) if group.main else None)
        if stored is not None:
            return stored
        written = []
        starts = group.mine(range(0, len(prompts), HELDOUT_ROWS))
        size = lambda start: min(HELDOUT_ROWS, len(prompts) - start)
        for start in progress.track_items(starts, "answers of the target", unit="prompts", size=size):
            start_time = time.perf_counter()
            tokens = [prompt.tokens for prompt in prompts[start : start + HELDOUT_ROWS]]
            written.append((start, self._write(start, tokens), time.perf_counter() - start_time))
        groups = sorted(group.gather(written))
        answers, seconds = (
            [answer for _, answers_of_group, _ in groups for answer in answers_of_group],
            max(seconds_of_group for *_, seconds_of_group in groups),
        )
        if group.main:
            document = {"about": key, "answers": answers, "seconds": seconds, "digest": _digest_answers(answers)}
            files.cache_document(path, document, "The target's answers to held-out prompts")
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


def _read_stored(path: Path, key: dict, num: int) -> tuple[list[list[int]], float] | None:
    """None if there is no such file, or a damaged one, which is written again."""
    try:
        document = json.loads(path.read_text())
        answers = document["answers"]
        is_valid = _digest_answers(answers) == document["digest"] and document["about"] == key and len(answers) == num
        return (answers, document["seconds"]) if is_valid else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_answers(answers: list[list[int]]) -> str:
    return digest_bytes(json.dumps(answers).encode())
