"""Tests of RESULTS.md and results/: front matter, the generated index, references to sections."""

import re
import runpy
import shutil
from datetime import date

import pytest

from specdec.measuring import board
from tests.support.commands import ROOT

INDEX = runpy.run_path(str(ROOT / "benchmarks" / "results_index.py"))
SECTIONS = sorted((ROOT / "results").glob("[0-9][0-9]*.md"))
NUMBERS = {path.name.split("-")[0] for path in SECTIONS}


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.name)
def test_front_matter(path):
    section = INDEX["read_section"](path)
    assert date.fromisoformat(section["date"]) >= date(2026, 11, 21)
    assert re.fullmatch(r"[0-9a-f]{7}", section["commit"])
    assert 3 <= len(section["claim"].split()) <= 25 and section["machine"]
    outcome, _, successor = section["outcome"].partition(" by ")
    assert section["outcome"] in ("positive", "negative") or (outcome == "superseded" and successor in NUMBERS)
    assert successor != path.name[:2]


def test_sections_are_numbered_without_gaps():
    plain = [int(path.name[:2]) for path in SECTIONS if path.name[2] == "-"]  # 24a belongs to 24
    assert plain == list(range(1, len(plain) + 1)) and len(plain) >= 44


def test_the_index_is_up_to_date_and_an_old_one_is_found(tmp_path, capsys):
    assert INDEX["main"](["--check"]) == 0
    for path in [*SECTIONS[-2:], ROOT / "results" / "README.md"]:
        shutil.copy(path, tmp_path)
    assert INDEX["main"](["--check"], tmp_path) == 1  # its table lists all sections
    assert "out of date" in capsys.readouterr().out
    assert INDEX["main"]([], tmp_path) == 0 and INDEX["main"](["--check"], tmp_path) == 0


def test_the_leaderboard_is_short():
    assert len((ROOT / "RESULTS.md").read_text().splitlines()) <= 120


def test_references_name_the_file_of_a_section():
    """RESULTS.md has no sections: texts name results/NN-slug.md, and that file exists."""
    folders = [ROOT / name for name in ("specdec", "train", "scripts", "conf", "docs", "checkpoints", "data", "tests")]
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*"))]
    for path in paths:
        if path.suffix in (".py", ".md", ".yaml"):
            text = path.read_text()
            assert not re.search(r"RESULTS(\.md)?\W{0,4}(\(\S+\))?,? sections? \d", text), path
            for name in re.findall(r"results/(\d\d[\w.-]*)", text):
                assert (ROOT / "results" / name.rstrip(".")).exists(), f"{path}: results/{name}"


def test_the_board_is_made_of_its_records(tmp_path):
    """`specdec report board=results/board` changes nothing in board.md."""
    folder = tmp_path / "board"
    shutil.copytree(ROOT / "results" / "board", folder)
    board.write_board(folder)
    assert (folder / board.MARKDOWN).read_text() == (ROOT / "results" / "board" / board.MARKDOWN).read_text()
