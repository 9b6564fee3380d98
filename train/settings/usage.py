"""--help of train.py, and what is like an option or choice that does not exist."""

import difflib
import pkgutil
import re
from collections.abc import Iterator, Sequence

import yaml

from specdec.core.option_types import describe_bounds, describe_unknown, find_options, list_fields
from specdec.options import config_files
from specdec.options.command_defaults import NO_BOUNDS
from train.settings.options import RunOptions

YAML_KEY = re.compile(r"^( *)(\w+):")
COMMAND_GROUPS = ("proposer", "suite", "protocol", "command")  # groups that other commands read


def list_groups() -> list[str]:
    """Names of the groups of train.py."""
    groups = {path.name for folder in config_files.conf_folders() for path in folder.iterdir() if path.is_dir()}
    return sorted(groups - set(COMMAND_GROUPS))


def describe_usage() -> str:
    """What --help prints: the choices, and files of conf/, whose comments explain the options, with their bounds."""
    groups = [group for group in list_groups() if group != "objective"]
    choices = [f"  {group}={'|'.join(config_files.list_files(group))}" for group in groups]
    shown_files = ("train", "head/eagle", "objective/base", "data/shipped", "target/smollm2-135m", "decode/chain")
    files = [f"# conf/{name}.yaml\n{show_file(name)}" for name in shown_files]
    return "\n".join(
        ["Choices, each a file in conf/:", *choices, "", "Options, KEY=VALUE, and their defaults:", "", *files]
    )


def show_file(name: str) -> str:
    """A file of conf/, with what each option may be behind its comment."""
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
        lines.append(
            line
            if not bounds or bounds.startswith((*NO_BOUNDS, "one of"))
            else f"{line}{' ' if '#' in line else ' # '}({bounds})"
        )
    return "\n".join([*lines, ""])


def refuse_choices(arguments: Sequence[str]) -> str | None:
    """The sentence for the first GROUP=NAME that has no file; None if all have one, or a folder of the user's own may have it."""
    if any(argument.startswith(("--config-", "-cd", "-cp", "hydra.searchpath")) for argument in arguments):
        return None
    groups = set(list_groups())
    for group, _, value in (argument.partition("=") for argument in arguments):
        if group not in groups or re.search(r"[^\w.,/+-]", value):  # such as glob(*)
            continue
        files = config_files.list_files(group)
        for name in value.split(","):
            if name.removesuffix(".yaml") not in files:
                close = difflib.get_close_matches(name, files, n=1, cutoff=0.5)
                guess = f" Did you mean {close[0]!r}?" if close else ""
                return f"error: There is no {group} {name!r}.{guess} Leave {group}= out, or give one of: {', '.join(files)}."
    return None


def find_unknown_option(arguments: list[str]) -> str | None:
    """What is wrong with the first option of a command line, KEY=VALUE, that no file of conf/ has; None if all are known."""
    load = lambda file: yaml.safe_load(file.read_text()) or {}
    option_names = set(_list_keys(load(config_files.HOME / "conf" / "train.yaml")))
    for group in list_groups():
        place = "head.objective" if group == "objective" else group
        files = config_files.list_files(group).values()
        option_names |= {place, *(key for file in files for key in _list_keys(load(file), f"{place}."))}
    for key in (each.partition("=")[0] for each in arguments if "=" in each):
        if key not in option_names and not key.startswith(("+", "~", "-", "hydra")):
            return describe_unknown(key, option_names)
    return None


def _list_keys(settings: dict, prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _list_keys(value, f"{prefix}{key}.")
