"""Decodes every prompt with several checkpoints and proposers, in turn, and compares tau and speedup in tables and a picture.

    python scripts/compare.py checkpoint=checkpoints/a,checkpoints/b prompts=my_heldout.jsonl out=comparison
    python scripts/compare.py checkpoint=checkpoints/a proposers=ngram,suffix proposer.ngram.max=4 decode.temperature=0

Nothing is trained. Every checkpoint is decoded in each shape of chains= and trees=, every proposer once, and each prompt
plainly. A proposer that holds a trained head, such as auto, is decoded with each of the checkpoints. Writes OUT/comparison.html,
which needs no network, OUT/table.md and OUT/comparison.png. OUT/rows.jsonl keeps each finished prompt: after Ctrl-C or a
kill, the same command continues.
"""

from helpers import comparison, decoding, loading, proposers
from helpers.loading import FROZEN, Run
from helpers.options import option, options, split
from helpers.options import run as run_command

import collections
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.table

from specdec.core import files, hub
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.measuring.comparing import Decoders, Method, compare_prompts, make_decoders, report_of, results_of
from specdec.measuring.figures import tau_difference
from specdec.measuring.measurement import Prompt, check_prompts, turns
from specdec.measuring.tuning import name_of
from specdec.target.model import Target
from train import progress
from train.answers.resumable import Resumable, digest, digest_folder, resumable
from train.pages import run_page
from train.pages.comparison_page import render_comparison


@dataclass(frozen=True, kw_only=True)
class CompareDecodeOptions(decoding.GrammarOption, decoding.CommonDecodeOptions):
    temperature: str = "0,1"


@dataclass(frozen=True, kw_only=True)
class Compare(loading.PromptOptions, decoding.ShapesOptions, proposers.SeveralOptions):
    chains: str = "4"
    trees: str = "4x3x8"
    batch: int = option(1, "prompts decoded at once; speedups are then those of the batch")
    out: str = option("comparison", "folder for comparison.html, table.md, comparison.png and rows.jsonl", folder=True)
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: CompareDecodeOptions = field(default_factory=CompareDecodeOptions)


def main() -> None:
    chosen = options(Compare, __doc__)
    console = progress.Results()
    loading.use_threads(Path(chosen.out) / "settings.json")
    check(chosen)
    samplings = sorted(set(chosen.decode.samplings()), key=lambda sampling: sampling.temperature)
    shapes = chosen.shapes()
    runs = loading.load_runs(chosen.checkpoint, chosen.target)
    opened = loading.shared_target(runs, chosen.target, head=chosen.settings.get("checkpoint"))
    prompts = loading.load_prompts(chosen, opened, split(chosen.checkpoint))
    ruled = decoding.Ruled.of(chosen.decode.grammar, opened)
    if ruled:
        prompts = ruled.apply(prompts)
    configs = proposers.configure_for_each(
        chosen.proposers,
        settings=chosen.settings,
        drafting=chosen.decode.drafting_of(shapes[0]),
        checkpoints={run.name: str(run.folder) for run in runs},
    )
    settings = describe(chosen, runs, configs, prompts, opened.target)
    methods, run_of = make_methods(chosen, runs, configs, opened.target, shapes)
    out = Path(chosen.out)
    with resumable(out / "settings.json", out / "rows.jsonl", settings, advice="Choose another out=FOLDER.") as results:
        results.same(target=opened.target.fingerprint())
        progress.note(f"{len(results.rows)} of {len(prompts) * len(samplings)} prompts x temperatures are in {out}")
        runners: dict[str, Runner] = collections.defaultdict(chosen.decode.runner)
        for sampling in samplings:
            decoders = make_decoders(methods, sampling, opened.stop, runners)
            for rows in decode_missing(chosen, methods, decoders, prompts, results, sampling, ruled):
                results.append(*rows)
        given = {f"proposer.{key}": value for key, value in chosen.settings.items()}
        console.print(write(out, methods, run_of, results.rows, settings, given))
    console.print(f"{out}/comparison.html is the page; comparison.png and table.md beside it hold the same")


