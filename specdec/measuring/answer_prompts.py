"""Answers of a target to prompts, as rows to train on: written by this project's decoder or by servers, resumable."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import rich.console
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from specdec import loading
from specdec.core import extensions, progress
from specdec.core.compile import Runner
from specdec.core.option_types import (
    BatchSize,
    Count,
    Options,
    PositiveShare,
    Seed,
    Text,
    prefix_option_names,
    raise_first,
)
from specdec.core.resumable import Resumable, digest_bytes, open_resumable
from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.engines.answers import AnswerJob, AnswerServer, AnswerSettings, list_jobs, make_row
from specdec.engines.client import EngineClient
from specdec.measuring.answers import OwnDecoder
from specdec.options.command_types import MEMORY, OutputFile, TemplateSettings
from specdec.options.decoding import read_temperatures
from specdec.options.target import TargetOptions
from specdec.target.fingerprint import Fingerprint
from specdec.target.model import load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.messages import normalise_messages, read_arguments

ADVICE = "Use the same settings to continue, or choose another out=FILE."


class AnswerDecodeOptions(Options):
    temperature: Text
    top_p: PositiveShare
    compile: bool | None
    cuda_graphs: bool | None


class AnswerOptions(Options):
    prompts: Text | None
    suite: Text | None
    subset: Text | None
    lengths: Text | None
    out: OutputFile
    split: Text | None
    limit: Count | None
    max_new_tokens: Annotated[Count, MEMORY]
    template: TemplateSettings
    engine: Text | None
    in_flight: BatchSize
    batch: Annotated[BatchSize, MEMORY]
    seed: Seed
    target: TargetOptions
    decode: AnswerDecodeOptions


# (options, tokenizer, template arguments) -> rows of a generated suite, as of reading.load_prompts
GenerateRows = Callable[[AnswerOptions, PreTrainedTokenizerBase, dict[str, Any]], list[dict]]


def read_distinct_temperatures(text: str) -> list[float]:
    """The temperatures of a comma list. Raises ValueError for one that is listed twice, or cannot be sampled at."""
    temperatures = read_temperatures(text)
    if len(set(temperatures)) < len(temperatures):
        raise ValueError(f"decode.temperature={text}: give each temperature once.")
    with prefix_option_names("decode"):
        return [Sampling(value).temperature for value in temperatures]


def read_stop_tokens(tokenizer: PreTrainedTokenizerBase, target: TargetOptions) -> set[int]:
    """The ids of tokens that end an answer, read without loading the target's weights."""
    name = str(target.name)
    try:
        config = GenerationConfig.from_pretrained(name)
    except OSError:
        config = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(name, trust_remote_code=target.trust_remote_code)
        )
    return data.list_stop_tokens(tokenizer, config)


# Writers of answers


@contextlib.contextmanager
def open_writer(
    options: AnswerOptions,
    tokenizer: PreTrainedTokenizerBase,
    settings: AnswerSettings,
    jobs: list[AnswerJob],
    console: rich.console.Console,
) -> Iterator[tuple[OwnDecoder | AnswerServer, Fingerprint | None]]:
    """Opens the servers, or this project's decoder, with the target's fingerprint, or None where it is not known."""
    if options.engine is None:
        target = loading.load_target(options.target).target
        runner = Runner(options.decode.compile, cuda_graphs=options.decode.cuda_graphs)
        yield OwnDecoder(target, tokenizer, settings, options.batch, runner), target.identity
        return
    with contextlib.closing(EngineClient(options.engine, in_flight=options.in_flight, say=console.print)) as client:
        server = AnswerServer(client, tokenizer, settings, name=str(options.target.name), example=jobs[0])
        console.print(f"{server.model} at {', '.join(client.urls)} answers.")
        yield server, server.fingerprint


# Answers


def check_prompts(record: Resumable, jobs: list[AnswerJob], source: str) -> None:
    """Raises ValueError if an answer's prompt is not the one with its id now. source: place of the prompts"""
    job_of_id = {job.id: job for job in jobs}
    for row in record.rows:
        job, messages = job_of_id.get(row["id"]), row.get("messages")
        if job is None or not (messages or "prompt" in row):  # a row of another writer
            continue
        written_prompt = normalise_messages(messages[:-1]) if messages else row["prompt"]
        if (written_prompt, read_arguments(row)) != (job.messages if messages else job.prompt, job.arguments):
            raise ValueError(
                f"{record.path} has an answer {job.id} to another prompt than {job.location} now: {source} has "
                "changed. Put the prompts back (rows without id= are known by their number), or choose another "
                "out=FILE."
            )


def answer_prompts(options: AnswerOptions, console: rich.console.Console, generate: GenerateRows | None = None) -> None:
    """Writes the answers that out= lacks. Raises ValueError for settings other than those of the answers in it.

    generate: maker of the questions of suite=; None: there is none
    """
    try:
        write_missing_answers(options, console, generate)
    except KeyboardInterrupt:
        text = f"Stopped. The answers in {options.out} are kept; run the same command again to continue."
        raise KeyboardInterrupt(text) from None


