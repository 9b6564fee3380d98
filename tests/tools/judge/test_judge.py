"""Tests of scripts/judge.py: what each server's counters become, faults, continuing, and this project's own server."""

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import uvicorn

from scripts import choose, serve
from scripts import judge as judge_script
from specdec import checkpoint
from specdec.engines import client
from specdec.heads.draft import Draft
from specdec.tools.judge import referee
from specdec.tools.server import serve as serving
from specdec.unroll import replay
from tests.small_server import SmallServer
from tests.support import save_target, write_prompts

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
    """judge(server, key=value ..) -> the report, and what was printed"""

    def run(server: SmallServer, *arguments: str, out: str = "served", name: bool = True) -> tuple[dict, str]:
        required = [f"engine={server.url}", f"prompts={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}"]
        required += [f"target.name={folder / 'target'}"] * name
        printed = run_script(judge_script, *required, f"out={tmp_path / out}", *arguments)
        return json.loads((tmp_path / out / "results.json").read_text()), printed

    return run


class Drafting(SmallServer):
    """A stand-in for an engine of a kind: random rounds for each prompt, told as that engine tells them.

    drafts: whether it drafts; per_answer, metrics: whether it says what became of drafts so
    spoil: called with path, body and how often this prompt was asked before; a reply takes the place of the usual one
    """

    def __init__(self, kind: str, *, drafts: bool = True, per_answer: bool = True, metrics: bool = True):
        super().__init__(self._reply)
        self.kind, self.drafts, self.per_answer, self.metrics = kind, drafts, per_answer, metrics
        self.spoil: Callable = lambda path, body, times: None
        self.counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "tokens"), 0)
        self.positions = [0] * K
        self.times_asked: dict[str, int] = {}

    def rounds(self, body: dict) -> list[int]:
        """Accepted drafts of each round, which end with the answer; some answers end early."""
        prompt = json.dumps(body.get("prompt", body.get("messages")))
        source = random.Random(prompt)
        limit = min(body["max_tokens"], source.choice((NEW, 7)))
        drafts = self.drafts and body.get("speculate", True)
        steps: list[int] = []
        while (tokens_left := limit - 1 - sum(steps) - len(steps)) > 0:
            steps.append(min(source.randrange(K + 1) if drafts else 0, tokens_left - 1))
        return steps

    def _reply(self, path: str, body: dict | None):
        if path == "v1/models":
            return 200, {"data": [{"id": "small", "owned_by": self.kind, "max_model_len": 64}]}
        if path == "metrics":
            return (200, self.text()) if self.metrics else (404, {})
        if path not in ("v1/completions", "v1/chat/completions"):
            return 404, {}
        assert body is not None
        prompt = json.dumps(body.get("prompt", body.get("messages")))
        with self.guard:
            times = self.times_asked[prompt] = self.times_asked.get(prompt, -1) + 1
        spoilt = self.spoil(path, body, times)
        return spoilt if spoilt is not None else (200, self.stream(path, body))

    def stream(self, path: str, body: dict) -> list[bytes]:
        time.sleep(0.01)
        steps, num = self.rounds(body), 1
        drafts = self.drafts and body.get("speculate", True)
        events = []
        for step in [None, *steps]:
            size = 1 if step is None else step + 1
            ids = list(range(num, num + size))
            num += 0 if step is None else size
            event: dict = {"choices": [{"text": "a" * size, "finish_reason": None}]}
            if body.get("return_token_ids"):
                event["choices"][0]["token_ids"] = ids
            if body.get("verbose"):
                event["__verbose"] = {"tokens": ids}
            if self.kind == "specdec" and step is not None:
                event["round"] = {"accepted": step, "drafted": K if drafts else 0}
            if "messages" in body:
                event["choices"][0]["delta"] = {"content": event["choices"][0].pop("text")}
            events.append(event)
        events[-1]["choices"][0]["finish_reason"] = "length" if num == body["max_tokens"] else "stop"
        drafting = len(steps) if drafts else 0
        counts, reached = self.count(steps, drafting, num)
        last: dict = {"choices": [], "usage": {"completion_tokens": num}}
        if self.per_answer:
            last |= self.tell(steps, drafts, counts, reached)
        return [b"", *(f"data: {json.dumps(event)}\n\n".encode() for event in [*events, last]), b"data: [DONE]\n\n"]

    def count(self, steps: list[int], drafting: int, num: int) -> tuple[dict, list[int]]:
        counts = {"drafts": drafting, "draft_tokens": K * drafting, "accepted_tokens": sum(steps), "tokens": num}
        reached = [sum(step > place for step in steps) for place in range(K)]
        with self.guard:
            self.counts = {name: value + counts[name] for name, value in self.counts.items()}
            self.positions = [before + added for before, added in zip(self.positions, reached)]
        return counts, reached

    def tell(self, steps: list[int], drafts: bool, counts: dict, reached: list[int]) -> dict:
        drafted, accepted = counts["draft_tokens"], counts["accepted_tokens"]
        histogram = [steps.count(number) for number in range(K + 1)]
        if self.kind == "specdec":
            more = {"rounds": len(steps), "drafted": drafted, "accepted": accepted, "accepted_by_position": reached}
            return {"usage": {"completion_tokens": counts["tokens"], "speculation": more}}
        if self.kind == "llamacpp":
            more = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
            return {"timings": {"predicted_n": counts["tokens"], **more}}
        if not drafts:
            return {}
        if self.kind == "vllm":
            return {"metrics": {"speculative_decoding": {
                "mean_acceptance_length": 9.0, "acceptance_histogram": histogram, "num_spec_steps": len(steps),
                "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted, "num_spec_tokens": K, "per_step_accepted": steps,
            }}}  # fmt: skip
        return {"sglext": {"spec_tokens_details": {
            "spec_accept_length": 9.0, "spec_verify_ct": len(steps), "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": drafted, "spec_correct_drafts_histogram": histogram,
        }}}  # fmt: skip

    def text(self) -> str:
        if self.kind == "llamacpp":
            names = {"tokens": "llamacpp:tokens_predicted_total", "drafts": "llamacpp:spec_decode_num_{}_total"}
            label, first = "", ""
        else:
            names = {"tokens": "vllm:generation_tokens_total", "drafts": "vllm:spec_decode_num_{}_total"}
            label, first = '{engine="0",model_name="small"}', 'engine="0",'
        lines = [
            "# HELP x",
            f"{names['tokens']}{label} {self.counts['tokens']}",
            f"vllm:num_requests_running{label} 0.0",
        ]
        if self.drafts:
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                lines += [f"{names['drafts'].format(name)}{label} {float(self.counts[name])}"]
            counter = names["drafts"].format("accepted_tokens_per_pos")
            lines += [f'{counter}{{{first}position="{place}"}} {value}' for place, value in enumerate(self.positions)]
        return "\n".join(lines)


