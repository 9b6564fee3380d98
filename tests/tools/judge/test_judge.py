"""Tests of scripts/judge.py: what each server's counters become, faults, continuing, and this project's own server."""

import json
import time

import pytest
import torch

from scripts import choose
from specdec.measuring.servers import referee
from specdec.measuring.servers.verdict import describe_verdict
from specdec.unroll import replay
from tests.support.commands import write_rows
from tests.support.small_server import SmallServer
from tests.tools.judge.drafting import (
    NEW,
    NUM,
    Drafting,
    K,
    count_positions,
    find_truth,
    list_bodies,
    name_prompt,
    no_fault,
    own_server,
)


@pytest.mark.parametrize(
    ("kind", "settings", "num_positions"),
    [
        ("specdec", {}, K), ("vllm", {}, K), ("sglang", {"metrics": False}, K), ("llamacpp", {}, K),
        ("vllm", {"per_answer": False}, K), ("llamacpp", {"metrics": False}, 0),
    ],
)  # fmt: skip
def test_tau_is_emitted_tokens_of_a_round_whatever_a_server_counts(judge, kind, settings, num_positions):
    with Drafting(kind, **settings) as server, Drafting(kind, drafts=False) as baseline:
        arguments = [] if kind == "specdec" else [f"baseline={baseline.url}"]
        report, printed = judge(server, "batch=1,4", *arguments)
        tau, survival = find_truth(server)
    for level in report["levels"]:
        check_level(level, tau)
        assert level["survival"][:num_positions] == pytest.approx(survival[:num_positions])
    assert f"{tau:.2f}" in printed
    assert [bool(level["speedup_ci"]) for level in report["levels"]] == [True, False]  # the second has two batches
    bodies = [body for path, body in server.requests if path == "v1/completions"]
    assert sum("speculate" in body for body in bodies) == (kind == "specdec") * (1 + 2 * NUM + 1 + 4)
    assert 1 < server.most_running <= 5 and all(body["stream"] and "ignore_eos" not in body for body in bodies)


def check_level(level: dict, tau: float) -> None:
    """A level in which each prompt has its answer, with drafts and without."""
    assert level["tau"] == pytest.approx(tau) and level["tau_ci"][0] <= tau <= level["tau_ci"][1]
    assert level["answers"] == NUM and not level["failed"] and level["tokens_of_others"] == 0
    assert level["drafted"]["tokens_per_second_of_a_user"] > 0 and level["plain"]["tokens_per_second"] > 0
    assert level["speedup"] > 0 and level["drafted"]["first_token_seconds"] > 0
    assert level["same_answers"] == level["compared_answers"] == NUM and level["plain"]["busy"] > 0


def test_what_a_server_does_not_say_is_said(judge, folder):
    with Drafting("vllm", per_answer=False, metrics=False) as server:
        report, printed = judge(server)
    assert "tau cannot be had: start it without --disable-log-stats" in printed
    assert report["levels"][0]["tau"] is None and report["levels"][0]["drafted"]["tokens_per_second"] > 0
    for kind in ("vllm", "llamacpp", "specdec"):
        with Drafting(kind, drafts=False) as server:
            report, printed = judge(server, out=f"no drafts {kind}")
        assert "does not draft" in printed and report["levels"][0]["tau"] in (1, None)
    with Drafting("llamacpp") as server, Drafting("llamacpp") as baseline:
        report, printed = judge(server, out="no plain")
        assert "give baseline=URL" in printed and report["levels"][0]["plain"] is None
        with pytest.raises(ValueError, match=rf"baseline={baseline.url} drafts, too"):
            judge(server, f"baseline={baseline.url}", out="wrong plain")


