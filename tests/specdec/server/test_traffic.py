"""Tests of the recorder alone: files, limits, damage, redaction, and rows that train."""

import json
import logging
import os
import shutil
import stat
import threading

import pytest

from specdec.core import row_files
from specdec.server import traffic
from specdec.server.traffic import Answered, Asked, Origin, Recorder, Recording
from tests.small_server import STOP
from tests.support import small_tokenizer, word_tokenizer
from train.answers import datastore
from train.data import encoding, reading
from train.data import rows as data

ORIGIN = Origin("server", "tiny", "0123456789abcdef", "run/step_000100")
SAMPLING = {"temperature": 0.5, "top_k": None, "top_p": 0.9, "repetition_penalty": 1.0}


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def encode_chat(messages, thinking):
    return data.encode_prompt(small_tokenizer(), messages, thinking=thinking)


def make_recorder(folder, **settings) -> Recorder:
    return Recorder(Recording(folder, **settings), origin=ORIGIN, tokenizer=small_tokenizer(), encode_chat=encode_chat)


def chat(text: str, said: str = "the sky", *, name: str | None = None, **more) -> tuple[Asked, Answered]:
    """A question and its answer, whose ids are the letters one by one, as no tokenizer would cut them."""
    prompt = encode_chat(question(text), None)
    letters = [token for letter in said for token in small_tokenizer()(letter)["input_ids"]]
    asked = Asked(question(text), None, SAMPLING, seed=3, **more)
    tokens = [*prompt, *letters, STOP]
    return asked, Answered(
        said, "stop", tokens, len(prompt), end=STOP, rounds=2, drafted=6, accepted=[2, 0], name=name or text
    )


def rows_of(folder) -> list[dict]:
    return list(traffic.read(folder))


def record(folder, *pairs, **settings) -> list[dict]:
    recorder = make_recorder(folder, **settings)
    for pair in pairs:
        recorder.record(*pair)
    recorder.close()
    return rows_of(folder)


def test_a_row_holds_the_request_and_what_became_of_the_drafts(tmp_path):
    (row,) = record(tmp_path / "a" / "b", chat("hi", metadata={"tags": "x, y", "conversation": "c1"}), tags=("y", "z"))
    asked, answered = chat("hi")
    assert row.pop("time") > 1.7e9
    assert row == {
        "id": "hi", "conversation": "c1", "category": "x", "tags": ["x", "y", "z"],
        "messages": [*question("hi"), {"role": "assistant", "content": "the sky"}], "texts": None,
        "tokens": answered.tokens, "prompt_tokens": answered.num_prompt, "ids": "given",
        "tokenizer": data.vocabulary(small_tokenizer(), len(small_tokenizer()))[0],
        "target": "tiny", "target_fingerprint": "0123456789abcdef", **asked.sampling, "seed": 3, "grammar": None, "other_law": False,
        "finish": "stop", "thinking": None, "rounds": 2, "drafted": 6, "accepted": [2, 0], "head": "run/step_000100",
        "source": "server",
    }  # fmt: skip
    folder = tmp_path / "a" / "b"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "traffic-000001.jsonl").stat().st_mode) == 0o600


def test_rows_train_as_they_are(tmp_path):
    prompt = small_tokenizer()("Count to")["input_ids"]
    bare = Asked(None, "Count to", SAMPLING), Answered("the", "length", [*prompt, 7, 8], len(prompt))
    rows = record(tmp_path / "t", chat("hi"), bare)
    assert rows[1]["messages"] is None and rows[1]["texts"] == ["Count to", "the"]
    packs = encoding.load_packs(
        str(tmp_path / "t"), encoding.Encoding(small_tokenizer(), tmp_path / "cache"), length=64, packed=False
    )
    found = {tuple(each.tokens): each.mask for number in range(2) for each in packs[number]}
    conversations = reading.load_conversations(str(tmp_path / "t"))
    for row, conversation in zip(rows, conversations):
        mask = [False] * row["prompt_tokens"] + [True] * (len(row["tokens"]) - row["prompt_tokens"])
        assert found[tuple(row["tokens"])] == mask
        encoded = data.encode(small_tokenizer(), conversation)
        assert (encoded.tokens, encoded.mask, encoded.category) == (row["tokens"], mask, "traffic")
    texts = list(datastore.read_texts(str(tmp_path / "t"), small_tokenizer()))
    assert len(texts) == len(rows) and all(row["tokens"][-len(text) :] == text for row, text in zip(rows, texts))
    with pytest.raises(ValueError, match="no prompt"):
        reading.load_prompts(str(tmp_path / "t"))
    with pytest.raises(ValueError, match="no messages, and its token ids are of another tokenizer"):
        data.encode(word_tokenizer(20), conversations[1])


