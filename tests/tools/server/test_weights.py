"""Tests of new weights while requests run: answers keep their head, none fails, and what is no head is refused."""

from specdec.options.command_line import read_command

import contextlib
import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from specdec import checkpoint
from specdec.core import compile, fast
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch
from specdec.engines.client import EngineClient
from specdec.engines.draft_weights.choice import open_draft_weights
from specdec.heads.draft import Draft
from specdec.proposers import costs
from specdec.proposers.heads import HeadProposer
from specdec.tools.server import drafts
from specdec.tools.server.app import make_app
from specdec.tools.server.protocol import RequestError
from specdec.tools.server.serve import ServeOptions, find_presets, load_server
from tests.support.drafters import save_eagle
from tests.support.graphs import StepRecorder
from tests.support.targets import save_target, word_tokenizer
from tests.tools.server.running import running
from tests.tools.server.test_app import await_idle, await_that, post, read_error
from tests.tools.server.test_engine import Client

DEPTH = 3
PROMPTS = ["Say the sky is blue", "a b c", "Count to", "the the the"]


def save_draft(folder: Path, target, noise: float) -> None:
    """The target itself as a draft model, whose drafts are all accepted, with noise."""
    torch.manual_seed(1)
    draft = Draft(target, copy_layers=list(range(target.num_layers)))
    for parameter in draft.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    checkpoint.save(folder, draft, {"_target_": "specdec.heads.draft.Draft"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, and a folder `heads` of its heads, of other targets' heads, and of what is none."""
    folder = tmp_path_factory.mktemp("weights")
    target = save_target(folder / "target")
    heads = folder / "heads"
    save_draft(heads / "good", target, 0.0)
    save_draft(heads / "noised", target, 0.03)
    save_eagle(heads / "eagle", target)
    save_draft(heads / "damaged", target, 0.0)
    file = heads / "damaged" / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    save_draft(heads / "other", save_target(folder / "other", seed=5), 0.0)
    save_draft(heads / "words", save_target(folder / "words", tokenizer=word_tokenizer(50)), 0.0)
    save_draft(folder / "outside", target, 0.0)
    (heads / "link").symlink_to(folder / "outside")
    (heads / "loop").symlink_to(heads / "loop")
    (heads / "partly").mkdir()
    (heads / "partly" / "drafter.json").write_text((heads / "good" / "drafter.json").read_text())
    (heads / "partly" / "drafter.safetensors").symlink_to(folder / "outside" / "drafter.safetensors")
    (heads / "run").mkdir()
    (heads / "run" / "best").write_text("../../outside")
    (heads / "file").write_text("nothing")
    adapting = json.loads((heads / "eagle" / "drafter.json").read_text())
    (heads / "adapting").mkdir()
    adapting["_target_"] = "specdec.heads.medusa.Medusa2"
    (heads / "adapting" / "drafter.json").write_text(json.dumps(adapting))
    return folder


def read_options(folder: Path, *arguments: str) -> ServeOptions:
    given = [f"target.name={folder / 'target'}", "target.dtype=float64", "rows=4", f"decode.depth={DEPTH}"]
    given += [f"checkpoint={folder / 'heads' / 'good'}"]
    return read_command("serve", ServeOptions, "", [*given, *arguments], presets=find_presets)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str):
    """The server of `specdec serve` with the good head -> its URL, and its context"""
    served = load_server(read_options(folder, f"allow_weights={folder / 'heads'}", *arguments))
    with running(make_app(served)) as url:
        yield url, served


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as url_and_context:
        yield url_and_context


def load(url: str, name: str, version: str | None = None) -> httpx.Response:
    body = {"folder": str(name), "version": version or str(name)}
    return httpx.post(f"{url}/v1/draft_weights", json=body, timeout=60)


def swap(url: str, name: str) -> float:
    response = load(url, name)
    assert response.status_code == 200 and response.json()["version"] == name, response.text
    return response.json()["seconds"]


def describe(url: str) -> dict:
    return httpx.get(f"{url}/v1/models").json()["data"][0]["draft"]


def ask(url: str, prompt: str, **fields) -> httpx.Response:
    return post(url, "completions", prompt=prompt, **{"max_tokens": 40, "ignore_eos": True} | fields)


def measure_tau(url: str, **fields) -> float:
    counts = [ask(url, prompt, max_tokens=21, **fields).json()["usage"]["speculation"] for prompt in PROMPTS[:2]]
    return 1 + sum(count["accepted"] for count in counts) / sum(count["rounds"] for count in counts)


def test_tau_moves_to_that_of_each_head_and_every_page_names_it(server):
    url, _ = server
    taus = {}
    for name in ("good", "noised", "eagle", "good"):
        assert swap(url, name) > 0
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["rows"] == 4
        expected = {"checkpoint": f"heads/{name}", "version": name, "takes_weights": True, "drafts": DEPTH}
        assert describe(url) == expected and httpx.get(f"{url}/health").json()["draft_version"] == name
        assert f"heads/{name}, version {name}. " in httpx.get(url).text
        seeded = {"temperature": 0.02, "seed": 3}
        taus[name] = measure_tau(url), measure_tau(url, **seeded)
    assert taus["good"][0] > DEPTH + 0.9 and taus["good"][1] > DEPTH + 0.9
    for usual, steady in (taus["noised"], taus["eagle"]):
        assert usual < DEPTH + 0.5 and steady < DEPTH + 0.5


def test_the_client_of_draft_weights_is_understood(server, folder):
    url, _ = server
    with contextlib.closing(EngineClient(url)) as client:
        weights = open_draft_weights(client, client.describe_models()[0][0])
        assert weights.format == "checkpoint" and weights.load(folder / "heads/noised", "from-a-run") > 0
        assert describe(url)["version"] == "from-a-run"
        for name, message in (("outside", r"403: .*allow_weights=FOLDER"), ("heads/other", "status 400: ")):
            with pytest.raises(ValueError, match=message):
                weights.load(folder / name, "refused")
        assert describe(url)["version"] == "from-a-run"
    with running(make_app(load_server(read_options(folder)))) as url, contextlib.closing(EngineClient(url)) as client:
        models = client.describe_models()
        with pytest.raises(ValueError, match=rf"{url} takes no draft weights.*allow_weights=FOLDER"):
            open_draft_weights(client, models[0][0])


def stream_answer(url: str, prompt: str, **fields) -> tuple[list[int], dict]:
    """The token ids of a streamed answer, and its usage."""
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True, "return_token_ids": True, **fields}
    body["stream_options"] = {"include_usage": True}
    tokens, usage = [], {}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                document = json.loads(line.removeprefix("data: "))
                assert "error" not in document, document
                usage = document.get("usage") or usage
                tokens += [token for choice in document["choices"] for token in choice["token_ids"]]
    return tokens, usage


