"""What stands in conf/proposer, built for a target."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from helpers import loading
from specdec.checkpoint import drafter_class, read_json, resolve
from specdec.checkpoint import load as load_drafter
from specdec.drafting import Drafting
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from specdec.target import Target
from train.naming import named as option_of

FOLDER = loading.CONF / "proposer"
NESTED = ("members", "inner")  # arguments that are proposers themselves, written as names
Settings = dict[str, str]  # as written: KEY: VALUE, and MEMBER.KEY: VALUE for a proposer inside another
Config = dict[str, Any]  # a file of conf/proposer with the values that count; at NESTED, by name, those inside


@dataclass(frozen=True)
class ProposerOptions:
    """What a script's options hold beside target and decode, to choose any proposer."""

    checkpoint: str | None = field(
        default=None, metadata={"help": "a trained head: a step's folder, or a run's folder for its best step"}
    )
    proposer: str = field(default="head", metadata={"help": "what drafts: a file of conf/proposer, which says more"})
    settings: dict[str, str] = field(
        default_factory=dict, metadata={"prefix": "proposer.", "help": "settings of the proposer, see conf/proposer"}
    )


@dataclass(frozen=True)
class SeveralOptions:
    """The same for scripts that set several beside each other."""

    proposers: str = field(default="", metadata={"help": "comma list of files of conf/proposer"})
    settings: dict[str, str] = field(
        default_factory=dict, metadata={"prefix": "proposer.", "help": "NAME.KEY=VALUE: settings of a proposer"}
    )


@dataclass(frozen=True)
class Chosen(loading.Opened):
    """A proposer beside its target."""

    name: str  # of the file in conf/proposer
    proposer: Proposer
    checkpoint: Path | None

    @property
    def what(self) -> str:
        """For a title: a trained head's chain or tree, or the name."""
        return str(self.proposer.shape) if isinstance(self.proposer, HeadProposer) else self.name


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(given: ProposerOptions, options: loading.TargetOptions, drafting: Drafting) -> Chosen:
    """The target is that of the checkpoint, if there is one. Raises ValueError, with what to do."""
    folder = resolve(given.checkpoint) if given.checkpoint else None
    opened = loading.load_target(options, default=folder and loading.target_of(folder))
    proposer = build(
        given.proposer, opened.target, settings=given.settings, drafting=drafting, checkpoint=folder and str(folder)
    )
    if opened.target.adapted:
        print(f"{folder} adapts its target: all outputs are those of the adapted one.", file=sys.stderr)
    return Chosen(opened.target, opened.tokenizer, opened.stop, given.proposer, proposer, folder)


def build(name: str, target: Target, *, settings: Settings, drafting: Drafting, checkpoint: str | None) -> Proposer:
    """Raises ValueError, with what to do, for what does not exist or does not fit."""
    return make(configure(name, settings=settings, drafting=drafting, checkpoint=checkpoint), target)


def configure(name: str, *, settings: Settings, drafting: Drafting, checkpoint: str | None) -> Config:
    """conf/proposer/<name>.yaml with `settings`; there ${decode.KEY} is the drafting's, ${checkpoint} the trained head."""
    shared = {"decode": {**asdict(drafting), "nodes": drafting.shape.nodes}, "checkpoint": checkpoint}
    config = _read(name, {key: value for key, value in settings.items() if "." not in key}, shared)
    nested = {key: [config[key]] if isinstance(config[key], str) else config[key] for key in NESTED if key in config}
    members = [member for key in nested for member in nested[key]]
    inside = {key: value for key, value in settings.items() if "." in key}
    found = _configure_each(members, name, settings=inside, drafting=drafting, checkpoint=checkpoint)
    return config | {key: {member: found[member] for member in nested[key]} for key in nested}


