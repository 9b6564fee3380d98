"""Decodes every prompt plainly and with drafts, in turn, and reports what the drafts gain.

    python scripts/evaluate.py checkpoint=checkpoints/shipped/eagle3 decode.temperature=0,1 limit=16
    python scripts/evaluate.py proposer=ngram prompts=data/prompts_copy.jsonl

Prints tau (tokens emitted per target pass of a round, bonus or correction token counted), survival by depth, speedup and
whether answers are unchanged, with 95 % intervals over prompts. Writes all figures to the report.
"""

from helpers import decoding, grammar_figures, loading, processes, proposers
from helpers.options import option, options, run

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.console
import rich.table

from specdec import checkpoint
from specdec.core import files, hub, rules
from specdec.core.sampling import Sampling
from specdec.core.timing import fastest_batch
from specdec.decoding.drafting import Drafting
from specdec.export.cards import SERVED
from specdec.measuring.figures import TAU
from specdec.measuring.measurement import Prompt, PromptResult, measure
from specdec.measuring.report import Report, summarise_by_category
from specdec.proposers.auto import Auto
from specdec.proposers.heads import HeadProposer
from train import display, progress


@dataclass(frozen=True, kw_only=True)
class Evaluate(loading.PromptOptions, proposers.ProposerOptions):
    max_new_tokens: int = 128
    batch: int | None = option(1, "prompts decoded at once; null: the fastest number, which is measured first")
    auto: bool = option(True, "beside a head's fixed shape, also decode with proposer=auto")
    seed: int = option(0, "seed of sampling")
    out: str = option("report.json", "report to write")
    target: loading.SharedTargetOptions = field(default_factory=loading.SharedTargetOptions)
    decode: decoding.RuledDecodeOptions = field(default_factory=decoding.RuledDecodeOptions)


def main() -> None:
    chosen = options(Evaluate, __doc__)
    console = progress.Results()
    drafting, samplings = chosen.decode.drafting(), chosen.decode.samplings()
    loaded = proposers.load(
        chosen if chosen.proposer else replace(chosen, proposer=proposers.HEAD), chosen.target, drafting
    )
    auto = make_auto(chosen, loaded, drafting)
    for each in (loaded.proposer, auto):
        decoding.show_measuring(each)
    if isinstance(loaded.proposer, HeadProposer):  # its own settings may have replaced those of decode
        drafting = replace(drafting, **asdict(loaded.proposer.shape), children=loaded.proposer.children)
    prompts = loading.load_prompts(chosen, loaded, [chosen.checkpoint] if chosen.checkpoint else [])
    ruled = decoding.Ruled.of(chosen.decode.grammar, loaded)
    if ruled:
        prompts = ruled.apply(prompts)
    head = loaded.checkpoint and hub.pinned(loaded.checkpoint)  # with the commit, of a head on the Hub
    console.print(f"{head or loaded.name} on {loaded.target.name}; tau: {TAU}")
    batch = chosen.batch
    if batch is None:
        batch = find_batch(loaded, drafting, samplings[0], prompts, chosen.max_new_tokens)
        console.print(f"decoding {batch} prompts at once, which is fastest here; latency is that of the batch")
    reports, ruled_figures = [], list[dict]()
    for sampling in samplings:
        report, results = evaluate(chosen, loaded, auto, drafting, sampling, prompts, batch, ruled)
        reports.append(report)
        display.validation(console, reports[-1], loaded.title)
        console.print(by_category(reports[-1]))
        if ruled:
            answers = [(result.prompt, result.drafted.tokens[0]) for result in results]
            ruled_figures.append(grammar_figures.measure(ruled.grammars, loaded, answers))
            console.say(grammar_figures.sentence(ruled_figures[-1]))
    served = read_served(loaded.checkpoint, console)
    document = {
        **reports[0].to_json(),
        "definition_of_tau": TAU,
        "served": served,
        "settings": {
            **asdict(chosen),
            "checkpoint": head,
            "batch": batch,
            "drafting": asdict(drafting),
            **loading.machine(loaded.target),
        },
        "temperatures": [report.to_json() for report in reports],
        **({"grammar": ruled_figures} if ruled else {}),
    }
    if processes.MAIN:
        files.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")
    console.print(f"written: {chosen.out}")