def test_no_request_fails_while_heads_change_and_greedy_answers_are_the_targets_own(server):
    url, served = server
    kinds = [{"temperature": 0}, {"temperature": 0.7, "seed": 5}, {"temperature": 1.0}]
    plain = {prompt: stream_answer(url, prompt, temperature=0, speculate=False)[0] for prompt in PROMPTS}
    swapped = threading.Event()

    def ask_until_swapped(number: int) -> int:
        num_answers = 0
        while not swapped.is_set() or num_answers == 0:
            prompt, kind = PROMPTS[number % len(PROMPTS)], kinds[(number + num_answers) % len(kinds)]
            tokens, usage = stream_answer(url, prompt, **kind)
            assert len(tokens) == usage["completion_tokens"] == 40
            assert kind["temperature"] or tokens == plain[prompt]
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask_until_swapped, number) for number in range(6)]
        for name in ("noised", "good", "eagle", "noised", "good"):
            swap(url, name)
        swapped.set()
        assert sum(future.result() for future in asking) >= 6
    await_idle(served)


def test_answers_that_run_keep_their_head_and_then_it_is_freed(server):
    url, served = server
    swap(url, "good")
    engine = served.engine
    old = engine.drafts
    head = weakref.ref(old.usual.decoder.proposer.drafter)
    clients = [Client([5, 1, 3], 120, sampling, endless=True, seed=1) for sampling in (Sampling(), Sampling(0.5))]
    paused, goes_on = threading.Event(), threading.Event()

    def pause_after_two() -> None:
        paused.set()
        assert goes_on.wait(30)

    clients[0].call_after_two_events(pause_after_two)
    for client in clients:
        client.ask(engine)
    assert paused.wait(30)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(swap, url, "noised")
        late = Client([5, 1, 3], 60, endless=True).ask(engine)
        goes_on.set()
        loading.result()
        assert engine.drafts is not old and engine.drafts.drafter.version == "noised"
    for client in [*clients, late]:
        client.wait()
    for client in clients:
        assert {served_round.accepted for served_round in client.rounds[1:-1]} == {DEPTH} and len(client.rounds) > 10
    await_that(lambda: engine.draining is None)
    new = Client([5, 1, 3], 60, endless=True).ask(engine)
    new.wait()
    assert sum(served_round.accepted for served_round in new.rounds) / len(new.rounds) < DEPTH - 0.5
    assert new.tokens == clients[0].tokens[:60] == late.tokens
    assert all(client.job.lane is None and client.job.drafter is old.drafter for client in clients)
    del old  # and not the jobs, whose clients may not have read the end
    await_that(lambda: gc.collect() >= 0 and head() is None)


