"""EAGLE-1, EAGLE-3 and P-EAGLE: names, config.json, and the way back (docs/file-formats.md, sections 4 to 6)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdec.export import layout, speculators
from specdec.export.family import (
    FIRST_DRAFT,
    LLAMA_CPP,
    OPENVINO,
    SAFEAILAB,
    SAMPLING_NOTE,
    SGLANG,
    SGLANG_STEPS,
    SGLANG_WINDOW,
    TARGET_FOLDER,
    Clause,
    EngineRules,
    ExportFamily,
    PublishedFiles,
    note_full_attention,
)
from specdec.export.layout import Layout, Parsed, Tensors
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.target.model import Target

EMBEDDING = layout.EMBEDDING
EAGLE1_NAMES = [("block.", "layers.0."), ("embedding", EMBEDDING)]
SGLANG_NORMS = [(f"aux_norm_{place}.", f"fc_norm.{number}.") for number, place in enumerate(("low", "mid", "high"))]
# Fields inside NVIDIA's `eagle_config` that make another head of it, where they have another value than this
PLAIN_FIELDS = {
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "use_input_layernorm_in_first_layer": True,
    "parallel_draft_step": 1,
}
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # the names of P-EAGLE's mask token
TOKEN_MAP = "token_map.pt"  # the draft vocabulary of EAGLE-1, which SGLang reads by --speculative-token-map
MIDLAYER = "midlayer."
LAYER = "layers.{}."  # of several layers; SGLang, modelopt and Speculators call a single one so, too
PARALLEL = {"parallel_drafting": True}  # of P-EAGLE in vLLM's configuration
OWN_EMBEDDING = "place for its embedding"  # a part of EAGLE-3 that some engines lack


def list_eagle3_names(first_prefix: str, num_layers: int) -> list[tuple[str, str]]:
    """Own and public prefixes, longer public ones first. first_prefix: the public prefix of the first layer"""
    return [
        *((f"{norm}.", f"{first_prefix}{norm}.") for norm in ("input_layernorm", "hidden_norm")),
        ("block.", first_prefix),
        ("embedding", EMBEDDING),
        *((f"further.{number - 1}.", LAYER.format(number)) for number in range(1, num_layers)),
    ]


def find_default_layers(target: Target) -> tuple[int, int, int]:
    """The hidden states that every engine reads if config.json names none."""
    return 2, target.num_layers // 2, target.num_layers - 3


def list_norms(drafter: Eagle3) -> dict[str, bool]:
    """The switches of EAGLE-3. All are written, because engines differ in the meaning of a missing one."""
    return {
        "fc_norm": len(drafter.fc_norm) > 0,
        "norm_output": drafter.norm_output,
        "norm_before_fc": drafter.input_norm is not None,
        "norm_before_residual": drafter.norm_before_residual,
    }


def find_mask_token(config: dict) -> int | None:
    """P-EAGLE's mask token; None for EAGLE-3."""
    return next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)


def has_qk_norm(drafter: Eagle3) -> bool:
    """Whether queries and keys are normalised."""
    return drafter.block.self_attn.q_norm is not None


# Export


def write_eagle1(drafter: Eagle, *, architecture: str) -> Layout:
    """EAGLE-1 with a bias of `fc`, zero or not, because SGLang always reads one. `architecture` goes to config.json.

    Raises ValueError for a target that scales its embeddings.
    """
    layout.check_embedding(drafter.target)
    head = layout.list_own_tensors(drafter)
    head.setdefault("fc.bias", torch.zeros_like(head["fc.weight"][:, 0]))
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **layout.write_layer_fields(drafter.config, drafter.target),
        "bias": False,
        "torch_dtype": None,
    }
    vocab = drafter.draft_to_target
    pickles = {} if vocab is None else {TOKEN_MAP: vocab.tolist()}
    return Layout(layout.rename_tensors(head, EAGLE1_NAMES), config, pickles)


