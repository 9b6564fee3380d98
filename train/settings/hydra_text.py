"""Quotes users' texts for Hydra and OmegaConf, so that a value stays as it is written."""

import os
import re
from pathlib import Path
from types import NoneType
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.core import extensions
from specdec.core.option_types import LISTS, check_value, format_value, list_fields, list_kinds
from specdec.options import config_files
from train.settings.options import RunOptions, read_run

FIELDS = list_fields(RunOptions)  # without the options of a head's class, where Hydra reads a text
COLLECTIONS = {*LISTS, dict}  # types of several values
MAX_NAME_LENGTH = 120  # characters of a target in the name of a run, at most


def make_target_name(name: object) -> str:
    """The last part of a target's name, for the name of a run. Qwen/Qwen3-8B and models/Qwen3-8B/ give Qwen3-8B."""
    path = Path(str(name))
    last = path.name if path.name not in ("", "..") else path.resolve().name
    return re.sub(r"[^\w.+-]+", "-", last).strip("-")[:MAX_NAME_LENGTH] or "target"


OmegaConf.register_new_resolver("target_name", make_target_name, replace=True)  # in conf/


def make_search_path() -> str:
    """The argument by which Hydra finds the YAML of tools and experiments."""
    folders = [quote_text(f"file://{folder}") for folder in extensions.list_conf_folders()]
    return f"hydra.searchpath=[{','.join(folders)}]"


def expand_plan(arguments: list[str]) -> list[str]:
    """The arguments with machine=MACHINE plan=true in place of plan=MACHINE."""
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        short = key == "plan" and value.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0")
        found += [f"machine={value}", "plan=true"] if short else [argument]
    return found


def quote_text(text: str) -> str:
    """The text in quotes, so that Hydra and OmegaConf read it back as it is written, with each ${..}."""
    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", text), Quote.single).with_quotes()


def quote_arguments(arguments: list[str], *, multirun: bool = False) -> list[str]:
    """Arguments of train.py for Hydra. A text is quoted where Hydra would read something else, or nothing.

    Numbers, lists, dicts, null and quoted texts are left alone. multirun: whether a comma list is swept
    """
    return [each if multirun and _is_swept(each) else _quote_argument(each) for each in arguments]


def read_composed(composed: DictConfig) -> RunOptions:
    """The options of a run that Hydra has composed. Raises ValueError, which names the option, for a wrong value."""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    return read_run(values)


def compose_options(overrides: list[str]) -> RunOptions:
    """The options of a run that is not started. overrides: arguments as `quote_arguments` makes them

    Raises ValueError for a choice or an option that does not exist.
    """
    try:
        with hydra.initialize_config_dir(str(config_files.HOME / "conf"), version_base="1.3"):
            return read_composed(hydra.compose("train", [*overrides, make_search_path()]))
    except HydraException as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error


def check_options(texts: dict[str, str], prefix: str) -> None:
    """Raises ValueError for a wrong value of train.py. texts: values by option; prefix: of names in the message"""
    for key, value in texts.items():
        field, parsed = FIELDS.get(key), _parse(_quote_argument(f"{key}={value}"))
        if field is not None and parsed is not None and not parsed.is_sweep_override() and "${" not in value:
            check_value(f"{prefix}{key}", field, parsed.value())


def _quote_argument(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if not equals or key.startswith(("-", "~", "hydra")):
        return argument
    if key.startswith("template."):  # whose keys are those of a chat template, which conf/ does not know
        return _quote_argument(f"++{argument}")
    field, parsed = FIELDS.get(key.lstrip("+")), _parse(argument)
    kinds = set() if field is None else list_kinds(field)
    if str in kinds:
        return f"{key}={_write_text(value, parsed, kinds)}"
    return argument if parsed else f"{key}={_rewrite_value(value)}"


def _write_text(value: str, parsed: Override | None, kinds: set[Any]) -> str:
    """The value of an option that may be a text. parsed: Hydra's reading; kinds: types of the option"""
    if os.path.exists(value):
        return quote_text(value)
    if parsed is not None and parsed.is_sweep_override():
        parsed = None
    if parsed and "${" not in value and parsed.value() == value:
        return value
    interpolated = "${" in value and value.startswith(("[", "{"))
    if parsed and not interpolated and _is_allowed(parsed._value, kinds):
        return value
    return _rewrite_value(value) if kinds & COLLECTIONS else quote_text(value)


def _is_swept(argument: str) -> bool:
    """Whether an argument has several values, each for a job of its own."""
    parsed = _parse(argument)
    return parsed is not None and parsed.is_sweep_override()


def _is_allowed(value: Any, kinds: set[Any]) -> bool:
    """Whether the option may have a value that is no plain text. kinds: types of the option"""
    if value is None:
        return NoneType in kinds
    return isinstance(value, QuotedString) or (isinstance(value, list | dict) and bool(kinds & COLLECTIONS))


def _parse(argument: str) -> Override | None:
    """Hydra's reading of an argument; None if its grammar lacks it."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _rewrite_value(value: str) -> str:
    """A value that Hydra's grammar lacks, rewritten: a YAML list with quoted texts, else one quoted text.

    A dict with such keys becomes a text, too, which `read_weights` takes apart.
    """
    if value.startswith("["):
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:  # such as {, which means something in YAML
            read = [each.strip() for each in value[1:-1].split(",")] if value.endswith("]") else None
        if isinstance(read, list) and not any(isinstance(each, list | dict) for each in read):
            return (
                "[" + ",".join(quote_text(each) if isinstance(each, str) else format_value(each) for each in read) + "]"
            )
    return quote_text(value)
