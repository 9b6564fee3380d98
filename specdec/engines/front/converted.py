"""Converted models: folders that are kept for the next start, with a record of the files that they were made from.

It imports nothing but Python's own library, so it runs in the environment of any engine.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = "source.json"  # the record; only folders that have it are ever replaced


def keep_converted(models: list[str], folder: Path, suffix: str, convert: Callable[[Path], None] | None) -> Path:
    """The converted model inside `folder`, made where it is not there, or is of other files.

    models: folder or name of the model, then of others that its conversion reads; suffix: end of the folder's name
    convert: makes the folder that it is given; None: what has to be made is printed only
    """
    out = folder / name_converted(models, suffix)
    record = out / SOURCE
    if record.is_file() and json.loads(record.read_text()) == list(map(describe_source, models)):
        return out
    if convert is None:
        print(f"{out} is made from {models[0]} by the same command without print=true.", file=sys.stderr)
    else:
        print(f"converting {models[0]} into {out}", flush=True)
        write_converted(models, out, convert)
    return out


def write_converted(models: list[str], out: Path, convert: Callable[[Path], None]) -> None:
    """Makes the folder `out`, which appears whole or not at all. Raises ValueError where it is no converted model."""
    if out.exists() and not (out / SOURCE).is_file():
        raise ValueError(f"{out} exists and is no converted model: move it away, or give another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-") as temporary:
        folder = Path(temporary, "new")
        sources = list(map(describe_source, models))  # before: files that change meanwhile make it an old one
        convert(folder)
        (folder / SOURCE).write_text(json.dumps(sources))
        if out.exists():
            out.rename(Path(temporary, "old"))
        folder.rename(out)


def name_converted(models: list[str], suffix: str) -> str:
    """The name of a folder: that of the model, and a digest of all names."""
    names = list(map(resolve_name, models))
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{Path(names[0]).name}-{digest}.{suffix}"


def resolve_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def describe_source(model: str) -> dict:
    """A model's name; with size and time of its files, and a digest of its configuration, if it is a folder."""
    paths = sorted(path for path in Path(model).glob("*") if path.is_file())
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    config = Path(model, "config.json")
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
    return {"model": resolve_name(model), "files": files, "config": digest}
