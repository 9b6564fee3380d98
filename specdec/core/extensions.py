"""Where tools and experiments are: the only module of the core that knows their folders.

A folder that is removed is unknown everywhere: its YAML, its classes and its parts.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
EXPERIMENTS = "specdec.experiments"
FOLDERS = ("tools", "experiments")


def conf_folders() -> list[Path]:
    """Every folder `conf` of a tool or an experiment, with the groups of its YAML."""
    return [folder for name in FOLDERS for folder in sorted((PACKAGE / name).glob("*/conf"))]


def find_modules(name: str) -> Iterator[str]:
    """Names of the experiments that have a module of this name, such as part."""
    for folder in sorted((PACKAGE / "experiments").glob(f"*/{name}.py")):
        yield folder.parent.name


def import_module(experiment: str, name: str) -> ModuleType:
    """A module of an experiment. Raises ImportError if the experiment is not there."""
    return importlib.import_module(f"{EXPERIMENTS}.{experiment}.{name}")
