"""python scripts/identity.py checkpoint=DIR prompts=FILE [max_new_tokens=64 batch=1 target.dtype=float32]

Are plain, chain and tree decoding token for token what transformers' generate(do_sample=False) writes? In float32 every
difference must be a near-tie, shown by the gap of the target's two best logits; in bfloat16 such ties are frequent.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
import torch
from rich.progress import track

from helpers import loading
from helpers.options import options, run
from specdec import checkpoint
from specdec.decode import Decoder
from specdec.drafting import Drafting
from specdec.measurement import top2_gap
from specdec.sampling import Sampling
from specdec.tree import TreeShape
from train import data, reading


@dataclass(frozen=True)
class Identity:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=None, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    batch: int = field(default=1, metadata={"help": "prompts decoded at once by us and, left-padded, by generate"})
    out: str | None = field(default=None, metadata={"help": "JSON file for the result"})
    target: loading.TargetOptions = field(default_factory=lambda: loading.TargetOptions(dtype="float32"))


def main() -> None:
    chosen = options(Identity, __doc__)
    console = rich.console.Console()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    rows = reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    prompts = sorted((data.encode_prompt(loaded.tokenizer, row["messages"]) for row in rows), key=len)
    groups = [prompts[start : start + chosen.batch] for start in range(0, len(prompts), chosen.batch)]
    ways = {
        "plain": None,
        **{
            str(shape): Drafting(shape.depth, shape.width, shape.nodes).proposer(loaded.drafter)
            for shape in (TreeShape(4, 1, 4), TreeShape(4, 3, 10))
        },
    }
    expected = [
        answer
        for group in track(groups, description="generate", console=console, transient=True)
        for answer in theirs(loaded, group, chosen.max_new_tokens)
    ]
    result = {}
    for name, proposer in ways.items():
        decoder = Decoder(loaded.target, proposer, sampling=Sampling(), stop=loaded.stop)
        answers, accepted, rounds = [], 0, 0
        for group in track(groups, description=name, console=console, transient=True):
            found = decoder.generate(group, chosen.max_new_tokens)
            answers += found.tokens
            accepted += sum(map(sum, found.accepted))
            rounds += sum(map(len, found.accepted))
        gaps = [
            top2_gap(loaded.target, *case, Sampling()) for case in zip(prompts, expected, answers) if case[1] != case[2]
        ]
        result[name] = {
            "identical": len(prompts) - len(gaps),
            "of": len(prompts),
            "gaps": gaps,
            "tau": 1 + accepted / rounds,
        }
        console.print(
            f"{name}: {len(prompts) - len(gaps)} of {len(prompts)} identical to generate, tau {1 + accepted / rounds:.3f}"
            + (f"; top-2 gaps where they part: {', '.join(f'{gap:.2g}' for gap in gaps)}" if gaps else ""),
            highlight=False,
        )
    if chosen.out:
        checkpoint.write_text(Path(chosen.out), json.dumps(result, indent=2) + "\n")


def theirs(loaded: loading.Loaded, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers of transformers' own generate."""
    width = max(map(len, prompts))
    pad = min(loaded.stop)
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=loaded.target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=tokens.device)
    found = loaded.target.model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(loaded.stop),
        pad_token_id=pad,
    )
    answers = found[:, width:].tolist()
    return [
        answer[: next((i + 1 for i, token in enumerate(answer) if token in loaded.stop), len(answer))]
        for answer in answers
    ]


if __name__ == "__main__":
    run(main)
