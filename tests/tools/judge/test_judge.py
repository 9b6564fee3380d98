"""Tests of scripts/judge.py: what each server's counters become, faults, continuing, and this project's own server."""

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scripts import choose
from scripts import judge as judge_script
from specdec import checkpoint
from specdec.engines import client
from specdec.heads.draft import Draft
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from specdec.tools.judge import referee
from specdec.tools.judge.verdict import describe_verdict
from specdec.unroll import replay
from tests.support.commands import write_prompts, write_rows
from tests.support.decoding import chain_of
from tests.support.small_server import SmallServer
from tests.support.targets import save_target
from tests.tools.server.test_app import serving

NUM, NEW, K = 6, 12, 3


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, two drafters that are it with noise, and prompts."""
    folder = tmp_path_factory.mktemp("served")
    target = save_target(folder / "target")
    for seed, name in enumerate(("head", "other")):
        torch.manual_seed(seed)
        draft = Draft(target, copy_layers=list(range(target.num_layers)))
        for parameter in draft.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        checkpoint.save(folder / name, draft, {"_target_": "specdec.heads.draft.Draft"})
    write_prompts(folder / "prompts.jsonl", NUM)
    return folder


@pytest.fixture
def judge(folder, tmp_path, run_script) -> Callable[..., tuple[dict, str]]:
    """judge(server, key=value ..) -> `server` of the report with its notes, and what was printed"""

    def run(server: SmallServer, *arguments: str, out: str = "served", name: bool = True) -> tuple[dict, str]:
        required = [f"engine={server.url}", f"prompts={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}"]
        required += [f"target.name={folder / 'target'}"] * name
        printed = run_script(judge_script, *required, f"out={tmp_path / out}", *arguments)
        report = json.loads((tmp_path / out / "results.json").read_text())
        return {**report["server"], **{key: report[key] for key in ("notes", "protocol", "results")}}, printed

    return run


class Drafting(SmallServer):
    """A stand-in for an engine of a kind: random rounds for each prompt, told as that engine tells them.

    drafts: whether the engine drafts; per_answer, metrics: whether it has counts of drafts in answers, and in /metrics
    spoil: called with path, body and how often this prompt was asked before; its reply takes the place of the usual one
    """

    def __init__(self, kind: str, *, drafts: bool = True, per_answer: bool = True, metrics: bool = True):
        super().__init__(self._reply)
        self.kind, self.drafts, self.per_answer, self.metrics = kind, drafts, per_answer, metrics
        self.spoil: Callable = no_fault
        self.counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "tokens"), 0)
        self.positions = [0] * K
        self.times_asked: dict[str, int] = {}

    def list_rounds(self, body: dict) -> list[int]:
        """Accepted drafts of each round, which end with the answer; some answers end early."""
        source = random.Random(name_prompt(body))
        limit = min(body["max_tokens"], source.choice((NEW, 7)))
        accepted: list[int] = []
        while (tokens_left := limit - 1 - sum(accepted) - len(accepted)) > 0:
            num = source.randrange(K + 1) if self.drafts and body.get("speculate", True) else 0
            accepted.append(min(num, tokens_left - 1))
        return accepted

    def _reply(self, path: str, body: dict | None):
        if path == "v1/models":
            return 200, {"data": [{"id": "small", "owned_by": self.kind, "max_model_len": 64}]}
        if path == "metrics":
            return (200, self.write_metrics()) if self.metrics else (404, {})
        if body is None or path not in ("v1/completions", "v1/chat/completions"):
            return 404, {}
        prompt = name_prompt(body)
        with self.guard:
            times = self.times_asked[prompt] = self.times_asked.get(prompt, -1) + 1
        return self.spoil(path, body, times) or (200, self.stream(body))

    def stream(self, body: dict) -> list[bytes]:
        time.sleep(0.01)
        accepted, num = self.list_rounds(body), 1
        drafts = self.drafts and body.get("speculate", True)
        events = []
        for step in [None, *accepted]:
            size = 1 if step is None else step + 1
            events.append(self.write_event(body, step, list(range(num, num + size)), K if drafts else 0))
            num += 0 if step is None else size
        events[-1]["choices"][0]["finish_reason"] = "length" if num == body["max_tokens"] else "stop"
        counts, positions = self.count(accepted, len(accepted) if drafts else 0, num)
        last: dict = {"choices": [], "usage": {"completion_tokens": num}}
        if self.per_answer:
            last |= self.write_counts(accepted, drafts, counts, positions)
        return [b"", *(f"data: {json.dumps(event)}\n\n".encode() for event in [*events, last]), b"data: [DONE]\n\n"]

    def write_event(self, body: dict, step: int | None, ids: list[int], drafted: int) -> dict:
        """A document with the tokens of a round; step: its accepted drafts, None for the first token"""
        event: dict = {"choices": [{"text": "a" * len(ids), "finish_reason": None}]}
        if body.get("return_token_ids"):
            event["choices"][0]["token_ids"] = ids
        if body.get("verbose"):
            event["__verbose"] = {"tokens": ids}
        if self.kind == "specdec" and step is not None:
            event["round"] = {"accepted": step, "drafted": drafted}
        if "messages" in body:
            event["choices"][0]["delta"] = {"content": event["choices"][0].pop("text")}
        return event

    def count(self, accepted: list[int], drafting: int, num: int) -> tuple[dict, list[int]]:
        counts = {"drafts": drafting, "draft_tokens": K * drafting, "accepted_tokens": sum(accepted), "tokens": num}
        positions = count_positions(accepted)
        with self.guard:
            self.counts = {name: value + counts[name] for name, value in self.counts.items()}
            self.positions = [before + added for before, added in zip(self.positions, positions)]
        return counts, positions

    def write_counts(self, steps: list[int], drafts: bool, counts: dict, positions: list[int]) -> dict:
        """The fields of the last document with the counts of an answer."""
        drafted, accepted, tokens = counts["draft_tokens"], counts["accepted_tokens"], counts["tokens"]
        histogram = [steps.count(number) for number in range(K + 1)]
        if self.kind == "specdec":
            own = {"rounds": len(steps), "drafted": drafted, "accepted": accepted, "accepted_by_position": positions}
            return {"usage": {"completion_tokens": tokens, "speculation": own}}
        if self.kind == "llamacpp":
            own = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
            return {"timings": {"predicted_n": tokens, **own}}
        vllm = {"mean_acceptance_length": 9.0, "acceptance_histogram": histogram, "num_spec_steps": len(steps)}
        vllm |= {"num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted, "num_spec_tokens": K}
        sglang = {"spec_accept_length": 9.0, "spec_verify_ct": len(steps), "spec_num_correct_drafts": accepted}
        sglang |= {"spec_num_proposed_drafts": drafted, "spec_correct_drafts_histogram": histogram}
        fields = {
            "vllm": {"metrics": {"speculative_decoding": vllm | {"per_step_accepted": steps}}},
            "sglang": {"sglext": {"spec_tokens_details": sglang}},
        }
        return fields.get(self.kind, {}) if drafts else {}

    def write_metrics(self) -> str:
        prefix, labels, tokens = "vllm", 'engine="0",', "generation_tokens"
        if self.kind == "llamacpp":
            prefix, labels, tokens = "llamacpp", "", "tokens_predicted"
        label = labels and f'{{{labels}model_name="small"}}'
        lines = ["# HELP x", f"{prefix}:{tokens}_total{label} {self.counts['tokens']}", "vllm:num_requests_running 0.0"]
        if self.drafts:
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                lines.append(f"{prefix}:spec_decode_num_{name}_total{label} {float(self.counts[name])}")
            counter = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{counter}{{{labels}position="{index}"}} {value}' for index, value in enumerate(self.positions)]
        return "\n".join(lines)


def no_fault(path: str, body: dict, times: int) -> None:
    """The usual replies."""


def name_prompt(body: dict) -> str:
    return json.dumps(body.get("prompt", body.get("messages")))


def count_positions(accepted: list[int]) -> list[int]:
    return [sum(map(position.__lt__, accepted)) for position in range(K)]


def list_bodies(server: Drafting, start: int = 0) -> list[dict]:
    """The bodies of whole answers that were asked for, without the short tries."""
    return [body for _, body in server.requests[start:] if body and body.get("max_tokens") == NEW]


def find_truth(server: Drafting) -> tuple[float, list[float]]:
    """tau and survival of one answer to each prompt with all of its tokens."""
    bodies = {name_prompt(body): body for body in list_bodies(server)}
    rounds = [server.list_rounds({"prompt": body["prompt"], "max_tokens": NEW}) for body in bodies.values()]
    accepted = list(itertools.chain(*rounds))
    return sum(accepted) / len(accepted) + 1, [num / len(accepted) for num in count_positions(accepted)]


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
    with Drafting("llamacpp") as server, Drafting("vllm") as baseline:
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


@contextlib.contextmanager
def own_server(folder: Path) -> Iterator[SmallServer]:
    """This project's server with a chain of the head -> something with its URL"""
    target = Target.load(str(folder / "target"), dtype="float64")
    head = HeadProposer(checkpoint.load(folder / "head", target), chain_of(K))
    small = SmallServer(no_fault)
    with serving(target, proposer=head) as (url, _):
        small.port = int(url.rpartition(":")[2])
        yield small


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
    ("served_tau", "low", "high", "sentence"),
    [
        (2.03, 0.01, 0.05, "served = trained: tau 2.030 served, 2.000 replayed"),  # below 2 %
        (2.05, 0.01, 0.09, "served is NOT what was trained"),
        (1.90, -0.15, -0.05, "served is NOT what was trained"),
        (2.05, -0.01, 0.11, "cannot be told"),
    ],
)
def test_the_verdict_needs_a_difference_and_its_interval(served_tau, low, high, sentence):
    figures = {
        "served_tau": served_tau,
        "replayed_tau": 2.0,
        "difference": served_tau - 2,
        "difference_ci": [low, high],
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
    lengths = report["results"][0]["acceptance_length"]
    assert lengths["specdec"] == pytest.approx(level["tau"]) and lengths["SGLang"] > lengths["specdec"]
    assert "The same rounds as others count them" in printed