def write_safeailab1(drafter: Eagle) -> Layout:
    """EAGLE-1 for SafeAILab's code, which is told whether `fc` has a bias."""
    plain_layout = write_eagle1(drafter, architecture="LlamaForCausalLM")
    return replace(plain_layout, config=plain_layout.config | {"bias": has_bias(drafter)})


def write_eagle3(drafter: Eagle3) -> Layout:
    """EAGLE-3 in the layout that vLLM, SGLang, SafeAILab's code and llama.cpp's converter read.

    Raises ValueError for an LM head with a bias, and for hidden states that engines number in another way.
    """
    target, layers, num_layers = drafter.target, drafter.target_layers, 1 + len(drafter.further)
    layout.check_layers(layers, target)
    head = layout.list_own_tensors(drafter)
    if drafter.lm_head is None:
        weight, bias = drafter.goal_head
        if bias is not None:
            raise ValueError(
                f"The LM head of {target.name} has a bias, and in engines EAGLE-3's LM head has none: train with "
                "own_output=true."
            )
        head["lm_head.weight"] = target.shape_logits.scale * weight  # a cap keeps the order
    config = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if has_qk_norm(drafter) else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if has_qk_norm(drafter) else "llama",
        "num_hidden_layers": num_layers,
        **layout.write_layer_fields(drafter.config, target),
        "draft_vocab_size": drafter.vocab_size,
        **list_norms(drafter),
        **({} if drafter.estimates_state else {"target_hidden_size": target.width}),
        **layout.write_window_fields(drafter),
        "torch_dtype": None,
    }
    if layers != find_default_layers(target):
        # vLLM reads the outer numbers. SGLang reads the inner ones, numbers of layer outputs.
        config |= {"eagle_aux_hidden_state_layer_ids": list(layers), "num_aux_hidden_states": len(layers)}
        outputs = [number - 1 for number in layers]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    first_prefix = MIDLAYER if num_layers == 1 else LAYER.format(0)
    tensors = layout.rename_tensors(head, list_eagle3_names(first_prefix, num_layers))
    return Layout(tensors | layout.make_vocab_tensors(drafter), config)


def write_sglang3(drafter: Eagle3) -> Layout:
    """EAGLE-3 with the norm before attention in later layers as hidden_norm, too, where SGLang looks for it."""
    plain_layout = write_eagle3(drafter)
    tensors = dict(plain_layout.tensors)
    for prefix in map(LAYER.format, range(1, 1 + len(drafter.further))):
        tensors[f"{prefix}hidden_norm.weight"] = tensors[f"{prefix}input_layernorm.weight"].clone()
    return replace(plain_layout, tensors=tensors)


def write_openvino(drafter: Eagle3) -> Layout:
    """EAGLE-3 for optimum-intel: always with d2t and t2d, and with the numbers of the layers whose outputs it reads.

    OpenVINO GenAI counts outputs of layers, as SGLang does: a hidden state is the output of the layer before.
    """
    plain_layout = write_eagle3(drafter)
    device = drafter.fc.weight.device
    whole = {
        "d2t": torch.zeros(drafter.vocab_size, dtype=torch.long, device=device),
        "t2d": torch.ones(drafter.target.vocab_size, dtype=torch.bool, device=device),
    }
    outputs = [number - 1 for number in drafter.target_layers]
    config = plain_layout.config | {"hidden_layers_list": outputs}
    return replace(plain_layout, tensors=whole | plain_layout.tensors, config=config)


def write_peagle(drafter: PEagle) -> Layout:
    """P-EAGLE in EAGLE-3's layout, with its mask token."""
    plain_layout = write_eagle3(drafter)
    return replace(plain_layout, config=plain_layout.config | {"ptd_token_id": drafter.mask_token})


