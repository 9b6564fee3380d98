"""The tables and the picture of scripts/tune.py."""

from collections import Counter
from dataclasses import asdict

import rich.box
import rich.console
import rich.table
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from specdec.core.tree import TreeShape
from specdec.measuring.measurement import PromptResult
from specdec.measuring.tuning import (
    Calibration,
    RecordedAcceptance,
    TimedRound,
    Way,
    best_shape,
    rank_chances,
    step_seconds,
)
from specdec.proposers.auto import Auto, AutoRound
from specdec.proposers.candidates import DEEPEST
from specdec.proposers.costs import Costs

FIGURES = ("tau", "tau_ci", "speedup", "speedup_ci", "tokens_per_second", "baseline_tokens_per_second", "ms_per_round")
GROUPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # bounds of the estimates in the table; the file has finer ones
LEAST = 10  # drafts of a kind, for a cell of the table
WINDOW = 8  # rounds over which the picture averages tokens/s
WHO = {"head": "tab:blue", "text": "tab:orange", "head and text": "tab:green", "copies that fill it up": "0.85"}


def figures_of(auto: Auto, batch: int, results: list[PromptResult]) -> dict:
    """What auto knows and did, for JSON. results: its own; its chances are RecordedAcceptance"""
    assert auto.costs is not None and isinstance(auto.acceptance, RecordedAcceptance)
    account = auto.account
    rounds = account.rounds
    seconds = sum(result.drafted.seconds for result in results)
    curves = {rows: auto.costs.curve(rows, auto.entries) for rows in sorted({1, batch})}
    return {
        "costs": {
            "pass_ms": {rows: {num: 1e3 * curve[num] for num in sorted(curve)} for rows, curve in curves.items()},
            "head_ms": {name: 1e3 * spent for name, spent in step_seconds(auto, batch).items()},
        },
        "chances": [asdict(each) for each in auto.acceptance.calibration()],
        "chances_by_group": [asdict(each) for each in auto.acceptance.calibration(GROUPS)],
        "chances_of_groups": [asdict(each) for each in auto.acceptance.calibration(GROUPS, by_depth=False)],
        "choices": {
            "rounds": rounds,
            "by_nodes": {num: account.sizes[num] for num in sorted(account.sizes)},
            "head_rounds": account.head,
            "trials": account.trials,
            "checks": account.checks,
            "drafts_by_source": dict(sum((choice.sources for choice in account.choices), Counter())),
        },
        "tokens_per_round": {"expected": account.expected / rounds, "measured": account.tokens / rounds},
        "ms_per_round": {"expected": 1e3 * account.seconds / rounds, "measured": 1e3 * seconds / rounds},
    }


def tables(figures: dict) -> list[rich.table.Table]:
    """Costs, chances and choices. figures: as figures_of"""
    return [table_of_costs(figures["costs"]), table_of_chances(figures), table_of_choices(figures["choices"])]


def show(console: rich.console.Console, tables: list[rich.table.Table]) -> None:
    """Prints them, each after its title, which may be longer than a line of the table."""
    for table in tables:
        title, table.title = table.title, None
        console.print(title)
        console.print(table)


def new_table(title: str, first: str, *others: str) -> rich.table.Table:
    table = rich.table.Table(title=title, box=rich.box.SIMPLE)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def table_of_costs(costs: dict) -> rich.table.Table:
    curves = costs["pass_ms"]
    steps = ", ".join(f"{name} {spent:.2f} ms" for name, spent in costs["head_ms"].items()) or "never made"
    names = [name for rows in curves for name in (f"ms, rows={rows}", "over one node")]
    table = new_table(
        f"Costs: a pass of the target by the nodes of its tree; the head's steps: {steps}", "nodes", *names
    )
    for num in sorted(set.intersection(*(set(curve) for curve in curves.values()))):
        cells = [cell for curve in curves.values() for cell in (f"{curve[num]:.1f}", f"{curve[num] / curve[1]:.2f}")]
        table.add_row(str(num), *cells)
    return table


