"""python scripts/compare.py runs=checkpoints/a,checkpoints/b [prompts=FILE temperature=0,1 chain=4 tree=4,3,8 ...]

Trains nothing: decodes every prompt plainly and with the best checkpoint of every run, as a chain and as a tree, in
turn, and writes what each is worth to OUT/table.md and OUT/comparison.png. Every finished prompt is kept in
OUT/rows.jsonl: after Ctrl-C or a kill, the same command continues.
"""

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rich.console
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.progress import track

from scripts import cli, common
from specdec import checkpoint, replay
from specdec.decode import Decoder, Generation
from specdec.drafter import Drafter
from specdec.evaluate import TAU, Prompt, Row, difference, report, top2_gap, verdict
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target, load_tokenizer
from specdec.tree import TreeShape
from train import data, reading

FROZEN = "the frozen target"
ADAPTED = "outputs of the adapted target"
CONDITIONS = "{target}, {dtype}, {device}, {threads} threads; {num_prompts} prompts, <= {max_new_tokens} new tokens"


@dataclass(frozen=True)
class Compare:
    runs: str = field(metadata={"help": "comma list of run folders (their best steps) or of steps' folders"})
    prompts: str = field(default="data/prompts_heldout.jsonl", metadata={"help": "rows with prompt or messages"})
    limit: int | None = field(default=None, metadata={"help": "this many prompts, spread over the file"})
    max_new_tokens: int = field(default=64, metadata={"help": "an answer ends here at the latest"})
    temperature: str = field(default="0,1", metadata={"help": "0 is greedy; a comma list measures each"})
    chain: int = field(default=4, metadata={"help": "drafts of a chain"})
    tree: str = field(default="4,3,8", metadata={"help": "depth,width,nodes of a tree"})
    out: str = field(default="comparison", metadata={"help": "folder for table.md, comparison.png and rows.jsonl"})
    target: common.TargetOptions = field(default_factory=common.TargetOptions)


@dataclass(frozen=True)
class Run:
    """One checkpoint that is compared."""

    name: str
    folder: Path
    drafter: Drafter
    shapes: dict[str, TreeShape]  # chain and tree, no deeper than the drafter
    plain: str  # whose plain decoding it is held against: FROZEN, or its own name if it adapts the target
    training: dict  # what the trainer wrote about it; empty for older checkpoints


Columns = dict[tuple[float, str], dict[str, dict]]  # (temperature, shape) -> run -> summary


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    chosen = cli.options(Compare, __doc__)
    console = rich.console.Console()
    common.use_threads()
    temperatures = sorted(
        {each.temperature for each in common.DecodeOptions(temperature=chosen.temperature).samplings()}
    )
    shapes = {"chain": TreeShape(chosen.chain, 1, chosen.chain), "tree": tree_shape(chosen.tree)}
    runs = load(chosen, shapes)
    target = runs[0].drafter.target
    tokenizer = load_tokenizer(target.name)
    stop = data.stop_tokens(tokenizer, target.model.generation_config)
    prompts = [
        Prompt(row["id"], row["category"], data.encode_prompt(tokenizer, row["messages"]))
        for row in reading.spread(reading.load_prompts(chosen.prompts), chosen.limit)
    ]
    settings = {
        "runs": {run.name: f"{run.folder} {digest((run.folder / 'drafter.safetensors').read_bytes())}" for run in runs},
        "prompts": chosen.prompts,
        "num_prompts": len(prompts),
        "prompts_digest": digest(repr(prompts).encode()),
        "max_new_tokens": chosen.max_new_tokens,
        "temperatures": temperatures,
        "shapes": {name: str(shape) for name, shape in shapes.items()},
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    out = Path(chosen.out)
    lines = begin(out, settings)

    done = {(line["number"], line["temperature"]) for line in lines}
    left = [(n, t) for n in range(len(prompts)) for t in temperatures if (n, t) not in done]
    console.print(f"{len(done)} of {len(done) + len(left)} prompts x temperatures are in {out}", highlight=False)
    if left:
        ways = {temperature: decoders(runs, temperature, stop) for temperature in temperatures}
        for warm_up in ways.values():
            decode(runs, warm_up, prompts[0], 0, min(8, chosen.max_new_tokens))
        with (out / "rows.jsonl").open("a", buffering=1) as file:
            for number, temperature in track(left, description="decoding", console=console, transient=True):
                line = decode(runs, ways[temperature], prompts[number], number, chosen.max_new_tokens)
                file.write(json.dumps(line) + "\n")
                lines.append(line)

    rows = {key: {run.name: rows_of(lines, run, *key) for run in runs} for key in product(temperatures, shapes)}
    columns = {
        key: {
            run.name: report(
                each[run.name], depth=run.shapes[key[1]].depth, temperature=key[0], adapted=run.plain != FROZEN
            )
            for run in runs
        }
        for key, each in rows.items()
    }
    ranked = sorted(runs, key=lambda run: -columns[temperatures[0], "chain"][run.name]["tau"])
    parts = [table(ranked, columns), categories(ranked, columns), *differences(ranked, runs[0], rows)]
    text = "\n\n".join([*parts, *conditions(ranked, columns, settings)])
    checkpoint.write_text(out / "table.md", text + "\n")
    picture(ranked, columns, settings).savefig(out / "comparison.png", dpi=130)
    print(text)
    console.print(f"written: {out}/table.md, {out}/comparison.png", highlight=False)


def tree_shape(text: str) -> TreeShape:
    try:
        depth, width, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"tree={text}: give depth,width,nodes, such as 4,3,8.") from None
    return TreeShape(depth, width, nodes)


