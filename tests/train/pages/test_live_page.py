"""Tests of the live page in a browser, with a server of a tiny target."""

import urllib.parse

import pytest

from specdec.target.model import Target
from tests.browser import Browser, needed
from tests.specdec.server.test_app import serving
from tests.support import save_target
from train.pages.page import live_page

FOUND = """new Promise((done, fail) => {
  const end = Date.now() + 30000;
  const look = () => {
    const said = document.getElementById("said")?.textContent ?? "";
    if (!/times as fast|The answers ended/.test(said) && Date.now() < end) return setTimeout(look, 20);
    const text = name => document.querySelector(`#${name} .answer`).textContent;
    const root = document.documentElement;
    done({said, drafted: text("drafted"), plain: text("plain"), figure: document.querySelector("#drafted .figure").textContent,
      wide: root.scrollWidth - root.clientWidth,
      back: getComputedStyle(document.body).backgroundColor});
  };
  look();
})"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    page = live_page(target="tiny", drafts="an untrained head of a checkpoint/with/a/long/name", max_length=400)
    with serving(Target.load(str(folder), dtype="float64"), page=page) as (url, _):
        yield url


@needed
def test_a_browser_asks_and_shows_both_answers(url, tmp_path):
    backs = {}
    with Browser(tmp_path / "profile") as browser:
        for scheme in ("light", "dark"):
            query = urllib.parse.urlencode({"prompt": "Say sky 0 times. <b>" + "wide" * 40, "max_tokens": 24})
            browser.open(f"{url}/?{query}", width=390, scheme=scheme)
            found = browser.value(FOUND)
            assert "Both answers are the same" in found["said"] or "first tokens" in found["said"], found
            assert found["drafted"] == found["plain"] != ""
            assert " drafts accepted" in found["figure"]
            assert found["wide"] <= 0  # nothing to scroll to on a phone
            backs[scheme] = found["back"]
        typed = 'document.querySelector("textarea").value = "Say blue 1 times."; document.querySelector("form button").click()'
        browser.value(typed)
        again = browser.value(FOUND)
        assert again["drafted"] == again["plain"] != found["plain"]
        assert browser.errors == []
    assert backs["light"] != backs["dark"]
