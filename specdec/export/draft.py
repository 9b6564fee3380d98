"""A draft model as an ordinary folder of transformers (docs/file-formats.md, section 3)."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.export.family import SAMPLING_NOTE, SGLANG_STEPS, EngineRules, ExportFamily, note_full_attention
from specdec.export.layout import Layout
from specdec.heads.draft import Draft
from specdec.target.model import load_tokenizer

# of transformers' generate, which reads them in the assistant's folder alone: every round has as many drafts
FIXED_DRAFTS: dict[str, Any] = {
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
    "assistant_ensemble_weight": None,
}
DROPPED_FIELDS = ("dtype", "_name_or_path", "_model_name_or_path")  # of transformers' configuration, not of the model


def write_language_model(drafter: Draft) -> Layout:
    """A draft model with its tokenizer and generation settings.

    It has the target's embeddings where the draft borrows them. The output layer has all V rows even if the draft was
    trained on fewer: engines have no draft vocabulary for draft models.
    """
    model = drafter.language_model(torch.promote_types(drafter.dtype, torch.float32))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "tie_word_embeddings": tied}
    config = {key: value for key, value in config.items() if key not in DROPPED_FIELDS} | {"torch_dtype": None}

    tensors = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    tokenizer = load_tokenizer(drafter.target.name, trust_remote_code=drafter.target.trust_remote_code)

    def write_companions(folder: Path, num_drafts: int) -> None:
        tokenizer.save_pretrained(folder)
        settings = model.generation_config or GenerationConfig()
        settings.update(num_assistant_tokens=num_drafts, **FIXED_DRAFTS)
        settings.save_pretrained(folder)

    return Layout(tensors, config, write_companions=write_companions)


DRAFT = ExportFamily(
    kind="draft",
    head_class=Draft,
    labels={"draft": "draft model"},
    inputs="draft",
    draft_vocabulary=False,
    writers={"": write_language_model},
    engines={
        "sglang": EngineRules(options=[SGLANG_STEPS], notes=[note_full_attention("SGLang")]),
        "transformers": EngineRules(notes=[note_full_attention("transformers")]),
        "vllm": EngineRules(notes=[SAMPLING_NOTE, note_full_attention("vLLM")]),
    },
)
FAMILIES = (DRAFT,)
