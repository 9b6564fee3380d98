"""Where the YAML of options is: conf/ of the clone or of the wheel, and the folder conf of each tool and experiment."""

import copy
from pathlib import Path
from typing import Any

import yaml

from specdec.core import extensions

PACKAGE = extensions.PACKAGE
IN_CLONE = (PACKAGE.parent / "train.py").is_file() and (PACKAGE.parent / "scripts").is_dir()
HOME = PACKAGE.parent if IN_CLONE else PACKAGE / "_clone"  # of scripts, train, conf and train.py


def conf_folders() -> list[Path]:
    """Every folder with groups of YAML, that of the core first."""
    return [HOME / "conf", *extensions.list_conf_folders()]


def list_files(group: str) -> dict[str, Path]:
    """The files of a group, such as head, by name in the order of the alphabet."""
    files = {path.stem: path for folder in conf_folders() for path in folder.glob(f"{group}/*.yaml")}
    return dict(sorted(files.items()))


def read_file(group: str, name: str) -> dict[str, Any]:
    """The settings of a file of a group, with those of the files of the group that its `defaults` name before them."""
    document = yaml.safe_load(list_files(group)[name].read_text(encoding="utf-8"))
    settings: dict[str, Any] = {}
    for included in document.pop("defaults", []):
        settings = fill(settings, flatten(read_file(group, included), keep_empty=True))
    return fill(settings, flatten(document, keep_empty=True))


def flatten(settings: dict, prefix: str = "", *, keep_empty: bool = False) -> dict:
    """Settings in groups by dotted name. keep_empty: an empty group is a value"""
    values: dict = {}
    for key, value in settings.items():
        name = prefix + key
        if isinstance(value, dict) and (value or not keep_empty):
            values |= flatten(value, f"{name}.", keep_empty=keep_empty)
        else:
            values[name] = value
    return values


def fill(document: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of a document in groups, with these values, by dotted name. Groups that it lacks are made."""
    document = copy.deepcopy(document)
    for name, value in values.items():
        *groups, key = name.split(".")
        group = document
        for group_name in groups:
            if not isinstance(group.get(group_name), dict):
                group[group_name] = {}
            group = group[group_name]
        group[key] = value
    return document
