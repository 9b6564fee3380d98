"""python scripts/compare_training.py length=512 depth=7

Training steps of EAGLE-3 here and in Speculators (`make engines`): the same rows, target states, draft vocabulary, depth,
threads and precision (bf16 autocast, float32 weights). The two run in turn, each in a process of its own. Reports tokens/s,
and the highest memory above what was held before the first step.

With save=FOLDER Speculators alone trains, for all steps, and its head is kept, for scripts/import.py and scripts/replay.py:

    python scripts/compare_training.py save=peer steps=1000 depth=4 threads=2 optimizer=muon train_head=false
"""

from helpers.options import options, run, split

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine_clients.child import Child
from train import progress
from train.overrides import quoted

PROGRAMS = Path(__file__).resolve().parent / "trainers"
ROOT = PROGRAMS.parents[1]
FIGURES = ("tokens_per_second", "tokens_per_cpu_second", "memory", "process")
ATTENTION = ("sdpa", "eager", "simple_flex_attention")


@dataclass(frozen=True)
class Compare:
    length: int = field(default=512, metadata={"help": "tokens of a pack, one pack a step"})
    depth: int = field(default=7, metadata={"help": "steps of the unroll, EAGLE-3's training-time test"})
    steps: int = field(default=6, metadata={"help": "steps of each process; the first is not timed"})
    rounds: int = field(default=3, metadata={"help": "processes of each kind, in turn"})
    threads: int = field(default=2, metadata={"help": "of each process"})
    data: str = field(default="data/answers.jsonl.gz", metadata={"help": "conversations, FILE or FILE,FILE"})
    hold_out: int = field(default=0, metadata={"help": "of them, as data.hold_out of train.py"})
    target: str = field(default="targets/smollm2-135m", metadata={"help": "folder of the target"})
    vocab_size: int = field(default=8192, metadata={"help": "of the draft vocabulary"})
    optimizer: str = field(default="adamw", metadata={"help": "of Speculators: adamw, as here, or muon, its default"})
    attention: str = field(
        default="sdpa", metadata={"help": f"of Speculators: one of {', '.join(ATTENTION)} (its default, not on CPUs)"}
    )
    compile: bool = field(
        default=False, metadata={"help": "compile Speculators' forward pass, which it does on GPUs only"}
    )
    train_head: bool = field(
        default=True, metadata={"help": "train Speculators' LM head, as EAGLE-3 does and this project; it freezes it"}
    )
    python: str = field(default="engines/bin/python", metadata={"help": "Python that has Speculators"})
    save: str | None = field(
        default=None, metadata={"help": "train Speculators alone, and save its head in this folder"}
    )
    out: str = field(default="compare_training.json", metadata={"help": "JSON file to write"})


