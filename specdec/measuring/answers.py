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
from specdec.core.resumable import digest
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
        known = group.share(_read_kept(path, about, len(prompts)) if group.main else None)
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
        if group.main:
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
