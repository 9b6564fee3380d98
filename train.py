"""Trains a drafter; validation decodes.

accelerate launch train.py head=eagle
for head in eagle mtp; do accelerate launch train.py head=$head; done    several; specdec evaluate compares them (docs/tracking.md)
"""

import specdec.core.threads  # noqa: F401  says how threads wait, before torch is imported

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
import yaml
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec import checkpoint
from specdec.core import devices, files, progress
from specdec.core.lock import lock
from specdec.measuring import trained_prompts
from specdec.target.model import Target
from train.loop.state import RunFolder
from train.loop.trainer import NotFiniteLoss
from train.prepare import build
from train.prepare import facts as prepare
from train.prepare.facts import Prepared
from train.processes import ProcessLost, is_main, plain_warnings
from train.settings import hydra_text, record, usage
from train.settings.options import RunConfig, fixed_settings, refuse_two_lengths
from train.show import display, run_page, tracking

# An error that all processes find is told by the main one, and the launcher then ends the others. They wait so long with theirs.
SECONDS_FOR_MAIN = 10
MANY = (
    "error: one launch trains one run. For several use a loop: for head in eagle mtp; do accelerate launch train.py head=$head; "
    "done. Then specdec evaluate checkpoint=A,B compares them."
)


def fit(chosen: DictConfig) -> int:
    """Trains as the configuration says. -> the exit status. Raises ValueError, which says what to change."""
    try:
        values: Any = OmegaConf.to_container(chosen, resolve=True, throw_on_missing=True)
        refuse_two_lengths(values)
        config = RunConfig.of(values)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    path = Path("checkpoints") / config.run
    progress.choose(config.progress, main=is_main())
    if config.plan:
        text = prepare.show_plan(config, path)
        if is_main():
            print(text)
        return 0
    config = build.recall(config, path)
    if RunFolder(path, {}, fixed_settings(config.document())).check(resume=config.resume):
        if is_main():
            print(f"{path} holds a finished run: there is nothing left to do.")
        return 0
    tracking.check(config.tracker)
    accelerator, config = build.start_processes(config)
    alone = lock(path / "lock", of=path) if accelerator.is_main_process else contextlib.nullcontext()
    with alone, saying_less(config):
        return fit_alone(config, path, accelerator)


@contextlib.contextmanager
def saying_less(config: RunConfig) -> Iterator[None]:
    """Within, memory that does not suffice ends in a sentence with the options that lower what is needed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (full := devices.out_of_memory(error)) is None:
            raise
        raise ValueError(f"{full}: {config.less_memory()}.") from error


def fit_alone(config: RunConfig, path: Path, accelerator: Accelerator) -> int:
    """`fit` in a folder that no other launch writes to."""
    given, config = config.start, build.pin_start(config, path)
    load = lambda chosen: build.load_target(chosen, accelerator)
    prepared = prepare.prepare(config, accelerator.device, accelerator.num_processes, load)
    target = prepared.target or load(prepared.config)
    prepared, _ = prepare.choose_steps(prepared, target, accelerator)
    with saying_less(prepared.config):
        return train(prepared, target, path, accelerator, given)


def train(prepared: Prepared, target: Target, path: Path, accelerator: Accelerator, given: str | None) -> int:
    """From what has been decided to the last step. given: `start` as the user wrote it"""
    config, console, main = prepared.config, progress.Results(), accelerator.is_main_process
    assert prepared.tokenizer is not None and prepared.packs is not None
    parts = config, prepared.tokenizer, prepared.heldout, prepared.packs, target
    trainer = build.make_trainer(*parts, path=path, accelerator=accelerator, console=console)
    tracker = tracking.Tracking(config.tracker if main else "none", path)
    if not (config.resume and trainer.resume()):
        trainer.prepare(config.solve_packs if config.start is None else 0, fresh=config.start is None)
    if main:
        document = config.document()
        files.write_text(path / "config.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        about = {"arguments": sys.argv[1:], "num_processes": accelerator.num_processes, "start": given}
        record.write(
            path, document, trainer.drafter, trainer.material.packs, **about, num_trained=trainer.validation.num_trained
        )
        trained_prompts.write(path, trained_prompts.join(prepared.packs.prompt_digests, config.start))
    with tracker.running(config.run, trainer.folder.settings):
        try:
            trainer.fit(tracker.record)
        except NotFiniteLoss as error:
            raise ValueError(
                f"{error} Look at these rows, lower optimizer.lr or train.max_grad_norm, or leave such steps out with "
                "train.skip_not_finite=true; then use resume=true."
            ) from error
        except ProcessLost as error:
            raise ProcessLost(f"{error} Continue with resume=true.") from error
        except ValueError as error:
            raise ValueError(f"{error} Then continue with resume=true.") from error
        if main and trainer.best:
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
