"""python benchmarks/results_index.py [--check]

Writes the table of results/README.md from the front matter of results/NN-slug.md, newest section first.
--check writes nothing and fails if the table is out of date.
"""

import sys
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[1] / "results"
FIELDS = ("date", "commit", "machine", "claim", "outcome")
MARK = "<!-- below: python benchmarks/results_index.py -->\n"


def read_section(path: Path) -> dict[str, str]:
    """The front matter of one section; all values are strings."""
    _, front, _ = path.read_text().split("---\n", 2)
    section = yaml.load(front, yaml.BaseLoader)
    if tuple(section) != FIELDS:
        raise ValueError(f"{path.name}: the front matter must have {', '.join(FIELDS)}, not {', '.join(section)}.")
    return section


def make_table(folder: Path) -> str:
    """One row for each section; 24a, which has the details of 24, comes below it."""
    paths = sorted(folder.glob("[0-9][0-9]*.md"))
    paths.sort(key=lambda path: -int(path.name[:2]))  # a stable sort
    rows = ["| section | date | claim | outcome | commit |", "|---|---|---|---|---|"]
    for path in paths:
        section = read_section(path)
        cells = [section[field] for field in ("date", "claim", "outcome", "commit")]
        rows.append(f"| [{path.name.split('-')[0]}]({path.name}) | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    page = folder / "README.md"
    new = page.read_text().partition(MARK)[0] + MARK + "\n" + make_table(folder)
    if "--check" not in arguments:
        page.write_text(new)
    elif page.read_text() != new:
        print("results/README.md is out of date: run python benchmarks/results_index.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
