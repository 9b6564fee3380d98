"""EAGLE-1, EAGLE-3, MTP in MiMo's layout and draft models for SGLang (0.5). Written from its source; SGLang was not run."""

from specdec.export import engine_targets
from specdec.export.layouts import eagle, language_model, mtp
from specdec.export.layouts.base import Layout
from specdec.export.serving import Form, form_of
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.mtp import MTP

NOT_RUN = "SGLang was not run: this folder was written from its source and checked against the manifest."


def form(drafter: Drafter) -> Form:
    """Raises ValueError for heads that SGLang cannot serve, with the ones that it can."""
    reduced = drafter.draft_to_target is not None
    match drafter:
        case Eagle():
            layout = eagle.eagle1(drafter, architecture="LlamaForCausalLMEagle")
            option = f" --speculative-token-map <out>/{eagle.TOKEN_MAP}" if reduced else ""
            return _form(drafter, layout, "EAGLE", option)
        case Eagle3():
            eagle.check_plain(drafter, "SGLang", lacks=("norm_before_residual",))
            return _form(drafter, eagle.eagle3(drafter), "EAGLE3")
        case MTP():
            return _form(drafter, mtp.mimo(drafter), "EAGLE", notes=mtp.notes(drafter), whole_vocabulary=reduced)
        case BlockDrafter():
            raise ValueError(
                "SGLang reads the mask's embedding from the target's own rows and has no place for the trained one: take "
                "format=vllm or gguf, or train an EAGLE-3 head."
            )
        case Draft():
            layout, more = language_model.language_model(drafter)
            return _form(drafter, layout, "STANDALONE", whole_vocabulary=reduced, more=more)
    raise ValueError(
        f"SGLang cannot run {type(drafter).__name__}. It serves EAGLE-1 and EAGLE-3 heads, MTP heads of one module and draft "
        "models."
    )


def _form(
    drafter: Drafter, layout: Layout, algorithm: str, option: str = "", notes: tuple[str, ...] = (), **fields
) -> Form:
    line = f"python -m sglang.launch_server --model {drafter.target.name} --speculative-algorithm {algorithm} "
    line += "--speculative-draft-model-path <out> --speculative-num-steps <num> --speculative-eagle-topk 1 "
    line += f"--speculative-num-draft-tokens <num+1>{option}"
    kind = {"EAGLE": "last", "EAGLE3": "states", "STANDALONE": "draft"}[algorithm]
    notes = (*notes, *engine_targets.notes("SGLang", kind, drafter.target), NOT_RUN)
    return form_of(drafter, layout, {"SGLang": line}, notes=notes, **fields)
