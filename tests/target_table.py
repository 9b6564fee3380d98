"""The tables of docs/targets.md, one row for each entry of tests/support/families.py.

`python -m tests.target_table` writes them. tests/specdec/target/test_families.py compares every row with the page.
"""

import functools
import re

import pytest
from hydra.utils import instantiate

from specdec.export.engines import make_form
from specdec.heads.blocks import measure_embedding_scale
from specdec.target import attention
from specdec.target.model import Target
from specdec.target.structure import find_experts
from tests.support.commands import ROOT
from tests.support.drafters import load_head
from tests.support.families import FAMILIES, Family, make

PAGE = ROOT / "docs" / "targets.md"
HEADS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "eagle": "EAGLE-1", "mtp": "MTP", "medusa": "Medusa"}
FORMATS = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp", "eagle": "SafeAILab's code"}
WORKS = ["model type", "has", "chains, batches", "training, replay", "trees", "packing", "compiled", *FORMATS.values()]
REFUSED = ["model type", "why"]
NOT_TRIED = "Not known to load"


@functools.cache
def make_family_target(family: Family) -> Target:
    """Raises ValueError where the family is refused."""
    model = make(family)
    return Target(make(family, attention.choose_implementation(type(model))), name=str(family))


def list_features(target: Target) -> str:
    """What the tiny target has that a Llama has not."""
    fields = target.config.to_dict()
    properties = {
        "windows": target.windowed,
        "recurrent layers": target.recurrent,
        "experts": find_experts(fields),
        "latents": fields.get("kv_lora_rank"),
        "sinks": any(name.endswith(("sinks", "attention_sink_bias")) for name, _ in target.model.named_parameters()),
        "capped attention": fields.get("attn_logit_softcapping"),
        "scaled or capped logits": not target.shape_logits.plain,
        "scaled embedding": measure_embedding_scale(target) != 1,
        "biased LM head": target.lm_head.bias is not None,
    }
    return ", ".join(name for name, value in properties.items() if value)


@functools.cache
def list_exports(family: Family) -> dict[str, str]:
    """For each engine of FORMATS, the heads exported for it, with a star those that the engine may not load."""
    target = make_family_target(family)
    cells = {name: [] for name in FORMATS.values()}
    for head, label in HEADS.items():
        mask = {"mask_token": 0} if head == "dflash" else {}  # an own mask needs more of a target than a family tells
        drafter = instantiate({**load_head(head)["drafter"], **mask}, target, vocab=None)
        for format_name, engine in FORMATS.items():
            try:
                form = make_form(drafter, format_name)
            except ValueError:
                continue
            cells[engine].append(label + "*" * any(NOT_TRIED in note for note in form.notes))
    return {engine: ", ".join(labels) or "none" for engine, labels in cells.items()}


def show_name(family: Family) -> str:
    return f"`{family.model_type}`" + (f" ({family.variant})" if family.variant else "")


def table_row(family: Family) -> str:
    """What works, or the sentence that refuses the family."""
    if family.refused:
        with pytest.raises(ValueError, match=family.refused) as error:
            make_family_target(family)
        return line([show_name(family), str(error.value).replace("\n", " ")])
    linear, compiled = ("yes" if works else "no" for works in (not family.recurrent, family.compiles))
    works = [list_features(make_family_target(family)), "yes", "yes", linear, linear, compiled]
    return line([show_name(family), *works, *list_exports(family).values()])


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(header: list[str], families: list[Family]) -> str:
    return "\n".join([line(header), "|---" * len(header) + "|", *map(table_row, families)])


def section(name: str, content: str, page: str) -> str:
    """The page with this content between the comments that name the section."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda match: f"{match[1]}{content}\n{match[2]}", page, flags=re.S
    )


def main() -> None:
    page = PAGE.read_text()
    page = section("works", table(WORKS, [family for family in FAMILIES if not family.refused]), page)
    PAGE.write_text(section("refused", table(REFUSED, [family for family in FAMILIES if family.refused]), page))


if __name__ == "__main__":
    main()
