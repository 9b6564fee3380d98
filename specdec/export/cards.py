"""Model cards: of an export, beside its files, and of a checkpoint that is shared on the Hugging Face Hub."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specdec import checkpoint
from specdec.core import hub
from specdec.export.engines import ExportForm
from specdec.measuring.report import Report, Training, verdict
from specdec.measuring.speed import best_chain
from specdec.target.model import Target

MISSING = "not recorded"
FOLDER = "exported"  # of an export, in the commands
WHOLE_VOCABULARY = (
    "The checkpoint drafts from a reduced vocabulary and this engine from the whole one, on which it was not trained: "
    "acceptance differs from the validated one, and each draft costs more."
)
USE = """```
python scripts/generate.py checkpoint={repo} prompt="Why is the sky blue?"
accelerate launch train.py head=... start={repo}
```

```python
from specdec import Speculative

model.generate(**inputs, custom_generate=Speculative("{repo}"))
```

`{repo}@REVISION` is the head of one commit, tag or branch. To train it further, `head=` is its family, as in the command above."""
# Beside a checkpoint's report.json, its tau in real engines: by the name of the engine, an entry with these fields.
SERVED = "served.json"
SERVED_FIELDS = ("prompts", "num_prompts", "max_new_tokens", "num_drafts", "dtype", "tau", "served_tau")


@dataclass(frozen=True)
class Provenance:
    """Where a drafter comes from and how it was measured, for the model card."""

    source: str  # the checkpoint's name
    document: dict  # drafter.json
    target: str
    fingerprint: str
    report: Report | None  # of the validation that chose the checkpoint
    served: dict  # by engine, see SERVED
    data: str
    license: str
    num_drafts: int

    @classmethod
    def read(
        cls, folder: Path, *, target: Target, license: str, data: str | None, num_drafts: int | None
    ) -> "Provenance":
        """From a checkpoint's folder. num_drafts: None: the fastest number by its own validation, if that decoded a chain, or 3."""
        document = checkpoint.read_json(folder / "drafter.json")
        figures, served = (
            checkpoint.read_json(folder / name) if (folder / name).exists() else None
            for name in ("report.json", SERVED)
        )
        if not all(set(SERVED_FIELDS) <= set(entry) for entry in (served or {}).values()):
            raise ValueError(f"{folder / SERVED} is not a record of served figures: delete it.")
        report = Report.from_json(figures, source=str(folder / "report.json")) if figures else None
        chain = report is not None and report.decoded and (report.shape is None or report.shape.startswith("chain"))
        num = num_drafts or (best_chain(report) if report is not None and chain else 3)
        name, fingerprint = checkpoint.name_of(folder), target.fingerprint()
        return cls(name, document, target.name, fingerprint, report, served or {}, data or MISSING, license, num)


def make_card(form: ExportForm, provenance: Provenance, out: str, dtype: torch.dtype) -> str:
    """Of an export: how to launch each engine, what to expect, where the drafter comes from. out: its folder"""
    num = form.num_drafts(provenance.num_drafts)
    parts = [
        *_heading(provenance),
        f"Exported from the checkpoint `{provenance.source}` by specdec {provenance.document['versions']['specdec']}; weights in "
        f"{str(dtype).removeprefix('torch.')}.",
        _table({**_origin(provenance), "drafts a round": str(num)}),
        "## Launch",
        *_launch(form, out, num),
        "## What to expect",
        expected(provenance),
        *([WHOLE_VOCABULARY] if form.whole_vocabulary else []),
        *(["## Notes", _bullets(form.notes)] if form.notes else []),
    ]
    return "\n\n".join(parts) + "\n"


def make_hub_card(provenance: Provenance, about: dict, forms: dict[str, ExportForm], *, repo: str, adapts: bool) -> str:
    """Of a checkpoint: what it is worth, how it was trained, the commands that use it. What is not known is said to be missing.

    about: the run's about.json, {} if there is none; forms: by the format of scripts/export.py, those that the head has
    repo: user/name; adapts: whether the head changes its target
    """
    parts = [
        *_heading(provenance, library="specdec", adapts=adapts),
        "## How it was trained",
        _table({**_origin(provenance), **_training(provenance, about)}),
        "## What to expect",
        expected(provenance),
        *_figures(provenance.report, about),
        "## Use it with specdec",
        USE.format(repo=repo),
        "## Serve it in an engine",
    ]
    for name, form in forms.items():
        export = f"python scripts/export.py checkpoint={repo} format={name} out={FOLDER}"
        parts += [f"### format={name}", f"```\n{export}\n```"]
        parts += _launch(form, FOLDER, form.num_drafts(provenance.num_drafts))
        parts += [WHOLE_VOCABULARY] if form.whole_vocabulary else []
        parts += [_bullets(form.notes)] if form.notes else []
    if not forms:
        parts.append("No engine has a form for this head.")
    return "\n\n".join(parts) + "\n"


def _heading(provenance: Provenance, *, library: str | None = None, adapts: bool = False) -> list[str]:
    """Metadata, title and first sentence. library: what loads the files, for the Hub"""
    target, kind = provenance.target, str(provenance.document["_target_"]).rpartition(".")[2]
    metadata = [
        f"license: {provenance.license}",
        *([] if hub.is_folder(target) else [f"base_model: {target}"]),
        *([f"library_name: {library}"] if library else []),
        f"tags: [speculative-decoding, {kind.lower()}]",
    ]
    own = "those of the target as this head adapts it" if adapts else "the target's own"
    return [
        "\n".join(["---", *metadata, "---"]),
        f"# {kind} for {target}",
        f"A drafter for speculative decoding: it drafts tokens and {target} verifies them, so the texts are {own}.",
    ]


