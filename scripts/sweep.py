"""Decodes the same prompts in batches of several sizes, plainly and with each checkpoint's drafts, to see where drafts stop paying.

    python scripts/sweep.py checkpoint=checkpoints/shipped/mtp batches=1,4,16 decode.depth=3 out=sweep

Rows whose answers have ended stay in their batch; the emitted tokens count. Writes OUT/sweep.png and, after every batch
size, a row of OUT/cells.jsonl: after Ctrl-C the same command continues, and one with other batches= adds to it.
"""

from helpers import decoding, loading
from helpers.loading import Run
from helpers.options import option, options, split
from helpers.options import run as run_command

from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.console
import rich.table
from matplotlib import colormaps
from matplotlib.figure import Figure

from specdec.core.generation import Generation
from specdec.decoding.drafting import Drafting
from specdec.measuring.batching import BatchComparison, group_prompts
from specdec.measuring.comparing import Method, decode_batches
from specdec.measuring.figures import TAU
from train import progress
from train.answers.resumable import digest, resumable
from train.data import reading

MEANING = (
    "tokens/s: of all rows together; ms/token: of one row; all without the prompts' passes and compiling. speedup: the "
    f"median of the ratios of decodings next to each other, with the smallest and the largest ratio. tau: {TAU}"
)
Cells = dict[int, dict[str, BatchComparison]]  # by batch size and Run.name


@dataclass(frozen=True, kw_only=True)
class Sweep(loading.PromptOptions):
    checkpoint: str = field(metadata={"help": loading.CHECKPOINTS})
    batches: str = option("1,2,4,8,16,32", "comma list of batch sizes")
    limit: int = option(32, "use this many prompts, spread over the file; larger batches repeat them")
    max_new_tokens: int = 32
    groups: int = option(4, "largest number of batches of a size")
    repeats: int = option(2, "decode every batch this many times")
    ignore_stop: bool = option(True, "answers go on after stop tokens, so that batches are comparable")
    out: str = option("sweep", "folder for cells.jsonl and sweep.png", folder=True)
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.DecodeOptions = field(default_factory=decoding.DecodeOptions)


def main() -> None:
    chosen = options(Sweep, __doc__)
    console = progress.Results()
    loading.use_threads(Path(chosen.out) / "settings.json")
    sizes, sampling, drafting = read_sizes(chosen), chosen.decode.sampling(), chosen.decode.drafting()
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    opened = loading.open_target(runs[0].drafter.target)
    stop = set() if chosen.ignore_stop else opened.stop
    prompts = [prompt.tokens for prompt in loading.load_prompts(chosen, opened, split(chosen.checkpoint))]
    settings = describe(chosen, runs, drafting, prompts)
    out = Path(chosen.out)
    with resumable(
        out / "settings.json", out / "cells.jsonl", settings, advice="Choose another out=FOLDER."
    ) as results:
        results.same(target=opened.target.fingerprint())
        done = [row["batch"] for row in results.rows]
        progress.note(f"batch sizes {', '.join(map(str, done)) or 'none'} are in {out} already")
        try:
            for size in [size for size in sizes if size not in done]:
                trials = decode(chosen, runs, prompts, stop, size)
                results.append({"batch": size, "runs": summarise(trials, runs)})
        finally:
            if results.rows:
                stop_tokens = "ignored" if chosen.ignore_stop else "heeded"
                conditions = (
                    f"{loading.conditions(opened.target)}; {drafting.shape}, temperature {sampling.temperature:g}; "
                    f"{chosen.max_new_tokens} new tokens a row, stop tokens {stop_tokens}"
                )
                show(out, runs, results.rows, conditions, console)


def read_sizes(chosen: Sweep) -> list[int]:
    """The batch sizes. Raises ValueError for options that leave nothing to measure."""
    try:
        sizes = sorted({int(part) for part in split(chosen.batches)})
    except ValueError:
        raise ValueError(f"batches={chosen.batches}: give numbers, such as 1,4,16.") from None
    if not split(chosen.checkpoint):
        raise ValueError("There is nothing to measure: give checkpoint=DIR.")
    if not sizes or min(*sizes, chosen.max_new_tokens - 1) < 1:
        raise ValueError("batches must be at least 1, and max_new_tokens at least 2.")
    return sizes


def describe(chosen: Sweep, runs: list[Run], drafting: Drafting, prompts: list[list[int]]) -> dict:
    """The settings that all cells have in common."""
    return {
        **{name: value for name, value in asdict(chosen).items() if name not in ("batches", "out")},
        "drafting": asdict(drafting),
        "weights": [digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs],
        "prompts_digest": digest(repr(prompts).encode()),
        **loading.machine(runs[0].drafter.target),
    }


