"""Tests of the wheel: without the extras, `pip install .` gives a package that decodes with drafts."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from specdec.heads.medusa import Medusa2
from tests.support import REAL_TARGET, ROOT, child_environment, save_target

pytestmark = pytest.mark.slow

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Modules of the extras; their names can differ from those of the packages
HIDDEN = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in EXTRAS["train"]} | {"hydra", "omegaconf", "train"}
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
from specdec import checkpoint
from specdec.decode import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.tree import TreeShape

torch.set_num_threads(1)
target = Target.load(sys.argv[1], dtype="float32")
drafter = checkpoint.load(sys.argv[2], target)
prompt, generations = [[1, 9690, 198, 2683, 359, 253, 5356, 2, 198]], []
for proposer in (None, HeadProposer(drafter, TreeShape(depth=3, width=1, nodes=3))):
    generations.append(Decoder(target, proposer, sampling=Sampling(), stop=set()).generate(prompt, 24))
print(json.dumps({"file": specdec.__file__, "same": generations[0].tokens == generations[1].tokens,
                  "accepted": sum(generations[1].accepted[0]), "modules": sorted(sys.modules)}))
"""
LOAD = """
from specdec import checkpoint
from specdec.target import Target

try:
    checkpoint.load(sys.argv[2], Target.load(sys.argv[1], dtype="float32"))
except ValueError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of its sources without a network, and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "specdec", source / "specdec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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


def test_the_wheel_holds_every_package(wheel):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "specdec").rglob("*.py")}
    built = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*.py")}
    assert built == {path.replace(os.sep, "/") for path in sources}
    (metadata,) = wheel.glob("specdec-*.dist-info/METADATA")
    required = {line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist") and "extra" not in line}  # fmt: skip
    names = {re.match(r"Requires-Dist: ([\w-]+)", line)[1] for line in required}
    assert names == {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"}


def test_a_shipped_head_drafts_without_the_extras(wheel):
    result = json.loads(run_bare(wheel, DECODE, REAL_TARGET, ROOT / "checkpoints" / "shipped" / "mtp"))
    assert result["file"] == str(wheel / "specdec" / "__init__.py")
    assert result["same"] and result["accepted"] > 3
    assert not {name.partition(".")[0] for name in result["modules"]} & HIDDEN


def test_a_head_that_adapts_its_target_names_the_extra_that_it_needs(wheel, tmp_path):
    target = save_target(tmp_path / "target")
    shape = {"num_heads": 2, "lora_rank": 2}
    torch.manual_seed(0)
    drafter = Medusa2(target, **shape)
    checkpoint.save(tmp_path / "head", drafter.decodable(), {"_target_": "specdec.heads.medusa.Medusa2", **shape})
    printed = run_bare(wheel, LOAD, tmp_path / "target", tmp_path / "head")
    assert re.search(r"refused: .*peft.*pip install 'specdec\[train\]'", printed), printed
