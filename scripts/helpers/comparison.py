"""The tables and the picture of scripts/compare.py."""

from helpers.loading import FROZEN, Run

import rich.table
from matplotlib import colormaps
from matplotlib.figure import Figure

from specdec.measuring.figures import TAU, tau_difference
from specdec.measuring.measurement import PromptResult
from specdec.measuring.report import Report, by_depth, verdict

ADAPTED = "outputs of the adapted target"
CONDITIONS = "{conditions}; {num_prompts} prompts, <= {max_new_tokens} new tokens"
Columns = dict[float, dict[str, Report]]  # temperature -> method -> report


def markdown(title: str, rows: list[dict[str, str]]) -> str:
    lines = [[*rows[0]], ["---"] + ["---:"] * (len(rows[0]) - 1), *(row.values() for row in rows)]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(report: Report, name: str) -> str:
    """A figure of the report with its interval."""
    return with_interval(getattr(report, name), getattr(report, f"{name}_ci"))


def with_interval(value: float, interval: list[float], form: str = ".2f") -> str:
    return "{:{form}} ({:{form}} .. {:{form}})".format(value, *interval, form=form)


def table(names: list[str], columns: Columns, run_of: dict[str, Run], depths: dict[str, int]) -> str:
    """A row for each method, with a cell of each figure for every temperature. run_of: by method, of those with a run"""
    replayed = any(report.replayed_tau is not None for column in columns.values() for report in column.values())
    rows = []
    for name in names:
        reports = {f"T={temperature:g}": column[name] for temperature, column in columns.items()}
        row = {"method": name, **describe_training(run_of.get(name)), "depth": str(depths[name])}
        row |= {f"tau {t}": figure(report, "tau") for t, report in reports.items()}
        if replayed:
            for t, report in reports.items():
                row[f"replayed tau {t}"] = "-" if report.replayed_tau is None else figure(report, "replayed_tau")
        row |= {f"survival by depth {t}": by_depth(report.survival) for t, report in reports.items()}
        for stage in ("draft", "verify"):
            row |= {f"{stage}, ms a round, {t}": f"{report.ms_per_round[stage]:.1f}" for t, report in reports.items()}
        for t, report in reports.items():
            row[f"speedup {t}, tokens/s"] = f"{figure(report, 'speedup')}, {report.tokens_per_second:.1f}"
        rows.append(row)
    return markdown("Comparison", rows)


def describe_training(run: Run | None) -> dict[str, str]:
    """The cells on a method's head and its training; "-" for what is unknown or does not exist."""
    names = ("head", "trained parameters", "tokens seen", "training tokens/s", "peak memory")
    cells = dict.fromkeys(names, "-")
    if run is None:
        return cells
    spent, drafter = run.training, run.drafter
    adapted = "" if run.baseline == FROZEN else f" ({ADAPTED})"
    cells["head"] = f"{type(drafter).__name__}{adapted}"
    num = (spent and spent.parameters) or drafter.num_parameters()  # a saved LoRA is merged, so its report counts
    cells["trained parameters"] = f"{num / 1e6:.2f} M"
    if spent and spent.tokens is not None:
        cells["tokens seen"] = f"{spent.tokens / 1e6:.2f} M"
    if spent and spent.peak_memory is not None:
        cells["peak memory"] = f"{spent.peak_memory / 2**30:.2f} GiB"
    if spent and spent.tokens_per_second:  # unknown where the run was continued from another
        cells["training tokens/s"] = f"{spent.tokens_per_second:,.0f}"
    return cells


def summary(names: list[str], columns: Columns, baselines: dict[str, str]) -> rich.table.Table:
    """What a terminal shows: tau, tokens/s and speedup of plain decoding and of every method. baselines: see `conditions`"""
    shown = rich.table.Table()
    for name in ("", "tau", "tokens/s", "speedup", "95 % over prompts"):
        shown.add_column(name, justify="right" if name else "left")
    for temperature, column in columns.items():
        shown.add_section()
        for baseline, name in baselines.items():
            rate = column[name].baseline_tokens_per_second
            shown.add_row(f"plain decoding of {baseline}, T={temperature:g}", "1.00", f"{rate:.1f}", "1.00", "")
        for name in sorted(names, key=lambda name: column[name].speedup):
            report = column[name]
            cells = f"{report.tau:.2f}", f"{report.tokens_per_second:.1f}", f"{report.speedup:.2f}"
            shown.add_row(f"{name}, T={temperature:g}", *cells, "{:.2f} .. {:.2f}".format(*report.speedup_ci))
    return shown


def categories(names: list[str], columns: Columns) -> str:
    """tau and speedup by category, at the lowest temperature."""
    lowest, rows = min(columns), []
    for name in names:
        parts = columns[lowest][name].by_category.items()
        cells = {f"{key} ({part.num_prompts})": f"{figure(part, 'tau')}; {part.speedup:.2f}" for key, part in parts}
        rows.append({"method": name, **cells})
    return markdown(f"tau; speedup, by category (number of prompts), T={lowest:g}", rows)


