"""The forms that engines read: which engine takes which head, and the targets that engines have (engine_facts.yaml)."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from specdec.export.families import FAMILIES, find_family, kind_of
from specdec.export.family import EngineRules, ExportFamily, FullAttention, pick_texts
from specdec.export.layout import Layout, make_plain_layout
from specdec.export.published import restore_published
from specdec.heads.base import Drafter, Head
from specdec.target.model import Target

FACTS = yaml.safe_load(Path(__file__).with_name("engine_facts.yaml").read_text())
ENGINES = FACTS["engines"]
SCALED_NOTE = (
    "The target scales or caps its logits, and engines do not where this head borrows its LM head. The order of tokens "
    "is the same, the probabilities of drafts are not: draft greedily."
)
BIAS_NOTE = (
    "The target's LM head has a bias, which engines leave out for drafters: they draft worse than measured here."
)
UNCHANGED_NOTE = "Serve it as the head that it comes from: names, fields and files are the same."


@dataclass(frozen=True)
class EngineFormat:
    """How engines read heads in one format of `specdec export`, as engine_facts.yaml says."""

    takes: Mapping[str, str]  # kinds of heads that are there, with the engine's own name for each
    lines: Mapping[str, str]  # launch line by engine; {method} (of `takes`), {settings} and {more} are filled in
    engine: str | None = None  # one of ENGINES, whose targets are known
    settings: Mapping[str, str] = field(default_factory=dict)  # see `ExportForm.settings`; with <method>
    # engines that were not run on this folder: `takes` and `line`
    unrun_engines: Mapping[str, dict] = field(default_factory=dict)
    notes: Sequence[str] = ()  # sentences for the model card


def load_formats() -> dict[str, EngineFormat]:
    """All formats by name, with those kinds of heads whose families are there."""
    formats = {name: EngineFormat(**facts) for name, facts in FACTS["formats"].items()}
    for name, facts in formats.items():
        takes = {kind: method for kind, method in facts.takes.items() if kind in FAMILIES}
        formats[name] = replace(facts, takes=takes)
    return formats


FORMATS = load_formats()


@dataclass(frozen=True)
class ExportForm:
    """A drafter's layout, and the way in which engines are told to use it."""

    name: str  # key of FORMATS
    layout: Layout
    # launch line by engine, with <target>, <out>, <num> and <num+1>
    engines: dict[str, str] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)  # the engine's own configuration of speculation, with the same marks
    most_drafts: int | None = None  # largest number of drafts in a round; None: no limit
    whole_block: bool = False  # whether a round has exactly so many: fewer masks in a block would change every draft
    whole_vocabulary: bool = False  # whether the engine drafts from all V tokens, whatever the checkpoint's vocabulary
    notes: tuple[str, ...] = ()  # sentences for the model card

    def limit_drafts(self, requested: int) -> int:
        """The number of drafts in a round for a requested one."""
        if self.whole_block and self.most_drafts:
            return self.most_drafts
        return min(requested, self.most_drafts or requested)

    def launch_lines(self, *, target: str, out: str, num: int) -> dict[str, str]:
        """For each engine the line that serves an export in the folder `out` with `num` drafts in a round."""
        marks = {"<target>": target, "<out>": out, "<num>": str(num), "<num+1>": str(num + 1)}
        return {engine: _fill_marks(line, marks) for engine, line in self.engines.items()}

    def engine_settings(self, out: str, num: int) -> dict:
        """The engine's configuration of speculation, with the folder and the number of drafts filled in."""
        return {key: {"<out>": out, "<num>": num}.get(value, value) for key, value in self.settings.items()}


def drops_window(drafter: Drafter, name: str) -> bool:
    """Whether the engine of a format lets every draft of a head with a window see all positions."""
    family = find_family(drafter)
    notes = () if family is None else family.find_rules(name).notes
    return drafter.window is not None and any(isinstance(note, FullAttention) for note in notes)


def make_form(drafter: Drafter, name: str) -> ExportForm:
    """The form of a head in a format of FORMATS.

    Raises ValueError, with the formats that take it, for a head that has none, or that an engine would run otherwise.
    """
    if name == "safetensors":
        return ExportForm(name, make_plain_layout(drafter))
    if name == "published":
        return _make_published_form(drafter)
    facts, family = FORMATS[name], find_family(drafter)
    rules = EngineRules() if family is None else family.find_rules(name)
    reasons = pick_texts(rules.refusals, drafter)
    if reasons:
        raise ValueError(reasons[0])
    if family is None or family.kind not in facts.takes:
        raise _refuse_kind(drafter, name)
    layout = family.find_writer(name)(drafter)
    notes = [*facts.notes, *pick_texts(rules.notes, drafter)]
    if facts.engine is not None:
        notes += check_target(facts.engine, family.kind, drafter.target)
    method = facts.takes[family.kind]
    settings = {**{key: value.replace("<method>", method) for key, value in facts.settings.items()}, **rules.settings}
    lines = _fill_launch_lines(facts, rules, drafter, method, settings)
    _add_unrun_engines(facts, family, drafter, layout, lines, notes)
    return ExportForm(
        name,
        layout,
        lines,
        settings,
        most_drafts=drafter.depth and drafter.depth - bool(rules.drops_last and drafter.anchor_predicts),
        whole_block=family.whole_block,
        whole_vocabulary=drafter.draft_to_target is not None and not _has_draft_vocabulary(family, rules),
        notes=tuple(dict.fromkeys(notes)),
    )


