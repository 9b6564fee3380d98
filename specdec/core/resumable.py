"""Work that is continued after an interruption: rows of results in a JSONL file, and beside it a record of its settings."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from specdec.core import files, row_files
from specdec.core.lock import hold_lock
from specdec.core.untrusted import read_json

INPUTS = "inputs"  # of a record: digests of what has the same name but perhaps not the same content


class Identity(Protocol):
    """What names a target's weights: target.fingerprint.Fingerprint."""

    @property
    def text(self) -> str: ...

    def matches(self, recorded: str | None) -> bool: ...


class Resumable:
    """A JSONL file of results that the same settings continue and that other settings must not touch.

    record: a JSON file with the settings of the rows; it is written when the file has no rows yet
    rows: the JSONL file. A last line without its end, which a killed process leaves behind, is removed
    settings: a dict that JSON can hold
    advice: the sentence that ends a refusal: what to do about other settings

    Raises ValueError if the settings differ from the recorded ones, if there are rows without a record, or if a line
    cannot be read. `self.rows` are the rows so far, those of `append` included.
    """

    def __init__(self, record: Path, rows: Path, settings: dict, *, advice: str):
        self.path, self.record, self.advice = rows, record, advice
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
        """Raises ValueError if rows were made with other inputs than these digests say, by the names of the inputs.

        target: an input too; what an earlier version recorded of the same target is replaced
        They are recorded where nothing is: of a file without rows, and of one that an earlier version began.
        """
        recorded = read_json(self.record)
        old_inputs = recorded.get(INPUTS, {}) if self.rows else {}
        if target is not None:
            inputs["target"] = target.text
            old_inputs = old_inputs | ({"target": target.text} if target.matches(old_inputs.get("target")) else {})
        if changed_inputs := [
            name.replace("_", " ") for name, value in inputs.items() if old_inputs.get(name, value) != value
        ]:
            raise ValueError(
                f"{self.path} was begun with another {' and another '.join(changed_inputs)}, under the same name. Put it back, or "
                f"begin anew. {self.advice}"
            )
        if recorded.get(INPUTS) != old_inputs | inputs:
            files.write_text(self.record, json.dumps({**recorded, INPUTS: old_inputs | inputs}, indent=1) + "\n")

    def append(self, *rows: dict) -> None:
        """Adds rows to the end of the file; when this returns, they are on the disk."""
        files.append_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), synced=True)
        self.rows += rows


@contextlib.contextmanager
def open_resumable(record: Path, rows: Path, settings: dict, *, advice: str) -> Iterator[Resumable]:
    """`Resumable` with a lock on the rows while it is in use. Raises ValueError too if another process has that lock."""
    with hold_lock(rows.with_name(rows.name + ".lock"), resource=rows):
        yield Resumable(record, rows, settings, advice=advice)


def check_settings(results: Path, recorded: dict, settings: dict, *, advice: str) -> None:
    """Raises ValueError, with every setting that differs, if results were made with other settings than these."""
    differing = list(list_differences(recorded, json.loads(json.dumps(settings))))
    if differing:
        raise ValueError(f"{results} was begun with other settings: {', '.join(differing)}. {advice}")


def list_differences(recorded: dict, settings: dict, prefix: str = "") -> Iterator[str]:
    """One phrase for each setting that differs; settings inside a nested dict are named `outer.inner`."""
    for key in [*settings, *(key for key in recorded if key not in settings)]:
        old, new = recorded.get(key), settings.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from list_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} (then {old}, now {new})"


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file, none if there is no file. Removes a last line that was not written to its end.

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
    """16 hex digits, to record contents among settings."""
    return hashlib.sha256(content).hexdigest()[:16]


def digest_folder(folder: Path) -> str:
    """A digest of the names and contents of a folder's files."""
    lines = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return digest_bytes("\n".join(lines).encode())
