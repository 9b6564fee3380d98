"""Trains a drafter; validation decodes.

accelerate launch train.py head=eagle
python train.py -m head=eagle3,mtp optimizer.lr=1e-3,2e-3    several, one after the other; the same command continues (docs/tracking.md)
"""

import specdec.core.threads  # noqa: F401  says how threads wait, before torch is imported

import contextlib
import signal
import sys
import time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specdec import checkpoint
from specdec.core import files, progress
from specdec.core.lock import lock
from train.loop.state import RunFolder
from train.loop.trainer import continuing
from train.prepare import build
from train.prepare.facts import MeasuredFacts
from train.processes import ProcessLost, is_main, plain_warnings, say
from train.settings import hydra_text, multirun, usage
from train.settings.decide import decide
from train.settings.options import RunConfig, fixed_settings
from train.show import display, run_page, tracking

# An error that all processes find is told by the main one, and the launcher then ends the others. They wait so long with theirs.
SECONDS_FOR_MAIN = 10


def fit(composed: DictConfig) -> int:
    """Trains as the options say. -> the exit status. Raises ValueError, which says what to change."""
    options = hydra_text.read_composed(composed)
    path = Path("checkpoints") / options.run
    progress.choose(options.progress, main=is_main())
    if options.plan:
        say(build.show_plan(options, path))
        return 0
    options = build.recall(options, path)
    if RunFolder(path, {}, fixed_settings(options.document())).check(resume=options.resume):
        say(f"{path} holds a finished run: there is nothing left to do.")
        return 0
    tracking.check(options.tracker)
    processes = build.start_processes(options)
    alone = lock(path / "lock", of=path) if processes.is_main_process else contextlib.nullcontext()
    with alone, build.naming_remedies(options):
        facts = MeasuredFacts(build.pin_start(options, path), processes)
        decided = decide(facts.options, facts)
        build.say_decisions(decided)
        with build.naming_remedies(decided.config):
            return train(decided.config, facts, path, start=options.start)


def train(config: RunConfig, facts: MeasuredFacts, path: Path, *, start: str | None) -> int:
    """From what has been decided to the last step. start: as the user wrote it"""
    accelerator, console = build.start_accelerator(config), progress.Results()
    trainer = build.make_trainer(config, facts, path=path, accelerator=accelerator, console=console)
    tracker = tracking.Tracking(config.tracker if accelerator.is_main_process else "none", path)
    if not (config.resume and trainer.resume()):
        trainer.prepare(config.solve_packs if config.start is None else 0, fresh=config.start is None)
    if accelerator.is_main_process:
        build.record_run(config, trainer, arguments=sys.argv[1:], start=start)
    with tracker.running(config.run, trainer.folder.settings):
        with continuing():
            trainer.fit(tracker.record)
        if accelerator.is_main_process and trainer.best:
            page = run_page.write(path)
            console.say(f"report: {page}")
            tracker.log(trainer.step, "best", checkpoint.read_json(page.with_name("report.json")))
    display.end(console, trainer)
    return 130 if trainer.interrupted == signal.SIGINT else 0  # a scheduler is to see that all is well


def run(composed: DictConfig) -> int | str:
    """`fit`, after which the processes part. -> the exit status, or the sentence of an error"""
    status: int | str
    try:
        with plain_warnings():
            status = fit(composed)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (ValueError, OSError) as error:
        if not is_main() and not isinstance(error, ProcessLost):
            time.sleep(SECONDS_FOR_MAIN)
        status = f"error: {files.explain(error) if isinstance(error, OSError) else error}"
    except KeyboardInterrupt:
        print("Stopped at once. resume=true continues from the last save.", file=sys.stderr)
        status = 130
    finally:
        progress.close()
    return status


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float:
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return JOBS.run_job(composed.run, job.overrides.task)
    sys.exit(run(composed))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, usage.usage(), sep="\n")
        sys.exit()
    several = multirun.is_asked_for(sys.argv[1:])
    if several and (refusal := multirun.refuse_launcher(sys.argv[1:])):
        sys.exit(refusal)
    arguments = hydra_text.with_plan(sys.argv[1:])
    if refusal := usage.refuse_choices(arguments):
        sys.exit(refusal)
    written = hydra_text.as_written(arguments, multirun=several)
    JOBS = multirun.Multirun(written)
    sys.argv[1:] = [*written, hydra_text.search_path()]
    try:
        main()
        print(JOBS.describe_end())
        sys.exit(1 if JOBS.failed else 0)
    except KeyboardInterrupt:
        sys.exit(multirun.STOPPED)
    except SystemExit as ended:  # Hydra has said that it does not know an option, without saying which one is like it
        if ended.code == 1 and (wrong := usage.unknown(sys.argv[1:])):
            ended.code = wrong
        raise