def find_source(options: AnswerOptions, generate: GenerateRows | None) -> str:
    """The name of what is answered. Raises ValueError for no source, for two, and for one not to be trained on."""
    named = [options.prompts, options.suite]
    raise_first(
        {
            "Give prompts=, rows to answer, or suite=ruler, not both.": named.count(None) != 1,
            f"suite= needs {extensions.PACKAGE}/tools/suites.": options.suite and generate is None,
            "subset= and lengths= are of suite=ruler: leave them out.": options.prompts
            and (options.subset or options.lengths),
            "split= is of prompts=: leave it out, as suite=ruler has its own questions to train on.": options.suite
            and options.split,
        }
    )
    if options.prompts is None:
        return f"suite={options.suite}"
    reading.check_trainable(options.prompts)  # answers are to be trained on
    return options.prompts


def read_prompts(
    options: AnswerOptions, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any], generate: GenerateRows | None
) -> list[dict]:
    """The rows to answer. Raises ValueError if there are none."""
    if options.prompts is None:
        assert generate is not None
        return generate(options, tokenizer, template)
    prompts = reading.load_prompts(options.prompts, split=options.split, limit=options.limit)
    if not prompts:
        raise ValueError(
            f"There are no prompts in {options.prompts}: give a file with some, and a limit= of 1 or more."
        )
    return prompts


def write_missing_answers(options: AnswerOptions, console: rich.console.Console, generate: GenerateRows | None) -> None:
    """Writes the answers that out= lacks, and prints how many were written. Raises ValueError as `answer_prompts`."""
    if options.target.name is None:
        raise ValueError("target.name= must name the model that answers: a folder or a Hub name.")
    source = find_source(options, generate)
    temperatures = read_distinct_temperatures(options.decode.temperature)
    tokenizer = load_tokenizer(str(options.target.name), trust_remote_code=options.target.trust_remote_code)
    stop = read_stop_tokens(tokenizer, options.target)
    template = loading.read_template(options.template, tokenizer)
    prompts = read_prompts(options, tokenizer, template, generate)
    jobs = list_jobs(tokenizer, prompts, temperatures, template)
    recorded = {
        "target": options.target.name,
        "seed": options.seed,
        "dtype": options.target.dtype_here if options.engine is None else None,
        "engine": None if options.engine is None else "server",
        "prompts": source,
        "temperature": ",".join(f"{value:g}" for value in temperatures),
        "top_p": options.decode.top_p,
        "max_new_tokens": options.max_new_tokens,
        "template": template,
    }
    with open_resumable(Path(f"{options.out}.meta.json"), Path(options.out), recorded, advice=ADVICE) as answers:
        finished = {row.get("id") for row in answers.rows}
        if None in finished:
            raise ValueError(f"{options.out} has rows without an id, so it was not written by this command. {ADVICE}")
        check_prompts(answers, jobs, source)
        vocabulary, _ = data.find_vocabulary(tokenizer, len(tokenizer))
        answers.check_inputs(
            tokenizer_or_chat_template=digest_bytes(repr([vocabulary, tokenizer.chat_template]).encode())
        )
        missing = [job for job in jobs if job.id not in finished]
        progress.print_note(
            f"{format_count(len(jobs), 'answer')} to write, {len(jobs) - len(missing)} in {options.out} already."
        )
        if missing:
            settings = AnswerSettings(frozenset(stop), options.max_new_tokens, options.decode.top_p, options.seed)
            with open_writer(options, tokenizer, settings, jobs, console) as (writer, weights):
                answers.check_inputs(weights)
                origin = {"tokenizer": vocabulary, "writer": None if weights is None else weights.text}
                written = append_answers(writer, missing, answers, origin)
                console.print(f"{options.out}: {written}.")


def append_answers(
    writer: OwnDecoder | AnswerServer, missing: list[AnswerJob], answers: Resumable, origin: dict[str, Any]
) -> str:
    """Appends the rows of missing answers, and returns a sentence: how many were written, cut and empty.

    origin: arguments of `make_row` that all rows share
    """
    ends: Counter[str] = Counter()
    with progress.start_task("answering", len(missing), unit="answers") as task:
        num_tokens = sum(len(job.tokens) for job in missing)
        progress.expect_tokens(read=num_tokens, written=writer.settings.max_new_tokens * len(missing))
        for group in writer.write(missing):
            answers.append(*(make_row(*pair, **origin) for pair in group))
            ends.update(answer.finish for _, answer in group)
            ends.update("empty" for _, answer in group if not answer.text.strip())
            task.advance(len(group), num_tokens=sum(len(answer.tokens) for _, answer in group))
    size = f"{format_count(task.num_done, 'answer')} written, {format_count(task.num_tokens, 'token')}"
    cut = f"{ends['length']} cut at {format_count(writer.settings.max_new_tokens, 'token')}"
    return f"{size} in {task.seconds:.0f} s; {cut}, {ends['empty']} empty"
