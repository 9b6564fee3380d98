"""EAGLE-1 and EAGLE-3 for SafeAILab's code (docs/file-formats.md, sections 4 and 5)."""

from specdec.export import engine_targets
from specdec.export.layouts import eagle
from specdec.export.serving import Form
from specdec.heads.base import Drafter
from specdec.heads.eagle import Eagle, Eagle3

SHARDED = "SafeAILab's loader needs the base model in shards with an index: model.save_pretrained(DIR, max_shard_size='200MB')."
ROPES = ("default", "linear", "dynamic")


def form(drafter: Drafter) -> Form:
    """Raises ValueError for heads that its code does not run."""
    if isinstance(drafter, Eagle | Eagle3) and dict(drafter.config.rope_parameters or {})["rope_type"] not in ROPES:
        raise ValueError(f"SafeAILab's code has only the rotary embeddings {', '.join(ROPES)}: take format=vllm.")
    line = f"EaModel.from_pretrained(base_model_path='{drafter.target.name}', ea_model_path='<out>', use_eagle3=%s)"
    known: tuple[str, ...] = (SHARDED,)
    if isinstance(drafter, Eagle | Eagle3):
        kind = "last" if isinstance(drafter, Eagle) else "states"
        known += engine_targets.notes("SafeAILab's code", kind, drafter.target)
    match drafter:
        case Eagle():
            bias = drafter.fc.bias is not None and bool(drafter.fc.bias.any())
            layout = eagle.eagle1(drafter, architecture="LlamaForCausalLM", bias=bias)
            reduced = drafter.draft_to_target is not None
            return Form(layout, {"SafeAILab/EAGLE": line % False}, whole_vocabulary=reduced, notes=known)
        case Eagle3():
            eagle.check_plain(drafter, "SafeAILab's code", lacks=tuple(eagle.norms(drafter)))
            if drafter.target_layers != eagle.default_layers(drafter.target):
                raise ValueError(
                    f"SafeAILab's code reads hidden states {list(eagle.default_layers(drafter.target))}, and this head "
                    f"{list(drafter.target_layers)}. Train with target_layers=null, which has these for targets of 7 or more layers, "
                    "or take format=vllm."
                )
            return Form(eagle.eagle3(drafter), {"SafeAILab/EAGLE": line % True}, notes=known)
    raise ValueError(
        f"format=eagle is for EAGLE-1 and EAGLE-3 heads, not for {type(drafter).__name__}: try format=vllm."
    )
