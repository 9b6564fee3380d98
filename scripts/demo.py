"""Trains head=eagle3 on this machine with the defaults of train.py, then decodes it beside the head that ships.

    python scripts/demo.py [minutes=10]

train.py measures how fast this device trains, and takes as many steps as fit into its share of the minutes. The
comparison takes fewer prompts where decoding is slow. After Ctrl-C the same command continues. It writes
checkpoints/demo, with report.html and comparison/results.html.
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
from specdec.options.run_command import run_command
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.text import conversations as data

ROOT = Path(__file__).resolve().parents[1]
RUN_NAME, SHIPPED = "demo", "checkpoints/shipped/mtp"
HEAD = "eagle3"
MAX_PROMPTS, MIN_PROMPTS, NEW_TOKENS = 8, 3, 48
METHODS = 5  # ways in which the comparison decodes each prompt
MEASURED_TOKENS = 16  # tokens that are decoded to measure the speed
TRAINING_SHARE = 0.6  # of the minutes, for the steps of the training


class DemoOptions(Options):
    minutes: Duration


def measure_token_seconds(target: Target, prompt: list[int]) -> float:
    """Seconds of plain decoding for a token."""
    decoder = Decoder(target, None, sampling=Sampling(temperature=0), stop=set())
    decoder.generate([prompt], MEASURED_TOKENS)  # a warm-up
    start_time = time.perf_counter()
    decoder.generate([prompt], MEASURED_TOKENS)
    return (time.perf_counter() - start_time) / MEASURED_TOKENS


def choose_prompts(token_seconds: float, minutes: float) -> tuple[int, float]:
    """-> prompts of the comparison, and the seconds that it takes. token: seconds of plain decoding"""
    prompt_seconds = METHODS * NEW_TOKENS * token_seconds
    num_prompts = min(MAX_PROMPTS, max(MIN_PROMPTS, int(minutes * 60 * (1 - TRAINING_SHARE) / 2 / prompt_seconds)))
    return num_prompts, num_prompts * prompt_seconds


def run_script(file: str, *arguments: str) -> int:
    """-> the exit status. Ctrl-C reaches the command too, which saves what it has; this waits for it."""
    with subprocess.Popen([sys.executable, file, *arguments], cwd=ROOT) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


def main(arguments: list[str] | None = None) -> None:
    options = read_command("demo", DemoOptions, __doc__, arguments)
    folder = ROOT / "checkpoints" / RUN_NAME
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    opened = loading.load_target(read_group(TargetOptions, "target", device=accelerator.type if accelerator else None))
    prompt = data.load_prompts(str(ROOT / "data/prompts_heldout.jsonl"), opened.tokenizer, limit=1)[0].tokens
    with progress.start_task("measuring this machine"):
        token_seconds = measure_token_seconds(opened.target, prompt)
    del opened
    prompts, seconds = choose_prompts(token_seconds, options.minutes)
    settings_path = folder / "comparison/settings.json"
    if settings_path.exists():  # an interrupted comparison continues with its number of prompts
        prompts = loading.read_yaml(settings_path).get("num_questions") or prompts
    print(
        f"Training: at most {TRAINING_SHARE * options.minutes:.0f} minutes of steps; the first lines below say how "
        f"many. Comparison: {prompts} prompts, about {progress.format_duration(seconds)}, as plain decoding has "
        f"{1 / token_seconds:.1f} tokens/s here.",
        flush=True,
    )
    if (folder / "finished").exists():
        print(f"{folder.relative_to(ROOT)} is trained already; delete it to train again.", flush=True)
    else:
        hours = f"train.hours={TRAINING_SHARE * options.minutes / 60:.4f}"
        if status := run_script("train.py", f"head={HEAD}", f"run={RUN_NAME}", "resume=true", hours):
            sys.exit(status)
    print("\n== This head and the one that ships, trained longer, on the same prompts ==", flush=True)
    methods = [f"checkpoint=checkpoints/{RUN_NAME},{SHIPPED}", "proposers=auto", "chains=2"]
    sizes = [f"limit={prompts}", f"max_new_tokens={NEW_TOKENS}", f"out=checkpoints/{RUN_NAME}/comparison"]
    sys.exit(run_script("scripts/evaluate.py", *methods, *sizes))


if __name__ == "__main__":
    run_command(main, DemoOptions)
