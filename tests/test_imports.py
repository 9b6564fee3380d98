"""Tests of the direction of imports: scripts -> train -> specdec, and inside specdec from floor to floor."""

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

# A file imports modules of its own floor and of floors before it.
FLOORS = [
    "core",
    "target",
    "heads",
    "unroll",
    "proposers",
    "decoding",
    "measuring",
    "export",
    "checkpoint",
    "server",
    "hf",
    "command",
]
FILES = sorted((ROOT / "specdec").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it. `from a import b` counts as a and as a.b, as b may be a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def floor(module: str) -> int:
    """The place in FLOORS of a module of specdec; -1 for the package itself."""
    parts = module.split(".")
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] != "__version__" else -1


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_specdec_imports_follow_the_floors(path):
    names = imported(path)
    assert not {name.split(".")[0] for name in names} & {"train", "scripts", "hydra", "omegaconf", "accelerate"}
    own = {name for name in names if name.startswith("specdec.")}
    if path == ROOT / "specdec" / "__init__.py":
        return
    above = {name for name in own if floor(name) > floor(module_of(path))}
    assert not above, f"{path.name} imports from floors above its own: {above}"


def test_no_module_of_specdec_imports_itself_through_others():
    lazy = ROOT / "specdec" / "__init__.py"  # it imports what it offers when that is used
    graph = {module_of(path): imported(path) for path in FILES if path != lazy}
    graph = {name: {other for other in others if other in graph and other != name} for name, others in graph.items()}
    while free := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"modules that import one another in a circle: {sorted(graph)}"


@pytest.mark.parametrize("path", sorted((ROOT / "train").rglob("*.py")), ids=lambda path: path.name)
def test_train_does_not_import_hydra_or_scripts(path):
    configuration = set() if path.name == "overrides.py" else {"hydra", "omegaconf"}  # a part of train.py
    assert not {name.split(".")[0] for name in imported(path)} & {"scripts", *configuration}


@pytest.mark.parametrize("folder", ["specdec", "train", "scripts"])
def test_nothing_imports_a_benchmark(folder):
    names = set().union(*(imported(path) for path in (ROOT / folder).rglob("*.py")))
    assert not {name for name in names if name.split(".")[0] == "benchmarks"}


def test_imports_and_floors_are_read():
    """`imported` and `floor` give results for the real files, so the tests above cannot pass by reading nothing."""
    assert "specdec.unroll.plan" in imported(ROOT / "specdec" / "unroll" / "replay.py")
    assert floor("specdec.heads.eagle") == FLOORS.index("heads") and floor("specdec.core.tree.Tree") == 0
    assert sum(len(imported(path)) for path in FILES) > 50
