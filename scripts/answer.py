"""Lets the target answer prompts, to make training data: a drafter is trained on what its own target writes.

    specdec answer prompts=data/prompts_train.jsonl out=answers.jsonl target.name=targets/smollm2-135m

Each prompt gets one answer per temperature. Writes conversations to OUT and the settings to OUT.meta.json. After an
interruption the same command continues.

The rows hold the token ids too. engine=URL lets a server of vLLM or llama.cpp answer.
"""

from specdec.options.command_line import option, options, run

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.console
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from specdec import loading
from specdec.core import progress, ranges
from specdec.core.compile import Runner
from specdec.core.resumable import Resumable, digest, resumable
from specdec.engines.answers import AnswerJob, AnswerServer, AnswerSettings, list_jobs, make_row
from specdec.engines.client import EngineClient
from specdec.measuring.answers import OwnDecoder
from specdec.options import decoding
from specdec.target.fingerprint import Fingerprint
from specdec.target.model import load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.messages import normalise_messages, read_arguments

ADVICE = "Use the same settings to continue, or choose another out=FILE."


@dataclass(frozen=True)
class AnswerDecodeOptions:
    temperature: str = option("0,1", "comma list; each prompt is answered once at each")
    top_p: float = option(1.0, "sample from the most likely tokens of this total probability")
    compile: bool = option(False, f"{decoding.COMPILE}; without engine=")


@dataclass(frozen=True)
class AnswerOptions:
    prompts: str = field(metadata={"help": "rows with prompt or messages: JSONL, folder or dataset"})
    out: str = field(metadata={"help": "the .jsonl file to write or to continue"})
    split: str | None = option(None, f"of the prompts: {loading.SPLIT}")
    limit: int | None = option(None, "answer only the first LIMIT prompts; null: all")
    max_new_tokens: int = option(160, "longest answer, in tokens")
    template: dict[str, str] = field(default_factory=dict, metadata=loading.TEMPLATE)
    engine: str | None = option(
        None, "comma list of URLs of servers of vLLM or llama.cpp; null: this project's decoder"
    )
    in_flight: int = option(64, "requests that are under way at once, with engine=")
    batch: int = option(16, "prompts answered at once, without engine=")
    seed: int = option(0, "seed of the sampling")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: AnswerDecodeOptions = field(default_factory=AnswerDecodeOptions)


def parse_temperatures(temperature: str) -> list[float]:
    try:
        values = [float(value) for value in temperature.split(",")]
    except ValueError:
        raise ValueError(f"decode.temperature={temperature}: give a comma list of numbers, such as 0,1.") from None
    if len(set(values)) < len(values):
        raise ValueError(f"decode.temperature={temperature}: give each temperature once.")
    for value in values:
        ranges.check({"decode.temperature": value})
    return values


def stop_tokens(tokenizer: PreTrainedTokenizerBase, target: loading.TargetOptions) -> set[int]:
    """Ids that end an answer, without loading the target."""
    name = str(target.name)
    try:
        config = GenerationConfig.from_pretrained(name)
    except OSError:
        config = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(name, trust_remote_code=target.trust_remote_code)
        )
    return data.stop_tokens(tokenizer, config)


# What writes the answers


@contextlib.contextmanager
def open_writer(
    chosen: AnswerOptions,
    tokenizer: PreTrainedTokenizerBase,
    settings: AnswerSettings,
    jobs: list[AnswerJob],
    console: rich.console.Console,
) -> Iterator[tuple[OwnDecoder | AnswerServer, Fingerprint | None]]:
    """The servers, or this project's decoder; with the target's fingerprint, if it is known."""
    if chosen.engine is None:
        target = loading.load_target(chosen.target).target
        runner = Runner(chosen.decode.compile)
        yield OwnDecoder(target, tokenizer, settings, chosen.batch, runner), target.identity
        return
    with contextlib.closing(EngineClient(chosen.engine, in_flight=chosen.in_flight, say=console.print)) as client:
        server = AnswerServer(client, tokenizer, settings, name=str(chosen.target.name), example=jobs[0])
        console.print(f"{server.model} at {', '.join(client.urls)} answers.")
        yield server, server.fingerprint


# Answers