def anonymous(pid: int, name: str = "RssAnon") -> int:
    """Bytes that a process holds itself, without pages of files; VmHWM: the highest of all its pages so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def highest(pid: int) -> Iterator[dict]:
    """Within, the memory of a process is read every 5 ms. -> above the first reading, and in all"""
    figures = {"above": 0}
    start, done = anonymous(pid), threading.Event()

    def watch() -> None:
        while not done.wait(0.005) and Path(f"/proc/{pid}/status").exists():
            figures["above"] = max(figures["above"], anonymous(pid) - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield figures
    finally:
        done.set()
        watcher.join()
    figures["whole"] = anonymous(pid, "VmHWM")


def own(compare: Compare, scratch: Path) -> Child:
    overrides = [
        "head=eagle3",
        "run=own",
        f"data.train=[{','.join(quoted(str(Path(part).absolute())) for part in split(compare.data))}]",
        f"data.hold_out={compare.hold_out}",
        f"data.length={compare.length}",
    ]
    overrides += [
        f"target.name={quoted(str(Path(compare.target).absolute()))}",
        f"threads={compare.threads}",
        "solve_packs=0",
        "precision=bf16",
        "target.dtype=bfloat16",
    ]
    overrides += [
        f"data.heldout={quoted(str(ROOT / 'data' / 'prompts_heldout.jsonl'))}",
        f"head.vocab_size={compare.vocab_size}",
    ]
    overrides += [f"head.objective.depth={compare.depth}", f"train.steps={compare.steps}", "validation.num_prompts=1"]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]), "HF_HUB_OFFLINE": "1"}
    return Child(
        PROGRAMS / "own.py",
        {"overrides": overrides, "folder": str(scratch)},
        python=sys.executable,
        name="train.py",
        loads=compare.target,
        environment=environment | {"OMP_NUM_THREADS": str(compare.threads)},
    )


def theirs(compare: Compare, data: Path, batches: list[list[int]]) -> Child:
    flags = f"--speculator-type eagle3 --draft-vocab-size {compare.vocab_size} --total-seq-len {compare.length} "
    flags += f"--ttt-steps {compare.depth} --draft-attn-impl {compare.attention} --loss-implementation eager "
    flags += f"--optimizer {compare.optimizer} --num-workers 0 --full-attention-indices 0"
    return Child(
        PROGRAMS / "of_speculators.py",
        {"data": str(data), "target": str(Path(compare.target).absolute()), "batches": batches, "flags": flags.split(),
         "compiled": compare.compile, "train_head": compare.train_head},
        python=compare.python,
        name="Speculators",
        loads=compare.target,
        environment={"OMP_NUM_THREADS": str(compare.threads), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def measure(child: Child, steps: int, tokens: list[int]) -> dict:
    """One process: the first step is warm-up for time, and counts for memory."""
    time.sleep(0.2)
    with highest(child.process.pid) as memory:
        reply = child.ask({"steps": steps})
    child.close()
    rate, busy = (sum(tokens[1:]) / sum(reply[key][1:]) for key in ("seconds", "cpu_seconds"))
    return {
        "tokens_per_second": rate,
        "tokens_per_cpu_second": busy,
        "memory": memory["above"],
        "process": memory["whole"],
        **reply,
    }


def save_peer(compare: Compare, folder: Path) -> None:
    """Speculators' head after `steps` steps, in `folder`. What it reads takes 2 bytes for each token, layer and width."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "data")
        with closing(own(compare, Path(name))) as first:
            print(f"writing the target's states for {compare.steps:,} packs of {compare.length} tokens", flush=True)
            prepared = first.ask({"export": str(data), "cached": False})
        done = data / "steps"
        # The child is closed before the thread is waited for, so that Ctrl-C does not wait for the training to end
        with ThreadPoolExecutor(1) as thread, closing(theirs(compare, data, prepared["batches"])) as child:
            reply = thread.submit(child.ask, {"save": str(folder.absolute()), "done": str(done)})
            for step in progress.track(range(compare.steps), "Speculators trains", unit="steps"):
                while not reply.done() and (done.stat().st_size if done.exists() else 0) <= step:
                    time.sleep(0.1)
            losses, seconds = (reply.result()[key] for key in ("losses", "seconds"))
    print(
        f"{sum(prepared['tokens']):,} tokens in {sum(seconds):.0f} s, loss {losses[0]:.2f} .. {losses[-1]:.2f}: {folder}"
    )
    print(f"next: python scripts/import.py source={folder} target.name={compare.target} out=checkpoints/NAME")


def main() -> None:
    compare = options(Compare, __doc__)
    if not Path(compare.python).is_file():
        raise ValueError(f"There is no Speculators: {compare.python} does not exist. `make engines` sets it up.")
    if compare.attention not in ATTENTION:
        raise ValueError(f"attention={compare.attention} must be one of {', '.join(ATTENTION)}.")
    if compare.save is not None:
        if Path(compare.save).exists():
            raise ValueError(f"{compare.save} exists; choose another save=FOLDER or delete it.")
        return save_peer(compare, Path(compare.save))
    results: dict[str, list[dict]] = {"here": [], "speculators": []}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        first = own(compare, scratch)
        prepared = first.ask({"export": str(scratch / "data"), "cached": True})
        first.close()
        tokens = prepared["tokens"]
        print(f"{compare.steps} packs of {compare.length}: {sum(tokens)} tokens, depth {compare.depth}")
        for _ in progress.track(range(compare.rounds), "measuring", unit="rounds"):
            for side in results:
                child = (
                    own(compare, scratch) if side == "here" else theirs(compare, scratch / "data", prepared["batches"])
                )
                result = measure(child, compare.steps, tokens)
                results[side].append(result)
                print(describe(side, result), flush=True)
    medians = {
        side: {key: statistics.median(result[key] for result in of) for key in FIGURES} for side, of in results.items()
    }
    ratios = {key: medians["here"][key] / medians["speculators"][key] for key in medians["here"]}
    for side, figures in medians.items():
        print(f"median {describe(side, figures)}")
    print("ratio  " + ", ".join(f"{key} {value:.2f}" for key, value in ratios.items()))
    Path(compare.out).write_text(json.dumps({"medians": medians, "ratios": ratios, "runs": results}, indent=2) + "\n")


def describe(side: str, figures: dict) -> str:
    losses = f"  loss {figures['losses'][0]:.2f} .. {figures['losses'][-1]:.2f}" if "losses" in figures else ""
    return (f"{side:<12} {figures['tokens_per_second']:7.0f} tokens/s  {figures['tokens_per_cpu_second']:5.0f} a CPU second  {figures['memory'] / 2**20:6.0f} MiB above  "
            f"{figures['process'] / 2**20:6.0f} MiB in all{losses}")  # fmt: skip


if __name__ == "__main__":
    run(main)
