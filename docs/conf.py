"""Settings of the site, which `make site` builds from the pages of the repository with Sphinx, MyST and Furo."""

from pathlib import Path

project = "specdec"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
root_doc = "README"
myst_heading_anchors = 4  # as a repository host names them: links with an anchor hold there and here
highlight_language = "none"  # most blocks are commands and tables
smartquotes = False
include_patterns = [
    "*.md",
    "benchmarks/README.md",
    "checkpoints/README.md",
    "checkpoints/shipped/*/README.md",
    "data/README.md",
    "docs/**.md",
    "results/*.md",
]
exclude_patterns = [".*", "build", "engines", "targets", "tests", "wandb", "outputs"]  # folders without pages

# Tables of contents, which a repository host would show as code: captions with pages, appended to two pages.
CONTENTS = {
    root_doc: {
        "Begin": "docs/tutorial docs/defaults docs/glossary docs/tracking docs/api",
        "Drafters and targets": "docs/heads docs/targets docs/without-training docs/experiments/*",
        "Decoding": "docs/decoding docs/auto docs/choosing docs/suites docs/tools/grammar",
        "Servers and machines": "docs/serving docs/engines docs/adapting docs/tools/judge docs/scaling docs/gpu",
        "Results": "RESULTS results/README checkpoints/README checkpoints/shipped/*/README benchmarks/README",
        "Code": "docs/README docs/architecture docs/new-head docs/methods docs/file-formats data/README",
        "Changes": "CONTRIBUTING CHANGELOG",
    },
    "results/README": {"Measurements": "results/[0-9]*"},
}
FIRST_PAGE = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'  # of the site's address


def append_contents(app, page: str, source: list[str]) -> None:
    """Appends a page's table of contents to its Markdown."""
    for caption, names in CONTENTS.get(page, {}).items():
        entries = "\n".join(f"/{name}" for name in names.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{entries}\n```\n"


def write_index(app, error: Exception | None) -> None:
    """Writes index.html, which opens for the site's address."""
    (Path(app.outdir) / "index.html").write_text(FIRST_PAGE, encoding="utf-8")


def setup(app) -> None:
    app.connect("source-read", append_contents)
    app.connect("build-finished", write_index)
