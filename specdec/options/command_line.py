"""Options of a command, written key=value or group.key=value, as a frozen model of pydantic.

The same words mean the same thing in every command:

    checkpoint=DIR                a trained head: a step's folder, a run's folder for its best step, or a name on the
                                  Hugging Face Hub, user/name or user/name@revision. DIR,DIR,.. where a command
                                  compares several
    proposer=NAME proposers=A,B   what drafts, by its file in conf/proposer
    proposer.KEY=VALUE            its settings; with proposers=, or inside another proposer, proposer.NAME.KEY=VALUE
    proposer.checkpoint=DIR       the trained head inside a proposer that holds one; default: the first of checkpoint=
    target.name= target.dtype= target.device=
    prompts= split= limit= max_new_tokens= batch= seed= out=
    decode.temperature= decode.depth= decode.width= decode.nodes= decode.compile= ...
    chains=1,2,3 trees=4x3x8      shapes to compare: chain lengths, and DEPTHxWIDTHxNODES of trees
    progress=                     how long work is shown (specdec/core/progress.py); every command takes it
"""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from specdec.core import extensions, files, progress
from specdec.core.option_types import (
    TRUTH_VALUES,
    Model,
    convert_text,
    describe_unknown,
    list_fields,
    list_types,
    read_bounds,
    read_options,
)
from specdec.options import config_files
from specdec.options.command_defaults import PROGRESS, REQUIRED, describe_command, name_option, read_defaults
from specdec.options.command_types import OUTPUT_FILE, OUTPUT_FOLDER, PROSE

if str(config_files.HOME) not in sys.path:  # a script that is started as a file finds train and other scripts, too
    sys.path.insert(0, str(config_files.HOME))

OptionTexts = dict[str, str]  # by the options' names, as they are written


def read_command(
    verb: str,
    model: type[Model],
    docstring: str | None,
    arguments: list[str] | None = None,
    *,
    presets: Callable[[OptionTexts], OptionTexts] = lambda texts: {},
) -> Model:
    """The options of conf/command/VERB.yaml, with `arguments` (None: the command line) in place of their defaults.

    -h or --help prints `docstring` and every option, and exits. All commands have `progress` and `trust_code`, which
    take effect here.
    presets: function from the texts of options to texts of further ones. Those that the command lacks are left out.
    Raises ValueError, with the option's name, for an argument that cannot be used.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    defaults, fields = read_defaults(verb), list_fields(model)
    if {"-h", "--help"} & set(arguments):
        print(describe_command(docstring or "", defaults, fields))
        raise SystemExit(0)
    texts = split_arguments(arguments)
    use_common_options(texts)
    values = {name: defaults[name].value for name in fields if defaults[name].value != REQUIRED}
    names = {name_option(name, field): name for name, field in fields.items()}
    for key, text in (presets(texts) | texts).items():
        name = find_option(key, names)
        if name is not None:
            values[name] = convert_option(key, text, fields[name], values.get(name))
        elif key in texts:
            raise ValueError(describe_unknown(key, [*names, PROGRESS, extensions.TRUST_CODE]))
    options = read_options(model, config_files.fill({}, values))
    check_output_paths(values, fields)
    return options


def use_common_options(texts: OptionTexts) -> None:
    """Takes `progress` and `trust_code`, options of all commands, out of the texts, and does what they ask for."""
    mode = texts.pop(PROGRESS, os.environ.get(progress.VARIABLE, "auto"))
    progress.choose_mode(mode, main=True)
    text = texts.pop(extensions.TRUST_CODE, "false")
    if text.lower() not in TRUTH_VALUES:
        raise ValueError(f"{extensions.TRUST_CODE}={text} must be true or false.")
    if TRUTH_VALUES[text.lower()]:
        extensions.trust_code()


def split_arguments(arguments: list[str]) -> OptionTexts:
    """The texts of key=value arguments by name, as they are written: a prompt may hold quotes, commas, equals signs."""
    texts: OptionTexts = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r} is not of the form key=value. See --help.")
        texts[key] = value
    return texts


def find_option(key: str, names: dict[str, str]) -> str | None:
    """The name of the field that key=value sets; None without one. names: field names by option, or by PREFIX.KEY"""
    group, _, setting = key.partition(".")
    return names.get(key) or names.get(f"{group}.KEY" if setting else "")


def convert_option(key: str, text: str, field: FieldInfo, present_value: Any) -> Any:
    """The value of a text, by the type of the option. present_value: default, or the value of earlier arguments"""
    if isinstance(present_value, dict):
        return present_value | {key.partition(".")[2]: read_paths(key, text)}
    value = convert_text(field, text)
    if not isinstance(value, str) or PROSE in field.metadata:
        return value
    return read_paths(key, value, may_be_empty=(str, {}) in map(read_bounds, list_types(field)))


def read_paths(name: str, text: str, *, may_be_empty: bool = False) -> str:
    """A text, or a comma list of texts, with the home folder in place of each leading `~`.

    may_be_empty: whether an empty text has a meaning. Raises ValueError for an empty list, and for another empty text.
    """
    if not text.strip(" ,") and (text or not may_be_empty):
        raise ValueError(f"{name}={text} is empty: give a value, or leave the option out.")
    return re.sub(r"(?<![^,])( *)(~[^,]*)", lambda match: match[1] + files.expand_home(match[2]), text)


def split_list(text: str | None) -> list[str]:
    """The entries of a comma list, without blanks around them and without empty ones."""
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()]


def read_numbers(name: str, text: str, highest: int) -> list[int]:
    """The whole numbers of an option's comma list, increasing. Raises ValueError for others, and above `highest`."""
    if not all(part.isdecimal() and 0 < int(part) <= highest for part in split_list(text)):
        raise ValueError(f"{name}={text}: give numbers from 1 to {highest}, such as 1,4,16.")
    return sorted({int(part) for part in split_list(text)})


def check_output_paths(values: dict[str, Any], fields: dict[str, FieldInfo]) -> None:
    """Makes the folders that results go to, before anything is loaded. Raises ValueError as `check_output_path`."""
    for name, field in fields.items():
        is_folder = OUTPUT_FOLDER in field.metadata
        if values.get(name) and (is_folder or OUTPUT_FILE in field.metadata):
            check_output_path(f"{name}={values[name]}", Path(values[name]), is_folder=is_folder)


def check_output_path(option: str, path: Path, *, is_folder: bool) -> None:
    """Makes the parent folder of a result. Raises ValueError for a path where the result cannot be written.

    option: key=value, for messages; is_folder: the result is a folder, otherwise a file
    """
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        is_wrong = path.exists() and path.is_dir() != is_folder
        existing = path if path.exists() else path.absolute().parent
        if not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} cannot be written ({error}). Choose another.") from None
    if is_wrong:
        present, needed = ("file", "folder") if is_folder else ("folder", "file")
        raise ValueError(f"{option} is a {present}: give the name of a {needed}.")
