"""Tests of record.json of specdec judge: its fields, its checks, and what is kept when a server ends in between."""

import json
import math
import re
from dataclasses import asdict

import pytest

from specdec.core.resumable import Resumable
from specdec.measuring.record import Record
from specdec.measuring.servers.identity import describe_machine
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch, Speculation
from specdec.tools.judge.checks import check_traffic, make_control
from specdec.tools.judge.notes import note_history
from tests.tools.judge.drafting import FACTS, NEW, NUM, Drafting, K, find_truth, list_bodies, own_server


@pytest.mark.parametrize(
    ("kind", "settings", "version", "source"),
    [
        ("vllm", {}, "0.32.0", "per_request"),
        ("vllm", {"per_answer": False}, "0.32.0", "stream"),
        ("sglang", {"metrics": False}, "0.5.23", "per_request"),
        ("llamacpp", {}, "b11434-abc", "timings"),
        ("somebody", {}, None, "stream"),
    ],
)
def test_a_record_says_what_was_measured(judge, kind, settings, version, source):
    with Drafting(kind, **settings) as server, Drafting(kind, drafts=False) as baseline:
        server.entry = {"meta": {"ftype": "Q8_0"}} if kind == "llamacpp" else {}
        named = ["drafter=suffix", "flags=--port 1 --model /home/me/small", "machine=a box"]
        report, printed = judge(server, f"baseline={baseline.url}", "batch=1,4", *named)
        tau, survival = find_truth(server)
    record, (level, _) = report["record"], report["levels"]
    check_first_load(record, level, tau, survival)
    assert (record.engine.name, record.engine.version, record.counting.source) == (kind, version, source)
    assert record.engine.flags == ["--port", "1", "--model", "small"] and record.machine.device == "a box"
    assert record.target.quantisation == {"llamacpp": "Q8_0", "sglang": "fp8"}.get(kind)
    assert record.drafter.name == record.drafter.method == "suffix" and record.target.name == "target"
    assert record.checks.template == (None if kind == "somebody" else "same ids as tokenizer")
    assert record.checks.others_traffic == (None if kind == "sglang" else 0)
    assert "template not checked: the server gives" in printed or kind != "somebody"
    assert "/home" not in json.dumps(record.model_dump(mode="json")) and server.url not in str(record.notes)


def check_first_load(record: Record, level: dict, tau: float, survival: list[float]) -> None:
    """The first of two loads, with the protocol and the groups. level: the same figures in results.json"""
    first, protocol = record.loads[0], record.protocol
    assert [load.at_once for load in record.loads] == [1, 4] and first.prompts == NUM
    assert first.tau == (pytest.approx(tau), *level["tau_ci"]) and first.drafted % K == 0
    assert first.by_position == pytest.approx([share for share in survival if share])
    assert first.speedup[0] == level["speedup_of_a_user"] and first.speedup[1] is not None
    assert (protocol.suite, protocol.file, protocol.endpoint) == ("prompts", "prompts.jsonl", "v1/completions")
    assert protocol.max_tokens == NEW and protocol.drafts == K and len(protocol.ids_sha256) == 64
    check_groups(record, tau)


def check_groups(record: Record, tau: float) -> None:
    """The groups of rounds give tau of all; without rounds, prompts are grouped."""
    if record.by.ungrouped:
        assert record.by.prompt_tokens["0-255"].prompts == NUM and not record.by.context
        assert sum(group.prompts for group in record.by.answer_tokens.values()) == NUM
        assert all(group.tau for group in record.by.answer_tokens.values())
        return
    for groups in (record.by.context, record.by.answer):
        rounds = sum(group.rounds for group in groups.values())
        assert sum(group.rounds * group.tau[0] for group in groups.values()) / rounds == pytest.approx(tau)


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_another_template_of_the_server_is_noticed(judge, kind):
    with Drafting(kind) as server:
        server.template = " please"
        report, printed = judge(server)
    assert report["record"].checks.template == "other ids than tokenizer"
    assert "other template (whether" in printed and report["record"].protocol.template_sha256


def test_messages_of_an_unknown_server_are_recorded_as_such(judge):
    with Drafting("somebody", per_answer=False, metrics=False) as server:
        report, _ = judge(server, "template.enable_thinking=false", name=False)
    record = report["record"]
    assert record.protocol.endpoint == "v1/chat/completions" and record.protocol.ids_sha256 is None
    assert record.protocol.thinking is False and record.counting.source is None and record.loads[0].tau is None
    assert record.drafter.name == "unknown" and "target.name=" in record.checks.unchecked["template"]
    assert not record.by.category and record.loads[0].drafted is None


def test_a_server_without_drafts_has_no_drafter(judge):
    with Drafting("vllm", drafts=False) as server:
        report, _ = judge(server)
    assert report["record"].drafter is None and report["record"].loads[0].user_tok_s


