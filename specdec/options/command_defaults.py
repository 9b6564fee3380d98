"""Defaults and help of commands: conf/command/VERB.yaml, with the files of options that verbs share."""

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
REQUIRED = "???"  # default of an option that must be given
PROGRESS = "progress"  # an option of every command
TRUST = "load heads whose class is your own Python code; never set for a head from the Hub"
NO_BOUNDS = ("a text", "true or false", "settings")  # how the words begin that --help leaves out
LINE = re.compile(r"^( *)(\w+):(.*?)(?: # (.*))?$", re.MULTILINE)  # indentation, key, value and comment


@dataclass(frozen=True)
class OptionDefault:
    """value: of an option that is not given; help: the comment behind it"""

    value: Any
    help: str


def read_defaults(name: str) -> dict[str, OptionDefault]:
    """Default and help of each option of conf/command/NAME.yaml, by its name with its group, as decode.depth.

    `defaults:` lists files whose options the file has, too. Where it names one of them again, the value is replaced, and
    the help if there is a comment.
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


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `config_files.flatten`."""
    document: dict[str, Any] = {}
    for name, value in values.items():
        *groups, key = name.split(".")
        group = document
        for name_of_group in groups:
            group = group.setdefault(name_of_group, {})
        group[key] = value
    return document


def read_group(model: type[Model], name: str, /, **changes: Any) -> Model:
    """The options of conf/command/NAME.yaml's group NAME, such as target, with these in place of their defaults."""
    values = {option.removeprefix(f"{name}."): default.value for option, default in read_defaults(name).items()}
    defaults = {key: value for key, value in values.items() if key in model.model_fields}
    return read_options(model, defaults | changes, f"{name}.")


def name_option(name: str, field: FieldInfo) -> str:
    """An option's name, or PREFIX.KEY."""
    prefix = next((entry.name for entry in field.metadata if isinstance(entry, Prefix)), None)
    return f"{prefix}.KEY" if prefix else name


def describe_command(docstring: str, defaults: dict[str, OptionDefault], fields: dict[str, FieldInfo]) -> str:
    """What --help prints: the docstring, then the options, required ones first and groups last."""
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
    """A line of --help: name, help, what it may be, and the default."""
    bounds = describe_bounds(field)
    bounds_text = "" if bounds.startswith(NO_BOUNDS) else f"{bounds}; "
    default_text = "required" if default.value == REQUIRED else f"default: {format_value(default.value) or 'empty'}"
    remark = "" if isinstance(default.value, dict) else f" ({bounds_text}{default_text})"
    return f"  {name_option(name, field):<26} {default.help}{remark}"
