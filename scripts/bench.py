"""Times decoding with drafts against transformers' generate and llama.cpp, on the same prompts, greedy, in turn.

    python scripts/bench.py checkpoint=checkpoints/shipped/eagle,checkpoints/shipped/draft limit=6
    python scripts/bench.py proposers=ngram prompts=data/prompts_copy.jsonl     # against generate's prompt lookup

Compared are: generate alone; with assistant_model where a checkpoint is a draft model; with custom_generate, which puts
this decoder inside it; with prompt_lookup_num_tokens where ngram is among the proposers; llama.cpp where a GGUF file is
given; plain decoding here; every checkpoint in each shape; and every proposer. Read the ratios, which are medians over
prompts of decodings next to each other: absolute times say little on a shared machine. Rates include the prompt's pass
and leave out compiling.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import rich.table
import torch
from rich.progress import track

from engine_clients.llamacpp_client import LlamaCpp
from helpers import decoding, loading, proposers
from helpers.options import option, options, split
from helpers.options import run as run_command
from specdec import benchmark, files, speed
from specdec.benchmark import Generate, TimedDecoder, TimedModel
from specdec.compile import Runner
from specdec.decode import Decoder
from specdec.drafting import Drafting
from specdec.generate import Speculative
from specdec.generation import STAGES
from specdec.heads.draft import Draft
from specdec.proposers.auto import Auto
from specdec.proposers.heads import HeadProposer
from specdec.proposers.ngram import Ngram
from specdec.proposers.suffix import usual_suffix
from specdec.sampling import Sampling
from specdec.tuning import name_of
from train import data

GENERATE, PLAIN = "transformers generate", "plain"
Methods = dict[str, Generate]  # by name, in the order of the table


@dataclass(frozen=True, kw_only=True)
class Bench(loading.PromptOptions, decoding.ShapesOptions, proposers.SeveralOptions):
    limit: int = 8
    repeats: int = option(3, "decode every prompt this many times with each method")
    trees: str = "3x2x4"
    gguf: str | None = option(None, "the target as a GGUF file, for llama.cpp")
    out: str | None = option(None, "JSON file for the figures")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.CompileOptions = field(default_factory=lambda: decoding.CompileOptions(compile=True))


def main() -> None:
    chosen = options(Bench, __doc__)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 130)
    if not split(chosen.checkpoint) and not split(chosen.proposers):
        raise ValueError("There is nothing to time: give checkpoint=DIR, or proposers=ngram, or both.")
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    if len(runs) > 1 and any(run.drafter.adapts_target for run in runs):
        raise ValueError("A checkpoint that adapts its target has another target than the others: give it alone.")
    opened = loading.open_target(runs[0].drafter.target) if runs else loading.load_target(chosen.target)
    prompts = data.load_prompts(chosen.prompts, opened.tokenizer, limit=chosen.limit)
    tokens = [prompt.tokens for prompt in prompts]
    methods = make_methods(chosen, opened, runs, longest=max(map(len, tokens)))
    rates = benchmark.measure(
        methods,
        tokens,
        repeats=chosen.repeats,
        progress=lambda items, text: track(items, description=text, console=console, transient=True),
    )
    num_bytes = speed.bytes_per_token(opened.target)
    bandwidth = speed.memory_bandwidth(num_bytes, opened.target.device)
    limit = bandwidth / num_bytes
    figures = summarise(methods, rates)
    title = (
        f"{opened.target.name}, {chosen.target.dtype}, {opened.target.device}, {torch.get_num_threads()} threads; "
        f"{len(prompts)} prompts x {chosen.repeats}. Reading the weights once takes {1e3 / limit:.1f} ms here "
        f"({bandwidth / 1e9:.1f} GB/s): no plain decoding is faster than {limit:.0f} tokens/s."
    )
    console.print(table(figures, title))
    share = figures[PLAIN]["tokens_per_second"] / limit
    console.print(f"plain decoding reaches {share:.0%} of that limit, the prompt's pass included", highlight=False)
    if chosen.out:
        document = {"bandwidth_bytes_per_second": bandwidth, "limit_tokens_per_second": limit, "methods": figures}
        files.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")


def make_methods(chosen: Bench, opened: loading.Opened, runs: list[loading.Run], *, longest: int) -> Methods:
    """All methods, those of transformers and llama.cpp first. longest: tokens of the longest prompt"""
    shapes = chosen.shapes()
    lengths = [shape.depth for shape in shapes if shape.chain]
    if not lengths:
        raise ValueError("chains is empty: give a chain, such as chains=3.")
    drafting = Drafting(lengths[0], compile=chosen.decode.compile)
    head = str(runs[0].folder) if runs else None
    configs = proposers.configure_all(chosen.proposers, settings=chosen.settings, drafting=drafting, checkpoint=head)
    untrained = {name: proposers.make(config, opened.target) for name, config in configs.items()}
    methods = generate_methods(chosen, opened, runs, lengths, untrained.get("ngram"))
    if chosen.gguf:
        context = longest + chosen.max_new_tokens
        methods["llama.cpp (xllamacpp)"] = llama_cpp(chosen, opened.stop, context)
    runner = chosen.decode.runner()

    def add(name: str, proposer, runner: Runner | None) -> None:
        decoder = Decoder(opened.target, proposer, sampling=Sampling(), stop=opened.stop, runner=runner)
        methods[name] = TimedDecoder(decoder, chosen.max_new_tokens)

    add(PLAIN, None, runner)
    if chosen.decode.compile:
        add(f"{PLAIN}, not compiled", None, None)
    for run in runs:
        for shape in decoding.cut(shapes, run.drafter.depth):
            drafting = Drafting(shape.depth, shape.width, shape.nodes, compile=chosen.decode.compile)
            add(f"{run.name}, {name_of(drafting)}", drafting.proposer(run.drafter), runner)
        proposer = Drafting(1, compile=chosen.decode.compile).proposer(run.drafter)
        if isinstance(proposer, HeadProposer):
            add(f"{run.name}, auto", Auto(opened.target, members=[usual_suffix(opened.target), proposer]), runner)
    for name, proposer in untrained.items():
        add(name, proposer, runner)
        if chosen.decode.compile and isinstance(proposer, Ngram):
            add(f"{name}, not compiled", proposer, None)
    return methods


def generate_methods(
    chosen: Bench, opened: loading.Opened, runs: list[loading.Run], lengths: list[int], ngram
) -> Methods:
    """transformers' generate: alone, with its own methods of drafting, and with this project's decoder inside it."""

    def method(**arguments) -> TimedModel:
        model, limit = opened.target.model, chosen.max_new_tokens
        return TimedModel(model, stop=opened.stop, max_new_tokens=limit, **arguments)

    methods: Methods = {GENERATE: method()}
    for run in runs:
        if isinstance(run.drafter, Draft):
            for num in (None, *lengths):
                assistant = run.drafter.language_model(opened.target.dtype)
                if num:
                    assistant.generation_config.update(
                        num_assistant_tokens=num,
                        assistant_confidence_threshold=0.0,
                        num_assistant_tokens_schedule="constant",
                    )
                drafts = f"{num} drafts" if num else "its defaults"
                methods[f"generate, assistant_model {run.name}, {drafts}"] = method(assistant_model=assistant)
    for run in runs:
        if not run.drafter.adapts_target:
            depth = min(lengths[0], run.drafter.depth or lengths[0])
            custom = Speculative(run.folder, Drafting(depth, compile=chosen.decode.compile))
            methods[f"generate, custom_generate {run.name}, chain of {depth}"] = method(custom_generate=custom)
    if isinstance(ngram, Ngram):
        for num, longest in dict.fromkeys(
            [(10, 2), (ngram.depth, ngram.max)]
        ):  # the defaults of generate, then those of this ngram
            name = f"generate, prompt_lookup_num_tokens={num}, n-grams of up to {longest}"
            methods[name] = method(prompt_lookup_num_tokens=num, max_matching_ngram_size=longest)
    return methods


def llama_cpp(chosen: Bench, stop: set[int], context: int) -> Generate:
    llama = LlamaCpp(chosen.gguf, threads=torch.get_num_threads(), context=context)

    def generate(prompt: list[int]) -> tuple[int, float]:
        start = time.perf_counter()
        tokens = llama.generate(prompt, chosen.max_new_tokens, stop)[0]
        return len(tokens), time.perf_counter() - start

    return generate


def summarise(methods: Methods, rates: dict[str, list[float]]) -> dict[str, dict]:
    """Medians over prompts, by method; of decoders also tau and the parts of a round."""
    figures = {}
    for name, method in methods.items():
        figures[name] = {
            "tokens_per_second": statistics.median(rates[name]),
            "to_generate": benchmark.median_ratio(rates[name], rates[GENERATE]),
            "to_plain": benchmark.median_ratio(rates[name], rates[PLAIN]),
        }
        if isinstance(method, TimedDecoder):
            figures[name] |= method.figures()
    return figures


def table(figures: dict[str, dict], title: str) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("method")
    headings = ("median tokens/s", "times generate", "times plain", "tau", f"ms a round: {', '.join(STAGES)}")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, cell in figures.items():
        tau = f"{cell['tau']:.2f}" if "tau" in cell else ""
        ms = ", ".join(f"{spent:.1f}" for spent in cell.get("ms_per_round", {}).values())
        ratios = f"{cell['to_generate']:.2f}", f"{cell['to_plain']:.2f}"
        table.add_row(name, f"{cell['tokens_per_second']:.1f}", *ratios, tau, ms)
    return table


if __name__ == "__main__":
    run_command(main)
