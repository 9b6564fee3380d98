"""--help of train.py, and the sentences for what a command line cannot be."""

import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser

from specdec.core.option_types import (
    describe_bounds,
    describe_unknown,
    describe_unknown_choice,
    find_options,
    list_fields,
)
from specdec.options import config_files
from specdec.options.command_defaults import NO_BOUNDS
from train.settings.options import RunOptions

YAML_KEY = re.compile(r"^( *)(\w+):")
FLAGS_OF_FOLDERS = ("--config-", "-cd", "-cp", "hydra.searchpath")  # beginnings; further YAML is in their folders
COMMAND_GROUPS = ("proposer", "suite", "protocol", "command")  # groups of other commands


def list_groups() -> list[str]:
    """Names of the groups of train.py."""
    groups = {path.parent.name for folder in config_files.conf_folders() for path in folder.glob("*/*.yaml")}
    return sorted(groups - set(COMMAND_GROUPS))


def describe_usage() -> str:
    """The text of --help: the choices, and files of conf/, whose comments explain the options, with their bounds."""
    groups = [group for group in list_groups() if group != "objective"]
    choices = [f"  {group}={'|'.join(config_files.list_files(group))}" for group in groups]
    shown_files = ("train", "head/eagle", "objective/base", "data/shipped", "target/smollm2-135m", "decode/chain")
    files = [f"# conf/{name}.yaml\n{show_file(name)}" for name in shown_files]
    return "\n".join(
        ["Choices, each a file in conf/:", *choices, "", "Options, KEY=VALUE, and their defaults:", "", *files]
    )


def show_file(name: str) -> str:
    """A file of conf/, with the bounds of each option behind its comment."""
    group, lines, parent = name.partition("/")[0], [], ""
    prefix = {"train": "", "objective": "head.objective."}.get(group, f"{group}.")
    text = (config_files.HOME / "conf" / f"{name}.yaml").read_text()
    fields = list_fields(RunOptions)
    if group == "objective":
        fields = list_fields(find_options(pkgutil.resolve_name(yaml.safe_load(text)["_target_"])), prefix)
    for line in text.splitlines():
        match = YAML_KEY.match(line)
        indentation, key = match.groups() if match else ("", "")
        parent = parent if indentation else f"{key}."
        field = fields.get(prefix + (parent if indentation else "") + key)
        bounds = "" if field is None else describe_bounds(field)
        if bounds and not bounds.startswith((*NO_BOUNDS, "one of")):
            line += f" ({bounds})" if "#" in line else f" # ({bounds})"
        lines.append(line)
    return "\n".join([*lines, ""])


def refuse_arguments(arguments: list[str]) -> str | None:
    """The sentence for what no run can be made of; None if all is known, or the user has a folder of YAML.

    arguments: the words of the command line, with texts quoted for Hydra
    """
    if not arguments:
        heads = ", ".join(config_files.list_files("head"))
        return f"Say which head to train, as in: accelerate launch train.py head=eagle. There are: {heads}."
    words, unknown_flags = get_args_parser().parse_known_args(arguments)
    for word in [*unknown_flags, *words.overrides]:
        if "=" not in word and not word.startswith("~"):
            return f"{word!r} is not of the form key=value, such as head=eagle. See --help."
    if any(argument.startswith(FLAGS_OF_FOLDERS) for argument in arguments):
        return None
    return refuse_choices(words.overrides) or find_unknown_option(words.overrides)


def describe_composing_error(error: Exception) -> str:
    """Hydra's error about a command line as one sentence."""
    first_line = str(error).partition("\n")[0].rstrip(".")
    if match := re.fullmatch("Could not override '(.*)'", first_line):
        return f"There is no option {match[1]!r} beside these choices of head=, target= and the others. See --help."
    if match := re.fullmatch("Ambiguous value for argument '(.*)'", first_line):
        return f"{match[1]} has several values: give one, or -m too, for a run with each (docs/tracking.md)."
    return f"{first_line}. See --help."


def refuse_choices(arguments: Sequence[str]) -> str | None:
    """The sentence for the first GROUP=NAME without a file; None if all have one."""
    groups = set(list_groups())
    for group, _, value in (argument.partition("=") for argument in arguments):
        if group not in groups or value.endswith((")", "]", "}")):  # such as glob(*)
            continue
        files = config_files.list_files(group)
        for name in value.strip("'").split(","):
            if name.removesuffix(".yaml") not in files:
                return describe_unknown_choice(group, name, files)
    return None


def find_unknown_option(arguments: list[str]) -> str | None:
    """The sentence for the first KEY=VALUE whose key no file of conf/ has; None if all are known."""
    names: set[str] = set(read_names(config_files.HOME / "conf" / "train.yaml"))
    for group in list_groups():
        prefix = "head.objective." if group == "objective" else f"{group}."
        for path in config_files.list_files(group).values():
            names |= {prefix.removesuffix("."), *read_names(path, prefix)}
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_group = any(other.startswith(f"{name}.") for other in names)
        if equals and not (name in names or is_group or name.startswith(("+", "~", "-", "hydra"))):
            return describe_unknown(name, names)
    return None


def read_names(path: Path, prefix: str = "") -> dict[str, Any]:
    """The options of a YAML file by dotted name. prefix: groups in front of their names"""
    return config_files.flatten(yaml.safe_load(path.read_text()) or {}, prefix, keep_empty=True)
