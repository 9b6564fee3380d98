"""python -m benchmarks.engines.facts

Writes the table of docs/serving.md from specdec/export/engine_facts.yaml, and says which installed engines have other
versions.
"""

import importlib.metadata
import re
from pathlib import Path

from packaging.utils import canonicalize_name

from benchmarks import common
from specdec.export.engines import ENGINES
from specdec.export.families import FAMILIES

PAGE = common.ROOT / "docs" / "serving.md"
LABELS = {key: label for family in FAMILIES.values() for key, label in family.labels.items()}
ROWS = {key: LABELS[key] for key in ENGINES["vLLM"]["heads"] if key in LABELS}  # in the order of the facts
ABOUT = {
    "run": "run here",
    "date": "looked at",
    "newer": "newer ones",
    "anchor": "`sample_from_anchor`, where it is missing",
}


def list_packages(key: str, environment: str = "") -> dict[str, str]:
    """Names and versions that the facts give under `packages`, `unpacked` or `sources`.

    environment: folder in `engines` of the engines that have an environment of their own; "": the shared one
    """
    engines = [engine for engine in ENGINES.values() if engine.get("environment", "") == environment]
    return {name: str(version) for engine in engines for name, version in engine.get(key, {}).items()}


def list_installed(folder: Path) -> dict[str, str]:
    """Names and versions of what is in an environment of engines, its converter aside."""
    places = [*folder.glob("lib/python3*/site-packages"), *(folder / name for name in list_packages("unpacked"))]
    distributions = importlib.metadata.distributions(path=[str(place) for place in places])
    return {canonicalize_name(distribution.metadata["Name"]): distribution.version for distribution in distributions}


def compare_versions(versions: dict[str, str], environment: str = "") -> list[str]:
    """A sentence for each engine of an environment, among these packages, whose version is not that of the facts."""
    packages = {**list_packages("packages", environment), **list_packages("unpacked", environment)}
    return [
        f"{name} {versions[name]} is installed, and engine_facts.yaml is about {version}: read its source again, run "
        "the checks, and "
        "change the facts."
        for name, version in packages.items()
        if versions.get(name, version) != version
    ]


def format_table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def write_table(page: str) -> str:
    """The page with the table between its marks."""
    sources = [facts["source"] for facts in ENGINES.values()]
    rows = []
    for kind, title in ROWS.items():
        rows.append([title, *(facts["heads"].get(kind, "") for facts in ENGINES.values())])
    for name, title in ABOUT.items():
        rows.append([title, *(str(facts[name]) for facts in ENGINES.values())])
    text = format_table(["family", *sources], rows)
    return re.sub(r"(<!-- engines -->\n).*?(<!-- end -->)", rf"\g<1>{text}\n\g<2>", page, flags=re.S)


def main(arguments: list[str]) -> None:
    PAGE.write_text(write_table(PAGE.read_text()))
    print(f"written: the table of {PAGE.relative_to(common.ROOT)}")
    folder = common.ROOT / "engines"
    environments = {engine.get("environment", "") for engine in ENGINES.values()}
    others = [text for name in environments for text in compare_versions(list_installed(folder / name), name)]
    if others:
        raise ValueError(" ".join(others))


if __name__ == "__main__":
    common.run_main(main)
