"""Which engine takes which head in which form, and the targets that engines have: engine_facts.yaml, with a function for each."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from specdec.export import block_drafter, eagle, medusa, mtp
from specdec.export.draft import write_language_model
from specdec.export.layout import Layout, check_full_attention, drop_draft_vocab, make_plain_layout
from specdec.export.published import restore_published
from specdec.export.speculators import write_container
from specdec.export.stitched import make_stitched_layout
from specdec.heads.base import Drafter, Head
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.heads.medusa import Medusa, Medusa2
from specdec.heads.mtp import MTP
from specdec.heads.native import NativeMTP
from specdec.target.model import Target

# What one engine does otherwise than others: a function (head, its kind) -> further options of the launch line, sentences for
# the model card. It raises ValueError for what the engine would run in another way than it was trained.
Special = tuple[str, list[str]]


WINDOW_NOTE = "{engine} counts the window of a sliding layer from each input of a block, training from the first one."
SAMPLING_NOTE = (
    "At temperature 0 nothing else is needed. Above it, drafts are sampled here, and vLLM takes the most likely ones unless "
    '"draft_sample_method": "probabilistic" is in its configuration: tau differs.'
)


def _vllm(drafter: Any, kind: str) -> Special:
    if kind == "eagle" and _has_bias(drafter):
        raise ValueError("vLLM drops the bias of EAGLE-1's fc, and this head has one: take format=sglang or eagle.")
    notes = []
    if kind == "eagle" and drafter.draft_to_target is not None:
        notes.append("token_map.pt is the draft vocabulary, for SGLang and for import; vLLM has no place for it.")
    if kind == "medusa":
        notes.append("vLLM drafts the chain of the heads' best guesses, not their tree. Since 0.33 it has no Medusa.")
    if kind in ("dspark", "dflash2", "lilicorr"):
        notes.append("Only vLLM's V2 runner (GPU) drafts with this head.")
    if kind == "dspark":
        _check_plain_markov(drafter, "vLLM 0.32")
        notes.append("enable_adaptive_verification uses its confidence head.")
    if kind in ("dflash", "dflash2", "lilicorr"):
        notes.append("mask_embedding.pt has the mask's embedding: keep it beside the weights, where vLLM looks for it.")
    notes += _note_window(drafter, "vLLM")
    if kind != "medusa":
        notes.append(SAMPLING_NOTE)
    if kind != "mtp":
        return "", notes
    notes.append("vLLM builds the module from the target's configuration, which --hf-overrides changes for that.")
    return f" --hf-overrides '{json.dumps(mtp.TARGET_OVERRIDES)}'", notes


def _note_window(drafter: Drafter, engine: str) -> list[str]:
    """How the engine counts the window of a block drafter; nothing for a head without one."""
    windowed = isinstance(drafter, BlockDrafter) and drafter.window is not None
    return [WINDOW_NOTE.format(engine=engine)] if windowed else []


def _has_state(drafter: Drafter) -> bool:
    """Whether it has a Markov head that reads the draft's state, a gated or a recurrent one."""
    return getattr(getattr(drafter, "dependence", None), "form", "plain") != "plain"


def _check_plain_markov(drafter: BlockDrafter, engine: str) -> None:
    if _has_state(drafter):
        raise ValueError(
            f"{engine} has plain Markov heads only, and this one reads the draft's state: take format=sglang or speculators, or train "
            "with dependence.form=plain."
        )


def _sglang(drafter: Any, kind: str) -> Special:
    notes = ["SGLang was not run: its own classes read this folder, and nothing was served."]
    if isinstance(drafter, BlockDrafter):
        notes += _note_window(drafter, "SGLang")
        if drafter.has_confidence:
            notes.append(
                "SGLang uses the confidence head where SGLANG_RAGGED_VERIFY_MODE=compact is in the environment."
            )
        if kind == "lilicorr":
            notes.append(
                "SGLang drafts greedily with LiLiCorr, unless SGLANG_ENABLE_LILICORR_SAMPLING=1 is in the environment."
            )
        if kind != "domino":
            return "", notes
        if drafter.anchor_predicts:
            notes.append("SGLang leaves out the last draft of a block.")
        notes.append("SGLang drafts greedily with Domino at any temperature, and takes weights in bfloat16 only.")
        return " --speculative-domino-candidate-pool-size 0", notes
    more = " --speculative-num-steps <num> --speculative-eagle-topk 1"
    if isinstance(drafter, Eagle3) and drafter.window is not None:
        if None in drafter.windows:
            raise ValueError(
                "SGLang has one window for all layers of a head: train with full_layers=null, or take format=vllm."
            )
        more += f" --speculative-draft-window-size {drafter.window}"
    if kind == "eagle" and drafter.draft_to_target is not None:
        more += f" --speculative-token-map <out>/{eagle.TOKEN_MAP}"
    return more, notes