@pytest.mark.parametrize(("kind", "temperature"), [("specdec", 0), ("specdec", 1), ("vllm", 0), ("vllm", 1)])
def test_a_seed_does_not_change_how_this_server_drafts(judge, kind, temperature):
    """Above temperature 0 it drafts otherwise with a seed, so that none is sent."""
    with Drafting(kind) as server:
        report, _ = judge(server, "seed=3", f"decode.temperature={temperature}")
    seedless = kind == "specdec" and temperature == 1
    seeds = {body.get("seed") for path, body in server.requests if path == "v1/completions"}
    assert seeds == {None if seedless else 3}
    assert any("without a seed" in note for note in report["notes"]) == seedless


def test_other_traffic_is_noticed_and_left_out(judge):
    server = Drafting("vllm", per_answer=False)

    def disturb(path: str, body: dict, times: int) -> None:
        if body["max_tokens"] == NEW and len(server.times_asked) == 3:  # somebody else, during the third prompt
            server.count([3, 3], 2, 9)

    server.spoil = disturb
    with server:
        report, printed = judge(server)
    (level,) = report["levels"]
    assert level["tokens_of_others"] == 9 and "9 tokens for others" in printed
    assert level["tau"] and level["tau_ci"] is None and level["rounds"] < len(find_truth(server)[1]) * NUM * NEW


def test_prompts_are_sent_as_messages_to_an_unknown_server(judge):
    with Drafting("somebody", per_answer=False, metrics=False) as server:
        report, printed = judge(server, "template.enable_thinking=false", name=False)
    bodies = [body for path, body in server.requests if path == "v1/chat/completions"]
    assert "sent as messages" in printed and len(bodies) == 2 + NUM and bodies[0]["messages"][-1]["role"] == "user"
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"top_k", "return_token_ids"} & bodies[0].keys()
    assert report["levels"][0]["drafted"]["tokens_per_second_of_a_user"] > 0


