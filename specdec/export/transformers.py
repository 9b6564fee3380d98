"""A draft model for `generate(assistant_model=...)` in transformers."""

from specdec.export.layouts import language_model
from specdec.export.serving import Form
from specdec.heads.base import Drafter
from specdec.heads.draft import Draft

LINE = (
    "model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained('<out>'), num_assistant_tokens=<num>, "
    "num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0)"
)


def form(drafter: Drafter) -> Form:
    """Raises ValueError for heads, which are not language models."""
    if not isinstance(drafter, Draft):
        raise ValueError(
            f"format=transformers is for draft models, and {type(drafter).__name__} is not a language model. In transformers it "
            "runs by model.generate(..., custom_generate=Speculative(CHECKPOINT)); for servers take format=vllm."
        )
    target = drafter.target
    if target.model._is_stateful:
        raise ValueError(
            f"transformers has no assisted generation for stateful models such as {target.config.model_type}: take "
            "format=vllm, or model.generate(..., custom_generate=Speculative(CHECKPOINT))."
        )
    layout, more = language_model.language_model(drafter)
    return Form(layout, {"transformers": LINE}, whole_vocabulary=drafter.draft_to_target is not None, more=more)