def write_eagle3_container(
    drafter: Eagle3, *, kind: str = "eagle3", architecture: str = "Eagle3Speculator", **kind_fields: int
) -> Layout:
    """EAGLE-3 in a Speculators container. Raises ValueError for a pair of norms that it does not have."""
    if len(drafter.fc_norm) and drafter.input_norm is not None:
        raise ValueError("Speculators takes fc_norm or norm_before_fc, not both: take format=vllm.")
    plain_layout = write_eagle3(drafter)
    tensors = layout.rename_tensors(plain_layout.tensors, [(MIDLAYER, LAYER.format(0))])
    fields = {
        **list_norms(drafter),
        "eagle_aux_hidden_state_layer_ids": list(drafter.target_layers),
        "embed_requires_grad": False,
        **kind_fields,
    }
    model_type = plain_layout.config["model_type"]
    return speculators.write_container(
        drafter, kind, architecture, replace(plain_layout, tensors=tensors), model_type, fields
    )


def write_peagle_container(drafter: PEagle) -> Layout:
    """P-EAGLE in a Speculators container. Raises ValueError for norms that vLLM does not read there."""
    if len(drafter.fc_norm) or drafter.norm_output:
        raise ValueError("vLLM reads no fc_norm and norm_output of a P-EAGLE head in this container: take format=vllm.")
    return write_eagle3_container(
        drafter, kind="peagle", architecture="PEagleSpeculator", mask_token_id=drafter.mask_token
    )


# Import


def map_eagle1_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    return {name: layout.rename_prefix(name, layout.swap_names(EAGLE1_NAMES)) for name in names}


def map_eagle3_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    first_prefix = LAYER.format(0) if any(name.startswith(LAYER.format(0)) for name in names) else MIDLAYER
    num_layers = config.get("num_hidden_layers", 1)
    prefixes = [
        *((f"{LAYER.format(n)}hidden_norm.", f"further.{n - 1}.input_layernorm.") for n in range(1, num_layers)),
        *layout.swap_names(list_eagle3_names(first_prefix, num_layers)),
        *SGLANG_NORMS,
        ("input_norm.", "input_norm."),
    ]
    return {name: layout.rename_prefix(name, prefixes) for name in names}


def is_eagle1(files: PublishedFiles) -> bool:
    """Whether the tensors are those of EAGLE-1, which has no norms behind `fc`."""
    return "fc.weight" in files.tensors and not {"norm.weight", "hidden_norm.weight"} & files.tensors.keys()


def is_eagle3(files: PublishedFiles) -> bool:
    """Whether the tensors are those of EAGLE-3 or P-EAGLE, and not of a block drafter."""
    return {"fc.weight", "norm.weight"} <= files.tensors.keys() and "hidden_norm.weight" not in files.tensors


def read_eagle1(files: PublishedFiles, target: Target) -> Parsed:
    """The arguments of `heads.eagle.Eagle`, and its tensors. Raises ValueError if they are no head of this target."""
    tensors = dict(files.tensors)
    embedding = layout.take_own_tensor(tensors, EMBEDDING, target.embed.weight)
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    own_names = map_eagle1_names(files.flat, tensors)
    head = {own_names[name]: value for name, value in tensors.items()}
    biased = bool(head["fc.bias"].any())
    if not biased:
        del head["fc.bias"]
    if TOKEN_MAP in files.side_files:
        head["draft_to_target"] = torch.as_tensor(files.side_files[TOKEN_MAP], dtype=torch.long).sort().values
    arguments = {"_target_": EAGLE.head, **layout.read_layer(files.flat, target), "fc_bias": biased}
    return layout.add_own_embedding(arguments, head, embedding)


