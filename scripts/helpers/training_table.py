"""Costs of training steps by length, as a table and as a picture."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One head at one length in one working tree. The figures are those of training_step.Cost; None: not measured"""

    tree: str
    head: str
    length: int
    error: str | None = None  # why there are no figures
    tokens_per_second: float | None = None
    seconds: float | None = None  # of a step, the median
    seconds_all: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    state_bytes: int | None = None
    parameters: int | None = None
    flops: float | None = None
    mfu: float | None = None


def read(path: Path) -> list[Cell]:
    """The cells of a file that bench_training.py wrote. Raises ValueError for another file."""
    try:
        return [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]
    except (KeyError, TypeError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be used ({error}): give a file that bench_training.py out= wrote.") from error


def markdown(cells: list[Cell]) -> str:
    """A row for each head and length; "grew" says how many times the figure of the length before it."""
    rows = ["| head | tree | tokens | tokens/s | s a step | grew | GB above the weights | grew | MFU |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    before: dict[tuple[str, str], Cell] = {}
    for cell in sorted(cells, key=lambda cell: (cell.head, cell.tree, cell.length)):
        if cell.tokens_per_second is None:
            rows.append(f"| {cell.head} | {cell.tree} | {cell.length:,} | {cell.error} | | | | | |")
            continue
        last = before.get((cell.head, cell.tree))
        before[cell.head, cell.tree] = cell
        time, memory = (_growth(cell, last, name) for name in ("seconds", "peak_bytes"))
        mfu = "" if cell.mfu is None else f"{cell.mfu:.1%}"
        rows.append(
            f"| {cell.head} | {cell.tree} | {cell.length:,} | {cell.tokens_per_second:,.0f} | {cell.seconds:.3g} | {time} | "
            f"{(cell.peak_bytes or 0) / 1e9:.2f} | {memory} | {mfu} |"
        )
    return "\n".join(rows)


def _growth(cell: Cell, last: Cell | None, name: str) -> str:
    earlier = None if last is None else getattr(last, name)
    return f"{getattr(cell, name) / earlier:.2f}" if earlier else ""


def draw(cells: list[Cell], path: Path, *, title: str) -> None:
    """Memory and time by length, a line for each head in each tree; the first tree's lines are dashed if there are more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    trees, heads = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("tree", "head"))
    for place, head in enumerate(heads):
        for tree in trees:
            points = sorted(
                (cell.length, cell.peak_bytes / 1e9, cell.seconds)
                for cell in cells
                if (cell.tree, cell.head) == (tree, head) and cell.seconds and cell.peak_bytes is not None
            )
            if points:
                lengths, memory, seconds = zip(*points)
                style = {"linestyle": "--" if tree == trees[0] and len(trees) > 1 else "-", "marker": "o"}
                for axis, values in zip(axes, (memory, seconds)):
                    axis.plot(lengths, values, color=f"C{place}", label=f"{head}, {tree}", **style)
    for axis, label in zip(axes, ("GB above the weights", "seconds a step")):
        axis.set(xscale="log", yscale="log", xlabel="tokens in a pack", ylabel=label)
        ticks = sorted({cell.length for cell in cells})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