def _nvidia(drafter: Any) -> str | None:
    """Why the engines of NVIDIA would run a folder of format=vllm in another way than it was trained; None: no reason known."""
    if drafter.window is not None:
        return "have no such sliding layers"
    if isinstance(drafter, BlockDrafter):
        if drafter.dependence is not None and drafter.draft_to_target is not None:
            return "have no draft vocabulary: train with head.vocab_size=null"
        own = block_drafter.find_target_row(drafter) is None
        return (
            f"take the mask from the target's embedding, and this head has its own: {block_drafter.NO_OWN_MASK}"
            if own
            else None
        )
    return "have no norm_before_residual" if drafter.norm_before_residual else None


def _llama_cpp(drafter: Any, kind: str) -> Special:
    if isinstance(drafter, Eagle3) and len(drafter.target_layers) != 3:
        raise ValueError("llama.cpp's converter takes EAGLE-3 heads of exactly three hidden states.")
    if isinstance(drafter, Eagle3 | BlockDrafter):
        check_full_attention(drafter, "llama.cpp")
    if kind == "dspark":
        _check_plain_markov(drafter, "llama.cpp's converter")
    return ("" if kind == "draft" else " --target-model-dir <target>"), []


def _safeailab(drafter: Any, kind: str) -> Special:
    if isinstance(drafter, Eagle3):
        check_full_attention(drafter, "SafeAILab's code")
    rope, layers = drafter.config.rope_parameters["rope_type"], eagle.find_default_layers(drafter.target)
    if rope not in ("default", "linear", "dynamic"):
        raise ValueError(f"SafeAILab's code has no rotary embedding of the type {rope}: take format=vllm.")
    if isinstance(drafter, Eagle3) and drafter.target_layers != layers:
        raise ValueError(
            f"SafeAILab's code reads hidden states {list(layers)}, and this head {list(drafter.target_layers)}. Train with "
            "target_layers=null, which has these for targets of 7 or more layers, or take format=vllm."
        )
    return "", [
        "SafeAILab's loader needs the base model in shards with an index: model.save_pretrained(DIR, max_shard_size='200MB')."
    ]


def _has_bias(drafter: Eagle) -> bool:
    return drafter.fc.bias is not None and bool(drafter.fc.bias.any())


def _eagle1(architecture: str) -> dict[str, Callable[[Any], Layout]]:
    return {"eagle": partial(eagle.write_eagle1, architecture=architecture)}


def _dflash_from_all(drafter: BlockDrafter) -> Layout:
    lattice = drafter.lattice
    if lattice is not None and (size := lattice.top * (lattice.top + 1)) > drafter.target.width:
        raise ValueError(
            f"llama.cpp carries a selector's candidates and scores in a state, and {size} numbers do not fit into "
            f"{drafter.target.width}: train with a smaller dependence.top."
        )
    return block_drafter.write_dflash(drop_draft_vocab(drafter))  # type: ignore[arg-type]  # a copy of the same class


@dataclass(frozen=True)
class EngineFormat:
    """How engines read heads in one format of scripts/export.py, as engine_facts.yaml says.

    takes: the kinds of heads (`kind_of`), with the engine's own name for each
    lines: by engine how it is launched, as in `ExportForm.engines`; {method} (of `takes`), {settings} and {more} are filled in
    engine: of ENGINES, whose targets are known; settings: as in `ExportForm`, with <method>
    whole: kinds that the engine lets draft from all tokens, whatever the checkpoint's draft vocabulary
    lacks: what the engine has not of EAGLE-3; None: it has all of EAGLE-3 and P-EAGLE
    others: engines that read the same folder and were not run, each with `takes` and its `line`
    notes: sentences for the model card; special: as described above; layouts: of kinds that are written otherwise than in LAYOUTS
    """

    takes: dict[str, str]
    lines: dict[str, str]
    engine: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    whole: Sequence[str] = ()
    lacks: Sequence[str] | None = None
    others: dict[str, dict] = field(default_factory=dict)
    notes: Sequence[str] = ()
    special: Callable[[Any, str], Special] = lambda drafter, kind: ("", [])
    layouts: dict[str, Callable[[Any], Layout]] = field(default_factory=dict)


LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "eagle3": eagle.write_eagle3,
    "peagle": eagle.write_eagle3,
    "medusa": medusa.write_vllm,
    "mtp": mtp.write_mimo,
    "dflash": block_drafter.write_dflash,
    "dspark": block_drafter.write_dspark,
    "dflash2": block_drafter.write_dflash,
    "domino": block_drafter.write_dflash,
    "lilicorr": block_drafter.write_dflash,
    "draft": write_language_model,
}
FACTS = yaml.safe_load(Path(__file__).with_name("engine_facts.yaml").read_text())
ENGINES, FORMAT_FACTS = FACTS["engines"], FACTS["formats"]
CODE: dict[str, dict[str, Any]] = {
    "eagle": {
        "special": _safeailab,
        "layouts": {"eagle": lambda drafter: eagle.write_eagle1(drafter, architecture="LlamaForCausalLM", bias=_has_bias(drafter))},
    },
    "gguf": {"special": _llama_cpp, "layouts": {"dflash": _dflash_from_all, "dflash2": _dflash_from_all}},
    "medusa": {"layouts": {"medusa": medusa.write_reference}},
    "sglang": {
        "special": _sglang,
        "layouts": {**_eagle1("LlamaForCausalLMEagle"), "eagle3": partial(eagle.write_eagle3, hidden_norms=True),
                    **dict.fromkeys(block_drafter.CLASSES, block_drafter.write_sglang)},
    },
    "speculators": {"layouts": {kind: partial(write_container, kind=kind) for kind in FORMAT_FACTS["speculators"]["takes"]}},
    "stitched": {"layouts": {"native": make_stitched_layout}},
    "vllm": {"special": _vllm, "layouts": _eagle1("EagleLlamaForCausalLM")},
}  # fmt: skip
FORMATS = {name: EngineFormat(**about, **CODE.get(name, {})) for name, about in FORMAT_FACTS.items()}


@dataclass(frozen=True)
class ExportForm:
    """A drafter's layout, and how engines are told to use it.

    name: of the format, in FORMATS
    engines: a launch line for each, in which <target>, <out>, <num> and <num+1> stand for names, and for the number of drafts
    settings: the engine's own configuration of speculation, with the same marks
    most_drafts: the largest number of drafts in a round; None: no limit
    whole_block: a round must have exactly that many drafts: engines put as many masks into a block as there are drafts,
        and all positions of a block attend to each other, so that fewer masks change every draft
    whole_vocabulary: the engine drafts from all V tokens, whatever the checkpoint's draft vocabulary
    notes: sentences for the model card
    """

    name: str
    layout: Layout
    engines: dict[str, str] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    most_drafts: int | None = None
    whole_block: bool = False
    whole_vocabulary: bool = False
    notes: tuple[str, ...] = ()

    def limit_drafts(self, requested: int) -> int:
        """Drafts in a round, where so many are requested."""
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


UNCHANGED_NOTE = "Serve it as the head that it comes from: names, fields and files are the same."
KINDS: dict[str, type] = {"eagle": Eagle, "peagle": PEagle, "eagle3": Eagle3, "medusa2": Medusa2, "medusa": Medusa, "mtp": MTP,
                          "native": NativeMTP, "draft": Draft}  # fmt: skip


def kind_of(drafter: Drafter) -> str:
    """The name of the head's kind in the tables above; the class's name for others."""
    if isinstance(drafter, BlockDrafter):
        return block_drafter.kind_of(drafter)
    return next((kind for kind, found in KINDS.items() if isinstance(drafter, found)), type(drafter).__name__)