def test_the_first_head_is_freed_with_the_default_proposer(folder, monkeypatch):
    monkeypatch.setattr(costs, "SECONDS", 0.0)
    with serving(folder, "proposer=auto", "rows=1") as (url, served):
        head = weakref.ref(served.engine.drafts.usual.decoder.proposer.head.drafter)
        for name in ("noised", "good"):
            ask(url, "a b")
            swap(url, name)
        await_that(lambda: served.engine.draining is None and gc.collect() >= 0 and head() is None)


def test_rows_name_the_head_that_answered(folder, tmp_path):
    with serving(folder, f"record={tmp_path / 'rows'}") as (url, _):
        ask(url, "a b")
        swap(url, "noised")
        ask(url, "a b")
        ask(url, "a b", speculate=False)
    (file,) = (tmp_path / "rows").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["head"] for row in rows] == ["heads/good", "heads/noised", None]
    assert [row["head_version"] for row in rows] == [None, "noised", None]


@pytest.mark.full
def test_captured_rounds_are_those_of_each_head(folder, monkeypatch):
    recorder = StepRecorder(monkeypatch)
    monkeypatch.setattr(compile, "capture_graph", lambda function, *_: function)
    monkeypatch.setattr(drafts, "WARM_UP_SAMPLINGS", [Sampling()])  # others read values here, which a GPU does not
    with fast.force_paths("cache"), serving(folder, "decode.cuda_graphs=true", "rows=1") as (url, served):
        plain, _ = stream_answer(url, PROMPTS[0], temperature=0, speculate=False)
        for name in ("noised", "good"):
            long = Client([5, 1, 3], 60, endless=True).ask(served.engine)
            num_captured = len(recorder.captured)
            swap(url, name)
            assert len(recorder.captured) > num_captured
            tokens, usage = stream_answer(url, PROMPTS[0], temperature=0)
            assert tokens == plain and (usage["speculation"]["rounds"] == 10) == (name == "good")
            long.wait()
    assert recorder.num_starts


# What is refused

REFUSED = [
    ("../outside", 403, "allow_weights="),
    ("link", 403, "allow_weights="),
    ("/etc", 403, "allow_weights="),
    ("run", 400, "not inside it"),
    ("nothing", 400, "does not exist"),
    ("file", 400, "is a file, and no checkpoint"),
    (".", 400, "a folder with some"),
    ("loop", 400, "loop"),
    ("a\0b", 400, "null byte"),
    ("a" * 300, 400, "File name too long"),
    ("damaged", 400, "SHA256SUMS"),
    ("partly", 400, "outside of"),
    ("other", 400, "Use it with its own target"),
    ("words", 400, "Use it with its own target"),
    ("adapting", 400, "changes the target"),
]


def test_what_is_no_head_of_the_target_is_refused_and_the_present_head_goes_on(server):
    url, served = server
    swap(url, "good")
    present = served.engine.drafts
    for name, status, sentence in REFUSED:
        message = read_error(load(url, name, "bad"), status)
        assert sentence in message and "\n" not in message, name
    for body in ({"folder": "good"}, {"folder": "", "version": "a"}, {"folder": "good", "version": 3}):
        read_error(httpx.post(f"{url}/v1/draft_weights", json=body))
    read_error(httpx.post(f"{url}/v1/draft_weights", content=b"{}"), 415)
    assert served.engine.drafts is present and measure_tau(url) > DEPTH + 0.9


