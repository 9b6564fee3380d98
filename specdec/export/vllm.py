"""All families for vLLM (0.32; docs/file-formats.md, sections 3 to 10)."""

import json

from specdec.export import engine_targets
from specdec.export.layouts import block_drafter, eagle, language_model, medusa, mtp
from specdec.export.layouts.base import Layout
from specdec.export.serving import Form, form_of, vllm_line, vllm_settings
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.heads.medusa import Medusa, Medusa2
from specdec.heads.mtp import MTP

BLOCK_NOTES = (
    "mask_embedding.pt has the mask's embedding: keep it beside the weights, where vLLM looks for it.",
    "vLLM 0.32 on a CPU normalises the features' keys of all layers with the first layer's weight, so the drafts of a head "
    "with several layers differ slightly there; GPUs were not tried.",
)
WINDOW_NOTE = "vLLM counts the window of a sliding layer from each input of a block, training from the first one (docs/file-formats.md)."

KINDS = {"eagle": "last", "medusa": "last", "mtp": "last", "eagle3": "states", "dflash": "states", "dspark": "states",
         "draft_model": "draft"}  # fmt: skip


def form(drafter: Drafter) -> Form:
    """Raises ValueError for heads that vLLM cannot serve, with the ones that it can."""
    reduced = drafter.draft_to_target is not None
    match drafter:
        case Eagle():
            if drafter.fc.bias is not None and bool(drafter.fc.bias.any()):
                raise ValueError(
                    "vLLM drops the bias of EAGLE-1's fc, and this head has one: take format=sglang or eagle."
                )
            layout = eagle.eagle1(drafter, architecture="EagleLlamaForCausalLM")
            notes = (
                "token_map.pt is the draft vocabulary, for SGLang and for importing the head; vLLM has no place for it.",
            )
            return _form(drafter, layout, "eagle", whole_vocabulary=reduced, notes=notes if reduced else ())
        case PEagle():
            return _form(drafter, eagle.eagle3(drafter), "eagle3", more_settings={"parallel_drafting": True})
        case Eagle3():
            return _form(drafter, eagle.eagle3(drafter), "eagle3")
        case Medusa2():
            raise ValueError(medusa.ADAPTED)
        case Medusa():
            notes = ("vLLM drafts the chain of the heads' best guesses, not their tree.",)
            return _form(drafter, medusa.vllm(drafter), "medusa", notes=notes, whole_vocabulary=reduced)
        case MTP():
            notes = (  # type: ignore[assignment]
                "vLLM builds the module from the target's configuration, which --hf-overrides changes for that.",
                *mtp.notes(drafter),
            )
            return _form(
                drafter, mtp.mimo(drafter), "mtp", notes=notes, whole_vocabulary=reduced, override=mtp.OVERRIDE
            )
        case BlockDrafter() if block_drafter.is_dspark(drafter):
            notes = ("Only vLLM's V2 runner (GPU) drafts with DSpark.",)
            return _form(drafter, block_drafter.dspark(drafter), "dspark", notes=notes)
        case BlockDrafter():
            sliding: tuple[str, ...] = () if drafter.window is None else (WINDOW_NOTE,)
            return _form(drafter, block_drafter.dflash(drafter), "dflash", notes=BLOCK_NOTES + sliding)
        case Draft():
            layout, more = language_model.language_model(drafter)
            return _form(drafter, layout, "draft_model", whole_vocabulary=reduced, more=more)
    raise ValueError(
        f"vLLM cannot run {type(drafter).__name__}. It serves EAGLE-1, EAGLE-3, P-EAGLE and Medusa heads, MTP heads of one module, block "
        "drafters and draft models."
    )


def _form(
    drafter: Drafter,
    layout: Layout,
    method: str,
    *,
    override: dict | None = None,
    more_settings: dict | None = None,
    notes: tuple[str, ...] = (),
    **fields,
) -> Form:
    notes = (*notes, *engine_targets.notes("vLLM", KINDS[method], drafter.target))
    settings = vllm_settings(method) | (more_settings or {})
    line = vllm_line(drafter.target.name, settings)
    if override:
        line += f" --hf-overrides '{json.dumps(override)}'"
    return form_of(drafter, layout, {"vLLM": line}, settings=settings, notes=notes, **fields)
