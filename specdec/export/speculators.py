"""The Speculators container (0.9; docs/file-formats.md, section 11), which vLLM serves, too."""

from collections.abc import Mapping
from typing import Any

from specdec.export import layout
from specdec.export.layout import SIZE_FIELDS, Layout

VERSION = "0.9.0"  # of the container's fields
LAYER_FIELDS = (
    *SIZE_FIELDS,
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "num_hidden_layers",
)


def write_container(
    drafter: Any, kind: str, architecture: str, plain_layout: Layout, model_type: str, kind_fields: Mapping[str, Any]
) -> Layout:
    """A head in a container, from its layout outside of one.

    architecture: the head's class; model_type: type of its layers; kind_fields: fields that only this kind has
    """
    target, plain_config = drafter.target, plain_layout.config
    method = {"proposal_type": "greedy", "speculative_tokens": "<num>", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": {
            "model_type": model_type,
            **{name: plain_config[name] for name in LAYER_FIELDS},
            **layout.write_window_fields(drafter),
        },
        "draft_vocab_size": plain_config["draft_vocab_size"],
        "target_hidden_size": target.width,
        "torch_dtype": None,
        **kind_fields,
    }
    return Layout(plain_layout.tensors, config, plain_layout.pickles)
