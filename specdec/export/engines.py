"""Which engine takes which head in which form: a function and an entry of FORMATS for each, and the targets that engines have."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdec.export import block_drafter, eagle, medusa, mtp
from specdec.export.draft import language_model
from specdec.export.layout import Layout, check_whole, draft_from_all, plain_layout
from specdec.export.published import restore
from specdec.export.speculators import container
from specdec.heads.base import Drafter, Head
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.heads.medusa import Medusa, Medusa2
from specdec.heads.mtp import MTP
from specdec.target.model import Target

# What one engine does otherwise than others: a function (head, its kind) -> further options of the launch line, sentences for
# the model card. It raises ValueError for what the engine would run in another way than it was trained.
Special = tuple[str, list[str]]


def _vllm(drafter: Any, kind: str) -> Special:
    if kind == "eagle" and _has_bias(drafter):
        raise ValueError("vLLM drops the bias of EAGLE-1's fc, and this head has one: take format=sglang or eagle.")
    notes = []
    if kind == "eagle" and drafter.draft_to_target is not None:
        notes.append("token_map.pt is the draft vocabulary, for SGLang and for import; vLLM has no place for it.")
    if kind == "medusa":
        notes.append("vLLM drafts the chain of the heads' best guesses, not their tree.")
    if kind == "dspark":
        notes.append("Only vLLM's V2 runner (GPU) drafts with DSpark.")
    if kind == "dflash":
        notes.append("mask_embedding.pt has the mask's embedding: keep it beside the weights, where vLLM looks for it.")
        if drafter.window is not None:
            notes.append(
                "vLLM counts the window of a sliding layer from each input of a block, training from the first one."
            )
    if kind != "mtp":
        return "", notes
    notes.append("vLLM builds the module from the target's configuration, which --hf-overrides changes for that.")
    return f" --hf-overrides '{json.dumps(mtp.OVERRIDE)}'", notes


def _sglang(drafter: Any, kind: str) -> Special:
    mapped = kind == "eagle" and drafter.draft_to_target is not None
    more = f" --speculative-token-map <out>/{eagle.TOKEN_MAP}" if mapped else ""
    return more, ["SGLang was not run: this folder was written from its source."]


def _llama_cpp(drafter: Any, kind: str) -> Special:
    if isinstance(drafter, Eagle3) and len(drafter.target_layers) != 3:
        raise ValueError("llama.cpp's converter takes EAGLE-3 heads of exactly three hidden states.")
    return ("" if kind == "draft" else " --target-model-dir <target>"), []


def _safeailab(drafter: Any, kind: str) -> Special:
    rope, layers = drafter.config.rope_parameters["rope_type"], eagle.default_layers(drafter.target)
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


def _medusa(drafter: Any, kind: str) -> Special:
    return "", [
        "The weights are in two files: medusa_lm_head.pt for the reference code, which was not run and is for Llama targets, "
        "and model.safetensors, which vLLM reads with method medusa."
    ]


def _has_bias(drafter: Eagle) -> bool:
    return drafter.fc.bias is not None and bool(drafter.fc.bias.any())


def _eagle1(architecture: str) -> dict[str, Callable[[Any], Layout]]:
    return {"eagle": partial(eagle.eagle1, architecture=architecture)}


def _dflash_from_all(drafter: BlockDrafter) -> Layout:
    check_whole(drafter, "llama.cpp")
    return block_drafter.dflash(draft_from_all(drafter))  # type: ignore[arg-type]  # a copy of the same class


@dataclass(frozen=True)
class EngineFormat:
    """How engines read heads in one format of scripts/export.py.

    takes: the kinds of heads (`kind_of`), with the engine's own name for each
    lines: by engine how it is launched, as in `ExportForm.engines`; {method} (of `takes`), {settings} and {more} are filled in
    engine: of SOURCES below, whose targets are known; settings: as in `ExportForm`, with <method>
    whole: kinds that the engine lets draft from all tokens, whatever the checkpoint's draft vocabulary
    lacks: switches of EAGLE-3 that the engine ignores; None: it has all of EAGLE-3 and P-EAGLE
    special: as described above; layouts: of kinds that are written otherwise than in LAYOUTS
    """

    takes: dict[str, str]
    lines: dict[str, str]
    engine: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    lacks: tuple[str, ...] | None = None
    special: Callable[[Any, str], Special] = lambda drafter, kind: ("", [])
    layouts: dict[str, Callable[[Any], Layout]] = field(default_factory=dict)


LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "eagle3": eagle.eagle3,
    "peagle": eagle.eagle3,
    "medusa": medusa.vllm,
    "mtp": mtp.mimo,
    "dflash": block_drafter.dflash,
    "dspark": block_drafter.dspark,
    "draft": language_model,
}
VLLM_SETTINGS = {"method": "<method>", "model": "<out>", "num_speculative_tokens": "<num>"}
CONTAINED = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
}  # kinds of the Speculators container
FORMATS = {
    "eagle": EngineFormat(  # SafeAILab's code, which is told whether it is EAGLE-3; docs/file-formats.md, sections 4 and 5
        takes={"eagle": "False", "eagle3": "True", "peagle": "True"},
        lines={
            "SafeAILab/EAGLE": "EaModel.from_pretrained(base_model_path='<target>', ea_model_path='<out>', use_eagle3={method})"
        },
        engine="SafeAILab's code",
        whole=("eagle",),
        lacks=("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
        special=_safeailab,
        layouts={"eagle": lambda drafter: eagle.eagle1(drafter, architecture="LlamaForCausalLM", bias=_has_bias(drafter))},
    ),
    "gguf": EngineFormat(  # llama.cpp's converter, which has no draft vocabulary for DFlash; sections 3, 5 and 10
        takes={"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark", "draft": "simple"},
        lines={
            "llama.cpp": "python convert_hf_to_gguf.py <out> --outtype bf16 --outfile <out>.gguf{more}\n"
            "python convert_hf_to_gguf.py <target> --outtype bf16 --outfile target.gguf\n"
            "llama-server -m target.gguf -md <out>.gguf --spec-type draft-{method} --spec-draft-n-max <num> --spec-draft-p-min 0"
        },
        engine="llama.cpp",
        settings={"kind": "<method>", "num": "<num>"},
        whole=("dflash", "draft"),
        lacks=("fc_norm", "norm_output"),
        special=_llama_cpp,
        layouts={"dflash": _dflash_from_all},
    ),
    "medusa": EngineFormat(  # the reference code, vLLM and TGI; section 7
        takes={"medusa": "medusa"},
        lines={"FasterDecoding/Medusa": "MedusaModel.from_pretrained('<out>')"},
        settings=VLLM_SETTINGS,
        whole=("medusa",),
        special=_medusa,
        layouts={"medusa": medusa.reference},
    ),
    "published": EngineFormat(takes={}, lines={}),  # a published head, in the layout that it came in
    "safetensors": EngineFormat(takes={}, lines={}),  # any head, under this project's own names, for other readers
    "sglang": EngineFormat(  # SGLang 0.5, written from its source; sections 4, 5 and 9. It has no place for a mask's embedding
        takes={"eagle": "EAGLE", "eagle3": "EAGLE3", "peagle": "EAGLE3", "mtp": "EAGLE", "draft": "STANDALONE"},
        lines={
            "SGLang": "python -m sglang.launch_server --model <target> --speculative-algorithm {method} "
            "--speculative-draft-model-path <out> --speculative-num-steps <num> --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens <num+1>{more}"
        },
        engine="SGLang",
        whole=("mtp", "draft"),
        lacks=("norm_before_residual",),
        special=_sglang,
        layouts=_eagle1("LlamaForCausalLMEagle"),
    ),
    "speculators": EngineFormat(  # Speculators 0.9 and vLLM; section 11
        takes=CONTAINED,
        lines={
            "vLLM": "vllm serve <target> --speculative-config '{settings}'",
            "vLLM, with the target named in config.json": "vllm serve <out>",
            "Speculators": "SpeculatorModel.from_pretrained('<out>')",
        },
        engine="vLLM",
        settings=VLLM_SETTINGS,
        layouts={kind: partial(container, kind=kind) for kind in CONTAINED},
    ),
    "transformers": EngineFormat(  # section 3
        takes={"draft": "draft"},
        lines={
            "transformers": "model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained('<out>'), "
            "num_assistant_tokens=<num>, num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0)"
        },
        whole=("draft",),
    ),
    "vllm": EngineFormat(  # vLLM 0.32; sections 3 to 10
        takes={"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3", "medusa": "medusa", "mtp": "mtp",
               "dflash": "dflash", "dspark": "dspark", "draft": "draft_model"},
        lines={"vLLM": "vllm serve <target> --speculative-config '{settings}'{more}"},
        engine="vLLM",
        settings=VLLM_SETTINGS,
        whole=("eagle", "medusa", "mtp", "draft"),
        special=_vllm,
        layouts=_eagle1("EagleLlamaForCausalLM"),
    ),
}  # fmt: skip


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

    def num_drafts(self, wanted: int) -> int:
        """Drafts in a round, where so many are wanted."""
        if self.whole_block and self.most_drafts:
            return self.most_drafts
        return min(wanted, self.most_drafts or wanted)

    def launch_lines(self, *, target: str, out: str, num: int) -> dict[str, str]:
        """For each engine the line that serves an export in the folder `out` with `num` drafts in a round."""
        marks = {"<target>": target, "<out>": out, "<num>": str(num), "<num+1>": str(num + 1)}
        lines = dict(self.engines)
        for mark, value in marks.items():
            lines = {engine: line.replace(mark, value) for engine, line in lines.items()}
        return lines

    def settings_for(self, out: str, num: int) -> dict:
        """The engine's configuration of speculation, with the folder and the number of drafts filled in."""
        return {key: {"<out>": out, "<num>": num}.get(value, value) for key, value in self.settings.items()}


