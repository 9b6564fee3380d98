"""python scripts/answer.py target=targets/smollm2-135m prompts=data/prompts_train.jsonl out=data/train.jsonl

Lets the target answer prompts: a drafter is trained on what its target writes, not on what others wrote. Every prompt
gets one answer per temperature. The rows of `out` are conversations for training; how they were made is recorded in
<out>.meta.json. Stopped, it goes on when run again.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import rich.progress
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from helpers.loading import use_threads
from helpers.options import options
from specdec.target import Target, load_tokenizer
from train.data import encode_prompt
from train.reading import load_prompts

SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal to draw a bar on


@dataclass(frozen=True)
class Answer:
    target: str = field(metadata={"help": "folder or name of the target"})
    prompts: str = field(metadata={"help": "rows with prompt or messages: a .jsonl file, a folder of them, a dataset"})
    out: str = field(metadata={"help": "the .jsonl file to write or to continue"})
    temperature: str = field(default="0,1", metadata={"help": "comma list; every prompt is answered once at each"})
    top_p: float = field(default=1.0, metadata={"help": "sample from the likeliest tokens of this total probability"})
    max_new_tokens: int = field(default=160, metadata={"help": "an answer is cut at this many tokens"})
    batch: int = field(default=16, metadata={"help": "prompts answered at once"})
    seed: int = field(default=0, metadata={"help": "of the sampling"})
    dtype: str = field(default="bfloat16", metadata={"help": "of the target's weights: bfloat16, float16 or float32"})
    limit: int | None = field(default=None, metadata={"help": "answer only the first so many prompts"})


@dataclass(frozen=True)
class Job:
    """One answer to write."""

    id: str
    category: str
    temperature: float
    messages: list[dict]
    tokens: list[int]  # the rendered prompt


# What is in the output file already


def read_finished(out: Path) -> set[str]:
    """Ids of the rows in `out`. A last line that was not written to its end is removed from the file."""
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(out, len(whole))
    ids = set()
    for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], start=1):
        try:
            ids.add(json.loads(line)["id"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{out}:{number} is not a row of answers. Repair or remove the line.") from None
    return ids


def check_settings(out: Path, settings: dict) -> None:
    """Records how the rows of `out` are made; raises ValueError if those in it were made otherwise."""
    record = out.with_name(out.name + ".meta.json")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(settings, indent=1) + "\n")
        return
    if not record.exists():
        raise ValueError(f"{out} exists, but not {record.name}, so how it was made is unknown. Choose another out.")
    recorded = json.loads(record.read_text())
    keys = sorted(key for key in settings.keys() | recorded.keys() if settings.get(key) != recorded.get(key))
    if keys:
        differing = ", ".join(f"{key} ({recorded.get(key)} there, {settings.get(key)} now)" for key in keys)
        raise ValueError(
            f"{out} was begun with other settings: {differing}. Use the same settings to continue, or another out."
        )


def append(out: Path, rows: list[dict]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


# Answering


def batches(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    """Jobs of one temperature and alike in length. The longest come first: if memory is short, that shows at once."""
    for temperature in sorted({job.temperature for job in jobs}):
        same = [job for job in jobs if job.temperature == temperature]
        same.sort(key=lambda job: len(job.tokens), reverse=True)
        yield from (same[start : start + size] for start in range(0, len(same), size))


def pad_left(prompts: list[list[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, both [B, T] int64."""
    length = max(map(len, prompts))
    tokens = torch.full((len(prompts), length), pad_token)  # [B, T]
    mask = torch.zeros_like(tokens)  # [B, T]
    for index, prompt in enumerate(prompts):
        tokens[index, length - len(prompt) :] = torch.tensor(prompt)
        mask[index, length - len(prompt) :] = 1
    return tokens, mask


def trim(tokens: list[int], end_tokens: list[int]) -> tuple[list[int], str]:
    """The answer without its end-of-turn token, and whether it had one ("stop") or was cut ("length")."""
    ends = [index for index, token in enumerate(tokens) if token in end_tokens]
    return (tokens[: ends[0]], "stop") if ends else (tokens, "length")


