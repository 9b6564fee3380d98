"""Fixtures that all tests share: tiny targets and drafters, and the same conditions on every machine."""

import gc
import os
import resource
import sys
import tempfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hydra import compose, initialize_config_dir
from markupsafe import Markup

from specdec.core import progress
from specdec.core.hub import fetch_checkpoint
from specdec.measuring import charts
from specdec.proposers import costs
from specdec.target.model import Target
from tests.support.commands import ROOT, train_command, write_rows
from tests.support.compiler import missing
from tests.support.drafters import HEADS, QUICK, VARIANTS, make_drafter, name_of
from tests.support.hub import Hub
from tests.support.runs import train_overrides
from tests.support.targets import make_target, save_target
from train.settings.hydra_text import make_search_path, quote_arguments

NUM_THREADS = os.environ.get("TEST_THREADS", "1")
torch.set_num_threads(int(NUM_THREADS))
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = NUM_THREADS  # for the processes that tests start
sys.dont_write_bytecode = False  # else each process that tests start compiles thousands of modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
COSTS = tempfile.TemporaryDirectory(prefix="specdec-costs-")
os.environ["SPECDEC_CACHE"] = COSTS.name  # not the user's
costs.SECONDS = 0.05  # what is chosen does not matter to most tests


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Keeps lines that scripts print from being wrapped, for any terminal width and any length of a path."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:  # pytest's own lines keep the terminal's width
        writer = config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth
    os.environ["COLUMNS"] = "10000"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without Python's search for unused objects, which lasts as long again, and leaves what is there out of
    each later one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks tests of variants outside QUICK as slow, so that `make quick` runs a few variants of the heads only."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        variants = [parameters[name] for name in ("any_drafter", "small_drafter") if name in parameters]
        if any(variant not in QUICK for variant in variants):
            item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def default_progress(monkeypatch):
    """What a command of an earlier test chose (`progress=`) holds neither here nor in the processes of this test."""
    monkeypatch.delenv("SPECDEC_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "_mode", "plain")


@pytest.fixture(autouse=True)
def _no_state_of_accelerate():
    """accelerate keeps the settings of the first Accelerator of a process, and refuses others later."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        if PartialState._shared_state.get("num_processes", 1) == 1:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target(61)


@pytest.fixture(scope="session")
def small_target() -> Target:
    """A target with six tokens, so that an untrained drafter is often right."""
    return make_target(6)


@pytest.fixture(scope="session", params=HEADS)
def drafter(request, target):
    return make_drafter(target, request.param)


@pytest.fixture(scope="session", params=VARIANTS, ids=name_of)
def any_drafter(request, target):
    return make_drafter(target, *request.param)


@pytest.fixture(scope="session", params=VARIANTS, ids=name_of)
def small_drafter(request, small_target):
    return make_drafter(small_target, *request.param)


@pytest.fixture
def compiler(tmp_path_factory):
    """Skips the test where inductor cannot compile for the CPU. Compiled code goes to a temporary folder."""
    if absent := missing():
        pytest.skip(f"decode.compile=true needs {absent}, which is not here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture
def traced(monkeypatch) -> None:
    """Compiled functions run as traced, without inductor, which takes seconds for each function."""
    import torch._inductor

    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: module)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hugging Face Hub, which the test's process uses, as the user of `token`, with an empty
    cache.
    """
    with Hub(hf_user="user", hf_other="other") as served:
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_user")
        fetch_checkpoint.cache_clear()
        yield served
        fetch_checkpoint.cache_clear()
        huggingface_hub.close_session()


@pytest.fixture
def marker(tmp_path):
    """Is made if any code of a hostile file runs."""
    path = tmp_path / "code-has-run"
    yield path
    assert not path.exists()


@pytest.fixture
def little_memory():
    """Within a test, the process may take 8 GiB more than it has, so that taking what a file asks for fails at once."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# Commands


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "key=value", ...) -> what the script printed"""

    def run(script, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        script.main()
        return capsys.readouterr().out

    before = os.environ.get(progress.VARIABLE)
    yield run
    progress.choose_mode(before or "auto", main=True)  # not what a script of this test was told by progress=
    if before is None:
        del os.environ[progress.VARIABLE]


@pytest.fixture
def run(run_script):
    """`run_script`; test files replace it by a function that adds arguments of their own."""
    return run_script


@pytest.fixture
def refuse(run):
    """refuse(message, arguments ...): asserts that `run` with these arguments raises a ValueError with that message."""

    def refuse(message: str, *arguments) -> None:
        with pytest.raises(ValueError, match=message):
            run(*arguments)

    return refuse


# Training

ANSWERS = [f"{number} is followed by {number + 1}, then by {number + 2}." for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny target, conversations and prompts."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target", num_layers=8)
    rows = [
        {
            "id": f"row-{n}",
            "messages": [{"role": "user", "content": f"Count from {n}."}, {"role": "assistant", "content": answer}],
        }
        for n, answer in enumerate(ANSWERS)
    ]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "prompts.jsonl", [{"prompt": "Count from 3."}, {"prompt": "Count on."}])
    return folder


@pytest.fixture
def blank_charts(monkeypatch) -> None:
    """Charts of a run's page stay empty: drawing them takes a quarter of a short run. Tests of pages replace this."""
    monkeypatch.setattr(charts, "_draw_figure", lambda *_, **__: Markup("<figure></figure>"))


@pytest.fixture
def fit(folder, tmp_path, monkeypatch, blank_charts):
    """fit(run, "key=value", ...): trains a short run in a new working directory -> exit status"""
    monkeypatch.chdir(tmp_path)

    def run(name, *overrides):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose(
                "train", overrides=[*quote_arguments(train_overrides(folder, name, *overrides)), make_search_path()]
            )
        (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        return train_command().fit(config)

    return run
