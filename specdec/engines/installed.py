"""Where `make engines` puts engines, and the interpreters that have them."""

import shutil
from pathlib import Path

ENGINES = Path("engines")


def find_python(engine: str, folder: str = "", *, python: str | None = None, check: bool = True) -> str:
    """The interpreter with an engine: `python`, or that of `make engines`. Raises ValueError if it does not exist.

    folder: the engine's environment inside ENGINES; check: whether the interpreter must be on this machine
    """
    path = python or str(ENGINES / folder / "bin" / "python")
    if check and not Path(path).is_file() and shutil.which(path) is None:
        raise ValueError(
            f"There is no {engine}: {path} does not exist. `make engines` sets it up for a CPU (4 GB); on a GPU "
            "machine install the engine and give python=python (docs/engines.md)."
        )
    return path
