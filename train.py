"""Trains a drafter; validation decodes.

accelerate launch train.py head=eagle
for head in eagle mtp; do accelerate launch train.py head=$head; done    several; specdec evaluate compares them (docs/tracking.md)
"""

import specdec.core.threads  # noqa: F401  says how threads wait, before torch is imported

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec import checkpoint
from specdec.core import files, progress
from specdec.core.lock import lock
from train.loop.state import RunFolder
from train.loop.trainer import continuing
from train.prepare import build
from train.prepare.facts import MeasuredFacts
from train.processes import ProcessLost, is_main, plain_warnings, say
from train.settings import hydra_text, usage
from train.settings.decide import decide
from train.settings.options import RunConfig, RunOptions, fixed_settings, read_run
from train.show import display, run_page, tracking

# An error that all processes find is told by the main one, and the launcher then ends the others. They wait so long with theirs.
SECONDS_FOR_MAIN = 10
MANY = (
    "error: one launch trains one run. For several use a loop: for head in eagle mtp; do accelerate launch train.py head=$head; "
    "done. Then specdec evaluate checkpoint=A,B compares them."
)


def fit(composed: DictConfig) -> int:
    """Trains as the options say. -> the exit status. Raises ValueError, which says what to change."""
    options = read(composed)
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


def read(composed: DictConfig) -> RunOptions:
    """The options of a run. Raises ValueError, naming the option, for what cannot be used."""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    return read_run(values)


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


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(chosen: DictConfig) -> None:
    status: int | str
    try:
        with plain_warnings():
            status = fit(chosen)
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
    sys.exit(status)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, usage.usage(), sep="\n")
        sys.exit()
    if {"-m", "--multirun"} & set(sys.argv):
        sys.exit(MANY)
    sys.argv[1:] = [*hydra_text.as_written(hydra_text.with_plan(sys.argv[1:])), hydra_text.search_path()]
    try:
        main()
    except SystemExit as ended:  # Hydra has said that it does not know an option, without saying which one is like it
        if ended.code == 1 and (wrong := usage.unknown(sys.argv[1:])):
            ended.code = wrong
        raise
