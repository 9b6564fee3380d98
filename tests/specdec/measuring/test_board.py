"""Tests of the board: every cell has its figures or the reason why not, and what may not be compared is marked."""

import json
import re

import pytest

from specdec.measuring import board
from tests.support.records import ABSENCE, LOAD, write_document

PLAIN_LOAD = LOAD | {"tau": [1.0, 1.0, 1.0], "by_position": [], "speedup": None, "plain_user_tok_s": None}


@pytest.fixture
def folder(tmp_path):
    """Three engines: one with two drafters and its plain rate beside, one plain, one for which a head has no form."""
    write_document(tmp_path / "a b.json", protocol__drafts=4, loads=[LOAD, LOAD | {"at_once": 8}])
    suffix = {"drafter": {"name": "suffix", "method": "suffix"}, "protocol__drafts": 4}
    write_document(tmp_path / "suffix" / "record-vllm.json", **suffix, machine__device="a GPU", machine__busy=0.5)
    plain = [PLAIN_LOAD | {"speedup": [1.0, 0.9, 1.1]}]  # the server was asked for no drafts, too
    changes = {"drafter": None, "protocol__drafts": None, "loads": plain, "engine__name": "specdec"}
    write_document(tmp_path / "plain.json", **changes)
    write_document(tmp_path / "no.json", ABSENCE)
    return tmp_path


def read_rows(folder) -> dict[str, dict[str, str]]:
    """The cells of the first table of board.md, by drafter and engine."""
    assert board.write_board(folder) == []
    lines = [line for line in (folder / board.MARKDOWN).read_text().splitlines() if line.startswith("| ")]
    heads, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    table = {}
    for row in rows[: [row[1] for row in rows].index("engine")]:
        table[row[0]] = dict(zip(heads[1:], row[1:], strict=True))
    return table


def test_a_cell_has_figures_or_the_reason_why_not(folder):
    table = read_rows(folder)
    assert list(table) == ["plain", "ours/eagle3", "suffix"]
    for lines in (
        "**1.75** tau (1.60 .. 1.90)<br>**1.50** x plain (1.40 .. 1.60)<br>**30.0** tokens/s (29.0 .. 31.0)",
        "<br>K 4, [record](a%20b.json)<br>served = replayed, same template, repeat 8/8, not checked: control",
    ):
        assert lines in table["ours/eagle3"]["vLLM 0.32.0"]
    assert table["ours/eagle3"]["OpenVINO"] == "It has no form for this head."
    assert table["suffix"]["OpenVINO"] == table["suffix"]["specdec 0.32.0"] == "not run"


def test_plain_decoding_is_a_row_from_its_record_or_from_beside_drafts(folder):
    row = read_rows(folder)["plain"]
    assert row["specdec 0.32.0"].startswith("**30.0** tokens/s (29.0 .. 31.0)<br>[record](plain.json)<br>")
    assert row["vLLM 0.32.0"] == "**20.0** tokens/s (19.5 .. 20.5)<br>beside ours/eagle3: [record](a%20b.json)"
    assert row["OpenVINO"] == "not run"
    write_document(folder / "a b.json", machine__busy=0.4)
    assert read_rows(folder)["plain"]["vLLM 0.32.0"].endswith("[record](a%20b.json)<br>machine 40% busy")


def test_what_may_not_be_compared_is_marked_in_its_cells_and_said_below(folder):
    cell = read_rows(folder)["suffix"]["vLLM 0.32.0"]
    assert "[record](suffix/record-vllm.json) [1]<br>" in cell and "machine 50% busy" in cell
    text = (folder / board.MARKDOWN).read_text()
    assert "- [1] machine device a GPU against a CPU: no speeds may be compared, as the machines are others." in text
    assert "[2]" not in text
    assert "At 1 request at once." in text and ": all loads" in text  # so that loads need no note
    write_document(folder / "loads.json", loads=[LOAD | {"at_once": 8}])
    board.write_board(folder)
    text = (folder / board.MARKDOWN).read_text()
    assert "At the first load of each record." in text and "load 8," in text
    assert "loads 8 against 1: neither tau nor speeds may be compared" in text


def test_records_of_one_cell_stand_below_one_another(folder):
    write_document(folder / "other.json", protocol__drafts=2)
    cell = read_rows(folder)["ours/eagle3"]["vLLM 0.32.0"]
    assert cell.count("tau (") == 2 and "K 4, [record](a%20b.json)" in cell and "K 2, [record](other.json) [1]" in cell


