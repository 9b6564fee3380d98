"""evaluate of several heads, proposers, shapes or batch sizes: each prompt by every method in turn, resumable, as one page."""

from helpers import decoding, loading, proposers
from helpers.loading import Run
from helpers.options import split

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rich.table

from specdec.core import files, hub, rules
from specdec.core.generation import Generation
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import (
    FROZEN,
    MeasureSettings,
    Method,
    Prompt,
    PromptResult,
    measure,
    name_drafting,
)
from specdec.measuring.report import TAU, Report, summarise_by_category, tau_difference
from specdec.target.model import Target
from train import progress
from train.answers.resumable import Resumable, digest, digest_folder, resumable
from train.pages.comparison_page import render_comparison

Columns = dict[float, dict[str, Report]]  # temperature -> method -> report
Found = dict[float, dict[str, list[PromptResult]]]  # the same, of the results


def compare(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    loading.use_threads(out / "settings.json")
    samplings = sorted(set(chosen.decode.samplings()), key=lambda sampling: sampling.temperature)
    draftings = [chosen.decode.drafting(shape) for shape in chosen.shapes()] or [chosen.decode.drafting()]
    batches = read_batches(chosen)
    names = ",".join(filter(None, (chosen.proposers, chosen.proposer)))
    if not names and not split(chosen.checkpoint):
        raise ValueError(
            "There is nothing to compare: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    opened = loading.shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    prompts = loading.load_prompts(chosen, opened, split(chosen.checkpoint))
    ruled = decoding.Ruled.of(chosen.decode.grammar, opened)
    if ruled:
        prompts = ruled.apply(prompts)
    configs = configure_for_each(
        names, settings=chosen.settings, drafting=draftings[0], checkpoints={run.name: str(run.folder) for run in runs}
    )
    methods, run_of = make_methods(runs, configs, opened.target, draftings)
    settings = describe(chosen, runs, configs, prompts, opened.target)
    prompts = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), *batches)))
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice="Choose another out=FOLDER.") as results:
        results.same(target=opened.target.fingerprint())
        num = len(prompts) * len(samplings) * len(batches)
        progress.note(f"{len(results.rows)} of {num} prompts x temperatures x batch sizes are in {out}")
        for batch, sampling in itertools.product(batches, samplings):
            stop, grammars = set() if chosen.ignore_stop else opened.stop, ruled.grammars if ruled else None
            how = MeasureSettings(sampling, stop, chosen.max_new_tokens, chosen.seed, batch, grammars)
            decode_missing(methods, prompts, how, results, chosen.prompts)
        named = {f"{method.name}, batch {batch}" if len(batches) > 1 else method.name: (method, batch)
                 for batch, method in itertools.product(batches, methods)}  # fmt: skip
        found = {
            sampling.temperature: {
                name: results_of(results.rows, method, sampling.temperature, batch)
                for name, (method, batch) in named.items()
            }
            for sampling in samplings
        }
        write(out, console, {name: method for name, (method, _) in named.items()}, run_of, found, settings)


def read_batches(chosen: Any) -> list[int]:
    """The batch sizes, in order. Raises ValueError for what is no list of numbers."""
    try:
        sizes = sorted({int(part) for part in split(chosen.batches)}) or [chosen.batch or 1]
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise ValueError(f"batches={chosen.batches}: give numbers of 1 or more, such as 1,4,16.")
    return sizes


def configure_for_each(
    listed: str, *, settings: proposers.Settings, drafting: Drafting, checkpoints: dict[str, str]
) -> dict[str, proposers.Config]:
    """The proposers with each of the checkpoints, given by name: those that hold a trained head are named after its."""
    if "checkpoint" in settings or len(checkpoints) < 2:
        only = next(iter(checkpoints.values()), None)
        return proposers.configure_all(listed, settings=settings, drafting=drafting, checkpoint=only)
    found: dict[str, proposers.Config] = {}
    for head, folder in checkpoints.items():
        configs = proposers.configure_all(listed, settings=settings, drafting=drafting, checkpoint=folder)
        found |= {f"{name} with {head}" if proposers.heads(each) else name: each for name, each in configs.items()}
    return found