def read_eagle3(files: PublishedFiles, target: Target) -> Parsed:
    """The class and arguments of an Eagle3 or a PEagle, and its tensors.

    Raises ValueError if they are no head of this target.
    """
    tensors, config = dict(files.tensors), files.flat
    embedding = layout.take_own_tensor(tensors, EMBEDDING, target.embed.weight, width=config["hidden_size"])
    config, layers = _read_fields(config, target)
    mask_id, num_layers = _read_mask_token(config, tensors), config.get("num_hidden_layers", 1)
    _merge_norms(tensors, num_layers)
    vocab, borrows = _read_output(tensors, config, target)
    own_names = map_eagle3_names(config, tensors)
    head = {own_names[name]: value for name, value in layout.drop_vocab_maps(tensors).items()}
    if vocab is not None:
        head["draft_to_target"] = vocab
    layout.check_layers(layers, target)
    arguments = {
        "_target_": EAGLE3.head if mask_id is None else PEAGLE.head,
        **({} if mask_id is None else {"mask_token": mask_id}),
        **layout.read_layer(config, target, own_width=True, qk_norm="block.self_attn.q_norm.weight" in head),
        "num_layers": num_layers,
        "own_output": not borrows,
        **layout.read_window(config, num_layers),
        "target_layers": list(layers),
        "norm_features": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        **{name: bool(config.get(name, False)) for name in ("norm_output", "norm_before_fc", "norm_before_residual")},
    }
    return layout.add_own_embedding(arguments, head, embedding)


def _read_mask_token(config: dict, tensors: Tensors) -> int | None:
    """P-EAGLE's mask token, with `mask_hidden` of the tensors as [1, 1, F*D]; None for EAGLE-3."""
    mask_id = find_mask_token(config)
    if (mask_id is None) != ("mask_hidden" not in tensors):
        raise ValueError(
            "P-EAGLE has mask_hidden among its tensors and a mask token in config.json: one of them is missing."
        )
    if mask_id is not None:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return mask_id


def _merge_norms(tensors: Tensors, num_layers: int) -> None:
    """Removes the second name of the norm in later layers. vLLM reads the one, SGLang the other."""
    for prefix in map(LAYER.format, range(1, num_layers)):
        norm = tensors.pop(f"{prefix}hidden_norm.weight", None)
        if norm is not None and not torch.equal(norm, tensors[f"{prefix}input_layernorm.weight"]):
            raise ValueError(
                f"{prefix}hidden_norm and {prefix}input_layernorm differ, and engines disagree which one counts."
            )


def _read_output(tensors: Tensors, config: dict, target: Target) -> tuple[Tensor | None, bool]:
    """The draft vocabulary [W] or None, and whether the LM head is the target's; then it leaves the tensors."""
    vocab, public_lm_head = layout.read_vocab(tensors), tensors.get("lm_head.weight")
    if public_lm_head is None:
        if config.get("tie_word_embeddings"):
            raise ValueError("its LM head is its embedding (tie_word_embeddings), which cannot be imported.")
        return vocab, True
    if len(public_lm_head) == target.vocab_size:  # then the maps are the identity
        vocab = None
    unscaled = target.lm_head.bias is None and target.shape_logits.plain
    borrows = unscaled and layout.is_copy(public_lm_head, layout.select_lm_head(target, vocab))
    if borrows:
        del tensors["lm_head.weight"]
    return vocab, borrows


def _read_fields(config: dict, target: Target) -> tuple[dict, tuple[int, ...]]:
    """The fields of config.json, all on one level, and the numbers of the hidden states that the head reads."""
    nested = config.get("eagle_config") or {}
    misplaced = [name for name in ("norm_output", "norm_before_residual", "fc_norm") if nested.get(name)]
    if misplaced:
        raise ValueError(f"eagle_config holds {', '.join(misplaced)}, which engines read one level up: move it there.")
    for name, expected in PLAIN_FIELDS.items():
        if nested.get(name, expected) not in (expected, None):
            raise ValueError(
                f"eagle_config has {name}={nested[name]}, which makes another head of it: {expected} can be imported."
            )
    outputs = nested.get("eagle_aux_hidden_state_layer_ids") or ()
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [number + 1 for number in outputs]
    norm_before_fc = nested.get("norm_before_fc", config.get("norm_before_fc", False))
    return {**config, "norm_before_fc": norm_before_fc}, tuple(layers or find_default_layers(target))


# Engines