def table_of_chances(figures: dict) -> rich.table.Table:
    """A row for each source and group of estimates; columns by depth."""
    depths = range(1, DEEPEST + 1)
    table = new_table(
        "Chances of drafts whose parents were right: stated by the drafter, corrected by auto before it saw the text, and what "
        f"came (accepted). By depth: corrected -> accepted, of at least {LEAST} drafts",
        "source",
        *("estimates", "drafts", "stated", "corrected", "accepted"),
        *(f"depth {depth}{'+' if depth == DEEPEST else ''}" for depth in depths),
    )
    cells = [Calibration(**cell) for cell in figures["chances_by_group"]]
    for group in (Calibration(**cell) for cell in figures["chances_of_groups"]):
        here = {cell.depth: cell for cell in cells if (cell.source, cell.low) == (group.source, group.low)}
        found = [here.get(depth) for depth in depths]
        by_depth = [
            f"{each.corrected:.2f} -> {each.accepted:.2f}" if each and each.num >= LEAST else "" for each in found
        ]
        means = [f"{value:.2f}" for value in (group.stated, group.corrected, group.accepted)]
        table.add_row(group.source, f"{group.low:.1f} .. {group.high:.1f}", str(group.num), *means, *by_depth)
    return table


def table_of_choices(choices: dict) -> rich.table.Table:
    table = new_table("Choices: rounds by the nodes of a row's tree, the root included", "nodes", "rounds", "share")
    for num, count in choices["by_nodes"].items():
        table.add_row(str(num), str(count), f"{count / choices['rounds']:.0%}")
    return table


def sentences(figures: dict) -> str:
    choices, tokens, ms = figures["choices"], figures["tokens_per_round"], figures["ms_per_round"]
    drafts = ", ".join(f"{source} {num}" for source, num in choices["drafts_by_source"].items()) or "none"
    return (
        f"The head drafted in {choices['head_rounds']} of {choices['rounds']} rounds, {choices['trials']} of them trials; "
        f"{choices['checks']} rounds drafted nothing, to see what that takes. "
        f"Drafts that were verified: {drafts}.\n"
        f"A round of auto: {tokens['expected']:.2f} tokens expected, {tokens['measured']:.2f} came; {ms['expected']:.1f} ms "
        f"expected, {ms['measured']:.1f} measured."
    )


def table_of_ways(ways: list[Way]) -> rich.table.Table:
    names = ("tau", "tokens/s", "predicted", "measured", "95 % interval", "difference")
    best = max(ways, key=lambda way: way.measured)
    table = new_table(
        "Speedup over plain decoding, in tokens/s of the rounds of all prompts (* fastest)", "way", *names
    )
    for way in ways:
        report, predicted = way.report, way.predicted
        table.add_row(
            f"{way.name} *" if way is best else way.name,
            f"{report.tau:.2f}",
            f"{report.tokens_per_second:.1f}",
            "-" if predicted is None else f"{predicted:.2f}",
            f"{way.measured:.2f}",
            "{:.2f} .. {:.2f}".format(*(report.speedup_ci or ())),
            "-" if predicted is None else f"{100 * (way.measured / predicted - 1):+.1f} %",
        )
    return table


def fixed_shape(auto: Auto, batch: int, *, greedy: bool) -> dict | None:
    """The fixed shape of the head that is expected to be the fastest, for JSON."""
    assert auto.costs is not None and isinstance(auto.acceptance, RecordedAcceptance)
    curve = auto.costs.curve(batch, auto.entries)
    chances = rank_chances(auto.acceptance.cases, "head" if greedy else "drawn")
    found = best_shape(chances, curve, step_seconds(auto, batch))
    if found is None:
        return None
    shape, tau, speedup = found
    return {"shape": asdict(shape), "tau": tau, "speedup": speedup}


def fixed_shape_sentence(fixed: dict | None) -> str:
    if fixed is None:
        return "The head drafted too seldom to tell which fixed shape suits it."
    shape = TreeShape(**fixed["shape"])
    option = f"chains={shape.depth}" if shape.chain else f"trees={shape.depth}x{shape.width}x{shape.nodes}"
    return (
        f"By the head's chances by depth and rank, the best fixed shape is a {shape}: {fixed['tau']:.2f} tokens a round and a "
        f"speedup of {fixed['speedup']:.2f} are expected in the rounds in which auto let it draft; {option} measures it."
    )


def ways_to_json(ways: list[Way]) -> dict[str, dict]:
    return {
        way.name: {
            "drafting": way.drafting and asdict(way.drafting),
            "predicted": way.predicted,
            "measured": {name: getattr(way.report, name) for name in FIGURES},
        }
        for way in ways
    }


# The picture