def truth(server: Drafting) -> tuple[float, list[float]]:
    """tau and survival of one answer to each prompt with all of its tokens."""
    bodies = {
        json.dumps(b["prompt"]): b for _, b in server.requests if b and b.get("max_tokens") == NEW and "prompt" in b
    }
    steps = [server.rounds({"prompt": body["prompt"], "max_tokens": NEW}) for body in bodies.values()]
    num = sum(map(len, steps))
    accepted = list(itertools.chain(*steps))
    return (sum(accepted) + num) / num, [sum(step > place for step in accepted) / num for place in range(K)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("specdec", {}), ("vllm", {}), ("sglang", {"metrics": False}), ("llamacpp", {}), ("vllm", {"per_answer": False}),
     ("llamacpp", {"metrics": False})],
    ids=["ours", "vllm", "sglang", "llama.cpp", "vllm by counters", "llama.cpp without counters"],
)  # fmt: skip
def test_tau_is_emitted_tokens_of_a_round_whatever_a_server_counts(judge, kind, settings):
    with Drafting(kind, **settings) as server, Drafting(kind, drafts=False) as baseline:
        arguments = [] if kind == "specdec" else [f"baseline={baseline.url}"]
        report, printed = judge(server, "batch=1,4", *arguments)
        tau, survival = truth(server)
    for level in report["server"]["levels"]:
        assert level["tau"] == pytest.approx(tau) and f"{tau:.2f}" in printed
        assert level["answers"] == NUM and not level["failed"] and level["tokens_of_others"] == 0
        assert level["tau_ci"][0] <= tau <= level["tau_ci"][1]
        if kind != "llamacpp" or settings == {}:
            assert level["survival"][: len(survival)] == pytest.approx(survival)
        assert level["drafted"]["tokens_per_second_of_a_user"] > 0 and level["plain"]["tokens_per_second"] > 0
        assert level["speedup"] > 0 and level["drafted"]["first_token_seconds"] > 0
        assert level["same_answers"] == level["compared_answers"] == NUM and level["plain"]["busy"] > 0
    assert (
        report["server"]["levels"][0]["speedup_ci"] and report["server"]["levels"][1]["speedup_ci"] is None
    )  # of one turn
    fields = [body for path, body in server.requests if path == "v1/completions"]
    assert sum("speculate" in body for body in fields) == (kind == "specdec") * (1 + 2 * NUM + 1 + 4)
    assert 1 < server.most_running <= 5 and all(body["stream"] and "ignore_eos" not in body for body in fields)


