"""Exports: a drafter in the form that an engine loads, checked, written, read back, and with a model card."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec import checkpoint
from specdec.core import hub
from specdec.export.layouts.base import Layout
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.measuring.report import Report
from specdec.measuring.speed import best_chain
from specdec.target.model import Target

BAR = "\\|"  # inside a cell of a table
WHOLE_VOCABULARY = (
    "The checkpoint drafts from a reduced vocabulary and this engine from the whole one, on which it was not trained: "
    "acceptance differs from the validated one, and each draft costs more."
)
# Beside a checkpoint's report.json, its tau in real engines: by the name of the engine, an entry with these fields.
SERVED = "served.json"
SERVED_FIELDS = ("prompts", "num_prompts", "max_new_tokens", "num_drafts", "dtype", "tau", "served_tau")


@dataclass(frozen=True)
class Form:
    """A drafter's layout, and how engines are told to use it.

    engines: a launch line for each, in which <out>, <num> and <num+1> stand for the folder and the number of drafts
    settings: the engine's own configuration of speculation, with the same marks
    most_drafts: the largest number of drafts in a round; None: no limit
    whole_block: a round must have exactly that many drafts: engines put as many masks into a block as there are drafts,
        and all positions of a block attend to each other, so that fewer masks change every draft
    whole_vocabulary: the engine drafts from all V tokens, whatever the checkpoint's draft vocabulary
    notes: sentences for the model card; more: writes further files into a folder
    """

    layout: Layout
    engines: dict[str, str]
    settings: dict = field(default_factory=dict)
    most_drafts: int | None = None
    whole_block: bool = False
    whole_vocabulary: bool = False
    notes: tuple[str, ...] = ()
    more: Callable[[Path], None] | None = None


def form_of(drafter: Drafter, layout: Layout, engines: dict[str, str], **fields) -> Form:
    """A form with the drafter's own limits on the number of drafts; fields: of `Form`"""
    block = isinstance(drafter, BlockDrafter)
    return Form(layout, engines, most_drafts=drafter.depth, whole_block=block, **fields)


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
        decoded = report if report is not None and report.decoded else None
        chain = decoded is not None and (decoded.shape is None or decoded.shape.startswith("chain"))
        num = num_drafts or (best_chain(decoded) if decoded is not None and chain else 3)
        data = data or "not recorded"
        return cls(
            checkpoint.name_of(folder),
            document,
            target.name,
            target.fingerprint(),
            report,
            served or {},
            data,
            license,
            num,
        )


def whole_vocabulary(drafter: Drafter) -> Drafter:
    """A copy of a drafter that borrows the target's LM head; the copy drafts from all V tokens."""
    whole = drafter.decodable()
    whole.draft_to_target = whole.target_to_draft = None
    whole.goal_head = (drafter.target.lm_head.weight, drafter.target.lm_head.bias)
    return whole


def write(form: Form, out: Path, *, dtype: torch.dtype, provenance: Provenance) -> dict[str, Tensor]:
    """Makes the folder `out`. -> the tensors, as they were read back

    Raises ValueError, and writes nothing, if `out` exists or if the layout does not fit its manifest.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    layout = form.layout
    tensors = {name: _cast(value, dtype) for name, value in layout.tensors.items()}
    num = num_drafts(form, provenance)
    config = json.loads(json.dumps(layout.config).replace('"<num>"', str(num)))
    if "torch_dtype" in config:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    Layout(tensors, config, layout.shapes, layout.fields).check()
    pickles = {
        name: {key: _cast(part, dtype) for key, part in value.items()} if isinstance(value, dict) else value
        for name, value in layout.pickles.items()
    }
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        # older transformers load nothing without this format
        safetensors.torch.save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, value in pickles.items():
            torch.save(value, partial / name)
        if form.more is not None:
            form.more(partial)
        (partial / "README.md").write_text(card(form, provenance, str(out), dtype))
        read = checkpoint.read_tensors(partial / "model.safetensors")
        assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert json.loads((partial / "config.json").read_text()) == config
        for name, value in pickles.items():
            assert _equal(torch.load(partial / name, weights_only=True), value)
        partial.rename(out)
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:  # the last: torch.save on a full disk
        raise ValueError(
            f"{out} could not be written ({error}). Free some disk space or choose another out=DIR."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return read


def _cast(value, dtype: torch.dtype):
    if not isinstance(value, Tensor):
        return value
    return (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()


def _equal(read, written) -> bool:
    if isinstance(written, Tensor):
        return read.dtype == written.dtype and torch.equal(read, written)
    if isinstance(written, dict):
        return read.keys() == written.keys() and all(_equal(read[key], written[key]) for key in written)
    return read == written


def filled(text: str, out: str, num: int) -> str:
    """A launch line with the folder and the number of drafts filled in."""
    return text.replace("<out>", out).replace("<num>", str(num)).replace("<num+1>", str(num + 1))


def launch_lines(form: Form, out: str, num: int) -> dict[str, str]:
    """For each engine the line that serves an export in the folder `out`."""
    return {engine: filled(line, out, num) for engine, line in form.engines.items()}


def settings(form: Form, out: str, num: int) -> dict:
    """The engine's configuration of speculation, with the folder and the number of drafts filled in."""
    return {key: {"<out>": out, "<num>": num}.get(value, value) for key, value in form.settings.items()}


