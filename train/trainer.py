"""The training loop."""

import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from specdec.core import devices
from train import closed_form
from train.consistency import ConsistencyObjective
from train.data.loader import Loader, Material, MicroBatch, Order, permutation
from train.finite import NotFiniteLoss, named, rows_not_finite
from train.group import Group
from train.objective import Loss, Objective
from train.optimization import AVERAGE, Average, GradientNorms, take
from train.pages import run_page
from train.parts import gathered, local
from train.processes import say
from train.progress import note
from train.run_folder import RunFolder, packs_of_step
from train.saving import Saving
from train.settings import Settings
from train.sharding import Weights
from train.signals import Signals
from train.training_progress import TrainingProgress, clipping, other_processes, peak_memory, text_rounds, training_cost
from train.validation import Validation
from train.waiting import Waiting

# Several processes ask each other for signals, and each time they wait for the devices: after so many steps, or sooner where steps are
# long, as launchers and schedulers kill a process 30 seconds after the signal
ASK, ASK_SECONDS = 20, 5.0
MEASURED = 8  # packs from which a head takes the sizes of what it reads, at least


class Trainer:
    """Trains `objective`; everything that a run leaves behind is in `folder`.

    The order of packs and every random number follow from (seed, step, process or group), so that a resumed run continues
    exactly.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective | ConsistencyObjective,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        *,
        material: Material,
        validation: Validation,
        settings: Settings,
        folder: RunFolder,
        record: Callable[[int, dict], None] = lambda step, row: None,
    ):
        """record: gets each step and row that is logged"""
        self.record = record
        self.group = Group.of(accelerator, objective.drafter.target)
        about = {"data": material.packs.fingerprint, "processes": self.group.num}
        self.folder = replace(folder, settings={**folder.settings, **about})
        self.saving = Saving(self.folder, every=settings.save_every, minutes=settings.save_minutes)
        self.accelerator, self.settings, self.material, self.validation = accelerator, settings, material, validation
        about = {
            "num_packs": len(material.packs),
            "seed": settings.seed,
            "number": self.group.number,
            "num": self.group.num,
        }
        self.indices = Order(batch=settings.batch, accumulation=settings.accumulation, **about)
        self.loader = Loader(material, order=self.indices, device=accelerator.device)
        self.drafter, self.depth = objective.drafter, objective.depth
        self.every_slot, self.supervise = objective.every_slot, objective.supervise
        self.waiting = Waiting(settings.timeout, accelerator.process_index, accelerator.num_processes)
        with self.waiting("the others to load their target and data"):
            self.weights = Weights(accelerator, objective, optimizer)
        self.objective, self.optimizer = self.weights.prepared, self.weights.optimizer
        self.scheduler = scheduler
        self.average = None if settings.ema is None else Average(self.drafter, settings.ema)
        self.norms = GradientNorms(settings.limit)
        self.step = 0
        self.seen, self.seconds = 0, 0.0  # tokens and seconds of training, without validation and saving
        self.skipped = 0  # steps that were left out
        self.loss = math.nan  # of the newest step whose loss was read
        self.losses: list[tuple[int, Tensor]] = []  # of the steps since then, on the device
        self.reads_at_once = (
            accelerator.device.type == "cpu" or settings.skip_not_finite or material.stream is not None
        )  # each loss, before the update; a stream cannot go back to the rows of an earlier step
        self.best: dict = {}
        self.interrupted = 0  # the signal that has ended the run early
        self.asked, self.next_ask = (
            (0, 0.0),
            0,
        )  # steps: of the last question with the seconds until then, and of the next

    # Before the first step

    def prepare(self, num_packs: int, *, fresh: bool) -> None:
        """Sizes of what the head reads, and closed-form weights if it has any, from the packs that training reads first.

        num_packs: for the weights; 0: they stay; fresh: they are random
        """
        first = permutation(len(self.material.packs), self.settings.seed)[: max(num_packs, MEASURED)]
        start = partial(
            closed_form.start, material=self.material, packs=first, solve=num_packs > 0, fresh=fresh, depth=self.depth,
            device=self.accelerator.device,
        )  # fmt: skip
        with self.waiting("the closed-form start"):
            # By the processes that hold the main one's target with it
            group = Group.in_step(self.accelerator, self.drafter.target)
            num = self.weights.change(start, here=group.number == 0)
        if self.average is not None:
            self.average.begin()
        if num > 0:
            note(f"closed-form start from {num} packs")

    def resume(self) -> bool:
        """Continues from the newest state; False if there is none. Raises ValueError if settings differ from then."""
        state = self.folder.read_state()
        self._agree(-1 if state is None else state[2]["step"])
        if state is None:
            if self.accelerator.is_main_process:
                self.folder.go_back(-1, {})
            return False
        weights, optimizer, document = state
        if self.average is not None:
            self.average.load_state_dict(take(weights, AVERAGE))
        self.weights.load(weights)
        self.weights.load_optimizer(optimizer)
        lambdas = [None] * len(optimizer["param_groups"])
        self.scheduler.load_state_dict(document["scheduler"] | {"lr_lambdas": lambdas})
        self.step, self.best = document["step"], document["best"]
        self.seen, self.seconds = document["seen"], document["seconds"]
        if self.material.stream:
            positions = document["stream"]
            if len(positions) != self.group.num:
                raise ValueError(
                    f"A stream is dealt to its processes: resume with {len(positions)} of them, as the run was begun."
                )
            self.loader.seek(self.step, positions[self.group.number])
        self.validation.seconds |= document.get("validation", {})
        self.skipped = document.get("skipped", 0)
        then, now = packs_of_step(document["about"]), packs_of_step(self.folder.settings)
        self.indices.first = (self.step, document.get("packs", self.step * then))
        if self.accelerator.is_main_process:
            self.folder.go_back(self.step, self.best)
        note(f"Resumed from step {self.step}.")
        if then != now:
            say(other_processes(document["about"]["processes"], self.group.num, then=then, now=now))
        return True

    def _agree(self, step: int) -> None:
        """Raises ValueError if the processes have found different states."""
        with self.waiting("the others to read the state"):
            found = self.accelerator.gather(torch.tensor([step], device=self.accelerator.device)).tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"The processes found states of different steps in {self.folder.path}: {found}. All must see the same folder."
            )

    # The loop

    def fit(self) -> None:
        """Trains to the last step. Returns early, with a saved state, after a signal. Raises NotFiniteLoss, ProcessLost."""
        settings, main = self.settings, self.accelerator.is_main_process
        begun = self.step
        self.asked = begun, self.seconds
        within = 1 if self.accelerator.num_processes == 1 else ASK
        with Signals(say, within=within) as signals, closing(self.loader), self.saving:
            self.objective.train()
            if (settings.validate_first or self.drafter.pretrained) and self.step == 0:
                self._validate(required=True)
            with TrainingProgress(steps=settings.steps, done=begun, shown=main) as progress:
                while self.step < settings.steps:
                    number = self.step + 1
                    last = number == settings.steps
                    logged = _due(number, settings.log_every) or number == 1 or last
                    shown = logged or number == begun + 1
                    with self.waiting(f"step {number}"):
                        line, figures = self._advance(progress, shown=shown)
                    if shown:
                        norms = self.norms.read()
                        note(f"step {self.step:>5}/{settings.steps}  {line}{clipping(norms)}")
                    if logged:
                        self._record(figures | norms)
                    validated = _due(self.step, settings.validate_every) or last
                    if validated:
                        self._validate(required=last)
                        progress.restart()
                    self.interrupted, overdue = self._asked(signals.number, now=validated)
                    if overdue or self.saving.after(self.step) or last or self.interrupted:
                        self.save_state()
                    if last or self.interrupted:
                        self._wait_saved()
                    if self.interrupted and not last:
                        return
            self._decode_best()
        if main:
            self.folder.finish(self.step)

    def _advance(self, progress: TrainingProgress, *, shown: bool) -> tuple[str, dict]:
        """One step. -> the progress line, and the figures for the log. shown: whether anybody reads them"""
        start = time.perf_counter()
        tokens, counts = self._train_step(compare=shown)
        if shown:
            self._settle()
        seconds = time.perf_counter() - start
        self.step += 1
        self.seconds += seconds
        self.seen += tokens
        line = progress.advance(self.step, loss=self.loss, tokens=tokens, seconds=seconds, counts=counts)
        figures = {} if progress.text_tau is None else {"tau": progress.text_tau}
        return line, {
            "loss": self.loss,
            **figures,
            "tokens_per_second": progress.rate,
            "learning_rate": self.scheduler.get_last_lr()[0],
            "memory": peak_memory(self.accelerator.device),
        }

    def _train_step(self, *, compare: bool) -> tuple[int, tuple[int, float] | None]:
        """One step of the optimizer, in which nothing waits for a device. Its loss is read later, by `_settle`.

        -> tokens read; `text_rounds` of the last micro-batch, if guesses are to be compared with the text
        """
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + self.step * 1009 + self.group.number)
        micro_batches = self.loader.step(self.step)
        goals = torch.tensor(float(sum(int(micro.batch.goals(self.supervise).sum()) for micro in micro_batches)))
        num_goals = accelerator.reduce(devices.send(goals, accelerator.device), "sum")
        losses = []
        for number, micro in enumerate(micro_batches):
            last = number == settings.accumulation - 1
            with nullcontext() if last or self.weights.sums_at_once else accelerator.no_sync(self.objective):
                # A draft is always sure of its own text
                loss = self._backward(micro, num_goals, compare and last and self.every_slot and not micro.written)
            losses.append(loss.total.detach())
        total = accelerator.reduce(torch.stack(losses).sum(), "sum") / num_goals
        self._update(total, micro_batches)
        tokens = sum(int((micro.batch.documents >= 0).sum()) for micro in micro_batches) * self.group.num
        return tokens, None if loss.matches is None else text_rounds(micro.batch, loss.matches)

    def _update(self, total: Tensor, micro_batches: list[MicroBatch]) -> None:
        """The optimizer's step. A step whose loss is not finite changes nothing."""
        known = self.reads_at_once
        self.losses.append((self.step, total))
        finite = not known or self._settle(micro_batches)
        norm = gathered(self.accelerator.clip_grad_norm_(self.objective.parameters(), self.settings.limit))
        if finite:
            self.norms.add(norm)
            if not known:  # weights stay finite until somebody reads the loss
                good = total.isfinite() & norm.isfinite()
                for parameter in self.objective.parameters():
                    if parameter.grad is not None:
                        local(parameter.grad).masked_fill_(~good, 0)
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _settle(self, micro_batches: list[MicroBatch] | None = None) -> bool:
        """Reads the losses of the steps since the last time. -> whether all are finite. Raises NotFiniteLoss

        micro_batches: of the last step, if it is the only one
        """
        if not self.losses:
            return True
        steps, losses = [step for step, _ in self.losses], torch.stack([loss for _, loss in self.losses]).tolist()
        self.losses = []
        for step, loss in zip(steps, losses):
            if not math.isfinite(loss):
                self._refuse_or_skip(step, loss, micro_batches or self.loader.again(step))
                return False
        self.loss = losses[-1]
        return True

    def _backward(self, micro: MicroBatch, num_goals: Tensor, compare: bool) -> Loss:
        """Adds a micro-batch's share of the gradients. num_goals: of the whole step, in all processes"""
        batch, output = self.loader.on_device(micro)
        with self.accelerator.autocast():  # which accelerate leaves out where it shards
            loss: Loss = self.objective(batch, output, compare=compare)
        # Gradients are averaged over processes: divide by the goals of all of them, times their number. Both sums count all
        # processes that hold a target together.
        self.accelerator.backward(loss.total * self.accelerator.num_processes / num_goals)
        return loss

    def _refuse_or_skip(self, step: int, loss: float, micro_batches: list[MicroBatch]) -> None:
        """Names the rows, in the log too, and raises NotFiniteLoss unless such steps are to be left out."""
        read = []
        for micro in micro_batches:
            batch = micro.batch.to(self.accelerator.device)
            read.append((micro.rows, batch, self.material.target_output(micro, batch)))
        with self.weights.whole() as objective, self.accelerator.autocast():
            rows = rows_not_finite(objective, read)
        self.saving.wait()  # the sentence names the last state
        what = f"The loss is {loss} at step {step + 1} ({named(rows)})."
        if not self.settings.skip_not_finite:
            raise NotFiniteLoss(
                f"{what} Nothing of this step was kept; the last good state is that of step {self.folder.saved_step()}."
            )
        self.skipped += 1
        say(f"{what} The step is left out ({self.skipped} so far).")
        if self.accelerator.is_main_process:
            self.folder.log(step + 1, {"skipped": rows, "num_skipped": self.skipped})

    # What a run leaves behind

    def _validate(self, *, required: bool) -> None:
        """Judges the weights, saves a checkpoint of the better ones, and marks it if it is the best so far."""
        self._settle()
        self.saving.wait()  # decoding is timed
        cost = training_cost(  # before decoding
            self.accelerator, self.drafter, tokens=self.seen, seconds=self.seconds, unique=self.material.num_tokens
        )
        with self.waiting(f"the weights of step {self.step}"):
            candidates = {"plain": self.weights.frozen()}
            if self.average is not None:
                with self.average.applied():
                    candidates["average"] = self.weights.frozen()
        kind = self.validation.figure
        best = self.best.get("figure") if self.best.get("by", kind) == kind else None
        with self.waiting(f"the validation of step {self.step}", timed=False):
            judged = self.validation(candidates, step=self.step, trained=self.seconds, best=best, required=required)
        if judged is not None and self.accelerator.is_main_process:
            frozen, report = judged[0], replace(judged[1], training=cost)
            self._record({"validation": report.to_json()})
            name = self.folder.save_checkpoint(frozen, report)
            figure = getattr(report, kind)
            if best is None or figure > best:
                self.best = {"figure": figure, "step": self.step, "by": kind}
                self.folder.mark_best(name)
            run_page.write(self.folder.path)
        with self.waiting(f"the validation of step {self.step}"):
            self.accelerator.wait_for_everyone()
        self.objective.train()

    def _decode_best(self) -> None:
        """After the last step: decodes the checkpoint of the best step, if its report lacks what decoding gives."""
        found = self.folder.read_best() if self.accelerator.is_main_process else None
        with self.waiting("the best step"):
            best = broadcast_object_list([found])[0]
        if best is None or not self.validation.unfinished(best[1]):
            return
        name, report, weights = best
        with self.waiting("the best step"):
            frozen = self.weights.frozen()
        frozen.load_state_dict(weights)
        with self.waiting("the decoding of the best step", timed=False):
            report = self.validation.decode_best(frozen, report, trained=self.seconds)
        if self.accelerator.is_main_process:
            self.folder.log_last(self.step, {"validation": report.to_json()})
            self.folder.write_report(name, report)
        with self.waiting("the decoding of the best step"):
            self.accelerator.wait_for_everyone()

    def save_state(self) -> None:
        """Copies what resuming needs from the devices; a thread of the main process writes it."""
        self._settle()
        positions = self._positions()
        with self.waiting(f"the weights of step {self.step}"):
            weights, optimizer, averaged = self.weights.saved(self.average)
        if self.accelerator.is_main_process:
            scheduler = {key: value for key, value in self.scheduler.state_dict().items() if key != "lr_lambdas"}
            counters = {
                "packs": self.indices.read_before(self.step),
                "seen": self.seen,
                "seconds": self.seconds,
                "best": self.best,
                "skipped": self.skipped,
                "scheduler": scheduler,
                "validation": self.validation.seconds,
                **({"stream": positions} if positions else {}),
            }
            self.saving.write(
                self.step,
                weights=weights | {AVERAGE + name: value for name, value in averaged.items()},
                optimizer=optimizer,
                document=counters,
            )

    def _wait_saved(self) -> None:
        """Until the last state is on the disk."""
        self.saving.wait()
        with self.waiting(f"the saving of step {self.step}"):
            self.accelerator.wait_for_everyone()

    def _positions(self) -> list[list[int]]:
        """Where each process is in a stream; nothing for packs."""
        if not self.material.stream:
            return []
        position = torch.tensor([self.loader.position(self.step)], device=self.accelerator.device)
        with self.waiting("the others' places in the stream"):
            return self.accelerator.gather(position).tolist()[:: self.group.share.size]

    def _record(self, figures: dict) -> None:
        """To the log, and to whoever listens."""
        if self.accelerator.is_main_process:
            self.folder.log(self.step, figures)
            self.record(self.step, figures)

    def _asked(self, number: int, *, now: bool) -> tuple[int, bool]:
        """The signal that has come to any process, 0 for none, and whether the main one finds that a state is overdue.

        number: the signal here; now: whether several processes ask now. Otherwise they do when it is time
        """
        overdue = self.accelerator.is_main_process and self.saving.overdue()
        if self.accelerator.num_processes == 1:
            return number, overdue
        if not now and self.step < self.next_ask:
            return 0, False
        (step, seconds), self.asked = self.asked, (self.step, self.seconds)
        pace = (self.seconds - seconds) / max(1, self.step - step)
        steps = max(1, min(ASK, int(ASK_SECONDS / pace))) if pace else ASK
        with self.waiting(f"step {self.step}"):
            mine = torch.tensor([[number, overdue, steps]], device=self.accelerator.device)
            said = self.accelerator.gather(mine).tolist()  # [P][3]
        self.next_ask = self.step + said[0][2]  # as the main process says
        return max(row[0] for row in said), bool(said[0][1])


def _due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; 0: none is."""
    return every > 0 and step % every == 0
