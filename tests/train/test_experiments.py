"""Tests that every published experiment composes and that a clone of the repository has its rows and prompts."""

import functools
import re

import pytest

from specdec.options import config_files
from specdec.text import reading
from tests.support.commands import ROOT
from tests.train.composing import compose_options

pytestmark = pytest.mark.full

EXPERIMENTS = list(config_files.list_files("experiment"))
SOURCES = re.compile(r"(openai/grade-school-math|teknium1/GPTeacher|yizhongw/self-instruct) [a-z]+")


@functools.cache
def load_once(source: str, split: str | None) -> list[dict]:
    """The rows of a source, which is read once for all experiments."""
    return reading.load_conversations(source, split=split)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_and_finds_its_data(experiment, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = compose_options(f"experiment={experiment}")
    assert config.train.steps % config.train.validate_every == 0  # the last step is validated
    drafter, depth = config.head.drafter, config.head.objective["depth"]
    for name in ("num_heads", "num_modules", "num_drafts"):
        assert drafter.get(name) in (None, depth), name
    assert config.decode.nodes == config.decode.depth  # a chain
    conversations = load_once(config.data.train, config.data.split)
    greedy = [row.get("temperature") == 0 for row in conversations]
    assert len(reading.choose_held_out(greedy, config.data.hold_out)) == config.data.hold_out
    assert all(row["messages"][-1]["role"] == "assistant" for row in conversations)
    prompts = reading.load_prompts(config.data.heldout)
    assert len(reading.spread_rows(prompts, config.validation.num_prompts)) == config.validation.num_prompts


def test_shipped_answers_name_a_source_and_a_permissive_licence():
    conversations = reading.load_conversations(str(ROOT / "data" / "answers.jsonl.gz"))
    prompts = list(reading.read_rows(str(ROOT / "data" / "prompts_dev.jsonl"), "train"))
    assert len(conversations) == 5109 and len(prompts) == 73
    for row in [*conversations, *(row for _, row in prompts)]:
        assert row["license"] in ("MIT", "Apache-2.0")
        assert SOURCES.match(row["source"])
        assert not row["source"].startswith("yizhongw/self-instruct t0")
    questions = {row["messages"][0]["content"] for row in conversations}
    assert not questions & {row["prompt"] for _, row in prompts}