def make_auto(chosen: Evaluate, loaded: proposers.Chosen, drafting: Drafting) -> Auto | None:
    """What is decoded beside a trained head's fixed shape; None where nothing is."""
    if not chosen.auto or not isinstance(loaded.proposer, HeadProposer) or loaded.name != proposers.HEAD:
        return None
    return Auto.usual(loaded.target, loaded.proposer)


def find_batch(
    loaded: proposers.Chosen, drafting: Drafting, sampling: Sampling, prompts: list[Prompt], max_new_tokens: int
) -> int:
    """The number of prompts at once that gives the most tokens/s."""
    runner = drafting.runner()
    decoder = drafting.decoder(loaded.target, loaded.proposer, sampling=sampling, stop=loaded.stop, runner=runner)

    def rate(tokens: list[list[int]]) -> float:
        generation = decoder.generate(tokens, min(32, max_new_tokens))
        here = sum(map(len, generation.tokens)) / (generation.prefill_seconds + generation.seconds)
        return loaded.target.share.all_say(here)[0]

    return fastest_batch(rate, [prompt.tokens for prompt in prompts])


def evaluate(
    chosen: Evaluate,
    loaded: proposers.Chosen,
    auto: Auto | None,
    drafting: Drafting,
    sampling: Sampling,
    prompts: list[Prompt],
    batch: int,
    ruled: decoding.Ruled | None,
) -> tuple[Report, list[PromptResult]]:
    """The report at one temperature, and what it is made of."""
    title = f"temperature {sampling.temperature:g}"
    results = measure(
        loaded.target,
        loaded.proposer,
        drafting,
        prompts,
        replayed=loaded.proposer.drafter if isinstance(loaded.proposer, HeadProposer) else None,
        sampling=sampling,
        max_new_tokens=chosen.max_new_tokens,
        stop=loaded.stop,
        seed=chosen.seed,
        batch=batch,
        auto=auto,
        grammars=ruled and ruled.grammars,
        progress=lambda groups: progress.track(groups, title, unit="prompts", size=len),
    )
    report = summarise_by_category(
        results,
        depth=loaded.proposer.depth,
        temperature=sampling.temperature,
        adapted=loaded.target.adapted,
        lossy=drafting.rule in rules.LOSSY,
    )
    if auto is None or report.auto is None:
        return report, results
    account = auto.account
    chosen_by = {"predicted_speedup": auto.predicted(), "head_rounds": account.head, "trials": account.trials}
    return replace(report, auto=report.auto | chosen_by), results


def by_category(report: Report) -> rich.table.Table:
    table = rich.table.Table(title=f"by category, temperature {report.temperature:g}", title_justify="left")
    table.add_column("category")
    for name in ("prompts", "tau", "95 % interval", "speedup", "95 % interval"):
        table.add_column(name, justify="right")
    for name, part in report.by_category.items():
        intervals = ["{:.2f} .. {:.2f}".format(*interval) for interval in (part.tau_ci, part.speedup_ci)]
        table.add_row(name, str(part.num_prompts), f"{part.tau:.2f}", intervals[0], f"{part.speedup:.2f}", intervals[1])
    return table


def read_served(folder: Path | None, console: rich.console.Console) -> dict:
    """What scripts/check_engines.py measured with this checkpoint in engines, which is printed; empty if nothing was."""
    path = folder and folder / SERVED
    served = checkpoint.read_json(path) if path and path.exists() else {}
    for engine, figures in served.items():
        console.print(
            f"{engine}: tau {figures['served_tau']:.3f}, here {figures['tau']:.3f} (chain of {figures['num_drafts']}, "
            f"{figures['num_prompts']} prompts, {figures['dtype']}, temperature 0)"
        )
    return served


if __name__ == "__main__":
    run(main)