def make(config: Config, target: Target) -> Proposer:
    """The proposer of a `configure`d file. Raises ValueError, with what to do, for what does not fit."""
    inside = {key: [make(one, target) for one in config[key].values()] for key in NESTED if key in config}
    arguments = {key: made if key == "members" else made[0] for key, made in inside.items()}
    own = {key: value for key, value in config.items() if key not in NESTED}
    with option_of("proposer"):
        try:
            return instantiate(own, target, **arguments, _convert_="all")
        except InstantiationException as error:
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise


def names_in(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def adapts(folder: str | Path) -> bool:
    """Whether the head of a checkpoint changes its target."""
    return drafter_class(str(read_json(Path(folder) / "drafter.json").get("_target_"))).adapts_target


def configure_all(named: str, *, settings: Settings, drafting: Drafting, checkpoint: str | None) -> dict[str, Config]:
    """The proposers of a comma list; settings: NAME.KEY: VALUE. Raises ValueError as `build`."""
    if checkpoint and adapts(checkpoint):
        raise ValueError(
            f"checkpoint={checkpoint} adapts its target, which the others share: evaluate it alone, or name it in runs=."
        )
    return _configure_each(
        names_in(named), f"proposers={named}", settings=settings, drafting=drafting, checkpoint=checkpoint
    )


def _configure_each(
    named: list[str], where: str, *, settings: Settings, drafting: Drafting, checkpoint: str | None
) -> dict[str, Config]:
    """settings: NAME.KEY: VALUE; where: they are listed, for a message"""
    if len(set(named)) < len(named):
        raise ValueError(f"{where} has {', '.join(named)} inside it: list each once.")
    inside: dict[str, Settings] = {name: {} for name in named}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name not in inside or not rest:
            only = f", only {' and '.join(named)}: write proposer.NAME.KEY" if named else ""
            raise ValueError(f"proposer.{key}={value}: {where} has no proposer {name!r} inside it{only}.")
        inside[name][rest] = value
    return {name: configure(name, settings=inside[name], drafting=drafting, checkpoint=checkpoint) for name in named}


def folders(config: Config) -> set[str]:
    """What is named anywhere in a configuration and lies on this machine."""
    found: set[str] = set()
    for value in config.values():
        if isinstance(value, dict):
            found |= folders(value)
        elif isinstance(value, str) and Path(value).is_dir():
            found.add(value)
    return found


def _read(name: str, settings: Settings, shared: dict) -> Config:
    if name not in names():
        raise ValueError(f"There is no proposer {name!r}; there are: {', '.join(names())}.")
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    known = [str(key) for key in config if key != "_target_"]
    whole = OmegaConf.create({"proposer": config, **shared})
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"proposer.{key}={value}: {name} has the settings {', '.join(known)}.")
        whole.proposer[key] = _parse(whole.proposer, key, value)
    try:
        found = OmegaConf.to_container(whole.proposer, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key).rpartition(".")[2]
        raise ValueError(f"Give proposer.{key}=...: {name} needs it (see conf/proposer/{name}.yaml).") from None
    if found.get("checkpoint", "") is None:
        raise ValueError(f"proposer={name} needs a trained head: give checkpoint=DIR, or another proposer=.")
    return found


def _parse(config: DictConfig, key: str, value: str):
    """A setting as YAML reads it. Raises ValueError if that is no number, name or list where the default is one."""
    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"proposer.{key}={value} cannot be read ({error}).") from None
    if OmegaConf.is_missing(config, key):
        return value  # a name or a folder, as it is written
    if config[key] is None:
        return found
    default = config[key]  # what an interpolation stands for
    default = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
    if type(found) is not type(default) and not (isinstance(default, float) and type(found) is int):
        kinds = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            list: "a list",
            str: "a name",
            dict: "settings",
        }
        raise ValueError(f"proposer.{key}={value} must be {kinds[type(default)]}, such as {default}.")
    return found


def head(target: Target, *, checkpoint: str, decode: dict) -> HeadProposer:
    """conf/proposer/head.yaml: the drafter of a checkpoint, drafting as `decode` says."""
    drafter = load_drafter(checkpoint, target)
    with option_of("decode"):
        return Drafting(**decode).proposer(drafter)
