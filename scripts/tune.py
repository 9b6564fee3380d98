"""Measures this device, chooses the fastest chain or tree for a checkpoint, and writes it for decode.file=.

    python scripts/tune.py checkpoint=checkpoints/shipped/eagle decode.compile=true out=tuned.yaml
    python scripts/evaluate.py checkpoint=checkpoints/shipped/eagle decode.file=tuned.yaml

Every chain, every tree, and a chain that stops where drafts are unlikely to survive gets a predicted speedup
(docs/methods.md, section 8). Then all are decoded again, in turn, to compare the prediction with the measurement.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.box
import rich.console
import rich.table
import yaml
from rich.progress import track

from helpers import decoding, loading
from helpers.options import option, options, run
from specdec import files, speed
from specdec.drafting import Drafting
from specdec.report import Report, summarise
from specdec.tuning import Choice, Setting, Tuner, candidates
from train import data

FIGURES = ("tau", "tau_ci", "speedup", "speedup_ci", "tokens_per_second", "baseline_tokens_per_second", "ms_per_round")


@dataclass(frozen=True, kw_only=True)
class Tune(loading.PromptOptions, decoding.ShapesOptions):
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    limit: int = 8
    max_new_tokens: int = 48
    chains: str = "1,2,3,4,5"
    trees: str = "2x2x4,3x3x6,4x3x8,4x4x12"
    stopping: bool = option(True, "also try a chain that stops where drafts are unlikely to survive")
    seed: int = option(0, "seed of sampling")
    out: str = option("tuned.yaml", "YAML file of the chosen settings, for decode.file=")
    out_json: str | None = option(None, "JSON file for all figures")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: decoding.CommonDecodeOptions = field(default_factory=decoding.CommonDecodeOptions)


def main() -> None:
    chosen = options(Tune, __doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    sampling, shapes = chosen.decode.sampling(), chosen.shapes()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    prompts = data.load_prompts(chosen.prompts, loaded.tokenizer, limit=chosen.limit)
    draftings = choose_candidates(chosen, shapes, loaded, console)
    conditions = (
        f"{loaded.folder} on {loading.conditions(loaded.target)}, "
        f"{'compiled' if chosen.decode.compile else 'not compiled'}, temperature {sampling.temperature:g}; "
        f"{len(prompts)} prompts, <= {chosen.max_new_tokens} new tokens"
    )
    console.print(conditions)
    tuner = Tuner(
        loaded.drafter,
        prompts,
        sampling=sampling,
        stop=loaded.stop,
        max_new_tokens=chosen.max_new_tokens,
        runner=chosen.decode.runner(),
        seed=chosen.seed,
        progress=lambda items, text: track(items, description=text, console=console, transient=True),
    )
    prediction = tuner.predict(draftings, stopping=chosen.stopping)
    if prediction.costs is not None:
        console.print(show_costs(prediction.costs))
        if not prediction.stops:
            console.print("stopping: left out, because it would not have paid")
    for setting in prediction.settings:
        console.print(setting.explain())
    results = tuner.verify(prediction.settings)
    reports = {
        setting.name: summarise(results[setting.name], depth=setting.drafting.depth, temperature=sampling.temperature)
        for setting in prediction.settings
    }
    choice = Choice.of(prediction.settings, results, reports)
    console.print(table(prediction.settings, reports, choice.final))
    console.print(choice.explain())
    write(chosen, conditions, prediction.settings, reports, choice)
    console.print(f"written: {chosen.out}; use it with decode.file={chosen.out}")


def choose_candidates(
    chosen: Tune, shapes: list, loaded: loading.Loaded, console: rich.console.Console
) -> list[Drafting]:
    draftings, left_out = candidates(map(chosen.decode.drafting_of, shapes), loaded.drafter.depth)
    for name in left_out:
        console.print(f"left out: {name}; this drafter takes {loaded.drafter.depth} steps")
    if not draftings:
        raise ValueError("chains and trees leave nothing to try: give a chain, such as chains=1.")
    return draftings


def show_costs(costs: speed.ChainCosts) -> str:
    draft, verify = (" ".join(f"{1e3 * seconds:.1f}" for seconds in part) for part in (costs.draft, costs.verify))
    return f"chains of 0, 1, .. drafts that may stop, ms a round: draft {draft}; verify {verify}"


def table(settings: list[Setting], reports: dict[str, Report], final: Setting) -> rich.table.Table:
    table = rich.table.Table(
        title="Speedup over plain decoding, in tokens/s of the rounds of all prompts (* chosen)",
        title_justify="left",
        box=rich.box.SIMPLE,
    )
    table.add_column("setting")
    for name in ("tau", "predicted speedup", "measured speedup", "95 % interval", "measured minus predicted"):
        table.add_column(name, justify="right")
    for setting in settings:
        report = reports[setting.name]
        table.add_row(
            f"{setting.name} *" if setting == final else setting.name,
            f"{setting.tau:.2f}",
            f"{setting.predicted:.2f}",
            f"{report.speedup:.2f}",
            "{:.2f} .. {:.2f}".format(*report.speedup_ci),
            f"{100 * (report.speedup / setting.predicted - 1):+.1f} %",
        )
    return table


def write(chosen: Tune, conditions: str, settings: list[Setting], reports: dict[str, Report], choice: Choice) -> None:
    """The chosen settings to out=, all figures to out_json=."""
    final = choice.final
    speedups = f"speedup {final.predicted:.2f} predicted, {choice.report.speedup:.2f} measured"
    drafting = yaml.safe_dump(asdict(final.drafting), sort_keys=False)
    files.write_text(Path(chosen.out), f"# {conditions}\n# {final.name}: {speedups}\n{drafting}")
    if chosen.out_json:
        figures = {
            setting.name: {
                **asdict(setting),
                "predicted": setting.predicted,
                "measured": {name: getattr(reports[setting.name], name) for name in FIGURES},
            }
            for setting in settings
        }
        document = {
            "conditions": conditions,
            "options": asdict(chosen),
            "verdict": choice.explain(),
            "chosen": final.name,
            "settings": figures,
        }
        files.write_text(Path(chosen.out_json), json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
