"""launch_engine.py and running servers, with the real target, where `make engines` has set vLLM and llama.cpp up."""

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from scripts import answer, export, judge, launch_engine
from specdec import checkpoint
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.engines import launch
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget, apply_final_norm
from specdec.engines.gguf import convert_to_gguf
from specdec.heads.draft import Draft
from specdec.target.model import Target, load_tokenizer
from specdec.text import conversations as data
from tests.engines import tiny_heads
from tests.engines.test_served_heads import IS_READY, PYTHON, engines
from tests.support.commands import ROOT, child_environment, write_prompts
from tests.support.quantised import SERVED, quantise
from tests.support.targets import REAL_TARGET
from tests.support.together import free_ports

installed = pytest.mark.skipif(not IS_READY, reason="the engines are not installed: make engines")
real = pytest.mark.skipif(not REAL_TARGET.exists(), reason="needs make setup")
pytestmark = [pytest.mark.full, real]


# The command


def call(monkeypatch, *arguments: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["launch_engine", *arguments])
    launch_engine.main()


def test_the_printed_command_serves_what_the_heads_read(monkeypatch, capsys):
    call(monkeypatch, "print=true", "heads=eagle3,eagle", "max_model_len=99999", "folder=/tmp/states",
         "more=--tensor-parallel-size 4 --gpu-memory-utilization 0.5")  # fmt: skip
    words = shlex.split(capsys.readouterr().out)
    flags = dict(zip(words, words[1:]))
    speculative = json.loads(flags["--speculative-config"])
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2, 15, 27, 30] and speculative["method"] == "extract_hidden_states"
    assert flags["--max-model-len"] == str(Target.load_ends(str(REAL_TARGET)).max_positions)
    assert flags["--tensor-parallel-size"] == "4" and flags["--gpu-memory-utilization"] == "0.5"
    assert "--no-enable-prefix-caching" in words
    connector = json.loads(flags["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/tmp/states"}
    assert (launch_engine.MODULES / f"{connector['kv_connector_module_path']}.py").is_file()
    assert f"PYTHONPATH={launch_engine.MODULES}" in words
    call(monkeypatch, "print=true", "layers=[3,1]")
    assert r'"eagle_aux_hidden_state_layer_ids": [1, 3, 30]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads=eagle4"], "There is no head=eagle4. Did you mean head=eagle3?"),
        (["layers=[a]"], r"layers=\[a\] must be a list of numbers"),
        (["layers=[99]"], r"layers=\[99\] must be a list of numbers.*has hidden states 0\.\.30"),
        (["python=/nowhere/python"], "There is no vLLM: /nowhere/python does not exist"),
        (["target.name=targets/nothing"], "The folder targets/nothing does not exist"),
        ([f"python={sys.executable}", "port=8999"], "The server ended with status 1"),  # this Python has no vLLM
    ],
)
def test_what_cannot_start_is_named_and_leaves_no_folder(monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, *arguments)
    assert not list(tmp_path.iterdir())


# Servers


def wait_for(port: str, log: Path) -> None:
    for _ in range(240):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-2000:])


def start(command: list[str], log: Path, **variables: str) -> subprocess.Popen:
    with log.open("a") as file:
        environment = child_environment(HF_HUB_OFFLINE="1", **variables)
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)


@contextlib.contextmanager
def running(command: list[str], port: str, log: Path, **variables: str):
    """A server while it is used, started from the clone's folder -> its URL"""
    server = start(command, log, **variables)
    try:
        wait_for(port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):  # vLLM may wait for ever
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(patience)


def launch_command(port: str, *arguments: str) -> list[str]:
    return [sys.executable, "scripts/launch_engine.py", f"port={port}", "max_model_len=512", "more=--enforce-eager",
            *arguments]  # fmt: skip


