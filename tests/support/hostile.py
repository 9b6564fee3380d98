"""What tests of hostile files share: code that shows whether it ran, and limits."""

import json
from pathlib import Path

from specdec.core import files

HUGE = 10**12
DEEP = "[" * 100_000 + "]" * 100_000


class Touch:
    """Unpickled by a loader that runs code, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def change(folder: Path, name: str = "drafter.json", **fields) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (folder / files.CHECKSUMS).unlink(missing_ok=True)  # who changes a file can change its checksum