def _has_draft_vocabulary(family: ExportFamily, rules: EngineRules) -> bool:
    """Whether both the layout and the engine have a place for a draft vocabulary."""
    return family.draft_vocabulary and rules.draft_vocabulary


def _make_published_form(drafter: Drafter) -> ExportForm:
    """The form of a published head in its own layout.

    Readers of Speculators' containers get the launch lines of new ones.
    """
    layout = restore_published(drafter)
    if "speculators_model_type" in layout.config:
        with contextlib.suppress(ValueError):  # for heads that this project cannot write into a new container
            return replace(make_form(drafter, "speculators"), name="published", layout=layout)
    return ExportForm("published", layout, notes=(UNCHANGED_NOTE,))


def _refuse_kind(drafter: Drafter, name: str) -> ValueError:
    """The error for a kind of head that the format does not take."""
    kind = kind_of(drafter)
    formats = ", ".join(other for other, facts in FORMATS.items() if kind in facts.takes)
    return ValueError(
        f"format={name} takes {', '.join(FORMATS[name].takes)}, and not {type(drafter).__name__} ({kind}). Formats "
        f"that take it: {formats or 'safetensors, which takes all'}. In transformers it runs by model.generate(..., "
        "custom_generate=Speculative(CHECKPOINT))."
    )


def _fill_launch_lines(
    facts: EngineFormat, rules: EngineRules, drafter: Drafter, method: str, settings: Mapping
) -> dict[str, str]:
    """The launch lines of the engines that run the head."""
    marks = {
        "{method}": method,
        "{settings}": json.dumps(settings).replace('"<num>"', "<num>"),
        "{more}": "".join(pick_texts(rules.options, drafter)),
    }
    unfit = tuple(pick_texts(rules.unfit_engines, drafter))
    return {engine: _fill_marks(line, marks) for engine, line in facts.lines.items() if not engine.startswith(unfit)}


def _add_unrun_engines(
    facts: EngineFormat,
    family: ExportFamily,
    drafter: Drafter,
    layout: Layout,
    lines: dict[str, str],
    notes: list[str],
) -> None:
    """Adds the launch lines of NVIDIA's engines, which were not run, or the reason why there is none."""
    outputs = layout.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    option = f', "eagle3_layers_to_capture": {outputs}' if outputs else ""
    for engine, other_facts in facts.unrun_engines.items():
        method = other_facts["takes"].get(family.kind)
        if method is None:
            continue
        rules = family.find_rules("nvidia")
        reasons = pick_texts(rules.refusals, drafter)
        if not reasons:
            notes += pick_texts(rules.notes, drafter)
            lines[f"{engine}, not run"] = _fill_marks(other_facts["line"], {"{method}": method, "{more}": option})
        else:
            notes.append(f"No line for {engine}: engines of NVIDIA {reasons[0]}.")


def _fill_marks(line: str, values: Mapping[str, str]) -> str:
    for mark, value in values.items():
        line = line.replace(mark, value)
    return line


def make_forms(drafter: Head) -> dict[str, ExportForm]:
    """All forms that engines serve, by format. Heads that are nothing but an adapter of their target have none."""
    forms: dict[str, ExportForm] = {}
    for name, facts in FORMATS.items():
        with contextlib.suppress(ValueError):
            if isinstance(drafter, Drafter) and facts.lines:
                forms[name] = make_form(drafter, name)
    return forms


# The targets that engines have, by kind of head or by its inputs; all model types where none are named


def find_target_families(engine: str, kind: str) -> set[str] | None:
    """Model types of targets (transformers', of the text part) that the engine has for a kind of head; None: all."""
    targets = ENGINES[engine].get("targets", {})
    families = targets.get(kind, targets.get(FAMILIES[kind].inputs))
    if families is None:
        return None
    return set((families if isinstance(families, str) else " ".join(families)).split())


def check_target(engine: str, kind: str, target: Target) -> tuple[str, ...]:
    """The sentences of the model card about an engine of ENGINES and a target, for a kind of head.

    Raises ValueError where the engine does not serve this pair.
    """
    model_type, source, notes = target.config.model_type, ENGINES[engine]["source"], []
    if FAMILIES[kind].inputs != "draft":  # a draft model has an LM head of its own
        # engines take the weight of a borrowed LM head alone, but for DFlash 2, whose configuration has scale and cap
        if not target.shape_logits.plain and kind != "dflash2":
            notes.append(SCALED_NOTE)
        if target.lm_head.bias is not None:
            notes.append(BIAS_NOTE)
    families = find_target_families(engine, kind)
    if families is not None and model_type not in families:
        if ENGINES[engine].get("sure") or (engine == "vLLM" and target.recurrent):
            raise ValueError(
                f"{engine} does not serve this kind of head with a {model_type} target ({source}). It does with "
                f"{', '.join(sorted(families))}. Take another format, or a draft model (head=draft), which needs "
                "nothing of the target; format=safetensors takes every head."
            )
        notes.append(f"Not known to load: {source} gives no hidden states of {model_type} targets.")
    if target.recurrent:
        notes.append(f"Speculative decoding of targets with recurrent layers, as this one, was not tried in {engine}.")
    return tuple(notes)
