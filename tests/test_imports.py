"""Tests of the direction of imports: scripts -> train -> specdec, and inside specdec by the order of ORDER."""

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

# A file may import modules that are listed before it, and no other module of its own row.
ORDER = [
    "threads",
    "precision",
    "few_rows",
    "untrusted",
    "files",
    "loopback",
    "hub",
    "shards",
    "devices",
    "clock",
    "layer_states",
    "span_attention",
    "cache",
    "cuda_graph",
    "compile",
    "experts",
    "masks",
    "documents",
    "tree",
    "grammar",
    "sampling",
    "target_parallel",
    "attention",
    "layer_kinds",
    "target_fingerprint",
    "target_structure",
    "token_ids",
    "plain_text",
    "target_loading",
    "target_ends",
    "target_sharding",
    "target",
    "target_adapter",
    "compiled_target",
    "rules",
    "verifier",
    "sized_linear",
    "drafter",
    "heads.sizes",
    "heads.borrowed",
    "heads.layers",
    "heads.decoder_block",
    "heads.native",
    "heads.adapter",
    "heads.*",
    "unroll_plan",
    "unroll",
    "replay",
    "datastore",
    "traffic_files",
    "traffic",
    "generation",
    "proposers.base",
    "proposers.text",
    "proposers.stopping",
    "proposers.growth",
    "proposers.heads",
    "chances",
    "corrections",
    "costs",
    "proposers.account",
    "proposers.backlog",
    "proposers.pool",
    "proposers.realised",
    "proposers.rhythm",
    "proposers.round_value",
    "proposers.candidates",
    "proposers.step_times",
    "proposers.forced",
    "proposers.suffix",
    "proposers.*",
    "layer_search",
    "prefill",
    "batch",
    "decode",
    "timing",
    "drafting",
    "measurement",
    "batching",
    "benchmark",
    "figures",
    "report",
    "comparing",
    "speed",
    "served",
    "tuning",
    "checkpoint",
    "caller_frame",
    "generate",
    "layouts.base",
    "layouts.eagle",
    "layouts.medusa",
    "layouts.mtp",
    "layouts.*",
    "layouts.folder",
    "serving",
    "model_card",
    "engine_targets",
    "export.*",
    "server.text",
    "server.engine",
    "server.metrics",
    "server.protocol",
    "server.asgi",
    "server.recording",
    "server.overheard",
    "server.proxy",
    "server.app",
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


def rank(module: str) -> int | None:
    """The place in ORDER of a module of specdec; None for packages, other modules and names inside modules."""
    path = module.removeprefix("specdec.")
    if not (ROOT / "specdec" / (path.replace(".", "/") + ".py")).exists() or path == module:
        return None
    return ORDER.index(path if path in ORDER else path.rsplit(".", 1)[0] + ".*")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_specdec_imports_follow_the_order(path):
    names = imported(path)
    assert not {name.split(".")[0] for name in names} & {"train", "scripts", "hydra", "omegaconf", "accelerate"}
    own_modules = {name for name in names if name.startswith("specdec.")}
    if path.name == "__init__.py":
        # how threads wait is said before any module that imports torch
        assert own_modules == ({"specdec.threads"} if path.parent == ROOT / "specdec" else set())
        return
    own_rank = rank(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert own_rank is not None
    not_before = {name for name in own_modules if rank(name) is not None and rank(name) >= own_rank}
    assert not not_before, f"{path.name} imports modules that are not before it in ORDER: {not_before}"


@pytest.mark.parametrize("path", sorted((ROOT / "train").rglob("*.py")), ids=lambda path: path.name)
def test_train_does_not_import_hydra_or_scripts(path):
    assert not {name.split(".")[0] for name in imported(path)} & {"hydra", "omegaconf", "scripts"}


CACHE_FIELDS = {"data", "halves", "lengths", "skipped", "pending", "known", "slots"}  # of RowCache
FILES_OUTSIDE_CACHE = [
    path
    for path in (*FILES, *(ROOT / "train").rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), ROOT / "train.py")
    if path != ROOT / "specdec" / "cache.py"
]


def assigned_fields(path: Path) -> set[str]:
    """Assignments to a field of CACHE_FIELDS, or to a part of one, outside `self`. parameter.data is allowed."""
    places = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            node = node.value  # x.field[...] = ...
        elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
            continue
        if isinstance(node, ast.Attribute) and node.attr in CACHE_FIELDS:
            owner = ast.unparse(node.value)
            if owner != "self" and (owner, node.attr) != ("parameter", "data"):
                places.add(f"{owner}.{node.attr}")
    return places


@pytest.mark.parametrize("path", FILES_OUTSIDE_CACHE, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_cache_assigns_its_fields(path):
    assert not assigned_fields(path)


def test_assigned_fields_detects_assignments(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("self.cache.pending = 0\ncache.lengths, x = 1, 2\ncache.known += [1]\ncache.data[..., 0] = 1\n"
                    "self.known = 1\nparameter.data = 1\nx = cache.slots\n")  # fmt: skip
    assert assigned_fields(path) == {"self.cache.pending", "cache.lengths", "cache.known", "cache.data"}


def test_imports_and_ranks_are_read():
    """`imported` and `rank` give results for the real files, so the tests above cannot pass by reading nothing."""
    assert "specdec.unroll" in imported(ROOT / "specdec" / "replay.py")
    assert rank("specdec.heads.eagle") == ORDER.index("heads.*") and rank("specdec.tree.Tree") is None
    assert sum(len(imported(path)) for path in FILES) > 50
