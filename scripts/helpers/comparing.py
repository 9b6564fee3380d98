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

from specdec.core import files, hub
from specdec.core.generation import Generation
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import (
    MeasureSettings,
    Method,
    Prompt,
    PromptResult,
    measure,
)
from specdec.measuring.report import TAU, Report, summarise_by_category, tau_difference
from specdec.target.model import Target
from train import progress
from train.answers.resumable import Resumable, digest, digest_folder, resumable
from train.pages.comparison_page import Differences, render_comparison, tabulate

SHOWN = ("method", "temperature", "tau, decoded", "tau minus", "speedup", "tokens/s", "plain")  # in a terminal
Found = dict[float, dict[str, list[PromptResult]]]  # temperature -> method -> results, by prompt


def compare(chosen: Any, out: Path, console: progress.Results) -> None:
    """chosen: Evaluate; out: the folder"""
    loading.use_threads(out / "settings.json")
    samplings = sorted(set(chosen.decode.samplings()), key=lambda sampling: sampling.temperature)
    shapes = decoding.read_shapes(chosen.chains, chosen.trees)
    draftings = [chosen.decode.drafting(shape) for shape in shapes] or [chosen.decode.drafting()]
    batches = read_batches(chosen)
    names = ",".join(filter(None, (chosen.proposers, chosen.proposer)))
    if not names and not split(chosen.checkpoint):
        raise ValueError(
            "There is nothing to compare: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    opened = loading.shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    prompts = loading.load_prompts(chosen, opened)
    folders = {run.name: str(run.folder) for run in runs}
    configs = proposers.configure_all(names, settings=chosen.settings, drafting=draftings[0], checkpoints=folders)
    methods, run_of = make_methods(runs, configs, opened.target, draftings)
    settings = describe(chosen, runs, configs, prompts, opened.target)
    prompts = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), *batches)))
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice="Choose another out=FOLDER.") as results:
        results.same(target=opened.target.fingerprint())
        num = len(prompts) * len(samplings) * len(batches)
        progress.note(f"{len(results.rows)} of {num} prompts x temperatures x batch sizes are in {out}")
        stop = set() if chosen.ignore_stop else opened.stop
        for batch, sampling in itertools.product(batches, samplings):
            how = MeasureSettings(sampling, stop, chosen.max_new_tokens, chosen.seed, batch)
            decode_missing(methods, prompts, how, results, chosen.prompts)
        found: Found = {sampling.temperature: {} for sampling in samplings}
        named: dict[str, Method] = {}
        for sampling, batch, method in itertools.product(samplings, batches, methods):
            name = f"{method.name}, batch {batch}" if len(batches) > 1 else method.name
            named[name] = method
            found[sampling.temperature][name] = results_of(results.rows, method, sampling.temperature, batch)
        write(out, console, named, run_of, found, settings)


def read_batches(chosen: Any) -> list[int]:
    """The batch sizes, in order. Raises ValueError for what is no list of numbers."""
    sizes = split(chosen.batches) or [str(chosen.batch)]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"batches={chosen.batches}: give numbers of 1 or more, such as 1,4,16.")
    return sorted({int(size) for size in sizes})


def describe(
    chosen: Any, runs: list[Run], configs: dict[str, proposers.Config], prompts: list[Prompt], target: Target
) -> dict:
    """The settings that all rows of a comparison have in common."""
    folders = sorted({folder for config in configs.values() for folder in proposers.drawn_from(config)})
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
        "target": target.name,
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
            label = str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"
            method = Method(
                f"{run.name}, {label}",
                run.drafter.target,
                drafting.proposer(run.drafter),
                drafting,
                run.baseline,
                run.drafter,
            )
            run_of[method.name] = run
            methods.append(method)
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
    figures = ("replayed_rounds", "replayed_accepted", "gap", "candidates")
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
            results.append(PromptResult(Prompt(**row["prompt"]), plain, drafted, **cell))
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
    columns: dict[float, dict[str, Report]] = {}
    for temperature, column in found.items():
        reports = {name: summarise(methods[name], results, temperature) for name, results in column.items()}
        columns[temperature] = {
            name: replace(report, training=run.training) if (run := run_of.get(methods[name].name)) else report
            for name, report in reports.items()
        }
    lowest, first = columns[min(columns)], next(iter(methods))
    names = sorted(lowest, key=lambda name: -(lowest[name].tau or 0.0))
    columns = {temperature: {name: column[name] for name in names} for temperature, column in columns.items()}
    differences = {t: {name: tau_difference(each[name], each[first]) for name in names} for t, each in found.items()}
    conditions = (
        "{target}, {dtype}, {machine}, {threads} threads; {num_prompts} prompts of {prompts}, <= {max_new_tokens} new tokens; torch "
        "{torch}, ".format(**settings)
        + f"{'compiled' if settings['decode']['compile'] else 'not compiled'}. tau: {TAU}. Intervals: 95 % over prompts. All "
        "methods decode the same prompts in turn, round by round."
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
        "temperatures": {
            f"{t:g}": {name: report.to_json() for name, report in column.items()} for t, column in columns.items()
        },
        f"tau minus that of {first}": {f"{t:g}": column for t, column in differences.items()},
    }
    files.write_text(out / "report.json", json.dumps(document, indent=1) + "\n")
    console.print(make_table(columns, differences, first))
    console.print(f"written: {out}/comparison.html and report.json")


def summarise(method: Method, results: list[PromptResult], temperature: float) -> Report:
    """The report of one method at one temperature."""
    return summarise_by_category(
        results,
        depth=method.proposer.depth,
        temperature=temperature,
        adapted=method.target.adapted,
    )


def make_table(columns: dict[float, dict[str, Report]], differences: Differences, first: str) -> rich.table.Table:
    """What a terminal shows of the page's table."""
    whole = tabulate(columns, differences, first)
    shown = [place for place, head in enumerate(whole.heads) if head.startswith(SHOWN)]
    table = rich.table.Table()
    for place in shown:
        table.add_column(whole.heads[place], no_wrap=place == 0)
    for row in whole.rows:
        table.add_row(*(row[place] for place in shown))
    return table
