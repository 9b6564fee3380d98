"""Trains head=eagle3 on this machine with the defaults of train.py, then decodes it beside the head that ships.

    python scripts/demo.py [minutes=10]

train.py measures how fast this device trains, and takes as many steps as fit into its part of the minutes; the comparison takes
fewer prompts where decoding is slow. After Ctrl-C the same command continues. It writes checkpoints/demo, with report.html and
comparison/results.html.
"""

from specdec.options.command_line import read_command

import subprocess
import sys
import time
from pathlib import Path

import torch

from specdec import loading
from specdec.core import progress
from specdec.core.option_types import Duration, Options
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.options.command_defaults import read_group
from specdec.options.run_command import run
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.text import conversations as data

ROOT = Path(__file__).resolve().parents[1]
RUN, SHIPPED = "demo", "checkpoints/shipped/mtp"
HEAD = "eagle3"
PROMPTS, FEWEST_PROMPTS, NEW_TOKENS = 8, 3, 48
METHODS = 5  # ways in which the comparison decodes each prompt
TRIED = 16  # tokens that are decoded to measure the speed
SHARE = 0.6  # of the minutes, for the steps of the training


class DemoOptions(Options):
    minutes: Duration


def measure(target: Target, prompt: list[int]) -> float:
    """Seconds of plain decoding for a token."""
    decoder = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    decoder.generate([prompt], TRIED)  # a warm-up
    begun = time.perf_counter()
    decoder.generate([prompt], TRIED)
    return (time.perf_counter() - begun) / TRIED


def choose_prompts(token: float, minutes: float) -> tuple[int, float]:
    """-> prompts of the comparison, and the seconds that it takes. token: seconds of plain decoding"""
    each = METHODS * NEW_TOKENS * token
    num = min(PROMPTS, max(FEWEST_PROMPTS, int(minutes * 60 * (1 - SHARE) / 2 / each)))
    return num, num * each


def run_command(file: str, *arguments: str) -> int:
    """-> the exit status. Ctrl-C reaches the command too, which saves what it has; this waits for it."""
    with subprocess.Popen([sys.executable, file, *arguments], cwd=ROOT) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def main(arguments: list[str] | None = None) -> None:
    options = read_command("demo", DemoOptions, __doc__, arguments)
    folder = ROOT / "checkpoints" / RUN
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    opened = loading.load_target(read_group(TargetOptions, "target", device=accelerator.type if accelerator else None))
    prompt = data.load_prompts(str(ROOT / "data/prompts_heldout.jsonl"), opened.tokenizer, limit=1)[0].tokens
    with progress.start("measuring this machine"):
        token = measure(opened.target, prompt)
    del opened
    prompts, seconds = choose_prompts(token, options.minutes)
    if (begun := folder / "comparison/settings.json").exists():  # it continues with the size that it was begun with
        prompts = loading.read_yaml(begun).get("num_questions") or prompts
    print(
        f"Training: at most {SHARE * options.minutes:.0f} minutes of steps; the first lines below say how many. Comparison: {prompts} "
        f"prompts, about {progress.duration(seconds)}, as plain decoding has {1 / token:.1f} tokens/s here.",
        flush=True,
    )
    if (folder / "finished").exists():
        print(f"{folder.relative_to(ROOT)} is trained already; delete it to train again.", flush=True)
    else:
        hours = f"train.hours={SHARE * options.minutes / 60:.4f}"
        if status := run_command("train.py", f"head={HEAD}", f"run={RUN}", "resume=true", hours):
            sys.exit(status)
    print("\n== This head and the one that ships, trained longer, on the same prompts ==", flush=True)
    methods = [f"checkpoint=checkpoints/{RUN},{SHIPPED}", "proposers=auto", "chains=2"]
    sizes = [f"limit={prompts}", f"max_new_tokens={NEW_TOKENS}", f"out=checkpoints/{RUN}/comparison"]
    sys.exit(run_command("scripts/evaluate.py", *methods, *sizes))


if __name__ == "__main__":
    run(main, DemoOptions)
