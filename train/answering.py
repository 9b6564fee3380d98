"""The target's answers to prompts, as conversations to train on: a drafter learns from what its target writes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

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


def plain_generation(model: PreTrainedModel, end_token: int | None) -> GenerationConfig:
    """Settings that end an answer where the target ends it and leave its distribution unchanged: no penalty, no filter."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    end_tokens = sorted({end_token, *own} - {None})
    return GenerationConfig(do_sample=False, eos_token_id=end_tokens, pad_token_id=end_tokens[0])


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
def generate(
    model: PreTrainedModel, jobs: list[Job], *, top_p: float, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """New tokens for jobs of one temperature, padded behind their end. The random seed is `seed` and the first job's id."""
    digest = hashlib.sha256(f"{seed} {jobs[0].id}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))
    temperature = jobs[0].temperature
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    tokens, mask = pad_left([job.tokens for job in jobs], model.generation_config.pad_token_id)
    output = model.generate(  # type: ignore[operator]
        tokens.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens, **sampling
    )  # [B, T + new]
    return output[:, tokens.shape[1] :].tolist()


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[Job],
    *,
    batch: int,
    top_p: float,
    max_new_tokens: int,
    seed: int,
) -> Iterator[tuple[list[dict], int]]:
    """For each batch of jobs, the conversations with their answers, and how many tokens the target wrote for them.

    Replaces the generation settings of the model. The rows are {id, category, temperature, finish, messages}, where
    `finish` is "stop", or "length" for an answer that was cut at `max_new_tokens`.
    """
    model.generation_config = plain_generation(model, tokenizer.eos_token_id)
    for group in batches(jobs, batch):
        rows, num_tokens = [], 0
        written = generate(model, group, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed)
        for job, tokens in zip(group, written, strict=True):
            tokens, finish = trim(tokens, model.generation_config.eos_token_id)
            text = str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            text = text.rstrip("\ufffd") if finish == "length" else text  # the cut may fall inside a character
            messages = [*job.messages, {"role": "assistant", "content": text}]
            fields = {"id": job.id, "category": job.category, "temperature": job.temperature, "finish": finish}
            rows.append({**fields, "messages": messages})
            num_tokens += len(tokens) + (finish == "stop")
        yield rows, num_tokens
