"""What a training run prints."""

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from rich.table import Table

from specdec.heads.base import Head
from specdec.measuring.report import TAU, Report, by_depth, verdict
from train.config import RunConfig
from train.data.data_law import outlook, points_of
from train.data.packing import Packs
from train.progress import Results


def usage(conf: Path) -> str:
    """What --help prints: the options as they stand in the files, with their comments."""
    groups = {
        group.name: sorted(str(file.relative_to(group).with_suffix("")) for file in group.rglob("*.yaml"))
        for group in sorted(conf.iterdir())
        if group.is_dir() and group.name not in ("objective", "proposer")  # part of every head; of other commands
    }
    text = "\n".join(f"  {group}={'|'.join(names)}" for group, names in groups.items())
    text = f"Choices, each a file in conf/:\n{text}\n\nOptions, KEY=VALUE, and their defaults (conf/train.yaml):\n\n"
    text += _options((conf / "train.yaml").read_text())
    for group, name in (("head", "eagle"), ("data", "shipped"), ("target", "smollm2-135m"), ("decode", "chain")):
        lines = (conf / group / f"{name}.yaml").read_text().strip().splitlines()
        text += f"\n\n{group}: # {group}={name}\n" + "\n".join("  " + line for line in lines)
        if group == "head":
            settings = (conf / "objective" / "base.yaml").read_text().strip().splitlines()
            text += "\n  # every other setting of head.objective:\n" + "\n".join("    " + line for line in settings)
    return text


