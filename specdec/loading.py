"""What the commands that decode load: the target, its tokenizer, and checkpoints."""

import functools
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import precision, threads
from specdec.core.option_types import prefix_option_names
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.options import proposers
from specdec.options.proposers import ProposerOptions
from specdec.options.target import TargetOptions
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target, load_tokenizer
from specdec.text import chat_template, messages
from specdec.text import conversations as data

_threads: list[int] = []  # of this process, once they are chosen
DEFAULT_TARGET = "targets/smollm2-135m"
PROMPTS = "data/prompts_heldout.jsonl"
MAX_SETTINGS_BYTES = 2**20  # bytes of a file of settings


@dataclass(frozen=True)
class OpenTarget:
    """A target, ready to answer."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    stop: set[int]


@dataclass(frozen=True)
class LoadedHead(OpenTarget):
    """A checkpoint beside its target."""

    folder: Path
    drafter: Head


@dataclass(frozen=True)
class LoadedProposer(OpenTarget):
    """A proposer beside its target."""

    name: str  # of the file in conf/proposer
    proposer: Proposer
    checkpoint: Path | None

    @property
    def title(self) -> str:
        """A trained head's chain or tree, or the proposer's name."""
        return str(self.proposer.shape) if isinstance(self.proposer, HeadProposer) else self.name


def use_threads(record: Path | None = None) -> None:
    """One for each core that this process may use, unless OMP_NUM_THREADS says otherwise; decided once in a process.

    record: settings of results that are continued, if it exists: as many as there
    """
    if _threads:
        return
    num_threads = os.environ.get("OMP_NUM_THREADS")
    if not num_threads and record is not None and record.exists():
        num_threads = checkpoint.read_json(record).get("threads")
    _threads.append(int(num_threads) if num_threads else threads.count_usable_cores())
    torch.set_num_threads(_threads[0])


def describe_machine(target: Target) -> dict:
    """The conditions under which times were measured."""
    on_cuda = target.device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(target.device) if on_cuda else platform.machine(),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def describe_target(target: Target) -> dict[str, Any]:
    """Name and fingerprint of a target, and the machine."""
    return {"target": target.name, "fingerprint": target.fingerprint(), **describe_machine(target)}


class _NoAliases(yaml.SafeLoader):
    """Plain values only. Aliases are refused: a few of them can stand for more values than fit into memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name)")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> dict:
    """A YAML or JSON file that a stranger may have made, as plain values by name. Raises ValueError for what is no such file."""
    if path.stat().st_size > MAX_SETTINGS_BYTES:
        raise ValueError(f"{path} is larger than {MAX_SETTINGS_BYTES >> 20} MiB, so it holds no settings.")
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML with plain values ({' '.join(str(error).split())}).") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no settings by name.")
    return document


def load_target(options: TargetOptions, *, default: str | None = None) -> OpenTarget:
    """default: its name, where the options give none; without one DEFAULT_TARGET. Raises ValueError as Target.load."""
    use_threads()
    name = options.name or default or DEFAULT_TARGET
    try:
        with prefix_option_names("target"):
            target = Target.load(
                name, dtype=options.dtype, device=options.device_here, trust_remote_code=options.trust_remote_code
            )
            print_dtype(options.dtype, str(target.dtype).removeprefix("torch."), precision.choose_dtype(target.device))
            return open_target(target)
    except ValueError as error:
        if name == DEFAULT_TARGET and not Path(name).exists():
            raise ValueError(f"{error} `make setup` (or python scripts/get_target.py) makes {name}.") from error
        raise


@functools.cache
def print_dtype(asked_dtype: str, dtype: str, choice: precision.DtypeChoice) -> None:
    """Once, which dtype `auto` is here and why, or that the given one is slow here."""
    if asked_dtype == precision.AUTO:
        print(f"target.dtype={dtype} ({choice.reason})", file=sys.stderr)
    elif dtype == "bfloat16" != choice.dtype:
        print(f"target.dtype={dtype} is slow here ({choice.reason}); auto is {choice.dtype}", file=sys.stderr)


def open_target(target: Target) -> OpenTarget:
    tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
    return OpenTarget(target, tokenizer, data.list_stop_tokens(tokenizer, target.model.generation_config))


def read_template(
    template_texts: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None, heads: Sequence[str] = ()
) -> dict[str, Any]:
    """Template arguments of a command, over those with which its checkpoints were trained.

    tokenizer: whose chat template must read them; None: not known here
    Raises ValueError for one that no template may have, or that this one does not read.
    """
    arguments = {**find_trained_template(heads), **messages.parse_arguments(template_texts)}
    if tokenizer is not None:
        chat_template.check_arguments(tokenizer, arguments)
    return arguments


def find_trained_template(heads: Sequence[str]) -> dict[str, Any]:
    """The template arguments of the rows that checkpoints were trained on; {} if they are not known, or not the same"""
    data_facts = [checkpoint.read_facts(checkpoint.resolve(head)).get("data") for head in heads]
    all_arguments = [_read_template_facts(facts) if isinstance(facts, dict) else {} for facts in data_facts]
    first_arguments = all_arguments[0] if all_arguments else {}
    return first_arguments if all(arguments == first_arguments for arguments in all_arguments) else {}


def _read_template_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The template arguments in what about.json says of a run's data."""
    arguments = facts.get("template")
    return arguments if isinstance(arguments, dict) else {}


def find_target_name(folder: Path, given_name: str | None = None) -> str:
    """The name of the target that a checkpoint was trained for, unless one is given.

    Raises ValueError for a published head whose files do not name its target.
    """
    name = given_name or checkpoint.read_document(folder).get("target")
    if name is None:
        raise ValueError(
            f"{checkpoint.name_checkpoint(folder)} does not say which target it was trained for: give target.name=, a folder or a Hub name."
        )
    return str(name)


def warn_adapted(folder: Path | None, target: Target) -> None:
    if target.adapted:
        print(f"{folder} adapts its target: all outputs are those of the adapted one.", file=sys.stderr)


def load_head(folder: str, options: TargetOptions, *, exact: bool = False) -> LoadedHead:
    """exact: as of `checkpoint.load`. Raises ValueError, with what to do, for a wrong folder or target."""
    path = checkpoint.resolve(folder)
    opened = load_target(options, default=find_target_name(path, options.name))
    drafter = checkpoint.load(path, opened.target, exact=exact)
    warn_adapted(path, opened.target)
    return LoadedHead(**vars(opened), folder=path, drafter=drafter)


def load_proposer(options: ProposerOptions, target: TargetOptions, drafting: Drafting) -> LoadedProposer:
    """A proposer beside its target, which is the checkpoint's if there is one.

    By default that is auto, where it can draft: not with a target that guesses ahead of itself. Raises ValueError for what does
    not exist or does not fit.
    """
    head = options.proposer_settings.get("checkpoint", options.checkpoint)
    folder = checkpoint.resolve(head) if head else None
    name = options.proposer or proposers.AUTO
    if options.proposer is None and folder is not None and not issubclass(checkpoint.read_head_class(folder), Drafter):
        name = proposers.HEAD
    config = proposers.configure(name, settings=options.proposer_settings, drafting=drafting, checkpoint=head)
    opened = load_target(target, default=find_target_name(folder, target.name) if folder else None)
    proposer = proposers.make_proposer(config, opened.target)
    warn_adapted(folder, opened.target)
    return LoadedProposer(**vars(opened), name=name, proposer=proposer, checkpoint=folder)
