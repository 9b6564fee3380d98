"""Times decoding with drafts against transformers' generate, llama.cpp and vLLM, on the same prompts, greedy, in turn.

    python scripts/bench.py checkpoint=checkpoints/shipped/eagle3,checkpoints/shipped/mtp limit=6
    python scripts/bench.py checkpoint=checkpoints/my_draft rivals=transformers,llamacpp,vllm out=rivals.json
    python scripts/bench.py proposers=ngram,auto prompts=data/prompts_copy.jsonl rivals=transformers,llamacpp

Compared are: generate alone, and with custom_generate, which puts this decoder inside it; plain decoding here; every
checkpoint in each shape and with auto; every proposer; and the rivals, each alone and with its own speculation:

    transformers  assisted generation where a checkpoint is a draft model, and prompt lookup
    llamacpp      the target and the checkpoints as GGUF files, which are made, and llama.cpp's n-gram modes
    vllm          the checkpoints' exports, ngram and suffix

llama.cpp and vLLM need `make engines`. They run on the CPU in processes of their own with the same number of threads, and
are stopped while others are timed. A rival that fails says why in its row. Read the ratios, which are medians over
prompts of decodings next to each other: absolute times say little on a shared machine. Rates include the prompt's pass
and leave out compiling.
"""

from helpers import decoding, loading, proposers, rivals
from helpers.options import option, options, split
from helpers.options import run as run_command

import contextlib
import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rich.table
import torch

from specdec.core import files
from specdec.core.compile import Runner
from specdec.core.generation import STAGES
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.hf import Speculative
from specdec.measuring import benchmark, speed
from specdec.measuring.benchmark import Generate, Timed, TimedDecoder
from specdec.measuring.tuning import name_of
from specdec.proposers.auto import Auto
from specdec.proposers.heads import HeadProposer
from specdec.proposers.text import Ngram
from train import progress

GENERATE, PLAIN = "transformers generate", "plain"
Methods = dict[str, Generate]  # by name, in the order of the table


@dataclass(frozen=True, kw_only=True)
class Bench(loading.PromptOptions, decoding.ShapesOptions, proposers.SeveralOptions):
    limit: int = 8
    repeats: int = option(3, "decode every prompt this many times with each method")
    trees: str = "3x2x4"
    rivals: str = option("transformers", f"comma list of {', '.join(rivals.NAMES)}; empty: none")
    gguf: str | None = option(None, "the target as a GGUF file, for rivals=llamacpp; null: it is made")
    gguf_type: str | None = option(None, "weights of GGUF files that are made: bf16, f16 or f32; null: as target.dtype")
    out: str | None = option(None, "JSON file for the figures")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.CompileOptions = field(default_factory=lambda: decoding.CompileOptions(compile=True))


def main() -> None:
    chosen = options(Bench, __doc__)
    console = progress.Results()

    show = functools.partial(progress.track, unit="steps")
    check(chosen)
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    if len(runs) > 1 and any(run.drafter.adapts_target for run in runs):
        raise ValueError("A checkpoint that adapts its target has another target than the others: give it alone.")
    opened = loading.open_target(runs[0].drafter.target) if runs else loading.load_target(chosen.target)
    prompts = loading.load_prompts(chosen, opened, split(chosen.checkpoint))
    tokens = [prompt.tokens for prompt in prompts]
    with opened_methods(chosen, opened, runs, longest=max(map(len, tokens)), show=show) as methods:
        rates, answers = benchmark.measure(methods, tokens, repeats=chosen.repeats, progress=show)
        figures = summarise(methods, rates, answers)
    num_bytes = speed.bytes_per_token(opened.target)
    bandwidth = speed.memory_bandwidth(num_bytes, opened.target.device)
    limit = bandwidth / num_bytes
    title = (
        f"{opened.target.name}, {str(opened.target.dtype).removeprefix('torch.')}, {opened.target.device}, {torch.get_num_threads()} threads; "
        f"{len(prompts)} prompts x {chosen.repeats}. Reading the weights once takes {1e3 / limit:.1f} ms here "
        f"({bandwidth / 1e9:.1f} GB/s): no plain decoding is faster than {limit:.0f} tokens/s."
    )
    console.print(table(figures, title, num_prompts=len(prompts), width=console.width))
    share = figures[PLAIN]["tokens_per_second"] / limit
    console.print(f"plain decoding reaches {share:.0%} of that limit, the prompt's pass included", highlight=False)
    if chosen.out:
        document = {"bandwidth_bytes_per_second": bandwidth, "limit_tokens_per_second": limit,
                    "prompts": chosen.prompts, "num_prompts": len(prompts), "max_new_tokens": chosen.max_new_tokens,
                    "machine": loading.machine(opened.target), "methods": figures}  # fmt: skip
        files.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")


def check(chosen: Bench) -> None:
    if not any(map(split, (chosen.checkpoint, chosen.proposers, chosen.rivals))):
        raise ValueError("There is nothing to time: give checkpoint=DIR, or proposers=ngram, or rivals=transformers.")
    if chosen.gguf_type not in (None, *rivals.GGUF_TYPES.values()):
        types = ", ".join(rivals.GGUF_TYPES.values())
        raise ValueError(f"gguf_type={chosen.gguf_type} must be one of {types}: smaller ones are other weights.")
    for name in ("gguf", "gguf_type"):
        if getattr(chosen, name) is not None and "llamacpp" not in split(chosen.rivals):
            raise ValueError(f"{name}= is for llama.cpp: give rivals=transformers,llamacpp too.")