def _options(text: str) -> str:
    """The paragraphs of a configuration without Hydra's own: its list of defaults and its settings."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    return "\n\n".join(part for part in paragraphs if not part.startswith("hydra:") and "\ndefaults:" not in part)


def unknown(conf: Path, given: list[str]) -> str | None:
    """What is wrong with the first option of a command line, KEY=VALUE, that no file of `conf` has; None if all are known."""
    load = lambda file: yaml.safe_load(file.read_text()) or {}
    known = set(_keys(load(conf / "train.yaml")))
    for group in (path for path in conf.iterdir() if path.is_dir() and path.name != "proposer"):  # of other commands
        place = "head.objective" if group.name == "objective" else group.name
        known |= {place, *(key for file in group.rglob("*.yaml") for key in _keys(load(file), f"{place}."))}
    for key in (each.partition("=")[0] for each in given if "=" in each):
        if key not in known and not key.startswith(("+", "~", "-", "hydra")):
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            return f"There is no option {key!r}.{guess} python train.py --help lists them all."
    return None


def _keys(settings: dict, prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def start(say: Callable[[str], None], config: RunConfig, drafter: Head, packs: Packs, num_prompts: int) -> None:
    """What is trained, for which target, on which data."""
    target = drafter.target
    how = "cut" if target.share.same else "its layers in parts"
    cut = f", {how} over {target.share.size} processes" if target.share.size > 1 else ""
    say(
        f"target   {target.name} ({sum(p.numel() for p in target.model.parameters()) / 1e6:.1f} M parameters, frozen, "
        f"{str(target.dtype).removeprefix('torch.')}{cut})"
    )
    say(
        f"drafter  {type(drafter).__name__}: {drafter.num_parameters() / 1e6:.2f} M trained parameters, reads "
        f"{_hidden_states(drafter)}, drafts from {drafter.vocab_size:,} of {target.vocab_size:,} tokens"
    )
    first = ", the first of a stream" if config.data.stream else ""
    say(
        f"data     {len(packs):,} packs of {config.data.length} tokens, {packs.num_supervised:,} supervised tokens{first}; "
        f"{num_prompts} held-out prompts"
    )
    say(f"tau: {TAU}")


def _hidden_states(drafter: Head) -> str:
    numbers = ", ".join(map(str, drafter.target_layers))
    return f"hidden states {numbers} of {drafter.target.num_layers}" if numbers else "no hidden states"


def validation(console: Results, report: Report, shape: object) -> None:
    """A table of what was decoded and replayed, or one line of what was only replayed."""
    step = "" if report.step is None else f"step {report.step}, "
    title = f"{step}{shape}, temperature {report.temperature:g}, {_prompts(report)}"
    if not report.decoded and report.replayed_tau_ci is not None:
        low, high = report.replayed_tau_ci
        console.say(
            f"{title}: tau replayed {report.replayed_tau:.2f} ({low:.2f} .. {high:.2f}), survival by depth "
            f"{by_depth(report.replayed_survival or [])}{_kept(report)}"
        )
        return
    table = Table(title=title, title_justify="left")
    for name in ("figure", "value", "95 % over prompts"):
        table.add_column(name, justify="left" if name == "figure" else "right")

    def row(name: str, value: float | None, interval: list[float] | None = None, digits: int = 2):
        if value is not None:
            between = "" if interval is None else f"{interval[0]:.{digits}f} .. {interval[1]:.{digits}f}"
            table.add_row(name, f"{value:.{digits}f}", between)

    row("tau replayed", report.replayed_tau, report.replayed_tau_ci)
    row("tau decoded", report.tau, report.tau_ci)
    row("tokens/s plain", report.baseline_tokens_per_second, digits=1)
    row("tokens/s drafted", report.tokens_per_second, report.tokens_per_second_ci, digits=1)
    row("speedup", report.speedup, report.speedup_ci)
    if report.auto:
        num = report.auto.get("num_prompts", report.num_prompts)
        of = "" if num == report.num_prompts else f", {num} prompts"
        row(f"speedup auto{of}", report.auto["speedup"], report.auto["speedup_ci"])
        row("speedup auto, predicted", report.auto.get("predicted_speedup"))
        rounds = sum(report.auto["sizes"].values())
        sizes = ", ".join(f"{num}: {count / rounds:.0%}" for num, count in report.auto["sizes"].items())
        table.add_row("rounds of auto by nodes", sizes, "")
    table.add_row("survival by depth", by_depth(report.survival or []), "")
    table.add_row("acceptance by depth", by_depth(report.acceptance or []), "")
    stages = (report.ms_per_round or {}).items()
    table.add_row("ms a round", ", ".join(f"{name} {value:.1f}" for name, value in stages), "")
    console.print(table)
    console.say(f"  {verdict(report)}{_kept(report)}")


def _prompts(report: Report) -> str:
    """How many held-out prompts were replayed and decoded, where that differs."""
    if report.replayed_prompts in (None, report.num_prompts):
        return f"{report.num_prompts} held-out prompts"
    decoded = f"{report.num_prompts} of them decoded" if report.decoded else "not decoded"
    return f"{report.replayed_prompts} held-out prompts replayed, {decoded}"


def _kept(report: Report) -> str:
    """Which weights a validation of both kinds found better."""
    if report.ema is None:
        return ""
    taus = ", ".join(f"{name} {report.ema[name]:.3f}" for name in ("plain", "average"))
    return f"; the {report.ema['kept']} weights are kept (tau replayed: {taus})"


def end(console: Results, trainer) -> None:
    """What to do next."""
    if trainer.interrupted and trainer.step < trainer.settings.steps:
        console.say(
            f"Interrupted after step {trainer.step}; saved. Run the same command with resume=true (or resume=auto, which a "
            "scheduler may repeat) to continue."
        )
    if trainer.best:
        best = f"{trainer.folder.path}/step_{trainer.best['step']:06d}"
        figure = trainer.validation.figure.replace("_", " ")
        console.say(f"best {figure} {trainer.best['figure']:.3f}: {best}")
        console.say(trainer.validation.cost(trainer.seconds))
        depth, unique = trainer.validation.drafting.depth, trainer.material.num_tokens
        said = outlook(points_of(trainer.folder.read_log()), depth=depth, unique=unique)
        if said is not None:
            console.say(said)
        console.say(f"next: python scripts/generate.py checkpoint={best} prompt='...'")
