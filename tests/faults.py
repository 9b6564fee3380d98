"""python -m tests.faults [moments=50] [seed=0] [only=PART]    kill -9 at random moments of real commands, and what was lost

Trains, writes feature caches, answers and compares, kills each command again and again at random moments, and repeats it
until it ends. Then compares what it left with an undisturbed run: weights bit for bit, log lines, cached features, answers,
compared prompts. Prints a table; exits with 1 if anything was lost. only= chooses the commands whose name has that part.
"""

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support import REAL_TARGET, ROOT, save_eagle, save_target, train_overrides, write_prompts, write_rows
from tests.warm import Command, start

ROWS = 24


@dataclass(frozen=True)
class Work:
    """command: its file and arguments; begun: a part of what it prints when it begins to write; lost: (undisturbed, killed
    folder) -> a sentence for each thing that is lost, doubled or different"""

    name: str
    command: tuple[str, ...]
    begun: str
    lost: Callable[[Path, Path], list[str]]


@dataclass
class Outcome:
    moments: int = 0
    writing: int = 0  # moments at which something was half written
    lost: tuple[str, ...] = ()


# What is killed


def make_inputs(folder: Path) -> None:
    """A tiny target with random weights, conversations, prompts and two checkpoints."""
    target = save_target(folder / "target", num_layers=8)
    texts = [f"{number} is followed by {number + 1}, then by {number + 2}." for number in range(ROWS)]
    rows = [{"id": f"row-{n}", "messages": [{"role": "user", "content": f"Count from {n}."},
                                            {"role": "assistant", "content": text}]} for n, text in enumerate(texts)]  # fmt: skip
    write_rows(folder / "train.jsonl", rows)
    write_prompts(folder / "prompts.jsonl", 20)
    for seed, name in enumerate(("one", "two")):
        save_eagle(folder / name / "step_000001", target, seed=seed)


def works(folder: Path) -> list[Work]:
    often = ("train.steps=30", "train.validate_every=5", "train.save_every=3", "resume=auto", "solve_packs=0",
             "data.pack=false", "validation.num_prompts=1", "validation.max_new_tokens=3")  # fmt: skip
    train = (str(ROOT / "train.py"), *train_overrides(folder, "run", *often))
    cached = (*train, "features.mode=cached", "features.folder=cache", "train.validate_every=15")
    answer = (str(ROOT / "scripts/answer.py"), f"target.name={folder}/target", f"prompts={folder}/prompts.jsonl",
              "out=answers.jsonl", "max_new_tokens=12", "batch=3", "target.dtype=float32")  # fmt: skip
    compare = (str(ROOT / "scripts/evaluate.py"), f"checkpoint={folder}/one/step_000001,{folder}/two/step_000001",
               f"prompts={folder}/prompts.jsonl", "out=comparison", "max_new_tokens=8", "chains=3", "trees=3x2x4",
               "proposers=ngram", "decode.temperature=0,1", "target.dtype=float32")  # fmt: skip
    real = (str(ROOT / "train.py"), "run=run", f"target.name={REAL_TARGET}", f"data.train={ROOT}/data/answers.jsonl.gz",
            f"data.heldout={ROOT}/data/prompts_heldout.jsonl", "data.limit=60", "data.hold_out=0", "data.length=128",
            "features.folder=cache", "threads=1", "train.steps=12", "train.validate_every=6", "train.save_every=2",
            "train.log_every=1", "validation.num_prompts=1", "validation.max_new_tokens=4", "head.vocab_size=2000",
            "solve_packs=4", "resume=auto")  # fmt: skip
    return [
        Work("training, validating, saving", train, "step ", lost_run),
        Work("training, writing features", cached, "step ", lost_features),
        Work("scripts/answer.py", answer, "answers to write", lost_answers),
        Work("scripts/evaluate.py", compare, "prompts x temperatures", lost_comparison),
        Work("training on SmolLM2", real, "data ", lost_features),
    ]


# What was lost


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differing(name: str, whole: list, killed: list) -> list[str]:
    """A sentence if two lists of things that can be counted are not the same things as often."""
    wanted, found = collections.Counter(whole), collections.Counter(killed)
    parts = {"missing": wanted - found, "too many": found - wanted}
    return [f"{name} {kind}: {list(some)[:3]}" for kind, some in parts.items() if some]


def lost_run(whole: Path, killed: Path) -> list[str]:
    return lost_between(*(folder / "checkpoints" / "run" for folder in (whole, killed)))


def lost_between(whole: Path, killed: Path) -> list[str]:
    """Of two runs: the weights of every checkpoint, the optimizer's last state, the best step, and the lines of the log."""
    last = max(path.name for path in (whole / "state").glob("step_??????"))
    paths = [f"{path.name}/drafter.safetensors" for path in sorted(whole.glob("step_??????"))]
    paths += [f"state/{last}/optimizer.safetensors", f"state/{last}/drafter.safetensors", "best", "finished"]
    sentences = [f"{path} differs" for path in paths if (whole / path).read_bytes() != (killed / path).read_bytes()]
    kinds = ("validation", "last", "skipped")
    logs = [
        [(row["step"], row.get("loss"), *(kind in row for kind in kinds)) for row in lines_of(run / "log.jsonl")]
        for run in (whole, killed)
    ]
    return sentences + differing("log lines", *logs)