@contextlib.contextmanager
def opened_methods(
    chosen: Bench,
    opened: loading.Opened,
    runs: list[loading.Run],
    *,
    longest: int,
    show: Callable[[list, str], Iterable],
) -> Iterator[Methods]:
    """All methods, those of the rivals after transformers' generate and ready. longest: tokens of the longest prompt"""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setting = rivals.Setting(
            opened, runs, chain_lengths(chosen), longest + chosen.max_new_tokens, chosen.max_new_tokens, folder,
            gguf=chosen.gguf, gguf_type=chosen.gguf_type, eager=not chosen.decode.compile,
        )  # fmt: skip
        own = make_methods(chosen, opened, runs)
        others = rivals.make(split(chosen.rivals), setting)
        ngrams = [method.decoder.proposer for method in own.values() if isinstance(method, TimedDecoder)]
        if "transformers" in split(chosen.rivals):
            for ngram in ngrams:
                if isinstance(ngram, Ngram):
                    others |= rivals.prompt_lookup(setting, ngram.depth, ngram.max)
        for rival in show(list(others.values()), "starting rivals"):
            stack.callback(rival.close)
            rival.open()
        yield {GENERATE: setting.model()} | others | custom_methods(chosen, setting) | own


def chain_lengths(chosen: Bench) -> list[int]:
    lengths = [shape.depth for shape in chosen.shapes() if shape.chain]
    if not lengths:
        raise ValueError("chains is empty: give a chain, such as chains=3.")
    return lengths


def custom_methods(chosen: Bench, setting: rivals.Setting) -> Methods:
    """transformers' generate with this project's decoder inside it."""
    methods: Methods = {}
    for run in setting.runs:
        if not run.drafter.adapts_target:
            depth = min(setting.lengths[0], run.drafter.depth or setting.lengths[0])
            custom = Speculative(run.folder, Drafting(depth, compile=chosen.decode.compile))
            methods[f"generate, custom_generate {run.name}, chain of {depth}"] = setting.model(custom_generate=custom)
    return methods


def make_methods(chosen: Bench, opened: loading.Opened, runs: list[loading.Run]) -> Methods:
    """This project's decoder: plain, every checkpoint in each shape and with auto, every proposer."""
    shapes, methods = chosen.shapes(), Methods()
    drafting = Drafting(chain_lengths(chosen)[0], compile=chosen.decode.compile)
    head = str(runs[0].folder) if runs else None
    configs = proposers.configure_all(chosen.proposers, settings=chosen.settings, drafting=drafting, checkpoint=head)
    untrained = {name: proposers.make(config, opened.target) for name, config in configs.items()}
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
            add(f"{run.name}, auto", Auto.usual(opened.target, proposer), runner)
    for name, proposer in untrained.items():
        add(name, proposer, runner)
        if chosen.decode.compile and isinstance(proposer, Ngram):
            add(f"{name}, not compiled", proposer, None)
    return methods


def summarise(methods: Methods, rates: dict[str, list[float]], answers: dict[str, list[list[int]]]) -> dict[str, dict]:
    """Medians over prompts, by method, and how many answers are those of plain decoding; tau and more where it is known.

    A rival that failed has {"failure": why}.
    """

    def same(name: str, other: str) -> int:
        return sum(mine == theirs for mine, theirs in zip(answers[name], answers[other]))

    figures: dict[str, dict] = {}
    for name, method in methods.items():
        if isinstance(method, rivals.Rival) and method.failure:
            figures[name] = {"failure": method.failure}
            continue
        figures[name] = {
            "tokens_per_second": statistics.median(rates[name]),
            "to_generate": benchmark.median_ratio(rates[name], rates[GENERATE]),
            "to_plain": benchmark.median_ratio(rates[name], rates[PLAIN]),
            "same_as_plain": same(name, PLAIN),
        }
        if isinstance(method, rivals.Rival) and method.plain:
            own = methods[method.plain]
            if isinstance(own, rivals.Rival) and not own.failure:
                figures[name]["same_as_own_plain"] = same(name, method.plain)
                figures[name]["to_own_plain"] = benchmark.median_ratio(rates[name], rates[method.plain])
        if isinstance(method, Timed):
            figures[name] |= method.figures()
    return figures


def table(figures: dict[str, dict], title: str, *, num_prompts: int, width: int) -> rich.table.Table:
    """One row for each method; ratios are medians over prompts. A rival that failed says why beside its name.

    width: of the terminal
    """
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("method", width=min(48, width // 3))
    headings = (
        "tokens/s", "times generate", "times plain", "times its engine's plain", "tau",
        f"answers of {num_prompts} as plain's (as its engine's)", f"ms a round: {', '.join(STAGES)}",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, cell in figures.items():
        if "failure" in cell:
            table.add_row(f"{name}: {cell['failure']}", *["-"] * len(headings))
            continue
        ratios = [
            f"{cell[key]:.2f}" if key in cell else "" for key in ("to_generate", "to_plain", "to_own_plain", "tau")
        ]
        same = str(cell["same_as_plain"]) + (f" ({cell['same_as_own_plain']})" if "same_as_own_plain" in cell else "")
        ms = ", ".join(f"{spent:.1f}" for spent in cell.get("ms_per_round", {}).values())
        table.add_row(name, f"{cell['tokens_per_second']:.1f}", *ratios, same, ms)
    return table


if __name__ == "__main__":
    run_command(main)