def has_bias(drafter: Eagle) -> bool:
    """Whether `fc` has a bias that is not zero."""
    return drafter.fc.bias is not None and bool(drafter.fc.bias.any())


def has_vocabulary(drafter: Eagle) -> bool:
    """Whether the head has a draft vocabulary."""
    return drafter.draft_to_target is not None


def find_other_layers(drafter: Eagle3) -> list[list[int]]:
    """The default hidden states and the head's, if these are others."""
    layers = find_default_layers(drafter.target)
    return [] if drafter.target_layers == layers else [list(layers), list(drafter.target_layers)]


def list_missing(drafter: Eagle3, lacks: Sequence[str]) -> str:
    """The parts of an EAGLE-3 head that an engine lacks, of those in `lacks`."""
    parts = {
        **list_norms(drafter),
        "norms of queries and keys": has_qk_norm(drafter),
        OWN_EMBEDDING: drafter.embedding is not None and drafter.estimates_state,
    }
    return ", ".join(name for name, present in parts.items() if present and name in lacks)


def refuse_parts(engine: str, *lacks: str) -> Clause:
    """The refusal of EAGLE-3 heads with norms or an embedding that an engine lacks."""
    text = f"{engine} has no {{value}}, which this head was trained with: take format=vllm."
    return Clause(text, lambda drafter: list_missing(drafter, ("norms of queries and keys", *lacks)))


def refuse_layers(engine: str) -> Clause:
    """The refusal of an engine whose EAGLE-3 has one layer."""
    text = f"{engine} has no EAGLE-3 of several layers: take format=vllm or speculators."
    return Clause(text, lambda drafter: drafter.further)


def refuse_peagle(engine: str) -> EngineRules:
    """The rules of an engine without P-EAGLE."""
    return EngineRules([Clause(f"{engine} has no P-EAGLE: take format=vllm or speculators.")])


def refuse_count(reader: str) -> Clause:
    """The refusal of a reader of exactly three hidden states."""
    text = f"{reader} takes EAGLE-3 heads of exactly three hidden states."
    return Clause(text, lambda drafter: len(drafter.target_layers) != 3)


def refuse_rope(engine: str, *known_types: str) -> Clause:
    """The refusal of rotary embeddings that an engine lacks."""
    text = f"{engine} has no rotary embedding of the type {{value}}: take format=vllm."
    return Clause(text, lambda drafter: "".join({drafter.config.rope_parameters["rope_type"]} - set(known_types)))


