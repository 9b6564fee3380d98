"""EAGLE-3, P-EAGLE, DFlash and DSpark in the Speculators container (0.9; docs/file-formats.md, section 11), which vLLM serves too."""

from specdec.export import engine_targets
from specdec.export.layouts import base, block_drafter, eagle
from specdec.export.layouts.base import Layout
from specdec.export.serving import Form, form_of, vllm_line, vllm_settings
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3, PEagle

VERSION = "0.9.0"
COMMON = frozenset(
    "architectures speculators_model_type speculators_version speculators_config transformer_layer_config "
    "draft_vocab_size target_hidden_size torch_dtype".split()
)
FIELDS3 = COMMON | {
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "embed_requires_grad",
}
BLOCK = COMMON | {"block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor"}
DSPARK = BLOCK | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}


def form(drafter: Drafter) -> Form:
    """Raises ValueError for families without a type in the container, or without a loader in vLLM."""
    match drafter:
        case Eagle3():
            if len(drafter.fc_norm) and drafter.input_norm is not None:
                raise ValueError("Speculators takes fc_norm or norm_before_fc, not both: take format=vllm.")
            plain = eagle.eagle3(drafter)
            fields = {
                **{name: plain.config[name] for name in eagle.norms(drafter)},
                "eagle_aux_hidden_state_layer_ids": list(drafter.target_layers),
                "embed_requires_grad": False,
            }
            tensors = base.rename(plain.tensors, [("midlayer.", "layers.0.")])
            shapes = eagle.shapes3(plain.config, prefix="layers.0.")
            if not isinstance(drafter, PEagle):
                return _form(drafter, "eagle3", "llama", Layout(tensors, fields, shapes, FIELDS3), plain)
            if len(drafter.fc_norm) or drafter.norm_output:
                raise ValueError(
                    "vLLM reads no fc_norm and norm_output of a P-EAGLE head in this container: take format=vllm."
                )
            fields["mask_token_id"] = drafter.mask_token
            return _form(
                drafter, "peagle", "llama", Layout(tensors, fields, shapes, FIELDS3 | {"mask_token_id"}), plain
            )
        case BlockDrafter() if block_drafter.is_dspark(drafter):
            plain = block_drafter.dspark(drafter)
            names = DSPARK - COMMON - {"aux_hidden_state_layer_ids"}
            fields = {name: plain.config[name] for name in names}
            fields["aux_hidden_state_layer_ids"] = list(drafter.target_layers)
            return _form(drafter, "dspark", "qwen3", Layout(plain.tensors, fields, plain.shapes, DSPARK), plain)
        case BlockDrafter():
            plain = block_drafter.dflash(drafter)
            fields = {
                "block_size": plain.config["block_size"],
                "aux_hidden_state_layer_ids": list(drafter.target_layers),
                "mask_token_id": block_drafter.mask_token(drafter),
                "sample_from_anchor": False,
            }
            names = BLOCK
            if drafter.window is not None:
                if drafter.window_causal and None in drafter.windows:
                    raise ValueError(
                        "vLLM takes all layers of a DFlash drafter in this container as causal if the sliding ones are: take "
                        "format=vllm, or train without full_layers or with window_causal=false."
                    )
                fields["sliding_window_non_causal"] = not drafter.window_causal
                names = BLOCK | {"sliding_window_non_causal"}
            return _form(
                drafter,
                "dflash",
                "qwen3",
                Layout(plain.tensors, fields, plain.shapes, names, plain.pickles),
                plain,
            )
    raise ValueError(
        f"The Speculators container has no place for {type(drafter).__name__}, or vLLM has no loader for it. Take format=vllm, "
        "or train an EAGLE-3 head."
    )


def _form(drafter: Eagle3 | BlockDrafter, algorithm: str, model_type: str, own: Layout, plain: Layout) -> Form:
    """own: the container's tensors, manifest and the fields of one type, without those that all types share; plain: the layout
    of the family outside the container"""
    names = ("hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
             "rope_parameters max_position_embeddings vocab_size attention_bias num_hidden_layers")  # fmt: skip
    layer = {"model_type": model_type, **{name: plain.config[name] for name in names.split()}}
    layer |= eagle.window_fields(drafter)
    target = drafter.target
    config = {
        "architectures": [
            {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dspark": "DSpark"}[algorithm] + "Speculator"
        ],
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": "<num>",
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": drafter.vocab_size,
        "target_hidden_size": target.width,
        "torch_dtype": None,
        **own.config,
    }
    settings = vllm_settings("eagle3" if algorithm == "peagle" else algorithm)
    if algorithm == "peagle":
        settings["parallel_drafting"] = True
    lines = {
        "vLLM": vllm_line(target.name, settings),
        "vLLM, with the target named in config.json": "vllm serve <out>",
        "Speculators": "SpeculatorModel.from_pretrained('<out>')",
    }
    layout = Layout(own.tensors, config, own.shapes, own.fields, own.pickles)
    notes = engine_targets.notes("vLLM", "states", target)
    return form_of(drafter, layout, lines, settings=settings, notes=notes)