def check_prompts(answers: Resumable, jobs: list[AnswerJob], source: str) -> None:
    """Raises ValueError if an answer is to another prompt than the one that has its id now. source: of the prompts"""
    asked = {job.id: job for job in jobs}
    for row in answers.rows:
        job, said = asked.get(row["id"]), row.get("messages")
        if job is None or not (said or "prompt" in row):  # rows that others wrote
            continue
        before = normalise_messages(said[:-1]) if said else row["prompt"]
        if (before, read_arguments(row)) != (job.messages if said else job.prompt, job.arguments):
            raise ValueError(
                f"{answers.path} has an answer {job.id} to another prompt than {job.place} now: {source} has changed. Put the "
                "prompts back (rows without id= are known by their number), or choose another out=FILE."
            )


def write_answers(chosen: AnswerOptions, console: rich.console.Console) -> None:
    if chosen.target.name is None:
        raise ValueError("target.name= must name the model that answers: a folder or a Hub name.")
    reading.check_trainable(chosen.prompts)  # answers are to be trained on
    temperatures = parse_temperatures(chosen.decode.temperature)
    tokenizer = load_tokenizer(str(chosen.target.name), trust_remote_code=chosen.target.trust_remote_code)
    stop = stop_tokens(tokenizer, chosen.target)
    prompts = reading.load_prompts(chosen.prompts, split=chosen.split, limit=chosen.limit)
    if not prompts:
        raise ValueError(f"There are no prompts in {chosen.prompts}: give a file with some, and a limit= of 1 or more.")
    template = loading.read_template(chosen.template, tokenizer)
    jobs = list_jobs(tokenizer, prompts, temperatures, template)
    recorded = {
        "target": chosen.target.name,
        "seed": chosen.seed,
        "dtype": chosen.target.dtype_here if chosen.engine is None else None,
        "engine": None if chosen.engine is None else "server",
        "prompts": chosen.prompts,
        "temperature": ",".join(f"{value:g}" for value in temperatures),
        "top_p": chosen.decode.top_p,
        "max_new_tokens": chosen.max_new_tokens,
        "template": template,
    }
    with resumable(Path(f"{chosen.out}.meta.json"), Path(chosen.out), recorded, advice=ADVICE) as answers:
        finished = {row.get("id") for row in answers.rows}
        if None in finished:
            raise ValueError(f"{chosen.out} has rows without an id, so it was not written by this command. {ADVICE}")
        check_prompts(answers, jobs, chosen.prompts)
        vocabulary, _ = data.vocabulary(tokenizer, len(tokenizer))
        answers.same(tokenizer_or_chat_template=digest(repr([vocabulary, tokenizer.chat_template]).encode()))
        missing = [job for job in jobs if job.id not in finished]
        progress.note(f"{len(jobs)} answers to write, {len(jobs) - len(missing)} of them are in {chosen.out} already.")
        if missing:
            settings = AnswerSettings(frozenset(stop), chosen.max_new_tokens, chosen.decode.top_p, chosen.seed)
            with open_writer(chosen, tokenizer, settings, jobs, console) as (writer, weights):
                answers.same(weights)
                origin = {"tokenizer": vocabulary, "writer": None if weights is None else weights.text}
                written = write_missing(writer, missing, answers, origin)
                console.print(f"{chosen.out}: {written}.")


def write_missing(
    writer: OwnDecoder | AnswerServer, missing: list[AnswerJob], answers: Resumable, origin: dict[str, Any]
) -> str:
    """Appends rows. -> how many were written, cut and empty. origin: arguments of make_row that all have"""
    ends: Counter[str] = Counter()
    with progress.start("answering", len(missing), unit="answers") as shown:
        for group in writer.write(missing):
            answers.append(*(make_row(*pair, **origin) for pair in group))
            ends.update(answer.finish for _, answer in group)
            ends.update("empty" for _, answer in group if not answer.text.strip())
            shown.advance(len(group), num_tokens=sum(len(answer.tokens) for _, answer in group))
    return (
        f"{shown.done} answers written, {shown.num_tokens} tokens in {shown.seconds:.0f} s; {ends['length']} were cut at "
        f"{writer.settings.max_new_tokens} tokens, {ends['empty']} are empty"
    )


def main(arguments: list[str] | None = None) -> None:
    chosen = options(AnswerOptions, __doc__, arguments)
    console = progress.Results()
    try:
        write_answers(chosen, console)
    except KeyboardInterrupt:
        text = f"Stopped. The answers in {chosen.out} are kept; run the same command again to continue."
        raise KeyboardInterrupt(text) from None


if __name__ == "__main__":
    run(main)