def drafts_by(choice: AutoRound) -> dict[str, int]:
    """Drafts of one row's tree, by the names of WHO."""
    names = {"head": "head", "drawn": "head", "both": "head and text"}
    counts = Counter(dict.fromkeys(WHO, 0))
    for source, num in choice.sources.items():
        counts[names.get(source, "text")] += num
    counts["copies that fill it up"] = choice.size - 1 - sum(choice.sources.values())
    return counts


def picture(rounds: list[TimedRound], costs: Costs, steps: dict[str, float], title: str) -> Figure:
    """One answer, round by round: what was drafted by whom, what was accepted, tokens/s; beside it the costs."""
    drawing = Figure(figsize=(13, 7), layout="constrained")
    grid = drawing.add_gridspec(2, 2, width_ratios=(3, 1), height_ratios=(3, 2))
    top = drawing.add_subplot(grid[0, 0])
    legend = draw_choices(top, rounds)
    draw_rates(drawing.add_subplot(grid[1, 0], sharex=top), rounds, costs)
    draw_costs(drawing.add_subplot(grid[:, 1]), rounds, costs, steps)
    drawing.legend([*legend.values()], [*legend], loc="outside upper left", ncols=len(legend), frameon=False)
    drawing.supxlabel(title, fontsize=8, color="0.4")
    return drawing


def draw_choices(axes, rounds: list[TimedRound]) -> dict:
    """-> the legend: artists by their names"""
    places = range(1, 1 + len(rounds))
    drafts, below = [drafts_by(each.choice) for each in rounds], [0] * len(rounds)
    for name, colour in WHO.items():
        heights = [each[name] for each in drafts]
        axes.bar(places, heights, bottom=below, color=colour, width=0.9)
        below = [low + height for low, height in zip(below, heights)]
    (accepted,) = axes.step([*places], [each.accepted for each in rounds], where="mid", color="black", linewidth=1.3)
    lowest = -0.05 * max(*below, 4)
    trials = [place for place, each in zip(places, rounds) if each.choice.trial]
    nothing = [place for place, each in zip(places, rounds) if each.choice.size == 1]
    (trial,) = axes.plot(trials, [lowest] * len(trials), "^", color="tab:red", markersize=5)
    (none,) = axes.plot(nothing, [0] * len(nothing), "o", color="0.4", mfc="white", markersize=4)
    axes.set(
        ylabel="drafts in the tree (bars), accepted (line)", xlim=(0.3, len(rounds) + 0.7), ylim=(2 * lowest, None)
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    legend: dict = {name: Patch(color=colour) for name, colour in WHO.items()}
    return legend | {"accepted": accepted, "trial of the head": trial, "nothing drafted": none}


def draw_rates(axes, rounds: list[TimedRound], costs: Costs) -> None:
    spans = [rounds[max(0, place - WINDOW) : place] for place in range(1, 1 + len(rounds))]
    rates = [sum(1 + each.accepted for each in span) / sum(each.seconds for each in span) for span in spans]
    axes.plot(range(1, 1 + len(rounds)), rates, color="tab:purple", label=f"auto, mean of {WINDOW} rounds")
    plain = 1 / costs.curve(1)[1]
    axes.axhline(plain, color="0.4", linestyle="--", label="plain decoding, by the costs")
    axes.set(xlabel="round", ylabel="tokens/s", ylim=(0, 1.25 * max([plain, *rates])))
    axes.legend(frameon=False, ncols=2, loc="upper left")


def draw_costs(axes, rounds: list[TimedRound], costs: Costs, steps: dict[str, float]) -> None:
    """The costs of a pass, and behind them how many rounds had as many nodes."""
    curve, used = costs.curve(1), Counter(each.choice.size for each in rounds)
    nums = sorted(curve)
    ms = [1e3 * curve[num] for num in nums]
    shares = axes.twinx()
    shares.bar([*used], [count / len(rounds) for count in used.values()], color="tab:cyan", alpha=0.4, width=0.8)
    shares.set(ylabel="share of rounds (bars)", ylim=(0, 1))
    axes.plot(nums, ms, "o-", color="0.3", markersize=3)
    axes.set(
        xlabel="nodes of a tree, the root included", ylabel="ms of the target's pass (line)", ylim=(0, 1.1 * max(ms))
    )
    head = ", ".join(f"{name} {1e3 * spent:.1f} ms" for name, spent in steps.items())
    axes.set_title(f"costs of this device\n{f'head: {head}' if head else ''}", fontsize=9)