def test_a_head_that_drafts_nothing_is_no_plain_decoding(judge, folder):
    with Drafting("vllm", drafts=False) as server:
        report, printed = judge(server, f"checkpoint={folder / 'head'}", "target.dtype=float64")
    assert report["record"].drafter.name == "head"
    note = "The server does not draft: tau is 1 by its own counters, and these are no figures of head."
    assert note in report["record"].notes and note in printed


@pytest.mark.parametrize(("kind", "penalty"), [("vllm", "repetition_penalty"), ("llamacpp", "repeat_penalty")])
def test_what_is_asked_is_recorded_and_the_model_folder_adds_nothing(judge, kind, penalty):
    with Drafting(kind) as server:
        report, _ = judge(server, "ignore_stop=true")
        (body, *_) = list_bodies(server)
        protocol = report["record"].protocol
        assert body["ignore_eos"] and body[penalty] == 1 and protocol.ignore_stop and protocol.repetition_penalty == 1
        assert report["record"].target.dtype is None and "top_k" not in body
        report, _ = judge(server, "decode.temperature=1", "decode.repetition_penalty=1.5", out="sampled")
        body, protocol = list_bodies(server)[-1], report["record"].protocol
    assert (body["top_p"], body["top_k"], body["min_p"], body[penalty]) == (1, -1, 0, 1.5)
    assert (protocol.top_p, protocol.top_k, protocol.repetition_penalty) == (None, None, 1.5)
    assert protocol.ignore_stop is False


# A second plain server, and answers asked again


def test_answers_that_differ_are_compared_with_those_of_a_second_plain_server(judge, tmp_path):
    """Of six answers another plain server changes one, and drafts change all."""
    with Drafting("vllm") as server, Drafting("vllm", drafts=False) as plain, Drafting("vllm", drafts=False) as control:
        baseline = f"baseline={plain.url}"
        report, printed = judge(server, baseline)
        assert report["record"].checks.control is None
        assert "control not checked: there is no second server without drafts (control=URL)" in printed
        control.first_id = lambda prompt, times: 1 + (prompt == next(iter(control.times_asked)))
        server.first_id = lambda prompt, times: 5
        asked = len(server.requests)
        report, printed = judge(server, baseline, f"control={control.url}")  # the first answers are in the rows
        assert not list_bodies(server, asked) and len(list_bodies(control)) == NUM
        checked = report["record"].checks.control
        assert (checked.plain_plain, checked.drafted_plain) == ((NUM - 1, NUM), (NUM, NUM)) and checked.p_value == 1
        assert f"control {NUM}/{NUM} with drafts, {NUM - 1}/{NUM} plain (sign test, p = 1)" in printed

        report, printed = judge(server, baseline, f"control={control.url}", out="shifted")
        checked = report["record"].checks.control
        assert checked.drafted_plain == (0, NUM) and checked.p_value == 1 / 2 ** (NUM - 1)
        assert "drafts change MORE answers: control" in printed
    page, text = ((tmp_path / "shifted" / f"results.{ending}").read_text() for ending in ("html", "md"))
    assert all("drafts change MORE answers" in content and "template sha256" in content for content in (page, text))


def test_the_chance_of_as_few_equal_answers_is_that_of_a_sign_test():
    control = make_control([True] * 8 + [False] * 2, [False] * 5 + [True] * 3 + [True, False])
    assert (control.plain_plain, control.drafted_plain) == ((8, 10), (4, 10))
    assert control.p_value == pytest.approx(sum(math.comb(6, lost) for lost in (5, 6)) / 2**6)
    assert make_control([True], [True]).p_value == 1


@pytest.mark.parametrize(
    ("num", "equal", "changes_more"),
    [(4, 0, None), (4, 4, None), (5, 0, True), (5, 2, False)],  # of 4: p = 1/16 at least
)
def test_a_control_of_few_answers_says_nothing(num, equal, changes_more):
    control = make_control([True] * num, [True] * equal + [False] * (num - equal))
    assert control.changes_more is changes_more


def make_traffic(generated: int | None, name: str = "drafted") -> dict:
    """A row with a batch without answers."""
    return {name: asdict(ServedBatch([], [], 1.0, 0.1, generated, None))}


def test_the_tokens_of_others_are_known_where_every_counter_goes_on():
    assert check_traffic([make_traffic(500), make_traffic(3, "plain")]) == (503, None)
    for number in (-500, -900):
        value, reason = check_traffic([make_traffic(500), make_traffic(number)])
        assert value is None and "the counter of the server has fewer tokens" in reason
    value, reason = check_traffic([make_traffic(0) | make_traffic(None, "plain")])
    assert value is None and reason == "the server without drafts has no counter of its tokens"


