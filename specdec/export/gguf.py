"""EAGLE-3, DFlash, DSpark and draft models for llama.cpp's converter (docs/file-formats.md, sections 3, 5 and 10)."""

from specdec.export import engine_targets
from specdec.export.layouts import block_drafter, eagle, language_model
from specdec.export.layouts.base import Layout
from specdec.export.serving import Form, form_of, whole_vocabulary
from specdec.heads.base import Drafter
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle3


def form(drafter: Drafter) -> Form:
    """Raises ValueError for heads that llama.cpp cannot serve, with the ones that it can."""
    reduced = drafter.draft_to_target is not None
    match drafter:
        case Eagle3():
            eagle.check_plain(drafter, "llama.cpp", lacks=("fc_norm", "norm_output"))
            if len(drafter.target_layers) != 3:
                raise ValueError("llama.cpp's converter takes EAGLE-3 heads of exactly three hidden states.")
            return _form(drafter, eagle.eagle3(drafter), "draft-eagle3")
        case BlockDrafter() if block_drafter.is_dspark(drafter):
            return _form(drafter, block_drafter.dspark(drafter), "draft-dspark")
        case BlockDrafter():  # llama.cpp's DFlash has no draft vocabulary
            eagle.check_whole(drafter, "llama.cpp")
            whole = whole_vocabulary(drafter)
            assert isinstance(whole, BlockDrafter)
            return _form(drafter, block_drafter.dflash(whole), "draft-dflash", whole_vocabulary=reduced)
        case Draft():
            layout, more = language_model.language_model(drafter)
            return _form(drafter, layout, "draft-simple", borrows_tokenizer=False, whole_vocabulary=reduced, more=more)
    raise ValueError(
        f"llama.cpp cannot run {type(drafter).__name__} with a {drafter.target.config.model_type} target. It serves EAGLE-3, "
        "DFlash and DSpark heads and draft models."
    )


def _form(drafter: Drafter, layout: Layout, kind: str, *, borrows_tokenizer: bool = True, **fields) -> Form:
    target = drafter.target.name
    line = "python convert_hf_to_gguf.py <out> --outtype bf16 --outfile <out>.gguf"
    line += f" --target-model-dir {target}\n" if borrows_tokenizer else "\n"
    line += f"python convert_hf_to_gguf.py {target} --outtype bf16 --outfile target.gguf\n"
    line += (
        f"llama-server -m target.gguf -md <out>.gguf --spec-type {kind} --spec-draft-n-max <num> --spec-draft-p-min 0"
    )
    settings = {"kind": kind.removeprefix("draft-"), "num": "<num>"}
    notes = engine_targets.notes("llama.cpp", "states" if borrows_tokenizer else "draft", drafter.target)
    return form_of(drafter, layout, {"llama.cpp": line}, settings=settings, notes=notes, **fields)