def describe(
    chosen: Any, runs: list[Run], configs: dict[str, proposers.Config], prompts: list[Prompt], target: Target
) -> dict:
    """The settings that all rows of a comparison have in common."""
    folders = sorted({folder for config in configs.values() for folder in proposers.folders(config)})
    weights = {run.name: digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs}
    given = ("prompts", "max_new_tokens", "chains", "trees", "ignore_stop", "seed")
    return {
        "checkpoint": {run.name: f"{hub.pinned(run.folder)} {weights[run.name]}" for run in runs},
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in folders},
        "num_prompts": len(prompts),
        "prompts_digest": digest(repr(prompts).encode()),
        **{name: getattr(chosen, name) for name in given},
        "decode": asdict(chosen.decode),
        "conditions": loading.conditions(target),
        **loading.machine(target),
    }


def make_methods(
    runs: list[Run], configs: dict[str, proposers.Config], target: Target, draftings: list[Drafting]
) -> tuple[list[Method], dict[str, Run]]:
    """Every head in every shape, no deeper than its steps, and every proposer; the heads' runs by their methods' names."""
    methods: list[Method] = []
    run_of: dict[str, Run] = {}
    for run in runs:
        for shape in decoding.cut([drafting.shape for drafting in draftings], run.drafter.depth):
            drafting = replace(draftings[0], depth=shape.depth, width=shape.width, nodes=shape.nodes)
            name, proposer = f"{run.name}, {name_drafting(drafting)}", drafting.proposer(run.drafter)
            run_of[name] = run
            methods.append(Method(name, run.drafter.target, proposer, drafting, run.baseline, run.drafter))
    for name, config in configs.items():
        methods.append(Method(name, target, proposers.make(config, target), draftings[0]))
    for method in methods:
        decoding.show_measuring(method.proposer)
    return methods, run_of


def decode_missing(
    methods: list[Method], prompts: list[Prompt], settings: MeasureSettings, results: Resumable, source: str
) -> None:
    """Decodes the prompts that have no row with this temperature and batch size."""
    temperature, batch = settings.sampling.temperature, settings.batch
    same = {"temperature": temperature, "batch": batch}
    done = {row["number"] for row in results.rows if same.items() <= row.items()}
    missing = [number for number in range(len(prompts)) if number not in done]
    if not missing:
        return
    what = f"temperature {temperature:g}, batch {batch}"
    track = lambda groups: progress.track(groups, what, unit="prompts", size=len)
    chosen, numbers = [prompts[number] for number in missing], iter(missing)
    for group in measure(methods, chosen, settings, numbers=missing, source=source, progress=track):
        results.append(*({"number": next(numbers), **same, **to_row(methods, each)} for each in group))


def to_row(methods: list[Method], each: dict[str, PromptResult]) -> dict:
    """The results of one prompt for JSON; `results_of` reads them."""
    figures = ("replayed_rounds", "replayed_accepted", "gap")
    cells = {
        name: {"drafted": asdict(result.drafted), **{figure: getattr(result, figure) for figure in figures}}
        for name, result in each.items()
    }
    plain = {method.baseline: asdict(each[method.name].plain) for method in methods}
    return {"prompt": asdict(each[methods[0].name].prompt), "plain": plain, "methods": cells}


def results_of(rows: Iterable[dict], method: Method, temperature: float, batch: int) -> list[PromptResult]:
    """The results of one method, by prompt. rows: in any order"""
    results = []
    for row in sorted(rows, key=lambda row: row["number"]):
        if (row["temperature"], row["batch"]) == (temperature, batch):
            cell = {**row["methods"][method.name]}
            plain, drafted = Generation(**row["plain"][method.baseline]), Generation(**cell.pop("drafted"))
            prompt = {key: value for key, value in row["prompt"].items() if key != "grammar"}
            results.append(PromptResult(Prompt(**prompt), plain, drafted, **cell))
    return results