def test_turns_of_a_conversation_share_its_id_and_its_fate(tmp_path):
    first, other = question("a"), question("b")
    later = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}]
    system = [{"role": "system", "content": "s"}]
    ids = [Asked(messages, None, {}).conversation([]) for messages in (first, later, other, [*system, *first], system)]
    assert ids[0] == ids[1] and len(set(ids)) == 4
    given = [Asked(messages, None, {}, {"conversation": "c1"}).conversation([]) for messages in (first, other)]
    assert given == ["c1", "c1"]
    turns = [(chat(f"question {n}"), chat(f"question {n}", "the end")) for n in range(200)]
    rows = record(tmp_path, *(turn for pair in turns for turn in pair), rate=0.3)
    names = [row["conversation"] for row in rows]
    assert all(names.count(name) == 2 for name in names) and 30 < len(set(names)) < 90
    assert record(tmp_path / "none", chat("a"), rate=0.0) == []


def test_tags_of_any_form_are_read():
    tags = [Asked(None, "a", {}, {"tags": given}).tags for given in ("a,,b ", ["a", "b"], 7, None, {"a": 1})]
    assert tags == [["a", "b"], ["a", "b"], [], [], []]
    assert Asked(None, "a", {}, metadata="x").tags == []


def test_files_rotate_and_the_oldest_go(tmp_path):
    recorder = make_recorder(tmp_path, max_bytes=24_000, max_file_bytes=5_000)
    highest = 0
    for number in range(60):
        recorder.record(*chat(f"question {number}"))
        recorder.flush()
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        highest = max(highest, sum(sizes))
        assert max(sizes) <= 5_000 and sum(sizes) <= 24_000
    recorder.close()
    assert highest > 18_000
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "traffic-000001.jsonl" not in names and len(names) >= 4
    kept = [int(row["id"].split()[1]) for row in rows_of(tmp_path)]
    assert kept == list(range(kept[0], 60)) and kept[0] > 0


def test_a_row_longer_than_a_file_is_left_out(tmp_path, caplog):
    rows = record(tmp_path, chat("a" * 9000), chat("b"), max_bytes=12_000)
    assert [row["id"] for row in rows] == ["b"] and "longer than a file may be" in caplog.text


@pytest.mark.parametrize("damage", [b'{"id": "half', b"not JSON\n", b"[1]\n", b"\0\0\0\0", b"\xff\xfe\n"])
def test_a_damaged_last_line_is_cut_off_and_said(tmp_path, damage, caplog):
    record(tmp_path, chat("a"), chat("b"))
    path = tmp_path / "traffic-000001.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + damage)
    rows = record(tmp_path, chat("c"))
    assert [row["id"] for row in rows] == ["a", "b", "c"] and path.read_bytes().startswith(before)
    assert f"ended with a damaged line, which was cut off ({len(damage)} bytes)" in caplog.text


def test_a_file_that_is_whole_is_left_alone(tmp_path, caplog):
    record(tmp_path, chat("a"))
    assert row_files.cut_damaged_end(tmp_path / "traffic-000001.jsonl") == 0
    assert [row["id"] for row in record(tmp_path, chat("b"))] == ["a", "b"] and not caplog.text
    (tmp_path / "empty.jsonl").touch()
    assert row_files.cut_damaged_end(tmp_path / "empty.jsonl") == 0


