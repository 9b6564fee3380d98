"""Tests that every published experiment composes and that a clone of the repository has its rows and prompts."""

import gzip
import re

import hydra
import pytest
from omegaconf import OmegaConf

from specdec.core import row_files
from specdec.options import config_files
from specdec.text import reading
from tests.support import ROOT
from train.settings.hydra_text import make_search_path
from train.settings.options import read_run

pytestmark = pytest.mark.full

EXPERIMENTS = list(config_files.list_files("experiment"))
SOURCES = re.compile(r"(openai/grade-school-math|teknium1/GPTeacher|yizhongw/self-instruct) [a-z]+")


@pytest.fixture(scope="module")
def load():
    """`reading.load_conversations` with a cache, so that each file is read once for all experiments."""
    rows = {}

    def load(source, *, split):
        if source not in rows:
            rows[source] = reading.load_conversations(source, split=split)
        return rows[source]

    return load


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_and_finds_its_data(experiment, load, monkeypatch):
    monkeypatch.chdir(ROOT)
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = hydra.compose("train", [f"experiment={experiment}", "run=some", make_search_path()])
    config = read_run(OmegaConf.to_container(settings, resolve=True))
    assert config.train.steps % config.train.validate_every == 0  # the last step is validated
    drafter, depth = config.head.drafter, config.head.objective["depth"]
    for name in ("num_heads", "num_modules", "num_drafts"):
        assert drafter.get(name) in (None, depth), name
    assert config.decode.nodes == config.decode.depth  # a chain
    conversations = load(config.data.train, split=config.data.split)
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


ROW = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'


def test_compressed_and_plain_files_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text(ROW * 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((ROW + "\n" + ROW).encode()))
    (tmp_path / "notes.txt").write_text("not data")
    plain = reading.load_conversations(str(tmp_path / "a.jsonl"))
    assert reading.load_conversations(str(tmp_path / "b.jsonl.gz")) == plain
    assert len(reading.load_conversations(str(tmp_path))) == 4
    assert [place for place, _ in row_files.read_lines(tmp_path / "b.jsonl.gz")] == [
        f"{tmp_path / 'b.jsonl.gz'}:1",
        f"{tmp_path / 'b.jsonl.gz'}:3",
    ]


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_damaged_compressed_file_is_refused(tmp_path, damage):
    path = tmp_path / "rows.jsonl.gz"
    packed = bytearray(gzip.compress(ROW.encode() * 100))
    if damage == "truncated":
        packed = packed[:-20]
    else:
        packed[-6] ^= 255  # in the checksum
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"incomplete or damaged after line \d+ .* Copy or make the file again\."):
        reading.load_conversations(str(path))
