"""What a folder with a head holds, and whether it can take the place of another one. Needs safetensors alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

FREE_FIELDS = {"torch_dtype", "dtype", "transformers_version", "_name_or_path"}  # of config.json, without effect here


class HeadLayout(NamedTuple):
    """fields: content of config.json; shapes: sizes of the tensors, by name"""

    fields: dict[str, Any]
    shapes: dict[str, list[int]]

    def check(self, folder: Path, served: "HeadLayout") -> None:
        """Raises ValueError, with the first difference, if the head in `folder` cannot replace the served one."""
        for kind, here, there in zip(("config.json", "tensors"), self, served):
            for name in sorted(here.keys() | there.keys()):
                if here.get(name) != there.get(name):
                    raise ValueError(
                        f"{folder} is a head of another layout than the served one, which stays: its {name} ({kind}) "
                        f"is {here.get(name)}, and that of the served head {there.get(name)}"
                    )


def list_weights(folder: Path) -> list[Path]:
    """Raises ValueError for a folder that is not visible, or without a head."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        reason = "has no config.json with *.safetensors" if folder.is_dir() else "is no folder that this machine sees"
        raise ValueError(f"{folder} {reason}: give an exported head, at a path that both sides see")
    return files


def read_layout(folder: Path) -> HeadLayout:
    shapes: dict[str, list[int]] = {}
    for path in list_weights(folder):
        with safe_open(path, "pt") as file:
            shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    fields = json.loads((folder / "config.json").read_text())
    return HeadLayout({name: value for name, value in fields.items() if name not in FREE_FIELDS}, shapes)


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names and tensors of a folder."""
    for path in list_weights(folder):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