def test_answers_are_asked_again_at_load_1(judge):
    with Drafting("vllm") as server:
        server.first_id = lambda prompt, times: 1 + times * (prompt in list(server.times_asked)[1:2])
        report, printed = judge(server, "batch=2", "repeat=3")
        assert report["record"].checks.repeat == (2, 3) and "repeat 2/3" in printed
        asked = len(server.requests)
        report, _ = judge(server, "batch=2", "repeat=4")
        assert len(list_bodies(server, asked)) == 2 and report["record"].checks.repeat[1] == 4
        report, _ = judge(server, "repeat=2", out="from load 1")
        assert len(list_bodies(server, asked)) == 2 + NUM + 2 and report["record"].checks.repeat[1] == 2
        report, _ = judge(server, "decode.temperature=1", "repeat=2", out="sampled")
    assert report["record"].checks.repeat is None and "draws" in report["record"].checks.unchecked["repeat"]


def test_drafts_from_earlier_answers_are_noticed_when_these_are_asked_again():
    """Rounds of 24 tokens: 12 and 6 the first time, 3 again."""

    def make_rows(rounds: dict[str, int], **check: str) -> list[dict]:
        answers = []
        for prompt, num in rounds.items():
            answers.append(ServedAnswer(prompt, 25, 0, 1, [1] * 25, [1], Speculation(24 - num, 24, num)))
        batch = asdict(ServedBatch(answers, [], 1.0, 0.1, None, None))
        return [{"requests": 1, "wave": 0, "turn": 0, "drafted": batch, **check}]

    first = make_rows({"a": 12, "b": 6, "c": 12, "d": 6})
    again = {"a": 3, "b": 3, "c": 3}
    (note,) = note_history(first + make_rows(again, check="repeat"), seed=0)
    assert "3 answers have tau 8.00, and 2.40 the first time" in note
    assert not [*note_history(first + make_rows({"a": 12, "b": 5, "c": 12}, check="repeat"), 0)]
    assert not [*note_history(first + make_rows({"a": 3, "b": 3}, check="repeat"), 0)]  # too few


def test_drafts_without_a_head_come_before_plain_answers(judge):
    """The server would learn from these."""
    with Drafting("specdec") as server:
        judge(server, "drafter=suffix")
    order = [body.get("speculate", True) for body in list_bodies(server)]
    assert order == [True, False] * NUM


def test_wrong_plain_servers_are_refused(judge):
    with Drafting("vllm") as server, Drafting("vllm", drafts=False) as plain:
        with Drafting("vllm") as second, pytest.raises(ValueError, match=rf"control={second.url} drafts, too"):
            judge(server, f"control={second.url}")
        for url, name in ((server.url, "engine"), (f"{plain.url.replace('127.0.0.1', 'LOCALHOST')}/v1/", "baseline")):
            with pytest.raises(ValueError, match=rf"control={url} is the server of {name}=: give the URL of a second"):
                judge(server, f"baseline={plain.url}", f"control={url}")
        plain.entry = {"id": "large"}
        report, _ = judge(server, f"control={plain.url}")
        assert "control= serves large, and engine= small: make sure that they are the same." in report["record"].notes
        with Drafting("sglang", drafts=False) as foreign:
            for option in ("baseline", "control"):
                with pytest.raises(ValueError, match=rf"{option}=.* is a server of sglang, and engine=.* one of vllm"):
                    judge(server, f"{option}={foreign.url}", out=option)


# What is kept


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((503, "shutting down"), r"None of 6 requests was answered\..*503, shutting down"),
        (None, r"No server has answered for 0\.\d+ minutes"),  # it is gone
    ],
)
def test_a_server_that_ends_in_between_leaves_a_record_of_the_loads_before(judge, tmp_path, reply, sentence):
    server = Drafting("vllm")
    answer, long_ones = server.reply, list[dict]()

    def stop(path: str, body: dict | None):
        if path == "v1/completions" and body and body["max_tokens"] == NEW:
            long_ones.append(body)
        return reply if len(long_ones) > NUM else answer(path, body)

    arguments = ["batch=1,4", "timeout=0.5"]
    with server:
        server.reply = stop
        with pytest.raises(
            ValueError, match=f"{sentence}.*served has the results of batch=1; the same command goes on"
        ):
            judge(server, *arguments)
        document = json.loads((tmp_path / "served" / "record.json").read_text())
        assert [load["at_once"] for load in document["loads"]] == [1] and document["engine"]["version"] == "0.32.0"
        assert any("ended before all loads were measured (batch=1,4)" in note for note in document["notes"])
        server.reply = answer
        asked = len(server.requests)
        report, _ = judge(server, *arguments)
        assert len(list_bodies(server, asked)) == NUM and len(report["record"].loads) == 2
    assert not report["record"].notes


