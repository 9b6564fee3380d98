"""The proposers of conf/proposer, configured by options and built for a target."""

from specdec.options.command_line import split_list

import os
import pkgutil
from dataclasses import asdict
from typing import Any

import yaml

from specdec.checkpoint import read_head_class, resolve
from specdec.core.option_types import Options, Text, convert_text, find_options, prefix_option_names, read_options
from specdec.decoding.drafting import Drafting
from specdec.options import config_files
from specdec.options.command_types import ProposerSettings
from specdec.proposers.base import Proposer
from specdec.target.model import Target

AUTO, HEAD = "auto", "head"
SHAPE = {"decode.depth", "decode.width", "decode.nodes"}  # options that ask for a fixed shape
NESTED = ("members", "inner")  # arguments that are proposers themselves, written as names
PROPOSER_SETTINGS = {  # options of verbs with proposers=
    "prefix": "proposer.",
    "help": "NAME.KEY=VALUE: settings of a proposer, see conf/proposer; checkpoint=DIR: its head",
}
Settings = dict[str, str]  # as written: KEY: VALUE, and NAME.KEY: VALUE for a proposer inside another
Config = dict[str, Any]  # a file of conf/proposer with its final values; at NESTED: configurations by name


class ProposerOptions(Options):
    """For commands that decode with one proposer."""

    checkpoint: Text | None
    proposer: Text | None
    proposer_settings: ProposerSettings


def keep_shape(texts: dict[str, str]) -> dict[str, str]:
    """Presets of a command that decodes with one proposer: a shape that is written is drafted as it is."""
    return {"proposer": HEAD} if not SHAPE.isdisjoint(texts) else {}


def list_names() -> list[str]:
    return list(config_files.list_files("proposer"))


def list_folders(config: Config) -> list[str]:
    """The folders that the proposer is read from: its head's, and a datastore's."""
    own_folders = [value for value in config.values() if isinstance(value, str) and os.path.isdir(value)]
    inner_folders = [folder for value in config.values() if isinstance(value, dict) for folder in list_folders(value)]
    return sorted({*map(os.path.realpath, own_folders), *inner_folders})


def configure_all(
    listed: str, *, settings: Settings, drafting: Drafting, checkpoints: dict[str, str]
) -> dict[str, Config]:
    """The proposers of a comma list, by name; those that hold a trained head with each of the checkpoints, and named after it.

    settings: NAME.KEY: VALUE, and `checkpoint` for all trained heads inside; checkpoints: folders by name
    Raises ValueError as `configure`, and for a head that adapts the target, which the proposers share.
    """
    is_per_head, config_of_name = "checkpoint" not in settings and len(checkpoints) > 1, dict[str, Config]()
    source = f"proposers={listed}"
    for head, folder in checkpoints.items() or [("", None)]:
        configs = _configure_members(
            split_list(listed), source, settings, "proposer", drafting=drafting, checkpoint=folder
        )
        config_of_name |= {
            f"{name} with {head}" if is_per_head and list_heads(member_config) else name: member_config
            for name, member_config in configs.items()
        }
    for head in {head for config in config_of_name.values() for head in list_heads(config)}:
        if read_head_class(head).adapts_target:
            raise ValueError(
                f"The head {head} adapts its target, which the other proposers share: evaluate it alone, or compare it "
                "with checkpoint=; name another head with proposer.checkpoint=DIR."
            )
    return config_of_name


def configure(
    name: str, *, settings: Settings, drafting: Drafting, checkpoint: str | None, prefix: str = "proposer"
) -> Config:
    """conf/proposer/<name>.yaml with `settings`; in it ${decode.KEY} is the drafting's, ${checkpoint} the trained head.

    prefix: what its options begin with
    """
    checkpoint = settings.get("checkpoint", checkpoint)
    decode = {**asdict(drafting), "nodes": drafting.shape.nodes}
    interpolated = {"${decode}": decode, "${checkpoint}": checkpoint and str(resolve(checkpoint))}
    interpolated |= {f"${{decode.{key}}}": value for key, value in decode.items()}
    own_settings = {key: value for key, value in settings.items() if "." not in key and key != "checkpoint"}
    if name == AUTO and checkpoint is None:
        own_settings = {"members": "[suffix]"} | own_settings  # nothing else drafts without a trained head
    config = read_config(name, own_settings, interpolated, prefix)
    nested = {key: [config[key]] if isinstance(config[key], str) else config[key] for key in NESTED if key in config}
    inner_settings = {key: value for key, value in settings.items() if "." in key}
    members = [member for group in nested.values() for member in group]
    configs = _configure_members(members, name, inner_settings, prefix, drafting=drafting, checkpoint=checkpoint)
    config |= {key: {member: configs[member] for member in group} for key, group in nested.items()}
    if "checkpoint" in settings and not list_heads(config):
        raise ValueError(f"{prefix}.checkpoint={settings['checkpoint']}: {name} holds no trained head.")
    return config


