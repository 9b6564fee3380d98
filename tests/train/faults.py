"""kill -9 at random moments of real commands, which are repeated until they end, and what was lost: weights bit for
bit, log lines, cached features, answers."""

import collections
import json
import random
import subprocess
import time
from pathlib import Path

from tests.support.commands import ROOT, start, write_prompts, write_rows
from tests.support.runs import train_overrides
from tests.support.targets import save_target

ROWS = 24
BEGUN = {"train.py": "step ", "answer.py": "answers to write"}  # what a command prints when it begins to write


def make_inputs(folder: Path) -> None:
    """A tiny target with random weights, conversations and prompts."""
    save_target(folder / "target", num_layers=8)
    texts = [f"{number} is followed by {number + 1}, then by {number + 2}." for number in range(ROWS)]
    rows = [
        {
            "id": f"row-{n}",
            "messages": [{"role": "user", "content": f"Count from {n}."}, {"role": "assistant", "content": text}],
        }
        for n, text in enumerate(texts)
    ]
    write_rows(folder / "train.jsonl", rows)
    write_prompts(folder / "prompts.jsonl", 20)


def commands(folder: Path) -> dict[str, list]:
    """Commands with these inputs, by the name of their file: training that writes features, and answering."""
    often = (
        "train.steps=30",
        "train.validate_every=15",
        "train.save_every=3",
        "resume=auto",
        "solve_packs=0",
        "data.pack=false",
        "validation.num_prompts=1",
        "validation.max_new_tokens=3",
        "features.mode=cached",
        "features.folder=cache",
    )
    answer = [
        f"target.name={folder}/target",
        f"prompts={folder}/prompts.jsonl",
        "out=answers.jsonl",
        "max_new_tokens=12",
        "batch=3",
        "target.dtype=float32",
    ]
    return {
        "train.py": [ROOT / "train.py", *train_overrides(folder, "run", *often)],
        "answer.py": [ROOT / "scripts" / "answer.py", *answer],
    }


# What was lost


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differing(name: str, whole: list, killed: list) -> list[str]:
    """A sentence if two lists of things that can be counted are not the same things as often."""
    wanted, found = collections.Counter(whole), collections.Counter(killed)
    parts = {"missing": wanted - found, "too many": found - wanted}
    return [f"{name} {kind}: {list(some)[:3]}" for kind, some in parts.items() if some]


def lost_run(whole: Path, killed: Path) -> list[str]:
    """The weights of every checkpoint, the optimizer's last state, the best step, the lines of the log, and
    features.
    """
    whole_run, killed_run = (folder / "checkpoints" / "run" for folder in (whole, killed))
    last = max(path.name for path in (whole_run / "state").glob("step_??????"))
    paths = [f"{path.name}/drafter.safetensors" for path in sorted(whole_run.glob("step_??????"))]
    paths += [f"state/{last}/optimizer.safetensors", f"state/{last}/drafter.safetensors", "best", "finished"]
    sentences = []
    for path in paths:
        if (whole_run / path).read_bytes() != (killed_run / path).read_bytes():
            sentences.append(f"{path} differs")
    sentences += differing("log lines", log_lines(whole_run), log_lines(killed_run))
    if cached_features(whole) != cached_features(killed):
        sentences.append("cached features differ")
    return sentences


def log_lines(run: Path) -> list[tuple]:
    """Step, loss and kind of every line of a run's log."""
    lines = lines_of(run / "log.jsonl")
    return [(row["step"], row.get("loss"), "validation" in row, "last" in row, "skipped" in row) for row in lines]


def cached_features(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache").rglob("*.safetensors")}


def lost_answers(whole: Path, killed: Path) -> list[str]:
    return differing("answers", answer_rows(whole), answer_rows(killed))


def answer_rows(folder: Path) -> list[tuple]:
    return [(row["id"], json.dumps(row)) for row in lines_of(folder / "answers.jsonl")]


# Killing


def begin(command: list, folder: Path) -> subprocess.Popen:
    """Starts a command, and returns when it has begun to write, or has ended."""
    printed = folder / "printed"
    printed.write_text("")
    process = start(command, cwd=folder, errors=True, file=printed, HF_HUB_OFFLINE="1")
    while process.poll() is None and BEGUN[Path(command[0]).name] not in printed.read_text():
        time.sleep(0.005)
    return process


def finish(process: subprocess.Popen, folder: Path) -> None:
    assert process.wait() == 0, (folder / "printed").read_text()[-3000:]


def half_written(folder: Path) -> bool:
    """Whether there is a file or folder that was not completed, or a line without its end."""
    torn = [path for path in folder.rglob("*.jsonl") if path.stat().st_size and path.read_bytes()[-1:] != b"\n"]
    return bool(torn or any(folder.rglob("*.partial")) or any(folder.rglob("*.removed")))


def kill_and_repeat(command: list, folder: Path, moments: int, draw: random.Random) -> tuple[int, list[str]]:
    """Kills up to so many times, each time up to a third of the work after it began, and every second time when a write
    is under way, too. -> kills, and a sentence for each thing that is lost, doubled or different"""
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    process, begun = begin(command, whole), time.perf_counter()
    finish(process, whole)
    seconds, kills = time.perf_counter() - begun, 0
    killed.mkdir()
    while kills < moments:
        process = begin(command, killed)
        time.sleep(draw.random() * seconds / 3)
        limit = time.perf_counter() + kills % 2
        while process.poll() is None and time.perf_counter() < limit and not half_written(killed):
            pass
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    finish(process if kills < moments else begin(command, killed), killed)
    lost = lost_run if Path(command[0]).name == "train.py" else lost_answers
    return kills, lost(whole, killed)
