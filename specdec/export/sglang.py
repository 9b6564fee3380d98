"""SGLang (0.5): EAGLE-1, EAGLE-3, MTP in MiMo's layout, draft models. Written from its source, not run here."""

from specdec.drafter import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.mtp import MTP
from specdec.layouts import eagle, language_model, mtp
from specdec.layouts.base import Layout
from specdec.serving import Form

UNSEEN = "SGLang was not run: this folder rests on its source and on the manifest."


def form(drafter: Drafter) -> Form:
    """Raises ValueError for what SGLang cannot serve, with the nearest form that it can."""
    reduced = drafter.draft_to_target is not None
    match drafter:
        case Eagle():
            layout = eagle.eagle1(drafter, architecture="LlamaForCausalLMEagle")
            return _form(drafter, layout, "EAGLE", f"--speculative-token-map <out>/{eagle.TOKEN_MAP}" * reduced)
        case Eagle3():
            eagle.check_plain(drafter, "SGLang", lacks=("norm_before_residual",))
            return _form(drafter, eagle.eagle3(drafter), "EAGLE3")
        case MTP():
            return _form(drafter, mtp.mimo(drafter), "EAGLE", notes=(mtp.BLANKED,), whole_vocabulary=reduced)
        case BlockDrafter():
            raise ValueError(
                "SGLang reads the mask's embedding from the target's own rows, where the one that was trained is not: take "
                "format=vllm or gguf, or train head=eagle3."
            )
        case Draft():
            layout, more = language_model.language_model(drafter)
            return _form(drafter, layout, "STANDALONE", whole_vocabulary=reduced, more=more)
    raise ValueError(
        f"SGLang has nothing that runs {type(drafter).__name__}. Nearest to it, and served: head=eagle3, head=eagle, "
        "head=mtp (one module)."
    )


def _form(
    drafter: Drafter, layout: Layout, algorithm: str, option: str = "", notes: tuple[str, ...] = (), **fields
) -> Form:
    line = f"python -m sglang.launch_server --model {drafter.target.name} --speculative-algorithm {algorithm} "
    line += "--speculative-draft-model-path <out> --speculative-num-steps <num> --speculative-eagle-topk 1 "
    line += f"--speculative-num-draft-tokens <num+1> {option}".rstrip()
    return Form(
        layout,
        {"SGLang": line},
        most_drafts=drafter.depth,
        notes=(*notes, UNSEEN),
        **fields,
    )
