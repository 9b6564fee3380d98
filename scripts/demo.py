"""Trains head=eagle on this machine, then decodes it beside the head that ships.

    python scripts/demo.py [minutes=15]

First it measures how fast the target reads and decodes here, and prints how long everything takes. On a slow machine it takes
fewer steps and prompts, so that training and comparison together stay within `minutes`, and says so. After Ctrl-C the same
command continues. It writes checkpoints/demo, with report.html and comparison/comparison.html.
"""

from helpers import loading
from helpers.options import option, options, run

import subprocess
import sys
import time
from collections.abc import Callable
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
RUN, SHIPPED = "demo", "checkpoints/shipped/mtp"
HEAD, LENGTH = "eagle", 512
STEPS, FEWEST_STEPS, STEPS_UNIT = 1000, 100, 50
PROMPTS, FEWEST_PROMPTS, NEW_TOKENS = 8, 3, 48
METHODS = 5  # ways in which the comparison decodes each prompt
PACKS = 330  # of data.train, each of which the target reads once
SOLVED = 200  # packs that the closed-form start reads (solve_packs)
STEP = 1.9  # seconds of a training step over those in which the target reads a pack, on CPUs
TRIED = 16  # tokens that are decoded to measure the speed
SHARE = 0.7  # of the minutes, that training may take


@dataclass(frozen=True)
class Demo:
    minutes: float = option(15, "training and comparison may take about so long; on a slow machine both are smaller")


@dataclass(frozen=True)
class Speed:
    """Seconds that this machine takes."""

    read: float  # the target, for a pack
    token: float  # of plain decoding

    def training(self, steps: int) -> float:
        """Of so many steps, with the target's outputs and the decoding of the last validation."""
        validation = PROMPTS * NEW_TOKENS * self.token * 2
        return min(max(steps, SOLVED), PACKS) * self.read + steps * STEP * self.read + validation


@dataclass(frozen=True)
class DemoPlan:
    steps: int
    prompts: int
    training: float  # seconds
    comparing: float


def measure(target: Target, prompt: list[int]) -> Speed:
    decoder = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    pack = torch.tensor([(prompt * LENGTH)[:LENGTH]], device=target.device)

    def seconds(work: Callable[[], Any]) -> float:
        work()  # a warm-up
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    with torch.no_grad():
        read = seconds(lambda: float(target.read(pack, ()).final.sum()))
    return Speed(read, seconds(lambda: decoder.generate([prompt], TRIED)) / TRIED)


def make_plan(speed: Speed, minutes: float, *, steps: int | None = None, prompts: int | None = None) -> DemoPlan:
    """As many steps and prompts as fit, within bounds; or the given ones, with which the run was begun."""
    per_prompt = METHODS * NEW_TOKENS * speed.token
    sizes = range(FEWEST_STEPS, STEPS + 1, STEPS_UNIT)
    steps = steps or max((num for num in sizes if speed.training(num) <= SHARE * minutes * 60), default=FEWEST_STEPS)
    left = max(0.0, minutes * 60 - speed.training(steps))
    prompts = prompts or min(PROMPTS, max(FEWEST_PROMPTS, int(left / per_prompt)))
    return DemoPlan(steps, prompts, speed.training(steps), prompts * per_prompt)


def describe(plan: DemoPlan, speed: Speed) -> str:
    text = (
        f"The target reads {LENGTH / max(speed.read, 1e-3):,.0f} tokens/s here, and decodes {1 / speed.token:.1f} tokens/s without "
        f"drafts.\nTraining: {plan.steps:,} steps of {LENGTH} tokens, about {plan.training / 60:.0f} minutes. "
        f"Comparison: {plan.prompts} prompts, about {max(1, plan.comparing / 60):.0f} minutes."
    )
    if (plan.steps, plan.prompts) != (STEPS, PROMPTS):
        text += (
            f"\nThat is less than the {STEPS:,} steps and {PROMPTS} prompts of the README's figures, so that it does not take longer; "
            "minutes= allows more."
        )
    return text


def run_command(file: str, given: dict[str, Any]) -> int:
    """-> the exit status. Ctrl-C reaches the command too, which saves what it has; this waits for it."""
    arguments = [f"{key}={value}" for key, value in given.items()]
    with subprocess.Popen([sys.executable, file, *arguments], cwd=ROOT) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def read_begun(path: Path) -> dict:
    """A file of settings, {} if there is none: a run continues with the sizes that it was begun with."""
    return loading.read_yaml(path) if path.exists() else {}


def main(arguments: list[str] | None = None) -> None:
    chosen = options(Demo, __doc__, arguments)
    folder = ROOT / "checkpoints" / RUN
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    opened = loading.load_target(loading.TargetOptions(device=accelerator.type if accelerator else None))
    prompt = data.load_prompts(str(ROOT / "data/prompts_heldout.jsonl"), opened.tokenizer, limit=1)[0].tokens
    with progress.start("measuring this machine"):
        speed = measure(opened.target, prompt)
    del opened
    steps = read_begun(folder / "config.yaml").get("train", {}).get("steps")
    prompts = read_begun(folder / "comparison/settings.json").get("num_prompts")
    plan = make_plan(speed, chosen.minutes, steps=steps, prompts=prompts)
    print(describe(plan, speed), flush=True)
    if (folder / "finished").exists():
        print(f"{folder.relative_to(ROOT)} is trained already; delete it to train again.", flush=True)
    else:
        training = {"head": HEAD, "run": RUN, "data.length": LENGTH, "resume": "true", "train.steps": plan.steps}
        if status := run_command("train.py", training | {"train.validate_every": -(-plan.steps // 4)}):
            sys.exit(status)
    print("\n== This head and the one that ships, trained longer, on the same prompts ==", flush=True)
    comparison = {
        "checkpoint": f"checkpoints/{RUN},{SHIPPED}",
        "proposers": "auto",
        "chains": "2",
        "limit": plan.prompts,
        "max_new_tokens": NEW_TOKENS,
        "out": f"checkpoints/{RUN}/comparison",
    }
    sys.exit(run_command("scripts/evaluate.py", comparison))


if __name__ == "__main__":
    run(main)