def test_busy_failing_and_cut_answers_are_asked_for_again_and_counted(judge, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = Drafting("vllm")
    first_replies = {
        2: lambda body: (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.2"}),
        3: lambda body: (503, "restarting"),
        4: lambda body: (200, server.stream(body)[:-3]),  # a stream that is cut
    }

    def spoil(path: str, body: dict, times: int):
        number = list(server.times_asked).index(name_prompt(body))
        if body["max_tokens"] != NEW or number == 0:
            return None
        if number == 1:
            return 500, {"error": {"message": "that prompt again"}}
        reply = first_replies.get(number, lambda body: (200, server.stream(body)[:-1]))
        return reply(body) if times == 0 else None

    server.spoil = spoil
    start = time.monotonic()
    with server:
        report, printed = judge(server, "batch=2")
    (level,) = report["levels"]
    assert time.monotonic() - start > 0.2 and server.keys == {"Bearer secret"}
    assert level["answers"] == NUM - 1 and level["tau"] and len(level["failed"]) == 1
    assert "that prompt again" in level["failed"][0]["error"] and "1 request failed" in printed
    assert "8 requests sent again" in printed  # 4 tries of the one, and 4 others
    assert level["drafted"]["tokens_per_second"] is None and report["record"].loads[0].total_tok_s is None


def test_what_was_measured_is_kept_and_continued(judge):
    server = Drafting("vllm")

    def lose_key(path: str, body: dict, times: int):
        return (401, {"message": "no key"}) if body["max_tokens"] == NEW and len(server.times_asked) > 3 else None

    with server:
        server.spoil = lose_key
        with pytest.raises(ValueError, match=r"None of 1 requests was answered. .*status 401: no key"):
            judge(server)
        server.spoil = no_fault
        start = len(server.requests)
        report, _ = judge(server)
        assert len(list_bodies(server, start)) == NUM - 3 and report["levels"][0]["answers"] == NUM
        report, _ = judge(server, "batch=1,2")
        assert [level["requests"] for level in report["levels"]] == [1, 2]
        start = len(server.requests)
        assert judge(server, "batch=1,2")[0] == report and not list_bodies(server, start)
        with pytest.raises(ValueError, match=r"begun with other settings: seed .then 0, now 1.. Choose another out="):
            judge(server, "seed=1")


def test_wrong_servers_and_options_are_refused_with_what_to_do(judge, folder):
    with Drafting("vllm") as server:
        for argument, sentence in (
            ("batch=1,0", r"batch=1,0: give numbers from 1 to 4096"),
            ("model=big", r"has no model big, but small: give model="),
            (f"checkpoint={folder / 'head'},{folder / 'other'}", r"give one checkpoint=DIR, that of the head"),
        ):
            with pytest.raises(ValueError, match=sentence):
                judge(server, argument)
    with pytest.raises(ValueError, match="No server with OpenAI's interface answers"):
        judge(server)


# This project's own server, and replay


def test_our_server_serves_what_was_trained_and_another_head_is_noticed(judge, folder):
    head, arguments = f"checkpoint={folder / 'head'}", ["batch=1,4", "ignore_stop=true", "target.dtype=float64"]
    with own_server(folder) as server:
        report, printed = judge(server, head, *arguments)
        for level in report["levels"]:
            replayed = level["replay"]
            assert replayed["served_tau"] == replayed["replayed_tau"] == level["tau"] and replayed["verdict"] in printed
            assert 1.1 < replayed["served_tau"] < K + 0.9 and replayed["depth"] == K and "served = trained" in printed
            assert replayed["compared_by_round"] == replayed["same_number_of_rounds"] == NUM
            assert not replayed["differences"] and level["rounds"] == report["levels"][0]["rounds"]
        assert report["levels"][0]["same_answers"] == NUM and report["levels"][0]["plain"]["tokens_per_second"] > 0
        report, printed = judge(server, f"checkpoint={folder / 'other'}", *arguments)  # nothing is measured again
    differences = report["levels"][0]["replay"]["differences"]
    first = min(differences, key=lambda difference: difference["round"])
    assert first["served"] != first["replayed"] and f"prompt {first['prompt']} first" in printed


@pytest.mark.parametrize("seed", range(20))
def test_greedy_rounds_are_those_that_replay_counts(seed):
    accept = (torch.rand(K, 15, generator=torch.Generator().manual_seed(seed)) < 0.6).double()
    accepted_by_round = referee.count_greedy_rounds(accept)
    rounds, accepted = replay.count_rounds(accept)
    assert len(accepted_by_round) == rounds and sum(accepted_by_round) + len(accepted_by_round) == 14
    assert accepted.tolist() == count_positions(accepted_by_round)
    assert referee.find_first_difference(accepted_by_round, accepted_by_round, 15) is None


def test_the_first_difference_is_that_of_the_first_draft_and_not_behind_the_end():
    assert referee.find_first_difference([2, 0, 1], [2, 1, 0], 20) == (1, 4)
    assert referee.find_first_difference([2, 3], [2, 1], 6) is None  # the end cuts the round
    assert referee.find_first_difference([0, 3], [3], 20) == (0, 1)


@pytest.mark.parametrize(
    ("served_tau", "replayed_tau", "interval", "sentence"),
    [
        (2.03, 2.0, [0.01, 0.05], "served = trained: tau 2.030 served, 2.000 replayed"),  # within 5 % of 2 - 1
        (1.505, 1.514, [-0.018, -0.001], "served = trained"),  # 0.6 % of tau, as of real heads in bfloat16
        (2.06, 2.0, [0.01, 0.11], "served is NOT what was trained"),
        (1.90, 2.0, [-0.15, -0.05], "served is NOT what was trained"),
        (1.0, 1.015, [-0.02, -0.01], "served is NOT what was trained"),  # it accepts nothing
        (2.06, 2.0, [-0.01, 0.13], "cannot be told"),
        (2.03, 2.0, [-0.01, 0.12], "cannot be told"),
        (2.0, 1.905, None, "(+0.095)."),
    ],
)
def test_the_verdict_needs_a_difference_and_its_interval(served_tau, replayed_tau, interval, sentence):
    figures = {
        "served_tau": served_tau,
        "replayed_tau": replayed_tau,
        "difference": served_tau - replayed_tau,
        "difference_ci": interval,
    }
    figures |= {"answers": 8, "depth": K, "same_number_of_rounds": None, "compared_by_round": 0, "differences": []}
    assert sentence in describe_verdict(figures)


@pytest.fixture
def choose_by(folder, tmp_path, run_script):
    """choose_by(server, key=value ..) lets choose take its costs from a server; the folder of the choice"""

    def run(server: SmallServer, *arguments: str):
        required = [f"checkpoint={folder / 'head'}", f"prompts={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}"]
        required += [f"engine={server.url}", f"out={tmp_path / 'choice'}", "target.dtype=float64"]
        run_script(choose, *required, *arguments)
        return tmp_path / "choice"

    return run


def test_a_choice_takes_its_costs_from_a_server(choose_by, folder):
    with own_server(folder) as server:
        out = choose_by(server, "loads=1,4", "ignore_stop=true")
        costs = json.loads((out / "results.json").read_text())["choice"]["costs"]
        (out / "results.json").unlink()
        with pytest.raises(ValueError, match=r"rows\.jsonl was begun with other settings: ignore_stop"):
            choose_by(server, "loads=1,4", "ignore_stop=false")
    assert [(point["rows"], point["drafts"]) for point in costs["points"]] == [(1, K), (4, K)]
    assert "specdec, requests at each load" in costs["source"]
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    batches = [referee.ServedBatch.from_row(row["drafted"]) for row in rows if row["requests"] == 4]
    rate = referee.summarise_speed(batches, 0)["tokens_per_second_of_a_user"]
    assert costs["points"][1]["seconds"] == pytest.approx(referee.summarise_drafts(batches, 0)["tau"] / rate)


def test_a_choice_refuses_a_server_that_does_not_count_before_it_decodes(choose_by, monkeypatch):
    monkeypatch.setattr("specdec.tools.choose.choose.load_heads", lambda *_: pytest.fail("loaded"))
    mute = Drafting("vllm", per_answer=False, metrics=False)
    with mute as server, pytest.raises(ValueError, match="says nothing about drafts"):
        choose_by(server, f"baseline={server.url}")
    with Drafting("vllm") as server, pytest.raises(ValueError, match="give baseline=URL"):
        choose_by(server)


def test_a_server_is_asked_turn_by_turn(judge, folder, tmp_path):
    rows = [
        {"question_id": 1, "category": "a", "turns": ["w3 w4", "w5"]},
        {"question_id": 2, "category": "b", "turns": ["w6"]},
    ]
    write_rows(tmp_path / "question.jsonl", rows)
    head = f"checkpoint={folder / 'head'}"
    arguments = [head, "suite=mt_bench", f"prompts={tmp_path}/question.jsonl", "target.dtype=float64", "verbose=true"]
    with own_server(folder) as server:
        report, printed = judge(server, *arguments)
        again, _ = judge(server, *arguments)  # from the rows that are there
    (level,) = report["levels"]
    assert level["answers"] == 3 and again["levels"] == report["levels"]
    assert "2 questions of MT-Bench" in report["protocol"]
    assert level["replay"]["served_tau"] == level["replay"]["replayed_tau"]  # the second turn's prompt is as served
    rows = [json.loads(line) for line in (tmp_path / "served" / "rows.jsonl").read_text().splitlines()]
    prompts = [(row["wave"], answer["prompt"]) for row in rows for answer in row["drafted"]["answers"]]
    assert prompts == [(0, "1 turn 1"), (0, "2"), (1, "1 turn 2")]
    protocol = report["record"].protocol
    assert (protocol.suite, protocol.file, protocol.turns) == ("mt_bench", "question.jsonl", 2) and protocol.licence
    assert list(report["record"].by.category) == ["a", "b"] and report["record"].by.category["a"].prompts == 1
    assert report["record"].loads[0].prompts == level["questions"] == 2 and level["tau_ci"]
    lengths = report["results"][0]["acceptance_length"]
    assert lengths["specdec"] == pytest.approx(level["tau"]) and lengths["SGLang"] > lengths["specdec"]
    assert "The same rounds as others count them" in printed
