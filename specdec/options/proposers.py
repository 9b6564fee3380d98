"""The proposers of conf/proposer, configured by options and built for a target."""

from specdec.options.command_line import CommandLineOptions, option, split

import os
import pkgutil
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from specdec import checkpoint
from specdec.checkpoint import resolve
from specdec.core import ranges
from specdec.core.ranges import named
from specdec.decoding.drafting import Drafting
from specdec.options import command_line, config_files
from specdec.proposers.base import Proposer
from specdec.target.model import Target

AUTO, HEAD = "auto", "head"
SHAPE = ("decode.depth", "decode.width", "decode.nodes")  # options that ask for a fixed shape
NESTED = ("members", "inner")  # arguments that are proposers themselves, written as names
Settings = dict[str, str]  # as written: KEY: VALUE, and NAME.KEY: VALUE for a proposer inside another
Config = dict[str, Any]  # a file of conf/proposer with its final values; at NESTED: configurations by name


@dataclass(frozen=True, kw_only=True)
class ProposerOptions(CommandLineOptions):
    """For commands that decode with one proposer."""

    checkpoint: str | None = option(None, command_line.CHECKPOINT)
    proposer: str | None = option(
        None,
        "what drafts: the name of a file in conf/proposer, where its settings are explained; null: auto, but a head's fixed "
        "shape with decode.depth, width or nodes",
    )
    settings: dict[str, str] = field(
        default_factory=dict, metadata={"prefix": "proposer.", "help": "settings of the proposer, see conf/proposer"}
    )


def names() -> list[str]:
    return list(config_files.list_files("proposer"))


def drawn_from(config: Config) -> list[str]:
    """The folders that the proposer is read from: its head's, and a datastore's."""
    own = [value for value in config.values() if isinstance(value, str) and os.path.isdir(value)]
    inside = [folder for value in config.values() if isinstance(value, dict) for folder in drawn_from(value)]
    return sorted({*map(os.path.realpath, own), *inside})


def configure_all(
    listed: str, *, settings: Settings, drafting: Drafting, checkpoints: dict[str, str]
) -> dict[str, Config]:
    """The proposers of a comma list, by name; those that hold a trained head with each of the checkpoints, and named after it.

    settings: NAME.KEY: VALUE, and `checkpoint` for all trained heads inside; checkpoints: folders by name
    Raises ValueError as `configure`, and for a head that adapts the target, which the proposers share.
    """
    several, found = "checkpoint" not in settings and len(checkpoints) > 1, dict[str, Config]()
    where = f"proposers={listed}"
    for head, folder in checkpoints.items() or [("", None)]:
        configs = _configure_each(split(listed), where, settings, "proposer", drafting=drafting, checkpoint=folder)
        found |= {f"{name} with {head}" if several and heads(each) else name: each for name, each in configs.items()}
    for head in {head for config in found.values() for head in heads(config)}:
        if checkpoint.head_class(head).adapts_target:
            raise ValueError(
                f"The head {head} adapts its target, which the other proposers share: evaluate it alone, or compare it "
                "with checkpoint=; name another head with proposer.checkpoint=DIR."
            )
    return found


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
    own = {key: value for key, value in settings.items() if "." not in key and key != "checkpoint"}
    if name == AUTO and checkpoint is None:
        own = {"members": "[suffix]"} | own  # nothing else drafts without a trained head
    config = read_config(name, own, interpolated, prefix)
    nested = {key: [config[key]] if isinstance(config[key], str) else config[key] for key in NESTED if key in config}
    inside = {key: value for key, value in settings.items() if "." in key}
    members = [member for group in nested.values() for member in group]
    configs = _configure_each(members, name, inside, prefix, drafting=drafting, checkpoint=checkpoint)
    config |= {key: {member: configs[member] for member in group} for key, group in nested.items()}
    if "checkpoint" in settings and not heads(config):
        raise ValueError(f"{prefix}.checkpoint={settings['checkpoint']}: {name} holds no trained head.")
    return config


