"""What scripts/compare.py compares, and how it shows what was found: tables and a picture."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from specdec.drafter import Drafter
from specdec.figures import TAU, tau_difference
from specdec.measurement import PromptResult
from specdec.report import Report, Training, by_depth, verdict
from specdec.tree import TreeShape

FROZEN = "the frozen target"
ADAPTED = "outputs of the adapted target"
CONDITIONS = "{target}, {dtype}, {device}, {threads} threads; {num_prompts} prompts, <= {max_new_tokens} new tokens"


@dataclass(frozen=True)
class Run:
    """One checkpoint that is compared."""

    name: str
    folder: Path
    drafter: Drafter
    shapes: dict[str, TreeShape]  # chain and tree, no deeper than the drafter
    plain: str  # whose plain decoding it is held against: FROZEN, or its own name if it adapts the target
    training: Training | None  # of its report; None for older checkpoints


@dataclass(frozen=True)
class Way:
    """One way to draft: a run in one of its shapes, or a proposer that was not trained."""

    name: str
    run: Run | None
    depth: int
    plain: str  # as of Run
    replayed: Drafter | None  # to replay along plain answers


Columns = dict[float, dict[str, Report]]  # temperature -> way -> summary


def markdown(title: str, lines: list[dict[str, str]]) -> str:
    rows = [[*lines[0]], ["---"] + ["---:"] * (len(lines[0]) - 1), *(line.values() for line in lines)]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(report: Report, name: str) -> str:
    """A figure of the report with its interval."""
    return with_interval(getattr(report, name), getattr(report, f"{name}_ci"))


def with_interval(value: float, interval: list[float], form: str = ".2f") -> str:
    return "{:{form}} ({:{form}} .. {:{form}})".format(value, *interval, form=form)


def table(ranked: list[Way], columns: Columns) -> str:
    """One line a way, and in it a cell of each figure for every temperature."""
    lines = []
    for way in ranked:
        each = {t: column[way.name] for t, column in columns.items()}
        line = {
            "way": way.name,
            "head": "-",
            "trained": "-",
            "tokens seen": "-",
            "training tokens/s": "-",
            "peak memory": "-",
        }
        if way.run:
            spent, drafter = way.run.training, way.run.drafter
            trained = (spent and spent.parameters) or drafter.num_parameters()  # a saved LoRA is merged
            line["head"] = type(drafter).__name__ + (f" ({ADAPTED})" if way.plain != FROZEN else "")
            line["trained"] = f"{trained / 1e6:.2f} M"
            if spent:
                line["tokens seen"] = f"{spent.tokens / 1e6:.2f} M"
                line["peak memory"] = f"{spent.peak_memory / 2**30:.2f} GiB"
            if spent and spent.tokens_per_second:  # unknown where the run was continued from another
                line["training tokens/s"] = f"{spent.tokens_per_second:,.0f}"
        line["depth"] = str(way.depth)
        line |= {f"tau T={t:g}": figure(one, "tau") for t, one in each.items()}
        if any(column[other.name].replayed_tau is not None for column in columns.values() for other in ranked):
            for t, one in each.items():
                line[f"replayed tau T={t:g}"] = figure(one, "replayed_tau") if one.replayed_tau is not None else "-"
        line |= {f"survival by depth T={t:g}": by_depth(one.survival) for t, one in each.items()}
        for stage in ("draft", "verify"):
            line |= {f"{stage} ms T={t:g}": f"{one.ms_per_round[stage]:.1f}" for t, one in each.items()}
        for t, one in each.items():
            line[f"speedup T={t:g}, tokens/s"] = f"{figure(one, 'speedup')}, {one.tokens_per_second:.1f}"
        lines.append(line)
    return markdown("Comparison", lines)


def categories(ranked: list[Way], columns: Columns) -> str:
    """tau and speedup by category, at the lowest temperature."""
    lowest, lines = min(columns), []
    for way in ranked:
        parts = columns[lowest][way.name].by_category.items()
        both = {f"{name} ({part.num_prompts})": f"{figure(part, 'tau')}; {part.speedup:.2f}" for name, part in parts}
        lines.append({"way": way.name, **both})
    return markdown(f"tau; speedup, by category (number of prompts), T={lowest:g}", lines)


def differences(ranked: list[Way], first: Way, rows: dict[float, dict[str, list[PromptResult]]]) -> str:
    """Paired over prompts, all against the one listed first."""

    def cell(temperature: float, way: Way, other: Way) -> str:
        return with_interval(*tau_difference(rows[temperature][way.name], rows[temperature][other.name]), "+.2f")

    against = [{"way": way.name, **{f"T={t:g}": cell(t, way, first) for t in rows}} for way in ranked]
    return markdown(f"tau minus that of {first.name} on the same prompts", against)


def conditions(ranked: list[Way], columns: Columns, settings: dict, given: dict[str, str]) -> list[str]:
    """What all ways had in common, and whether each is lossless; given: settings of proposers as they were written"""
    rates = [
        f"{column[name].baseline_tokens_per_second:.1f} ({owner}, T={temperature:g})"
        for owner, name in {way.plain: way.name for way in ranked}.items()
        for temperature, column in columns.items()
    ]
    verdicts = [f"- {way.name}: {verdict(columns[min(columns)][way.name])}" for way in ranked]
    return [
        CONDITIONS.format(**settings)
        + f"; runs: {' and '.join(settings['shapes'].values())}, cut to what a head can draft"
        + (f"; proposers with {', '.join(map('='.join, given.items()))}" if given else "")
        + f"; torch {settings['torch']}, {'compiled' if settings['compile'] else 'not compiled'}, batches of "
        f"{settings['batch']}, prompts of {settings['prompts']}. tau: {TAU}. In brackets: 95 % bootstrap intervals over prompts. All ways of decoding "
        f"take turns on every prompt; ms are those of a round. Plain decoding, tokens/s: {', '.join(rates)}.",
        "\n".join(verdicts),
    ]


def picture(ranked: list[Way], columns: Columns, settings: dict) -> Figure:
    """tau and speedup of every way, and survival by depth; a way has the same colour and number everywhere."""
    first, last = min(columns), max(columns)
    shown = sorted({first, last})
    colours = [*colormaps["tab20"].colors, "black", "gold"] * len(ranked)
    drawing = Figure(figsize=(11, max(4.0, 1.5 + 0.33 * len(ranked))), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(3, 3, 2.6))
    for axes, name in ((left, "tau"), (middle, "speedup over plain decoding")):
        for place, (way, colour) in enumerate(zip(ranked, colours)):
            for offset, temperature in enumerate(shown):
                value, interval = (
                    getattr(columns[temperature][way.name], name.split()[0] + end) for end in ("", "_ci")
                )
                y = place + 0.7 * ((offset + 0.5) / len(shown) - 0.5)
                axes.plot(interval, [y, y], color=colour, linewidth=1.2)
                axes.plot(value, y, "o", color=colour, mfc=None if temperature == first else "white")
            axes.axhline(place + 0.5, color="0.9", linewidth=0.8)
        axes.axvline(1, color="0.6", linewidth=0.8, linestyle=":")
        axes.set(xlabel=name, ylim=(len(ranked) - 0.5, -0.5), yticks=[])
    names = [way.name + " (adapted)" * (way.plain != FROZEN) for way in ranked]
    left.set_yticks(range(len(ranked)), [f"{name}  {place}" for place, name in enumerate(names, 1)])
    for temperature in shown:  # hollow above the lowest temperature
        mark = {"marker": "o", "mfc": None if temperature == first else "white"}
        left.plot([], [], color="0.3", linestyle="", label=f"T={temperature:g}", **mark)
    drawing.legend(loc="outside upper left", ncols=len(shown), frameon=False)

    survival = [columns[first][way.name].survival[:8] for way in ranked]
    height = top = 1.05 * max(map(max, survival)) or 1.0
    for place in sorted(range(len(ranked)), key=lambda place: -survival[place][0]):
        right.plot(range(1, len(survival[place]) + 1), survival[place], "o-", markersize=3, color=colours[place])
        height = min(height - top / 32, survival[place][0])  # numbers from the top down, none on another
        line = {"arrowstyle": "-", "color": colours[place], "linewidth": 0.5}
        at = {"xy": (1, survival[place][0]), "xytext": (0.6, height), "va": "center", "fontsize": 8}
        right.annotate(str(place + 1), **at, color=colours[place], arrowprops=line)
    right.set(xlabel=f"survival by depth (T={first:g})", ylim=(0, top), xlim=(0.5, max(map(len, survival)) + 0.2))
    right.set_xticks(range(1, max(map(len, survival)) + 1))
    drawing.supxlabel(CONDITIONS.format(**settings) + "; bars: 95 % over prompts", fontsize=8, color="0.4")
    return drawing
