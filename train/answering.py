"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from specdec.decode import Decoder
from specdec.sampling import Sampling
from specdec.target import Target
from train.data import encode_prompt


@dataclass(frozen=True)
class Job:
    """One answer to write."""

    id: str
    category: str
    temperature: float
    messages: list[dict]
    tokens: list[int]  # the rendered prompt


def list_jobs(tokenizer: PreTrainedTokenizerBase, prompts: list[dict], temperatures: list[float]) -> list[Job]:
    """One job for each prompt and temperature. Raises ValueError if two prompts have the same id."""
    jobs = [
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
    if len({job.id for job in jobs}) < len(jobs):
        raise ValueError("Two prompts have the same id. Make the ids unique.")
    return jobs


def batches(jobs: list[Job], size: int) -> Iterator[list[Job]]:
    """Batches of one temperature and of similar length. The longest come first, so that too little memory shows at once."""
    for temperature in sorted({job.temperature for job in jobs}):
        same = [job for job in jobs if job.temperature == temperature]
        same.sort(key=lambda job: len(job.tokens), reverse=True)
        yield from (same[start : start + size] for start in range(0, len(same), size))


def trim(tokens: list[int], stop: set[int]) -> tuple[list[int], str]:
    """The answer without the token that ends it, and whether it had one ("stop") or was cut ("length")."""
    return (tokens[:-1], "stop") if tokens[-1] in stop else (tokens, "length")


def generate(
    target: Target, stop: set[int], jobs: list[Job], *, top_p: float, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """New tokens for jobs of one temperature. The random seed is `seed` and the first job's id."""
    digest = hashlib.sha256(f"{seed} {jobs[0].id}".encode()).digest()
    generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest[:7], "big"))
    decoder = Decoder(target, None, sampling=Sampling(jobs[0].temperature, top_p=top_p), stop=stop)
    return decoder.generate([job.tokens for job in jobs], max_new_tokens, generator=generator).tokens


def answer(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    stop: set[int],
    jobs: list[Job],
    *,
    finished: set[str],
    batch: int,
    top_p: float,
    max_new_tokens: int,
    seed: int,
) -> Iterator[tuple[list[dict], int]]:
    """For each batch of jobs, the conversations with their answers, and how many tokens the target wrote for them.

    stop: tokens that end an answer; finished: ids of jobs that have their answer. A batch that is partly finished is decoded
    whole, so that the answers are those of an undisturbed run, and its other rows are left out. The rows are {id, category, temperature, finish, messages}, where `finish` is "stop",
    or "length" for an answer that was cut at `max_new_tokens`.
    """
    for group in batches(jobs, batch):
        rows, num_tokens = [], 0
        if all(job.id in finished for job in group):
            continue
        written = generate(target, stop, group, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed)
        for job, tokens in zip(group, written, strict=True):
            if job.id in finished:
                continue
            tokens, finish = trim(tokens, stop)
            text = str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            text = text.rstrip("\ufffd") if finish == "length" else text  # the cut may fall inside a character
            messages = [*job.messages, {"role": "assistant", "content": text}]
            fields = {"id": job.id, "category": job.category, "temperature": job.temperature, "finish": finish}
            rows.append({**fields, "messages": messages})
            num_tokens += len(tokens) + (finish == "stop")
        yield rows, num_tokens
