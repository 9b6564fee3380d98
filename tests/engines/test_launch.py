"""launch_engine with engine=: what it reads of an export, the commands, refusals, and the end of all processes."""

import contextlib
import io
import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import launch_engine
from specdec.engines import gguf, installed, start_lines
from specdec.engines.launch import answers, exit_at_signals, make_url, open_server, run_server
from specdec.engines.start_lines import StartLine
from tests.support.commands import ROOT, child_environment
from tests.support.exports import export, make_exact
from tests.support.small_server import SmallServer
from tests.support.targets import save_target
from tests.support.together import free_ports


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and exports of two of its heads."""
    folder = tmp_path_factory.mktemp("launched")
    target = save_target(folder / "target")
    torch.manual_seed(0)
    for head, formats in (("draft", ("vllm", "gguf", "transformers")), ("mtp", ("vllm",))):
        for name in formats:
            export(make_exact(target, head), name, folder / f"{head}-{name}", dtype=torch.float32)
    return folder


@pytest.fixture
def launch(folders, run_script, monkeypatch):
    """launch(key=value ..) -> words of the printed command"""
    monkeypatch.setattr(gguf, "convert_to_gguf", None)  # nothing is converted for a printed command

    def run(*arguments: str) -> list[str]:
        common = ["print=true", f"target.name={folders}/target", "target.dtype=float32", f"folder={folders}/converted"]
        return shlex.split(run_script(launch_engine, *common, *arguments))

    return run


def read_flags(words: list[str]) -> dict[str, str]:
    return dict(zip(words, words[1:]))


def test_vllm_is_started_as_the_card_says(folders, launch):
    moved = folders / "moved"
    if not moved.exists():
        (folders / "draft-vllm").rename(moved)
    flags = read_flags(launch("engine=vllm", f"export={moved}", "drafts=5", "max_model_len=99", "more=--seed 3"))
    settings = json.loads(flags["--speculative-config"])
    assert settings["method"] == "draft_model" and settings["model"] == str(moved)
    assert settings["num_speculative_tokens"] == 5 and flags["--generation-config"] == "vllm"
    assert (flags["--model"], flags["--max-model-len"], flags["--seed"]) == (str(folders / "target"), "99", "3")
    flags = read_flags(launch("engine=vllm", f"export={folders}/mtp-vllm"))
    assert json.loads(flags["--hf-overrides"]) == {"num_nextn_predict_layers": 1}
    assert json.loads(flags["--speculative-config"])["num_speculative_tokens"] == 3
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        words = launch("engine=vllm", f"export={folders}/mtp-vllm", "weights=true")
        assert "warning" not in notes.getvalue()
        launch("engine=vllm", f"export={folders}/mtp-vllm", "weights=true", "host=0.0.0.0")
    assert "warning: anyone who reaches 0.0.0.0:8000 can change this server" in notes.getvalue()
    assert "VLLM_SERVER_DEV_MODE=1" in words and json.loads(read_flags(words)["--weight-transfer-config"])
    settings = json.loads(read_flags(launch("engine=vllm", "draft=suffix"))["--speculative-config"])
    assert settings == {"method": "suffix", "num_speculative_tokens": 10}
    assert "--speculative-config" not in launch("engine=vllm")


def test_llama_cpp_gets_files_that_are_made_later(folders, launch):
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        options = json.loads(launch("engine=llamacpp", f"export={folders}/draft-gguf")[-1])
    assert (options["kind"], options["num"], options["settings"]) == ("DRAFT_SIMPLE", 3, {})
    names = {key: Path(options[key]).parent.name for key in ("gguf", "draft")}
    assert names["gguf"].startswith("target-") and names["draft"].startswith("draft-gguf-")
    assert f"{names['draft']} is made from {folders}/draft-gguf by the same command" in notes.getvalue()
    assert not (folders / "converted").exists()
    looked_up = json.loads(launch("engine=llamacpp", "draft=ngram", "drafts=4")[-1])
    assert looked_up["gguf"] == options["gguf"] and looked_up["draft"] is None
    assert (looked_up["kind"], looked_up["settings"]) == ("NGRAM_SIMPLE", {"size_m": 4})
    assert json.loads(launch("engine=llamacpp")[-1])["kind"] is None


def test_a_gguf_file_is_made_again_for_another_head(tmp_path, monkeypatch):
    """Also where the other head has older files, and for the words python= of the command."""
    calls = []

    def convert(model, out, **options):
        calls.append(options["python"])
        Path(out).write_text((Path(model) / "model.safetensors").read_text())

    monkeypatch.setattr(gguf, "convert_to_gguf", convert)
    for name in ("old", "exported"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(f"{name[:3]} head")
    start = start_lines.EngineStart(str(tmp_path / "exported"), 1, "float32", folder=tmp_path / "kept", python="py")
    file = Path(start_lines.convert_models(start, None)[0])
    assert file.read_text() == "exp head" and start_lines.convert_models(start, None) == (str(file), None)
    (tmp_path / "exported").rename(tmp_path / "moved")
    (tmp_path / "old").rename(tmp_path / "exported")
    assert start_lines.convert_models(start, None) == (str(file), None)
    assert file.read_text() == "old head" and calls == ["py", "py"]
    assert [path.name for path in file.parent.parent.iterdir()] == [file.parent.name]


def test_an_engine_on_the_cpu_says_so_where_there_is_a_gpu(launch, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        launch("engine=llamacpp")
    assert "note: llamacpp runs on the CPU, though there is a GPU" in notes.getvalue()


def test_programs_behind_the_front_get_their_options(folders, launch):
    options = json.loads(launch("engine=transformers", f"export={folders}/draft-transformers", "drafts=2")[-1])
    assert options["assistant"] == str(folders / "draft-transformers") and options["drafts"] == 2
    options = json.loads(launch("engine=transformers", "target.device=cpu")[-1])
    assert options["device"] == "cpu" and options["assistant"] is None
    options = json.loads(launch("engine=openvino", "draft=ngram")[-1])
    assert options["lookup"] and options["head"] is None and options["drafts"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine=vlm"], "There is no engine=vlm. Did you mean engine=vllm"),
        (["engine=vllm", "draft=tree"], "There is no draft=tree"),
        (["engine=llamacpp", "export=FOLDERS/mtp-vllm"], "an export for vLLM, and llama.cpp does not read it: specdec"),
        (["engine=vllm", "export=FOLDERS/target"], "target has no model card of specdec export"),
        (["engine=transformers", "draft=suffix"], "transformers has no suffix tree"),
        (["engine=llamacpp", "target.name=nowhere"], "reads folders, and nowhere is none"),
        (["export=a"], "give engine=, too"),
        (["engine=vllm", "export=a", "draft=ngram"], "two drafters"),
        (["engine=vllm", "drafts=3"], "drafts= is of a drafter"),
        (["engine=transformers", "weights=true"], "weights=true is of vLLM"),
        (["engine=vllm", "layers=[1]"], "heads= and layers= are of a server with hidden states"),
        (["engine=vllm", "heads=eagle3"], "heads= and layers= are of a server with hidden states"),
        (["engine=llamacpp", "target.device=cpu"], "target.device= is of engine=transformers"),
        (["engine=vllm", "port=0"], "port"),
    ],
)
def test_what_cannot_be_started_is_a_sentence(folders, launch, arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(*[argument.replace("FOLDERS", str(folders)) for argument in arguments])


def test_engines_that_are_not_here(folders, run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "ENGINES", tmp_path)
    for engine, name in (("vllm", "vLLM"), ("openvino", "OpenVINO GenAI")):
        with pytest.raises(ValueError, match=rf"There is no {name}: .* does not exist\. `make engines` sets it up"):
            run_script(launch_engine, f"engine={engine}", f"target.name={folders}/target")


SERVER = """
import http.server, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: signal.signal(15, signal.SIG_IGN))
signal.signal(15, lambda *_: (time.sleep(0.6), sys.exit()))
print(child.pid, file=open(sys.argv[2], "w"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_url_is_printed_and_all_processes_end(tmp_path, capsys):
    port, file = int(free_ports(1)[0]), tmp_path / "child"
    line = StartLine([sys.executable, "-c", SERVER, str(port), str(file)])
    with pytest.raises(KeyboardInterrupt), interrupt_wait():
        run_server(line, "0.0.0.0", port, "served")
    assert capsys.readouterr().out == "served\n"
    assert ends(int(file.read_text()))
    assert make_url("0.0.0.0", 80) == "http://127.0.0.1:80" and make_url("::1", 80) == "http://[::1]:80"


def test_a_port_that_is_taken_and_a_server_that_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"Nothing can listen at 127.0.0.1:{port} .*Address already.*another port="
        ):
            run_server(StartLine(["/nowhere"]), "127.0.0.1", port, "served")
    line = StartLine([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ValueError, match="The server ended with status 3"):
        run_server(line, "127.0.0.1", port, "served")
    failing = StartLine([sys.executable, "-c", "import sys; print('(a) ImportError: no tree'); sys.exit(1)"])
    with (
        pytest.raises(ValueError, match=r"^It did not start: ImportError: no tree$"),
        open_server(failing, "127.0.0.1", port, log=tmp_path / "logs" / "log"),
    ):
        pass


def test_a_server_that_asks_for_a_key_answers():
    with SmallServer(lambda path, _: (401, {}) if path == "v1/models" else (200, {})) as server:
        assert answers(server.url)
    with SmallServer(lambda path, _: (503, {})) as server:
        assert not answers(server.url)


def launch_server(line: StartLine, port: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    exit_at_signals()
    run_server(line, "127.0.0.1", port, "served")


@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM]], ids=["hang-up", "twice"])
def test_nothing_is_left_by_a_launcher_that_is_stopped(tmp_path, numbers):
    """Also where a second signal comes while the server ends, and one of its processes ignores SIGTERM."""
    port, file = int(free_ports(1)[0]), tmp_path / "child"
    line = StartLine([sys.executable, "-c", SERVER, str(port), str(file)])
    launcher = multiprocessing.get_context("fork").Process(target=launch_server, args=(line, port))
    launcher.start()
    while not answers(f"http://127.0.0.1:{port}"):
        assert launcher.is_alive()
        time.sleep(0.05)
    for number in numbers:
        os.kill(launcher.pid, number)
        time.sleep(0.2)
    launcher.join(20)
    assert launcher.exitcode == 128 + numbers[0] and ends(int(file.read_text()))


