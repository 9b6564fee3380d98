"""A drafter in the form that an engine loads: checked, written, read back, with a model card."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec import checkpoint
from specdec.drafter import Drafter
from specdec.layouts.base import Layout
from specdec.report import Report
from specdec.speed import best_chain
from specdec.target import Target

SERVED = "served.json"  # beside a checkpoint's report.json: what engines made of it (scripts/check_engines.py)

# of each entry, by the engine's name
SERVED_FIELDS = ("prompts", "num_prompts", "max_new_tokens", "num_drafts", "dtype", "tau", "served_tau")


@dataclass(frozen=True)
class Form:
    """engines: a launch line for each, in which <out>, <num> and <num+1> stand for the folder and the number of drafts

    settings: the engine's own configuration of speculation, likewise; most_drafts: more than that it has not
    whole_block: it drafts that many or is not what was trained: engines put as many masks as drafts into a block, and
        all of a block see each other
    whole_vocabulary: drafts come from all V tokens there, whatever the checkpoint's draft vocabulary
    more: writes further files into a folder
    """

    layout: Layout
    engines: dict[str, str]
    settings: dict = field(default_factory=dict)
    most_drafts: int | None = None
    whole_block: bool = False
    whole_vocabulary: bool = False
    notes: tuple[str, ...] = ()
    more: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Facts:
    """What the card says beside the form."""

    source: str  # the checkpoint's name
    document: dict  # drafter.json
    target: str
    fingerprint: str
    report: dict | None  # report.json, of the validation that chose the checkpoint
    served: dict  # by engine, see SERVED
    data: str
    license: str
    num_drafts: int

    @classmethod
    def read(cls, folder: Path, *, target: Target, license: str, data: str | None, num_drafts: int | None) -> "Facts":
        """Of a checkpoint's folder; num_drafts: None: what its own validation, of a chain, says is fastest."""
        document = checkpoint.read_json(folder / "drafter.json")
        report, served = (
            checkpoint.read_json(folder / name) if (folder / name).exists() else None
            for name in ("report.json", SERVED)
        )
        if not all(set(SERVED_FIELDS) <= set(found) for found in (served or {}).values()):
            raise ValueError(f"{folder / SERVED} is not what scripts/check_engines.py writes: delete it.")
        chain = report is not None and str(report.get("shape", "chain")).startswith("chain")
        num = num_drafts or (best_chain(Report.from_json(report)) if report is not None and chain else 3)
        name = f"{folder.parent.name}/{folder.name}"
        data = data or "not recorded"
        return cls(name, document, target.name, target.fingerprint(), report, served or {}, data, license, num)


def whole_vocabulary(drafter: Drafter) -> Drafter:
    """A copy of a drafter that borrows the target's LM head, drafting from all V tokens."""
    whole = copy.copy(drafter.decodable())
    whole._buffers = {**whole._buffers, "draft_to_target": None, "target_to_draft": None}
    whole._goal_head = (drafter.target.lm_head.weight, drafter.target.lm_head.bias)
    return whole


def write(form: Form, out: Path, *, dtype: torch.dtype, facts: Facts) -> dict[str, Tensor]:
    """Makes the folder `out`. -> the tensors, as they were read back

    Raises ValueError if `out` exists, or if the layout is not what its manifest asks for; then nothing is written.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another out=DIR or delete it.")
    layout = form.layout
    tensors = {name: _cast(value, dtype) for name, value in layout.tensors.items()}
    num = num_drafts(form, facts)
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
        (partial / "README.md").write_text(card(form, facts, str(out), dtype))
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
    return text.replace("<out>", out).replace("<num>", str(num)).replace("<num+1>", str(num + 1))


def settings(form: Form, out: str, num: int) -> dict:
    """The engine's configuration of speculation, for this folder and this many drafts."""
    return {key: {"<out>": out, "<num>": num}.get(value, value) for key, value in form.settings.items()}


def vllm_settings(method: str) -> dict:
    """vLLM's speculative config, as `Form.settings`."""
    return {"method": method, "model": "<out>", "num_speculative_tokens": "<num>"}


def vllm_line(target: str, given: dict) -> str:
    """The command that serves `target` with such settings, as in `Form.engines`."""
    return f"vllm serve {target} --speculative-config '{json.dumps(given)}'".replace('"<num>"', "<num>")


def num_drafts(form: Form, facts: Facts) -> int:
    if form.whole_block and form.most_drafts:
        return form.most_drafts
    return min(facts.num_drafts, form.most_drafts or facts.num_drafts)


def card(form: Form, facts: Facts, out: str, dtype: torch.dtype) -> str:
    """The model card: how to launch each engine, what to expect, what it was made of."""
    document, report, num = facts.document, facts.report, num_drafts(form, facts)
    kind = str(document["_target_"]).rpartition(".")[2]
    parts = [
        f"---\nlicense: {facts.license}\nbase_model: {facts.target}\ntags: [speculative-decoding, {kind.lower()}]\n---",
        f"# {kind} for {facts.target}",
        f"A drafter for speculative decoding: it guesses, {facts.target} checks, and the text stays the target's own. "
        f"Made from the checkpoint `{facts.source}` by specdec {document['versions']['specdec']}; weights in "
        f"{str(dtype).removeprefix('torch.')}.",
        "\n".join(
            [
                "| | |\n|---|---|",
                f"| target | {facts.target}, fingerprint {facts.fingerprint} |",
                f"| hidden states read | {', '.join(map(str, document['reads_layers'])) or 'none'} |",
                f"| trained on | {facts.data} |",
                f"| licence | {facts.license} (the target has its own) |",
                f"| drafts a round | {num} |",
            ]
        ),
        "## Launch",
    ]
    for engine, line in form.engines.items():
        parts.append(f"{engine}:\n\n```\n{filled(line, out, num)}\n```")
    parts.append("## What to expect")
    parts.append(_expected(report, facts.served))
    if form.whole_vocabulary:
        parts.append(
            "The checkpoint drafts from a reduced vocabulary and this engine from the whole one, on which it was not trained: "
            "acceptance is another than the validated one, and each draft costs more."
        )
    if form.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in form.notes))
    return "\n\n".join(parts) + "\n"


def _expected(report: dict | None, served: dict) -> str:
    lines = ["| measured by | setting | tau |\n|---|---|---|"]
    if report:
        low, high = report["tau_ci"]
        shape = report.get("shape", f"chain of {len(report['survival'])}")
        lines.append(
            f"| specdec, validation | {report['num_prompts']} prompts, temperature {report['temperature']:g}, "
            f"{shape} | {report['tau']:.2f} ({low:.2f} .. {high:.2f}) |"
        )
    for engine, found in served.items():
        setting = (
            f"{found['num_prompts']} prompts of {found['prompts']}, temperature 0, chain of {found['num_drafts']}, "
        )
        setting += found["dtype"]
        lines.append(f"| specdec, as served | {setting} | {found['tau']:.3f} |")
        lines.append(
            f"| {engine} | the same | {found['served_tau']:.3f} ({100 * (found['served_tau'] / found['tau'] - 1):+.1f} %) |"
        )
    if len(lines) == 1:
        return "Not measured. `python scripts/evaluate.py` says what the checkpoint is worth on your prompts."
    return (
        "tau: tokens emitted per target pass of a round, the bonus or correction token counted; it must not be compared "
        "across chain lengths.\n\n" + "\n".join(lines)
    )
