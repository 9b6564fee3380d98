"""The training loop. `Trainer.fit` is the loop, `Trainer.take_step` one step of it; what they need follows below."""

import collections
import math
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from specdec.core import devices, progress
from specdec.heads.base import Drafter, Head, Slots
from specdec.measuring.report import Training
from specdec.unroll import replay
from train.data.batches import TrainingBatch, find_answers
from train.features.loader import Loader, Material, MicroBatch, Order, permute_packs
from train.features.outputs import Features
from train.loop.optimizer import AVERAGE_PREFIX, WeightAverage, pop_prefixed, read_norms
from train.loop.state import RunFolder, StateSaver, count_step_packs
from train.loop.validate import Validation
from train.objective.objective import Loss, list_slots, order_by_start
from train.processes import (
    ProcessGroup,
    ProcessLost,
    TrainingObjective,
    Waiting,
    change_together,
    copy_state,
    print_main,
)
from train.settings.options import TrainConfig
from train.show import run_page

# Steps and seconds between two votes, at most. A vote waits for the devices. Launchers kill a process 30 seconds after
# their signal.
VOTE_STEPS, VOTE_SECONDS = 20, 5.0
MIN_MEASURED_PACKS = 8  # packs from which a head measures its inputs, at least
START_SLOTS = 100_000  # slots that a closed-form start holds in memory, at most; wide targets need more
MEASURED_SLOTS = 30_000  # slots behind which a head that has no such start reads no further pack to measure its inputs
# Compared steps over which text tau is taken, at most, and their share of the steps so far. A single batch says little,
# and the first steps say nothing of a head that has learned since
TAU_STEPS, TAU_SHARE = 50, 0.25
SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}  # Slurm sends SIGUSR1


class NotFiniteLoss(ValueError):
    """A step's loss was not finite. Nothing of the step was kept."""


@dataclass(frozen=True)
class TrainingStep:
    """Results of a step of the optimizer. Its tensors stay on the device until somebody reads them."""

    number: int  # steps of the run before it
    loss: Tensor  # scalar: mean loss of the step's goals in all processes
    norm: Tensor | None  # scalar: norm of the gradients before they are clipped; None for a step that was left out
    tokens: int  # tokens of the step in all processes, without padding
    rounds: tuple[int, float] | None  # result of `count_rounds`; None if the guesses were not compared with the text


@contextmanager
def advise_resuming() -> Iterator[None]:
    """Within, an error that ends training also says how to go on."""
    try:
        yield
    except NotFiniteLoss as error:
        raise ValueError(
            f"{error} Look at these rows, lower optimizer.lr or train.max_grad_norm, or leave such steps out with "
            "train.skip_not_finite=true; then use resume=true."
        ) from error
    except ProcessLost as error:
        raise ProcessLost(f"{error} Continue with resume=true.") from error
    except ValueError as error:
        raise ValueError(f"{error} Then continue with resume=true.") from error


