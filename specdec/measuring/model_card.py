"""The model card of an export, and of a checkpoint that is shared on the Hugging Face Hub."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec import checkpoint, loading
from specdec.core import hub
from specdec.core.option_types import Options, SmallCount, Text
from specdec.core.untrusted import read_json
from specdec.core.wording import format_count
from specdec.export.engines import ExportForm
from specdec.export.folder import write_folder
from specdec.measuring.page import render_template
from specdec.measuring.report import Report, Training, describe_losslessness, read_report
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.target.structure import Experts, interpolate_cost

MISSING = "not recorded"
# Beside a checkpoint's report.json, its tau in real engines: by the name of the engine, an entry with these fields.
SERVED_FILE = "served.json"
SERVED_FIELDS = ("prompts", "num_prompts", "max_new_tokens", "num_drafts", "dtype", "tau", "served_tau")


class CardOptions(Options):
    """Options of a model card's contents."""

    checkpoint: Text
    num_drafts: SmallCount | None
    license: Text
    data: Text | None
    target: TargetOptions


@dataclass(frozen=True)
class Provenance:
    """Where a drafter comes from and how it was measured, for the model card."""

    source: str  # name of the checkpoint
    document: dict  # drafter.json
    target: str  # name of the target
    fingerprint: str  # fingerprint of the target
    report: Report | None  # report of the validation that chose the checkpoint
    served_figures: dict  # entries of SERVED_FILE, by engine
    training_data: str
    license: str
    num_drafts: int  # drafts per round in launch lines
    run_facts: dict = field(default_factory=dict)  # about.json of the run

    @classmethod
    def read(
        cls,
        folder: Path,
        document: dict,
        *,
        name: str,
        target: Target,
        license: str = "other",
        training_data: str | None = None,
        num_drafts: int | None = None,
        run_facts: dict | None = None,
    ) -> "Provenance":
        """The provenance of a checkpoint's folder. document: drafter.json, or what replaces it; name: of the checkpoint

        num_drafts: None: the fastest number by the head's validation, if that decoded a chain, otherwise 3
        Raises ValueError for a report or a record of served figures that cannot be read.
        """
        report = read_report(folder)
        is_chain = report is not None and report.decoded and (report.shape or "chain").startswith("chain")
        if num_drafts is None:
            num_drafts = choose_chain(report) if report is not None and is_chain else 3
        return cls(
            source=name,
            document=document,
            target=target.name,
            fingerprint=target.fingerprint(),
            report=report,
            served_figures=read_served_figures(folder / SERVED_FILE),
            training_data=training_data or MISSING,
            license=license,
            num_drafts=num_drafts,
            run_facts=run_facts or {},
        )


def read_served_figures(path: Path) -> dict[str, dict]:
    """The entries of a SERVED_FILE by engine; {} without the file. Raises ValueError for another document."""
    figures = read_json(path) if path.exists() else {}
    if not all(set(SERVED_FIELDS) <= set(entry) for entry in figures.values()):
        raise ValueError(f"{path} is not a record of served figures: delete it.")
    return figures


# The chain that pays for an export


def predict_chain_speedups(report: Report) -> list[float]:
    """[K] predicted speedups of chains of 1, 2, .. drafts, up to the length that the report measured by decoding.

    Assumes equal costs of a drafting step at every depth, and of each draft in the target's pass, or in that of a
    mixture of each further expert (target.structure.interpolate_cost). A round that the device made alone counts as
    the target's pass, which gives the same costs but for mixtures.
    """
    survival, stages = report.replayed_survival or report.survival, report.ms_per_round or {}  # replay has more prompts
    assert survival is not None and report.baseline_tokens_per_second is not None
    depth, plain_ms = len(survival), 1e3 / report.baseline_tokens_per_second
    experts = None if report.experts is None else Experts(*report.experts)

    whole_verify_ms = stages.get("verify", 0.0) + stages.get("round", 0.0)

    def predict_speedup(num: int) -> float:
        draft_ms = num / depth * stages.get("draft", 0.0)
        verify_ms = plain_ms + interpolate_cost(experts, 1, 1 + num, 1 + depth) * (whole_verify_ms - plain_ms)
        other_ms = sum(ms for stage, ms in stages.items() if stage not in ("draft", "verify", "round"))
        return (1 + sum(survival[:num])) * plain_ms / (draft_ms + verify_ms + other_ms)

    return [predict_speedup(num) for num in range(1, depth + 1)]