def test_checks_that_fail_end_alone(judge):
    """The control is gone after its first try, and the server after as many answers as a load has."""
    with Drafting("vllm") as server, Drafting("vllm", drafts=False) as plain, Drafting("vllm", drafts=False) as control:
        control.spoil = lambda path, body, times: (503, "gone") if body["max_tokens"] == NEW else None
        report, printed = judge(server, f"baseline={plain.url}", f"control={control.url}", "batch=1,2")
        record = report["record"]
        assert len(record.loads) == 2 and record.checks.control is None
        reason = record.checks.unchecked["control"]
        assert "it ended early" in reason and "503, gone" in reason and control.url not in reason
        assert reason in printed

        start = len(server.requests)
        server.spoil = lambda *_: (503, "full") if len(list_bodies(server, start)) > NUM else None
        report, _ = judge(server, "repeat=2", out="full")
    record = report["record"]
    assert record.checks.repeat is None and "503, full" in record.checks.unchecked["repeat"] and record.loads


def test_loads_of_earlier_calls_stay_in_the_record(judge, tmp_path):
    with Drafting("vllm") as server:
        judge(server, "batch=1,2")
        report, _ = judge(server, "batch=2")
        assert [load.at_once for load in report["record"].loads] == [2, 1]
        rows = (tmp_path / "served" / "rows.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "served" / "rows.jsonl").write_text("".join(rows[1:]))  # load 1 lacks a batch
        report, _ = judge(server, "batch=2")
    assert [load.at_once for load in report["record"].loads] == [2]


def test_another_version_or_command_line_is_noted(judge, monkeypatch):
    with Drafting("vllm") as server:
        report, _ = judge(server, "flags=--seed 1")
        assert not report["record"].notes
        monkeypatch.setitem(FACTS, "vllm", {"version": {"version": "0.33.0"}})
        report, _ = judge(server, "flags=--seed 2")
    version, flags = report["record"].notes
    assert "6 of 6 rows were measured with version 0.32.0 of the engine, and this is version 0.33.0" in version
    assert "were measured with flags= of digest" in flags


def test_an_interruption_is_continued(judge, monkeypatch):
    append = Resumable.append

    def interrupt(self, *rows: dict) -> None:
        append(self, *rows)
        if self.rows[-1].get("check") == "repeat":
            raise KeyboardInterrupt

    with Drafting("vllm") as server:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Resumable, "append", interrupt)
            judge(server, "repeat=3")
        asked = len(server.requests)
        report, _ = judge(server, "repeat=3")
    assert len(list_bodies(server, asked)) == 2 and report["record"].checks.repeat == (3, 3)


def test_another_drafter_at_the_same_url_is_refused_or_noted(judge, folder):
    with Drafting("vllm") as server:
        judge(server, "drafter=suffix")
        with pytest.raises(ValueError, match=r"other settings: drafter .then suffix, now ngram.. Choose another out="):
            judge(server, "drafter=ngram")
        server.entry = {"draft": {"checkpoint": "run/a", "version": "1"}}
        report, _ = judge(server, out="named")
        assert report["record"].drafter.name == "run/a"
        server.entry = {"draft": {"checkpoint": "run/b", "version": "1"}}
        with pytest.raises(ValueError, match=r"other settings: served checkpoint .then run/a, now run/b."):
            judge(server, out="named")


def test_a_head_is_recorded_with_its_replay_and_another_one_is_noted(judge, folder):
    arguments = ["ignore_stop=true", "target.dtype=float64", "repeat=2"]
    with own_server(folder) as server:
        report, printed = judge(server, f"checkpoint={folder / 'head'}", *arguments)
        record = report["record"]
        assert record.checks.served_is_trained is True and record.checks.first_difference is None
        assert record.checks.replay_tau == pytest.approx(record.loads[0].tau)
        assert record.drafter.method == "draft" and len(record.drafter.digest) == 64
        (other_name,) = record.notes
        assert other_name == "The server says that its head is run/step, and checkpoint= is head."
        assert record.drafter.name == "head" and record.target.dtype == "float64"
        assert "served = replayed" in printed and 0 <= record.machine.busy <= 1
        assert record.checks.template == "same ids as tokenizer" and record.engine.name == "specdec"
        report, printed = judge(server, f"checkpoint={folder / 'other'}", *arguments)
    record = report["record"]
    assert record.checks.first_difference is not None and record.drafter.digest != ""
    _, note = record.notes
    assert re.search(r"were measured with checkpoint=head \w+, and this is checkpoint=other ", note) and note in printed


# Parts


def test_the_machine_of_a_server_elsewhere_is_unknown():
    machine = describe_machine(["http://localhost:1", "http://10.1.2.3:8000"], None, None)
    assert (machine.device, machine.count, machine.parallel) == (None, None, None)
    assert describe_machine(["http://localhost:1"], None, 0.5).device
