"""The reference layout of Medusa heads: medusa_lm_head.pt, and the same names in safetensors for vLLM and TGI."""

from specdec.drafter import Drafter
from specdec.heads.medusa import Medusa, Medusa2
from specdec.layouts import medusa
from specdec.serving import Form, vllm_settings


def form(drafter: Drafter) -> Form:
    """Raises ValueError for what is no Medusa head, or has more blocks or a smaller vocabulary than the reference knows."""
    if isinstance(drafter, Medusa2):
        raise ValueError(medusa.ADAPTED)
    if not isinstance(drafter, Medusa):
        raise ValueError(f"format=medusa is for head=medusa, not for {type(drafter).__name__}: try format=vllm.")
    return Form(
        medusa.reference(drafter),
        {"FasterDecoding/Medusa": "MedusaModel.from_pretrained('<out>')"},
        settings=vllm_settings("medusa"),
        most_drafts=drafter.depth,
        whole_vocabulary=drafter.draft_to_target is not None,
        notes=(
            "The weights are here twice: medusa_lm_head.pt for the reference's code, which was not run, and model.safetensors, "
            "which vLLM reads with method medusa.",
        ),
    )
