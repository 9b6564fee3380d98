"""Lets the target answer prompts, to make training data: a drafter is trained on what its own target writes.

    specdec answer prompts=data/prompts_train.jsonl out=answers.jsonl target.name=targets/smollm2-135m

Each prompt gets one answer per temperature. Writes conversations to OUT and the settings to OUT.meta.json. After an
interruption the same command continues.

engine=URL lets a server with OpenAI's interface answer; vLLM also gives the token ids, which are kept in the rows. With
features.folder=DIR the hidden states that scripts/launch_engine.py gives are kept too, so that train.py reads no answer again.
prompts=self lets the target write the prompts too (Magpie, 2406.08464): they are kept in OUT.prompts.jsonl.
"""

from helpers import decoding, loading
from helpers.options import option, options, run, split
from helpers.writers import FeatureOptions, Source, Writers, stop_tokens

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
from transformers import PreTrainedTokenizerBase

from specdec.target.model import load_tokenizer
from train import progress, ranges
from train.answers import answering, self_prompts
from train.answers.answering import Law
from train.answers.resumable import Resumable, digest, resumable
from train.data import chat_template, reading
from train.data import rows as data

SELF = "self"
SPARE = 64  # tokens by which a prompt may grow when it is rendered and encoded again


@dataclass(frozen=True)
class DecodeOptions:
    temperature: str = option("0,1", "comma list; each prompt is answered once at each")
    top_p: float = option(1.0, "sample from the most likely tokens of this total probability")
    compile: bool = option(False, f"{decoding.COMPILE}; without engine=")


@dataclass(frozen=True)
class SelfPromptOptions:
    temperature: float = option(1.0, "at which prompts=self writes prompts")
    top_p: float = option(1.0, "sample them from the most likely tokens of this total probability")
    max_tokens: int = option(256, "longest of them, in tokens; longer ones are dropped as unfinished")


@dataclass(frozen=True)
class Answer:
    prompts: str = field(metadata={"help": "rows with prompt or messages: JSONL, folder or dataset; self: see above"})
    out: str = field(metadata={"help": "the .jsonl file to write or to continue"})
    split: str | None = option(None, f"of the prompts: {loading.SPLIT}")
    limit: int | None = option(None, "answer only the first LIMIT prompts; null: all")
    num_prompts: int | None = option(None, "how many prompts to write, with prompts=self")
    max_new_tokens: int = option(160, "longest answer, in tokens")
    thinking: bool | None = option(None, loading.THINKING + "; null: the template's default")
    tag: str | None = option(None, "comma list of tags that every row gets, beside those of its prompt")
    engine: str | None = option(
        None, "comma list of URLs of servers, or vllm (in this process); null: this project's decoder"
    )
    in_flight: int = option(64, "requests that are under way at once, with engine=")
    batch: int = option(16, "prompts answered at once, without engine=")
    seed: int = option(0, "seed of the sampling")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    features: FeatureOptions = field(default_factory=FeatureOptions)
    self_prompts: SelfPromptOptions = field(default_factory=SelfPromptOptions)


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


def check(chosen: Answer) -> None:
    if chosen.target.name is None:
        raise ValueError("target.name= must name the model that answers: a folder or a Hub name.")
    if (chosen.prompts == SELF) != (chosen.num_prompts is not None):
        raise ValueError(
            "num_prompts= says how many prompts the target writes: give it with prompts=self, and only then."
        )
    if chosen.features.folder is not None and chosen.engine in (None, "vllm"):
        raise ValueError(
            "features.folder= keeps hidden states that a server gives with the answers: give engine=URL of one that python "
            "scripts/launch_engine.py has started."
        )


# Prompts of the target's own


