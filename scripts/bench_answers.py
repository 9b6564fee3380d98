"""Measures how many tokens a second answers are written at: python scripts/bench_answers.py engine=http://localhost:8000

Three ways write answers to the same prompts, each answer max_new_tokens long: scripts/answer.py with engine=URL, scripts/answer.py
with this project's decoder (own=true), and vLLM's own benchmark client on the same server (client=). They are timed in turn, after
a warm-up, and compared by the medians of the ratios of neighbours. Loading and imports are not counted.
"""

from helpers import loading
from helpers.options import option, options, run
from helpers.writers import FeatureOptions, Source, Writers

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.console
import rich.table

from engine_clients.vllm_client import PYTHON
from specdec.core import files
from specdec.core.timing import interleave
from specdec.measuring.benchmark import median_ratio
from specdec.target.model import load_tokenizer
from train import progress
from train.answers import answering
from train.answers.answering import Job, Law
from train.answers.resumable import Resumable
from train.data import reading
from train.data import rows as data

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # as `vllm bench serve`, which does not start where the distribution has another name than vllm
SERVER, OWN, CLIENT = "answer.py engine=URL", "answer.py, own decoder", "vllm bench serve"


@dataclass(frozen=True)
class BenchAnswers:
    engine: str = field(metadata={"help": "URL of one vLLM server"})
    prompts: str = option("data/prompts_heldout.jsonl", "rows with a prompt or messages: JSONL, folder or dataset")
    split: str | None = option(None, loading.SPLIT)
    limit: int | None = option(64, "use this many prompts, spread over the file; null: all")
    max_new_tokens: int = option(64, "tokens of every answer; stop tokens are passed over")
    in_flight: int = option(64, "requests that are under way at once")
    batch: int = option(16, "prompts that this project's decoder answers at once")
    repeats: int = option(3, "times that each way writes all answers")
    own: bool = option(True, "measure this project's decoder too, which loads the target in this process")
    client: str | None = option(PYTHON, "interpreter with vLLM, for its benchmark client; null: leave it out")
    out: str | None = option(None, "a JSON file for the figures")
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(name="targets/smollm2-135m"))


def check(chosen: BenchAnswers) -> None:
    if "," in chosen.engine or not chosen.engine.startswith("http"):
        raise ValueError(f"engine={chosen.engine} must be the URL of one server: vLLM's client takes no more.")
    if chosen.client is not None and not Path(chosen.client).exists():
        raise ValueError(f"client={chosen.client} does not exist: `make engines` makes it, client=null leaves it out.")


def time_writer(writer: answering.Writer, tokenizer, jobs: list[Job], folder: Path) -> float:
    """tokens/s of writing answers, as rows, into a file"""
    digest, _ = data.vocabulary(tokenizer, len(tokenizer))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        rows = Resumable(Path(work) / "meta.json", Path(work) / "rows.jsonl", {}, advice="")
        begun, num_tokens = time.perf_counter(), 0
        for group in writer.write(jobs):
            rows.append(*(answering.conversation(*pair, tokenizer=digest) for pair in group))
            num_tokens += sum(answer.num_tokens for _, answer in group)
        return num_tokens / (time.perf_counter() - begun)


def time_client(chosen: BenchAnswers, model: str, prompts: Path) -> float:
    """tokens/s by the account of vLLM's client, which sends the rendered prompts as text and streams the answers"""
    command = [
        str(chosen.client), "-c", BENCH, "--backend", "vllm", "--base-url", chosen.engine.rstrip("/").removesuffix("/v1"),
        "--endpoint", "/v1/completions", "--model", model, "--tokenizer", str(chosen.target.name),
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--num-prompts", "-1",
        "--custom-output-len", str(chosen.max_new_tokens), "--ignore-eos", "--temperature", "0",
        "--max-concurrency", str(chosen.in_flight), "--extra-body", '{"add_special_tokens": false}', "--disable-tqdm",
        "--save-result", "--result-dir", str(prompts.parent), "--result-filename", "result.json",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"})
    path = prompts.parent / "result.json"
    if ended.returncode or not path.exists():
        raise ValueError(f"vLLM's benchmark client ended with an error: {' '.join(ended.stderr.split())[-500:]}")
    figures = json.loads(path.read_text())
    path.unlink()
    return float(figures["output_throughput"])


def measure(chosen: BenchAnswers, console: rich.console.Console) -> dict[str, list[float]]:
    """-> tokens/s of each way, one figure for each repeat"""
    tokenizer = load_tokenizer(str(chosen.target.name), trust_remote_code=chosen.target.trust_remote_code)
    rows = reading.spread(reading.load_prompts(chosen.prompts, split=chosen.split), chosen.limit)
    jobs = answering.list_jobs(tokenizer, rows, [0.0])
    law = Law(frozenset(), chosen.max_new_tokens)
    longest = max(len(job.tokens) for job in jobs) + chosen.max_new_tokens
    shared = {"target": chosen.target, "tokenizer": tokenizer, "batch": chosen.batch, "in_flight": chosen.in_flight,
              "features": FeatureOptions(), "console": console}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as name,
        Writers(Source(chosen.engine, **shared)) as servers,
        Writers(Source(None, **shared)) as own,
    ):
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        texts = [tokenizer.decode(job.tokens, clean_up_tokenization_spaces=False) for job in jobs]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        server = servers.open(law, example=jobs[0], longest=longest, ids=True)
        ways: dict[str, Callable[[list[Job]], float]] = {
            SERVER: lambda jobs: time_writer(server, tokenizer, jobs, folder)
        }
        if chosen.own:
            decoder = own.open(law, example=jobs[0], longest=longest)
            ways[OWN] = lambda jobs: time_writer(decoder, tokenizer, jobs, folder)
        if chosen.client is not None:
            ways[CLIENT] = lambda jobs: time_client(chosen, servers.opened.model, prompts)
        for way in (SERVER, OWN):  # the server then has all prompts in its cache
            if way in ways:
                ways[way](jobs if way == SERVER else jobs[: chosen.batch])
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in progress.track(range(chosen.repeats), "measuring", unit="repeats"):
            for way, rate in interleave(ways, jobs, number).items():
                rates[way].append(rate)
            console.print(", ".join(f"{way}: {each[-1]:.0f} tokens/s" for way, each in rates.items()))
    return rates


def show(chosen: BenchAnswers, rates: dict[str, list[float]], console: rich.console.Console) -> None:
    table = rich.table.Table("way", "tokens/s, median", f"{SERVER} is so many times as fast, median")
    for way, each in rates.items():
        table.add_row(way, f"{statistics.median(each):.0f}", f"{median_ratio(rates[SERVER], each):.2f}")
    console.print(table)
    if chosen.out:
        ratios = {way: median_ratio(rates[SERVER], each) for way, each in rates.items()}
        figures = {"settings": asdict(chosen), "tokens_per_second": rates, "ratio": ratios}
        files.write_text(Path(chosen.out), json.dumps(figures, indent=1) + "\n")


def main() -> None:
    chosen = options(BenchAnswers, __doc__)
    console = progress.Results()
    check(chosen)
    show(chosen, measure(chosen, console), console)


if __name__ == "__main__":
    run(main)