class Trainer:
    """Trains `objective`; everything that a run leaves behind is in `folder`.

    The order of packs and every random number follow from (seed, step, process), so that a resumed run continues
    exactly.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: TrainingObjective,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        *,
        material: Material,
        validation: Validation,
        settings: TrainConfig,
        folder: RunFolder,
    ):
        self.accelerator, self.settings, self.material, self.validation = accelerator, settings, material, validation
        self.scheduler, self.drafter = scheduler, objective.drafter
        self.depth, self.every_slot, self.supervise = objective.depth, objective.every_slot, objective.supervise
        self.process, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.num_groups = self.num_processes // settings.context_parallel  # of processes that read the same packs
        run_settings = {"data": material.packs.fingerprint, "processes": self.num_groups}
        self.folder = replace(folder, settings={**folder.settings, **run_settings})
        self.saver = StateSaver(self.folder.save_state, every=settings.save_every, minutes=settings.save_minutes)
        group = self.process // settings.context_parallel
        order_settings = settings.seed, settings.batch, settings.accumulation, group, self.num_groups
        self.order = Order(len(material.packs), *order_settings)
        self.loader = Loader(material, order=self.order, device=accelerator.device, steps=settings.steps)
        self.waiting = Waiting(settings.timeout, accelerator.process_index, accelerator.num_processes)
        with self.waiting("the others to load their target and data"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.13 renames it
            self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self.average = None if settings.ema is None else WeightAverage(self.drafter, settings.ema)
        # Each loss is read before the update, and guesses are compared with the text, where that costs nothing
        self.compares_always = accelerator.device.type == "cpu"
        self.reads_loss_at_once = self.compares_always or settings.skip_not_finite
        # What resuming continues
        self.step = 0
        self.tokens_read, self.seconds = 0, 0.0  # tokens and seconds of training, without validation and saving
        self.skipped = 0  # steps that were left out
        self.best: dict = {}  # figure and step of the best checkpoint, and the figure's name
        self.stop_signal = 0  # the signal that has ended the run early

    # Before the first step

    def prepare_weights(self, num_packs: int, *, fresh: bool) -> None:
        """Measures the head's inputs, and sets closed-form weights if it has any, from the first packs of training.

        num_packs: packs for the weights; 0 leaves the weights as they are; fresh: whether the weights are random
        """
        packs = permute_packs(len(self.material.packs), self.settings.seed)[: max(num_packs, MIN_MEASURED_PACKS)]
        change = partial(self._measure_and_solve, packs=packs, solve=num_packs > 0, fresh=fresh)
        with self.waiting("the closed-form start"):
            # The processes that hold the main one's target with it compute
            holds_target = ProcessGroup.from_target(self.accelerator, self.drafter.target).number == 0
            num = change_together(self.drafter, change, applies=holds_target)
        if self.average is not None:
            self.average.reset()
        if num > 0:
            progress.print_note(f"closed-form start from {num} packs")

    def _measure_and_solve(self, drafter: Head, packs: Iterable[int], *, solve: bool, fresh: bool) -> int:
        """Measures the drafter's inputs, and sets its weights by a closed-form start (docs/methods.md, section 5).

        -> number of packs behind the weights, 0 if nothing was changed, -1 if inputs were only measured
        """
        features = self.material.features
        if features is None or not isinstance(drafter, Drafter):
            return 0
        solve = solve and drafter.solves
        if not solve and type(drafter).measure_inputs is Drafter.measure_inputs:
            return 0
        texts = self._read_start_texts(drafter, features, packs, with_goals=solve)
        if not texts:
            return 0
        measured = drafter.measure_inputs(texts, random_weights=fresh)
        if solve and drafter.solve(texts):
            return len(texts)
        return -1 if measured else 0

    def _read_start_texts(
        self, drafter: Drafter, features: Features, packs: Iterable[int], *, with_goals: bool
    ) -> list[Slots]:
        """The slots of packs, one text a pack, until they are enough for a closed-form start.

        with_goals: whether goals, which are large, are kept
        """
        depth = 1 if drafter.depth is None else self.depth  # steps of one module start alike
        enough = max(START_SLOTS, 6 * drafter.target.width) if with_goals else MEASURED_SLOTS
        texts: list[Slots] = []
        for index in progress.track_items(packs, "first packs", unit="packs"):
            batch = self.material.collate([self.material.packs[index]]).move_to(self.accelerator.device)
            text = list_slots(batch, features(batch), depth)
            texts.append(text if with_goals else replace(text, goals=text.goals[:, :0].clone()))
            if sum(len(text.tokens) for text in texts) > enough:
                break
        return texts

    def resume(self) -> bool:
        """Continues from the newest state; False if there is none. Raises ValueError if settings differ from then."""
        state = self.folder.read_state()
        with self.waiting("the others to read the state"):
            steps = gather_object([-1 if state is None else state[2]["step"]])
        if len(set(steps)) > 1:
            raise ValueError(
                f"The processes found states of different steps in {self.folder.path}: {steps}. All must see the same "
                "folder."
            )
        if state is None:
            if self.accelerator.is_main_process:
                self.folder.go_back(-1, {})
            return False
        weights, optimizer, document = state
        if self.average is not None:
            self.average.load_state_dict(pop_prefixed(weights, AVERAGE_PREFIX))
        self.drafter.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        lambdas = [None] * len(optimizer["param_groups"])
        self.scheduler.load_state_dict(document["scheduler"] | {"lr_lambdas": lambdas})
        self.step, self.best = document["step"], document["best"]
        self.tokens_read, self.seconds = document["seen"], document["seconds"]
        self.skipped = document["skipped"]
        self.validation.seconds |= document["validation"]
        recorded_packs, step_packs = count_step_packs(document["about"]), count_step_packs(self.folder.settings)
        self.order.launch_start = (self.step, document["packs"])
        if self.accelerator.is_main_process:
            self.folder.go_back(self.step, self.best)
        progress.print_note(f"Resumed from step {self.step}.")
        if recorded_packs != step_packs:
            print_main(
                f"The run was begun by {document['about']['processes']} groups of processes and goes on with "
                f"{self.num_groups}: a step now has {step_packs} packs instead of {recorded_packs}. The order of "
                "packs goes on; train.batch, train.accumulation and train.context_parallel (processes of a group) "
                "could keep the packs of a step."
            )
        return True

    # The loop

    def fit(self, record: Callable[[int, dict], None]) -> None:
        """Trains to the last step. After a signal it returns early, with a saved state.

        record: gets the number and the figures of each logged step. Raises NotFiniteLoss and ProcessLost.
        """
        settings, first_step, is_last = self.settings, self.step + 1, False
        vote = StopVote(self.accelerator, self.waiting)
        is_main = self.accelerator.is_main_process
        with Signals(num_steps=vote.num_steps, is_main=is_main) as signals, closing(self.loader), self.saver:
            self.objective.train()
            self.validate_at_start(record)
            figures = StepFigures(num_steps=settings.steps, num_done=self.step)
            with progress.start_task(
                "training", settings.steps, unit="steps", num_done=self.step, own_lines=False
            ) as task:
                while self.step < settings.steps and not (is_last or self.stop_signal):
                    number = self.step + 1
                    is_last = number == settings.steps
                    is_logged = is_step_logged(number, settings)
                    is_shown = is_logged or number == first_step

                    # Forward and backward passes, and the update. The loss is read where it is shown, or costs no wait.
                    self.run_step(figures, is_shown=is_shown)

                    # A line on the console, and a row of the log.
                    row = self.show_step(figures, task, is_shown=is_shown)
                    if is_logged:
                        self.log(record, row)

                    # Validation chooses the best weights. It ends a run whose tau has long not risen.
                    is_validated = is_last or is_due(number, settings.validate_every)
                    if is_validated:
                        self.read_losses(figures)
                        is_last |= self.validate(record, required=is_last)
                        figures.restart_clock()

                    # All processes learn of a signal. The state is saved if it is time, and before the run ends.
                    is_overdue = self.agree_to_stop(vote, signals.number, figures.pace, at_once=is_validated)
                    self.save_if_due(figures, is_overdue=is_overdue, is_end=bool(is_last or self.stop_signal))
            if self.stop_signal and not is_last:
                return
            self._decode_best()
        if is_main:
            self.folder.finish(self.step)

    def validate_at_start(self, record: Callable[[int, dict], None]) -> None:
        """Validates the weights before the first step of a run, if this is asked for or the head was trained before."""
        if (self.settings.validate_first or self.drafter.pretrained) and self.step == 0:
            self.validate(record, required=True)

    def run_step(self, figures: "StepFigures", *, is_shown: bool) -> None:
        """Takes a step and counts it. Raises NotFiniteLoss where losses are read.

        is_shown: whether the loss is read now, and the guesses are compared with the text, which always are on a CPU
        """
        with self.waiting(f"step {self.step + 1}"):
            started = time.perf_counter()
            step = self.take_step(compare=is_shown or self.compares_always)
            figures.pending_steps.append(step)
            if is_shown or self.reads_loss_at_once:
                self.read_losses(figures)
            seconds = time.perf_counter() - started
        self.step += 1
        self.tokens_read += step.tokens
        self.seconds += seconds
        figures.add(step, seconds)

    def show_step(self, figures: "StepFigures", task: progress.Task, *, is_shown: bool) -> dict:
        """Updates the progress, and prints a line if the step is shown. -> the step's figures for the log"""
        text, row = figures.describe()
        task.update(self.step, figures=text)
        if is_shown:
            progress.print_note(f"step {self.step:>5}/{self.settings.steps}  {text}")
            clipping = read_norms(figures.norms, self.settings.norm_limit)
            rate, peak_memory = self.scheduler.get_last_lr()[0], read_peak_memory(self.accelerator.device)
            row |= {"learning_rate": rate, "memory": peak_memory, **clipping}
        return row

    def agree_to_stop(self, vote: "StopVote", signal_number: int, pace: float, *, at_once: bool) -> bool:
        """Sets `stop_signal`, the same in all processes. -> whether the main process finds a state overdue

        signal_number: signal of this process, or 0; pace: seconds of a step; at_once: whether processes must vote now
        """
        is_overdue = self.accelerator.is_main_process and self.saver.is_overdue()
        self.stop_signal, is_overdue = vote(signal_number, is_overdue, self.step, pace, at_once=at_once)
        return is_overdue

    def save_if_due(self, figures: "StepFigures", *, is_overdue: bool, is_end: bool) -> None:
        """Saves the state if it is due by time or by steps. At the end of a run also waits until it is written."""
        if is_overdue or self.saver.is_step_due(self.step) or is_end:
            self.read_losses(figures)
            self.save_state()
        if is_end:
            self.saver.wait()
            with self.waiting(f"the saving of step {self.step}"):
                self.accelerator.wait_for_everyone()

    def take_step(self, *, compare: bool) -> TrainingStep:
        """Takes one step of the optimizer. Nothing in it waits for a device. A loss that is not finite changes nothing.

        compare: whether the guesses of the last micro-batch are compared with the text
        """
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + self.step * 1009 + self.process)
        micro_batches = self.loader.read_step(self.step)

        # Gradients of all micro-batches. A loss that can be read for nothing is checked before the update.
        total, matches = self.add_gradients(micro_batches, compare=compare)
        is_finite = True
        if self.reads_loss_at_once:
            total = total.cpu()
            is_finite = math.isfinite(total)
            if not is_finite:
                self._refuse_or_skip(self.step, float(total), micro_batches)

        # The update. A step that is left out moves the schedule, too.
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), settings.norm_limit)
        if is_finite:
            self.update_weights(total, norm)
        self.scheduler.step()
        self.optimizer.zero_grad()

        # What the step gave.
        tokens = sum(int((micro.batch.documents >= 0).sum()) for micro in micro_batches) * self.num_groups
        rounds = None
        if matches is not None:  # with the drafts of validations, so that both can be compared
            rounds = count_rounds(micro_batches[-1].batch, matches[: self.validation.drafting.depth])
        return TrainingStep(self.step, total, norm.detach() if is_finite else None, tokens, rounds)

    def add_gradients(self, micro_batches: list[MicroBatch], *, compare: bool) -> tuple[Tensor, Tensor | None]:
        """Forward and backward passes of a step. -> its loss, scalar, and `Loss.matches` of the last micro-batch"""
        accelerator = self.accelerator
        goals = torch.tensor(float(sum(int(micro.batch.goal_mask(self.supervise).sum()) for micro in micro_batches)))
        all_goals = accelerator.reduce(devices.upload_tensor(goals, accelerator.device), "sum")  # of all processes
        num_goals = all_goals / self.settings.context_parallel  # a group counts each of its goals in all of its members
        losses = []
        for number, micro in enumerate(micro_batches, start=1):
            is_last = number == self.settings.accumulation
            with nullcontext() if is_last else accelerator.no_sync(self.objective):
                batch, output = self.loader.read_on_device(micro)
                loss: Loss = self.objective(batch, output, compare=compare and is_last and self.every_slot)
                # Gradients are averaged over processes: divide by the goals of all of them, times their number
                accelerator.backward(loss.total * accelerator.num_processes / num_goals)
            losses.append(loss.total.detach())
        return accelerator.reduce(torch.stack(losses).sum(), "sum") / num_goals, loss.matches

    def update_weights(self, total: Tensor, norm: Tensor) -> None:
        """The optimizer's update. total, norm: scalars, of the loss and of the gradients"""
        if not self.reads_loss_at_once:  # weights stay finite until somebody reads the loss
            is_finite = total.isfinite() & norm.isfinite()
            for parameter in self.objective.parameters():
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(~is_finite, 0)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()

    def read_losses(self, figures: "StepFigures") -> None:
        """Reads the pending losses; the newest is then `figures.loss`. Raises NotFiniteLoss."""
        steps = [step for step in figures.pending_steps if step.norm is not None]
        figures.pending_steps.clear()
        if steps:
            losses = torch.stack([step.loss for step in steps]).tolist()
            for step, loss in zip(steps, losses):
                if not math.isfinite(loss):
                    self._refuse_or_skip(step.number, loss, self.loader.reread_step(step.number))
            figures.loss = losses[-1]

    def _refuse_or_skip(self, step: int, loss: float, micro_batches: list[MicroBatch]) -> None:
        """Names the rows of the step, in the log too, and raises NotFiniteLoss unless such steps are to be left out."""
        rows = [row for micro in micro_batches for row in micro.row_ids]
        rows = list(dict.fromkeys(gather_object(rows)))
        self.saver.wait()  # the sentence names the last state
        row_names = f"row{'s' * (len(rows) > 1)} {', '.join(rows[:6])}{', ...' if len(rows) > 6 else ''}"
        problem = f"The loss is {loss} at step {step + 1} ({row_names})."
        if not self.settings.skip_not_finite:
            raise NotFiniteLoss(
                f"{problem} Nothing of this step was kept; the last good state is that of step "
                f"{self.folder.find_saved_step()}."
            )
        self.skipped += 1
        print_main(f"{problem} The step is left out ({self.skipped} so far).")
        if self.accelerator.is_main_process:
            self.folder.log(step + 1, {"skipped": rows, "num_skipped": self.skipped})

    # What a run leaves behind

    def log(self, record: Callable[[int, dict], None], figures: dict) -> None:
        """Writes figures of the current step to the log, and gives them to `record`, in the main process."""
        if self.accelerator.is_main_process:
            self.folder.log(self.step, figures)
            record(self.step, figures)

    def _freeze_drafter(self) -> Head:
        """A copy of the drafter in the target's dtype, to decode with and to save."""
        return self.drafter.frozen_copy().to(dtype=self.drafter.target.dtype)

    def validate(self, record: Callable[[int, dict], None], *, required: bool) -> bool:
        """Validates the weights, saves a checkpoint of the better ones, and marks it if it is the best so far.

        -> whether train.patience is over
        """
        self.saver.wait()  # decoding is timed
        cost = self.count_cost()  # before decoding
        candidates = {"plain": self._freeze_drafter()}
        if self.average is not None:
            with self.average.swap_in():
                candidates["average"] = self._freeze_drafter()
        figure_name = self.validation.figure_name
        best = self.best.get("figure") if self.best.get("by", figure_name) == figure_name else None
        with self.waiting(f"the validation of step {self.step}", timed=False):
            result = self.validation(candidates, step=self.step, trained=self.seconds, best=best, required=required)
        if result is not None and self.accelerator.is_main_process:
            frozen, report = result[0], replace(result[1], training=cost)
            self.log(record, {"validation": report.to_json()})
            name = self.folder.save_checkpoint(frozen, report)
            figure = getattr(report, figure_name)
            if best is None or figure > best:
                self.best = {"figure": figure, "step": self.step, "by": figure_name}
                self.folder.mark_best(name)
            else:
                self.best["waited"] = self.best.get("waited", 0) + 1
            run_page.write_run_page(self.folder.path)
        with self.waiting(f"the validation of step {self.step}"):
            (waited,) = broadcast_object_list([self.best.get("waited", 0)])
        self.objective.train()
        is_over = self.settings.patience is not None and waited >= self.settings.patience
        if is_over:
            progress.print_note(f"step {self.step}: tau has not risen in {waited} validations, so training ends")
        return is_over

    def count_cost(self) -> Training:
        """The cost of the training so far, in all processes."""
        return Training(
            parameters=self.drafter.num_parameters(),
            tokens=self.tokens_read,
            seconds=self.seconds,
            tokens_per_second=self.tokens_read / self.seconds if self.seconds else None,
            peak_memory=read_peak_memory(self.accelerator.device),
            processes=self.accelerator.num_processes,
            unique_tokens=self.material.packs.num_tokens,
        )

    def _decode_best(self) -> None:
        """After the last step: decodes the checkpoint of the best step, if its report lacks what decoding gives."""
        best_checkpoint = self.folder.read_best() if self.accelerator.is_main_process else None
        with self.waiting("the best step"):
            best = broadcast_object_list([best_checkpoint])[0]
        if best is None or not self.validation.needs_decoding(best[1]):
            return
        name, report, weights = best
        frozen = self._freeze_drafter()
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
        if self.accelerator.is_main_process:
            weights = self.drafter.state_dict()
            if self.average is not None:
                weights |= {AVERAGE_PREFIX + name: value for name, value in self.average.state_dict().items()}
            state = copy_state({"weights": weights, "optimizer": self.optimizer.state_dict()})
            scheduler = {key: value for key, value in self.scheduler.state_dict().items() if key != "lr_lambdas"}
            counters = {
                "packs": self.order.count_packs_before(self.step),
                "seen": self.tokens_read,
                "seconds": self.seconds,
                "best": self.best,
                "skipped": self.skipped,
                "scheduler": scheduler,
                "validation": self.validation.seconds,
            }
            self.saver.write(self.step, **state, document=counters)


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; 0: none is."""
    return every > 0 and step % every == 0


def is_step_logged(step: int, settings: TrainConfig) -> bool:
    """Whether a step has a row in the log: the first and the last one, and one of every `train.log_every`."""
    return step in (1, settings.steps) or is_due(step, settings.log_every)


# Signals that end a run soon, with a saved state


class Signals:
    """Within, `number` is the signal that has come, or 0. A second Ctrl-C raises KeyboardInterrupt at once.

    num_steps: steps after which the run ends; is_main: whether this process prints
    """

    def __init__(self, *, num_steps: int = 1, is_main: bool = True):
        self.number, self.is_main = 0, is_main
        self.when = "after this step" if num_steps == 1 else f"within {num_steps} steps"

    def __enter__(self) -> "Signals":
        self.previous = {number: signal.signal(number, self._receive) for number in SIGNAL_NAMES}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _) -> None:
        if number == self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.number and self.is_main:
            text = f"{SIGNAL_NAMES[signal.Signals(number)]}: stopping {self.when}."
            if number == signal.SIGINT:
                text += " Press Ctrl-C again to stop at once and lose the steps since the last save."
            os.write(2, f"{text}\n".encode())  # a print within another one would be an error ("reentrant call")
        self.number = number


class StopVote:
    """A vote by which all processes learn of a signal to one of them, and of a state that is overdue."""

    def __init__(self, accelerator: Accelerator, waiting: Waiting):
        self.accelerator, self.waiting = accelerator, waiting
        self.num_steps = 1 if accelerator.num_processes == 1 else VOTE_STEPS  # steps after which all know of a signal
        self.next_step = 0  # step of the next vote

    def __call__(
        self, signal_number: int, is_overdue: bool, step: int, pace: float, *, at_once: bool
    ) -> tuple[int, bool]:
        """Votes if it is time. -> the signal of any process, or 0, and whether the main process finds a state overdue

        signal_number, is_overdue: this process' vote; pace: seconds of a step; at_once: whether processes vote now.
        Otherwise they vote at `next_step`, and learn nothing before.
        """
        if self.accelerator.num_processes == 1:
            return signal_number, is_overdue
        if not at_once and step < self.next_step:
            return 0, False
        steps = max(1, min(VOTE_STEPS, int(VOTE_SECONDS / pace))) if pace else VOTE_STEPS
        with self.waiting(f"step {step}"):
            own_vote = torch.tensor([[signal_number, is_overdue, steps]], device=self.accelerator.device)
            votes = self.accelerator.gather(own_vote).tolist()  # [P][3]
        self.next_step = step + votes[0][2]  # the main process decides
        return max(row[0] for row in votes), bool(votes[0][1])


# Figures of steps


class StepFigures:
    """Figures of a launch's steps: loss, text tau of the last compared ones, tokens/s since a validation, time left.

    num_steps: steps of the run; num_done: steps before this launch
    """

    def __init__(self, *, num_steps: int, num_done: int):
        self.num_steps, self.num_done = num_steps, num_done
        self.number = num_done  # steps of the run so far
        self.seconds = 0.0  # seconds of the launch's steps
        self.loss = math.nan  # the newest loss that was read
        self.pending_steps: list[TrainingStep] = []  # steps whose losses nobody has read
        self.norms: list[Tensor] = []  # norms of gradients since the last shown step
        self.rounds: collections.deque[tuple[int, int, float]] = collections.deque(maxlen=TAU_STEPS)
        self.restart_clock()

    @property
    def pace(self) -> float:
        """Seconds of a step."""
        return self.seconds / (self.number - self.num_done)

    def restart_clock(self) -> None:
        """Starts to count tokens/s from this moment."""
        self.clock, self.tokens = time.perf_counter(), 0

    def add(self, step: TrainingStep, seconds: float) -> None:
        """Counts a step that took these seconds."""
        self.number = step.number + 1
        self.tokens += step.tokens
        self.seconds += seconds
        if step.norm is not None:
            self.norms.append(step.norm)
        if step.rounds is not None:
            self.rounds.append((self.number, *step.rounds))

    def describe(self) -> tuple[str, dict]:
        """The line of the newest step, and its figures for the log."""
        counts = [counts for number, *counts in self.rounds if number > (1 - TAU_SHARE) * self.number]
        emitted, rounds = map(sum, zip(*counts)) if counts else (0, 0.0)
        tau = {"tau": emitted / rounds} if rounds else {}
        rate = self.tokens / (time.perf_counter() - self.clock)
        time_left = progress.format_duration((self.num_steps - self.number) * self.pace)
        tau_text = f"text tau {tau['tau']:.3f}  " if tau else ""
        line = f"loss {self.loss:.4f}  {tau_text}{rate:,.0f} tokens/s  {time_left} left"
        return line, {"loss": self.loss, **tau, "tokens_per_second": rate}


def count_rounds(batch: TrainingBatch, matches: Tensor) -> tuple[int, float]:
    """Emitted tokens and rounds of a greedy chain over the batch's own text. Their ratio is text tau.

    matches [K, B, T]: whether the draft at each depth is the text's token
    """
    emitted, rounds = 0, 0.0
    matches = matches.cpu().float()
    for row in range(batch.tokens.shape[0]):
        for start, stop in find_answers(batch.on_host, row):
            emitted += stop - start - 1
            rounds += replay.count_rounds(order_by_start(matches[:, row, start:stop]))[0]
    return emitted, rounds


def read_peak_memory(device: torch.device) -> int:
    """The most bytes so far: of the device, or on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