def lost_features(whole: Path, killed: Path) -> list[str]:
    caches = [
        {path.name: path.read_bytes() for path in (folder / "cache").glob("*.safetensors")}
        for folder in (whole, killed)
    ]
    same = caches[0] == caches[1]
    return lost_run(whole, killed) + ([] if same else ["cached features differ"])


def lost_answers(whole: Path, killed: Path) -> list[str]:
    rows = [[(row["id"], json.dumps(row)) for row in lines_of(folder / "answers.jsonl")] for folder in (whole, killed)]
    return differing("answers", *rows)


def lost_comparison(whole: Path, killed: Path) -> list[str]:
    """The tokens of every decoding of every prompt. The times differ."""

    def row_key(row: dict) -> tuple:
        tokens = {name: method["drafted"]["tokens"] for name, method in row["methods"].items()}
        return row["number"], row["temperature"], json.dumps(tokens, sort_keys=True)

    rows = [[row_key(row) for row in lines_of(folder / "comparison" / "rows.jsonl")] for folder in (whole, killed)]
    ended = (killed / "comparison" / "report.json").exists()
    return differing("compared prompts", *rows) + ([] if ended else ["no report.json"])


# Killing


class Launcher:
    def start(self, work: Work, folder: Path) -> Command | subprocess.Popen:
        (folder / "printed").write_text("")
        return start(list(work.command), cwd=folder, errors=True, file=folder / "printed")

    def wait_begun(self, process: Command | subprocess.Popen, work: Work, folder: Path) -> None:
        while process.poll() is None and work.begun not in (folder / "printed").read_text():
            time.sleep(0.005)

    def undisturbed(self, work: Work, folder: Path) -> float:
        """-> seconds from the first thing that is written to the end"""
        folder.mkdir()
        process = self.start(work, folder)
        self.wait_begun(process, work, folder)
        start = time.perf_counter()
        self.end(process, folder)
        return time.perf_counter() - start

    def end(self, process: Command | subprocess.Popen, folder: Path) -> None:
        assert process.wait() == 0, (folder / "printed").read_text()[-3000:]

    def killed(self, work: Work, folder: Path, moments: int, seconds: float, draw: random.Random) -> tuple[int, int]:
        """Kills up to `moments` times, each time up to a third of the work after it began, and every second time when a
        write is under way, too. -> kills, and how many of them left something half written"""
        folder.mkdir()
        kills = writing = 0
        while kills < moments:
            process = self.start(work, folder)
            self.wait_begun(process, work, folder)
            time.sleep(draw.random() * seconds / 3)
            if kills % 2:
                wait_written(process, folder)
            if process.poll() is not None:
                self.end(process, folder)
                return kills, writing
            process.kill()
            process.wait()
            kills += 1
            writing += half_written(folder)
        self.end(self.start(work, folder), folder)
        return kills, writing


def half_written(folder: Path) -> bool:
    """Whether there is a file or folder that was not completed, or a line without its end."""
    torn = [path for path in folder.rglob("*.jsonl") if path.stat().st_size and path.read_bytes()[-1:] != b"\n"]
    return bool(torn or any(folder.rglob("*.partial")) or any(folder.rglob("*.removed")))


def wait_written(process: Command | subprocess.Popen, folder: Path, seconds: float = 1.0) -> None:
    """Until something is half written, but no longer than `seconds`."""
    limit = time.perf_counter() + seconds
    while process.poll() is None and time.perf_counter() < limit and not half_written(folder):
        pass


def measure(work: Work, moments: int, folder: Path, draw: random.Random) -> Outcome:
    """Kills at `moments` moments, in as many runs as that takes."""
    launcher, outcome, number = Launcher(), Outcome(), 0
    seconds = launcher.undisturbed(work, folder / "whole")
    while outcome.moments < moments:
        number += 1
        place = folder / f"killed-{number}"
        kills, writing = launcher.killed(work, place, min(10, moments - outcome.moments), seconds, draw)
        outcome.moments, outcome.writing = outcome.moments + kills, outcome.writing + writing
        outcome.lost += tuple(work.lost(folder / "whole", place))
    return outcome


def set_environment() -> None:
    """Of the processes that are killed; before the first of them."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=f"{ROOT}:{ROOT}/scripts")


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    moments, draw = int(given.get("moments", 50)), random.Random(int(given.get("seed", 0)))
    set_environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        chosen = [work for work in works(folder) if given.get("only", "") in work.name]
        print("| killed | moments | in the middle of a write | lost |\n|---|---|---|---|", flush=True)
        failed = False
        for number, work in enumerate(chosen):
            share = moments * (number + 1) // len(chosen) - moments * number // len(chosen)
            (folder / str(number)).mkdir()
            outcome = measure(work, share, folder / str(number), draw)
            failed = failed or bool(outcome.lost)
            lost = "; ".join(outcome.lost) or "nothing"
            print(f"| {work.name} | {outcome.moments} | {outcome.writing} | {lost} |", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