KINDS: dict[str, type] = {"eagle": Eagle, "peagle": PEagle, "eagle3": Eagle3, "medusa2": Medusa2, "medusa": Medusa, "mtp": MTP,
                          "draft": Draft}  # fmt: skip


def kind_of(drafter: Drafter) -> str:
    """The name of the head's kind in the tables above; the class's name for others."""
    if isinstance(drafter, BlockDrafter):
        return "dspark" if block_drafter.is_dspark(drafter) else "dflash"
    return next((kind for kind, found in KINDS.items() if isinstance(drafter, found)), type(drafter).__name__)


def make_form(drafter: Drafter, name: str) -> ExportForm:
    """The form of a head in a format of FORMATS. Raises ValueError, with the formats that take it, if it has none."""
    if name in ("safetensors", "published"):
        return ExportForm(name, (restore if name == "published" else plain_layout)(drafter))
    kind, about = kind_of(drafter), FORMATS[name]
    if kind == "medusa2" and "medusa" in about.takes:
        raise ValueError(medusa.ADAPTED)
    if kind not in about.takes:
        others = (
            ", ".join(other for other, each in FORMATS.items() if kind in each.takes) or "safetensors, which takes all"
        )
        raise ValueError(
            f"format={name} takes {', '.join(about.takes)}, and not {type(drafter).__name__} ({kind}). Formats that take it: "
            f"{others}. In transformers it runs by model.generate(..., custom_generate=Speculative(CHECKPOINT))."
        )
    if isinstance(drafter, Eagle3) and about.lacks is not None:
        eagle.check_plain(drafter, str(about.engine), lacks=about.lacks)
    more, notes = about.special(drafter, kind)
    layout = {**LAYOUTS, **about.layouts}[kind](drafter)
    if isinstance(drafter, MTP) and not drafter.zero_first:
        notes.append(mtp.FIRST_ROW)
    if about.engine is not None:
        notes += check_target(about.engine, READS[kind], drafter.target)
    settings: dict = {key: value.replace("<method>", about.takes[kind]) for key, value in about.settings.items()}
    if kind == "peagle" and about.settings:
        settings["parallel_drafting"] = True
    filled = {"method": about.takes[kind], "settings": json.dumps(settings).replace('"<num>"', "<num>"), "more": more}
    return ExportForm(
        name,
        layout,
        {engine: line.format(**filled) for engine, line in about.lines.items()},
        settings,
        most_drafts=drafter.depth,
        whole_block=isinstance(drafter, BlockDrafter),
        whole_vocabulary=drafter.draft_to_target is not None and kind in about.whole,
        notes=tuple(notes),
    )


