"""python scripts/demo.py [minutes=15]    trains head=eagle on this machine, then decodes it beside the head that ships.

First it measures how fast this machine reads, trains and decodes, and says how long all will take. On a slow machine it takes fewer
steps and fewer prompts, so that training and comparison together stay within `minutes`, and says that too. After Ctrl-C, the same command
continues; when training has finished, it decodes again. It writes checkpoints/demo, with report.html and comparison/comparison.html.
"""

from helpers import loading, training_step
from helpers.options import option, options, run
from helpers.settings_file import read_yaml
from helpers.training_step import Work

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec.decode import Decoder
from specdec.sampling import Sampling
from specdec.target import Target
from train import data, progress

ROOT = Path(__file__).resolve().parents[1]
RUN = "demo"
SHIPPED = "checkpoints/shipped/mtp"
HEAD, LENGTH = "eagle", 512
STEPS, FEWEST_STEPS, STEPS_UNIT = 1000, 100, 50
PROMPTS, FEWEST_PROMPTS = 8, 3
NEW_TOKENS = 48
METHODS = 5  # ways in which the comparison decodes each prompt
PACKS = 330  # of data.train, each of which the target reads once
TRIED = 16  # tokens that are decoded to see how fast that is
SHARE = 0.7  # of the minutes, that training may take


@dataclass(frozen=True)
class Demo:
    minutes: float = option(
        15, "training and comparison may take about so long; on a slow machine both are made smaller"
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


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


def make_plan(speed: Speed, minutes: float) -> DemoPlan:
    """As many steps and prompts as fit, within bounds."""
    given = SHARE * minutes * 60
    per_prompt = METHODS * NEW_TOKENS * speed.token
    fitting = [steps for steps in range(FEWEST_STEPS, STEPS + 1, STEPS_UNIT) if _training(speed, steps) <= given]
    steps = max(fitting, default=FEWEST_STEPS)
    left = max(0.0, minutes * 60 - _training(speed, steps))
    prompts = min(PROMPTS, max(FEWEST_PROMPTS, int(left / per_prompt)))
    return DemoPlan(steps, prompts, _training(speed, steps), prompts * per_prompt)


def _training(speed: Speed, steps: int) -> float:
    """Seconds. The target's answers and the decoding of the last step are counted, too."""
    validation = PROMPTS * NEW_TOKENS * speed.token * 2
    return min(steps, PACKS) * speed.read + steps * speed.step + validation


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
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--quiet",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "train.py"]
    given = [f"head={HEAD}", f"run={RUN}", f"data.length={LENGTH}", "resume=true", f"train.steps={steps}"]
    return subprocess.run([*launch, *given, f"train.validate_every={-(-steps // 4)}"], cwd=ROOT).returncode


def compare(prompts: int, target: loading.TargetOptions) -> int:
    given = {
        "checkpoint": f"checkpoints/{RUN},{SHIPPED}", "proposers": "auto", "chains": "2", "trees": "", "limit": prompts,
        "max_new_tokens": NEW_TOKENS, "decode.temperature": "0", "target.dtype": target.dtype, "out": f"checkpoints/{RUN}/comparison",
    }  # fmt: skip
    command = [sys.executable, "scripts/compare.py", *(f"{key}={value}" for key, value in given.items())]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> None:
    chosen = options(Demo, __doc__)
    if chosen.minutes <= 0:
        raise ValueError(f"minutes={chosen.minutes} must be more than 0.")
    folder = ROOT / "checkpoints" / RUN
    opened = loading.load_target(chosen.target)
    prompt = data.load_prompts(str(ROOT / "data/prompts_heldout.jsonl"), opened.tokenizer, limit=1)[0].tokens
    with progress.start("measuring this machine"):
        speed = measure(opened.target, prompt)
    plan = make_plan(speed, chosen.minutes)
    begun = folder / "config.yaml"
    if begun.exists():  # a run goes on with the steps that it was begun with
        steps = int(read_yaml(begun)["train"]["steps"])
        plan = DemoPlan(steps, plan.prompts, _training(speed, steps), plan.comparing)
    print(describe(plan, speed), flush=True)
    del opened
    if (folder / "finished").exists():
        print(f"{folder.relative_to(ROOT)} is trained; delete it to train again.")
    elif status := train(plan.steps):
        sys.exit(status)
    print("\n== This head and the one that ships, trained longer, on the same prompts ==", flush=True)
    sys.exit(compare(plan.prompts, chosen.target))


if __name__ == "__main__":
    run(main)