def _launch(form: ExportForm, out: str, num: int) -> list[str]:
    return [f"{engine}:\n\n```\n{line}\n```" for engine, line in form.launch_lines(out, num).items()]


def _bullets(notes: tuple[str, ...]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def _table(rows: dict[str, str]) -> str:
    """Two columns of Markdown; a bar inside a value does not end its cell."""
    cells = ("| {} | {} |".format(name, value.replace("|", "\\|")) for name, value in rows.items())
    return "\n".join(["| | |\n|---|---|", *cells])


def _origin(provenance: Provenance) -> dict[str, str]:
    """Rows of the table: what the drafter reads and where it comes from."""
    layers = provenance.document["reads_layers"]
    return {
        "target": f"{provenance.target}, fingerprint {provenance.fingerprint}",
        "hidden states read": ", ".join(map(str, layers)) or "none",
        "trained on": provenance.data,
        "licence": f"{provenance.license} (the target has its own)",
    }


def _training(provenance: Provenance, about: dict) -> dict[str, str]:
    """Rows of the table: size, tokens, time, machine, command, versions."""
    spent = (provenance.report and provenance.report.training) or Training()
    environment, data, start = (about.get(name) or {} for name in ("environment", "data", "start"))
    machine, processes = environment.get("machine"), environment.get("processes")
    versions = {**provenance.document["versions"], **({"python": environment["python"]} if environment else {})}
    tokens = _millions(spent.tokens)
    if spent.tokens and spent.unique_tokens:
        tokens += f", of {_millions(spent.unique_tokens)} different ones"
    return {
        "trained parameters": _millions(spent.parameters),
        "conversations": f"{data['conversations']:,}" if data.get("conversations") else MISSING,
        "tokens read in training": tokens,
        "minutes of training": f"{spent.seconds / 60:.1f}" if spent.seconds else MISSING,
        "machine": f"{machine}, {environment.get('threads')} threads, {processes} processes" if machine else MISSING,
        **({"started from": start["used"]} if start else {}),
        "command": f"`{about['command']}`" if about.get("command") else MISSING,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _millions(number: int | None) -> str:
    return f"{number / 1e6:.2f} M" if number else MISSING


def expected(provenance: Provenance) -> str:
    """A table of tau with its interval, by validation and in engines."""
    report, served = provenance.report, provenance.served
    lines = ["| measured by | setting | tau |\n|---|---|---|"]
    if report:
        decoded = (report.num_prompts, report.tau, report.tau_ci)
        replayed = (report.replayed_prompts, report.replayed_tau, report.replayed_tau_ci)
        few = _by_replay(report)
        num, tau, interval = replayed if few else decoded
        assert tau is not None and interval is not None
        setting = f"{num} prompts, temperature {report.temperature:g}, {_shape(report)}{', by replay' if few else ''}"
        lines.append(f"| specdec, validation | {setting} | {tau:.2f} ({interval[0]:.2f} .. {interval[1]:.2f}) |")
    for engine, entry in served.items():
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


def _shape(report: Report) -> str:
    return report.shape or f"chain of {len(report.survival or [])}"


def _by_replay(report: Report) -> bool:
    """Whether replay covers more prompts than were decoded, in the time that validation had for it."""
    return report.num_prompts < (report.replayed_prompts or 0)


def _figures(report: Report | None, about: dict) -> list[str]:
    """Survival by depth, speedup with its conditions, and whether answers are unchanged."""
    if report is None:
        return []
    survival = report.replayed_survival if _by_replay(report) else report.survival
    parts = []
    if survival:
        depths = " | ".join(map(str, range(1, 1 + len(survival))))
        shares = " | ".join(f"{share:.2f}" for share in survival)
        rows = [f"| drafts | {depths} |", f"|---|{'---|' * len(survival)}", f"| share of the rounds | {shares} |"]
        parts.append("Survival, the share of the rounds that accept at least so many drafts:\n\n" + "\n".join(rows))
    if report.speedup is None or report.speedup_ci is None:
        return [*parts, "The speedup was not measured: nothing was decoded with the clock running."]
    environment, dtype = about.get("environment") or {}, (about.get("target") or {}).get("dtype")
    machine = "a machine that is not recorded"
    if environment:
        machine = f"{environment['machine']}, {environment['threads']} threads"
    fast = f"{report.speedup:.2f} ({report.speedup_ci[0]:.2f} .. {report.speedup_ci[1]:.2f}) with a {_shape(report)}"
    if report.auto:
        low, high = report.auto["speedup_ci"]
        fast += f", {report.auto['speedup']:.2f} ({low:.2f} .. {high:.2f}) with proposer=auto"
    return [
        *parts,
        f"Speedup over plain decoding, with 95 % intervals over prompts: {fast}. {report.num_prompts} prompts, one stream, "
        f"temperature {report.temperature:g}, {dtype or 'a dtype that is not recorded'}, {machine}.",
        f"Answers: {verdict(report)}.",
    ]
