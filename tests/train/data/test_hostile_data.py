"""Data, chat templates and run folders that a stranger made: refused with a sentence, and no code runs."""

import copy
import gzip
import json
import os

import pytest

from specdec.core import row_files
from specdec.core.lock import hold_lock
from specdec.text import conversations, reading
from tests.support.targets import small_tokenizer
from train.loop.state import RunFolder

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_line_that_would_fill_the_memory(tmp_path, compressed):
    """16 KB of zeros for every 16 MB of text: the longest line is never read to its end."""
    path = tmp_path / ("rows.jsonl.gz" if compressed else "rows.jsonl")
    with gzip.open(path, "wb", compresslevel=1) if compressed else path.open("wb") as file:
        file.write(json.dumps({"messages": MESSAGES}).encode() + b"\n")
        for _ in range(5):
            file.write(b" " * 2**24)
    rows = row_files.read_lines(path)
    assert json.loads(next(rows)[1]) == {"messages": MESSAGES}
    with pytest.raises(ValueError, match=r"rows\.jsonl(\.gz)?:2: a line of more than"):
        next(rows)


def test_a_data_set_with_a_script(tmp_path):
    """datasets 4 runs no scripts; a folder is never handed to it by its name."""
    marker = tmp_path / "code-has-run"
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for source in (folder, folder / "evil.py"):
        with pytest.raises(ValueError):
            reading.load_conversations(str(source))
    assert not marker.exists()


TEMPLATES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch code-has-run') }}",
    "attribute by name": "{{ (''|attr('__class__')).__mro__ }}",
    "changes": "{{ messages.append(messages[0]) }}",
    "file": "{% include '/etc/passwd' %}",
    "macro that calls itself": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "not a template": "{% for %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("marked", [False, True])
def test_templates_run_in_the_sandbox(tmp_path, monkeypatch, kind, marked):
    monkeypatch.chdir(tmp_path)
    tokenizer = copy.deepcopy(small_tokenizer())  # tests share it
    markers = "{% generation %}x{% endgeneration %}" if marked else ""
    tokenizer.chat_template = TEMPLATES[kind] + markers
    with pytest.raises(ValueError, match="chat template"):
        conversations.encode(tokenizer, {"id": "1", "category": "all", "messages": MESSAGES})
    with pytest.raises(ValueError, match="chat template"):
        conversations.encode_prompt(tokenizer, MESSAGES[:1])
    assert not any(tmp_path.iterdir())


def test_a_run_whose_log_is_a_link_is_not_resumed(tmp_path):
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.write_text("mine\n")
    run.mkdir()
    (run / "log.jsonl").symlink_to(precious)
    with pytest.raises(ValueError, match="Links out of a folder"):
        RunFolder(run, {}, {}).check_start(resume=True)
    assert precious.read_text() == "mine\n"
    (run / "log.jsonl").unlink()
    os.symlink("state/step_000001", run / "newest")  # links inside are harmless
    (tmp_path / "link").symlink_to(run)
    RunFolder(tmp_path / "link", {}, {}).check_start(resume=True)


def test_a_lock_that_is_a_link_does_not_empty_a_file(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(OSError), hold_lock(tmp_path / "lock", resource=tmp_path):
        pass
    assert precious.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["../elsewhere", "/etc"])
def test_the_best_step_is_one_of_the_run(tmp_path, name):
    (tmp_path / "best").write_text(name)
    with pytest.raises(ValueError, match="not inside it"):
        RunFolder(tmp_path, {}, {}).read_best()