def make_forms(drafter: Head) -> dict[str, ExportForm]:
    """All forms that engines serve, by format. Heads that are nothing but an adapter of their target have none."""
    found: dict[str, ExportForm] = {}
    for name, about in FORMATS.items():
        with contextlib.suppress(ValueError):
            if isinstance(drafter, Drafter) and about.lines:
                found[name] = make_form(drafter, name)
    return found


# The targets that engines have, read from their sources. Families are transformers' model types of the text part.

# What the engine's class of the target has to give for a kind of head: hidden states of inner layers; its last state, its
# embedding and its LM head; nothing
READS = {"eagle3": "states", "peagle": "states", "dflash": "states", "dspark": "states", "eagle": "last", "mtp": "last",
         "medusa": "last", "draft": "draft"}  # fmt: skip
SOURCES = {
    "vLLM": "vLLM 0.32.0",
    "SGLang": "SGLang 0.5.23",
    "llama.cpp": "llama.cpp, build 11434",
    "SafeAILab's code": "SafeAILab/EAGLE, eagle/model/ea_model.py",
}
# vLLM: classes with SupportsEagle3, its classes for transformers' own models among them
VLLM_STATES = frozenset(
    "afmoe apertus arcee cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5 flex_olmo gemma4_text glm "
    "glm_moe_dsa gpt_bigcode gpt_neox gpt_oss granite granite_swa hunyuan_v1_dense hunyuan_v1_moe jais2 kimi_linear laguna "
    "llama llama4_text mellum mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral nemotron_h olmo olmo2 olmo3 phi phi3 qwen2 "
    "qwen2_5_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 "
    "starcoder2 vaultgemma".split()
)
# SGLang: classes with get_embed_and_head, and of these the ones with set_eagle3_layers_to_capture
SGLANG_STATES = frozenset(
    "apertus deepseek_v2 deepseek_v3 deepseek_v32 exaone_moe gemma3_text gemma4_text glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss "
    "llama llama4_text longcat_flash mellum minimax_m2 ministral3 mistral phi3 qwen2 qwen2_5_vl_text qwen3 qwen3_5_moe_text "
    "qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text".split()
)
SGLANG_LAST = SGLANG_STATES | frozenset(
    "deepseek_v4 ernie4_5_moe exaone4 falcon_h1 glm4 hy_v3 hy_v4 laguna mimo_v2_flash nemotron_h opt".split()
)
# llama.cpp: graphs that set t_layer_inp
LLAMA_CPP_STATES = frozenset(
    "deepseek_v4 gemma4_text gpt_oss hunyuan_v1_dense lfm2 lfm2_moe llama mimo_v2_flash minimax minimax_m2 mistral mixtral "
    "nemotron_h qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next".split()
)
SAFEAILAB = frozenset("llama mixtral qwen2 qwen3".split())  # it reads all others with Mixtral's class
# Families by engine and by what it has to give; where nothing is said, all families
TARGETS = {
    "vLLM": {"states": VLLM_STATES},
    "SGLang": {"states": SGLANG_STATES, "last": SGLANG_LAST},
    "llama.cpp": {"states": LLAMA_CPP_STATES},
    "SafeAILab's code": {"states": SAFEAILAB, "last": SAFEAILAB},
}
SURE = ("SGLang", "SafeAILab's code")  # they stop, or read the target wrongly, if the family is not listed