def vllm_settings(method: str) -> dict:
    """vLLM's speculative configuration, as in `Form.settings`."""
    return {"method": method, "model": "<out>", "num_speculative_tokens": "<num>"}


def vllm_line(target: str, given: dict) -> str:
    """The command that serves `target` with these settings, as in `Form.engines`."""
    return f"vllm serve {target} --speculative-config '{json.dumps(given)}'".replace('"<num>"', "<num>")


def num_drafts(form: Form, provenance: Provenance) -> int:
    if form.whole_block and form.most_drafts:
        return form.most_drafts
    return min(provenance.num_drafts, form.most_drafts or provenance.num_drafts)


def card(form: Form, provenance: Provenance, out: str, dtype: torch.dtype) -> str:
    """The model card: how to launch each engine, what to expect, where the drafter comes from."""
    num = num_drafts(form, provenance)
    parts = [
        *heading(provenance),
        f"Exported from the checkpoint `{provenance.source}` by specdec {provenance.document['versions']['specdec']}; weights in "
        f"{str(dtype).removeprefix('torch.')}.",
        table({**origin(provenance), "drafts a round": str(num)}),
        "## Launch",
    ]
    for engine, line in launch_lines(form, out, num).items():
        parts.append(f"{engine}:\n\n```\n{line}\n```")
    parts += ["## What to expect", expected(provenance)]
    if form.whole_vocabulary:
        parts.append(WHOLE_VOCABULARY)
    if form.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in form.notes))
    return "\n\n".join(parts) + "\n"


def heading(provenance: Provenance, *, library: str | None = None, adapts: bool = False) -> list[str]:
    """What every model card begins with: metadata, title, first sentence.

    library: what loads the files, for the Hub; adapts: whether the head changes its target
    """
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


def origin(provenance: Provenance) -> dict[str, str]:
    """Rows of a model card's table: what the drafter reads and where it comes from."""
    layers = provenance.document["reads_layers"]
    return {
        "target": f"{provenance.target}, fingerprint {provenance.fingerprint}",
        "hidden states read": ", ".join(map(str, layers)) or "none",
        "trained on": provenance.data,
        "licence": f"{provenance.license} (the target has its own)",
    }


def table(rows: dict[str, str]) -> str:
    """Two columns of Markdown; a bar inside a value does not end its cell."""
    cells = (f"| {name} | {value.replace('|', BAR)} |" for name, value in rows.items())
    return "\n".join(["| | |\n|---|---|", *cells])


def expected(provenance: Provenance) -> str:
    """A table of tau with its interval, by validation and in engines."""
    report, served = provenance.report, provenance.served
    lines = ["| measured by | setting | tau |\n|---|---|---|"]
    if report:
        decoded = (report.num_prompts, report.tau, report.tau_ci)
        replayed = (report.replayed_prompts, report.replayed_tau, report.replayed_tau_ci)
        few = by_replay(report)
        num, tau, interval = replayed if few else decoded
        assert tau is not None and interval is not None
        shape = report.shape or f"chain of {len(report.survival or [])}"
        setting = f"{num} prompts, temperature {report.temperature:g}, {shape}{', by replay' if few else ''}"
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


def by_replay(report: Report) -> bool:
    """Whether replay covers more prompts than were decoded, in the time that validation had for it."""
    return report.num_prompts < (report.replayed_prompts or 0)