def load(chosen: Compare, shapes: dict[str, TreeShape]) -> list[Run]:
    """Every run beside the one frozen target; a drafter that changes its target in place gets a target of its own."""
    given = [Path(part.strip()) for part in chosen.runs.split(",") if part.strip()]
    if not given:
        raise ValueError("runs= names no run: give folders, such as runs=checkpoints/a,checkpoints/b.")
    names = common.run_names(given)
    device = chosen.target.device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs: list[Run] = []
    targets: dict[str, Target] = {}
    for name, folder in zip(names, map(checkpoint.resolve, given)):
        document = checkpoint.read_json(folder / "drafter.json")
        adapts = checkpoint.drafter_class(str(document.get("_target_"))).adapts_target
        plain = name if adapts else FROZEN
        if plain not in targets:
            target_name = chosen.target.name or str(document.get("target"))
            targets[plain] = Target.load(target_name, dtype=chosen.target.dtype, device=device)
        drafter = checkpoint.load(folder, targets[plain])
        deepest = drafter.depth or max(shape.depth for shape in shapes.values())
        cut = {kind: replace(shape, depth=min(shape.depth, deepest)) for kind, shape in shapes.items()}
        written = folder / "report.json"
        training = checkpoint.read_json(written).get("training", {}) if written.exists() else {}
        runs.append(Run(name, folder, drafter, cut, plain, training))
    return runs