def write(
    out: Path,
    console: progress.Results,
    methods: dict[str, Method],
    run_of: dict[str, Run],
    found: Found,
    settings: dict,
) -> None:
    """Writes comparison.html and report.json, and prints a table. methods: by the names in `found`; run_of: by Method.name"""
    columns = {
        temperature: {name: summarise(methods[name], run_of, temperature, column[name]) for name in methods}
        for temperature, column in found.items()
    }
    lowest = columns[min(columns)]
    names, first = sorted(lowest, key=lambda name: -(lowest[name].tau or 0.0)), next(iter(lowest))
    columns = {temperature: {name: column[name] for name in names} for temperature, column in columns.items()}
    differences = {t: {name: tau_difference(each[name], each[first]) for name in names} for t, each in found.items()}
    fixed = {name: method.drafting for name, method in methods.items() if method.name in run_of}
    fastest = max(fixed, key=lambda name: lowest[name].speedup or 0.0, default=None)
    conditions = (
        f"{settings['conditions']}; {settings['num_prompts']} prompts of {settings['prompts']}, <= {settings['max_new_tokens']} new tokens; torch {settings['torch']}, "
        f"{'compiled' if settings['decode']['compile'] else 'not compiled'}. tau: {TAU}. Intervals: 95 % over prompts. All methods "
        "decode the same prompts in turn, round by round."
    )
    page = render_comparison(
        columns,
        differences,
        first=first,
        title=f"{len(names)} ways to draft",
        conditions=conditions,
        settings=settings,
    )
    files.write_text(out / "comparison.html", page)
    document = {
        "definition_of_tau": TAU,
        "conditions": conditions,
        "settings": settings,
        "drafting": fastest and asdict(fixed[fastest]),  # of the fastest fixed shape, for decode.file=
        "temperatures": {
            f"{t:g}": {name: report.to_json() for name, report in column.items()} for t, column in columns.items()
        },
        f"tau minus that of {first}": {f"{t:g}": column for t, column in differences.items()},
    }
    files.write_text(out / "report.json", json.dumps(document, indent=1) + "\n")
    for temperature, reports in columns.items():
        console.print(make_table(temperature, reports, methods, differences[temperature], first))
    said = f"; decode.file={out}/report.json decodes as {fastest}, the fastest fixed shape" if fastest else ""
    console.print(f"written: {out}/comparison.html and report.json{said}")


def summarise(method: Method, run_of: dict[str, Run], temperature: float, results: list[PromptResult]) -> Report:
    report = summarise_by_category(
        results,
        depth=method.proposer.depth,
        temperature=temperature,
        adapted=method.target.adapted,
        lossy=method.drafting.rule in rules.LOSSY,
    )
    return replace(report, training=run_of[method.name].training if method.name in run_of else None)


def make_table(
    temperature: float,
    column: dict[str, Report],
    methods: dict[str, Method],
    differences: dict[str, tuple[float, list[float]]],
    first: str,
) -> rich.table.Table:
    """What a terminal shows: the methods of one temperature, the slowest first."""
    table = rich.table.Table(title=f"temperature {temperature:g}; difference: of tau, to {first}", title_justify="left")
    table.add_column("method")
    for name in ("tau", "difference", "tokens/s", "plain", "speedup", "95 % over prompts"):
        table.add_column(name, justify="right")
    for name, report in sorted(column.items(), key=lambda item: item[1].speedup or 0.0):
        value, (low, high) = differences[name]
        table.add_row(
            name if methods[name].baseline == FROZEN else f"{name} (beside {methods[name].baseline})",
            f"{report.tau:.2f}",
            f"{value:+.2f} ({low:+.2f} .. {high:+.2f})",
            f"{report.tokens_per_second:.1f}",
            f"{report.baseline_tokens_per_second:.1f}",
            f"{report.speedup:.2f}",
            "{:.2f} .. {:.2f}".format(*(report.speedup_ci or ())),
        )
    return table
