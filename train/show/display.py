"""The texts and tables that a training run prints."""

import shlex
from collections.abc import Callable

from rich.table import Table

from specdec.checkpoint import read_json
from specdec.core.progress import Results
from specdec.core.resumable import read_rows
from specdec.heads.base import Head
from specdec.measuring.page import format_figure
from specdec.measuring.report import TAU, Report, describe_candidates, describe_losslessness, format_by_depth
from train.data.packing import Packs
from train.show import data_law

NEXT_COMMANDS = (  # commands for the head of a run; its folder, its held-out prompts and what is beside it are put in
    "specdec generate checkpoint={run} prompt='Why is the sky blue?'",
    "specdec evaluate checkpoint={run} prompts={heldout} limit=8{others}",
    "specdec serve checkpoint={run}",
)


def print_start(print_main: Callable[[str], None], drafter: Head, packs: Packs, num_prompts: int) -> None:
    """Prints the target, the drafter and the data of a run. num_prompts: held-out prompts"""
    target, layers = drafter.target, ", ".join(map(str, drafter.target_layers))
    sharding = f", its layers in parts over {target.share.size} processes" if target.share.size > 1 else ""
    size = sum(parameter.numel() for parameter in target.model.parameters()) / 1e6
    reads = f"hidden states {layers} of {target.num_layers}" if layers else "no hidden states"
    dtype = str(target.dtype).removeprefix("torch.")
    print_main(f"target   {target.name} ({size:.1f} M parameters, frozen, {dtype}{sharding})")
    print_main(
        f"drafter  {type(drafter).__name__}: {drafter.num_parameters() / 1e6:.2f} M trained parameters, reads {reads}, "
        f"drafts from {drafter.vocab_size:,} of {target.vocab_size:,} tokens"
    )
    print_main(
        f"data     {len(packs):,} packs of {packs.length} tokens, {packs.num_supervised:,} supervised tokens; "
        f"{num_prompts} held-out prompts"
    )
    print_main(f"tau: {TAU}")


def print_validation(console: Results, report: Report, shape: object) -> None:
    """Prints a table of what was decoded and replayed, or one line of what was only replayed."""
    step = "" if report.step is None else f"step {report.step}, "
    title = f"{step}{shape}, temperature {report.temperature:g}, {describe_prompts(report)}"
    figures, average = list_figures(report), describe_average(report)
    if not report.decoded and report.replayed_tau_ci is not None:
        candidates = f", candidates: {figures['candidates']}" if report.candidates else ""
        survival = format_by_depth(report.replayed_survival or [])
        console.say(
            f"{title}: tau replayed {figures['tau replayed']}, survival by depth {survival}{candidates}{average}"
        )
        return
    table = Table("figure", "value (95 % over prompts)", title=title, title_justify="left")
    for name, text in figures.items():
        if text:
            table.add_row(name, text)
    console.print(table)
    console.say(f"  {describe_losslessness(report)}{average}")


def describe_prompts(report: Report) -> str:
    """How many held-out prompts were replayed and decoded."""
    if report.replayed_prompts in (None, report.num_prompts):
        return f"{report.num_prompts} held-out prompts"
    decoded = f"{report.num_prompts} of them decoded" if report.decoded else "not decoded"
    return f"{report.replayed_prompts} held-out prompts replayed, {decoded}"


def describe_average(report: Report) -> str:
    """Which weights are kept, the plain or the averaged ones; an empty text for runs without an average."""
    if report.ema is None:
        return ""
    taus = ", ".join(f"{name} {report.ema[name]:.3f}" for name in ("plain", "average"))
    return f"; the {report.ema['kept']} weights are kept (tau replayed: {taus})"


def list_figures(report: Report) -> dict[str, str]:
    """The figures of a report as texts, by name. A text is empty where nothing was measured."""
    auto = report.auto or {}
    sizes, num_prompts = auto.get("sizes", {}), auto.get("num_prompts", report.num_prompts)
    auto_prompts = "" if num_prompts == report.num_prompts else f", {num_prompts} prompts"
    return {
        "tau replayed": format_figure(report.replayed_tau, report.replayed_tau_ci),
        "candidates": describe_candidates(report.candidates) if report.candidates else "",
        "tau decoded": format_figure(report.tau, report.tau_ci),
        "tokens/s plain": format_figure(report.baseline_tokens_per_second, digits=1),
        "tokens/s drafted": format_figure(report.tokens_per_second, report.tokens_per_second_ci, digits=1),
        "speedup": format_figure(report.speedup, report.speedup_ci),
        f"speedup auto{auto_prompts}": format_figure(auto.get("speedup"), auto.get("speedup_ci")),
        "rounds of auto by nodes": ", ".join(f"{size}: {n / sum(sizes.values()):.0%}" for size, n in sizes.items()),
        "survival by depth": format_by_depth(report.survival or []),
        "acceptance by depth": format_by_depth(report.acceptance or []),
        "ms a round": ", ".join(f"{name} {value:.1f}" for name, value in (report.ms_per_round or {}).items()),
    }


def print_end(console: Results, trainer) -> None:
    """Prints how to continue an interrupted run; then its best step, its cost, what its data lacked, and commands."""
    if trainer.stop_signal and trainer.step < trainer.settings.steps:
        console.say(
            f"Interrupted after step {trainer.step}; saved. Run the same command with resume=true (or resume=auto, "
            "which a scheduler may repeat) to continue."
        )
    if not trainer.best or not trainer.accelerator.is_main_process:
        return
    folder, validation = trainer.folder.path, trainer.validation
    best = folder / f"step_{trainer.best['step']:06d}"
    report = Report.from_json(read_json(best / "report.json"), source=str(best / "report.json"))
    console.say(f"best {describe_best(report, validation.figure_name)}: {best}")
    console.say(f"trained on {trainer.tokens_read:,} tokens; {validation.describe_cost(trainer.seconds)}")
    if sentences := data_law.describe_data(read_rows(folder / "log.jsonl"), depth=validation.drafting.depth):
        console.say(sentences)
    texts = {"run": str(folder), "heldout": trainer.folder.settings["data.heldout"]}
    quoted_texts = {name: shlex.quote(text) for name, text in texts.items()}
    quoted_texts["others"] = "" if validation.adapts_target else " proposers=suffix,auto"  # they share the plain target
    for number, command in enumerate(NEXT_COMMANDS):
        console.say(f"{'' if number else 'next:':<6}{command.format(**quoted_texts)}")


def describe_best(report: Report, figure_name: str) -> str:
    """tau and speedups of the best step, with intervals. figure_name: name of the tau that chose it"""
    tau = format_figure(getattr(report, figure_name), getattr(report, f"{figure_name}_ci"))
    figures = list_figures(report).items()
    speedups = [f"{name} {text}" for name, text in figures if text and name.startswith("speedup")]
    decoded = f"; on {report.num_prompts} prompts: {', '.join(speedups)}" if speedups else ""
    return f"{figure_name.replace('_', ' ')} {tau}{decoded}"
