"""Tests of the wheel: the package drafts without the packages of the commands, and the commands work outside of the
clone.
"""

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import ROOT, child_environment, write_prompts, write_rows
from tests.support.drafters import save_eagle
from tests.support.runs import train_overrides
from tests.support.targets import REAL_TARGET, save_target

pytestmark = pytest.mark.full

CLONE = ("specdec", "train", "scripts", "conf")  # folders that the wheel is made of
# Packages of the console command and of training, which the package alone must not import
HIDDEN = {
    "accelerate",
    "datasets",
    "gguf",
    "hydra",
    "jinja2",
    "matplotlib",
    "omegaconf",
    "peft",
    "rich",
    "tensorboard",
    "train",
    "wandb",
}
# Runs in an interpreter without site-packages and .pth files, in which the modules of the extras cannot be found.
BARE = """
import importlib.machinery, json, sys
wheel, packages, hidden, script, *arguments = json.loads(sys.argv[1])

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
sys.path += [wheel, *packages]
sys.argv = ["script", *arguments]
exec(script)
"""
DECODE = """
import torch
import specdec

torch.set_num_threads(1)
target = specdec.load_target(sys.argv[1], dtype="float32")
head, drafting = specdec.load_head(sys.argv[2], target), specdec.Drafting(depth=3)
prompt, generations = [[1, 9690, 198, 2683, 359, 253, 5356, 2, 198]], []
for proposer in (None, drafting.proposer(head)):
    decoder = specdec.Decoder(target, proposer, sampling=specdec.Sampling(), stop=set())
    generations.append(decoder.generate(prompt, 24))
print(json.dumps({"file": specdec.__file__, "same": generations[0].tokens == generations[1].tokens,
                  "accepted": sum(generations[1].accepted[0]), "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of its sources without a network, and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in CLONE:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "train.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    process = subprocess.run(
        [*command, "--wheel-dir", folder, source], capture_output=True, text=True, env=child_environment()
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def run_bare(wheel: Path, script: str, *arguments) -> str:
    """The output of a script that can import only the wheel, torch, transformers and their requirements."""
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    arguments_json = json.dumps([str(wheel), packages, sorted(HIDDEN), script, *map(str, arguments)])
    environment = {**child_environment(), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-S", "-c", BARE, arguments_json]
    process = subprocess.run(command, capture_output=True, text=True, cwd=wheel, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_wheel_holds_every_package_and_what_the_commands_need(wheel):
    paths = [path for name in CLONE for path in (ROOT / name).rglob("*")]
    sources = {path.relative_to(ROOT) for path in paths if path.is_file() and "__pycache__" not in path.parts}
    sources.add(Path("train.py"))
    expected = {path if path.parts[0] == "specdec" else Path("specdec", "_clone", path) for path in sources}
    built = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    assert {path for path in built if "dist-info" not in path.parts[0]} == expected


def test_the_command_works_outside_of_the_clone(wheel, tmp_path):
    """Decoding, exporting, and training with its refusal of data that only the clone has."""
    target = save_target(tmp_path / "target")
    save_eagle(tmp_path / "head", target)
    write_prompts(tmp_path / "prompts.jsonl", 2)
    settings = [f"checkpoint={tmp_path}/head", f"target.name={tmp_path}/target", "target.dtype=float32"]

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = {**child_environment(), "PYTHONPATH": str(wheel), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "specdec.command", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert "tau" in run("generate", *settings, "prompt=Say hello", "max_new_tokens=8", "proposer=ngram").stdout
    assert " tensors, " in run("export", *settings, "out=exported", "format=vllm").stdout
    assert run("evaluate", *settings, "prompts=prompts.jsonl", "max_new_tokens=4", "auto=false").returncode == 0
    assert json.loads((tmp_path / "evaluation" / "results.json").read_text())["results"][0]["identical_outputs"] == 1
    words = shlex.split(run("launch_engine", "print=true", "layers=[1]", *settings[1:]).stdout)
    modules = words[0].removeprefix("PYTHONPATH=")
    assert Path(modules, "hidden_states_connector.py").is_file() and modules.startswith(str(wheel))
    refused = run("evaluate", *settings)
    assert (
        "There is no file data/prompts_heldout.jsonl" in refused.stderr and "are folders of the clone" in refused.stderr
    )
    rows = [
        {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": f"Hello world {n}"}]}
        for n in range(9)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    trained = run(
        "train", "head=eagle", *train_overrides(tmp_path, "run", "data.hold_out=0", "validation.num_prompts=2")
    )
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "run" / "finished").exists()


def test_a_shipped_head_drafts_without_the_extras(wheel):
    result = json.loads(run_bare(wheel, DECODE, REAL_TARGET, ROOT / "checkpoints" / "shipped" / "mtp"))
    assert result["file"] == str(wheel / "specdec" / "__init__.py")
    assert result["same"] and result["accepted"] > 3
    assert not {name.partition(".")[0] for name in result["modules"]} & HIDDEN
