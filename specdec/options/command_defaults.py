"""Defaults and help of commands: conf/command/VERB.yaml, with the files of options that verbs share."""

import functools
import itertools
import os
import re
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from specdec.core import extensions, progress
from specdec.core.option_types import Model, describe_bounds, format_value, read_options
from specdec.options import config_files
from specdec.options.command_types import Prefix

GROUP = "command"  # the folder of these files in conf/
REQUIRED = "???"  # written as the default of an option that must be given
PROGRESS = "progress"  # name of an option that every command has
TRUST = "load heads whose class is your own Python code; never set for a head from the Hub"
NO_BOUNDS = ("a text", "true or false", "settings")  # beginnings of the bounds that --help leaves out
LINE = re.compile(r"^( *)(\w+):(.*?)(?: # (.*))?$", re.MULTILINE)  # indentation, key, value and comment


@dataclass(frozen=True)
class OptionDefault:
    """The default of an option, and its help: the comment behind it."""

    value: Any
    help: str


@functools.cache
def read_defaults(name: str) -> dict[str, OptionDefault]:
    """Default and help of each option of conf/command/NAME.yaml, by its name with its group, as decode.depth.

    `defaults:` lists files whose options are included. Where the file names one of them again, its value replaces the
    included one, and so does its comment, if there is one. The caller does not change what comes back: it is kept.
    """
    text = config_files.list_files(GROUP)[name].read_text(encoding="utf-8")
    document, comments = yaml.safe_load(text) or {}, read_comments(text)
    defaults: dict[str, OptionDefault] = {}
    for included in document.pop("defaults", []):
        defaults |= read_defaults(included)
    for option, value in config_files.flatten(document, keep_empty=True).items():
        inherited = defaults[option].help if option in defaults else ""
        defaults[option] = OptionDefault(value, comments[option] or inherited)
    return defaults


def read_comments(text: str) -> dict[str, str]:
    """The comment behind each option of a YAML file, by its name with its group."""
    comments, group = {}, ""
    for indentation, key, value, comment in LINE.findall(text):
        prefix = f"{group}." if indentation else ""
        comments[prefix + key] = comment
        if not value.strip():
            group = key
    return comments


def read_group(model: type[Model], name: str, /, **changes: Any) -> Model:
    """The options of a group, such as target, by conf/command/NAME.yaml, with `changes` in place of their defaults."""
    values = {option.removeprefix(f"{name}."): default.value for option, default in read_defaults(name).items()}
    defaults = {key: value for key, value in values.items() if key in model.model_fields}
    return read_options(model, defaults | changes, f"{name}.")


def name_option(name: str, field: FieldInfo) -> str:
    """The name of an option as --help writes it: its own, or PREFIX.KEY."""
    prefix = next((entry.name for entry in field.metadata if isinstance(entry, Prefix)), None)
    return f"{prefix}.KEY" if prefix else name


def describe_command(docstring: str, defaults: dict[str, OptionDefault], fields: dict[str, FieldInfo]) -> str:
    """The text of --help: the docstring, then the options, required ones first and groups last."""
    lines = [docstring.strip(), "", "Options, written key=value:"]
    order = sorted(fields, key=lambda name: (name.count("."), defaults[name].value != REQUIRED))
    for group, names in itertools.groupby(order, key=lambda name: name.rpartition(".")[0]):
        lines += ["", f"{group}:"] if group else []
        lines += [describe_option(name, defaults[name], fields[name]) for name in names]
        if not group:
            mode = os.environ.get(progress.VARIABLE, "auto")
            lines.append(f"  {PROGRESS:<26} {progress.HELP} (default: {mode})")
            lines.append(f"  {extensions.TRUST_CODE:<26} {TRUST} (default: false)")
    return "\n".join(lines)


def describe_option(name: str, default: OptionDefault, field: FieldInfo) -> str:
    """A line of --help: name, help, bounds and default of an option."""
    bounds = describe_bounds(field)
    bounds_text = "" if bounds.startswith(NO_BOUNDS) else f"{bounds}; "
    default_text = "required" if default.value == REQUIRED else f"default: {format_value(default.value) or 'empty'}"
    remark = "" if isinstance(default.value, dict) else f" ({bounds_text}{default_text})"
    return f"  {name_option(name, field):<26} {default.help}{remark}"
