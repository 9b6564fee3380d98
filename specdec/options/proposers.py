"""The proposers of conf/proposer, configured by options and built for a target."""

from specdec.options.command_line import split_list

import os
import pkgutil
from dataclasses import asdict
from typing import Any

import yaml

from specdec.checkpoint import read_head_class, resolve
from specdec.core.option_types import (
    Options,
    Text,
    convert_text,
    describe_unknown_choice,
    find_options,
    prefix_option_names,
    read_options,
)
from specdec.decoding.drafting import Drafting
from specdec.options import config_files
from specdec.options.command_types import ProposerSettings
from specdec.proposers.base import Proposer
from specdec.target.model import Target

AUTO, HEAD = "auto", "head"
SHAPE = {"decode.depth", "decode.width", "decode.nodes"}  # options that ask for a fixed shape
NESTED = ("members", "inner")  # arguments with proposers, written as names; a proposer has at most one of them
Settings = dict[str, str]  # texts by KEY, and by NAME.KEY for a proposer inside another
Config = dict[str, Any]  # a file of conf/proposer with its final values; at NESTED: configurations by name


class ProposerOptions(Options):
    """Options of commands that decode with one proposer."""

    checkpoint: Text | None
    proposer: Text | None
    proposer_settings: ProposerSettings


def keep_shape(texts: dict[str, str]) -> dict[str, str]:
    """Presets of a command that decodes with one proposer: a shape among the texts is drafted as it is."""
    return {"proposer": HEAD} if not SHAPE.isdisjoint(texts) else {}


def list_names() -> list[str]:
    """The names of all proposers, in the order of the alphabet."""
    return list(config_files.list_files("proposer"))


def list_folders(config: Config) -> list[str]:
    """The real paths of the folders that a proposer reads: its head's, and a datastore's."""
    folders: set[str] = set()
    for value in config.values():
        if isinstance(value, dict):
            folders.update(list_folders(value))
        elif isinstance(value, str) and os.path.isdir(value):
            folders.add(os.path.realpath(value))
    return sorted(folders)


def configure_all(
    listed: str, *, settings: Settings, drafting: Drafting, checkpoints: dict[str, str]
) -> dict[str, Config]:
    """The proposers of a comma list, by name; those that hold a trained head once with each checkpoint, named after it.

    settings: texts by NAME.KEY, and `checkpoint`: the head inside all of them; checkpoints: folders by name
    Raises ValueError as `configure`, and for a head that adapts the target, which the proposers share.
    """
    is_per_head = "checkpoint" not in settings and len(checkpoints) > 1
    source = f"proposers={listed}"
    config_of_name: dict[str, Config] = {}
    for head, folder in checkpoints.items() or [("", None)]:
        configs = _configure_members(
            split_list(listed), source, settings, "proposer", drafting=drafting, checkpoint=folder
        )
        for name, config in configs.items():
            config_of_name[f"{name} with {head}" if is_per_head and list_heads(config) else name] = config
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
    """The configuration conf/proposer/<name>.yaml, with `settings` in place of its own.

    ${decode.KEY} stands for the drafting's values, ${checkpoint} for the trained head. prefix: group of its options
    Raises ValueError as `read_config`, and for a head where the proposer holds none.
    """
    checkpoint = settings.get("checkpoint", checkpoint)
    own_settings, inner_settings = split_settings(settings)
    if name == AUTO and checkpoint is None:
        own_settings = {"members": "[suffix]"} | own_settings  # nothing else drafts without a trained head
    config = read_config(name, own_settings, make_interpolations(drafting, checkpoint), prefix)
    nested = next((key for key in NESTED if key in config), "")
    members = config.get(nested, [])
    members = [members] if isinstance(members, str) else members
    configs = _configure_members(members, name, inner_settings, prefix, drafting=drafting, checkpoint=checkpoint)
    if nested:
        config[nested] = configs
    if "checkpoint" in settings and not list_heads(config):
        raise ValueError(f"{prefix}.checkpoint={settings['checkpoint']}: {name} holds no trained head.")
    return config


