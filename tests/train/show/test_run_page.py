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
from tests.support.commands import write_rows
from train.settings import record
from train.show import run_page

HOSTILE = 'Count </script><img src=x onerror=alert(1)> & "on".'


class Reader(HTMLParser):
    """The text of each element with a class or an id, and every address."""

    def __init__(self, text: str):
        super().__init__()
        self.tiles, self.addresses, self.json_text, self.open_elements, self.texts = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attribute_values = dict(attributes)
        self.open_elements.append((tag, attribute_values))
        self.addresses += [attribute_values[name] for name in ("src", "href") if name in attribute_values]
        if tag in ("meta", "link", "br", "img"):
            self.open_elements.pop()

    def handle_endtag(self, tag):
        while self.open_elements and self.open_elements.pop()[0] != tag:
            pass

    def handle_data(self, text):
        tag, attribute_values = self.open_elements[-1] if self.open_elements else ("", {})
        if attribute_values.get("id") == "data":
            self.json_text += text
        elif tag not in ("script", "style"):
            self.texts.append(text)
            if tag == "b":
                self.tiles.append(text)


@pytest.fixture
def blank_charts() -> None:
    """Charts are drawn."""


@pytest.fixture
def best_step(fit, folder, tmp_path):
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


def test_a_run_leaves_a_page_that_says_what_its_report_says(best_step, monkeypatch, capsys):
    path = best_step / "report.html"
    text = path.read_text()
    page_reader, report = Reader(text), json.loads((best_step / "report.json").read_text())
    data = json.loads(page_reader.json_text)
    assert data["report"] == page.replace_non_finite(report)
    assert data["log"] == page.replace_non_finite(
        [json.loads(line) for line in Path("checkpoints/paged/log.jsonl").read_text().splitlines()]
    )
    assert data["about"]["data"]["supervised tokens"] > 0 and "head=eagle3" not in data["name"]
    shown = [report["replayed_tau"], report["tau"], report["speedup"], report["tokens_per_second"]]
    assert {f"{shown[0]:.2f}", f"{shown[1]:.2f}", f"{shown[2]:.2f}", f"{shown[3]:.2f}"} <= set(page_reader.tiles)
    assert run_page.rate_speedup(Report.from_json(report))[1] in "".join(page_reader.texts)
    assert {"hostile", "plain"} <= set(page_reader.texts)  # a tag and a category
    assert len(report["samples"]) == 2 and HOSTILE in report["samples"][0]["prompt"]
    texts = "".join(page_reader.texts)
    for sample in report["samples"]:
        assert "".join(piece for piece, _ in sample["pieces"]) in texts and sample["prompt"].strip() in texts
    assert "specdec serve checkpoint=checkpoints/paged" in page_reader.texts
    assert (
        len(text) < 1_000_000 and set(page_reader.addresses) == {"data:,"} and "<img" not in text.split("<script>")[0]
    )
    (best_step / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["report.py", "run=checkpoints/paged"])
    script.main()
    assert str(path) in capsys.readouterr().out
    assert path.read_text() == text


UNMEASURED = (
    "tau_ci survival acceptance tokens_per_second tokens_per_second_ci baseline_tokens_per_second ms_per_round speedup "
    "speedup_ci"
)
AUTO = {"speedup": 1.3, "speedup_ci": [1.2, 1.4], "num_prompts": 9}


def make_report(**figures) -> Report:
    document = {"temperature": 0.0, "num_prompts": 8, "num_rounds": 9, "replayed_tau": 1.9, "shape": "chain of 2"}
    return Report.from_json({**document, "tau": 2.0, **dict.fromkeys(UNMEASURED.split()), **figures})


@pytest.mark.parametrize(
    ("speedup", "interval", "figures", "answer", "sentence"),
    [
        (
            1.5,
            [1.4, 1.6],
            {},
            "yes",
            "Yes: 1.50 times as fast as plain decoding (1.40 .. 1.60) with the chain of 2, on 8",
        ),
        (1.05, [1.049, 1.06], {}, "unsure", "Not sure: 1.05 times"),
        (1.1, [0.9, 1.3], {}, "unsure", "Not sure: 1.10 times"),
        (0.8, [0.7, 0.9], {}, "no", "No: 0.80 times"),
        (1.5, [1.4, 1.6], {"num_prompts": 2}, "unsure", "on 2 prompts. At least 8 prompts would tell (validation.num"),
        (0.8, [0.7, 0.9], {"auto": AUTO}, "yes", "with proposer=auto, on 9 prompts"),
        (None, None, {"tau": None}, "unsure", "tau is 1.90, but nothing was decoded"),
    ],
)
def test_whether_a_head_is_worth_serving_is_one_sentence(speedup, interval, figures, answer, sentence):
    verdict = run_page.rate_speedup(make_report(speedup=speedup, speedup_ci=interval, **figures))
    assert verdict[0] == answer and sentence in verdict[1]


def test_accepted_drafts_of_answers_are_coloured():
    pieces = [["<b>", 0], [" one", 1], [" two", 2], [" six", 6], ["", 0]]
    body = run_page.colour_answers([{"prompt": "x" * 400, "pieces": pieces}])
    assert body.startswith(page.KEY) and f"<p>... {'x' * 300}</p>" in body.replace(' class="soft"', "")
    coloured = '<span class="d1"> one</span><span class="d2"> two</span><span class="d4"> six</span>'
    assert f'<div class="answer">&lt;b&gt;{coloured}</div>' in body
    assert run_page.colour_answers([]) == ""


def test_the_command_of_a_page_says_what_the_run_decided():
    config = {
        "data": {"length": 640},
        "train": {"steps": 70, "epochs": 4.0, "hours": 1.0},
        "solve_packs": 0,
        "head": {"vocab_size": None},
    }
    arguments = ["head=mtp", "hydra.searchpath=[file:///folder]", "resume=auto", "train.epochs=4", "data.length=640"]
    command = record.spell_out_options(config, arguments)
    assert command == ["head=mtp", "data.length=640", "head.vocab_size=null", "solve_packs=0", "train.steps=70"]
