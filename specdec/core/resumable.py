"""Work that goes on after an interruption: rows of results in a JSONL file, beside a record of its settings."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from specdec.core import files, row_files
from specdec.core.lock import hold_lock
from specdec.core.untrusted import read_json

INPUTS = "inputs"  # key of a record: digests of inputs whose content may change under the same name


class Identity(Protocol):
    """The name of a target's weights: target.fingerprint.Fingerprint."""

    @property
    def text(self) -> str: ...


class Resumable:
    """A JSONL file of results. The same settings continue it; other settings must not touch it.

    record: JSON file with the settings of the rows, written before the first row
    rows: path of the JSONL file. A last line without an end, left by a killed process, is removed.
    settings: dict for JSON
    advice: last sentence of a refusal: what to do about other settings

    Raises ValueError if the settings differ from the recorded ones, if there are rows without a record, or if a line
    cannot be read. `self.rows` are the rows so far, those of `append` included.
    """

    def __init__(self, record: Path, rows: Path, settings: dict, *, advice: str):
        self.path = rows
        self.record = record
        self.advice = advice
        if not rows.exists() or rows.stat().st_size == 0:
            rows.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(record, json.dumps(settings, indent=1) + "\n")
        elif not record.exists():
            raise ValueError(f"{rows} exists, but not {record}, so its settings are unknown. {advice}")
        else:
            recorded = read_json(record)
            recorded.pop(INPUTS, None)
            check_settings(rows, recorded, settings, advice=advice)
        self.rows = read_rows(rows)

    def check_inputs(self, target: Identity | None = None, **inputs: str) -> None:
        """Raises ValueError if rows were made with other inputs. inputs: digests by the names of the inputs

        target: one more input. Inputs without a record are recorded: those of a file without rows.
        """
        recorded = read_json(self.record)
        old_inputs = recorded.get(INPUTS, {}) if self.rows else {}
        if target is not None:
            inputs["target"] = target.text
        if changed_inputs := [
            name.replace("_", " ") for name, value in inputs.items() if old_inputs.get(name, value) != value
        ]:
            raise ValueError(
                f"{self.path} was begun with another {' and another '.join(changed_inputs)}, under the same "
                f"name. Put it back, or begin anew. {self.advice}"
            )
        if recorded.get(INPUTS) != old_inputs | inputs:
            files.write_text(self.record, json.dumps({**recorded, INPUTS: old_inputs | inputs}, indent=1) + "\n")

    def append(self, *rows: dict) -> None:
        """Appends rows to the file. At the return they are on the disk."""
        files.append_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), synced=True)
        self.rows += rows


@contextlib.contextmanager
def open_resumable(record: Path, rows: Path, settings: dict, *, advice: str) -> Iterator[Resumable]:
    """A `Resumable` with a lock on the rows while it is in use.

    Raises ValueError if another process holds that lock.
    """
    with hold_lock(rows.with_name(rows.name + ".lock"), resource=rows):
        yield Resumable(record, rows, settings, advice=advice)


def check_settings(results: Path, recorded: dict, settings: dict, *, advice: str) -> None:
    """Raises ValueError, with every setting that differs, if results were made with other settings."""
    differing = list(list_differences(recorded, json.loads(json.dumps(settings))))
    if differing:
        raise ValueError(f"{results} was begun with other settings: {', '.join(differing)}. {advice}")


def list_differences(recorded: dict, settings: dict, prefix: str = "") -> Iterator[str]:
    """Yields a phrase for each setting that differs. Settings in a nested dict are named `outer.inner`."""
    for key in [*settings, *(key for key in recorded if key not in settings)]:
        old = recorded.get(key)
        new = settings.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from list_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} (then {old}, now {new})"


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file, none without a file. Removes a last line without an end.

    Raises ValueError for any other line that is not a JSON object.
    """
    if not path.exists():
        return []
    row_files.cut_damaged_end(path)
    rows = []
    for number, row in row_files.read_own_lines(path):
        if row is None:
            raise ValueError(f"{path}: line {number} is damaged: delete that line and run this again.")
        rows.append(row)
    return rows


def digest_bytes(content: bytes) -> str:
    """16 hex digits, to record contents among settings"""
    return hashlib.sha256(content).hexdigest()[:16]


def digest_folder(folder: Path) -> str:
    """The digest of the names and contents of a folder's files"""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return digest_bytes("\n".join(f"{path.name} {files.hash_file(path)}" for path in paths).encode())
