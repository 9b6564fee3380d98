"""python scripts/bench.py checkpoint=DIR[,DIR ...] [limit=8 max_new_tokens=64 gguf=FILE out=bench.json]
python scripts/bench.py proposers=ngram prompts=data/prompts_copy.jsonl     # against generate's prompt lookup

Times, on the same prompts in one interleaved run, greedy: transformers' generate, alone, with assistant_model where a
checkpoint is a draft model, with custom_generate, which puts our decoder inside it, and with prompt_lookup_num_tokens
where ngram is among the proposers; llama.cpp where a GGUF file is given; our plain decoding; every checkpoint as a
chain and as a tree; and every proposer of conf/proposer that is named. Absolute times say little on a shared machine: read the ratios, which are medians over prompts of figures
measured next to each other. Rates include the prompt's pass, and leave out what compiling takes.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import rich.table
import torch
from rich.progress import track

from engine_clients.llamacpp_client import LlamaCpp
from helpers import loading, proposers
from helpers.options import options, run
from specdec import checkpoint
from specdec.compile import Runner
from specdec.decode import STAGES, Decoder, Generation
from specdec.drafting import Drafting
from specdec.generate import Speculative
from specdec.heads.draft import Draft
from specdec.proposers.ngram import Ngram
from specdec.sampling import Sampling
from train import data, reading

Way = Callable[[list[int]], tuple[int, float]]  # a prompt -> new tokens, seconds


@dataclass(frozen=True)
class Bench(proposers.SeveralOptions):
    checkpoint: str = field(
        default="", metadata={"help": "comma list of a step's folders, or of runs' folders for their best steps"}
    )
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int = field(default=8, metadata={"help": "this many prompts, spread over the file"})
    repeats: int = field(default=3, metadata={"help": "times that every prompt is decoded each way"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    chain: str = field(default="3", metadata={"help": "comma list of chain lengths"})
    tree: str = field(default="3x2x4", metadata={"help": "comma list of depth x width x nodes; empty: none"})
    compile: bool = field(default=True, metadata={"help": "compile ours; plain decoding is then timed without it too"})
    gguf: str | None = field(default=None, metadata={"help": "the target as a GGUF file, for llama.cpp"})
    out: str | None = field(default=None, metadata={"help": "JSON file for the figures"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


class Ours:
    """A decoder as a way, which remembers what its rounds consisted of."""

    def __init__(self, decoder: Decoder, max_new_tokens: int):
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.done: list[Generation] = []

    def __call__(self, prompt: list[int]) -> tuple[int, float]:
        start = time.perf_counter()
        self.done.append(self.decoder.generate([prompt], self.max_new_tokens))
        return len(self.done[-1].tokens[0]), time.perf_counter() - start - self.done[-1].compile_seconds

    def figures(self) -> dict:
        rounds = sum(len(generation.accepted[0]) for generation in self.done)
        emitted = sum(len(generation.tokens[0]) - 1 for generation in self.done)
        spent = {stage: 1e3 * sum(done.stages[stage] for done in self.done) / rounds for stage in STAGES}
        return {"tau": emitted / rounds, "ms_per_round": spent}


def main() -> None:
    chosen = options(Bench, __doc__)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 130)
    loaded = [loading.load(folder, chosen.target) for folder in chosen.checkpoint.split(",") if folder]
    if not loaded and not proposers.names_in(chosen.proposers):
        raise ValueError("There is nothing to time: give checkpoint=DIR, or proposers=ngram, or both.")
    first = loaded[0] if loaded else loading.load_target(chosen.target)
    if len(loaded) > 1 and any(
        one.target.fingerprint() != first.target.fingerprint() or one.target.adapted for one in loaded
    ):
        raise ValueError(
            "The checkpoints are of different targets: bench each target, and each adapted one, by itself."
        )
    prompts = [
        data.encode_prompt(first.tokenizer, row["messages"])
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    ways = all_ways(chosen, first, loaded, longest=max(map(len, prompts)))
    for way in track(ways.values(), description="warm-up and compiling", console=console, transient=True):
        for prompt in (min(prompts, key=len), max(prompts, key=len)):  # the least and the greatest cache
            way(prompt)
    ours = [way for way in ways.values() if isinstance(way, Ours)]
    for way in ours:
        way.done.clear()
    rates: dict[str, list[float]] = {name: [] for name in ways}  # tokens/s
    for number, prompt in enumerate(track(prompts * chosen.repeats, console=console, transient=True)):
        if number % len(prompts) == 0:
            for way in ours:  # the answers to prompts that will come again
                if way.decoder.proposer:
                    way.decoder.proposer.forget()
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            num_tokens, seconds = ways[name](prompt)
            rates[name].append(num_tokens / seconds)
    bandwidth = measure_bandwidth(first.target.model)
    limit = bandwidth / size_of(first.target.model)
    table = rich.table.Table(
        title=f"{first.target.name}, {chosen.target.dtype}, {first.target.device}, {torch.get_num_threads()} threads; "
        f"{len(prompts)} prompts x {chosen.repeats}. Reading the weights once takes {1e3 / limit:.1f} ms here "
        f"({bandwidth / 1e9:.1f} GB/s): no plain decoding is faster than {limit:.0f} tokens/s.",
        title_justify="left",
    )
    columns = ("way", "tokens/s, median", "of generate", "of plain", "tau", "ms a round: draft, verify, keep, other")
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    figures = {}
    for name, values in rates.items():
        of_generate, of_plain = (
            statistics.median(a / b for a, b in zip(values, rates[base])) for base in (GENERATE, PLAIN)
        )
        figures[name] = {
            "tokens_per_second": statistics.median(values),
            "to_generate": of_generate,
            "to_plain": of_plain,
        }
        rounds = ways[name].figures() if isinstance(ways[name], Ours) else None
        figures[name] |= rounds or {}
        table.add_row(
            name,
            f"{statistics.median(values):.1f}",
            f"{of_generate:.2f}",
            f"{of_plain:.2f}",
            f"{rounds['tau']:.2f}" if rounds else "",
            ", ".join(f"{spent:.1f}" for spent in rounds["ms_per_round"].values()) if rounds else "",
        )
    console.print(table)
    plain = figures[PLAIN]["tokens_per_second"] / limit
    console.print(f"plain decoding reaches {plain:.0%} of that limit, the prompt's pass included", highlight=False)
    if chosen.out:
        document = {"bandwidth_bytes_per_second": bandwidth, "limit_tokens_per_second": limit, "ways": figures}
        checkpoint.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")


GENERATE, PLAIN = "transformers generate", "plain"


def all_ways(chosen: Bench, first: loading.Opened, loaded: list[loading.Loaded], *, longest: int) -> dict[str, Way]:
    """By name, in the order of the table; those of transformers and llama.cpp first. longest: tokens of a prompt"""
    names = loading.run_names([Path(folder) for folder in chosen.checkpoint.split(",") if folder])
    called = dict(zip([one.folder for one in loaded], names))
    ways: dict[str, Way] = {GENERATE: lambda prompt: theirs(first, prompt, chosen.max_new_tokens)}
    for one in loaded:
        if isinstance(one.drafter, Draft):
            for num in [None, *map(int, chosen.chain.split(","))]:
                settings: dict = {}
                if num:
                    settings = {"num_assistant_tokens": num, "assistant_confidence_threshold": 0.0}
                    settings["num_assistant_tokens_schedule"] = "constant"
                assistant = one.drafter.language_model(first.target.dtype)
                assistant.generation_config.update(**settings)
                name = f"generate, assistant_model {called[one.folder]}, {f'{num} drafts' if num else 'its defaults'}"
                ways[name] = lambda prompt, assistant=assistant: theirs(
                    first, prompt, chosen.max_new_tokens, assistant=assistant
                )
    depth = int(chosen.chain.split(",")[0])
    for one in loaded:
        if not one.drafter.adapts_target:
            num = min(depth, one.drafter.depth or depth)
            custom = Speculative(one.folder, Drafting(num, compile=chosen.compile))
            ways[f"generate, custom_generate {called[one.folder]}, chain of {num}"] = lambda prompt, custom=custom: (
                theirs(first, prompt, chosen.max_new_tokens, custom=custom)
            )
    configs = proposers.configure_all(
        chosen.proposers,
        settings=chosen.settings,
        drafting=Drafting(depth, compile=chosen.compile),
        checkpoint=str(loaded[0].folder) if loaded else None,
    )
    untrained = {name: proposers.make(config, first.target) for name, config in configs.items()}
    lookup = untrained.get("ngram")
    if isinstance(lookup, Ngram):
        for num, longest_match in dict.fromkeys([(10, 2), (lookup.depth, lookup.max)]):  # theirs by default, and ours
            ways[f"generate, prompt_lookup_num_tokens={num}, n-grams of up to {longest_match}"] = (
                lambda prompt, num=num, longest_match=longest_match: theirs(
                    first,
                    prompt,
                    chosen.max_new_tokens,
                    prompt_lookup_num_tokens=num,
                    max_matching_ngram_size=longest_match,
                )
            )
    if chosen.gguf:
        llama = LlamaCpp(chosen.gguf, threads=torch.get_num_threads(), context=longest + chosen.max_new_tokens)
        ways["llama.cpp (xllamacpp)"] = lambda prompt: timed(
            lambda: len(llama.generate(prompt, chosen.max_new_tokens, first.stop)[0])
        )
    shapes = [(int(depth), 1, int(depth)) for depth in chosen.chain.split(",")]
    shapes += [tuple(map(int, tree.split("x"))) for tree in chosen.tree.split(",") if tree]
    runner = Runner(chosen.compile)
    ours = {PLAIN: Decoder(first.target, None, sampling=Sampling(), stop=first.stop, runner=runner)}
    if chosen.compile:
        ours["plain, not compiled"] = Decoder(first.target, None, sampling=Sampling(), stop=first.stop)
    for one in loaded:
        for depth, width, nodes in shapes:
            depth = min(depth, one.drafter.depth or depth)
            drafting = Drafting(depth, width, depth if width == 1 else nodes, compile=chosen.compile)
            proposer = drafting.proposer(one.drafter)
            ours[f"{called[one.folder]}, {drafting.shape}"] = drafting.decoder(
                first.target, proposer, sampling=Sampling(), stop=first.stop, runner=runner
            )
    for name, proposer in untrained.items():
        for runs in (runner, Runner())[: 1 + (chosen.compile and proposer is lookup)]:
            ours[name + ", not compiled" * (runs is not runner)] = Decoder(
                first.target, proposer, sampling=Sampling(), stop=first.stop, runner=runs
            )
    return ways | {name: Ours(decoder, chosen.max_new_tokens) for name, decoder in ours.items()}


def timed(generate: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    return generate(), time.perf_counter() - start


def theirs(loaded: loading.Opened, prompt: list[int], max_new_tokens: int, *, assistant=None, custom=None, **lookup):
    """transformers' greedy generate. -> new tokens, seconds without those of compiling"""
    tokens = torch.tensor([prompt], device=loaded.target.device)
    num, seconds = timed(
        lambda: (
            loaded.target.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(loaded.stop),
                assistant_model=assistant,
                custom_generate=custom,
                **lookup,
            ).shape[1]
            - len(prompt)
        )
    )
    return num, seconds - (custom.last.compile_seconds if custom else 0.0)


def size_of(model: torch.nn.Module) -> int:
    """Bytes that a token's pass reads: every weight once (an embedding that is not the LM head's too: one row)."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if embedding is head else total - embedding.nbytes


def measure_bandwidth(model: torch.nn.Module, repeats: int = 15) -> float:
    """Bytes a second at which this device reads as many bytes as the model has weights (a sum of float32), the best."""
    values = torch.ones(size_of(model) // 4, device=next(model.parameters()).device)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        float(values.sum())  # waits for the device
        best = max(best, values.nbytes / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    run(main)