def check(chosen: Compare) -> None:
    """Raises ValueError for options that leave nothing to compare."""
    if not split(chosen.checkpoint) and not split(chosen.proposers):
        raise ValueError(
            "There is nothing to compare: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    if not chosen.shapes():
        raise ValueError(
            "chains= and trees= are both empty: give a chain, such as chains=4. Proposers draft as deep as the first shape."
        )


def describe(
    chosen: Compare, runs: list[Run], configs: dict[str, proposers.Config], prompts: list[Prompt], target: Target
) -> dict:
    """The settings that all rows of a comparison have in common."""
    folders = sorted({folder for config in configs.values() for folder in proposers.folders(config)})
    weights = {run.name: digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs}
    return {
        "checkpoint": {run.name: f"{hub.pinned(run.folder)} {weights[run.name]}" for run in runs},
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in folders},
        "prompts": chosen.prompts,
        "num_prompts": len(prompts),
        "prompts_digest": digest(repr(prompts).encode()),
        "max_new_tokens": chosen.max_new_tokens,
        "chains": chosen.chains,
        "trees": chosen.trees,
        "decode": asdict(chosen.decode),
        "batch": chosen.batch,
        "conditions": loading.conditions(target),
        **loading.machine(target),
    }


def make_methods(
    chosen: Compare, runs: list[Run], configs: dict[str, proposers.Config], target: Target, shapes: list[TreeShape]
) -> tuple[list[Method], dict[str, Run]]:
    """Every run in every shape, no deeper than its drafter's steps, and every proposer; the runs by their methods' names."""
    methods: list[Method] = []
    run_of: dict[str, Run] = {}
    for run in runs:
        for shape in decoding.cut(shapes, run.drafter.depth):
            drafting = chosen.decode.drafting_of(shape)
            name, proposer = f"{run.name}, {name_of(drafting)}", drafting.proposer(run.drafter)
            run_of[name] = run
            own = run.drafter.target
            methods.append(Method(name, own, proposer, drafting, shape.depth, run.baseline, run.drafter))
    for name, config in configs.items():
        proposer, drafting = proposers.make(config, target), chosen.decode.drafting_of(shapes[0])
        methods.append(Method(name, target, proposer, drafting, proposer.depth, FROZEN))
    return methods, run_of


def decode_missing(
    chosen: Compare,
    methods: list[Method],
    decoders: Decoders,
    prompts: list[Prompt],
    results: Resumable,
    sampling: Sampling,
    ruled: decoding.Ruled | None,
) -> Iterator[list[dict]]:
    """Decodes the prompts that have no row at this temperature. Yields the rows of each batch."""
    done = {row["number"] for row in results.rows if row["temperature"] == sampling.temperature}
    missing = [number for number in range(len(prompts)) if number not in done]
    groups = turns(missing, chosen.batch) if missing else []
    grammars = ruled and ruled.grammars
    if groups:
        for decoder in decoders.values():
            check_prompts(decoder, prompts, chosen.max_new_tokens, source=chosen.prompts)
        compare_prompts(
            methods, decoders, prompts, [0], min(8, chosen.max_new_tokens), batch=1, grammars=grammars
        )  # a warm-up
    for method in methods:
        method.proposer.forget()
    for numbers in progress.track(groups, f"temperature {sampling.temperature:g}", unit="prompts", size=len):
        yield compare_prompts(
            methods, decoders, prompts, numbers, chosen.max_new_tokens, batch=chosen.batch, grammars=grammars
        )


def write(
    out: Path, methods: list[Method], run_of: dict[str, Run], rows: list[dict], settings: dict, given: dict[str, str]
) -> rich.table.Table:
    """Writes table.md, comparison.png and comparison.html. given: settings of proposers as they were written. -> what the terminal shows"""
    temperatures = sorted({row["temperature"] for row in rows})
    results = {
        t: {each.name: results_of(rows, name=each.name, baseline=each.baseline, temperature=t) for each in methods}
        for t in temperatures
    }
    columns = {t: {each.name: report_of(each, results[t][each.name], t) for each in methods} for t in temperatures}
    names = sorted(columns[min(columns)], key=lambda name: -columns[min(columns)][name].tau)
    baselines = {method.baseline: method.name for method in methods}
    conditions = comparison.conditions(columns, baselines, settings, given)
    parts = [
        comparison.table(names, columns, run_of, {method.name: method.depth for method in methods}),
        comparison.categories(names, columns),
        comparison.differences(names, methods[0].name, results),
        conditions,
        comparison.verdicts(names, columns),
    ]
    files.write_text(out / "table.md", "\n\n".join(parts) + "\n")
    comparison.picture(names, columns, settings).savefig(out / "comparison.png", dpi=130)
    first = methods[0].name
    page = render_comparison(
        columns,
        {t: {name: tau_difference(found[name], found[first]) for name in names} for t, found in results.items()},
        first=first,
        title=f"{len(names)} ways to draft",
        conditions=conditions,
        settings=settings,
        logs={run.name: log for run in run_of.values() if (log := run_page.log_of(run.folder))},
    )
    files.write_text(out / "comparison.html", page)
    return comparison.summary(names, columns, baselines)


if __name__ == "__main__":
    run_command(main)