def test_what_a_server_does_not_say_is_said(judge, folder):
    with Drafting("vllm", per_answer=False, metrics=False) as server:
        report, printed = judge(server)
        assert "tau cannot be had: start it without --disable-log-stats" in printed
        assert (
            report["server"]["levels"][0]["tau"] is None
            and report["server"]["levels"][0]["drafted"]["tokens_per_second"] > 0
        )
    for kind in ("vllm", "llamacpp", "specdec"):
        with Drafting(kind, drafts=False) as server:
            report, printed = judge(server, out=f"no drafts {kind}")
            assert "does not draft" in printed and report["server"]["levels"][0]["tau"] in (1, None)
    with Drafting("llamacpp") as server, Drafting("vllm") as baseline:
        report, printed = judge(server, out="no plain")
        assert "give baseline=URL" in printed and report["server"]["levels"][0]["plain"] is None
        with pytest.raises(ValueError, match=rf"baseline={baseline.url} drafts, too"):
            judge(server, f"baseline={baseline.url}", out="wrong plain")


@pytest.mark.parametrize("kind", ["specdec", "vllm"])
def test_a_seed_does_not_change_how_this_server_drafts(judge, kind):
    """Above temperature 0 it drafts otherwise with a seed, so that one is not sent."""
    for temperature in (0, 1):
        with Drafting(kind) as server:
            report, _ = judge(server, "seed=3", f"decode.temperature={temperature}", out=f"{kind} {temperature}")
        seedless = kind == "specdec" and temperature == 1
        bodies = [body for path, body in server.requests if path == "v1/completions"]
        assert {body.get("seed") for body in bodies} == {None if seedless else 3}
        assert any("without a seed" in note for note in report["notes"]) == seedless


def test_other_traffic_is_noticed_and_left_out(judge):
    server = Drafting("vllm", per_answer=False)

    def disturb(path: str, body: dict, times: int) -> None:
        if (
            body["max_tokens"] == NEW and len(server.times_asked) == 3
        ):  # a request of somebody else, during the third prompt
            server.count([3, 3], 2, 9)

    server.spoil = disturb
    with server:
        report, printed = judge(server)
    (level,) = report["server"]["levels"]
    assert level["tokens_of_others"] == 9 and "9 tokens for others" in printed
    assert level["tau"] and level["tau_ci"] is None and level["rounds"] < len(truth(server)[1]) * NUM * NEW


def test_prompts_are_sent_as_messages_to_an_unknown_server(judge):
    with Drafting("somebody", per_answer=False, metrics=False) as server:
        report, printed = judge(server, "template.enable_thinking=false", name=False)
        bodies = [body for path, body in server.requests if path == "v1/chat/completions"]
    assert "sent as messages" in printed and len(bodies) == 2 + NUM and bodies[0]["messages"][-1]["role"] == "user"
    assert (
        bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
        and not {"top_k", "return_token_ids"} & bodies[0].keys()
    )
    assert report["server"]["levels"][0]["drafted"]["tokens_per_second_of_a_user"] > 0


