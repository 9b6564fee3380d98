"""The tables of docs/targets.md, with each entry of tests/support/families.py. Equal entries share a row.

`python -m tests.target_table` writes them. tests/specdec/target/test_families.py compares every row with the page.
"""

import functools
import re
from typing import Any

import pytest
import yaml

from specdec.heads.blocks import measure_embedding_scale
from specdec.target import attention
from specdec.target.model import Target
from specdec.target.structure import find_experts
from specdec.tools.inspect.sections import CELLS, UNKNOWN
from specdec.tools.inspect.support import FORMATS, HEADS, TESTED, examine_shapes, list_heads
from tests.support.commands import ROOT
from tests.support.families import FAMILIES, Family, configuration, make

PAGE = ROOT / "docs" / "targets.md"
WORKS = ["model type", "has", "trees", "compiled", *FORMATS.values()]
REFUSED = ["model type", "why"]


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
    cells: dict[str, list[str]] = {engine: [] for engine in FORMATS.values()}
    for head in list_heads(make_family_target(family)):
        for engine, answer in head.engines.items():
            if answer in CELLS:
                cells[engine].append(HEADS[head.head] + "*" * (answer == UNKNOWN))
    return {engine: ", ".join(labels) or "none" for engine, labels in cells.items()}


def show_name(family: Family) -> str:
    return f"`{family.model_type}`" + (f" ({family.variant})" if family.variant else "")


@functools.cache
def refuse(family: Family) -> str:
    """The sentence that refuses a family."""
    with pytest.raises(ValueError, match=family.refused) as error:
        make_family_target(family)
    return str(error.value).replace("\n", " ")


def list_cells(family: Family) -> list[str]:
    """What works, or the sentence that refuses the family."""
    if family.refused:
        return [refuse(family)]
    linear, compiled = ("yes" if works else "no" for works in (not family.recurrent, family.compiled))
    works = [list_features(make_family_target(family)), linear, compiled]
    return [*works, *list_exports(family).values()]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(header: list[str], families: list[Family]) -> str:
    names: dict[tuple[str, ...], list[str]] = {}
    for family in families:
        names.setdefault(tuple(list_cells(family)), []).append(show_name(family))
    rows = [line([", ".join(entries), *cells]) for cells, entries in names.items()]
    return "\n".join([line(header), "|---" * len(header) + "|", *rows])


def read_cells(page: str) -> dict[str, list[str]]:
    """The cells behind each name in the tables of a page."""
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| `")]
    return {name: cells for names, *cells in rows for name in names.split(", ")}


def section(name: str, content: str, page: str) -> str:
    """The page with this content between the comments that name the section."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda match: f"{match[1]}{content}\n{match[2]}", page, flags=re.S
    )


def list_tested_families() -> dict[str, Any]:
    """Model types of which an entry works, apart by compiled decoding, and refused ones, for `specdec inspect`."""
    working = [family for family in FAMILIES if not family.refused]
    compiled = dict.fromkeys(family.model_type for family in working if family.compiled)
    eager = dict.fromkeys(family.model_type for family in working if family.model_type not in compiled)
    refused = {family.model_type: refuse(family) for family in FAMILIES if family.refused}
    for family in FAMILIES:
        if family.model_type in {**compiled, **eager} or examine_shapes(configuration(family), str(family)).refused:
            refused.pop(family.model_type, None)
    return {"compiled": list(compiled), "eager": list(eager), "refused": refused}


def write_families() -> str:
    """The YAML of the tested families, with a list in lines of 120 characters."""
    return yaml.safe_dump(list_tested_families(), default_flow_style=None, width=120, sort_keys=False)


def main() -> None:
    page = PAGE.read_text()
    page = section("works", table(WORKS, [family for family in FAMILIES if not family.refused]), page)
    TESTED.write_text(write_families())
    PAGE.write_text(section("refused", table(REFUSED, [family for family in FAMILIES if family.refused]), page))


if __name__ == "__main__":
    main()
