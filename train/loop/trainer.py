"""The training loop. `Trainer.fit` is the loop, `Trainer.take_step` one step of it; what they need follows below."""

import collections
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from specdec.core import devices, progress
from specdec.heads.base import Drafter, Head, Slots
from specdec.measuring.report import Training
from specdec.unroll import replay
from train.data.batches import TrainingBatch, answers
from train.features.loader import Loader, Material, MicroBatch, Order, permutation
from train.loop.optimizer import AVERAGE, Average, read_norms, take
from train.loop.state import RunFolder, Saving, packs_of_step
from train.loop.validate import Validation
from train.objective.objective import Loss, by_start, slots
from train.processes import ProcessGroup, ProcessLost, TrainingObjective, Waiting, change_together, copied_state, say
from train.settings.options import TrainConfig
from train.show import run_page

# Several processes ask each other for signals, and each time they wait for the devices: after so many steps, or sooner where steps are
# long, as launchers and schedulers kill a process 30 seconds after the signal
ASK, ASK_SECONDS = 20, 5.0
MEASURED = 8  # packs from which a head takes the sizes of what it reads, at least
LEAST_SLOTS = 100_000  # of a closed-form start; no more are held in memory, unless the target's width needs more
SHOWN = 10  # text tau is taken over the last steps that were shown: that of a single batch says little
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}  # Slurm sends SIGUSR1


class NotFiniteLoss(ValueError):
    """A step's loss was not finite. Nothing of the step was kept."""


@dataclass(frozen=True)
class TrainingStep:
    """What a step of the optimizer gave. Its tensors stay on the device until somebody reads them."""

    number: int  # steps before it
    loss: Tensor  # scalar, the mean over all goals of the step, in all processes
    norm: Tensor | None  # scalar, of the gradients before they are clipped; None: the step was left out
    tokens: int  # that all processes have read
    rounds: tuple[int, float] | None  # of `count_rounds`, if the guesses were compared with the text


