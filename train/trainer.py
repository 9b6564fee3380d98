"""The training loop."""

import dataclasses
import functools
import json
import math
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn

from specdec import checkpoint, replay
from specdec.drafter import Drafter, Head, Slots
from train.consistency import ConsistencyObjective
from train.data import Batch, Packs, answers
from train.features import Cached, Online
from train.objective import Loss, Objective, by_start, slots
from train.onpolicy import OnPolicy

SOLVE_SLOTS = 30_000  # more are not held in memory at once, unless the target is so wide that it needs them


@dataclasses.dataclass(frozen=True)
class Settings:
    """conf/train.yaml, `train`; every unit is a step of the optimizer unless it says otherwise."""

    steps: int
    batch: int  # packs a process and micro-batch
    accumulation: int  # micro-batches a step
    max_grad_norm: float
    log_every: int
    validate_every: int
    validate_first: bool  # before training too
    save_every: int
    best_by: str  # the figure that chooses the best checkpoint: tau or speedup
    seed: int


class Trainer:
    """Trains `objective` on `packs`; everything a run leaves behind is in `folder`.

    The order of packs and every random number follow from (seed, step, process), so that a resumed run continues
    exactly. about: what must not change between a run and its resumption. validate(drafter) -> summary (specdec.evaluate.summarise) of the main process.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective | ConsistencyObjective,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        *,
        packs: Packs,
        collate: Callable[[list[int]], Batch],
        features: Online | Cached | None,
        on_policy: OnPolicy | None,
        validate: Callable[[Head], dict],
        settings: Settings,
        spec: dict,
        about: dict,
        folder: Path,
    ):
        self.accelerator, self.settings, self.spec, self.folder = accelerator, settings, spec, folder
        self.about = {**about, "data": packs.fingerprint, "processes": accelerator.num_processes}
        self.drafter, self.depth = objective.drafter, objective.depth
        self.every_slot = objective.every_slot
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self.scheduler = scheduler
        self.packs, self.collate, self.features, self.validate = packs, collate, features, validate
        self.on_policy = on_policy
        self.step = 0
        self.seen, self.seconds = 0, 0.0  # tokens and seconds of training, validation and saving left out
        self.best: dict = {}
        self.interrupted = False

    # What a step sees

    def indices(self, step: int, micro: int) -> list[int]:
        """Packs of this process for one micro-batch; each epoch is a permutation made from the seed."""
        settings, world = self.settings, self.accelerator.num_processes
        start = ((step * settings.accumulation + micro) * world + self.accelerator.process_index) * settings.batch
        found = []
        for position in range(start, start + settings.batch):
            epoch, place = divmod(position, len(self.packs))
            found.append(_permutation(len(self.packs), settings.seed + epoch)[place])
        return found

    def solve(self, num_packs: int) -> None:
        """Closed-form weights, for a head that has them, from the packs that training sees first; alike in all processes."""
        if self.features is None or not isinstance(self.drafter, Drafter) or type(self.drafter).solve is Drafter.solve:
            return
        first = _permutation(len(self.packs), self.settings.seed)[:num_packs]
        device = self.accelerator.device

        found: list[Slots] = []
        for index in first:
            batch = self.collate([index]).to(device)
            found.append(slots(batch, self.features([index], batch), self.depth))
            if sum(len(some.tokens) for some in found) > max(SOLVE_SLOTS, 6 * self.drafter.target.width):
                break
        if found and self.drafter.solve(found):
            for parameter in self.drafter.parameters():  # processes may round differently
                parameter.data = broadcast(parameter.data)
            self.accelerator.print(f"closed-form start from {len(found)} packs")

    def fit(self) -> None:
        """Trains to the last step. Raises ValueError if the loss is not finite; returns early, saved, after Ctrl-C."""
        settings, main = self.settings, self.accelerator.is_main_process
        previous = signal.signal(signal.SIGINT, self._interrupt)
        self.objective.train()
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        clock, tokens, begun, seconds = time.perf_counter(), 0, self.step, self.seconds
        if (settings.validate_first or self.drafter.pretrained) and self.step == 0:
            self._validate()
        try:
            with Progress(*columns, disable=not main, transient=True) as bar:
                task = bar.add_task("", total=settings.steps, completed=self.step)
                while self.step < settings.steps:
                    start = time.perf_counter()
                    figures = self._train_step()
                    self.seconds += time.perf_counter() - start
                    self.step += 1
                    tokens += figures["tokens"]
                    self.seen += figures.pop("tokens")
                    last = self.step == settings.steps
                    rate = tokens / (time.perf_counter() - clock)
                    left = (settings.steps - self.step) * (self.seconds - seconds) / (self.step - begun)
                    worth = f"text tau {figures['tau']:.3f}  " if "tau" in figures else ""
                    line = f"loss {figures['loss']:.4f}  {worth}{rate:,.0f} tokens/s  {_minutes(left)} left"
                    bar.update(task, completed=self.step, description=line)
                    if self.step % settings.log_every == 0 or self.step == begun + 1 or last:
                        figures |= {"tokens_per_second": rate, "learning_rate": self.scheduler.get_last_lr()[0]}
                        bar.console.print(f"step {self.step:>5}/{settings.steps}  {line}", highlight=False)
                        self._record(figures)
                    if self.step % settings.validate_every == 0 or last:
                        bar.stop()
                        self._validate()
                        bar.start()
                        clock, tokens = time.perf_counter(), 0
                    stop = self._anyone(self.interrupted)
                    if self.step % settings.save_every == 0 or last or stop:
                        self.save_state()
                    if stop and not last:
                        if main:
                            bar.console.print(
                                f"Interrupted after step {self.step}; saved. Run the same command with "
                                "resume=true to continue."
                            )
                        return
        finally:
            signal.signal(signal.SIGINT, previous)
        if main:
            checkpoint.write_text(self.folder / "finished", f"{self.step}\n")

    def _train_step(self) -> dict:
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + self.step * 1009 + accelerator.process_index)
        groups = [self.indices(self.step, micro) for micro in range(settings.accumulation)]
        written = [self.on_policy(group) if self.on_policy else None for group in groups]
        batches = [own or self.collate(group) for group, own in zip(groups, written)]
        counts = torch.tensor([sum(int(batch.loss_mask.sum()) for batch in batches)], device=accelerator.device)
        num_goals = int(accelerator.gather(counts).sum())
        found = []
        for number, (group, batch) in enumerate(zip(groups, batches)):
            batch = batch.to(accelerator.device)
            features = self.on_policy.features if self.on_policy and written[number] else self.features
            synchronise = number == settings.accumulation - 1 or accelerator.num_processes == 1
            with nullcontext() if synchronise else accelerator.no_sync(self.objective):
                loss: Loss = self.objective(batch, features(group, batch) if features else None)
                # Gradients are averaged over processes: divide by the goals of all of them, times their number.
                accelerator.backward(loss.total * accelerator.num_processes / num_goals)
            found.append(loss.total.detach())
        total = float(accelerator.reduce(torch.stack(found).sum(), "sum")) / num_goals
        if not math.isfinite(total):
            rows = [row.id for group in groups for index in group for row in self.packs[index]]
            raise ValueError(
                f"The loss is {total} at step {self.step + 1} (rows {', '.join(rows[:6])}{', ...' if len(rows) > 6 else ''}). "
                f"Nothing of this step was kept; the last good state is that of step {self._saved_step()}. Lower "
                "optimizer.lr or train.max_grad_norm, or look at these rows, then use resume=true."
            )
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), settings.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        seen = sum(int((batch.documents >= 0).sum()) for batch in batches) * accelerator.num_processes
        figures = {"loss": total, "grad_norm": float(norm), "tokens": seen}
        if self.every_slot and written[-1] is None:  # of its own text a draft is always sure
            figures["tau"] = text_tau(batches[-1], loss.matches)
        return figures

    # What a run leaves behind

    def _validate(self) -> None:
        """Decodes on the main process; saves a checkpoint, and notes whether it is the best."""
        if self.accelerator.is_main_process:
            dtype = self.drafter.target.dtype
            frozen = self.drafter.decodable().to(dtype=dtype)
            cost = self._cost()  # before decoding takes its memory
            summary = self.validate(frozen)
            self._record({"validation": summary})
            name = f"step_{self.step:06d}"
            checkpoint.save(
                self.folder / name,
                frozen,
                self.spec,
                extra={"report.json": {"step": self.step, **summary, "training": cost}},
            )
            figure = summary[self.settings.best_by]
            if not self.best or figure > self.best["figure"]:
                self.best = {"figure": figure, "step": self.step}
                checkpoint.write_text(self.folder / "best", name + "\n")
        self.accelerator.wait_for_everyone()
        self.objective.train()

    def _cost(self) -> dict:
        """What training took until now; peak memory is the process's on a CPU, the device's on a GPU."""
        if self.accelerator.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "parameters": self.drafter.num_parameters(),
            "tokens": self.seen,
            "seconds": self.seconds,
            "tokens_per_second": self.seen / self.seconds if self.seconds else None,
            "peak_memory": peak,
            "processes": self.accelerator.num_processes,
        }

    def save_state(self) -> None:
        """What resuming needs, as safetensors and JSON; the previous state goes only when the new one is whole."""
        if self.accelerator.is_main_process:
            optimizer = self.optimizer.state_dict()
            moments = {
                f"{number}.{key}": torch.as_tensor(value)
                for number, state in optimizer["state"].items()
                for key, value in state.items()
            }
            document = {
                "step": self.step,
                "seen": self.seen,
                "seconds": self.seconds,
                "best": self.best,
                "groups": optimizer["param_groups"],
                "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"},
                "about": self.about,
            }
            goal = self.folder / "state" / f"step_{self.step:06d}"
            checkpoint.write_folder(
                goal,
                tensors={"drafter.safetensors": self.drafter.state_dict(), "optimizer.safetensors": moments},
                documents={"state.json": document},
            )
            for old in (self.folder / "state").iterdir():
                if old != goal:
                    checkpoint.remove(old)
        self.accelerator.wait_for_everyone()

    def _saved_step(self) -> int:
        saved = sorted((self.folder / "state").glob("step_??????"))
        return int(saved[-1].name.removeprefix("step_")) if saved else 0

    def resume(self) -> bool:
        """Continues from the newest state, if there is one (-> True). Raises ValueError if `about` differs from then."""
        folder = self.folder / "state" / f"step_{self._saved_step():06d}"
        if not folder.exists():
            return False
        document = checkpoint.read_json(folder / "state.json")
        before = document["about"]
        changed = [
            f"{key} was {before.get(key)}, is {value}" for key, value in self.about.items() if before.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{self.folder} was begun with other settings: {'; '.join(changed)}. Resume with those it was begun with, "
                "or start another run=NAME."
            )
        self.drafter.load_state_dict(checkpoint.read_tensors(folder / "drafter.safetensors"))
        moments = checkpoint.read_tensors(folder / "optimizer.safetensors")
        state: dict[int, dict] = {}
        for name, value in moments.items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": document["groups"]})
        self.scheduler.load_state_dict(document["scheduler"] | {"lr_lambdas": [None] * len(document["groups"])})
        self.step, self.best = document["step"], document["best"]
        self.seen, self.seconds = document["seen"], document["seconds"]
        log = self.folder / "log.jsonl"
        if log.exists() and self.accelerator.is_main_process:  # what came after the state is done again
            kept = [line for line in log.read_text().splitlines() if line and json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in kept))
        self.accelerator.print(f"Resumed from step {self.step}.")
        return True

    def _record(self, figures: dict) -> None:
        if not self.accelerator.is_main_process:
            return
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": self.step, **figures}) + "\n")
        flat = (
            {f"validation/{k}": v for k, v in figures["validation"].items() if isinstance(v, int | float)}
            if ("validation" in figures)
            else {f"train/{k}": v for k, v in figures.items()}
        )
        self.accelerator.log(flat, step=self.step)

    def _interrupt(self, *_) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.accelerator.print(
            "Stopping after this step (again to stop at once, losing what came after the last save) ..."
        )

    def _anyone(self, flag: bool) -> bool:
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum"))


def text_tau(batch: Batch, matches: torch.Tensor) -> float:
    """tau of a greedy chain over the batch's own text: a draft counts if it is the text's token. matches [K, B, T]"""
    emitted, rounds = 0, 0.0
    matches = matches.cpu().float()
    for row in range(batch.tokens.shape[0]):
        for start, stop in answers(batch, row):
            emitted += stop - start - 1
            rounds += replay.rounds(by_start(matches[:, row, start:stop]))[0]
    return emitted / rounds if rounds else float("nan")


def schedule(
    optimizer: torch.optim.Optimizer, *, steps: int, warmup: int, final: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine down to `final` of the peak; a group with a `delay` does nothing for so many steps."""

    def factor(step: int, delay: int) -> float:
        if step < warmup + delay:
            return max(0, step - delay + 1) / (warmup + 1)
        progress = (step - warmup - delay) / max(1, steps - warmup - delay)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    delays = [group.get("delay", 0) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [functools.partial(factor, delay=delay) for delay in delays])


def parameter_groups(module: nn.Module, weight_decay: float, *, adapter: dict | None = None) -> list[dict]:
    """Matrices decay, norms do not; adapter: the lr and the delay of the target's adapter, if the drafter has one."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    own = [p for name, p in trained.items() if not name.startswith("adapter.")]
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if adapter is not None:
        theirs = [p for name, p in trained.items() if name.startswith("adapter.")]
        groups.append({"params": theirs, "weight_decay": 0.0, **adapter})
    return groups


@functools.lru_cache(maxsize=2)
def _permutation(num: int, seed: int) -> list[int]:
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
