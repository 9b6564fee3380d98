"""Tests of the site that `make site` builds from the pages, strictly."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.commands import ROOT, child_environment

pytest.importorskip("furo", reason="needs the extra docs: make test-full installs it")
pytestmark = pytest.mark.full


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.links |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def build(source: Path, out: Path) -> subprocess.CompletedProcess:
    """Builds a site with the options of `make site`."""
    (options,) = re.findall(r"/python -m (sphinx .*) -c docs \. build/site\n", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", *options.split(), "-c", str(ROOT / "docs"), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=child_environment())


def find_target(path: Path, link: str) -> tuple[Path, str] | None:
    """The file and the anchor of a link of a page; None for a link to another site."""
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return None
    return Path(os.path.normpath(path.parent / unquote(url.path))) if url.path else path, unquote(url.fragment)


def check_links(pages: dict[Path, Page]) -> int:
    """Asserts that the target of every link exists, with its anchor. Returns the number of links with an anchor."""
    links = {find_target(path, link) for path, page in pages.items() for link in page.links} - {None}
    assert [target for target, _ in links if not target.exists()] == []
    anchors = [(target, anchor) for target, anchor in links if anchor and target in pages]
    assert [link for link in anchors if link[1] not in pages[link[0]].anchors] == []
    return len(anchors)


def test_the_site_is_whole(tmp_path):
    """Every page, link and anchor exists, and the search knows the pages."""
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {path: Page(path) for path in tmp_path.rglob("*.html") if "_static" not in path.parts}
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]
    assert {tmp_path / path.relative_to(ROOT).with_suffix(".html") for path in sources} <= pages.keys()
    assert check_links(pages) > 100
    index = (tmp_path / "searchindex.js").read_text()
    assert all(name in index for name in ('"docs/targets"', '"results/README"', '"suffix"'))


def test_a_broken_link_and_a_broken_anchor_stop_the_build(tmp_path):
    links = "[page](docs/nowhere.md) and [anchor](README.md#nowhere)"
    (tmp_path / "README.md").write_text(f"# First page\n\n{links}\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert built.stderr.count("cross-reference target not found: 'docs/nowhere.md'") == 1
    assert built.stderr.count("'nowhere'") == 1
