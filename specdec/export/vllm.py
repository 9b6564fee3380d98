"""vLLM (0.32): EAGLE-1, EAGLE-3, Medusa, MTP, DFlash, DSpark, draft models (checkpoint-formats, 3 to 10)."""

import json

from specdec.drafter import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.medusa import Medusa, Medusa2
from specdec.heads.mtp import MTP
from specdec.layouts import block_drafter, eagle, language_model, medusa, mtp
from specdec.layouts.base import Layout
from specdec.serving import Form, vllm_line, vllm_settings

BLOCK_NOTES = (
    "mask_embedding.pt has the mask's embedding: keep it beside the weights, vLLM looks for it there.",
    "vLLM 0.32 on a CPU norms the features' keys of all layers with the first layer's weight, so a head of several layers "
    "drafts a little otherwise there; GPUs were not tried.",
)


def form(drafter: Drafter) -> Form:
    """Raises ValueError for what vLLM cannot serve, with the nearest form that it can."""
    reduced = drafter.draft_to_target is not None
    match drafter:
        case Eagle():
            if drafter.fc.bias is not None and bool(drafter.fc.bias.any()):
                raise ValueError(
                    "vLLM drops the bias of EAGLE-1's fc, and this head has one: take format=sglang or eagle."
                )
            layout = eagle.eagle1(drafter, architecture="EagleLlamaForCausalLM")
            notes = (
                "token_map.pt is the draft vocabulary, for SGLang and for scripts/import.py; vLLM has no place for it.",
            )
            return _form(drafter, layout, "eagle", whole_vocabulary=reduced, notes=notes if reduced else ())
        case Eagle3():
            return _form(drafter, eagle.eagle3(drafter), "eagle3")
        case Medusa2():
            raise ValueError(medusa.ADAPTED)
        case Medusa():
            notes = ("vLLM drafts the top-1 chain of Medusa heads, not their tree.",)
            return _form(drafter, medusa.vllm(drafter), "medusa", notes=notes, whole_vocabulary=reduced)
        case MTP():
            notes = (  # type: ignore[assignment]
                "vLLM builds the module by the target's configuration, hence --hf-overrides.",
                mtp.BLANKED,
            )
            return _form(
                drafter, mtp.mimo(drafter), "mtp", notes=notes, whole_vocabulary=reduced, override=mtp.OVERRIDE
            )
        case BlockDrafter() if block_drafter.is_dspark(drafter):
            notes = ("Only vLLM's V2 runner (GPU) drafts with DSpark.",)
            return _form(drafter, block_drafter.dspark(drafter), "dspark", notes=notes)
        case BlockDrafter():
            return _form(drafter, block_drafter.dflash(drafter), "dflash", notes=BLOCK_NOTES)
        case Draft():
            layout, more = language_model.language_model(drafter)
            return _form(drafter, layout, "draft_model", whole_vocabulary=reduced, more=more)
    raise ValueError(
        f"vLLM has nothing that runs {type(drafter).__name__}. Nearest to it, and served: head=eagle3, head=mtp (one module), "
        "head=medusa."
    )


def _form(drafter: Drafter, layout: Layout, method: str, *, override: dict | None = None, **fields) -> Form:
    settings = vllm_settings(method)
    line = vllm_line(drafter.target.name, settings)
    if override:
        line += f" --hf-overrides '{json.dumps(override)}'"
    return Form(
        layout,
        {"vLLM": line},
        settings=settings,
        most_drafts=drafter.depth,
        whole_block=isinstance(drafter, BlockDrafter),
        **fields,
    )