def check_target(engine: str, reads: str, target: Target) -> tuple[str, ...]:
    """What the model card says about this pair. Raises ValueError where the engine does not serve it.

    engine: of SOURCES; reads: states, last or draft, of READS
    """
    family, source = target.config.model_type, SOURCES[engine]
    families = TARGETS[engine].get(reads)
    found = []
    if reads != "draft" and not target.shape_logits.plain:  # engines take the weight of a borrowed LM head alone
        found.append(
            "The target scales or caps its logits, and engines do not where this head borrows its LM head. The order of tokens "
            "is the same, the probabilities of drafts are not: draft greedily."
        )
    if reads != "draft" and target.lm_head.bias is not None:
        found.append(
            "The target's LM head has a bias, which engines leave out for drafters: they draft worse than measured here."
        )
    if families is not None and family not in families:
        if engine in SURE or (engine == "vLLM" and target.recurrent):
            raise ValueError(
                f"{engine} does not serve this kind of head with a {family} target ({source}). It does with "
                f"{', '.join(sorted(families))}. Take another format, or a draft model (head=draft), which needs nothing of the "
                "target; format=safetensors takes every head."
            )
        found.append(f"Not known to load: {source} gives no hidden states of {family} targets.")
    if target.recurrent:
        found.append(f"Speculative decoding of targets with recurrent layers, as this one, was not tried in {engine}.")
    return tuple(found)
