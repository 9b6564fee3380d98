"""The target's plain answers to held-out prompts, written once and kept for later validations and runs."""

import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import Prompt, seeded_generator
from specdec.target.model import Target
from train import progress
from train.answers.resumable import digest
from train.distributed import Group
from train.features.engine_features import EngineTarget

ROWS = 8  # prompts that the target answers at once


@dataclass(frozen=True)
class TargetAnswers:
    """The target's plain answers to the held-out prompts, kept in a file of `folder` that runs share.

    Every process writes a part of them. `seconds`: what the slowest group of ROWS prompts took when they were written.
    """

    answers: list[list[int]]
    seconds: float

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        target: Target,
        prompts: list[Prompt],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop: set[int],
        seed: int,
        folder: Path,
        engine: EngineTarget | None = None,
    ) -> "TargetAnswers":
        """Reads them, or writes them if they are not there. engine: writes them in place of the target here"""
        about = {
            "target": target.fingerprint(),
            "dtype": str(target.dtype),
            "prompts": digest(json.dumps([prompt.tokens for prompt in prompts]).encode()),
            "sampling": asdict(sampling),
            "max_new_tokens": max_new_tokens,
            "stop": sorted(stop),
            "seed": None if sampling.greedy else seed,
            **({} if engine is None else {"engine": True}),  # in another process, numbers are rounded otherwise
        }
        path = folder / f"{digest(json.dumps(about).encode())}.json"
        (known,) = broadcast_object_list(
            [cls._read(path, about, len(prompts)) if accelerator.is_main_process else None]
        )
        if known is not None:
            return known

        def write(start: int, tokens: list[list[int]]) -> list[list[int]]:
            if engine is not None:
                return engine.answer(
                    tokens, sampling=sampling, max_new_tokens=max_new_tokens, stop=stop, seed=seed + start
                )
            generator = seeded_generator(target, seed + start)
            return (
                Decoder(target, None, sampling=sampling, stop=stop)
                .generate(tokens, max_new_tokens, generator=generator)
                .tokens
            )

        group = Group.in_step(accelerator, target)
        written = []
        starts = group.mine(range(0, len(prompts), ROWS))
        size = lambda start: min(ROWS, len(prompts) - start)
        for start in progress.track(starts, "answers of the target", unit="prompts", size=size):
            begun = time.perf_counter()
            tokens = [prompt.tokens for prompt in prompts[start : start + ROWS]]
            written.append((start, write(start, tokens), time.perf_counter() - begun))
        groups = sorted(group.gather(written))
        made = cls([answer for _, answers, _ in groups for answer in answers], max(seconds for *_, seconds in groups))
        if accelerator.is_main_process:
            made._write(path, about)
        return made

    @classmethod
    def _read(cls, path: Path, about: dict, num: int) -> "TargetAnswers | None":
        """None if there is no such file, or a damaged one, which is written again."""
        try:
            document = json.loads(path.read_text())
            answers = document["answers"]
            whole = digest(json.dumps(answers).encode()) == document["digest"]
            return (
                cls(answers, document["seconds"])
                if whole and document["about"] == about and len(answers) == num
                else None
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, path: Path, about: dict) -> None:
        checked = {"about": about, **asdict(self), "digest": digest(json.dumps(self.answers).encode())}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(path, json.dumps(checked) + "\n")
        except OSError as error:  # they are in memory, so training goes on
            warnings.warn(
                f"{path} could not be written ({error}): a later run answers these prompts again", stacklevel=1
            )