def test_a_server_that_was_not_told_so_takes_no_weights(folder):
    served = load_server(read_options(folder))
    with running(make_app(served)) as url:
        assert "start it with allow_weights=FOLDER" in read_error(load(url, "good"), 403)
        assert describe(url) == {"checkpoint": "heads/good", "version": None, "takes_weights": False, "drafts": DEPTH}


def test_folders_and_heads_with_which_no_weights_can_be_taken_are_refused_at_the_start(folder):
    allowed = f"allow_weights={folder / 'heads'}"
    for arguments, sentence in (
        (["allow_weights=/nowhere"], "allow_weights=/nowhere is no folder"),
        ([allowed, "proposer=ngram", "checkpoint=null"], "proposer=ngram holds no trained head"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_server(read_options(folder, *arguments))


def test_a_head_that_fails_in_its_first_passes_changes_nothing(server, monkeypatch):
    url, served = server
    present, propose = served.engine.drafts, HeadProposer.propose

    def fail(proposer, sampling, generator):
        if threading.current_thread().name == "engine" and proposer is not present.usual.decoder.proposer:
            raise MemoryError("no memory is left")
        return propose(proposer, sampling, generator)

    monkeypatch.setattr(HeadProposer, "propose", fail)
    assert "The memory of this machine is full" in read_error(load(url, "noised"), 500)
    assert served.engine.drafts is present and ask(url, "a b").status_code == 200


def test_loads_beside_one_are_refused_and_one_waits_for_answers_of_the_head_before(server, monkeypatch):
    url, served = server
    engine, goes_on = served.engine, threading.Event()
    client = Client([5, 1, 3], 300, endless=True)
    client.call_after_two_events(lambda: client.job.lane and loading_begins.set())
    loading_begins = threading.Event()
    run_round = Batch.run_round

    def run_slowly(batch):
        time.sleep(0 if goes_on.is_set() else 0.01)
        return run_round(batch)

    monkeypatch.setattr(Batch, "run_round", run_slowly)
    client.ask(engine)
    assert loading_begins.wait(30)
    swap(url, "eagle")
    assert engine.draining is not None
    with ThreadPoolExecutor() as pool:
        third = pool.submit(swap, url, "good")
        await_that(served.weights.lock.locked)
        assert "being loaded" in read_error(load(url, "noised"), 409)
        assert engine.drafts.drafter.version == "eagle" and not third.done()
        goes_on.set()
        client.wait()
        third.result()
    assert engine.drafts.drafter.version == "good"


def test_a_path_is_looked_up_again_after_the_wait_for_answers(folder, server, monkeypatch):
    """A link that leads out of the folder meanwhile is not followed."""
    _, served = server
    link = folder / "heads" / "moving"
    link.symlink_to(folder / "heads" / "good")

    def wait_while_the_link_moves() -> bool:
        link.unlink()
        link.symlink_to(folder / "outside")
        return True

    monkeypatch.setattr(served.engine, "await_drained", wait_while_the_link_moves)
    with pytest.raises(RequestError, match=r"and not from .*outside: allow that one"):
        served.weights.load("moving", "a")
    link.unlink()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_dies_ends_the_load_that_waits_for_it(folder, monkeypatch):
    served = load_server(read_options(folder, f"allow_weights={folder / 'heads'}"))
    engine = served.engine

    def die(_) -> None:
        raise SystemExit

    monkeypatch.setattr(engine, "_go_on_replacing", die)
    engine.start()
    with pytest.raises(RequestError, match="is stopping"):
        served.weights.load("noised", "a")
    assert engine.stopping and not engine.submit(Client([5, 1, 3]).job)


def test_a_server_that_stops_takes_no_weights(folder):
    served = load_server(read_options(folder, f"allow_weights={folder / 'heads'}"))
    served.engine.start()
    served.engine.stop()
    with pytest.raises(RequestError, match="is stopping"):
        served.weights.load("noised", "a")
    assert not served.weights.lock.locked()


def test_a_server_that_is_told_to_stop_finishes_answers_and_the_load_that_waits_for_them(folder):
    with ThreadPoolExecutor() as pool:
        with serving(folder, f"checkpoint={folder / 'heads' / 'eagle'}") as (url, served):
            client = Client([5, 1, 3], 300, endless=True).ask(served.engine)
            swap(url, "noised")
            loading = pool.submit(swap, url, "good")
            await_that(served.weights.lock.locked)
        assert loading.result() > 0 and client.wait().reason == "length" and len(client.tokens) == 300
