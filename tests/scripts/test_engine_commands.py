"""Tests of launch_engine.py, with vLLM itself where `make engines` has set it up."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.engines import llamacpp
from scripts import answer, export, judge, launch_engine
from specdec import checkpoint
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.engines import launch
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget, apply_final_norm
from specdec.heads.draft import Draft
from specdec.target.model import Target, load_tokenizer
from specdec.text import conversations as data
from tests.benchmarks import tiny_heads
from tests.quantised import CONFIGS, quantise
from tests.support import REAL_TARGET, ROOT, child_environment, write_prompts

engines = pytest.mark.skipif(
    not (ROOT / "engines" / "ready").is_file(), reason="the engines are not installed: make engines"
)
real = pytest.mark.skipif(not REAL_TARGET.exists(), reason="needs make setup")
pytestmark = [pytest.mark.full, real]


def call(monkeypatch, script, *arguments: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    script.main()


def test_the_printed_command_serves_what_the_heads_read(monkeypatch, capsys):
    call(monkeypatch, launch_engine, "print=true", "heads=eagle3,eagle", "max_model_len=99999",
         "more=--tensor-parallel-size 4 --gpu-memory-utilization 0.5", "folder=/tmp/states")  # fmt: skip
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
    call(monkeypatch, launch_engine, "print=true", "layers=[3,1]")
    assert r'"eagle_aux_hidden_state_layer_ids": [1, 3, 30]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads=eagle4"], "heads=eagle4: there is no head of that name. There are .*eagle3"),
        (["layers=[a]"], r"layers=\[a\] must be a list of numbers"),
        (["layers=[99]"], r"layers=\[99\] must be a list of numbers.*has hidden states 0\.\.30"),
        (["python=/nowhere/python"], "There is no vLLM: /nowhere/python does not exist"),
        (["target.name=targets/nothing"], "The folder targets/nothing does not exist"),
    ],
)
def test_wrong_options_are_named(monkeypatch, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, launch_engine, *arguments)


def test_a_vllm_that_ends_is_told_and_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="vLLM ended with status 1"):  # this Python has no vLLM
        call(monkeypatch, launch_engine, f"python={sys.executable}", "port=9")
    assert not list(tmp_path.iterdir())


@engines
def test_vllm_is_the_only_holder_of_the_target_and_dies_once(tmp_path):
    """Features and validation from the engine, on the real target, with the commands of docs/engines.md."""
    port = free_port()
    environment = child_environment(HF_HUB_OFFLINE="1")
    log = (tmp_path / "engine.log").open("w")

    def launch() -> subprocess.Popen:
        command = [
            sys.executable,
            "scripts/launch_engine.py",
            f"port={port}",
            "max_model_len=512",
            "more=--enforce-eager",
        ]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)

    def end(engine: subprocess.Popen, number: int) -> None:
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(engine.pid)], capture_output=True, text=True).stdout
        for server in map(int, found.split()):  # in a process group of its own, with vLLM's other processes
            os.killpg(server, number)
        os.kill(engine.pid, number)
        engine.wait()

    engine = launch()
    try:
        wait_for(port, tmp_path / "engine.log")
        command = [sys.executable, str(ROOT / "train.py"), "head=eagle3", "run=served", "features.mode=engine", f"features.engine=http://127.0.0.1:{port}",
                   f"target.name={REAL_TARGET}", f"data.train={ROOT}/data/train.jsonl", f"data.heldout={ROOT}/data/prompts_heldout.jsonl",
                   "data.limit=24", "data.length=256", "train.steps=12", "train.log_every=1", "solve_packs=2", "validation.num_prompts=3",
                   "validation.max_new_tokens=16", "threads=2"]  # fmt: skip
        run = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = []
        for line in run.stdout:
            said.append(line)
            if line.startswith("step     4/"):
                break
        assert run.poll() is None, "".join(said)
        end(engine, signal.SIGKILL)
        engine = launch()
        rest = run.stdout.read()
        assert run.wait() == 0, rest
        assert "does not answer" in rest and "answers again" in rest
        (report,) = Path(tmp_path, "checkpoints/served").glob("step_*/report.json")
        assert json.loads(report.read_text())["replayed_tau"] > 1
    finally:
        end(engine, signal.SIGTERM)


LLAMA_CPP = """
import sys, time, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.port, given.n_gpu_layers = sys.argv[1], int(sys.argv[3]), 0
given.n_ctx, given.n_parallel, given.fit_params, given.endpoint_metrics = 2048, 2, False, True
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
given.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
draft = given.speculative.draft
draft.mparams.path, draft.n_gpu_layers, draft.n_max, draft.n_min, draft.p_min = sys.argv[2], 0, 3, 0, 0.0
draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
given.cache_type_k = given.cache_type_v = draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(given)
time.sleep(3600)
"""


@pytest.mark.engines
@engines
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_running_engine_is_judged_as_check_engines_does(engine, tmp_path, monkeypatch):
    """A draft model that is right in part: tau by the engine's counters is that of this project's decoder and of replay."""
    monkeypatch.chdir(ROOT)
    target = tiny_heads.make_target(tmp_path / "target", tokenizer=str(REAL_TARGET))
    torch.manual_seed(0)
    head = Draft(target, copy_layers=list(range(target.num_layers))).eval()
    for parameter in head.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    checkpoint.save(tmp_path / "head", head, {"_target_": "specdec.heads.draft.Draft"})
    python, port, log = str(ROOT / "engines" / "bin" / "python"), free_port(), tmp_path / "engine.log"
    name = {"vllm": "vllm", "llamacpp": "gguf"}[engine]
    export.main(
        [f"checkpoint={tmp_path / 'head'}", f"format={name}", f"out={tmp_path / 'export'}", "target.dtype=float32"]
    )
    if engine == "vllm":
        speculative = {"method": "draft_model", "model": str(tmp_path / "export"), "num_speculative_tokens": 3}
        arguments = [
            "--model",
            target.name,
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--max-model-len",
            "256",
            "--enforce-eager",
        ]
        arguments += ["--gpu-memory-utilization", "0.2", "--speculative-config", json.dumps(speculative)]
        arguments += ["--per-request-spec-decode-metrics", "detailed"]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    else:
        llamacpp.convert_to_gguf(target.name, str(tmp_path / "target.gguf"))
        llamacpp.convert_to_gguf(str(tmp_path / "export"), str(tmp_path / "head.gguf"))
        command = [python, "-c", LLAMA_CPP, str(tmp_path / "target.gguf"), str(tmp_path / "head.gguf"), str(port)]
    threads = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        environment = child_environment(HF_HUB_OFFLINE="1", **threads)
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(port, log)
        write_prompts(tmp_path / "prompts.jsonl", 4)
        judge.main([f"engine=http://127.0.0.1:{port}", f"checkpoint={tmp_path / 'head'}", f"prompts={tmp_path / 'prompts.jsonl'}",
                       "target.dtype=float32", "max_new_tokens=24", "ignore_stop=true", "batch=1,2", f"out={tmp_path / 'out'}"])  # fmt: skip
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    prompts = [
        prompt.tokens for prompt in data.load_prompts(str(tmp_path / "prompts.jsonl"), load_tokenizer(target.name))
    ]
    decoder = Drafting(depth=3).decoder(target, Drafting(depth=3).proposer(head), sampling=Sampling(), stop=set())
    reference = decoder.generate(prompts, 24)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    served = [answer for row in rows for answer in row["drafted"]["answers"]]  # llama.cpp rounds near ties otherwise
    same = [
        (each["said"], reference.accepted[int(each["prompt"])])
        for each in served
        if each["ids"] == reference.tokens[int(each["prompt"])]
    ]
    assert len(same) >= (8 if engine == "vllm" else 4)
    assert all(said["accepted"] == sum(accepted) for said, accepted in same)
    for level in report["server"]["levels"]:
        found = level["replay"]
        assert 1.1 < found["served_tau"] < 3.9 and found["served_tau"] == pytest.approx(found["replayed_tau"])
        assert found["depth"] == 3 and found["same_number_of_rounds"] == 4 and not found["differences"]
        assert found["compared_by_round"] == (4 if engine == "vllm" else 0)
        assert level["tau"] == pytest.approx(found["served_tau"]) and 1 + sum(level["survival"]) >= level["tau"] - 1e-9


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path):
    """A server while it is used, started from the clone's folder."""
    with log.open("w") as written:
        server = subprocess.Popen(
            command, cwd=ROOT, env=child_environment(HF_HUB_OFFLINE="1"), stdout=written, stderr=written
        )
        try:
            wait_for(port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def answer_some(folder: Path, target: Path, url: str, *, num: int) -> list[dict]:
    arguments = [f"engine={url}", f"target.name={target}", f"prompts={ROOT}/data/prompts_heldout.jsonl", f"limit={num}"]
    answer.main([*arguments, f"out={folder}/rows.jsonl", "max_new_tokens=24", "decode.temperature=0"])
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@engines
@pytest.mark.parametrize("method", CONFIGS)
def test_vllm_answers_and_reads_for_a_quantised_target(tmp_path, method):
    folder, port = quantise(REAL_TARGET.resolve(), tmp_path / method, method), free_port()
    command = [sys.executable, "scripts/launch_engine.py", f"port={port}", "max_model_len=512", "more=--enforce-eager",
               f"target.name={folder}"]  # fmt: skip
    with running(command, port, tmp_path / "log") as url:
        rows = answer_some(tmp_path, folder, url, num=3)
        ends, plain = Target.load_ends(str(folder)), Target.load(str(REAL_TARGET))
        assert {row["target_fingerprint"] for row in rows} == {ends.fingerprint()}
        with contextlib.closing(EngineClient(url)) as client:
            served, ids = EngineTarget(client, ends, (2,)), torch.tensor(rows[0]["tokens"])
            final = apply_final_norm(ends, served.submit(ids, (30,)).result()[0], (30,))
            with pytest.raises(ValueError, match=r"serves .* weights .*, and the target here has unquantised weights"):
                EngineTarget(client, plain, (2,))
    (made, wanted) = ends.logits(final).float(), plain.logits(plain.read(ids[None], ()).final)[0].float()
    assert 0.01 * wanted.norm() < (made - wanted).norm() < 0.5 * wanted.norm()
    start = rows[0]["prompt_tokens"]
    chosen = made[start - 1 : -1].argmax(-1)  # states of the served weights explain the served answer
    assert (chosen == ids[start:]).float().mean() > 0.9


@engines
def test_llama_cpp_answers_from_a_quantised_file(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    llamacpp.convert_to_gguf(str(REAL_TARGET), str(tmp_path / "q8.gguf"), outtype="q8_0")
    port = free_port()
    program = (
        "import sys, time, xllamacpp as x; p = x.CommonParams(); p.model.path, p.n_gpu_layers, p.port = sys.argv[1], 0, "
        "int(sys.argv[2]); p.n_ctx, p.n_parallel, p.fit_params = 2048, 2, False; s = x.Server(p); time.sleep(1000)"
    )
    command = ["engines/bin/python", "-c", program, str(tmp_path / "q8.gguf"), str(port)]
    with running(command, port, tmp_path / "log") as url:
        rows = answer_some(tmp_path, REAL_TARGET, url, num=3)
        with contextlib.closing(EngineClient(url)) as client, pytest.raises(ValueError, match="gives answers only"):
            EngineTarget(client, Target.load_ends(str(REAL_TARGET)), (2,))
    assert {row["target_fingerprint"].partition("-")[2] for row in rows} == {"gguf-q8_0"}
    plain = Target.load(str(REAL_TARGET))
    for row in rows:
        ids, start = torch.tensor(row["tokens"]), row["prompt_tokens"]
        chosen = plain.logits(plain.read(ids[None], ()).final)[0].argmax(-1)
        assert (chosen[start - 1 : -1] == ids[start:]).float().mean() > 0.8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, log: Path) -> None:
    for _ in range(240):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-2000:])
