"""The model card of an export, and of a checkpoint that is shared on the Hugging Face Hub."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdec import checkpoint, loading
from specdec.core import hub
from specdec.core.option_types import Options, SmallCount, Text
from specdec.core.untrusted import read_json
from specdec.export.engines import ExportForm
from specdec.export.folder import write_folder
from specdec.measuring.report import Report, Training, describe_losslessness
from specdec.measuring.speed import choose_chain
from specdec.options.target import TargetOptions
from specdec.target.model import Target

MISSING = "not recorded"
WHOLE_VOCABULARY_NOTE = (
    "The checkpoint drafts from a reduced vocabulary and this engine from the whole one, on which it was not trained: "
    "acceptance differs from the validated one, and each draft costs more."
)
USE_TEMPLATE = """## Use it with specdec

```
python scripts/generate.py checkpoint={repo} prompt="Why is the sky blue?"
accelerate launch train.py head=... start={repo}
```

```python
from specdec import Speculative

model.generate(**inputs, custom_generate=Speculative("{repo}"))
```

`{repo}@REVISION` is the head of one commit, tag or branch. To train it further, `head=` is its family, as in the command above."""
# Beside a checkpoint's report.json, its tau in real engines: by the name of the engine, an entry with these fields.
SERVED_FILE = "served.json"
SERVED_FIELDS = ("prompts", "num_prompts", "max_new_tokens", "num_drafts", "dtype", "tau", "served_tau")


class CardOptions(Options):
    """What a model card says."""

    checkpoint: Text
    num_drafts: SmallCount | None
    license: Text
    data: Text | None
    target: TargetOptions


@dataclass(frozen=True)
class Provenance:
    """Where a drafter comes from and how it was measured, for the model card."""

    source: str  # the checkpoint's name
    document: dict  # drafter.json
    target: str
    fingerprint: str
    report: Report | None  # of the validation that chose the checkpoint
    served_figures: dict  # by engine, see SERVED
    training_data: str
    license: str
    num_drafts: int
    run_facts: dict = field(default_factory=dict)  # the run's about.json

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
        """From a checkpoint's folder. document: drafter.json, or what stands for it; name: the checkpoint's

        num_drafts: None: the fastest number by its own validation, if that decoded a chain, or 3
        """
        figures, served_figures = (
            read_json(folder / file) if (folder / file).exists() else None for file in ("report.json", SERVED_FILE)
        )
        if not all(set(SERVED_FIELDS) <= set(entry) for entry in (served_figures or {}).values()):
            raise ValueError(f"{folder / SERVED_FILE} is not a record of served figures: delete it.")
        report = Report.from_json(figures, source=str(folder / "report.json")) if figures else None
        is_chain = report is not None and report.decoded and (report.shape is None or report.shape.startswith("chain"))
        num = num_drafts or (choose_chain(report) if report is not None and is_chain else 3)
        values = (
            target.name,
            target.fingerprint(),
            report,
            served_figures or {},
            training_data or MISSING,
            license,
            num,
            run_facts or {},
        )
        return cls(name, document, *values)


def write_export(form: ExportForm, out: Path, *, dtype: torch.dtype, provenance: Provenance) -> int:
    """The folder of an export with its model card. -> bytes of the tensors. Raises ValueError as `write_folder`."""
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
    """What a head is worth, how it was trained, how engines serve it. What is not known is said to be missing.

    forms: by format, those that it has; out: the folder of an export, in the commands; adapts: whether it changes its target
    repo: user/name of a checkpoint on the Hub; None: of an export
    """
    target, kind = provenance.target, str(provenance.document["_target_"]).rpartition(".")[2]
    metadata = [
        f"license: {provenance.license}",
        *([] if hub.is_folder(target) else [f"base_model: {target}"]),
        *(["library_name: specdec"] if repo else []),
        f"tags: [speculative-decoding, {kind.lower()}]",
    ]
    owner = "those of the target as this head adapts it" if adapts else "the target's own"
    paragraphs = [
        "\n".join(["---", *metadata, "---"]),
        f"# {kind} for {target}",
        f"A drafter for speculative decoding: it drafts tokens and {target} verifies them, so the texts are {owner}.",
        "## How it was trained",
        _write_training_table(provenance),
        "## What to expect",
        write_expectations(provenance),
        *_list_figures(provenance),
        *([USE_TEMPLATE.format(repo=repo)] if repo else []),
        "## Serve it in an engine",
    ]
    for name, form in forms.items():
        num_drafts = form.limit_drafts(provenance.num_drafts)
        lines = form.launch_lines(target=target, out=out, num=num_drafts)
        export = f"python scripts/export.py checkpoint={repo or provenance.source} format={name} out={out}"
        paragraphs += [
            f"### format={name}",
            f"```\n{export}\n```",
            *([f"With {num_drafts} drafts a round:"] if lines else []),
        ]
        paragraphs += [f"{engine}:\n\n```\n{line}\n```" for engine, line in lines.items()]
        notes = [*([WHOLE_VOCABULARY_NOTE] if form.whole_vocabulary else []), *form.notes]
        paragraphs += ["\n".join(f"- {note}" for note in notes)] if notes else []
    if not forms:
        paragraphs.append("No engine has a form for this head.")
    return "\n\n".join(paragraphs) + "\n"


def _write_training_table(provenance: Provenance) -> str:
    """A table of two columns: target, data, size, tokens, time, machine, command, versions."""
    document, run_facts = provenance.document, provenance.run_facts
    training = (provenance.report and provenance.report.training) or Training()
    environment, data_facts, start = (run_facts.get(name) or {} for name in ("environment", "data", "start"))
    machine, processes = environment.get("machine"), environment.get("processes")
    versions = {**document.get("versions", {}), **({"python": environment["python"]} if environment else {})}
    tokens = _format_millions(training.tokens)
    if training.tokens and training.unique_tokens:
        tokens += f", of {_format_millions(training.unique_tokens)} different ones"
    rows = {
        "checkpoint": provenance.source,
        "target": f"{provenance.target}, fingerprint {provenance.fingerprint}",
        "hidden states read": ", ".join(map(str, document.get("reads_layers", ()))) or "none",
        "trained on": provenance.training_data,
        "licence": f"{provenance.license} (the target has its own)",
        "trained parameters": _format_millions(training.parameters),
        "conversations": f"{data_facts['conversations']:,}" if data_facts.get("conversations") else MISSING,
        "tokens read in training": tokens,
        "minutes of training": f"{training.seconds / 60:.1f}" if training.seconds else MISSING,
        "machine": f"{machine}, {environment.get('threads')} threads, {processes} processes" if machine else MISSING,
        **({"started from": start["used"]} if start else {}),
        "command": f"`{run_facts['command']}`" if run_facts.get("command") else MISSING,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    # a bar inside a value would end its cell
    cells = ("| {} | {} |".format(name, value.replace("|", "\\|")) for name, value in rows.items())
    return "\n".join(["| | |\n|---|---|", *cells])


def _format_millions(number: int | None) -> str:
    return f"{number / 1e6:.2f} M" if number else MISSING


def write_expectations(provenance: Provenance) -> str:
    """A table of tau with its interval, by validation and in engines."""
    report, served_figures = provenance.report, provenance.served_figures
    lines = ["| measured by | setting | tau |\n|---|---|---|"]
    if report:
        decoded = (report.num_prompts, report.tau, report.tau_ci)
        replayed = (report.replayed_prompts, report.replayed_tau, report.replayed_tau_ci)
        is_replayed = report.num_prompts < (
            report.replayed_prompts or 0
        )  # decoded in the time that validation had for it
        num, tau, interval = replayed if is_replayed else decoded
        assert tau is not None and interval is not None
        setting = f"{num} prompts, temperature {report.temperature:g}, {_name_shape(report)}{', by replay' if is_replayed else ''}"
        lines.append(f"| specdec, validation | {setting} | {tau:.2f} ({interval[0]:.2f} .. {interval[1]:.2f}) |")
    for engine, entry in served_figures.items():
        num, prompts, tau, served_tau = (entry[key] for key in ("num_prompts", "prompts", "tau", "served_tau"))
        setting = f"{num} prompts of {prompts}, temperature 0, chain of {entry['num_drafts']}, {entry['dtype']}"
        lines.append(f"| specdec, as served | {setting} | {tau:.3f} |")
        lines.append(f"| {engine} | the same | {served_tau:.3f} ({100 * (served_tau / tau - 1):+.1f} %) |")
    if len(lines) == 1:
        return "Not measured."
    return (
        "tau: tokens emitted per target pass of a round, with the bonus or correction token. Do not compare it across chain "
        "lengths.\n\n" + "\n".join(lines)
    )


def _name_shape(report: Report) -> str:
    return report.shape or f"chain of {len(report.survival or [])}"


def _list_figures(provenance: Provenance) -> list[str]:
    """Speedup with its conditions, and whether answers are unchanged."""
    report, run_facts = provenance.report, provenance.run_facts
    if report is None:
        return []
    if report.speedup is None or report.speedup_ci is None:
        return ["The speedup was not measured: nothing was decoded with the clock running."]
    environment, dtype = run_facts.get("environment") or {}, (run_facts.get("target") or {}).get("dtype")
    machine = "a machine that is not recorded"
    if environment:
        machine = f"{environment['machine']}, {environment['threads']} threads"
    speedups = (
        f"{report.speedup:.2f} ({report.speedup_ci[0]:.2f} .. {report.speedup_ci[1]:.2f}) with a {_name_shape(report)}"
    )
    if report.auto:
        low, high = report.auto["speedup_ci"]
        speedups += f", {report.auto['speedup']:.2f} ({low:.2f} .. {high:.2f}) with proposer=auto"
    return [
        f"Speedup over plain decoding, with 95 % intervals over prompts: {speedups}. {report.num_prompts} prompts, one stream, "
        f"temperature {report.temperature:g}, {dtype or 'a dtype that is not recorded'}, {machine}.",
        f"Answers: {describe_losslessness(report)}.",
    ]


def read_provenance(options: CardOptions, loaded: loading.LoadedHead, target: Target) -> Provenance:
    """What a model card tells of a checkpoint. `data` of the options replaces what the record of the run names."""
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