@torch.inference_mode()
def answer(model: PreTrainedModel, jobs: list[Job], *, top_p: float, max_new_tokens: int, seed: int) -> list[list[int]]:
    """The target's answers to jobs of one temperature, padded behind their end. Seeded by `seed` and the first id."""
    digest = hashlib.sha256(f"{seed} {jobs[0].id}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))
    temperature = jobs[0].temperature
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    tokens, mask = pad_left([job.tokens for job in jobs], model.generation_config.pad_token_id)
    output = model.generate(
        tokens.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        **sampling,
    )  # [B, T + new]
    return output[:, tokens.shape[1] :].tolist()


def plain_generation(model: PreTrainedModel, end_token: int) -> GenerationConfig:
    """Ends where the target ends and leaves its distribution alone: no penalty or filter that its folder proposes."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    end_tokens = sorted({end_token, *own} - {None})
    return GenerationConfig(do_sample=False, eos_token_id=end_tokens, pad_token_id=end_tokens[0])


def list_jobs(tokenizer, prompts: list[dict], temperatures: list[float]) -> list[Job]:
    return [
        Job(
            id=f"{prompt['id']}@{temperature:g}",
            category=prompt["category"],
            temperature=temperature,
            messages=prompt["messages"],
            tokens=encode_prompt(tokenizer, prompt["messages"]),
        )
        for prompt in prompts
        for temperature in temperatures
    ]


def parse_temperatures(temperature: str) -> list[float]:
    try:
        values = [float(value) for value in temperature.split(",")]
    except ValueError:
        raise ValueError(f"temperature={temperature} is no comma list of numbers. Write for example 0,1.") from None
    if min(values) < 0 or len(set(values)) < len(values):
        raise ValueError(f"temperature={temperature}: give each temperature once and none below 0.")
    return values


class Rate(rich.progress.ProgressColumn):
    """Tokens per second and time left, over the whole run so far."""

    def render(self, task: rich.progress.Task) -> str:
        return task.fields["rate"]


def run(chosen: Answer, console: rich.console.Console) -> None:
    out = Path(chosen.out)
    temperatures = parse_temperatures(chosen.temperature)
    tokenizer = load_tokenizer(chosen.target)
    jobs = list_jobs(tokenizer, load_prompts(chosen.prompts, limit=chosen.limit), temperatures)
    if len({job.id for job in jobs}) < len(jobs):
        raise ValueError(f"Two prompts of {chosen.prompts} have the same id. Make the ids unique.")
    settings = {
        "target": chosen.target,
        "prompts": chosen.prompts,
        "temperature": ",".join(f"{value:g}" for value in temperatures),
        "top_p": chosen.top_p,
        "max_new_tokens": chosen.max_new_tokens,
        "seed": chosen.seed,
        "dtype": chosen.dtype,
    }
    check_settings(out, settings)
    finished = read_finished(out)
    todo = [job for job in jobs if job.id not in finished]
    console.print(f"{len(jobs)} answers to write, {len(jobs) - len(todo)} of them are in {out} already.")
    if not todo:
        return

    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_threads()
    model = Target.load(chosen.target, dtype=chosen.dtype, device=device).model
    model.generation_config = plain_generation(model, tokenizer.eos_token_id)

    columns = [*rich.progress.Progress.get_default_columns()[:2], rich.progress.MofNCompleteColumn(), Rate()]
    num_rows, num_tokens = 0, 0
    start = said = time.perf_counter()
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("answers", total=len(todo), rate="")
        for group in batches(todo, chosen.batch):
            written = answer(model, group, top_p=chosen.top_p, max_new_tokens=chosen.max_new_tokens, seed=chosen.seed)
            rows = []
            for job, tokens in zip(group, written, strict=True):
                tokens, finish = trim(tokens, model.generation_config.eos_token_id)
                text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                text = text.rstrip("\ufffd") if finish == "length" else text  # the cut may fall inside a character
                message = {"role": "assistant", "content": text}
                fields = {"id": job.id, "category": job.category, "temperature": job.temperature, "finish": finish}
                rows.append({**fields, "messages": [*job.messages, message]})
                num_tokens += len(tokens) + (finish == "stop")
            append(out, rows)
            num_rows += len(rows)
            now = time.perf_counter()
            left = (now - start) / num_rows * (len(todo) - num_rows)
            rate = f"{num_tokens / (now - start):.0f} tokens/s, {left / 60:.1f} min left"
            progress.update(task, completed=num_rows, rate=rate)
            if not console.is_terminal and now - said > SECONDS_BETWEEN_LINES:
                console.print(f"{num_rows}/{len(todo)} answers, {rate}")
                said = now
    console.print(f"{out}: {num_rows} answers written, {num_tokens} tokens in {time.perf_counter() - start:.0f} s.")


def main() -> None:
    chosen = options(Answer, __doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    try:
        run(chosen, console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What is in {chosen.out} stays; run the same command again to go on.")
        raise SystemExit(130) from None
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
