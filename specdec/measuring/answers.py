"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes.

This project's decoder (`OwnDecoder`) or a server (engines.answers.AnswerServer) writes them. `write` of both takes jobs
and yields groups of answered jobs. Validation replays `HeldoutAnswers`: plain ones, which later runs find again.
"""

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
from specdec.measuring.measure import limit_rows, seeded_generator
from specdec.target.model import Target
from specdec.text import reading
from specdec.text.conversations import Prompt

HELDOUT_ROWS = 8  # batch size of held-out prompts; also the unit of their seconds, so later runs compare


@dataclass(frozen=True)
class OwnDecoder:
    """This project's decoder, as a writer of answers: `batch` jobs at once, the next one when an answer ends.

    The random numbers of an answer depend on the id of its job alone. runner: compiler of the target's passes
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    settings: AnswerSettings
    batch: int
    runner: Runner = field(default_factory=Runner)

    def write(self, jobs: Iterable[AnswerJob]) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Yields answered jobs, temperature by temperature, longest prompts first: too little memory shows at once.

        Raises ValueError, naming the prompt, before the first answer if any prompt is too long for the target.
        """
        ordered = sorted(jobs, key=lambda job: -len(job.tokens))
        plain = Decoder(self.target, None, sampling=Sampling(), stop=set())
        for job in ordered:
            with reading.name_location(", ".join(filter(None, (job.location, f"prompt {job.id}")))):
                plain.check([job.tokens], self.settings.max_new_tokens)
        ordered.sort(key=lambda job: job.temperature)
        for (_, num_rows), group in itertools.groupby(
            ordered, lambda job: (job.temperature, limit_rows(self.batch, len(job.tokens)))
        ):
            yield from self._answer(list(group), num_rows)
            if num_rows < self.batch:
                self.runner.memories.clear()  # K and V for another number of rows

    def _answer(self, jobs: list[AnswerJob], num_rows: int) -> Iterator[list[tuple[AnswerJob, WrittenAnswer]]]:
        """Yields answered jobs of one temperature in their order. An early answer waits for those before it.

        num_rows: jobs that are answered at once
        """

        def make_generator(number: int) -> torch.Generator:
            seed = self.settings.seed_of(jobs[number].id, bits=56)
            return torch.Generator().manual_seed(seed)

        settings, stop = self.settings, set(self.settings.stop)
        sampling = Sampling(jobs[0].temperature, top_p=settings.top_p)
        decoder = Decoder(self.target, None, sampling=sampling, stop=stop, runner=self.runner)
        prompts = [job.tokens for job in jobs]
        decoder.expect(max(map(len, prompts)) + settings.max_new_tokens, batch_size=num_rows)
        waiting_answers: dict[int, list[int]] = {}
        num_finished = 0
        answers = decoder.answers(prompts, settings.max_new_tokens, batch_size=num_rows, generator=make_generator)
        for number, answer in answers:
            waiting_answers[number] = answer.tokens[0]
            finished = []
            while num_finished in waiting_answers:
                job, tokens = jobs[num_finished], waiting_answers.pop(num_finished)
                finished.append((job, make_answer(self.tokenizer, tokens, stop, job.context)))
                num_finished += 1
            if finished:
                yield finished


@dataclass(frozen=True)
class HeldoutAnswers:
    """The target's plain answers to held-out prompts, stored in a file of `folder` that runs share.

    engine: server that writes them; None: the target in this process
    runner: compiler of the target's passes; as it is made here, a GPU measures the fastest mode, a CPU compiles nothing
    """

    target: Target
    sampling: Sampling
    max_new_tokens: int
    stop: set[int]
    seed: int
    folder: Path
    engine: EngineTarget | None = None
    runner: Runner = field(default_factory=lambda: Runner(None, cuda_graphs=None))

    def get(self, prompts: list[Prompt], group: Group) -> tuple[list[list[int]], float]:
        """The answers, stored or written now, and the longest seconds that a batch of them took to write.

        All processes call it together, and share the writing.
        """
        key = {
            "target": self.target.fingerprint(),
            "dtype": str(self.target.dtype),
            "prompts": _digest_json([prompt.tokens for prompt in prompts]),
            "sampling": asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "stop": sorted(self.stop),
            "seed": None if self.sampling.greedy else self.seed,
            **({} if self.engine is None else {"engine": True}),  # in another process, numbers are rounded otherwise
        }
        path = self.folder / f"{_digest_json(key)}.json"
        stored = group.share(_read_stored(path, key, len(prompts)) if group.main else None)
        if stored is not None:
            return stored
        batches = {start: prompts[start : start + num] for start, num in split_heldout(prompts).items()}
        decoder = self._make_decoder(batches.values())  # measures the mode of passes before the answers' seconds
        written = self._write_groups(decoder, {start: batches[start] for start in group.mine(list(batches))})
        self.runner.memories.clear()  # K and V of many rows
        gathered = sorted(group.gather(written))
        answers = [answer for _, answers_of_group, _ in gathered for answer in answers_of_group]
        seconds = max(seconds_of_group for *_, seconds_of_group in gathered)
        if group.main:
            document = {"about": key, "answers": answers, "seconds": seconds, "digest": _digest_json(answers)}
            files.cache_document(path, document, "The target's answers to held-out prompts")
        return answers, seconds

    def _make_decoder(self, batches: Iterable[list[Prompt]]) -> Decoder | None:
        """A plain decoder for these batches; None with an engine"""
        if self.engine is not None:
            return None
        decoder = Decoder(self.target, None, sampling=self.sampling, stop=self.stop, runner=self.runner)
        for batch in batches:
            longest = max(len(prompt.tokens) for prompt in batch)
            decoder.expect(longest + self.max_new_tokens, batch_size=len(batch))
        return decoder

    def _write_groups(
        self, decoder: Decoder | None, groups: dict[int, list[Prompt]]
    ) -> list[tuple[int, list[list[int]], float]]:
        """-> number of the first prompt, answers and seconds of each group. groups: prompts by number of the first"""
        prompts = list(itertools.chain.from_iterable(groups.values()))
        num_tokens = sum(len(prompt.tokens) for prompt in prompts)
        tracked = progress.track_items(
            groups.items(), "answers of the target", unit="prompts", size=lambda pair: len(pair[1])
        )
        written = []
        for start, group in progress.track_tokens(tracked, read=num_tokens, written=self.max_new_tokens * len(prompts)):
            start_time = time.perf_counter()
            answers = self._write(decoder, start, [prompt.tokens for prompt in group])
            written.append((start, answers, time.perf_counter() - start_time))
        return written

    def _write(self, decoder: Decoder | None, start: int, prompts: list[list[int]]) -> list[list[int]]:
        """The answers to one group of prompts. decoder: None with an engine; start: number of the first prompt"""
        seed = self.seed + start
        if decoder is None:
            assert self.engine is not None
            return self.engine.answer(
                prompts, sampling=self.sampling, max_new_tokens=self.max_new_tokens, stop=self.stop, seed=seed
            )
        return decoder.generate(prompts, self.max_new_tokens, generator=seeded_generator(self.target, seed)).tokens


def split_heldout(prompts: list[Prompt]) -> dict[int, int]:
    """The rows of each batch of held-out prompts, by the number of its first one.

    The prompts alone decide them, as sampled answers depend on them. Only HELDOUT_ROWS beside a long prompt are fewer.
    """
    num_rows: dict[int, int] = {}
    for start in range(0, len(prompts), HELDOUT_ROWS):
        neighbours = prompts[start : start + HELDOUT_ROWS]
        limit = limit_rows(HELDOUT_ROWS, max(len(prompt.tokens) for prompt in neighbours))
        num_rows |= dict.fromkeys(range(start, start + len(neighbours), limit), limit)
    return num_rows


def _read_stored(path: Path, key: dict, num: int) -> tuple[list[list[int]], float] | None:
    """The stored answers and their seconds; None without such a file, and for a damaged one, to write it again."""
    try:
        document = json.loads(path.read_text())
        answers = document["answers"]
        is_valid = _digest_json(answers) == document["digest"] and document["about"] == key and len(answers) == num
        return (answers, document["seconds"]) if is_valid else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_json(value: Any) -> str:
    """The digest of a value as JSON."""
    return digest_bytes(json.dumps(value).encode())