def test_the_reader_skips_damaged_lines_and_counts_them(tmp_path):
    record(tmp_path, chat("a"))
    path = tmp_path / "traffic-000001.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes() + b"\xff\n")
    (tmp_path / "traffic-notes.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match="2 damaged lines were skipped"):
        assert [row["id"] for row in traffic.read(tmp_path)] == ["a"]
    with pytest.raises(ValueError, match="no recorded conversations"):
        list(traffic.read(tmp_path / "nothing"))


def test_two_writers_do_not_mix(tmp_path):
    record(tmp_path, chat("old"))
    first, second = make_recorder(tmp_path), make_recorder(tmp_path)
    assert first.files.path.name == "traffic-000001.jsonl" and second.files.path.name == "traffic-000002.jsonl"

    def write(recorder, name):
        for number in range(50):
            recorder.record(*chat(f"{name} {number}"))

    threads = [threading.Thread(target=write, args=pair) for pair in ((first, "first"), (second, "second"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    second.close()
    expected = ["old", *(f"{name} {number}" for name in ("first", "second") for number in range(50))]
    assert [row["id"] for row in rows_of(tmp_path)] == expected


def test_the_file_of_another_writer_is_never_deleted_or_healed(tmp_path):
    other = make_recorder(tmp_path, max_bytes=8000)
    other.record(*chat("other"))
    other.flush()
    with (tmp_path / "traffic-000001.jsonl").open("ab") as file:
        file.write(b'{"id": "not yet')  # it is being written
    size = (tmp_path / "traffic-000001.jsonl").stat().st_size
    record_without_reading(tmp_path, *(chat(f"{number}") for number in range(20)), max_bytes=8000)
    assert (tmp_path / "traffic-000001.jsonl").stat().st_size == size
    other.close()


def record_without_reading(folder, *pairs, **settings) -> None:
    recorder = make_recorder(folder, **settings)
    for pair in pairs:
        recorder.record(*pair)
    recorder.close()


def test_a_full_disk_stops_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    recorder = make_recorder(tmp_path)
    recorder.record(*chat("a"))
    recorder.flush()
    monkeypatch.setattr(
        "specdec.core.files.append", lambda *_, **__: (_ for _ in ()).throw(ValueError("no space left"))
    )
    for _ in range(3):
        recorder.record(*chat("b"))
        recorder.flush()
    assert not recorder.alive and caplog.text.count("Recording has stopped (no space left)") == 1
    monkeypatch.undo()
    recorder.record(*chat("c"))
    recorder.close()
    assert [row["id"] for row in rows_of(tmp_path)] == ["a"]


def test_a_folder_that_vanishes_stops_recording(tmp_path, caplog):
    recorder = make_recorder(tmp_path / "t")
    shutil.rmtree(tmp_path / "t")
    recorder.record(*chat("a"))
    recorder.flush()
    assert not recorder.alive and "Recording has stopped" in caplog.text and not (tmp_path / "t").exists()
    recorder.close()


def test_a_file_that_is_deleted_is_followed_by_another(tmp_path):
    recorder = make_recorder(tmp_path)
    recorder.files.path.unlink()
    recorder.record(*chat("a"))
    recorder.close()
    assert [row["id"] for row in rows_of(tmp_path)] == ["a"]


def hide(row: dict) -> dict | None:
    """A hook: Bob becomes NAME, and rows about the king are dropped."""
    text = json.dumps([row["messages"], row["texts"]])
    if "king" in text:
        return None
    row["messages"], row["texts"] = json.loads(text.replace("Bob", "NAME"))
    return row


def test_a_redacted_row_has_the_ids_of_its_new_text(tmp_path):
    tokenizer = small_tokenizer()
    prompt = tokenizer("I am Bob")["input_ids"]
    bare = Asked(None, "I am Bob", SAMPLING), Answered("Bob", "length", [*prompt, 5], len(prompt), name="bare")
    plain, changed, cut = record(
        tmp_path, chat("hi"), chat("I am Bob", "hello Bob", name="x"), bare, chat("king"), redact=hide
    )
    assert plain["ids"] == "given" and plain["tokens"] == chat("hi")[1].tokens
    assert changed["ids"] == "retokenised" and changed["messages"][0]["content"] == "I am NAME"
    assert changed["tokens"] == data.encode(tokenizer, {**changed, "tokens": None}).tokens[: len(changed["tokens"])]
    assert changed["tokens"][-1] == STOP
    assert changed["tokens"][: changed["prompt_tokens"]] == encode_chat(changed["messages"][:1], None)
    assert cut["texts"] == ["I am NAME", "NAME"] and tokenizer.decode(cut["tokens"]) == "I am NAMENAME"
    for row in (changed, cut):
        assert "Bob" not in tokenizer.decode(row["tokens"])
    assert "Bob" not in (tmp_path / "traffic-000001.jsonl").read_text()


def failing(row: dict) -> dict:
    raise RuntimeError(f"secret {row['messages']}")


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (failing, "record_redact= raised RuntimeError: repair it"),
        (lambda row: "text", "must return the row"),
        (lambda row: {"id": 1}, "must return the row"),
        (lambda row: {**row, "messages": [{"role": "user"}]}, "ends with the answer"),
        (lambda row: {**row, "messages": row["messages"][:1]}, "ends with the answer"),
        (lambda row: {**row, "more": {1, 2}.__iter__}, None),
    ],
)
def test_a_hook_that_fails_drops_the_row_and_is_said_once(tmp_path, hook, said, caplog):
    recorder = make_recorder(tmp_path, redact=hook)
    for _ in range(3):
        recorder.record(*chat("my secret"))
    recorder.close()
    assert recorder.num_written == (0 if said else 3) and not recorder.stopped
    assert caplog.text.count("A row was not recorded") == (1 if said else 0) and (said or "") in caplog.text
    assert "secret" not in caplog.text


def test_a_row_of_ids_alone_cannot_be_redacted(tmp_path, caplog):
    recorder = Recorder(Recording(tmp_path, redact=hide), origin=ORIGIN)
    recorder.record(Asked(None, None, SAMPLING), Answered(None, "stop", [1, 2], 1))
    recorder.record(*chat("I am Bob"))  # without a tokenizer its ids cannot be made again
    recorder.close()
    assert recorder.num_written == 0 and "only its token ids are known" in caplog.text


def test_half_a_character_drops_the_row_and_no_more(tmp_path):
    rows = record(tmp_path, (Asked(question("\ud800"), None, SAMPLING), chat("a")[1]), chat("b"))
    assert [row["id"] for row in rows] == ["b"]


def test_rows_that_come_too_fast_are_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(traffic, "MOST_WAITING", 2)
    going = threading.Event()
    recorder = make_recorder(tmp_path, redact=lambda row: going.wait(20) and row)
    for number in range(5):
        recorder.record(*chat(f"{number}"))
    going.set()
    recorder.close()
    assert len(rows_of(tmp_path)) == 2 and "faster than they are written" in caplog.text


def test_long_rows_that_wait_are_bounded_in_bytes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(traffic, "MOST_BYTES", 3 << 20)
    going = threading.Event()
    recorder = make_recorder(tmp_path, redact=lambda row: going.wait(20) and row)
    long = Asked(question("a"), None, SAMPLING, metadata={"more": ["x" * (1 << 20)]})
    for number in range(5):
        recorder.record(long, chat("a", name=str(number))[1])
    going.set()
    recorder.flush()
    huge = Asked(question("a" * (4 << 20)), None, SAMPLING)
    recorder.record(huge, chat("a", name="huge")[1])  # nothing else waits
    recorder.close()
    assert [row["id"] for row in rows_of(tmp_path)] == ["0", "1", "huge"]
    assert "those beyond 1,000 rows or 3 MiB are dropped" in caplog.text


def test_ids_that_do_not_follow_from_the_text_are_not_made_again(tmp_path, caplog):
    asked = Asked(question("a"), None, SAMPLING, own_prompt=True)
    assert record(tmp_path / "as_it_is", (asked, chat("a")[1]))
    assert record(tmp_path / "redacted", (asked, chat("a")[1]), redact=hide_all) == []
    assert "do not follow from its text" in caplog.text


def hide_all(row: dict) -> dict:
    return {**row, "messages": [*question("-"), row["messages"][-1]]}


def test_a_locked_out_file_system_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=r"no locks: .*choose another folder"):
        make_recorder(tmp_path)


def test_settings_that_cannot_be_are_refused(tmp_path):
    for settings, what in (({"rate": 1.5}, "record_rate=1.5"), ({"max_bytes": 0}, "record_max_bytes=0")):
        with pytest.raises(ValueError, match=what):
            Recording(tmp_path, **settings)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another folder"):
        make_recorder(tmp_path / "file")


def test_a_hook_is_found_by_name():
    assert traffic.find_hook(None) is None
    assert traffic.find_hook("tests.specdec.server.test_traffic:hide") is not None
    for name in ("json", "json:nothing", "no_such_module:hide", "", ":x"):
        with pytest.raises(ValueError, match="give module:function"):
            traffic.find_hook(name)
    with pytest.raises(ValueError, match="is no function"):
        traffic.find_hook("os:name")
    assert os.name


def test_clients_opt_out():
    assert traffic.allowed({}, None) and traffic.allowed({"x-record": "true"}, True)
    assert not traffic.allowed({}, False) and not traffic.allowed({"x-record": " False"}, None)


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)
