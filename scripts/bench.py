"""python scripts/bench.py checkpoint=DIR [prompts=FILE limit=8 max_new_tokens=64]

Times transformers' generate, our plain decoding, a chain and a tree on the same prompts in one interleaved run, greedy.
Absolute times say little on a shared machine: read the ratios, which are medians over prompts of figures measured next
to each other.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rich.console
import rich.table
import torch
from rich.progress import track

from scripts import common
from scripts.cli import options, run
from specdec import checkpoint
from specdec.decode import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.tree import TreeShape
from train import data, reading


@dataclass(frozen=True)
class Bench:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int = field(default=8, metadata={"help": "this many prompts, spread over the file"})
    repeats: int = field(default=3, metadata={"help": "times that every prompt is decoded each way"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    chain: str = field(default="4", metadata={"help": "comma list of chain lengths"})
    tree: str = field(default="4x3x8", metadata={"help": "comma list of depth x width x nodes"})
    out: str | None = field(default=None, metadata={"help": "JSON file for the figures"})
    target: common.TargetOptions = field(default_factory=common.TargetOptions)


def main() -> None:
    chosen = options(Bench, __doc__)
    console = rich.console.Console()
    loaded = common.load(chosen.checkpoint, chosen.target)
    prompts = [
        data.encode_prompt(loaded.tokenizer, row["messages"])
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    shapes = [TreeShape(int(depth), 1, int(depth)) for depth in chosen.chain.split(",")]
    shapes += [TreeShape(*map(int, tree.split("x"))) for tree in chosen.tree.split(",") if tree]
    ways: dict[str, Callable[[list[int]], int]] = {
        "transformers generate": lambda prompt: theirs(loaded, prompt, chosen.max_new_tokens)
    }
    for name, proposer in {
        "plain": None,
        **{str(shape): HeadProposer(loaded.drafter, shape) for shape in shapes},
    }.items():
        decoder = Decoder(loaded.target, proposer, temperature=0, stop=loaded.stop)
        ways[name] = lambda prompt, decoder=decoder: len(decoder.generate([prompt], chosen.max_new_tokens).tokens[0])
    for way in ways.values():
        way(prompts[0])
    rates: dict[str, list[float]] = {name: [] for name in ways}  # tokens/s, the prompt's pass included
    for number, prompt in enumerate(track(prompts * chosen.repeats, console=console, transient=True)):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            num_tokens = ways[name](prompt)
            rates[name].append(num_tokens / (time.perf_counter() - start))
    table = rich.table.Table(
        title=f"{loaded.target.name}, {chosen.target.dtype}, {loaded.target.device}, {torch.get_num_threads()} threads; "
        f"{len(prompts)} prompts x {chosen.repeats}",
        title_justify="left",
    )
    for name in ("way", "tokens/s, median", "ratio to generate", "ratio to plain"):
        table.add_column(name, justify="left" if name == "way" else "right")
    figures = {}
    for name, values in rates.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, rates[base])) for base in ("transformers generate", "plain")
        ]
        figures[name] = {
            "tokens_per_second": statistics.median(values),
            "to_generate": ratios[0],
            "to_plain": ratios[1],
        }
        table.add_row(name, f"{statistics.median(values):.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    if chosen.out:
        checkpoint.write_text(Path(chosen.out), json.dumps(figures, indent=2) + "\n")


def theirs(loaded: common.Loaded, prompt: list[int], max_new_tokens: int) -> int:
    tokens = torch.tensor([prompt], device=loaded.target.device)
    answer = loaded.target.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(loaded.stop),
    )
    return answer.shape[1] - len(prompt)


if __name__ == "__main__":
    run(main)