def differences(names: list[str], first: str, results: dict[float, dict[str, list[PromptResult]]]) -> str:
    """Differences of tau, paired over prompts, between every method and the first one."""

    def cell(temperature: float, name: str) -> str:
        return with_interval(*tau_difference(results[temperature][name], results[temperature][first]), "+.2f")

    rows = [
        {"method": name, **{f"T={temperature:g}": cell(temperature, name) for temperature in results}} for name in names
    ]
    return markdown(f"tau minus that of {first} on the same prompts", rows)


def conditions(columns: Columns, baselines: dict[str, str], settings: dict, given: dict[str, str]) -> str:
    """What all methods had in common. baselines: a method by its baseline; given: settings of proposers as written"""
    rates = [
        f"{column[name].baseline_tokens_per_second:.1f} ({baseline}, T={temperature:g})"
        for baseline, name in baselines.items()
        for temperature, column in columns.items()
    ]
    shapes = f"chains {settings['chains'] or 'none'} and trees {settings['trees'] or 'none'}, cut to the heads' depth"
    proposers = f"; proposers with {', '.join(map('='.join, given.items()))}" if given else ""
    return (
        f"{CONDITIONS.format(**settings)}; checkpoints: {shapes}{proposers}; torch {settings['torch']}, "
        f"{'compiled' if settings['decode']['compile'] else 'not compiled'}, batches of {settings['batch']}, prompts of "
        f"{settings['prompts']}. tau: {TAU}. In brackets: 95 % bootstrap intervals over prompts. All methods take turns, "
        f"round by round. Plain decoding, tokens/s: {', '.join(rates)}."
    )


def verdicts(names: list[str], columns: Columns) -> str:
    """Whether each method is lossless, at the lowest temperature."""
    return "\n".join(f"- {name}: {verdict(columns[min(columns)][name])}" for name in names)


def picture(names: list[str], columns: Columns, settings: dict) -> Figure:
    """tau and speedup of every method, and survival by depth; a method has the same colour and number everywhere."""
    first = min(columns)
    shown = sorted({first, max(columns)})
    colours = [*colormaps["tab20"].colors, "black", "gold"] * len(names)
    drawing = Figure(figsize=(11, max(4.0, 1.5 + 0.33 * len(names))), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(3, 3, 2.6))
    draw_intervals(left, "tau", "tau", names, columns, shown, colours)
    draw_intervals(middle, "speedup", "speedup over plain decoding", names, columns, shown, colours)
    labels = [f"{name} (adapted)" if columns[first][name].adapted_target else name for name in names]
    left.set_yticks(range(len(names)), [f"{label}  {place}" for place, label in enumerate(labels, 1)])
    for temperature in shown:  # hollow above the lowest temperature
        mark = {"marker": "o", "mfc": None if temperature == first else "white"}
        left.plot([], [], color="0.3", linestyle="", label=f"T={temperature:g}", **mark)
    drawing.legend(loc="outside upper left", ncols=len(shown), frameon=False)
    draw_survival(right, [columns[first][name].survival[:8] for name in names], colours)
    right.set_xlabel(f"survival by depth (T={first:g})")
    drawing.supxlabel(CONDITIONS.format(**settings) + "; bars: 95 % over prompts", fontsize=8, color="0.4")
    return drawing


def draw_intervals(axes, key: str, label: str, names: list[str], columns: Columns, shown: list, colours: list) -> None:
    """A figure of the report with its interval: a line for each method, and in it a mark for each temperature."""
    for place, (name, colour) in enumerate(zip(names, colours)):
        for offset, temperature in enumerate(shown):
            report = columns[temperature][name]
            y = place + 0.7 * ((offset + 0.5) / len(shown) - 0.5)
            axes.plot(getattr(report, f"{key}_ci"), [y, y], color=colour, linewidth=1.2)
            axes.plot(getattr(report, key), y, "o", color=colour, mfc=None if temperature == shown[0] else "white")
        axes.axhline(place + 0.5, color="0.9", linewidth=0.8)
    axes.axvline(1, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel=label, ylim=(len(names) - 0.5, -0.5), yticks=[])


def draw_survival(axes, survival: list[list[float]], colours: list) -> None:
    """A curve for each method, with its number; the numbers stand below each other, so that none covers another."""
    height = top = 1.05 * max(map(max, survival)) or 1.0
    for place in sorted(range(len(survival)), key=lambda place: -survival[place][0]):
        values, colour = survival[place], colours[place]
        axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, color=colour)
        height = min(height - top / 32, values[0])
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5}
        position = {"xy": (1, values[0]), "xytext": (0.6, height), "va": "center", "fontsize": 8}
        axes.annotate(str(place + 1), **position, color=colour, arrowprops=line)
    axes.set(ylim=(0, top), xlim=(0.5, max(map(len, survival)) + 0.2))
    axes.set_xticks(range(1, max(map(len, survival)) + 1))