ROPE_REFUSAL = refuse_rope(SAFEAILAB, "default", "linear", "dynamic")
EAGLE = ExportFamily(
    kind="eagle",
    head_class=Eagle,
    labels={"eagle": "EAGLE-1 (`eagle`, `hass`)"},
    inputs="last_state",
    recognises=is_eagle1,
    read=read_eagle1,
    public_names=map_eagle1_names,
    vocabulary_file=TOKEN_MAP,
    writers={
        "eagle": write_safeailab1,
        "sglang": partial(write_eagle1, architecture="LlamaForCausalLMEagle"),
        "vllm": partial(write_eagle1, architecture="EagleLlamaForCausalLM"),
    },
    engines={
        "eagle": EngineRules([ROPE_REFUSAL], notes=[note_full_attention(SAFEAILAB)], draft_vocabulary=False),
        "sglang": EngineRules(
            [
                Clause(
                    "SGLang gives EAGLE-1 the target's embedding, and this head has its own: take format=vllm.",
                    lambda drafter: drafter.embedding is not None,
                )
            ],
            options=[
                SGLANG_STEPS,
                SGLANG_WINDOW,
                Clause(f" --speculative-token-map <out>/{TOKEN_MAP}", has_vocabulary),
            ],
            notes=[note_full_attention(SGLANG, FIRST_DRAFT)],
        ),
        "vllm": EngineRules(
            [
                Clause(
                    "vLLM drops the bias of EAGLE-1's fc, and this head has one: take format=sglang or eagle.", has_bias
                )
            ],
            notes=[
                Clause(
                    f"{TOKEN_MAP} is the draft vocabulary, for SGLang and for import; vLLM has no place for it.",
                    has_vocabulary,
                ),
                SAMPLING_NOTE,
                note_full_attention("vLLM"),
            ],
            draft_vocabulary=False,
        ),
    },
)
EAGLE3 = ExportFamily(
    kind="eagle3",
    head_class=Eagle3,
    labels={"eagle3": "EAGLE-3 (`eagle3`)", "layers": "EAGLE-3 of several layers"},
    inputs="states",
    recognises=lambda files: is_eagle3(files) and find_mask_token(files.config) is None,
    read=read_eagle3,
    public_names=map_eagle3_names,
    container_field="norm_before_residual",
    writers={
        "": write_eagle3,
        "openvino": write_openvino,
        "sglang": write_sglang3,
        "speculators": write_eagle3_container,
    },
    engines={
        "eagle": EngineRules(
            [
                refuse_layers(SAFEAILAB),
                refuse_parts(SAFEAILAB, "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
                ROPE_REFUSAL,
                Clause(
                    "SafeAILab's code reads hidden states {value[0]}, and this head {value[1]}. Train with "
                    "target_layers=null, which has these for targets of 7 or more layers, or take format=vllm.",
                    find_other_layers,
                ),
            ],
            notes=[note_full_attention(SAFEAILAB)],
        ),
        "gguf": EngineRules(
            [
                refuse_layers(LLAMA_CPP),
                refuse_parts(LLAMA_CPP, "fc_norm", "norm_output", OWN_EMBEDDING),
                refuse_count("llama.cpp's converter"),
            ],
            options=[TARGET_FOLDER],
            notes=[note_full_attention(LLAMA_CPP)],
        ),
        "openvino": EngineRules(
            [
                refuse_layers(OPENVINO),
                refuse_parts(OPENVINO, "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
                Clause(
                    f"{OPENVINO} gives a head the target's embedding, and this head has its own: take format=vllm.",
                    lambda drafter: drafter.embedding is not None,
                ),
                refuse_count(OPENVINO),
                # the others change with the length of a text, and the conversion traces one length
                refuse_rope(OPENVINO, "default", "linear", "llama3", "yarn"),
            ],
            notes=[note_full_attention(OPENVINO)],
        ),
        "sglang": EngineRules(
            [
                refuse_parts(SGLANG, "norm_before_residual", OWN_EMBEDDING),
                Clause(
                    "SGLang has one window for all layers of a head: train with full_layers=null, or take format=vllm.",
                    lambda drafter: drafter.window is not None and None in drafter.windows,
                ),
            ],
            options=[SGLANG_STEPS, SGLANG_WINDOW],
        ),
        "vllm": EngineRules(notes=[SAMPLING_NOTE]),
        "nvidia": EngineRules(
            [Clause("have no norm_before_residual", lambda drafter: drafter.norm_before_residual)],
            notes=[note_full_attention("NVIDIA's engine")],
        ),
    },
)
PEAGLE = replace(
    EAGLE3,
    kind="peagle",
    head_class=PEagle,
    labels={"peagle": "P-EAGLE (`peagle`)"},
    recognises=lambda files: is_eagle3(files) and find_mask_token(files.config) is not None,
    container_field="mask_token_id",
    writers={"": write_peagle, "speculators": write_peagle_container},
    engines={
        "eagle": refuse_peagle(SAFEAILAB),
        "gguf": refuse_peagle(LLAMA_CPP),
        "openvino": refuse_peagle(OPENVINO),
        "sglang": refuse_peagle(SGLANG),
        "speculators": EngineRules(settings=PARALLEL),
        "vllm": EngineRules(notes=[SAMPLING_NOTE], settings=PARALLEL),
    },
)
FAMILIES = (PEAGLE, EAGLE3, EAGLE)  # a P-EAGLE head is an EAGLE-3 head, too