def _configure_each(
    names: list[str], where: str, settings: Settings, prefix: str, *, drafting: Drafting, checkpoint: str | None
) -> dict[str, Config]:
    """Configurations by name. settings: NAME.KEY: VALUE; where: what lists the names, for messages"""
    if len(set(names)) < len(names):
        raise ValueError(f"{where} has {', '.join(names)} inside it: list each once.")
    checkpoint = settings.get("checkpoint", checkpoint)
    inside: dict[str, Settings] = {name: {} for name in names}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name in inside and rest:
            inside[name][rest] = value
        elif key != "checkpoint":
            only = f", only {' and '.join(names)}: write {prefix}.NAME.KEY" if names else ""
            raise ValueError(f"{prefix}.{key}={value}: {where} has no proposer {name!r} inside it{only}.")
    return {
        name: configure(
            name, settings=inside[name], drafting=drafting, checkpoint=checkpoint, prefix=f"{prefix}.{name}"
        )
        for name in names
    }


def make(config: Config, target: Target, prefix: str = "proposer") -> Proposer:
    """The proposer of a configuration. Raises ValueError for what does not fit.

    prefix: what its options begin with
    """
    arguments: dict[str, Any] = {}
    for key in NESTED:
        inside = [make(inner, target, f"{prefix}.{name}") for name, inner in config.get(key, {}).items()]
        if inside:
            arguments[key] = inside if key == "members" else inside[0]
    own = {key: value for key, value in config.items() if key not in NESTED}
    try:
        with named("decode"), named(prefix, only=own):
            return pkgutil.resolve_name(own.pop("_target_"))(target, **own, **arguments)
    except ValueError as error:
        advice = " `specdec datastore data=FILE out=FOLDER` makes a datastore." if own.get("datastore") else ""
        raise ValueError(f"{error}{advice}") from None


def heads(config: Config) -> list[str]:
    """The trained heads inside a configuration."""
    inside = [inner for key in NESTED for inner in config.get(key, {}).values()]
    own = [config["checkpoint"]] if "checkpoint" in config else []
    return own + [head for inner in inside for head in heads(inner)]


def read_config(name: str, settings: Settings, interpolated: dict[str, Any], prefix: str) -> Config:
    """A file of conf/proposer with settings in place of its own. interpolated: values of ${decode.KEY}, ${decode} and ${checkpoint}

    Raises ValueError, with the option's name, for a setting that does not exist or has a wrong value, and for one that lacks.
    """
    if name not in names():
        raise ValueError(f"There is no proposer {name!r}; there are: {', '.join(names())}.")
    config = yaml.safe_load(config_files.list_files("proposer")[name].read_text(encoding="utf-8"))
    for key, value in config.items():
        config[key] = interpolated.get(value, value) if isinstance(value, str) else value
    known = [key for key in config if key != "_target_"]
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{prefix}.{key}={value}: {name} has the settings {', '.join(known)}.")
        config[key] = read_setting(key, value, prefix)
    if missing := next((key for key, value in config.items() if value == "???"), None):
        raise ValueError(f"Give {prefix}.{missing}=...: {name} needs it (see conf/proposer/{name}.yaml).")
    if config.get("checkpoint", "") is None:
        raise ValueError(f"proposer={name} needs a trained head: give checkpoint=DIR, or another proposer=.")
    return config


def read_setting(key: str, value: str, prefix: str) -> Any:
    """A setting as YAML reads it; a text stays as it is written. Raises ValueError for one outside of its range."""
    declared = ranges.find(f"proposer.{key}")
    if declared is not None and declared.text and declared.lists == "no" and value != "null":
        return value
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{prefix}.{key}={value} cannot be read ({error}).") from None
    if declared is not None and not declared.fits(parsed):
        raise ValueError(f"{prefix}.{key}={value} must be {declared.words(parsed)}.")
    return parsed
