"""YAML files that a stranger may have made: the config.yaml of a run, and what decode.file= names."""

from pathlib import Path

import yaml

LARGEST = 2**20  # bytes


class _NoAliases(yaml.SafeLoader):
    """Plain values only. Aliases are refused: a few of them can stand for more values than fit into memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name)")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> dict:
    """Plain values by name; ${...} stays as it is written. Raises ValueError for what is no such file, or OSError."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST >> 20} MiB, so it holds no settings.")
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML with plain values ({' '.join(str(error).split())}).") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no settings by name.")
    return document