def write_prompts(chosen: Answer, source: Source, writers: Writers, stop: set[int]) -> str:
    """The file of prompts, with `num_prompts` of them that are kept."""
    path, mine = Path(f"{chosen.out}.prompts.jsonl"), chosen.self_prompts
    opening = self_prompts.find_opening(source.tokenizer, stop)
    law = Law(opening.ends, mine.max_tokens, top_p=mine.top_p, seed=chosen.seed)
    settings = {**common_settings(chosen, source), "prompts": SELF, **vars(mine)}
    advice = "Use the same settings to continue, or choose another out=FILE."
    num = chosen.num_prompts or 0
    with resumable(Path(f"{path}.meta.json"), path, settings, advice=advice) as rows:
        rows.same(tokenizer_or_chat_template=digest_of(source.tokenizer))
        kept = sum(not row.get("dropped") for row in rows.rows)
        if kept < num:
            answer = (
                len(data.encode_prompt(source.tokenizer, [{"role": "user", "content": ""}])) + chosen.max_new_tokens
            )
            writer = writers.open(
                law,
                example=answering.Job("example", SELF, mine.temperature, [], opening.tokens),
                longest=mine.max_tokens + max(len(opening.tokens), answer + SPARE),
                ids=True,
            )
            rows.same(**writers.weights())
            block = -(-num // chosen.batch) * chosen.batch
            drawn = self_prompts.write(
                source.tokenizer, writer, opening, rows, num=num, temperature=mine.temperature, block=block
            )
            with progress.start("writing prompts", num - kept, unit="prompts") as shown:
                for judge, num_tokens in drawn:
                    shown.advance(judge.counts["kept"] - kept - shown.done, num_tokens=num_tokens)
        reasons = Counter(row.get("dropped", "kept") for row in rows.rows)
    source.console.print(
        f"{path}: the target wrote {reasons.total()} prompts, of which {reasons['kept']} are kept "
        f"({self_prompts.summary(reasons)})."
    )
    return str(path)


# Answers


def common_settings(chosen: Answer, source: Source) -> dict:
    """What the target is and what writes."""
    return {
        "target": chosen.target.name,
        "seed": chosen.seed,
        "dtype": None if source.kind == "server" else chosen.target.dtype_here,
        "engine": source.kind,
    }


def digest_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes with the tokens and with how prompts are rendered."""
    return digest(repr([data.vocabulary(tokenizer, len(tokenizer))[0], tokenizer.chat_template]).encode())


def check_prompts(answers: Resumable, jobs: list[answering.Job], source: str) -> None:
    """Raises ValueError if an answer is to another prompt than the one that has its id now. source: of the prompts"""
    asked = {job.id: job for job in jobs}
    for row in answers.rows:
        job, said = asked.get(row["id"]), row.get("messages")
        if job is None or not (said or "prompt" in row):  # rows that others wrote
            continue
        before = [reading.tidy(each) for each in said[:-1]] if said else row["prompt"]
        if (before, chat_template.options_of(row)) != (job.messages if said else job.prompt, job.options):
            raise ValueError(
                f"{answers.path} has an answer {job.id} to another prompt than {job.place} now: {source} has changed. Put the "
                "prompts back (rows without id= are known by their number), or choose another out=FILE."
            )


def write(chosen: Answer, console: rich.console.Console) -> None:
    check(chosen)
    temperatures = parse_temperatures(chosen.decode.temperature)
    tokenizer = load_tokenizer(chosen.target.name, trust_remote_code=chosen.target.trust_remote_code)
    source = Source(
        chosen.engine,
        chosen.target,
        tokenizer,
        chosen.batch,
        chosen.in_flight,
        chosen.features,
        console,
        compile=chosen.decode.compile,
    )
    stop = stop_tokens(tokenizer, chosen.target)
    with Writers(source) as writers:
        file = write_prompts(chosen, source, writers, stop) if chosen.prompts == SELF else chosen.prompts
        limit = (
            chosen.limit if chosen.num_prompts is None else min(chosen.num_prompts, chosen.limit or chosen.num_prompts)
        )
        prompts = reading.load_prompts(file, split=chosen.split, limit=limit)
        if not prompts:
            raise ValueError(f"There are no prompts in {file}: give a file with some, and a limit= of 1 or more.")
        tags = tuple(split(chosen.tag))
        jobs = answering.list_jobs(tokenizer, prompts, temperatures, thinking=chosen.thinking, tags=tags)
        settings = {
            **common_settings(chosen, source),
            "prompts": chosen.prompts,
            "temperature": ",".join(f"{value:g}" for value in temperatures),
            "top_p": chosen.decode.top_p,
            "max_new_tokens": chosen.max_new_tokens,
            "thinking": chosen.thinking,
            "tag": chosen.tag,
        }
        advice = "Use the same settings to continue, or choose another out=FILE."
        with resumable(Path(f"{chosen.out}.meta.json"), Path(chosen.out), settings, advice=advice) as answers:
            finished = {row.get("id") for row in answers.rows}
            if None in finished:
                raise ValueError(
                    f"{chosen.out} has rows without an id, so it was not written by this command. {advice}"
                )
            check_prompts(answers, jobs, file)
            answers.same(tokenizer_or_chat_template=digest_of(tokenizer))
            missing = [job for job in jobs if job.id not in finished]
            progress.note(
                f"{len(jobs)} answers to write, {len(jobs) - len(missing)} of them are in {chosen.out} already."
            )
            if missing:
                law = Law(frozenset(stop), chosen.max_new_tokens, top_p=chosen.decode.top_p, seed=chosen.seed)
                last = max(jobs, key=lambda job: len(job.tokens))
                name = f"{last.place}: the longest prompt, {last.id},"
                longest = len(last.tokens) + chosen.max_new_tokens
                writer = writers.open(law, example=jobs[0], longest=longest, name=name)
                answers.same(**writers.weights())
                write_missing(chosen, tokenizer, writer, jobs, answers, finished, len(missing), console)


def write_missing(
    chosen: Answer,
    tokenizer: PreTrainedTokenizerBase,
    writer: answering.Writer,
    jobs: list[answering.Job],
    answers: Resumable,
    finished: set[str],
    num_missing: int,
    console: rich.console.Console,
) -> None:
    digest, _ = data.vocabulary(tokenizer, len(tokenizer))
    ends: Counter[str] = Counter()
    with progress.start("answering", num_missing, unit="answers") as shown:
        for group in writer.write(jobs, finished):
            answers.append(*(answering.conversation(*pair, tokenizer=digest) for pair in group))
            ends.update(answer.finish for _, answer in group)
            ends.update("empty" for _, answer in group if not answer.text.strip())
            shown.advance(len(group), num_tokens=sum(answer.num_tokens for _, answer in group))
    console.print(
        f"{chosen.out}: {shown.done} answers written, {shown.num_tokens} tokens in {shown.seconds:.0f} s; {ends['length']} "
        f"were cut at {chosen.max_new_tokens} tokens, {ends['empty']} are empty."
    )


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Answer, __doc__, arguments)
    console = progress.Results()
    try:
        write(chosen, console)
    except KeyboardInterrupt:
        text = f"Stopped. The answers in {chosen.out} are kept; run the same command again to continue."
        raise KeyboardInterrupt(text) from None


if __name__ == "__main__":
    run(main)