@contextmanager
def continuing() -> Iterator[None]:
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
        about = {"data": material.packs.fingerprint, "processes": self.num_processes}
        self.folder = replace(folder, settings={**folder.settings, **about})
        self.saving = Saving(self.folder.save_state, every=settings.save_every, minutes=settings.save_minutes)
        read = settings.seed, settings.batch, settings.accumulation, self.process, self.num_processes
        self.indices = Order(len(material.packs), *read)
        self.loader = Loader(material, order=self.indices, device=accelerator.device, steps=settings.steps)
        self.waiting = Waiting(settings.timeout, accelerator.process_index, accelerator.num_processes)
        with self.waiting("the others to load their target and data"):
            self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self.average = None if settings.ema is None else Average(self.drafter, settings.ema)
        # Each loss is read before the update where that costs nothing
        self.reads_at_once = accelerator.device.type == "cpu" or settings.skip_not_finite
        # What resuming continues
        self.step = 0
        self.seen, self.seconds = 0, 0.0  # tokens and seconds of training, without validation and saving
        self.skipped = 0  # steps that were left out
        self.best: dict = {}  # figure and step of the best checkpoint, and the figure's name
        self.interrupted = 0  # the signal that has ended the run early

    # Before the first step

    def prepare(self, num_packs: int, *, fresh: bool) -> None:
        """RunSizes of what the head reads, and closed-form weights if it has any, from the packs that training reads first.

        num_packs: for the weights; 0: they stay; fresh: they are random
        """
        packs = permutation(len(self.material.packs), self.settings.seed)[: max(num_packs, MEASURED)]
        change = lambda drafter: self._measure_and_solve(drafter, packs, solve=num_packs > 0, fresh=fresh)
        with self.waiting("the closed-form start"):
            # By the processes that hold the main one's target with it
            here = ProcessGroup.of(self.accelerator, self.drafter.target).number == 0
            num = change_together(self.drafter, change, here=here)
        if self.average is not None:
            self.average.begin()
        if num > 0:
            progress.note(f"closed-form start from {num} packs")

    def _measure_and_solve(self, drafter: Head, packs: Iterable[int], *, solve: bool, fresh: bool) -> int:
        """Measures what the drafter reads, and sets its weights if it has a closed-form start (docs/methods.md, section 5).

        -> how many packs the weights are from, 0 if nothing was changed, -1 if sizes were only measured
        """
        features = self.material.features
        if features is None or not isinstance(drafter, Drafter):
            return 0
        solve = solve and drafter.solves
        if not solve and type(drafter).measure is Drafter.measure:
            return 0
        depth = 1 if drafter.depth is None else self.depth  # steps of one module start alike
        texts: list[Slots] = []
        for index in progress.track(packs, "first packs", unit="packs"):
            batch = self.material.collate([index]).to(self.accelerator.device)
            text = slots(batch, features(batch), depth)
            texts.append(text if solve else replace(text, goals=text.goals[:, :0].clone()))  # they are large
            if sum(len(text.tokens) for text in texts) > max(LEAST_SLOTS, 6 * drafter.target.width):
                break
        if not texts:
            return 0
        measured = drafter.measure(texts, fresh=fresh)
        if solve and drafter.solve(texts):
            return len(texts)
        return -1 if measured else 0

    def resume(self) -> bool:
        """Continues from the newest state; False if there is none. Raises ValueError if settings differ from then."""
        state = self.folder.read_state()
        with self.waiting("the others to read the state"):
            mine = torch.tensor([-1 if state is None else state[2]["step"]], device=self.accelerator.device)
            found = self.accelerator.gather(mine).tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"The processes found states of different steps in {self.folder.path}: {found}. All must see the same folder."
            )
        if state is None:
            if self.accelerator.is_main_process:
                self.folder.go_back(-1, {})
            return False
        weights, optimizer, document = state
        if self.average is not None:
            self.average.load_state_dict(take(weights, AVERAGE))
        self.drafter.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        lambdas = [None] * len(optimizer["param_groups"])
        self.scheduler.load_state_dict(document["scheduler"] | {"lr_lambdas": lambdas})
        self.step, self.best = document["step"], document["best"]
        self.seen, self.seconds = document["seen"], document["seconds"]
        self.skipped = document.get("skipped", 0)
        self.validation.seconds |= document.get("validation", {})
        then, now = packs_of_step(document["about"]), packs_of_step(self.folder.settings)
        self.indices.first = (self.step, document.get("packs", self.step * then))
        if self.accelerator.is_main_process:
            self.folder.go_back(self.step, self.best)
        progress.note(f"Resumed from step {self.step}.")
        if then != now:
            say(
                f"The run was begun by {document['about']['processes']} processes and goes on with {self.num_processes}: a step now has "
                f"{now} packs instead of {then}. The order of packs goes on; train.batch and train.accumulation could keep the "
                "packs of a step."
            )
        return True

    # The loop

    def fit(self, record: Callable[[int, dict], None] = lambda step, figures: None) -> None:
        """Trains to the last step. Returns early, with a saved state, after a signal. Raises NotFiniteLoss, ProcessLost.

        record: gets each step and its figures that are logged
        """
        settings, main = self.settings, self.accelerator.is_main_process
        asking = Asking(self.accelerator, self.waiting)
        with Signals(within=asking.within, speaks=main) as signals, closing(self.loader), self.saving:
            self.objective.train()
            if (settings.validate_first or self.drafter.pretrained) and self.step == 0:
                self.validate(record, required=True)
            first, loss = self.step + 1, math.nan
            unread: list[TrainingStep] = []  # steps whose losses nobody has read
            norms: list[Tensor] = []  # of the steps since the last line
            line = StepLine(steps=settings.steps, done=self.step)
            with progress.start("training", settings.steps, unit="steps", done=self.step, own_lines=False) as task:
                while self.step < settings.steps:
                    number = self.step + 1
                    last = number == settings.steps
                    logged = is_due(number, settings.log_every) or number == 1 or last
                    shown = logged or number == first
                    with self.waiting(f"step {number}"):
                        begun = time.perf_counter()
                        step = self.take_step(compare=shown)
                        unread.append(step)
                        if shown or self.reads_at_once:
                            loss = self.read_losses(unread, loss)
                        seconds = time.perf_counter() - begun
                    self.step, self.seen, self.seconds = number, self.seen + step.tokens, self.seconds + seconds
                    if step.norm is not None:
                        norms.append(step.norm)
                    text, figures = line.advance(step, loss, seconds)
                    task.update(number, figures=text)
                    if shown:
                        clipping = read_norms(norms, settings.limit)
                        if clipping:
                            text += "  gradient {grad_norm:.2f}, {clipped:.0%} clipped".format(**clipping)
                        progress.note(f"step {number:>5}/{settings.steps}  {text}")
                    if logged:
                        rate = self.scheduler.get_last_lr()[0]
                        figures |= {"learning_rate": rate, "memory": read_peak_memory(self.accelerator.device)}
                        self.log(record, figures | clipping)
                    validated = is_due(number, settings.validate_every) or last
                    if validated:
                        loss = self.read_losses(unread, loss)
                        last |= self.validate(record, required=last)
                        line.restart()
                    overdue = main and self.saving.overdue()
                    self.interrupted, overdue = asking(signals.number, overdue, number, line.pace, now=validated)
                    if overdue or self.saving.after(number) or last or self.interrupted:
                        loss = self.read_losses(unread, loss)
                        self.save_state()
                    if last or self.interrupted:
                        self.saving.wait()
                        with self.waiting(f"the saving of step {number}"):
                            self.accelerator.wait_for_everyone()
                    if self.interrupted and not last:
                        return
                    if last:
                        break
            self._decode_best()
        if main:
            self.folder.finish(self.step)

    def take_step(self, *, compare: bool) -> TrainingStep:
        """One step of the optimizer, in which nothing waits for a device. A step whose loss is not finite changes nothing.

        compare: whether to compare the guesses of its last micro-batch with the text
        """
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + self.step * 1009 + self.process)
        micro_batches = self.loader.step(self.step)
        goals = torch.tensor(float(sum(int(micro.batch.goals(self.supervise).sum()) for micro in micro_batches)))
        num_goals = accelerator.reduce(devices.send(goals, accelerator.device), "sum")  # of all processes
        losses = []
        for number, micro in enumerate(micro_batches, start=1):
            last = number == settings.accumulation
            compared = compare and last and self.every_slot
            with nullcontext() if last else accelerator.no_sync(self.objective):
                batch, output = self.loader.on_device(micro)
                loss: Loss = self.objective(batch, output, compare=compared)
                # Gradients are averaged over processes: divide by the goals of all of them, times their number
                accelerator.backward(loss.total * accelerator.num_processes / num_goals)
            losses.append(loss.total.detach())
        total = accelerator.reduce(torch.stack(losses).sum(), "sum") / num_goals
        finite = True
        if self.reads_at_once:
            total = total.cpu()
            finite = math.isfinite(total)
            if not finite:
                self._refuse_or_skip(self.step, float(total), micro_batches)
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), settings.limit)
        if finite:
            if not self.reads_at_once:  # weights stay finite until somebody reads the loss
                good = total.isfinite() & norm.isfinite()
                for parameter in self.objective.parameters():
                    if parameter.grad is not None:
                        parameter.grad.masked_fill_(~good, 0)
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        tokens = sum(int((micro.batch.documents >= 0).sum()) for micro in micro_batches) * self.num_processes
        rounds = None if loss.matches is None else count_rounds(micro.batch, loss.matches)
        return TrainingStep(self.step, total, norm.detach() if finite else None, tokens, rounds)

    def read_losses(self, unread: list[TrainingStep], loss: float) -> float:
        """Reads the losses of steps, and empties the list. -> the newest; `loss` if there is none. Raises NotFiniteLoss"""
        kept = [step for step in unread if step.norm is not None]
        unread.clear()
        if not kept:
            return loss
        losses = torch.stack([step.loss for step in kept]).tolist()
        for step, value in zip(kept, losses):
            if not math.isfinite(value):
                self._refuse_or_skip(step.number, value, self.loader.again(step.number))
        return losses[-1]

    def _refuse_or_skip(self, step: int, loss: float, micro_batches: list[MicroBatch]) -> None:
        """Names the rows of the step, in the log too, and raises NotFiniteLoss unless such steps are to be left out."""
        rows = [row for micro in micro_batches for pack in micro.rows for row in pack]
        rows = list(dict.fromkeys(gather_object(rows)))
        self.saving.wait()  # the sentence names the last state
        named = f"row{'s' * (len(rows) > 1)} {', '.join(rows[:6])}{', ...' if len(rows) > 6 else ''}"
        what = f"The loss is {loss} at step {step + 1} ({named})."
        if not self.settings.skip_not_finite:
            raise NotFiniteLoss(
                f"{what} Nothing of this step was kept; the last good state is that of step {self.folder.saved_step()}."
            )
        self.skipped += 1
        say(f"{what} The step is left out ({self.skipped} so far).")
        if self.accelerator.is_main_process:
            self.folder.log(step + 1, {"skipped": rows, "num_skipped": self.skipped})

    # What a run leaves behind

    def log(self, record: Callable[[int, dict], None], figures: dict) -> None:
        """To the log, and to whoever listens."""
        if self.accelerator.is_main_process:
            self.folder.log(self.step, figures)
            record(self.step, figures)

    def _frozen(self) -> Head:
        """A copy of the drafter in the target's dtype, to decode with and to save."""
        return self.drafter.decodable().to(dtype=self.drafter.target.dtype)

    def validate(self, record: Callable[[int, dict], None], *, required: bool) -> bool:
        """Judges the weights, saves a checkpoint of the better ones, and marks it if it is the best so far.

        -> whether train.patience is over
        """
        self.saving.wait()  # decoding is timed
        cost = self.cost()  # before decoding
        candidates = {"plain": self._frozen()}
        if self.average is not None:
            with self.average.applied():
                candidates["average"] = self._frozen()
        kind = self.validation.figure
        best = self.best.get("figure") if self.best.get("by", kind) == kind else None
        with self.waiting(f"the validation of step {self.step}", timed=False):
            judged = self.validation(candidates, step=self.step, trained=self.seconds, best=best, required=required)
        if judged is not None and self.accelerator.is_main_process:
            frozen, report = judged[0], replace(judged[1], training=cost)
            self.log(record, {"validation": report.to_json()})
            name = self.folder.save_checkpoint(frozen, report)
            figure = getattr(report, kind)
            if best is None or figure > best:
                self.best = {"figure": figure, "step": self.step, "by": kind}
                self.folder.mark_best(name)
            else:
                self.best["waited"] = self.best.get("waited", 0) + 1
            run_page.write(self.folder.path)
        with self.waiting(f"the validation of step {self.step}"):
            (waited,) = broadcast_object_list([self.best.get("waited", 0)])
        self.objective.train()
        over = self.settings.patience is not None and waited >= self.settings.patience
        if over:
            progress.note(f"step {self.step}: tau has not risen in {waited} validations, so training ends")
        return over

    def cost(self) -> Training:
        """Of the training so far, in all processes."""
        return Training(
            parameters=self.drafter.num_parameters(),
            tokens=self.seen,
            seconds=self.seconds,
            tokens_per_second=self.seen / self.seconds if self.seconds else None,
            peak_memory=read_peak_memory(self.accelerator.device),
            processes=self.accelerator.num_processes,
            unique_tokens=self.material.packs.num_tokens,
        )

    def _decode_best(self) -> None:
        """After the last step: decodes the checkpoint of the best step, if its report lacks what decoding gives."""
        found = self.folder.read_best() if self.accelerator.is_main_process else None
        with self.waiting("the best step"):
            best = broadcast_object_list([found])[0]
        if best is None or not self.validation.unfinished(best[1]):
            return
        name, report, weights = best
        frozen = self._frozen()
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
            states = (
                self.drafter.state_dict(),
                self.optimizer.state_dict(),
                self.average.state_dict() if self.average else {},
            )
            weights, optimizer, averaged = (copied_state(state) for state in states)
            scheduler = {key: value for key, value in self.scheduler.state_dict().items() if key != "lr_lambdas"}
            counters = {
                "packs": self.indices.read_before(self.step),
                "seen": self.seen,
                "seconds": self.seconds,
                "best": self.best,
                "skipped": self.skipped,
                "scheduler": scheduler,
                "validation": self.validation.seconds,
            }
            averaged = {AVERAGE + name: value for name, value in averaged.items()}
            self.saving.write(self.step, weights=weights | averaged, optimizer=optimizer, document=counters)


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; 0: none is."""
    return every > 0 and step % every == 0


# Signals that end a run soon, with a saved state


class Signals:
    """Within, `number` is the signal that has come, or 0. A second Ctrl-C raises KeyboardInterrupt at once.

    within: steps after which the run ends; speaks: whether this process says so
    """

    def __init__(self, *, within: int = 1, speaks: bool = True):
        self.number, self.speaks = 0, speaks
        self.when = "after this step" if within == 1 else f"within {within} steps"

    def __enter__(self) -> "Signals":
        self.previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _) -> None:
        if number == self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.number and self.speaks:
            text = f"{SIGNALS[signal.Signals(number)]}: stopping {self.when}."
            if number == signal.SIGINT:
                text += " Press Ctrl-C again to stop at once and lose the steps since the last save."
            os.write(2, f"{text}\n".encode())  # a print within another one would be an error ("reentrant call")
        self.number = number


class Asking:
    """Tells all processes of a signal that came to one of them, and of a state that the main one finds overdue."""

    def __init__(self, accelerator: Accelerator, waiting: Waiting):
        self.accelerator, self.waiting = accelerator, waiting
        self.within = 1 if accelerator.num_processes == 1 else ASK  # steps after which all know of a signal
        self.next = 0  # the step of the next question

    def __call__(self, number: int, overdue: bool, step: int, pace: float, *, now: bool) -> tuple[int, bool]:
        """-> the signal that has come to any process, 0 for none, and whether the main process finds a state overdue

        number, overdue: in this process; pace: seconds of a step; now: whether several processes ask now. Otherwise they
        do when it is time
        """
        if self.accelerator.num_processes == 1:
            return number, overdue
        if not now and step < self.next:
            return 0, False
        steps = max(1, min(ASK, int(ASK_SECONDS / pace))) if pace else ASK
        with self.waiting(f"step {step}"):
            mine = torch.tensor([[number, overdue, steps]], device=self.accelerator.device)
            said = self.accelerator.gather(mine).tolist()  # [P][3]
        self.next = step + said[0][2]  # as the main process says
        return max(row[0] for row in said), bool(said[0][1])


# What a run shows of its steps


class StepLine:
    """Loss, text tau over the last shown steps, tokens/s since the last validation, time left. done: steps before these"""

    def __init__(self, *, steps: int, done: int):
        self.steps, self.first, self.seconds, self.pace = steps, done, 0.0, 0.0  # pace: seconds of a step
        self.rounds: collections.deque[tuple[int, float]] = collections.deque(maxlen=SHOWN)
        self.restart()

    def restart(self) -> None:
        """Tokens/s count from here."""
        self.clock, self.tokens = time.perf_counter(), 0

    def advance(self, step: TrainingStep, loss: float, seconds: float) -> tuple[str, dict]:
        """One step is done, in so many seconds. -> the line, and the figures of it that are logged"""
        self.tokens, self.seconds = self.tokens + step.tokens, self.seconds + seconds
        done = step.number + 1
        self.pace = self.seconds / (done - self.first)
        if step.rounds is not None:
            self.rounds.append(step.rounds)
        emitted, rounds = (sum(counts) for counts in zip(*self.rounds)) if self.rounds else (0, 0.0)
        tau = {"tau": emitted / rounds} if rounds else {}
        rate = self.tokens / (time.perf_counter() - self.clock)
        left = progress.duration((self.steps - done) * self.pace)
        worth = f"text tau {tau['tau']:.3f}  " if tau else ""
        line = f"loss {loss:.4f}  {worth}{rate:,.0f} tokens/s  {left} left"
        return line, {"loss": loss, **tau, "tokens_per_second": rate}


def count_rounds(batch: TrainingBatch, matches: Tensor) -> tuple[int, float]:
    """A greedy chain over the batch's own text, in which a draft counts if it is the text's token; matches [K, B, T].

    -> emitted tokens and rounds, whose ratio is tau
    """
    emitted, rounds = 0, 0.0
    matches = matches.cpu().float()
    for row in range(batch.tokens.shape[0]):
        for start, stop in answers(batch.on_host, row):
            emitted += stop - start - 1
            rounds += replay.rounds(by_start(matches[:, row, start:stop]))[0]
    return emitted, rounds


def read_peak_memory(device: torch.device) -> int:
    """Most bytes so far: of the device, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