def begin(out: Path, settings: dict) -> list[dict]:
    """What was decoded before under the same settings. Raises ValueError if they differ or a line cannot be read."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "settings.json").exists():
        checkpoint.write_text(out / "settings.json", json.dumps(settings, indent=2) + "\n")
    before = checkpoint.read_json(out / "settings.json")
    changed = [f"{key} (then {before[key]}, now {settings[key]})" for key in settings if before[key] != settings[key]]
    if changed:
        raise ValueError(f"{out} was begun with other settings: {'; '.join(changed)}. Choose another out=FOLDER.")
    path, lines = out / "rows.jsonl", []
    path.touch()
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            lines.append(json.loads(line if line.endswith("\n") else ""))  # without its end: killed while writing
        except json.JSONDecodeError:
            raise ValueError(f"{path}: line {number} is damaged: delete that line and run this again.") from None
    return lines


def decoders(runs: list[Run], temperature: float, stop: set[int]) -> dict[tuple[str, str], Decoder]:
    """By (run, shape); plain decoding once for each distinct target, as (Run.plain, "plain")."""
    found = {}
    for run in runs:
        proposers = {kind: HeadProposer(run.drafter, shape) for kind, shape in run.shapes.items()}
        for name, kind, proposer in [(run.plain, "plain", None), *((run.name, *item) for item in proposers.items())]:
            found[name, kind] = Decoder(run.drafter.target, proposer, sampling=Sampling(temperature), stop=stop)
    return found


def decode(runs: list[Run], ways: dict[tuple[str, str], Decoder], prompt: Prompt, number: int, limit: int) -> dict:
    """One prompt in all ways, in an order that rotates with its number. -> a line of rows.jsonl, see `rows_of`"""
    found, turn = {}, number % len(ways)
    for key in [*ways][turn:] + [*ways][:turn]:
        generator = torch.Generator(ways[key].target.device).manual_seed(number)
        found[key] = ways[key].generate([prompt.tokens], limit, generator=generator)
    temperature = ways[runs[0].name, "chain"].sampling.temperature
    drafted: dict[str, dict[str, dict]] = {run.name: {} for run in runs}
    for run in runs:
        drafter, alone = run.drafter, found[run.plain, "plain"].tokens[0]
        for kind, shape in run.shapes.items():
            answer, rounds, accepted = found[run.name, kind], float("nan"), torch.empty(0)
            if kind == "chain":
                accept = replay.acceptance(drafter, prompt.tokens, alone, depth=shape.depth, temperature=temperature)
                rounds, accepted = replay.rounds(accept)
            gap = (
                top2_gap(drafter.target, prompt.tokens, alone, answer.tokens[0], Sampling())
                if temperature == 0
                else None
            )
            cell = {"replayed_rounds": rounds, "replayed_accepted": accepted.tolist(), "gap": gap}
            drafted[run.name][kind] = {"drafted": asdict(answer), **cell}
    plain = {name: asdict(generation) for (name, kind), generation in found.items() if kind == "plain"}
    return {"number": number, "temperature": temperature, "prompt": asdict(prompt), "plain": plain, "runs": drafted}


def rows_of(lines: list[dict], run: Run, temperature: float, kind: str) -> list[Row]:
    """What `decode` wrote of one run, one shape and one temperature, in the order of the file."""
    found = []
    for line in (line for line in lines if line["temperature"] == temperature):
        cell = {**line["runs"][run.name][kind]}
        plain, drafted = Generation(**line["plain"][run.plain]), Generation(**cell.pop("drafted"))
        found.append(Row(Prompt(**line["prompt"]), plain, drafted, **cell))
    return found


def markdown(title: str, lines: list[dict[str, str]]) -> str:
    rows = [[*lines[0]], ["---"] + ["---:"] * (len(lines[0]) - 1), *(line.values() for line in lines)]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(summary: dict, name: str, form: str = ".2f") -> str:
    return "{:{form}} ({:{form}} .. {:{form}})".format(summary[name], *summary[f"{name}_ci"], form=form)


def label(key: tuple[float, str]) -> str:
    return f"{key[1]} T={key[0]:g}"


def table(ranked: list[Run], columns: Columns) -> str:
    """One line a run; survival and times are those of the chain at the lowest temperature."""
    first, lines = min(columns), []
    for run in ranked:
        each, main = {label(key): column[run.name] for key, column in columns.items()}, columns[first][run.name]
        spent = run.training
        trained = {"parameters": run.drafter.num_parameters(), **(spent or {})}["parameters"]  # a saved LoRA is merged
        line = {
            "run": run.name,
            "head": type(run.drafter).__name__ + (f" ({ADAPTED})" if run.plain != FROZEN else ""),
            "trained": f"{trained / 1e6:.2f} M",
            "tokens seen": f"{spent['tokens'] / 1e6:.2f} M" if spent else "-",
            "training tokens/s": f"{spent['tokens_per_second']:,.0f}" if spent and spent["tokens"] else "-",
            "peak memory": f"{spent['peak_memory'] / 2**30:.2f} GiB" if spent else "-",
            "depth chain, tree": ", ".join(str(shape.depth) for shape in run.shapes.values()),
        }
        line |= {f"tau {key}": figure(one, "tau") for key, one in each.items()}
        line |= {f"replayed tau {key}": figure(one, "replayed_tau") for key, one in each.items() if "chain" in key}
        line[f"survival by depth {label(first)}"] = " ".join(f"{value:.2f}" for value in main["survival"])
        line |= {f"{stage} ms {label(first)}": f"{main['ms_per_round'][stage]:.1f}" for stage in ("draft", "verify")}
        for key, one in each.items():
            line[f"speedup {key}, tokens/s"] = f"{figure(one, 'speedup')}, {one['tokens_per_second']:.1f}"
        lines.append(line)
    return markdown("Comparison", lines)


def categories(ranked: list[Run], columns: Columns) -> str:
    """tau by category, at the lowest temperature."""
    lowest, lines = min(columns)[0], []
    for kind, run in product(ranked[0].shapes, ranked):
        parts = columns[lowest, kind][run.name]["by_category"].items()
        taus = {f"{name} ({part['num_prompts']})": figure(part, "tau") for name, part in parts}
        lines.append({"run": run.name, "shape": kind, **taus})
    return markdown(f"tau by category (number of prompts), T={lowest:g}", lines)


def differences(ranked: list[Run], first: Run, rows: dict[tuple[float, str], dict[str, list[Row]]]) -> list[str]:
    """Paired over prompts: all against the one listed first, and every pair for the chain at the lowest temperature."""

    def cell(key: tuple[float, str], run: Run, other: Run) -> str:
        return figure(difference(rows[key][run.name], rows[key][other.name]), "tau_difference", "+.2f")

    main = min(rows)
    against = [{"run": run.name, **{label(key): cell(key, run, first) for key in rows}} for run in ranked]
    pairs = [{"run": run.name, **{other.name: cell(main, run, other) for other in ranked}} for run in ranked]
    return [
        markdown(f"tau minus that of {first.name} on the same prompts", against),
        markdown(f"tau of the row minus that of the column on the same prompts, {label(main)}", pairs),
    ]


def conditions(ranked: list[Run], columns: Columns, settings: dict) -> list[str]:
    """What all runs had in common, and whether each is lossless."""
    rates = [
        f"{column[name]['baseline_tokens_per_second']:.1f} ({owner}, T={temperature:g})"
        for owner, name in {run.plain: run.name for run in ranked}.items()
        for (temperature, kind), column in columns.items()
        if kind == "chain"
    ]
    verdicts = [
        f"- {run.name}, {label(key)}: {verdict(columns[key][run.name])}"
        for run, key in product(ranked, columns)
        if key[0] == min(columns)[0]
    ]
    return [
        CONDITIONS.format(**settings) + f"; {' and '.join(settings['shapes'].values())}, cut to what a head can draft; "
        f"torch {settings['torch']}, prompts of {settings['prompts']}. tau: {TAU}. In brackets: 95 % bootstrap "
        f"intervals over prompts. All ways of decoding take turns on every prompt; ms are those of a round. "
        f"Plain decoding, tokens/s: {', '.join(rates)}.",
        "\n".join(verdicts),
    ]


def picture(ranked: list[Run], columns: Columns, settings: dict) -> Figure:
    """tau and speedup of every run, and survival by depth; a run has the same colour and number everywhere."""
    first = min(columns)
    shown = [key for key in columns if key[0] in (first[0], max(columns)[0])]
    colours = [*colormaps["tab10"].colors, "black", "gold"] * len(ranked)
    # circles for chains, squares for trees; hollow above the lowest temperature
    styles = {key: {"marker": "os"[key[1] == "tree"], "mfc": None if key[0] == first[0] else "white"} for key in shown}
    drawing = Figure(figsize=(11, 7), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(3, 3, 2.6))
    for axes, name in ((left, "tau"), (middle, "speedup over plain decoding")):
        for place, (run, colour) in enumerate(zip(ranked, colours)):
            for offset, key in enumerate(shown):
                value, interval = (columns[key][run.name][name.split()[0] + end] for end in ("", "_ci"))
                y = place + 0.7 * ((offset + 0.5) / len(shown) - 0.5)
                axes.plot(interval, [y, y], color=colour, linewidth=1.2)
                axes.plot(value, y, color=colour, **styles[key])
            axes.axhline(place + 0.5, color="0.9", linewidth=0.8)
        axes.axvline(1, color="0.6", linewidth=0.8, linestyle=":")
        axes.set(xlabel=name, ylim=(len(ranked) - 0.5, -0.5), yticks=[])
    names = [run.name + " (adapted)" * (run.plain != FROZEN) for run in ranked]
    left.set_yticks(range(len(ranked)), [f"{name}  {place}" for place, name in enumerate(names, 1)])
    for key in shown:
        left.plot([], [], color="0.3", linestyle="", label=label(key), **styles[key])
    drawing.legend(loc="outside upper left", ncols=len(shown), frameon=False)

    survival = [columns[first][run.name]["survival"] for run in ranked]
    height = top = 1.05 * max(map(max, survival)) or 1.0
    for place in sorted(range(len(ranked)), key=lambda place: -survival[place][0]):
        right.plot(range(1, len(survival[place]) + 1), survival[place], "o-", markersize=3, color=colours[place])
        height = min(height - top / 32, survival[place][0])  # numbers from the top down, none on another
        line = {"arrowstyle": "-", "color": colours[place], "linewidth": 0.5}
        at = {"xy": (1, survival[place][0]), "xytext": (0.6, height), "va": "center", "fontsize": 8}
        right.annotate(str(place + 1), **at, color=colours[place], arrowprops=line)
    right.set(xlabel=f"survival by depth ({label(first)})", ylim=(0, top), xlim=(0.5, max(map(len, survival)) + 0.2))
    right.set_xticks(range(1, max(map(len, survival)) + 1))
    drawing.supxlabel(CONDITIONS.format(**settings) + "; bars: 95 % over prompts", fontsize=8, color="0.4")
    return drawing


if __name__ == "__main__":
    cli.run(main)
