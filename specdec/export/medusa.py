"""Medusa heads in the layout of the reference code: medusa_lm_head.pt, and the same names in safetensors for vLLM and TGI."""

from specdec.export.layouts import medusa
from specdec.export.serving import Form, form_of, vllm_settings
from specdec.heads.base import Drafter
from specdec.heads.medusa import Medusa, Medusa2

REFERENCE = ("llama", "mistral")  # targets of FasterDecoding/Medusa


def form(drafter: Drafter) -> Form:
    """Raises ValueError for other heads, and for several blocks or a draft vocabulary, which the reference code lacks."""
    if isinstance(drafter, Medusa2):
        raise ValueError(medusa.ADAPTED)
    if not isinstance(drafter, Medusa):
        raise ValueError(f"format=medusa is for Medusa heads, not for {type(drafter).__name__}: try format=vllm.")
    family = drafter.target.config.model_type
    known = (
        () if family in REFERENCE else (f"The reference code is for Llama: it is not known to load {family} targets.",)
    )
    return form_of(
        drafter,
        medusa.reference(drafter),
        {"FasterDecoding/Medusa": "MedusaModel.from_pretrained('<out>')"},
        settings=vllm_settings("medusa"),
        whole_vocabulary=drafter.draft_to_target is not None,
        notes=(
            "The weights are in two files: medusa_lm_head.pt for the reference code, which was not run, and model.safetensors, "
            "which vLLM reads with method medusa.",
            *known,
        ),
    )