@installed
def test_vllm_is_the_only_holder_of_the_target_and_dies_once(tmp_path):
    """Features and validation from the engine, on the real target, with the commands of docs/engines.md."""
    port, log = free_ports(1)[0], tmp_path / "engine.log"

    def end(engine: subprocess.Popen, number: int) -> None:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(engine.pid)], capture_output=True, text=True).stdout
        for server in map(int, listed.split()):  # in a process group of its own, with vLLM's other processes
            os.killpg(server, number)
        os.kill(engine.pid, number)
        engine.wait()

    engine = start(launch_command(port), log)
    try:
        wait_for(port, log)
        command = [sys.executable, f"{ROOT}/train.py", "head=eagle3", "run=served", "features.mode=engine", "threads=2",
                   f"features.engine=http://127.0.0.1:{port}", f"target.name={REAL_TARGET}", "solve_packs=2",
                   f"data.train={ROOT}/data/train.jsonl", f"data.heldout={ROOT}/data/prompts_heldout.jsonl",
                   "data.limit=24", "data.length=256", "train.steps=12", "train.log_every=1",
                   "validation.num_prompts=3", "validation.max_new_tokens=16"]  # fmt: skip
        run = subprocess.Popen(command, cwd=tmp_path, env=child_environment(HF_HUB_OFFLINE="1"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        lines = list(itertools.takewhile(lambda line: not line.startswith("step     4/"), run.stdout))
        assert run.poll() is None, "".join(lines)
        end(engine, signal.SIGKILL)
        engine = start(launch_command(port), log)
        output = run.stdout.read()
        assert run.wait() == 0, output
        assert "does not answer" in output and "answers again" in output
        (report,) = Path(tmp_path, "checkpoints/served").glob("step_*/report.json")
        assert json.loads(report.read_text())["replayed_tau"] > 1
    finally:
        end(engine, signal.SIGTERM)


LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_gpu_layers = sys.argv[1], int(sys.argv[2]), 0
params.n_ctx, params.n_parallel, params.fit_params, params.endpoint_metrics = 2048, 2, False, True
server = xllamacpp.Server(params)
time.sleep(3600)
"""


@engines
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_running_engine_is_judged_as_decoded_here(engine, tmp_path, monkeypatch):
    """A draft model that is right in part: tau by the engine's counters is that of our decoder and of replay."""
    monkeypatch.chdir(ROOT)
    target = tiny_heads.make_target(tmp_path / "target", tokenizer=str(REAL_TARGET))
    torch.manual_seed(0)
    head = Draft(target, copy_layers=list(range(target.num_layers))).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    checkpoint.save(tmp_path / "head", head, {"_target_": "specdec.heads.draft.Draft"})
    name = {"vllm": "vllm", "llamacpp": "gguf"}[engine]
    export.main([f"checkpoint={tmp_path}/head", f"format={name}", f"out={tmp_path}/export", "target.dtype=float32"])
    write_prompts(tmp_path / "prompts.jsonl", 4)
    port = free_ports(1)[0]
    command = [sys.executable, "scripts/launch_engine.py", f"engine={engine}", f"export={tmp_path}/export",
               f"port={port}", f"target.name={target.name}", "target.dtype=float32", "max_model_len=256",
               "more=--enforce-eager --gpu-memory-utilization 0.2"]  # fmt: skip
    with running(command, port, tmp_path / "engine.log", OMP_NUM_THREADS="1") as url:
        judge.main([f"engine={url}", f"checkpoint={tmp_path}/head", f"prompts={tmp_path}/prompts.jsonl", "batch=1,2",
                    "target.dtype=float32", "max_new_tokens=24", "ignore_stop=true",
                    f"out={tmp_path}/out"])  # fmt: skip
    tokenizer = load_tokenizer(target.name)
    prompts = [prompt.tokens for prompt in data.load_prompts(str(tmp_path / "prompts.jsonl"), tokenizer)]
    drafting = Drafting(depth=3)
    decoder = drafting.decoder(target, drafting.proposer(head), sampling=Sampling(), stop=set())
    check_judged(tmp_path / "out", decoder.generate(prompts, 24), exact=engine == "vllm")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_judged(out: Path, reference, *, exact: bool) -> None:
    """exact: the engine reports its rounds, and rounds near ties as we do, which llama.cpp does not"""
    same = []
    for row in read_rows(out / "rows.jsonl"):
        for served in row["drafted"]["answers"]:
            number = int(served["prompt"])
            if served["ids"] == reference.tokens[number]:
                same.append((served["server_counts"]["accepted"], sum(reference.accepted[number])))
    assert len(same) >= (8 if exact else 4) and all(served == here for served, here in same)
    for level in json.loads((out / "results.json").read_text())["server"]["levels"]:
        replay = level["replay"]
        assert 1.1 < replay["served_tau"] < 3.9 and replay["served_tau"] == pytest.approx(replay["replayed_tau"])
        assert replay["depth"] == 3 and replay["same_number_of_rounds"] == 4 and not replay["differences"]
        assert replay["compared_by_round"] == (4 if exact else 0)
        assert level["tau"] == pytest.approx(replay["served_tau"])
        assert 1 + sum(level["survival"]) >= level["tau"] - 1e-9


@engines
def test_llama_cpp_drafts_for_two_requests_at_once_as_for_one(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    head, port = "checkpoints/shipped/eagle3", free_ports(1)[0]
    export.main([f"checkpoint={head}", "format=gguf", f"out={tmp_path}/export", "target.dtype=float32"])
    command = [sys.executable, "scripts/launch_engine.py", "engine=llamacpp", f"port={port}", "target.dtype=float32",
               f"export={tmp_path}/export", "max_model_len=512", f"folder={tmp_path}"]  # fmt: skip
    with running(command, port, tmp_path / "engine.log", OMP_NUM_THREADS="1") as url:
        judge.main([f"engine={url}", f"checkpoint={head}", "batch=1,2", "limit=4", "target.dtype=float32",
                    "max_new_tokens=24", "ignore_stop=true", f"out={tmp_path}/out"])  # fmt: skip
    one, two = json.loads((tmp_path / "out/results.json").read_text())["server"]["levels"]
    assert one["tau"] > 1.2 and two["tau"] == pytest.approx(one["tau"])
    assert two["replay"]["served_tau"] == pytest.approx(two["replay"]["replayed_tau"])


# Quantised targets


def answer_some(folder: Path, target: Path, url: str, *, num: int) -> list[dict]:
    arguments = [f"engine={url}", f"target.name={target}", f"prompts={ROOT}/data/prompts_heldout.jsonl", f"limit={num}"]
    answer.main([*arguments, f"out={folder}/rows.jsonl", "max_new_tokens=24", "decode.temperature=0"])
    return read_rows(folder / "rows.jsonl")


@installed
@pytest.mark.parametrize("method", SERVED)
def test_vllm_answers_and_reads_for_a_quantised_target(tmp_path, method):
    folder, port = quantise(REAL_TARGET.resolve(), tmp_path / method, method), free_ports(1)[0]
    with running(launch_command(port, f"target.name={folder}"), port, tmp_path / "log") as url:
        rows = answer_some(tmp_path, folder, url, num=3)
        ends, plain = Target.load_ends(str(folder)), Target.load(str(REAL_TARGET))
        assert {row["target_fingerprint"] for row in rows} == {ends.fingerprint()}
        with contextlib.closing(EngineClient(url)) as client:
            served, ids = EngineTarget(client, ends, (2,)), torch.tensor(rows[0]["tokens"])
            final = apply_final_norm(ends, served.submit(ids, (30,)).result()[0], (30,))
            with pytest.raises(ValueError, match=r"serves .* weights .*, and the target here has unquantised weights"):
                EngineTarget(client, plain, (2,))
    logits, expected = ends.logits(final).float(), plain.logits(plain.read(ids[None], ()).final)[0].float()
    assert 0.01 * expected.norm() < (logits - expected).norm() < 0.5 * expected.norm()
    start = rows[0]["prompt_tokens"]  # states of the served weights explain the served answer
    assert (logits[start - 1 : -1].argmax(-1) == ids[start:]).float().mean() > 0.9


@installed
def test_llama_cpp_answers_from_a_quantised_file(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    convert_to_gguf(str(REAL_TARGET), str(tmp_path / "q8.gguf"), outtype="q8_0")
    port = free_ports(1)[0]
    with running([PYTHON, "-c", LLAMA_CPP, str(tmp_path / "q8.gguf"), port], port, tmp_path / "log") as url:
        rows = answer_some(tmp_path, REAL_TARGET, url, num=3)
        with contextlib.closing(EngineClient(url)) as client, pytest.raises(ValueError, match="gives answers only"):
            EngineTarget(client, Target.load_ends(str(REAL_TARGET)), (2,))
    assert {row["target_fingerprint"].partition("-")[2] for row in rows} == {"gguf-q8_0"}
    plain = Target.load(str(REAL_TARGET))
    for row in rows:
        ids, start = torch.tensor(row["tokens"]), row["prompt_tokens"]
        best = plain.logits(plain.read(ids[None], ()).final)[0].argmax(-1)
        assert (best[start - 1 : -1] == ids[start:]).float().mean() > 0.8
