"""Trains a drafter; validation decodes.

accelerate launch train.py head=eagle
python train.py -m head=eagle3,mtp optimizer.lr=1e-3,2e-3    one run after the other (docs/tracking.md)
"""

import specdec.core.threads  # noqa: F401  says how threads wait, before torch is imported

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specdec import checkpoint
from specdec.core import files, progress
from specdec.core.closed_pipe import end_at_closed_pipe
from specdec.core.lock import hold_lock
from train.loop.state import RunFolder
from train.loop.trainer import advise_resuming
from train.prepare import build
from train.prepare.facts import MeasuredFacts
from train.processes import ProcessLost, is_main, print_main, shorten_warnings
from train.settings import hydra_text, multirun, usage
from train.settings.decide import decide
from train.settings.options import RunConfig, list_fixed_settings
from train.show import display, run_page, tracking

# Seconds that other processes wait with an error, so that the main one tells it. The launcher then ends them.
SECONDS_FOR_MAIN_PROCESS = 10
JOBS = multirun.Multirun()


def fit(composed: DictConfig) -> int:
    """Trains a drafter by its options. -> the exit status. Raises ValueError, which says what to change."""
    options = hydra_text.read_composed(composed)
    path = Path("checkpoints") / options.run
    progress.choose_mode(options.progress, main=is_main())
    if options.plan:
        print_main(build.show_plan(options, path))
        return 0
    options = build.fill_from_first_launch(options, path)
    if RunFolder(path, {}, list_fixed_settings(options.document())).check_start(resume=options.resume):
        print_main(f"{path} holds a finished run: there is nothing left to do.")
        return 0
    tracking.check_installed(options.tracker)
    processes = build.start_processes(options)
    exclusive_lock = hold_lock(path / "lock", resource=path) if processes.is_main_process else contextlib.nullcontext()
    with exclusive_lock, build.name_remedies(options):
        facts = MeasuredFacts(build.pin_start(options, path), processes)
        decided = decide(facts.options, facts)
        build.print_decisions(decided)
        with build.name_remedies(decided.config):
            return train(decided.config, facts, path, start=options.start)


def train(config: RunConfig, facts: MeasuredFacts, path: Path, *, start: str | None) -> int:
    """Builds the trainer, and trains to the last step. -> the exit status. start: the user's `start`"""
    accelerator, console = build.start_accelerator(config), progress.Results()
    trainer = build.make_trainer(config, facts, path=path, accelerator=accelerator, console=console)
    tracker = tracking.Tracking(config.tracker if accelerator.is_main_process else "none", path)
    if not (config.resume and trainer.resume()):
        trainer.prepare_weights(config.solve_packs if config.start is None else 0, fresh=config.start is None)
    if accelerator.is_main_process:
        build.record_run(config, trainer, arguments=sys.argv[1:], start=start)
    with tracker.running(config.run, trainer.folder.settings):
        with advise_resuming():
            trainer.fit(tracker.record)
        if accelerator.is_main_process and trainer.best:
            page = run_page.write_run_page(path)
            console.say(f"report: {page}")
            tracker.log(trainer.step, "best", checkpoint.read_json(page.with_name("report.json")))
    display.print_end(console, trainer)
    return 130 if trainer.stop_signal == signal.SIGINT else 0  # a scheduler that stops a run takes 0 as success


def run_command(composed: DictConfig) -> int | str:
    """Calls `fit`, and ends the group of processes. -> the exit status, or the sentence of an error"""
    status: int | str
    try:
        with end_at_closed_pipe(), shorten_warnings():
            status = fit(composed)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (ValueError, OSError) as error:
        if not is_main() and not isinstance(error, ProcessLost):
            time.sleep(SECONDS_FOR_MAIN_PROCESS)
        status = f"error: {files.describe_error(error) if isinstance(error, OSError) else error}"
    except KeyboardInterrupt:
        print("Stopped at once. resume=true continues from the last save.", file=sys.stderr)
        status = 130
    finally:
        progress.close_display()
    return status


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float:
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return JOBS.run_job(composed.run, job.overrides.task)
    sys.exit(run_command(composed))


def start(arguments: list[str]) -> None:
    """Trains by a command line, or prints the help. Raises SystemExit with the status, or with a sentence."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, usage.describe_usage(), sep="\n")
        sys.exit()
    is_multirun = multirun.asks_for_multirun(arguments)
    written = hydra_text.quote_arguments(hydra_text.expand_plan(arguments), multirun=is_multirun)
    refusal = multirun.refuse_launcher(arguments) if is_multirun else None
    if refusal := refusal or usage.refuse_arguments(written):
        sys.exit(f"error: {refusal}")
    JOBS.arguments = written
    sys.argv[1:] = [*written, hydra_text.make_search_path()]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors in place of printing them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {usage.describe_composing_error(error)}")
    except KeyboardInterrupt:
        sys.exit(multirun.STOPPED_STATUS)
    print(JOBS.describe_end())
    sys.exit(1 if JOBS.failed else 0)


if __name__ == "__main__":
    with end_at_closed_pipe():
        start(sys.argv[1:])