def make_form(drafter: Drafter, name: str) -> ExportForm:
    """The form of a head in a format of FORMATS. Raises ValueError, with the formats that take it, if it has none."""
    if name == "safetensors":
        return ExportForm(name, make_plain_layout(drafter))
    if name == "published":
        layout = restore_published(drafter)
        if "speculators_model_type" in layout.config:
            with contextlib.suppress(ValueError):  # for heads that this project cannot write into a new container
                return replace(make_form(drafter, "speculators"), name=name, layout=layout)
        return ExportForm(name, layout, notes=(UNCHANGED_NOTE,))
    kind, format_facts = kind_of(drafter), FORMATS[name]
    if kind == "medusa2" and "medusa" in format_facts.takes:
        raise ValueError(medusa.ADAPTED_REFUSAL)
    if kind not in format_facts.takes:
        other_formats = (
            ", ".join(other for other, each in FORMATS.items() if kind in each.takes) or "safetensors, which takes all"
        )
        raise ValueError(
            f"format={name} takes {', '.join(format_facts.takes)}, and not {type(drafter).__name__} ({kind}). Formats that take it: "
            f"{other_formats}. In transformers it runs by model.generate(..., custom_generate=Speculative(CHECKPOINT))."
        )
    if isinstance(drafter, Eagle3) and format_facts.lacks is not None:
        eagle.check_engine_has(drafter, str(format_facts.engine), lacks=format_facts.lacks)
    more, own_notes = format_facts.special(drafter, kind)
    notes = [*format_facts.notes, *own_notes]
    layout = {**LAYOUTS, **format_facts.layouts}[kind](drafter)
    if isinstance(drafter, MTP) and not drafter.zero_first:
        notes.append(mtp.FIRST_ROW_NOTE)
    if format_facts.engine is not None:
        notes += check_target(format_facts.engine, kind, drafter.target)
    settings: dict = {
        key: value.replace("<method>", format_facts.takes[kind]) for key, value in format_facts.settings.items()
    }
    if kind == "peagle" and format_facts.settings:
        settings["parallel_drafting"] = True
    filled = {"{settings}": json.dumps(settings).replace('"<num>"', "<num>"), "{more}": more}
    lines = {
        engine: _fill_marks(line, {"{method}": format_facts.takes[kind], **filled})
        for engine, line in format_facts.lines.items()
    }
    if _has_state(drafter):
        lines = {engine: line for engine, line in lines.items() if not engine.startswith("vLLM")}
    for engine, other in format_facts.others.items():
        if kind in other["takes"] and (reason := _nvidia(drafter)) is None:
            inner = layout.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
            more = f', "eagle3_layers_to_capture": {inner}' if inner else ""
            lines[f"{engine}, not run"] = _fill_marks(other["line"], {"{method}": other["takes"][kind], "{more}": more})
        elif kind in other["takes"]:
            notes.append(f"No line for {engine}: engines of NVIDIA {reason}.")
    shorter = kind == "domino" and isinstance(drafter, BlockDrafter) and drafter.anchor_predicts
    most_drafts = drafter.depth - 1 if drafter.depth and shorter else drafter.depth
    return ExportForm(
        name,
        layout,
        lines,
        settings,
        most_drafts=most_drafts,
        whole_block=isinstance(drafter, BlockDrafter),
        whole_vocabulary=drafter.draft_to_target is not None and kind in format_facts.whole,
        notes=tuple(notes),
    )


def _fill_marks(line: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        line = line.replace(mark, value)
    return line


def make_forms(drafter: Head) -> dict[str, ExportForm]:
    """All forms that engines serve, by format. Heads that are nothing but an adapter of their target have none."""
    forms: dict[str, ExportForm] = {}
    for name, format_facts in FORMATS.items():
        with contextlib.suppress(ValueError):
            if isinstance(drafter, Drafter) and format_facts.lines:
                forms[name] = make_form(drafter, name)
    return forms


# The targets that engines have, by kind of head or by what it reads; where nothing is said, all families. Families are
# transformers' model types of the text part.

# What the engine's class of the target has to give for a kind of head: hidden states of inner layers; its last state, its
# embedding and its LM head; nothing
READS = {"eagle3": "states", "peagle": "states", "dflash": "states", "dspark": "states", "dflash2": "states", "domino": "states", "lilicorr": "states", "eagle": "last", "mtp": "last",
         "medusa": "last", "draft": "draft"}  # fmt: skip


def find_target_families(engine: str, kind: str) -> set[str] | None:
    """The families of targets that the engine has for a kind of head; None: all."""
    targets = ENGINES[engine].get("targets", {})
    families = targets.get(kind, targets.get(READS[kind]))
    return None if families is None else set((families if isinstance(families, str) else " ".join(families)).split())


def check_target(engine: str, kind: str, target: Target) -> tuple[str, ...]:
    """What the model card says about this pair. Raises ValueError where the engine does not serve it.

    engine: of ENGINES; kind: of READS
    """
    family, source, reads = target.config.model_type, ENGINES[engine]["source"], READS[kind]
    families = find_target_families(engine, kind)
    notes = []
    if reads != "draft" and not target.shape_logits.plain:  # engines take the weight of a borrowed LM head alone
        notes.append(
            "The target scales or caps its logits, and engines do not where this head borrows its LM head. The order of tokens "
            "is the same, the probabilities of drafts are not: draft greedily."
        )
    if reads != "draft" and target.lm_head.bias is not None:
        notes.append(
            "The target's LM head has a bias, which engines leave out for drafters: they draft worse than measured here."
        )
    if families is not None and family not in families:
        if ENGINES[engine].get("sure") or (engine == "vLLM" and target.recurrent):
            raise ValueError(
                f"{engine} does not serve this kind of head with a {family} target ({source}). It does with "
                f"{', '.join(sorted(families))}. Take another format, or a draft model (head=draft), which needs nothing of the "
                "target; format=safetensors takes every head."
            )
        notes.append(f"Not known to load: {source} gives no hidden states of {family} targets.")
    if target.recurrent:
        notes.append(f"Speculative decoding of targets with recurrent layers, as this one, was not tried in {engine}.")
    return tuple(notes)
