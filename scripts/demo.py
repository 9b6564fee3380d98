"""Trains head=eagle on this machine, then decodes it beside the head that ships.

    python scripts/demo.py [minutes=15]

First it measures how fast this machine reads, trains and decodes, and prints how long everything takes. On a slow machine it takes
fewer steps and prompts, so that training and comparison together stay within `minutes`, and says so. After Ctrl-C the same
command continues. It writes checkpoints/demo, with report.html and comparison/comparison.html.
"""

from helpers import loading, training_step
from helpers.loading import read_yaml
from helpers.options import option, options, run
from helpers.training_step import Work

import functools
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.target.model import Target
from train import progress
from train.data import rows as data

ROOT = Path(__file__).resolve().parents[1]
RUN = "demo"
SHIPPED = "checkpoints/shipped/mtp"
HEAD, LENGTH = "eagle", 512
STEPS, FEWEST_STEPS, STEPS_UNIT = 1000, 100, 50
PROMPTS, FEWEST_PROMPTS = 8, 3
NEW_TOKENS = 48
METHODS = 5  # ways in which the comparison decodes each prompt
PACKS = 330  # of data.train, each of which the target reads once
SOLVED = 200  # those of them that the closed-form start reads (solve_packs)
TRIED = 16  # tokens that are decoded to see how fast that is
SHARE = 0.7  # of the minutes, that training may take


@dataclass(frozen=True)
class Demo:
    minutes: float = option(
        15, "training and comparison may take about so long; on a slow machine both are made smaller"
    )


@dataclass(frozen=True)
class Speed:
    """Seconds that this machine takes."""

    read: float  # the target, for a pack
    step: float  # of training, with the target's outputs on disk
    token: float  # of plain decoding


@dataclass(frozen=True)
class DemoPlan:
    steps: int
    prompts: int
    training: float  # seconds
    comparing: float

    @property
    def whole(self) -> bool:
        return self.steps == STEPS and self.prompts == PROMPTS


def measure(target: Target, prompt: list[int]) -> Speed:
    """Takes half a minute where a step takes seconds."""
    seconds = {}
    precision = "bf16" if target.dtype == torch.bfloat16 else "fp32"
    dtype = str(target.dtype).removeprefix("torch.")
    for features in ("given", "target"):
        work = Work(HEAD, LENGTH, features=features, precision=precision, steps=2, overrides=(f"target.dtype={dtype}",))
        seconds[features] = min(training_step.measure(ROOT, work, target).seconds)
    decoder = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    decoder.generate([prompt], 2)
    begun = time.perf_counter()
    decoder.generate([prompt], TRIED)
    token = (time.perf_counter() - begun) / TRIED
    return Speed(max(0.0, seconds["target"] - seconds["given"]), seconds["given"], token)


def make_plan(speed: Speed, minutes: float, *, steps: int | None = None, prompts: int | None = None) -> DemoPlan:
    """As many steps and prompts as fit, within bounds; or those that are given, because they are begun."""
    given = SHARE * minutes * 60
    per_prompt = METHODS * NEW_TOKENS * speed.token
    fitting = [num for num in range(FEWEST_STEPS, STEPS + 1, STEPS_UNIT) if _training(speed, num) <= given]
    steps = steps or max(fitting, default=FEWEST_STEPS)
    left = max(0.0, minutes * 60 - _training(speed, steps))
    prompts = prompts or min(PROMPTS, max(FEWEST_PROMPTS, int(left / per_prompt)))
    return DemoPlan(steps, prompts, _training(speed, steps), prompts * per_prompt)


def _training(speed: Speed, steps: int) -> float:
    """Seconds. The target's answers and the decoding of the last step are counted, too."""
    validation = PROMPTS * NEW_TOKENS * speed.token * 2
    return min(max(steps, SOLVED), PACKS) * speed.read + steps * speed.step + validation


def describe(plan: DemoPlan, speed: Speed) -> str:
    text = (
        f"This machine reads {LENGTH / max(speed.read, 1e-3):,.0f} tokens/s, trains on {LENGTH / speed.step:,.0f} and decodes "
        f"{1 / speed.token:.1f} tokens/s without drafts.\n"
        f"Training: {plan.steps:,} steps of {LENGTH} tokens, about {plan.training / 60:.0f} minutes. "
        f"Comparison: {plan.prompts} prompts, about {max(1, plan.comparing / 60):.0f} minutes."
    )
    if not plan.whole:
        text += (
            f"\nThat is less than the {STEPS:,} steps and {PROMPTS} prompts of the README's figures, so that it does not take longer; "
            "minutes= allows more."
        )
    return text


def train(steps: int) -> int:
    """-> the exit status of train.py"""
    given = [f"head={HEAD}", f"run={RUN}", f"data.length={LENGTH}", "resume=true", f"train.steps={steps}"]
    return run_command("train.py", *given, f"train.validate_every={-(-steps // 4)}")


def run_command(*arguments: str) -> int:
    """-> the exit status. Ctrl-C reaches the command too, which saves what it has; this waits for it."""
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def compare(prompts: int) -> int:
    given = {
        "checkpoint": f"checkpoints/{RUN},{SHIPPED}",
        "proposers": "auto",
        "chains": "2",
        "trees": "",
        "limit": prompts,
        "max_new_tokens": NEW_TOKENS,
        "decode.temperature": "0",
        "out": f"checkpoints/{RUN}/comparison",
    }
    return run_command("scripts/evaluate.py", *(f"{key}={value}" for key, value in given.items()))


def begun(path: Path, *keys: str) -> int | None:
    """A number in a file of settings, if there is one: what was begun goes on with the sizes that it was begun with."""
    document: Any = read_yaml(path) if path.exists() else None
    return document and int(functools.reduce(lambda part, key: part[key], keys, document))


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Demo, __doc__, arguments)
    folder = ROOT / "checkpoints" / RUN
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    opened = loading.load_target(
        loading.TargetOptions(device=accelerator.type if accelerator else None)
    )  # where training will be
    prompt = data.load_prompts(str(ROOT / "data/prompts_heldout.jsonl"), opened.tokenizer, limit=1)[0].tokens
    with progress.start("measuring this machine"):
        speed = measure(opened.target, prompt)
    del opened
    steps = begun(folder / "config.yaml", "train", "steps")
    prompts = begun(folder / "comparison/settings.json", "num_prompts")
    plan = make_plan(speed, chosen.minutes, steps=steps, prompts=prompts)
    print(describe(plan, speed), flush=True)
    if (folder / "finished").exists():
        print(f"{folder.relative_to(ROOT)} is trained already; delete it to train again.", flush=True)
    elif status := train(plan.steps):
        sys.exit(status)
    print("\n== This head and the one that ships, trained longer, on the same prompts ==", flush=True)
    sys.exit(compare(plan.prompts))


if __name__ == "__main__":
    run(main)