def test_every_suite_and_target_has_a_table_and_absences_only_those_of_their_drafters(folder):
    for name, changes in {"suite": {"protocol__suite": "Spec-Bench"}, "target": {"target__name": "org/Other"}}.items():
        head = {"drafter": {"name": "its head", "method": "mtp"}}
        write_document(folder / f"{name}.json", **changes, **head)
    board.write_board(folder)
    sections = (folder / board.MARKDOWN).read_text().split("\n## ")
    tables = [section for section in sections if section.splitlines()[0] in ("GSM8K, org/Base", "GSM8K, org/Other")]
    assert [("its head" in table, "no form" in table) for table in tables] == [(False, True), (True, False)]
    assert any(section.startswith("Spec-Bench, org/Base\n") for section in sections)


@pytest.mark.parametrize(
    ("changes", "drafter", "engine"),
    [
        ({"engine": "llamacpp", "suite": "GSM8K"}, "ours/eagle3", "llamacpp"),
        ({"drafter": "plain", "engine": "openvino"}, "plain", "openvino 1"),
        ({"engine": "openvino 1"}, "ours/eagle3", "openvino 1"),
        ({"drafter": "eagle3", "engine": "llama"}, "eagle3", "llama"),
        ({"drafter": "two\nlines", "engine": "a|b"}, "two lines", "a/b"),
    ],
)
def test_absences_find_their_cells_by_the_names_of_records(tmp_path, changes, drafter, engine):
    for name, version in {"llamacpp": None, "openvino": "1"}.items():
        suffix = {"name": "suffix", "method": "suffix"}
        plain = {"drafter": suffix, "loads": [LOAD | {"plain_user_tok_s": None}], "engine__version": version}
        write_document(tmp_path / f"{name}.json", **plain, engine__name=name)
    write_document(tmp_path / "head.json")
    write_document(tmp_path / "no.json", ABSENCE | changes)
    assert read_rows(tmp_path)[drafter][engine] == "It has no form for this head."


def test_groups_of_answers_have_tables(folder):
    write_document(folder / "a b.json", by__prompt_tokens={"1024-": {"prompts": 3, "tau": [1.2, None, None]}})
    write_document(folder / "named.json", by__category={"2wiki": {"prompts": 3, "tau": [1.2, None, None]}})
    board.write_board(folder)
    text = (folder / board.MARKDOWN).read_text()
    assert (
        "tau by category\n\n| drafter | engine | load | code | math | 2wiki |" in text
        and "1.50 (1.30 .. 1.70), n 7" in text
    )
    assert "| drafter | engine | load | 0-255 | 1024- |" in text and "1.20, n 3" in text
    assert "tokens of the answer" not in text  # nothing is known of them
    groups = {
        name: {"prompts": 9, "tau": [tau, None, None], "rounds": 3} for name, tau in (("0-255", 2), ("256-511", 1))
    }
    write_document(folder / "rounds.json", by__context=groups)
    board.write_board(folder)
    table = (folder / board.MARKDOWN).read_text().partition("tau by tokens before a round\n\n")[2]
    assert table.startswith("| drafter | engine | load | 0-255 | 256-511 |") and "2.00, n 9 | 1.00, n 9" in table
    assert "Groups overlap" not in table
    older = {name: {"prompts": 9, "tau": [2, None, None]} for name in ("1024-2047", "256-1023", "256-511", "1024-4095")}
    write_document(folder / "older.json", by__prompt_tokens=older)
    board.write_board(folder)
    table = (folder / board.MARKDOWN).read_text().partition("tau by tokens of the prompt\n\n")[2]
    assert table.startswith("| drafter | engine | load | 0-255 | 256-511 | 256-1023 | 1024-2047 | 1024-4095 | 1024- |")
    assert "Groups overlap, as older records have wider ones" in table


def test_the_page_needs_no_network_keeps_the_records_and_names_what_it_leaves_out(folder):
    (folder / "cut.json").write_text("{")
    write_document(folder / "<b>.json", engine__name="<i>", notes=["Two servers were up."])
    with pytest.raises(ValueError, match=r"cut\.json is a file: give the folder"):
        board.write_board(folder / "cut.json")
    (sentence,) = board.write_board(folder)
    assert sentence.startswith(f"Left out: {folder}/cut.json is no record")
    text = (folder / board.PAGE).read_text()
    assert "<li>cut.json is no record" in text and "<li>&lt;b&gt;.json: Two servers were up.</li>" in text
    assert str(folder) not in text
    assert not re.search(r"(src|href)=.(http|//)|@import|url\((?!#)", text) and "<i>" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["plain.json"] == json.loads((folder / "plain.json").read_text()) | data["plain.json"]
    assert "plain, specdec" not in text  # a bar of the chart
    assert '<a href="a%20b.json">record</a>' in text and '<a href="%3Cb%3E.json">' in text
