"""Draws tau against the tokens that training has read, and the law that is fitted to it: what would more data bring?

    python scripts/data_law.py runs=checkpoints/eagle3-100k,checkpoints/eagle3-1m,checkpoints/eagle3-5m out=data_law

A run is a folder under checkpoints. Each gives one point, its best checkpoint; runs of drafters with as many parameters are one
curve. The law is fitted to all points of a curve but the largest, which shows how well it predicts. A single run gives all
its validations instead: those before its learning rate has fallen lie lower than a run that ends there.
The tokens of a run that was continued from another one with start= are added to that one's. Writes OUT/data_law.json and
OUT/data_law.png.
"""

from helpers.options import option, options, run, split
from helpers.settings_file import read_yaml

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.table
from matplotlib.figure import Figure

from specdec import checkpoint
from specdec.core import hub
from specdec.core.files import write_text
from specdec.measuring.report import Report
from train import progress
from train.answers.resumable import read_rows
from train.data.data_law import DataLaw, Point, fit, in_millions, points_of

FEWEST = 0.01  # of the largest tokens: where the drawn law begins, at most
STEPS = 60  # of the drawn law


@dataclass(frozen=True)
class DataLawOptions:
    runs: str = field(metadata={"help": "comma list of folders of runs, such as checkpoints/eagle3"})
    out: str = option("data_law", "folder for data_law.json and data_law.png", folder=True)


@dataclass(frozen=True)
class Curve:
    """Drafters of one size, the fewest tokens first."""

    name: str
    depth: int
    points: list[Point]

    @property
    def law(self) -> DataLaw | None:
        """Of all points but the largest."""
        return fit(self.points[:-1], depth=self.depth)


def read(folders: list[str]) -> list[Curve]:
    """Raises ValueError for a folder without validations, and for runs that were judged with drafts of different lengths."""
    found: dict[str, list[Point]] = {}
    depths = set()
    for folder in folders:
        path = Path(folder)
        if not (path / "best").exists():
            raise ValueError(
                f"{folder} holds no validated run (it has no file best). Name folders of runs, such as checkpoints/eagle3."
            )
        best = checkpoint.resolve(path / "best")
        report = Report.from_json(checkpoint.read_json(best / "report.json"), source=str(best / "report.json"))
        spent, survival = report.training, report.replayed_survival or report.survival
        tau = report.replayed_tau or report.tau
        if spent is None or not spent.tokens or spent.parameters is None or survival is None or tau is None:
            raise ValueError(f"{best / 'report.json'} does not say how many tokens were read, or what they brought.")
        depths.add(len(survival))
        spec = checkpoint.read_json(best / "drafter.json")
        kind = str(spec.get("_target_", spec.get("head", "drafter"))).rsplit(".", 1)[-1]
        name = f"{kind}, {spent.parameters / 1e6:.1f} M parameters"
        points = trail(path) if len(folders) == 1 else [Point(spent.tokens + read_before(path), tau)]
        found.setdefault(name, []).extend(points)
    if len(depths) > 1:
        raise ValueError(
            f"The runs were judged with drafts of {sorted(depths)} tokens. Train all with one decode.depth=."
        )
    depth = depths.pop()
    return [Curve(name, depth, sorted(points, key=lambda point: point.tokens)) for name, points in found.items()]


def begun_with(run: Path) -> Path | None:
    """The best step of the run, or the head on the Hub, that this one was continued from with start=; None if there is none here."""
    config = run / "config.yaml"
    start = read_yaml(config).get("start") if config.exists() else None
    return checkpoint.resolve(start) if start and (hub.is_name(start) or Path(start).exists()) else None


def read_before(run: Path) -> int:
    """Tokens that the weights had been trained on when the run began."""
    start = begun_with(run)
    if start is None:
        return 0
    training = checkpoint.read_json(start / "report.json").get("training") or {}
    return (training.get("tokens") or 0) + read_before(start.parent)


def trail(run: Path) -> list[Point]:
    """The validations of a run, and before them those that led to its start."""
    points = [Point(point.tokens + read_before(run), point.tau) for point in points_of(read_rows(run / "log.jsonl"))]
    start = begun_with(run)
    earlier = trail(start.parent) if start is not None and (start.parent / "log.jsonl").exists() else []
    return [point for point in earlier if point.tokens <= read_before(run)] + points


def table(curves: list[Curve]) -> rich.table.Table:
    shown = rich.table.Table(title="tau of the largest run, predicted from the others", title_justify="left")
    for name in ("drafter", "points", "tokens read", "tau", "predicted", "with twice the tokens", "with 10 times"):
        shown.add_column(name, justify="left" if name == "drafter" else "right")
    for curve in curves:
        last, law, whole = curve.points[-1], curve.law, fit(curve.points, depth=curve.depth)
        predicted = "-" if law is None else f"{law.tau(last.tokens):.2f}"
        more = ["-" if whole is None else f"{whole.tau(factor * last.tokens):.2f}" for factor in (2, 10)]
        shown.add_row(curve.name, str(len(curve.points)), in_millions(last.tokens), f"{last.tau:.2f}", predicted, *more)
    return shown


def draw(curves: list[Curve], path: Path) -> None:
    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    for number, curve in enumerate(curves):
        color = f"C{number}"
        axes.plot([p.tokens for p in curve.points], [p.tau for p in curve.points], "o", color=color, label=curve.name)
        if curve.law is not None:
            last = curve.points[-1].tokens
            low, high = math.log(min(curve.points[0].tokens, FEWEST * last)), math.log(10 * last)
            xs = [math.exp(low + (high - low) * i / STEPS) for i in range(STEPS + 1)]
            label = f"law of all its points but the largest (misses them by at most {curve.law.error:.2f})"
            axes.plot(xs, [curve.law.tau(x) for x in xs], "--", color=color, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("tokens read in training")
    axes.set_ylabel(f"tau, chain of {curves[0].depth}")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, dpi=120)


def main() -> None:
    chosen = options(DataLawOptions, __doc__)
    curves, out = read(split(chosen.runs)), Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    document = {"curves": [asdict(curve) | {"law": curve.law and asdict(curve.law)} for curve in curves]}
    write_text(out / "data_law.json", json.dumps(document, indent=1) + "\n")
    draw(curves, out / "data_law.png")
    console = progress.Results()
    console.print(table(curves))
    console.print(f"written to {out / 'data_law.json'} and {out / 'data_law.png'}")


if __name__ == "__main__":
    run(main)