def split_settings(settings: Settings) -> tuple[Settings, Settings]:
    """Settings of a proposer itself, without its head's, and those of proposers inside it."""
    own_settings: Settings = {}
    inner_settings: Settings = {}
    for key, value in settings.items():
        if "." in key:
            inner_settings[key] = value
        elif key != "checkpoint":
            own_settings[key] = value
    return own_settings, inner_settings


def make_interpolations(drafting: Drafting, checkpoint: str | None) -> dict[str, Any]:
    """The values of ${decode.KEY}, ${decode} and ${checkpoint} in the files of conf/proposer."""
    decode = {**asdict(drafting), "nodes": drafting.shape.nodes}
    values = {f"${{decode.{key}}}": value for key, value in decode.items()}
    return values | {"${decode}": decode, "${checkpoint}": checkpoint and str(resolve(checkpoint))}


def _configure_members(
    names: list[str], source: str, settings: Settings, prefix: str, *, drafting: Drafting, checkpoint: str | None
) -> dict[str, Config]:
    """Configurations by name. settings: texts by NAME.KEY; source: list of the names, for messages"""
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
        name: configure(name, settings=texts, drafting=drafting, checkpoint=checkpoint, prefix=f"{prefix}.{name}")
        for name, texts in settings_of_member.items()
    }


def make_proposer(config: Config, target: Target, prefix: str = "proposer") -> Proposer:
    """The proposer of a configuration, for a target. prefix: group of its options

    Raises ValueError, with the option's name, for what does not fit.
    """
    arguments = dict(config)
    for nested in NESTED:
        inner_configs = arguments.pop(nested, {})
        members = [make_proposer(member, target, f"{prefix}.{name}") for name, member in inner_configs.items()]
        if members:
            arguments[nested] = members if nested == "members" else members[0]
    own_names = config.keys() - NESTED
    try:
        with prefix_option_names("decode"), prefix_option_names(prefix, only=own_names):
            return pkgutil.resolve_name(arguments.pop("_target_"))(target, **arguments)
    except ValueError as error:
        has_datastore = config.get("datastore")
        advice = " `specdec datastore data=FILE out=FOLDER` makes a datastore." if has_datastore else ""
        raise ValueError(f"{error}{advice}") from None


def list_heads(config: Config) -> list[str]:
    """The folders of the trained heads inside a configuration."""
    heads = [config["checkpoint"]] if "checkpoint" in config else []
    for nested in NESTED:
        for member in config.get(nested, {}).values():
            heads += list_heads(member)
    return heads


def read_config(name: str, settings: Settings, interpolations: dict[str, Any], prefix: str) -> Config:
    """A file of conf/proposer, with settings in place of its own. interpolations: values of `make_interpolations`

    Raises ValueError, with the option's name, for a setting that does not exist, is missing or has a wrong value.
    """
    if name not in list_names():
        raise ValueError(describe_unknown_choice("proposer", name, list_names()))
    config = yaml.safe_load(config_files.list_files("proposer")[name].read_text(encoding="utf-8"))
    for key, value in config.items():
        config[key] = interpolations.get(value, value) if isinstance(value, str) else value
    model = find_options(pkgutil.resolve_name(config["_target_"]))
    keys = [key for key in config if key != "_target_"]
    for key, text in settings.items():
        if key not in keys:
            raise ValueError(f"{prefix}.{key}={text}: {name} has the settings {', '.join(keys)}.")
        config[key] = split_list(text.strip("[]")) if key in NESTED else convert_text(model.model_fields[key], text)
    refuse_missing(name, config, prefix)
    read_options(model, {key: config[key] for key in keys if key in model.model_fields}, f"{prefix}.")
    return config


def refuse_missing(name: str, config: Config, prefix: str) -> None:
    """Raises ValueError for a setting that must be given, and for a missing head."""
    missing = next((key for key, value in config.items() if value == "???"), None)
    if missing:
        raise ValueError(f"Give {prefix}.{missing}=...: {name} needs it (see conf/proposer/{name}.yaml).")
    if config.get("checkpoint", "") is None:
        raise ValueError(f"proposer={name} needs a trained head: give checkpoint=DIR, or another proposer=.")
