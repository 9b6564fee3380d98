"""The folders of tools and experiments, and the user's trust in classes of their own.

No other module of the core knows these folders. A removed folder is unknown everywhere: its YAML, classes and parts.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
EXPERIMENTS = "specdec.experiments"
FOLDERS = ("tools", "experiments")
TRUST_CODE = "trust_code"  # option of every command and of train.py
_trusted: list[bool] = []  # one entry after trust_code=true


def trust_code() -> None:
    """From now on, `_target_` may name a class outside of specdec, in the working directory, too."""
    _trusted.append(True)
    sys.path.append(os.getcwd())


def trusts_code() -> bool:
    """True if `trust_code` was called in this process"""
    return bool(_trusted)


def list_conf_folders() -> list[Path]:
    """Every folder `conf` of a tool or an experiment"""
    return [folder for name in FOLDERS for folder in sorted((PACKAGE / name).glob("*/conf"))]


def find_modules(name: str) -> Iterator[str]:
    """Yields the experiments that have a module of this name, such as part."""
    for folder in sorted((PACKAGE / "experiments").glob(f"*/{name}.py")):
        yield folder.parent.name


def find_tool(module: str) -> ModuleType | None:
    """A module of a tool, such as suites.suites; None if the tool's folder is absent"""
    path = PACKAGE / "tools" / f"{module.replace('.', '/')}.py"
    return importlib.import_module(f"specdec.tools.{module}") if path.exists() else None


def import_module(experiment: str, name: str) -> ModuleType:
    """A module of an experiment. Raises ImportError if the experiment is absent."""
    return importlib.import_module(f"{EXPERIMENTS}.{experiment}.{name}")