def decode(
    chosen: Sweep, runs: list[Run], prompts: list[list[int]], stop: set[int], size: int
) -> list[dict[str, Generation]]:
    """Groups of one size, plainly and with every run's drafts. -> for each group the decodings by name or baseline"""
    drafting = chosen.decode.drafting()
    groups = reading.spread(group_prompts(prompts, size), chosen.groups)
    methods = [
        Method(run.name, run.drafter.target, drafting.proposer(run.drafter), drafting, drafting.depth, run.baseline)
        for run in runs
    ]
    return decode_batches(
        methods,
        [group for group in groups for _ in range(chosen.repeats)],
        sampling=chosen.decode.sampling(),
        stop=stop,
        max_new_tokens=chosen.max_new_tokens,
        progress=lambda groups: progress.track(groups, f"batch {size}", unit="batches"),
    )


def summarise(trials: list[dict[str, Generation]], runs: list[Run]) -> dict[str, dict]:
    """A cell for each run, for JSON."""
    try:
        return {
            run.name: BatchComparison.of(
                [trial[run.baseline] for trial in trials], [trial[run.name] for trial in trials]
            ).to_json()
            for run in runs
        }
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}: set ignore_stop=true.") from None


def show(out: Path, runs: list[Run], rows: list[dict], conditions: str, console: rich.console.Console) -> None:
    """Draws OUT/sweep.png and prints the tables."""
    cells = {
        row["batch"]: {name: BatchComparison.from_json(cell) for name, cell in row["runs"].items()}
        for row in sorted(rows, key=lambda row: row["batch"])
    }
    picture(runs, cells, conditions).savefig(out / "sweep.png", dpi=130)
    console.print(*(table(run.name, cells) for run in runs), f"{conditions}. {MEANING}")
    console.print(f"written: {out}/cells.jsonl, {out}/sweep.png")


def table(name: str, cells: Cells) -> rich.table.Table:
    paying = ", ".join(str(size) for size, column in cells.items() if column[name].speedup > 1)
    title = f"\n{name}, plain -> drafted; faster at batch sizes: {paying or 'none'}"
    table = rich.table.Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("batch size", "tokens/s", "ms/round", "ms/token", "tau", "speedup", "smallest", "largest"):
        table.add_column(heading, justify="right")
    for size, column in cells.items():
        cell = column[name]
        pairs = [
            f"{getattr(cell.plain, key):.1f} -> {getattr(cell.drafted, key):.1f}"
            for key in ("tokens_per_second", "ms_per_round", "ms_per_token")
        ]
        ratios = (cell.drafted.tau, cell.speedup, min(cell.ratios), max(cell.ratios))
        table.add_row(str(size), *pairs, *(f"{ratio:.2f}" for ratio in ratios))
    return table


def picture(runs: list[Run], cells: Cells, conditions: str) -> Figure:
    """tokens/s and speedup by batch size; a checkpoint has the same colour in both panels."""
    drawing = Figure(figsize=(11, 5), layout="constrained")
    left, right = drawing.subplots(1, 2)
    for baseline, name in {run.baseline: run.name for run in runs}.items():
        rates = [column[name].plain.tokens_per_second for column in cells.values()]
        left.plot([*cells], rates, "s--", mfc="white", color="0.4", label=f"plain, {baseline}")
    for run, colour in zip(runs, colormaps["tab10"].colors * len(runs)):
        columns = [column[run.name] for column in cells.values()]
        left.plot([*cells], [cell.drafted.tokens_per_second for cell in columns], "o-", color=colour, label=run.name)
        right.plot([*cells], [cell.speedup for cell in columns], "o-", color=colour)
        ends = [(min(cell.ratios), max(cell.ratios)) for cell in columns]
        right.vlines([*cells], *zip(*ends), color=colour, alpha=0.6)
    right.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
    for axes, label in ((left, "tokens/s, all rows together"), (right, "speedup over plain decoding")):
        axes.set(xlabel="batch size", ylabel=label, xscale="log", xticks=[*cells], xticklabels=[*cells])
        axes.minorticks_off()
    left.set_ylim(0)
    drawing.legend(loc="outside upper left", ncols=4, frameon=False)
    drawing.supxlabel(f"{conditions}; bars: smallest to largest ratio", fontsize=8, color="0.4")
    return drawing


if __name__ == "__main__":
    run_command(main)
