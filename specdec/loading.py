"""Loading of a target, its tokenizer, checkpoints and proposers, for commands that decode."""

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

_threads: list[int] = []  # number of threads of this process, once it is chosen
DEFAULT_TARGET = "targets/smollm2-135m"
PROMPTS = "data/prompts_heldout.jsonl"
MAX_SETTINGS_BYTES = 2**20  # bound of a file of settings that a stranger may have made; real ones have some KiB


@dataclass(frozen=True)
class OpenTarget:
    """A target, ready to answer. stop: ids of tokens that end an answer"""

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

    name: str  # name of its file in conf/proposer
    proposer: Proposer
    checkpoint: Path | None  # folder of the trained head

    @property
    def title(self) -> str:
        """The chain or tree of a trained head, or the proposer's name."""
        return str(self.proposer.shape) if isinstance(self.proposer, HeadProposer) else self.name


def use_threads(record: Path | None = None) -> None:
    """Chooses the number of torch's threads, once in a process: OMP_NUM_THREADS, else one for each usable core.

    record: file of settings of results that are continued. If it exists, its number of threads comes before the cores.
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
    """A loader of plain values without aliases: a few of these can stand for more values than fit into memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name)")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> dict:
    """The plain values by name of a YAML or JSON file that a stranger may have made.

    Raises ValueError for a file that is too large, has other values, or is not of this form.
    """
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
    """The target of the options. default: its name where they give none; None: DEFAULT_TARGET

    Raises ValueError as `Target.load`, for a missing DEFAULT_TARGET with the command that makes it.
    """
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
            raise ValueError(f"{error} `make setup` (or specdec get_target) makes {name}.") from error
        raise


@functools.cache
def print_dtype(asked_dtype: str, dtype: str, choice: precision.DtypeChoice) -> None:
    """Prints, once in a process, which dtype `auto` is here and why, or that the asked one is slow here."""
    if asked_dtype == precision.AUTO:
        print(f"target.dtype={dtype} ({choice.reason})", file=sys.stderr)
    elif dtype == "bfloat16" != choice.dtype:
        print(f"target.dtype={dtype} is slow here ({choice.reason}); auto is {choice.dtype}", file=sys.stderr)


def open_target(target: Target) -> OpenTarget:
    """A loaded target with its tokenizer and stop tokens."""
    tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
    return OpenTarget(target, tokenizer, data.list_stop_tokens(tokenizer, target.model.generation_config))


def read_template(
    template_texts: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None, heads: Sequence[str] = ()
) -> dict[str, Any]:
    """The template arguments of a command: its own, and others as its checkpoints were trained.

    tokenizer: the target's, whose chat template takes the arguments; None: unknown here; heads: folders of checkpoints
    Raises ValueError for an argument that no template may have, or that this one does not read.
    """
    arguments = {**find_trained_template(heads), **messages.parse_arguments(template_texts)}
    if tokenizer is not None:
        chat_template.check_arguments(tokenizer, arguments)
    return arguments


def find_trained_template(heads: Sequence[str]) -> dict[str, Any]:
    """The template arguments of the rows that checkpoints were trained on; {} if unknown, or not the same for all."""
    templates: list[dict[str, Any]] = []
    for head in heads:
        data_facts = checkpoint.read_facts(checkpoint.resolve(head)).get("data")
        template = data_facts.get("template") if isinstance(data_facts, dict) else None
        templates.append(template if isinstance(template, dict) else {})
    is_known = templates and all(template == templates[0] for template in templates)
    return templates[0] if is_known else {}


def find_target_name(folder: Path, given_name: str | None = None) -> str:
    """The given name of a target, or that of the target that a checkpoint was trained for.

    Raises ValueError for a published head whose files do not name its target.
    """
    name = given_name or checkpoint.read_document(folder).get("target")
    if name is None:
        raise ValueError(
            f"{checkpoint.name_checkpoint(folder)} does not say which target it was trained for: "
            "give target.name=, a folder or a Hub name."
        )
    return str(name)


def warn_adapted(folder: Path | None, target: Target) -> None:
    """Prints that a head has changed its target, if it has."""
    if target.adapted:
        print(f"{folder} adapts its target: all outputs are those of the adapted one.", file=sys.stderr)


def load_head(folder: str, options: TargetOptions, *, exact: bool = False) -> LoadedHead:
    """A trained head beside its target. exact: the option of `checkpoint.load`

    Raises ValueError, with what to do, for a wrong folder or target.
    """
    path = checkpoint.resolve(folder)
    opened = load_target(options, default=find_target_name(path, options.name))
    drafter = checkpoint.load(path, opened.target, exact=exact)
    warn_adapted(path, opened.target)
    return LoadedHead(**vars(opened), folder=path, drafter=drafter)


def load_proposer(options: ProposerOptions, target: TargetOptions, drafting: Drafting) -> LoadedProposer:
    """A proposer beside its target, which is the checkpoint's if there is one.

    The default is auto, but the head itself where it does not draft by steps. Raises ValueError for what does not exist
    or does not fit.
    """
    head = options.proposer_settings.get("checkpoint", options.checkpoint)
    folder = checkpoint.resolve(head) if head else None
    name, config = configure_proposer(options, drafting, head, folder)
    opened = load_target(target, default=find_target_name(folder, target.name) if folder else None)
    proposer = proposers.make_proposer(config, opened.target)
    warn_adapted(folder, opened.target)
    return LoadedProposer(**vars(opened), name=name, proposer=proposer, checkpoint=folder)


def configure_proposer(
    options: ProposerOptions, drafting: Drafting, head: str | None, folder: Path | None
) -> tuple[str, proposers.Config]:
    """Name and configuration of the proposer of options, with a head, whose folder this is. See `load_proposer`."""
    name = options.proposer or proposers.AUTO
    if options.proposer is None and folder is not None and not issubclass(checkpoint.read_head_class(folder), Drafter):
        name = proposers.HEAD
    return name, proposers.configure(name, settings=options.proposer_settings, drafting=drafting, checkpoint=head)
