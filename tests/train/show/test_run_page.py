"""Tests of the page of a run: it says what report.json says, holds all that it needs, and opens without an error."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts import report as script
from specdec import checkpoint
from specdec.measuring import page
from specdec.measuring.report import Report
from tests.support import write_rows
from train.settings import record
from train.show import run_page

HOSTILE = 'Count </script><img src=x onerror=alert(1)> & "on".'


class Reader(HTMLParser):
    """The text of each element with a class or an id, and every address."""

    def __init__(self, text: str):
        super().__init__()
        self.tiles, self.addresses, self.data, self.inside, self.texts = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.inside.append((tag, found))
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        if tag in ("meta", "link", "br", "img"):
            self.inside.pop()

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, found = self.inside[-1] if self.inside else ("", {})
        if found.get("id") == "data":
            self.data += data
        elif tag not in ("script", "style"):
            self.texts.append(data)
            if tag == "b":
                self.tiles.append(data)


@pytest.fixture
def made(fit, folder, tmp_path):
    """A finished run's best step."""
    write_rows(
        tmp_path / "prompts.jsonl",
        [{"prompt": HOSTILE, "tags": ["hostile"]}, {"prompt": "Count on.", "category": "plain"}],
    )
    assert (
        fit("paged", "head=eagle3", "train.steps=4", "train.validate_every=2", f"data.heldout={tmp_path}/prompts.jsonl")
        == 0
    )
    return checkpoint.resolve(Path("checkpoints/paged"))


def test_a_run_leaves_a_page_that_says_what_its_report_says(made, monkeypatch, capsys):
    path = made / "report.html"
    text = path.read_text()
    found, report = Reader(text), json.loads((made / "report.json").read_text())
    data = json.loads(found.data)
    assert data["report"] == page.finite(report)
    assert data["log"] == page.finite(
        [json.loads(line) for line in Path("checkpoints/paged/log.jsonl").read_text().splitlines()]
    )
    assert data["about"]["data"]["supervised tokens"] > 0 and "head=eagle3" not in data["name"]
    shown = [report["replayed_tau"], report["tau"], report["speedup"], report["tokens_per_second"]]
    assert {f"{shown[0]:.2f}", f"{shown[1]:.2f}", f"{shown[2]:.2f}", f"{shown[3]:.2f}"} <= set(found.tiles)
    assert run_page.worth(Report.from_json(report))[1] in "".join(found.texts)
    assert {"hostile", "plain"} <= set(found.texts)  # a tag and a category
    assert len(text) < 1_000_000 and set(found.addresses) == {"data:,"} and "<img" not in text.split("<script>")[0]
    (made / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["report.py", "run=checkpoints/paged"])
    script.main()
    assert str(path) in capsys.readouterr().out
    assert path.read_text() == text


def report_of(**figures) -> Report:
    document = {"temperature": 0.0, "num_prompts": 8, "num_rounds": 9, "replayed_tau": 1.9, "shape": "chain of 2", "tau": 2.0,
                "tau_ci": None, "survival": None, "acceptance": None, "tokens_per_second": None, "tokens_per_second_ci": None,
                "baseline_tokens_per_second": None, "ms_per_round": None, "speedup": None, "speedup_ci": None}  # fmt: skip
    return Report.from_json({**document, **figures})


@pytest.mark.parametrize(
    ("figures", "answer", "said"),
    [
        ({"speedup": 1.5, "speedup_ci": [1.4, 1.6]}, "yes", "Yes: 1.50 times as fast as plain decoding (1.40 .. 1.60) with the chain of 2, on 8"),
        ({"speedup": 1.1, "speedup_ci": [0.9, 1.3]}, "unsure", "Not sure: 1.10 times"),
        ({"speedup": 0.8, "speedup_ci": [0.7, 0.9]}, "no", "No: 0.80 times"),
        ({"speedup": 0.8, "speedup_ci": [0.7, 0.9], "auto": {"speedup": 1.3, "speedup_ci": [1.2, 1.4], "num_prompts": 4}},
         "yes", "with proposer=auto, on 4 prompts"),
        ({"tau": None}, "unsure", "tau is 1.90, but nothing was decoded"),
    ],
)  # fmt: skip
def test_whether_a_head_is_worth_serving_is_one_sentence(figures, answer, said):
    found = run_page.worth(report_of(**figures))
    assert found[0] == answer and said in found[1]


def test_the_command_of_a_page_says_what_the_run_decided():
    config = {
        "data": {"length": 640},
        "train": {"steps": 70, "epochs": 4.0, "hours": 1.0},
        "solve_packs": 0,
        "head": {"vocab_size": None},
    }
    command = record.spell_out(config, ["head=mtp", "resume=auto", "train.epochs=4", "data.length=640"])
    assert command == ["head=mtp", "data.length=640", "head.vocab_size=null", "solve_packs=0", "train.steps=70"]
