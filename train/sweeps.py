"""Names of runs, and sweeps: `python train.py -m head=eagle,mtp optimizer.lr=1e-4,3e-4`.

Each job of a sweep is a run in the folder of the sweep, and one page compares them at the end.

What a job must know stands in its own configuration, so this works with every launcher of Hydra.
"""

import gc
import hashlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specdec.core import files
from train.distributed import ProcessLost, is_main, num_processes
from train.overrides import literal, quoted
from train.pages import comparison_page

RUNS = Path("checkpoints")
FAILED = "failed"  # a file in the folder of a job: why it failed
LONGEST = 120  # characters of a job's name, or of a target in the name of a run


class Sweep(Callback):
    """conf/train.yaml, `hydra.callbacks.sweep`."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Names the folder of the sweep, and says to the jobs what they differ in."""
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [each.key_or_group for each in overrides if each.is_sweep_override()]
        fixed = {each.key_or_group: each.value() for each in overrides if not each.is_sweep_override()}
        if "run" in swept:
            sys.exit("error: run= names the folder of the sweep, so give it one value.")
        given = OmegaConf.create({"run": fixed.get("run")}).run  # without what keeps ${ as it is
        folder = str(RUNS / str(given or "-".join(["sweep", *map(plain, swept)])))
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = literal(folder)
            config.hydra.overrides.hydra += [
                f"hydra.sweep.dir={quoted(folder)}",
                f"hydra.job.config.override_dirname.exclude_keys={[*fixed, 'resume']}",
            ]
            if "resume" not in fixed:
                config.hydra.overrides.task += ["resume=auto"]

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Writes the page, and names the jobs that failed. Exits with a sentence if there are any."""
        if is_main():
            folder = Path(config.hydra.sweep.dir)
            failed = {path.parent.name: path.read_text().strip() for path in sorted(folder.glob(f"*/{FAILED}"))}
            try:
                if comparison_page.runs_in(folder):
                    print(f"comparison: {comparison_page.write(folder)}")
            except (ValueError, OSError) as error:
                sys.exit(f"error: the comparison page could not be written: {error}")
            if failed:
                lines = "\n".join(f"  {job}: {why}" for job, why in failed.items())
                sys.exit(f"failed, and tried again by the same command ({len(failed)}):\n{lines}")


def plain(text: str) -> str:
    """Without what has a meaning in paths and options."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


def target_name(name: object) -> str:
    """A target, in the name of a run: the last part of its own name. Qwen/Qwen3-8B and models/Qwen3-8B/ give Qwen3-8B."""
    path = Path(str(name))
    last = path.name if path.name not in ("", "..") else path.resolve().name
    return plain(last)[:LONGEST] or "target"


OmegaConf.register_new_resolver("target_name", target_name, replace=True)  # in conf/


def run_of(hydra: Any) -> str | None:
    """The name of the run that a job of a sweep is, under checkpoints/: the sweep, and what the job differs in. None: no sweep.

    hydra: HydraConfig.get()
    """
    if OmegaConf.is_missing(hydra.job, "num"):
        return None
    name = plain(hydra.job.override_dirname) or "job"
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return str(Path(hydra.sweep.dir).relative_to(RUNS) / name)


def arguments(run: str) -> list[str]:
    """Arguments of train.py that repeat this run, as one of a sweep too. run: its name"""
    if HydraConfig.initialized() and run_of(HydraConfig.get()) is not None:
        given = HydraConfig.get().overrides.task
        return [each for each in given if not each.startswith("run=")] + [f"run={run}"]
    return sys.argv[1:]


def run_job(fit: Callable[[DictConfig], int], config: DictConfig) -> None:
    """`fit`, as one of several jobs of a process: a failure is written to the job's folder and the next job begins.

    An interrupted job ends the sweep, and so does a failure that other processes of the job may not know of.
    """
    folder, why, status = RUNS / config.run, "", 0
    if is_main():
        (folder / FAILED).unlink(missing_ok=True)
    try:
        status = fit(config)
    except KeyboardInterrupt:
        print("Stopped at once. The same command continues the sweep.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        known = isinstance(error, ValueError | OSError) and not isinstance(error, ProcessLost)
        why = files.explain(error) if isinstance(error, OSError) else str(error)
        if not known:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            if num_processes() > 1:
                sys.exit(f"error: {why}")
    if not why and PartialState._shared_state:  # the main process may still be writing
        PartialState().wait_for_everyone()
    release()
    if why and is_main():
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / FAILED, why + "\n")
        print(f"{config.run} failed: {why}")
    if not why and not (folder / "finished").exists():
        sys.exit(status)


def release() -> None:
    """Gives back what the job before has left in this process: settings of accelerate, and memory."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if PartialState._shared_state.get("num_processes", 1) == 1:  # else its group serves the next job too
        PartialState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