def _configure_members(
    names: list[str], source: str, settings: Settings, prefix: str, *, drafting: Drafting, checkpoint: str | None
) -> dict[str, Config]:
    """Configurations by name. settings: NAME.KEY: VALUE; where: what lists the names, for messages"""
    if len(set(names)) < len(names):
        raise ValueError(f"{source} has {', '.join(names)} inside it: list each once.")
    checkpoint = settings.get("checkpoint", checkpoint)
    settings_of_member: dict[str, Settings] = {name: {} for name in names}
    for key, value in settings.items():
        name, _, inner_key = key.partition(".")
        if name in settings_of_member and inner_key:
            settings_of_member[name][inner_key] = value
        elif key != "checkpoint":
            advice = f", only {' and '.join(names)}: write {prefix}.NAME.KEY" if names else ""
            raise ValueError(f"{prefix}.{key}={value}: {source} has no proposer {name!r} inside it{advice}.")
    return {
        name: configure(
            name, settings=settings_of_member[name], drafting=drafting, checkpoint=checkpoint, prefix=f"{prefix}.{name}"
        )
        for name in names
    }


def make_proposer(config: Config, target: Target, prefix: str = "proposer") -> Proposer:
    """The proposer of a configuration. Raises ValueError for what does not fit.

    prefix: what its options begin with
    """
    arguments: dict[str, Any] = {}
    for key in NESTED:
        members = [
            make_proposer(member_config, target, f"{prefix}.{name}")
            for name, member_config in config.get(key, {}).items()
        ]
        if members:
            arguments[key] = members if key == "members" else members[0]
    own_arguments = {key: value for key, value in config.items() if key not in NESTED}
    try:
        with prefix_option_names("decode"), prefix_option_names(prefix, only=own_arguments):
            return pkgutil.resolve_name(own_arguments.pop("_target_"))(target, **own_arguments, **arguments)
    except ValueError as error:
        advice = (
            " `specdec datastore data=FILE out=FOLDER` makes a datastore." if own_arguments.get("datastore") else ""
        )
        raise ValueError(f"{error}{advice}") from None


def list_heads(config: Config) -> list[str]:
    """The trained heads inside a configuration."""
    inner_configs = [inner_config for key in NESTED for inner_config in config.get(key, {}).values()]
    own_heads = [config["checkpoint"]] if "checkpoint" in config else []
    return own_heads + [head for inner_config in inner_configs for head in list_heads(inner_config)]


def read_config(name: str, settings: Settings, interpolated: dict[str, Any], prefix: str) -> Config:
    """A file of conf/proposer with settings in place of its own. interpolated: values of ${decode.KEY}, ${decode} and ${checkpoint}

    Raises ValueError, with the option's name, for a setting that does not exist or has a wrong value, and for one that lacks.
    """
    if name not in list_names():
        raise ValueError(f"There is no proposer {name!r}; there are: {', '.join(list_names())}.")
    config = yaml.safe_load(config_files.list_files("proposer")[name].read_text(encoding="utf-8"))
    for key, value in config.items():
        config[key] = interpolated.get(value, value) if isinstance(value, str) else value
    model = find_options(pkgutil.resolve_name(config["_target_"]))
    known_keys = [key for key in config if key != "_target_"]
    for key, text in settings.items():
        if key not in known_keys:
            raise ValueError(f"{prefix}.{key}={text}: {name} has the settings {', '.join(known_keys)}.")
        config[key] = split_list(text.strip("[]")) if key in NESTED else convert_text(model.model_fields[key], text)
    if missing := next((key for key, value in config.items() if value == "???"), None):
        raise ValueError(f"Give {prefix}.{missing}=...: {name} needs it (see conf/proposer/{name}.yaml).")
    if config.get("checkpoint", "") is None:
        raise ValueError(f"proposer={name} needs a trained head: give checkpoint=DIR, or another proposer=.")
    read_options(model, {key: value for key, value in config.items() if key in model.model_fields}, f"{prefix}.")
    return config
