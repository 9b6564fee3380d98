"""The model card of an export, and of a checkpoint that is shared on the Hugging Face Hub."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec import checkpoint, loading
from specdec.core import files, hub
from specdec.core.option_types import Options, SmallCount, Text
from specdec.core.wording import format_count
from specdec.export.engines import ExportForm
from specdec.export.folder import write_folder
from specdec.measuring.page import format_figure, render_template
from specdec.measuring.record import Record, read_record
from specdec.measuring.records import list_checks, name_engine, show_figure
from specdec.measuring.report import Report, Training, describe_losslessness, read_report
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.target.structure import Experts, interpolate_cost

MISSING = "not recorded"


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
    records: dict[str, Record]  # records of judgements with this head, by file
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
        Raises ValueError for a report or a record that cannot be read, and for a record of other weights.
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
            records=read_records_of_head(folder),
            training_data=training_data or MISSING,
            license=license,
            num_drafts=num_drafts,
            run_facts=run_facts or {},
        )


def read_records_of_head(folder: Path) -> dict[str, Record]:
    """The records beside a checkpoint (hub.RECORDS), by file.

    Raises ValueError for another document, and for a record of other weights.
    """
    records, weights = {}, folder / "drafter.safetensors"
    for path in sorted(folder.glob(hub.RECORDS)):
        document = read_record(path)
        if not isinstance(document, Record) or document.drafter is None:
            raise ValueError(f"{path} is of no drafter: a model card wants records of its head, so move it away.")
        if document.drafter.digest not in (None, weights.exists() and files.hash_file(weights)):
            raise ValueError(f"{path} is of other weights than {weights}: judge this head again, or delete it.")
        records[path.name] = document
    return records


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
    report = provenance.report
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
    lines += [*_list_served(report), *_list_recorded(provenance)]
    if len(lines) == 1:
        return "Not measured."
    return (
        "tau: tokens emitted per target pass of a round, with the bonus or correction token. Do not compare it across "
        "chain lengths.\n\n" + "\n".join(lines)
    )


def _list_served(report: Report | None) -> Iterator[str]:
    """Rows of what a running engine served during the training, by load."""
    served = (report.served if report else None) or {"loads": {}}
    for load, level in served["loads"].items():
        figure = format_figure(level.get("tau"), level.get("tau_ci"))
        setting = f"{format_count(served['prompts'], 'prompt')}, {load} at once, chain of {served['drafts']}"
        yield f"| {served['kind']}, while training | {setting} | {figure or 'unknown'} |"


def _list_recorded(provenance: Provenance) -> Iterator[str]:
    """Rows of the records that lie beside the head."""
    for record in provenance.records.values():
        load, protocol, checks = record.loads[0], record.protocol, [text for _, text in list_checks(record)]
        setting = f"{format_count(load.prompts, 'question')} of {protocol.suite}, temperature {protocol.temperature:g}"
        setting += f", {format_count(protocol.drafts or 0, 'draft')}, {load.at_once} at once; {', '.join(checks)}"
        speedup = f"; {show_figure(load.speedup)} times plain" if load.speedup else ""
        yield f"| {name_engine(record)} | {setting} | {show_figure(load.tau) or MISSING}{speedup} |"


def _name_shape(report: Report) -> str:
    """The chain or tree of a report."""
    return report.shape or f"chain of {len(report.survival or [])}"


def read_provenance(
    options: CardOptions, loaded: loading.LoadedHead, target: Target, *, limited: bool = False
) -> Provenance:
    """The provenance of a loaded checkpoint. `data` of the options replaces the data in the record of the run.

    limited: whether the head gets another window
    """
    run_facts = checkpoint.read_facts(loaded.folder)
    document = checkpoint.read_document(loaded.folder) | {
        "reads_layers": list(loaded.drafter.target_layers),
        "window_advice": "" if limited else checkpoint.advise_window(loaded.folder),
    }
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
