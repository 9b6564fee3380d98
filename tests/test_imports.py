"""Tests of the direction of imports: core, tools, experiments; and inside each from entry to entry of the list
below.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.support.commands import ROOT

# A file imports modules of its own entry and of entries before it.
CORE = [
    "core",
    "text",
    "target",
    "heads",
    "unroll",
    "proposers",
    "decoding",
    "engines",
    "export",
    "checkpoint",
    "options",
    "loading",
    "chat",
    "measuring",
    "hf",
    "command",
]
TRAIN = ["settings", "processes", "data", "features", "objective", "show", "loop", "prepare"]
TOOLS = ["grammar", "suites", "inspect", "server", "judge", "choose", "adapt", "demo"]
CONFIGURATION = {"hydra", "omegaconf", "accelerate"}  # libraries of training, which the core does not import
EXPERIMENTS = [path for path in sorted((ROOT / "specdec" / "experiments").iterdir()) if (path / "__init__.py").exists()]
FILES = sorted((ROOT / "specdec").rglob("*.py")) + sorted((ROOT / "train").rglob("*.py"))


def list_imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it. `from a import b` counts as a and as a.b, as b may be a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def name_module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def rank(module: str) -> int:
    """The place of a module in the order of imports; -1 for what any may import."""
    part, _, rest = module.partition(".")
    entry, _, subpackage = rest.partition(".")
    if part == "train":
        return 200 + TRAIN.index(entry) if entry else -1
    if part != "specdec" or entry in ("", "DISTRIBUTION", "__version__"):
        return -1
    if entry == "experiments":
        return 300
    if entry == "tools":
        return 100 + TOOLS.index(subpackage.partition(".")[0]) if subpackage else 100
    return CORE.index(entry)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_order(path):
    module, imported = name_module(path), list_imports(path)
    if path == ROOT / "specdec" / "__init__.py" or "in_vllm" in path.parts:
        return
    modules = {name for name in imported if name.split(".")[0] in ("specdec", "train", "scripts", "benchmarks")}
    later = {name for name in modules if name.split(".")[0] not in ("specdec", "train") or rank(name) > rank(module)}
    assert not later, f"{module} imports what stands behind it: {sorted(later)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_no_tool_experiment_or_training_library(path):
    module, libraries = name_module(path), {name.split(".")[0] for name in list_imports(path)}
    if module.startswith("train"):
        allowed = module in ("train.settings.hydra_text", "train.settings.usage")  # parts of train.py
        assert allowed or not libraries & {"hydra", "omegaconf"}
    elif not module.startswith(("specdec.tools", "specdec.experiments")):
        assert not libraries & CONFIGURATION


def test_tools_do_not_import_training_and_experiments_not_one_another():
    for path in FILES:
        parts = name_module(path).split(".")
        if parts[:2] == ["specdec", "tools"]:
            assert not any(name.split(".")[0] == "train" for name in list_imports(path)), path
        if parts[:2] == ["specdec", "experiments"] and len(parts) > 2:
            foreign = [name.split(".") for name in list_imports(path) if name.startswith("specdec.experiments.")]
            assert all(name[2] == parts[2] for name in foreign), path


def test_no_module_imports_itself_through_others():
    lazy = ROOT / "specdec" / "__init__.py"  # it imports what it offers when that is used
    graph = {name_module(path): list_imports(path) for path in FILES if path != lazy}
    for name, imports in graph.items():
        graph[name] = set(imports) & graph.keys() - {name}
    while free_names := [name for name, imports in graph.items() if not imports & graph.keys()]:
        for name in free_names:
            del graph[name]
    assert not graph, f"modules that import one another in a circle: {sorted(graph)}"


def test_imports_and_ranks_are_read():
    """`list_imports` and `rank` give results for the real files, so the tests above cannot pass by reading nothing."""
    assert "specdec.unroll.plan" in list_imports(ROOT / "specdec" / "unroll" / "replay.py")
    assert (
        rank("specdec.heads.eagle")
        == CORE.index("heads")
        < rank("specdec.tools.judge.judge")
        < rank("train.loop.state")
    )
    assert sum(len(list_imports(path)) for path in FILES) > 50


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_every_experiment_has_a_page_with_a_figure_and_its_date(folder):
    page = ROOT / "docs" / "experiments" / f"{folder.name}.md"
    text = page.read_text()
    assert re.search(r"last measured \| \d{4}-\d\d-\d\d \|", text)
    (result,) = re.findall(r"figure \|.*\]\(([^)]*)\)", text)
    assert (page.parent / result).resolve().exists()
    assert "| core or end |" in text and (ROOT / "tests" / "experiments" / folder.name).is_dir()