def test_busy_failing_and_cut_answers_are_asked_for_again_and_counted(judge, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = Drafting("vllm")
    faults = [(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.2"}), (503, "restarting"), None]

    def spoil(path: str, body: dict, times: int):
        number = list(server.times_asked).index(json.dumps(body["prompt"]))
        if body["max_tokens"] != NEW:
            return None
        if number == 1:
            return 500, {"error": {"message": "that prompt again"}}
        if number in (2, 3) and times == 0:
            return faults[number - 2]
        return (200, server.stream(path, body)[: -3 if number == 4 else -1]) if number > 3 and times == 0 else None

    server.spoil = spoil
    start = time.monotonic()
    with server:
        report, printed = judge(server, "batch=2")
    (level,) = report["server"]["levels"]
    assert time.monotonic() - start > 0.2 and server.keys == {"Bearer secret"}
    assert level["answers"] == NUM - 1 and level["tau"] and len(level["failed"]) == 1
    assert "that prompt again" in level["failed"][0]["error"] and "1 requests failed" in printed
    assert "8 were sent again" in printed  # 4 tries of the one, and 4 others


def test_what_was_measured_is_kept_and_continued(judge, monkeypatch):
    server = Drafting("vllm")
    server.spoil = lambda path, body, times: (401, {"message": "no key"}) if body["max_tokens"] == NEW and len(server.times_asked) > 3 else None  # fmt: skip
    with server:
        with pytest.raises(ValueError, match=r"None of 1 requests was answered. .*status 401: no key"):
            judge(server)
        server.spoil = lambda path, body, times: None
        before = len(server.requests)
        report, _ = judge(server)
        whole = [body for _, body in server.requests[before:] if body and body.get("max_tokens") == NEW]
        assert len(whole) == NUM - 3 and report["server"]["levels"][0]["answers"] == NUM
        report, _ = judge(server, "batch=1,2")
        assert [level["requests"] for level in report["server"]["levels"]] == [1, 2]
        before = len(server.requests)
        again, _ = judge(server, "batch=1,2")
        assert again == report and not [b for _, b in server.requests[before:] if b and b.get("max_tokens") == NEW]
        with pytest.raises(ValueError, match=r"begun with other settings: seed .then 0, now 1.. Choose another out="):
            judge(server, "seed=1")


def test_wrong_servers_and_options_are_refused_with_what_to_do(judge, folder):
    with Drafting("vllm") as server:
        with pytest.raises(ValueError, match=r"batch=1,0: give numbers from 1 to 4096"):
            judge(server, "batch=1,0")
        with pytest.raises(ValueError, match=r"has no model big, but small: give model="):
            judge(server, "model=big")
        with pytest.raises(ValueError, match=r"give one checkpoint=DIR, that of the head"):
            judge(server, f"checkpoint={folder / 'head'},{folder / 'other'}")
    with pytest.raises(ValueError, match="No server with OpenAI's interface answers"):
        judge(server)


# This project's own server, and replay


@contextlib.contextmanager
def own_server(monkeypatch, *arguments: str) -> Iterator[SmallServer]:
    """scripts/serve.py in a thread of this process; something with its URL"""
    started: list[uvicorn.Server] = []

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            started.append(self)

        @contextlib.contextmanager
        def capture_signals(self):  # they are for main threads
            yield

    listening = serving.open_port("127.0.0.1", 0)
    monkeypatch.setattr(serving, "open_port", lambda *_: listening)
    monkeypatch.setattr(uvicorn, "Server", Server)
    thread = threading.Thread(target=serve.main, args=([*arguments, "port=0"],), daemon=True)
    thread.start()
    small = SmallServer(lambda *_: None)
    small.port = listening.getsockname()[1]
    try:
        while not (started and started[0].started):
            assert thread.is_alive()
            time.sleep(0.01)
        yield small
    finally:
        started[0].should_exit = True
        thread.join(30)


def test_our_server_serves_what_was_trained_and_another_head_is_noticed(judge, folder, tmp_path, monkeypatch):
    head, arguments = folder / "head", ["batch=1,4", "ignore_stop=true", "target.dtype=float64"]
    chain = ["proposer=head", f"decode.depth={K}", "rows=4", "target.dtype=float64"]
    with own_server(monkeypatch, f"checkpoint={head}", *chain) as server:
        report, printed = judge(server, f"checkpoint={head}", *arguments)
        single, four = report["server"]["levels"]
        for replayed in (single["replay"], four["replay"]):
            assert replayed["served_tau"] == replayed["replayed_tau"] and replayed["verdict"] in printed
            assert 1.1 < replayed["served_tau"] < K + 0.9 and replayed["depth"] == K and "served = trained" in printed
            assert (
                replayed["compared_by_round"] == replayed["same_number_of_rounds"] == NUM
                and not replayed["differences"]
            )
            assert single["tau"] == four["tau"] == replayed["served_tau"] and single["rounds"] == four["rounds"]
        assert single["same_answers"] == NUM and single["plain"]["tokens_per_second"] > 0
        report, printed = judge(server, f"checkpoint={folder / 'other'}", *arguments)  # nothing is measured again
    first = min(report["server"]["levels"][0]["replay"]["differences"], key=lambda difference: difference["round"])
    assert first["served"] != first["replayed"] and f"prompt {first['prompt']} first" in printed


@pytest.mark.parametrize("seed", range(20))
def test_walking_takes_the_rounds_that_replay_counts(seed):
    accept = (torch.rand(K, 15, generator=torch.Generator().manual_seed(seed)) < 0.6).double()
    steps = referee.count_greedy_rounds(accept)
    rounds, accepted = replay.count_rounds(accept)
    assert len(steps) == rounds and sum(steps) + len(steps) == 14
    assert accepted.tolist() == [sum(step > place for step in steps) for place in range(K)]
    assert referee.find_first_difference(steps, steps, 15) is None


def test_the_first_difference_is_that_of_the_first_draft_and_not_behind_the_end():
    assert referee.find_first_difference([2, 0, 1], [2, 1, 0], 20) == (1, 4)
    assert referee.find_first_difference([2, 3], [2, 1], 6) is None  # the end cuts the round
    assert referee.find_first_difference([0, 3], [3], 20) == (0, 1)


def test_a_choice_takes_its_costs_from_a_server(folder, tmp_path, run_script, monkeypatch):
    chain = ["proposer=head", f"decode.depth={K}", "rows=4", "target.dtype=float64"]
    arguments = [
        "loads=1,4",
        f"checkpoint={folder / 'head'}",
        f"prompts={folder / 'prompts.jsonl'}",
        "ignore_stop=true",
    ]
    arguments += [f"max_new_tokens={NEW}", f"out={tmp_path / 'choice'}", "target.dtype=float64"]
    with own_server(monkeypatch, f"checkpoint={folder / 'head'}", *chain) as server:
        run_script(choose, *arguments, f"engine={server.url}")
        chosen_result = json.loads((tmp_path / "choice" / "results.json").read_text())["choice"]
        (tmp_path / "choice" / "results.json").unlink()
        with pytest.raises(ValueError, match=r"rows\.jsonl was begun with other settings: ignore_stop"):
            run_script(choose, *arguments, f"engine={server.url}", "ignore_stop=false")
    assert [(point["rows"], point["drafts"]) for point in chosen_result["costs"]["points"]] == [(1, K), (4, K)]
    assert "specdec, requests at each load" in chosen_result["costs"]["source"]
    rows = [json.loads(line) for line in (tmp_path / "choice" / "rows.jsonl").read_text().splitlines()]
    turns = [referee.ServedBatch.from_row(row["drafted"]) for row in rows if row["requests"] == 4]
    rate = referee.summarise_speed(turns, 0)["tokens_per_second_of_a_user"]
    assert chosen_result["costs"]["points"][1]["seconds"] == pytest.approx(
        referee.summarise_drafts(turns, 0)["tau"] / rate
    )


def test_a_choice_refuses_a_server_that_does_not_count_before_it_decodes(folder, tmp_path, run_script, monkeypatch):
    monkeypatch.setattr("specdec.tools.choose.choose.load_heads", lambda *ignored: pytest.fail("loaded"))
    arguments = [
        f"checkpoint={folder / 'head'}",
        f"prompts={folder / 'prompts.jsonl'}",
        f"out={tmp_path}/choice",
    ]
    mute = Drafting("vllm", per_answer=False, metrics=False)
    with mute as server, pytest.raises(ValueError, match="says nothing about drafts"):
        run_script(choose, *arguments, f"engine={server.url}", f"baseline={server.url}")
    with Drafting("vllm") as server, pytest.raises(ValueError, match="give baseline=URL"):
        run_script(choose, *arguments, f"engine={server.url}")


def test_a_server_is_asked_turn_by_turn(judge, folder, tmp_path, monkeypatch):
    rows = [
        {"question_id": 1, "category": "a", "turns": ["w3 w4", "w5"]},
        {"question_id": 2, "category": "b", "turns": ["w6"]},
    ]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "suite=mt_bench",
        f"prompts={tmp_path}/question.jsonl",
        f"max_new_tokens={NEW}",
        "batch=1",
        "target.dtype=float64",
    ]
    chain = ["proposer=head", f"decode.depth={K}", "rows=4", "target.dtype=float64"]
    with own_server(monkeypatch, f"checkpoint={folder / 'head'}", *chain) as server:
        report, printed = judge(server, f"checkpoint={folder / 'head'}", *arguments)
        again, _ = judge(server, f"checkpoint={folder / 'head'}", *arguments)  # from what is there
    (level,) = report["server"]["levels"]
    assert (
        level["answers"] == 3
        and again["server"]["levels"] == report["server"]["levels"]
        and "2 questions of MT-Bench" in report["protocol"]
    )
    assert (
        level["replay"]["served_tau"] == level["replay"]["replayed_tau"]
    )  # so the second turn's prompt is what was served
    rows_written = [json.loads(line) for line in (tmp_path / "served" / "rows.jsonl").read_text().splitlines()]
    assert [(row["wave"], answer["prompt"]) for row in rows_written for answer in row["drafted"]["answers"]] == [
        (0, "1 turn 1"), (0, "2"), (1, "1 turn 2")
    ]  # fmt: skip
    lengths = report["results"][0]["acceptance_length"]
    assert lengths["specdec"] == pytest.approx(level["tau"]) and lengths["SGLang"] > lengths["specdec"]
    assert "The same rounds as others count them" in printed
