"""Finds training recipes of a head by successive halving: the better half of the candidates goes on to a larger budget.

    python -m benchmarks.recipe_study head=eagle3 train=data/answers.jsonl.gz answers=CHOOSE_ANSWERS budgets=120000,500000

A candidate is a list of options of train.py, by name in CANDIDATES. It is trained on packs of `length` tokens until it has read the
budget, and judged by replay on answers that no candidate was trained on. The study resumes: a finished run is not repeated.
Writes OUT/HEAD.json, with each run's tau, the counts of each answer, and the seconds of training.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import common
from specdec import checkpoint
from specdec.core import files
from specdec.heads.base import Drafter
from specdec.measuring import report as figures
from specdec.target.model import Target, load_tokenizer
from train import validate
from train.data import reading
from train.data import rows as data

ADAMW = "optimizer.name=adamw optimizer.weight_decay=0 optimizer.schedule=cosine optimizer.final=0.05"
MUON = "optimizer.name=muon optimizer.muon_lr=1e-3 optimizer.lr=4e-4 optimizer.weight_decay=0 optimizer.schedule=cosine optimizer.final=0.01"
LINEAR = (
    "optimizer.name=muon optimizer.muon_lr={0} optimizer.lr={0} optimizer.weight_decay=0.1 optimizer.schedule=wsd "
    "optimizer.decay=1 optimizer.final=0"
)
TEXT, ANSWERS = "head.objective.supervise=text", "head.objective.supervise=answers"
ALL, HALF = "head.objective.keep=1 head.objective.decay={}", "head.objective.keep=0.5 head.objective.decay={}"
FROZEN, OWN = "head.drafter.own_output=false", "head.drafter.own_output=true"
NORMS = "head.drafter.norm_features=true head.drafter.norm_output=true"
BLOCK = f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(0.8)}"
CANDIDATES = {
    "eagle3": {
        "adamw": f"{ADAMW} optimizer.lr=2.5e-4 {ANSWERS} {ALL.format(0.8)} {OWN}",
        "adamw text": f"{ADAMW} optimizer.lr=2.5e-4 {TEXT} {ALL.format(0.8)} {OWN}",
        "adamw 7e-4": f"{ADAMW} optimizer.lr=7e-4 {TEXT} {ALL.format(1)} {FROZEN}",
        "muon": f"{MUON} {TEXT} {HALF.format(0.8)} {OWN}",
        "muon frozen": f"{MUON} {TEXT} {ALL.format(1)} {FROZEN}",
        "linear": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)} {FROZEN}",
        "linear answers": f"{LINEAR.format('1e-3')} {ANSWERS} {ALL.format(1)} {FROZEN}",
        "linear half": f"{LINEAR.format('1e-3')} {TEXT} {HALF.format(1)} {FROZEN}",
        "linear .8": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(0.8)} {FROZEN}",
        "linear no start": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)} {FROZEN} solve_packs=0",
        "linear own": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)} {OWN}",
        "linear norms": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)} {FROZEN} {NORMS} solve_packs=0",
        "linear .8 own": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(0.8)} {OWN}",
        "linear .8 ema": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(0.8)} {FROZEN} train.ema=0.99",
        "cosine .8": f"{MUON} optimizer.muon_lr=1e-3 {TEXT} {ALL.format(0.8)} {FROZEN}",
        "linear 2e-3": f"{LINEAR.format('2e-3')} {TEXT} {ALL.format(1)} {FROZEN}",
        "linear 5e-4": f"{LINEAR.format('5e-4')} {TEXT} {ALL.format(1)} {FROZEN}",
    },
    "mtp": {
        "adamw": f"{ADAMW} optimizer.lr=7e-4 {ANSWERS} {ALL.format(0.6)}",
        "adamw text": f"{ADAMW} optimizer.lr=7e-4 {TEXT} {ALL.format(0.6)}",
        "muon": f"{MUON} {TEXT} {HALF.format(0.6)}",
        "linear": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)}",
        "linear answers": f"{LINEAR.format('1e-3')} {ANSWERS} {ALL.format(1)}",
        "linear half": f"{LINEAR.format('1e-3')} {TEXT} {HALF.format(1)}",
        "linear .6": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(0.6)}",
        "linear no start": f"{LINEAR.format('1e-3')} {TEXT} {ALL.format(1)} solve_packs=0",
        "linear 2e-3": f"{LINEAR.format('2e-3')} {TEXT} {ALL.format(1)}",
    },
    "blocks": {  # drafters of a block, beside the two heads above, with one recipe
        "eagle3": f"head=eagle3 {LINEAR.format('1e-3')} {TEXT} {ALL.format(0.8)} {FROZEN}",
        "mtp": f"head=mtp {LINEAR.format('1e-3')} {TEXT} {ALL.format(0.6)}",
        "dflash": f"head=dflash {BLOCK}",
        "dflash adamw": f"head=dflash {BLOCK} {ADAMW} optimizer.lr=6e-4",
        "dflash fused": f"head=dflash {BLOCK} head.drafter.fuse=true",
        "dflash convolution": f"head=dflash {BLOCK} head.drafter.convolution=2",
        "dspark": f"head=dspark {BLOCK}",
        "dspark gated": f"head=dspark {BLOCK} head.drafter.dependence.form=gated",
        "dspark rnn": f"head=dspark {BLOCK} head.drafter.dependence.form=rnn",
        "dspark fused": f"head=dspark {BLOCK} head.drafter.fuse=true",
        "dflash2": f"head=dflash2 {BLOCK}",
        "dflash2 tables": f"head=dflash2 {BLOCK} head.drafter.dependence.table=true",
        "dflash2 no convolution": f"head=dflash2 {BLOCK} head.drafter.convolution=null",
        "dflash2 fused": f"head=dflash2 {BLOCK} head.drafter.fuse=true",
        "lilicorr": f"head=lilicorr {BLOCK} head.drafter.convolution=null",
        "lilicorr convolution": f"head=lilicorr {BLOCK} head.drafter.convolution=2",
        "domino": f"head=domino {BLOCK}",
    },
}  # of the five factors, with what earlier sections of results/ found, and each factor changed alone


@dataclass(frozen=True)
class StudyOptions:
    head: str = "eagle3"  # one of CANDIDATES: blocks compares heads
    train: str = "data/answers.jsonl.gz"
    hold_out: int = 60  # of its rows, which are not trained on
    answers: str = ""  # conversations whose last message the target wrote, which decide
    budgets: str = "120000,500000"  # tokens read, padding included
    keep: float = 0.34  # share of the candidates that goes on to the next budget
    only: str = ""  # comma list of candidates; empty: all
    seeds: str = "0"  # comma list; the last budget alone is run with all of them
    length: int = 512
    batch: int = 1
    depth: int = 4  # of the unroll, unless a candidate says so, and of the chain that is judged
    device: str = "cpu"  # that judges; a run takes the GPU by itself
    workers: int = 2  # runs at a time, each with one thread
    extra: str = ""  # further options of train.py for all candidates, separated by spaces
    tag: str = "study"  # beginning of the names of runs
    out: str = "checkpoints/study"
    target_name: str = common.TARGET


def train(chosen: StudyOptions, name: str, budget: int, seed: int) -> Path:
    """Trains a candidate, unless that is done. -> the folder of its last step"""
    run = f"{chosen.tag}-{chosen.head}-{name.replace(' ', '_')}-{budget}-{seed}"
    steps = max(1, budget // (chosen.length * chosen.batch))
    options = [
        *([] if chosen.head == "blocks" else [f"head={chosen.head}"]), f"run={run}", f"data.train={chosen.train}", f"data.hold_out={chosen.hold_out}", f"data.length={chosen.length}",
        f"target.name={chosen.target_name}", f"train.batch={chosen.batch}", f"train.steps={steps}", f"train.seed={seed}", f"head.objective.depth={chosen.depth}",
        f"optimizer.warmup={max(5, steps // 20)}", "threads=1", "resume=auto", "progress=plain", f"features.folder=checkpoints/features/{chosen.tag}",
        "train.validate_every=0", "validation.num_prompts=2", "validation.max_new_tokens=4", "validation.auto=never",
        *CANDIDATES[chosen.head][name].split(), *chosen.extra.split(),
    ]  # fmt: skip
    log = Path("checkpoints", f"{run}.log")
    with log.open("a") as file:
        done = subprocess.run(
            [sys.executable, "train.py", *options],
            stdout=file,
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise ValueError(f"{name} has failed, see {log}.")
    return Path("checkpoints", run, f"step_{steps:06d}")


def read_seconds(folder: Path) -> float:
    return checkpoint.read_json(folder / "report.json")["training"]["seconds"]


def judge(chosen: StudyOptions, target: Target, texts: list[validate.Written], folder: Path) -> list[list[float]]:
    """Rounds and emitted tokens of each answer in a chain."""
    kept = folder / f"judged-{Path(chosen.answers).stem}-{chosen.depth}.json"
    if not kept.exists():
        head = checkpoint.load(folder, target)
        assert isinstance(head, Drafter)
        judged = validate.replay_texts(head, texts, depth=chosen.depth, what=folder.parent.name)
        counts = validate.count_replays(judged)
        files.write_text(kept, json.dumps([[each.num_rounds, each.num_emitted] for each in counts]))
    return json.loads(kept.read_text())


def main(arguments: list[str]) -> None:
    chosen = common.read_options(StudyOptions, __doc__, arguments)
    if chosen.head not in CANDIDATES or not Path(chosen.answers).is_file():
        raise ValueError(f"head={chosen.head} must be one of {', '.join(CANDIDATES)}, and answers= a file.")
    torch.set_num_threads(1)
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    target, tokenizer = (
        Target.load(chosen.target_name, dtype="auto", device=chosen.device),
        load_tokenizer(chosen.target_name),
    )
    texts = []
    for row in reading.load_conversations(chosen.answers, split=None):
        encoded = data.encode(tokenizer, row)
        start, stop = data.last_answer(encoded)
        if stop - start >= 2:
            texts.append(validate.Written(encoded.tokens[:start], encoded.tokens[start:stop], 0.0))
    alive, rows = common.split(chosen.only) or [*CANDIDATES[chosen.head]], []
    budgets = common.read_numbers("budgets", chosen.budgets)
    for budget in budgets:
        seeds = common.read_numbers("seeds", chosen.seeds, least=0) if budget == budgets[-1] else [0]
        jobs = [(name, seed) for name in alive for seed in seeds]
        taus: dict[str, list[float]] = {}
        with ThreadPoolExecutor(chosen.workers) as pool:
            folders = pool.map(lambda job, budget=budget: train(chosen, job[0], budget, job[1]), jobs)
            for (name, seed), folder in zip(jobs, folders):
                counts = [figures.PromptCounts(*pair) for pair in judge(chosen, target, texts, folder)]
                tau, seconds = figures.tau(counts), read_seconds(folder)
                taus.setdefault(name, []).append(tau)
                rows.append(
                    {
                        "candidate": name,
                        "budget": budget,
                        "seed": seed,
                        "tau": tau,
                        "seconds": seconds,
                        "folder": str(folder),
                    }
                )
                print(f"{budget:>9,} {name:<18} seed {seed}  tau {tau:.3f}  {seconds:.0f} s", flush=True)
        files.write_text(Path(chosen.out, f"{chosen.tag}-{chosen.head}.json"), json.dumps(rows, indent=2) + "\n")
        ranked = sorted(alive, key=lambda name: -sum(taus[name]) / len(taus[name]))
        alive = ranked[: max(2, round(chosen.keep * len(ranked)))]
        print(f"after {budget:,} tokens: {', '.join(alive)}", flush=True)


if __name__ == "__main__":
    common.run(main)
