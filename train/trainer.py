"""The training loop."""

import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from specdec.drafter import Drafter, Head, Slots
from specdec.report import Report, Training
from train.consistency import ConsistencyObjective
from train.loader import Loader, Material, MicroBatch, permutation
from train.objective import Loss, Objective, slots
from train.progress import TrainingProgress, text_rounds
from train.run_folder import RunFolder

SOLVE_SLOTS = 30_000  # a closed-form start holds no more slots in memory, unless the target's width needs more


@dataclass(frozen=True)
class Settings:
    """conf/train.yaml, `train`. Every unit is a step of the optimizer unless it says otherwise."""

    steps: int
    batch: int  # packs for each process and micro-batch
    accumulation: int  # micro-batches in a step
    max_grad_norm: float
    log_every: int
    validate_every: int
    validate_first: bool  # before training too
    save_every: int
    best_by: str  # the figure that chooses the best checkpoint: tau or speedup
    seed: int

    def __post_init__(self):
        if self.best_by not in ("tau", "speedup"):
            raise ValueError(f"best_by={self.best_by} must be tau or speedup.")


class NotFiniteLoss(ValueError):
    """A step's loss was not finite. Nothing of the step was kept."""


class Trainer:
    """Trains `objective`; everything that a run leaves behind is in `folder`.

    The order of packs and every random number follow from (seed, step, process), so that a resumed run continues
    exactly. validate: called with a frozen copy of the drafter, on the main process only
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective | ConsistencyObjective,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        *,
        material: Material,
        validate: Callable[[Head], Report],
        settings: Settings,
        folder: RunFolder,
    ):
        about = {"data": material.packs.fingerprint, "processes": accelerator.num_processes}
        self.folder = replace(folder, settings={**folder.settings, **about})
        self.accelerator, self.settings, self.material, self.validate = accelerator, settings, material, validate
        self.loader = Loader(
            material,
            batch=settings.batch,
            accumulation=settings.accumulation,
            seed=settings.seed,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
            device=accelerator.device,
        )
        self.drafter, self.depth = objective.drafter, objective.depth
        self.every_slot = objective.every_slot
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self.scheduler = scheduler
        self.step = 0
        self.seen, self.seconds = 0, 0.0  # tokens and seconds of training, without validation and saving
        self.best: dict = {}
        self.interrupted = False

    # Before the first step

    def solve(self, num_packs: int) -> None:
        """Closed-form weights, if the head has any, from the packs that training reads first; the same in all processes."""
        features = self.material.features
        if features is None or not isinstance(self.drafter, Drafter) or type(self.drafter).solve is Drafter.solve:
            return
        texts: list[Slots] = []
        for index in permutation(len(self.material.packs), self.settings.seed)[:num_packs]:
            batch = self.material.collate([self.material.packs[index]]).to(self.accelerator.device)
            texts.append(slots(batch, features([index], batch), self.depth))
            if sum(len(text.tokens) for text in texts) > max(SOLVE_SLOTS, 6 * self.drafter.target.width):
                break
        if texts and self.drafter.solve(texts):
            for parameter in self.drafter.parameters():  # processes may round differently
                parameter.data = broadcast(parameter.data)
            self.accelerator.print(f"closed-form start from {len(texts)} packs")

    def resume(self) -> bool:
        """Continues from the newest state; False if there is none. Raises ValueError if settings differ from then."""
        state = self.folder.read_state()
        if state is None:
            return False
        weights, optimizer, document = state
        self.drafter.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        lambdas = [None] * len(optimizer["param_groups"])
        self.scheduler.load_state_dict(document["scheduler"] | {"lr_lambdas": lambdas})
        self.step, self.best = document["step"], document["best"]
        self.seen, self.seconds = document["seen"], document["seconds"]
        if self.material.stream:
            self.loader.seek(document["stream"][self.accelerator.process_index])
        if self.accelerator.is_main_process:
            self.folder.cut_log(self.step)
        self.accelerator.print(f"Resumed from step {self.step}.")
        return True

    # The loop

    def fit(self) -> None:
        """Trains to the last step. Returns early, with a saved state, after Ctrl-C. Raises NotFiniteLoss."""
        settings, main = self.settings, self.accelerator.is_main_process
        previous = signal.signal(signal.SIGINT, self._interrupt)
        self.objective.train()
        if (settings.validate_first or self.drafter.pretrained) and self.step == 0:
            self._validate()
        begun = self.step
        try:
            with TrainingProgress(steps=settings.steps, done=begun, shown=main) as progress:
                while self.step < settings.steps:
                    line, figures = self._advance(progress)
                    last = self.step == settings.steps
                    if self.step % settings.log_every == 0 or self.step == begun + 1 or last:
                        progress.print(f"step {self.step:>5}/{settings.steps}  {line}")
                        self._record(figures)
                    if self.step % settings.validate_every == 0 or last:
                        progress.pause()
                        self._validate()
                        progress.go_on()
                    stop = self._anyone(self.interrupted)
                    if self.step % settings.save_every == 0 or last or stop:
                        self.save_state()
                    if stop and not last:
                        return
        finally:
            signal.signal(signal.SIGINT, previous)
            self.loader.close()
        if main:
            self.folder.finish(self.step)

    def _advance(self, progress: TrainingProgress) -> tuple[str, dict]:
        """One step. -> the progress line, and the figures for the log"""
        start = time.perf_counter()
        figures = self._train_step()
        seconds = time.perf_counter() - start
        self.step += 1
        self.seconds += seconds
        tokens, counts = figures.pop("tokens"), figures.pop("text_rounds")
        self.seen += tokens
        line = progress.advance(self.step, loss=figures["loss"], tokens=tokens, seconds=seconds, counts=counts)
        if progress.text_tau is not None:
            figures["tau"] = progress.text_tau
        return line, figures | {
            "tokens_per_second": progress.rate,
            "learning_rate": self.scheduler.get_last_lr()[0],
        }

    def _train_step(self) -> dict:
        """One step of the optimizer. -> loss, grad_norm, tokens read, and `text_rounds` of the last micro-batch"""
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + self.step * 1009 + accelerator.process_index)
        micro_batches = self.loader.step(self.step)
        goals = [int(micro.batch.loss_mask.sum()) for micro in micro_batches]
        num_goals = int(accelerator.gather(torch.tensor([sum(goals)], device=accelerator.device)).sum())
        losses = []
        for number, micro in enumerate(micro_batches):
            synchronise = number == settings.accumulation - 1 or accelerator.num_processes == 1
            with nullcontext() if synchronise else accelerator.no_sync(self.objective):
                loss = self._backward(micro, num_goals)
            losses.append(loss.total.detach())
        total = float(accelerator.reduce(torch.stack(losses).sum(), "sum")) / num_goals
        if not math.isfinite(total):
            self._refuse(total, micro_batches)
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), settings.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        tokens = sum(int((micro.batch.documents >= 0).sum()) for micro in micro_batches) * accelerator.num_processes
        replayed = self.every_slot and not micro.written  # a draft is always sure of its own text
        counts = text_rounds(micro.batch, loss.matches) if replayed else None
        return {"loss": total, "grad_norm": float(norm), "tokens": tokens, "text_rounds": counts}

    def _backward(self, micro: MicroBatch, num_goals: int) -> Loss:
        """Adds a micro-batch's share of the gradients. num_goals: of the whole step, in all processes"""
        batch, output = self.loader.on_device(micro)
        loss: Loss = self.objective(batch, output)
        # Gradients are averaged over processes: divide by the goals of all of them, times their number.
        self.accelerator.backward(loss.total * self.accelerator.num_processes / num_goals)
        return loss

    def _refuse(self, loss: float, micro_batches: list[MicroBatch]) -> None:
        rows = [row for micro in micro_batches for row in micro.rows]
        more = ", ..." if len(rows) > 6 else ""
        raise NotFiniteLoss(
            f"The loss is {loss} at step {self.step + 1} (rows {', '.join(rows[:6])}{more}). Nothing of this step was "
            f"kept; the last good state is that of step {self.folder.saved_step()}."
        )

    # What a run leaves behind

    def _validate(self) -> None:
        """Decodes on the main process, saves a checkpoint, and marks it if it is the best."""
        if self.accelerator.is_main_process:
            frozen = self.drafter.decodable().to(dtype=self.drafter.target.dtype)
            cost = self._cost()  # before decoding takes its memory
            report = replace(self.validate(frozen), step=self.step, training=cost)
            self._record({"validation": report.to_json()})
            name = self.folder.save_checkpoint(frozen, report)
            figure = getattr(report, self.settings.best_by)
            if not self.best or figure > self.best["figure"]:
                self.best = {"figure": figure, "step": self.step}
                self.folder.mark_best(name)
        self.accelerator.wait_for_everyone()
        self.objective.train()

    def _cost(self) -> Training:
        if self.accelerator.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Training(
            parameters=self.drafter.num_parameters(),
            tokens=self.seen,
            seconds=self.seconds,
            tokens_per_second=self.seen / self.seconds if self.seconds else None,
            peak_memory=peak,
            processes=self.accelerator.num_processes,
        )

    def save_state(self) -> None:
        """Writes what resuming needs."""
        position = torch.tensor([self.loader.position(self.step)], device=self.accelerator.device)
        positions = self.accelerator.gather(position).tolist() if self.material.stream else None
        if self.accelerator.is_main_process:
            scheduler = {key: value for key, value in self.scheduler.state_dict().items() if key != "lr_lambdas"}
            counters = {"seen": self.seen, "seconds": self.seconds, "best": self.best, "scheduler": scheduler}
            if self.material.stream:
                counters["stream"] = positions  # of every process
            self.folder.save_state(
                self.step,
                weights=self.drafter.state_dict(),
                optimizer=self.optimizer.state_dict(),
                document=counters,
            )
        self.accelerator.wait_for_everyone()

    def _record(self, figures: dict) -> None:
        """To the log, and to the tracker."""
        if not self.accelerator.is_main_process:
            return
        self.folder.log(self.step, figures)
        kind = "validation" if "validation" in figures else "train"
        values = figures.get("validation", figures)
        flat = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, int | float)}
        self.accelerator.log(flat, step=self.step)

    def _interrupt(self, *_) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.accelerator.print(
            "Stopping after this step. Press Ctrl-C again to stop at once and lose the steps since the last save."
        )

    def _anyone(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum"))
