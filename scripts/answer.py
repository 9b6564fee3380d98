"""python scripts/answer.py prompts=data/prompts_train.jsonl out=answers.jsonl target.name=targets/smollm2-135m

Lets the target answer prompts, to make training data: a drafter is trained on what its own target writes. Each prompt
gets one answer per temperature. Writes conversations to OUT and the settings to OUT.meta.json. After an interruption the
same command continues.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import rich.progress
from transformers import PreTrainedTokenizerBase

from helpers import loading
from helpers.options import options, run
from specdec.target import load_tokenizer
from train import answering, reading
from train.resumable import Resumable, resumable

SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal to draw a bar on


@dataclass(frozen=True)
class DecodeOptions:
    temperature: str = field(default="0,1", metadata={"help": "comma list; each prompt is answered once at each"})
    top_p: float = field(default=1.0, metadata={"help": "sample from the most likely tokens of this total probability"})


@dataclass(frozen=True)
class Answer:
    prompts: str = field(metadata={"help": "rows with prompt or messages: a .jsonl file, a folder of them, a dataset"})
    out: str = field(metadata={"help": "the .jsonl file to write or to continue"})
    limit: int | None = field(default=None, metadata={"help": "answer only the first LIMIT prompts; null: all"})
    max_new_tokens: int = field(default=160, metadata={"help": "longest answer, in tokens"})
    batch: int = field(default=16, metadata={"help": "prompts answered at once"})
    seed: int = field(default=0, metadata={"help": "seed of the sampling"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)


def parse_temperatures(temperature: str) -> list[float]:
    try:
        values = [float(value) for value in temperature.split(",")]
    except ValueError:
        raise ValueError(f"decode.temperature={temperature}: give a comma list of numbers, such as 0,1.") from None
    if min(values) < 0 or len(set(values)) < len(values):
        raise ValueError(f"decode.temperature={temperature}: give each temperature once and none below 0.")
    return values


class Rate(rich.progress.ProgressColumn):
    """Tokens per second and time left, over the whole run so far."""

    def render(self, task: rich.progress.Task) -> str:
        return task.fields["rate"]


def write(chosen: Answer, console: rich.console.Console) -> None:
    if chosen.target.name is None:
        raise ValueError("target.name= must name the model that answers: a folder or a Hub name.")
    temperatures = parse_temperatures(chosen.decode.temperature)
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    prompts = reading.load_prompts(chosen.prompts, limit=chosen.limit)
    jobs = answering.list_jobs(tokenizer, prompts, temperatures)
    settings = {
        "target": chosen.target.name,
        "prompts": chosen.prompts,
        "temperature": ",".join(f"{value:g}" for value in temperatures),
        "top_p": chosen.decode.top_p,
        "max_new_tokens": chosen.max_new_tokens,
        "seed": chosen.seed,
        "dtype": chosen.target.dtype,
    }
    advice = "Use the same settings to continue, or choose another out=FILE."
    with resumable(Path(f"{chosen.out}.meta.json"), Path(chosen.out), settings, advice=advice) as answers:
        finished = {row.get("id") for row in answers.rows}
        if None in finished:
            raise ValueError(f"{chosen.out} has rows without an id, so it was not written by this command. {advice}")
        num_missing = sum(job.id not in finished for job in jobs)
        console.print(f"{len(jobs)} answers to write, {len(jobs) - num_missing} of them are in {chosen.out} already.")
        if num_missing:
            write_missing(chosen, tokenizer, jobs, answers, finished, num_missing, console)


def write_missing(
    chosen: Answer,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[answering.Job],
    answers: Resumable,
    finished: set[str],
    num_missing: int,
    console: rich.console.Console,
) -> None:
    opened = loading.load_target(chosen.target)
    sizes = {"batch": chosen.batch, "max_new_tokens": chosen.max_new_tokens, "finished": finished}
    columns = [*rich.progress.Progress.get_default_columns()[:2], rich.progress.MofNCompleteColumn(), Rate()]
    num_rows = num_tokens = 0
    start = last_line = time.perf_counter()
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("answers", total=num_missing, rate="")
        for rows, num in answering.answer(
            opened.target, tokenizer, opened.stop, jobs, **sizes, top_p=chosen.decode.top_p, seed=chosen.seed
        ):
            answers.append(*rows)
            num_rows, num_tokens, now = num_rows + len(rows), num_tokens + num, time.perf_counter()
            minutes = (now - start) / num_rows * (num_missing - num_rows) / 60
            rate = f"{num_tokens / (now - start):.0f} tokens/s, {minutes:.1f} min left"
            progress.update(task, completed=num_rows, rate=rate)
            if not console.is_terminal and now - last_line > SECONDS_BETWEEN_LINES:
                console.print(f"{num_rows}/{num_missing} answers, {rate}")
                last_line = now
    console.print(f"{chosen.out}: {num_rows} answers written, {num_tokens} tokens in {now - start:.0f} s.")


def main() -> None:
    chosen = options(Answer, __doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    try:
        write(chosen, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. The answers in {chosen.out} are kept; run the same command again to continue.")
        raise


if __name__ == "__main__":
    run(main)
