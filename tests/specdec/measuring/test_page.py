"""Tests of pages: their order, tables that scroll, commands, links to one another, and nothing from elsewhere."""

import re
from pathlib import Path

from specdec.core.answer_text import TextDecoder
from specdec.core.generation import Generation
from specdec.measuring.measure import PromptResult
from specdec.measuring.page import Section, Table, list_links, render_live_page, write_page
from specdec.measuring.report import write_samples
from specdec.text.conversations import Prompt

TABLE = Table(["method", "tau", "note"], [["a|b", "1.20", "long " * 20]])
COMMAND = "vllm serve target --config '{\"a\": 1}'"
SECTIONS = [
    Section("Figures", table=TABLE, points=["a <point>"]),
    Section("Nothing", texts=["of this was measured"]),
    Section("Engines", commands=[("Start it:", COMMAND)]),
]


def write(path: Path, title: str = "a title", **pages: Path) -> str:
    """The text of a page in `path`."""
    verdicts = [("yes", "Yes: <fast>."), ("unsure", "Not sure: slow.")]
    write_page(path, title, figures={"text": "</script>"}, verdicts=verdicts, sections=SECTIONS, pages=pages)
    return path.read_text()


def test_a_page_begins_with_its_verdicts_and_needs_nothing_from_elsewhere(tmp_path):
    text = write(tmp_path / "page.html")
    elements = [
        "<h1>a title</h1>",
        'class="verdict yes">Yes: &lt;fast&gt;.',
        'class="verdict unsure">',
        "<h2>Figures</h2>",
    ]
    places = [text.index(element) for element in [*elements, "<h2>Engines</h2>"]]
    assert places == sorted(places) and "Nothing" not in text
    assert not re.search(r"(src|href)=.(http|//)|@import|url\((?!#)", text)
    assert text.count("</script>") == text.count("<script")


def test_tables_scroll_by_keys_and_have_units(tmp_path):
    text = write(tmp_path / "page.html")
    assert '<div class="wide" role="region" tabindex="0" aria-label="Figures"><table>' in text
    assert "<th>tau<small>tokens a round</small></th>" in text and "<th>method</th>" in text
    assert text.count('<td class="text">') == 1 and "<li>a &lt;point&gt;</li>" in text


def test_commands_are_blocks_of_their_own(tmp_path):
    quoted = COMMAND.replace('"', "&#34;").replace("'", "&#39;")
    assert f'<p>Start it:</p><div class="command"><pre>{quoted}</pre></div>' in write(tmp_path / "page.html")
    assert SECTIONS[2].to_markdown() == f"## Engines\n\nStart it:\n\n```\n{COMMAND}\n```"


def test_pages_link_one_another_and_keep_their_links(tmp_path):
    run, results = tmp_path / "run" / "step" / "report.html", tmp_path / "out" / "results.html"
    for path in (run, results):
        path.parent.mkdir(parents=True)
    alone = write(run, "a run")
    assert list_links(alone) == {}
    missing = tmp_path / "missing.html"
    text = write(results, "two <ways>", **{"run of a": run, "prediction": missing})
    assert list_links(text) == {"../run/step/report.html": "run of a"}
    linked = run.read_text()
    assert list_links(linked) == {"../../out/results.html": "two <ways>"} and "two &lt;ways&gt;" in linked
    assert write(results, "two <ways>", **{"run of a": run}) == text and run.read_text() == linked
    assert write(run, "a run") == linked  # written again


def test_the_page_of_a_server_has_examples_of_its_kind():
    chat = render_live_page(target="t<", drafts="a head", max_length=99)
    assert "t&lt;, drafted by a head" in chat and chat.count('<button type="button">') == 4
    assert '<button type="button">Why is the sky blue?</button>' in chat and 'max="99"' in chat
    text = render_live_page(target="t", drafts="a head", max_length=99, chat=False)
    assert '<button type="button">The sky is blue because</button>' in text and "Text to continue" in text


def test_samples_say_which_tokens_were_drafted():
    """Tokens are letters; the target's own end each round, but for an answer that a draft ends."""
    decoder = TextDecoder(lambda tokens: "".join(map(chr, tokens)))
    answers = {"abcdef": [2, 0, 0], "ghi": [2], "j": [], "kl": [0]}
    results = []
    for text, accepted in answers.items():
        drafted = Generation([[*map(ord, text)]], [accepted])
        results.append(PromptResult(Prompt(text, "", [*map(ord, "xy")]), drafted, drafted, 0.0, [], None))
    first, second, third = write_samples(results, decoder)
    assert first == {"prompt": "xy", "pieces": [("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 0), ("f", 0), ("", 0)]}
    assert second["pieces"] == [("g", 0), ("h", 1), ("i", 2), ("", 0)] and third["pieces"] == [("j", 0), ("", 0)]
