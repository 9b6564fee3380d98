"""python scripts/find_layers.py prompts=data/prompts_train.jsonl limit=8 max_new_tokens=64 out=layers.yaml

Finds the layers of a target that draft best for it (proposer=layerskip; Draft & Verify, 2309.08168). Prints, for every
number of layers, which to keep and the predicted speedup, and writes the fastest choice as a proposer's YAML.
"""

from helpers import loading
from helpers.options import options, run

import functools
from dataclasses import dataclass, field
from pathlib import Path

import rich.box
import rich.table
import torch

from specdec.core import files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.layer_search import AnsweredPrompt, Choice, Clock, choices, ranges
from specdec.proposers.layerskip import LayerSkip
from train import progress

COLUMNS = ("layers", "first drafts right", "with the first layers", "depth", "tau", "predicted speedup")


@dataclass(frozen=True, kw_only=True)
class FindLayers(loading.PromptOptions):
    prompts: str = "data/prompts_train.jsonl"
    limit: int | None = 8
    depth: int = field(default=4, metadata={"help": "largest number of drafts per round"})
    tries: int = field(
        default=8, metadata={"help": "layers that each step tries to remove: those whose removal cost least so far"}
    )
    compile: bool = field(default=False, metadata={"help": "time compiled passes, for decode.compile=true"})
    out: str = field(default="layers.yaml", metadata={"help": "YAML file to write, for conf/proposer"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


@torch.inference_mode()
def main() -> None:
    chosen = options(FindLayers, __doc__)
    console = progress.Results()
    opened = loading.load_target(chosen.target)
    target = opened.target
    LayerSkip(target, layers=1, depth=1)  # raises ValueError for a target that cannot skip layers
    prompts = [prompt.tokens for prompt in loading.load_prompts(chosen, opened)]

    show = functools.partial(progress.track, unit="steps")

    decoder = Decoder(target, None, sampling=Sampling(), stop=opened.stop)
    answers = [
        decoder.generate([prompt], chosen.max_new_tokens).tokens[0]
        for prompt in progress.track(prompts, "answers", unit="prompts")
    ]
    texts = [AnsweredPrompt(target, prompt, answer) for prompt, answer in zip(prompts, answers) if len(answer) > 1]
    if not texts:
        raise ValueError("No answer has a second token: raise max_new_tokens or give other prompts.")
    size = f"{len(texts)} answers, {sum(len(text.starts) for text in texts)} places where a round can start"
    console.print(f"{size}; removing layers one by one")
    clock = Clock(target, 1 + chosen.depth, compile=chosen.compile)
    by_size = choices(texts, depth=chosen.depth, tries=chosen.tries, clock=clock, progress=show)
    console.print(table(by_size, title=f"{target.name}: {size}"))

    best = max(by_size, key=lambda choice: choice.speedup)
    if best.speedup <= 1:
        console.print("No choice is predicted to be faster than plain decoding. The least slow one:")
    console.print(str(best))
    numbers = ",".join(map(str, best.numbers))
    console.print(f'proposer=layerskip "proposer.layers=[{numbers}]" proposer.depth={best.depth}')
    lines = [
        f"# Written by scripts/find_layers.py for {target.name} ({target.fingerprint()}), {str(target.dtype).removeprefix('torch.')}, {target.device}",
        f"# {best}",
        "_target_: specdec.proposers.layerskip.LayerSkip",
        f"layers: [{numbers}]",
        f"depth: {best.depth}",
        "threshold: 0.0",
        "compile: ${decode.compile}",
        *(f"# {choice}: {list(choice.numbers)}" for choice in by_size),
    ]
    files.write_text(Path(chosen.out), "\n".join(lines) + "\n")
    console.print(f"written: {chosen.out}")


def table(by_size: list[Choice], *, title: str) -> rich.table.Table:
    drawn = rich.table.Table(title=title, box=rich.box.SIMPLE)
    for name in COLUMNS:
        drawn.add_column(name, justify="right")
    drawn.add_column("which", justify="left")
    for choice in by_size:
        figures = f"{choice.right:.3f}", f"{choice.first_right:.3f}", str(choice.depth), f"{choice.tau:.3f}"
        drawn.add_row(str(len(choice.numbers)), *figures, f"{choice.speedup:.2f}", ranges(choice.numbers))
    return drawn


if __name__ == "__main__":
    run(main)