def choose_chain(report: Report) -> int:
    """The chain length with the highest of `predict_chain_speedups`."""
    speedups = predict_chain_speedups(report)
    return 1 + speedups.index(max(speedups))


# The text


def write_export(form: ExportForm, out: Path, *, dtype: torch.dtype, provenance: Provenance) -> int:
    """Writes the folder of an export with its model card, and returns the bytes of its tensors.

    Raises ValueError as `write_folder`.
    """
    card = make_card(provenance, {form.name: form}, out=str(out))
    return write_folder(form, out, dtype=dtype, num_drafts=provenance.num_drafts, card=card)


def make_card(
    provenance: Provenance,
    forms: dict[str, ExportForm],
    *,
    out: str = "exported",
    repo: str | None = None,
    adapts: bool = False,
) -> str:
    """The model card: how a head was trained, what to expect of it, how engines serve it. It names what is not known.

    forms: forms of the head by format; out: folder of an export, in the commands
    repo: user/name of a checkpoint on the Hub; None: for an export; adapts: the head changes its target
    """
    report = provenance.report
    environment = provenance.run_facts.get("environment") or {}
    versions = {**provenance.document.get("versions", {}), **({"python": environment["python"]} if environment else {})}
    text = render_template(
        "model_card.md.jinja",
        count=format_count,
        card=provenance,
        forms=forms,
        out=out,
        repo=repo,
        adapts=adapts,
        kind=str(provenance.document["_target_"]).rpartition(".")[2],
        target_is_folder=hub.is_folder(provenance.target),
        training=(report and report.training) or Training(),
        versions=versions,
        expectations=write_expectations(provenance),
        shape=report and _name_shape(report),
        losslessness=report and report.decoded and describe_losslessness(report),
    )
    return text.rstrip() + "\n"


def write_expectations(provenance: Provenance) -> str:
    """A table of tau with its interval, by validation and in engines."""
    report, served_figures = provenance.report, provenance.served_figures
    lines = ["| measured by | setting | tau |\n|---|---|---|"]
    if report:
        decoded = (report.num_prompts, report.tau, report.tau_ci)
        replayed = (report.replayed_prompts, report.replayed_tau, report.replayed_tau_ci)
        is_replayed = report.num_prompts < (report.replayed_prompts or 0)  # validation had time to decode some only
        num, tau, interval = replayed if is_replayed else decoded
        assert tau is not None and interval is not None
        setting = f"{format_count(num or 0, 'prompt')}, temperature {report.temperature:g}, {_name_shape(report)}"
        setting += ", by replay" * is_replayed
        lines.append(f"| specdec, validation | {setting} | {tau:.2f} ({interval[0]:.2f} .. {interval[1]:.2f}) |")
    for engine, entry in served_figures.items():
        num, prompts, tau, served_tau = (entry[key] for key in ("num_prompts", "prompts", "tau", "served_tau"))
        setting = f"{format_count(num, 'prompt')} of {prompts}, temperature 0, chain of {entry['num_drafts']}"
        setting += f", {entry['dtype']}"
        lines.append(f"| specdec, as served | {setting} | {tau:.3f} |")
        lines.append(f"| {engine} | the same | {served_tau:.3f} ({100 * (served_tau / tau - 1):+.1f} %) |")
    if len(lines) == 1:
        return "Not measured."
    return (
        "tau: tokens emitted per target pass of a round, with the bonus or correction token. Do not compare it across "
        "chain lengths.\n\n" + "\n".join(lines)
    )


def _name_shape(report: Report) -> str:
    """The chain or tree of a report."""
    return report.shape or f"chain of {len(report.survival or [])}"


def read_provenance(options: CardOptions, loaded: loading.LoadedHead, target: Target) -> Provenance:
    """The provenance of a loaded checkpoint. `data` of the options replaces the data in the record of the run."""
    run_facts = checkpoint.read_facts(loaded.folder)
    document = checkpoint.read_document(loaded.folder) | {"reads_layers": list(loaded.drafter.target_layers)}
    data_facts = run_facts.get("data")
    train_source = str(data_facts["train"]) if isinstance(data_facts, dict) and "train" in data_facts else None
    return Provenance.read(
        loaded.folder,
        document,
        name=checkpoint.name_checkpoint(loaded.folder),
        target=target,
        license=options.license,
        training_data=options.data or train_source,
        num_drafts=options.num_drafts,
        run_facts=run_facts,
    )