def test_a_signal_ends_what_is_converted(run_script, monkeypatch):
    def convert(start):
        handler = signal.getsignal(signal.SIGTERM)
        assert all(callable(signal.getsignal(number)) for number in handlers)
        handler(signal.SIGTERM, None)

    monkeypatch.setitem(start_lines.LINES, "transformers", convert)
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as stop:
            run_script(launch_engine, "engine=transformers")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert stop.value.code == 143


@contextlib.contextmanager
def interrupt_wait():
    """The first Popen.wait raises KeyboardInterrupt."""
    plain, calls = subprocess.Popen.wait, []

    def wait(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plain(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        yield


def ends(process: int) -> bool:
    """Whether a process ends within seconds."""
    for _ in range(100):
        if not is_running(process):
            return True
        time.sleep(0.05)
    return False


def is_running(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.full
def test_transformers_is_served_by_the_command(folders):
    """From the command line to an answer, and to the end at SIGTERM."""
    port = free_ports(1)[0]
    words = [sys.executable, "-m", "scripts.launch_engine", "engine=transformers", f"port={port}",
             f"export={folders}/draft-transformers", f"target.name={folders}/target",
             "target.dtype=float32"]  # fmt: skip
    server = subprocess.Popen(words, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True)
    lines = iter(server.stdout.readline, "")
    assert any("is served at" in line for line in lines)
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 143
