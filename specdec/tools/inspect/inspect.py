"""What a model can do as a target, and what its MTP module is worth, from its files alone."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import transformers
from pydantic import model_validator
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.core import files as file_tools
from specdec.core import hub, progress
from specdec.core.option_types import Options, Text, prefix_option_names
from specdec.core.shards import Shards, fetch_file
from specdec.heads.native_modules.diagnosis import diagnose_module
from specdec.options import config_files
from specdec.options.command_types import OUTPUT_FILE
from specdec.options.target import TargetOptions
from specdec.target.loading import load_config, load_tokenizer, open_shards
from specdec.target.model import Target
from specdec.target.quantised import name_quantisation
from specdec.tools.inspect import sections
from specdec.tools.inspect.model_files import StoredModel, find_model_files
from specdec.tools.inspect.sections import MODULE, PageSection
from specdec.tools.inspect.support import Support, examine_config, find_misfit, is_tested

NO_TARGET_STATUS = 2  # exit status for a model that cannot be a target as it is; 1 is that of a wrong command
FORMAT_VERSION = 1  # of the JSON document

MemoryCounter = Callable[[Target], dict[str, str]]  # memory of training by head, in words
Page = list[PageSection]


class InspectOptions(Options):
    base: Text | None
    machine: Text
    run: bool
    out: Annotated[Text | None, OUTPUT_FILE]
    target: TargetOptions

    @model_validator(mode="after")
    def check_machine(self) -> "InspectOptions":
        machines = config_files.list_files("machine")
        if self.machine not in machines:
            raise ValueError(f"machine={self.machine} must be one of {', '.join(machines)}.")
        return self


@dataclass(frozen=True)
class Subject:
    """A model of transformers.

    files: None where the Hub cannot be reached, and only the outline of conf/target is at hand
    shards: opened files; None: they are not here, or damaged
    tokenizer: None where it cannot be read, which is a problem of the files
    tried: file of results of this project with the model; None: it never ran it
    template_options: values of the options of its chat template, where only conf/target has them
    """

    name: str
    config: PreTrainedConfig
    support: Support
    files: StoredModel | None
    shards: Shards | None
    tokenizer: PreTrainedTokenizerBase | None
    tried: str | None
    template_options: dict[str, list] | None = None

    @property
    def is_target(self) -> bool | None:
        """Whether it can be a target as it is; None: only a load can tell."""
        if self.support.refused or (self.files is not None and self.files.problems):
            return False
        return True if self.support.outline is not None or is_tested(self.config) else None


def inspect_model(options: InspectOptions, count_memory: MemoryCounter, console: progress.Results) -> int:
    """Prints the page on a model, and writes it as JSON. Returns the exit status.

    Raises ValueError for a name without a model.
    """
    transformers.utils.logging.set_verbosity_error()  # kernels that are missing here say nothing of the model
    with prefix_option_names("target"):
        name = file_tools.expand_home(str(options.target.name))
        try:
            is_target, page = examine_model(name, options, count_memory)
        except ValueError as error:
            if not has_files(name):
                raise
            is_target, page = False, [sections.refuse_model(str(error))]
    sections.print_page(page, console)
    if options.out is not None:
        document = {"version": FORMAT_VERSION, "name": name, "can_be_target": is_target}
        facts = {section.name: section.facts for section in page}
        file_tools.write_text(Path(options.out), json.dumps(document | facts, indent=2) + "\n")
    return NO_TARGET_STATUS if is_target is False else 0


def has_files(name: str) -> bool:
    """Whether there is a file or a folder of this name, or a model on the Hub."""
    return Path(name).exists() or (hub.is_hub_name(name) and fetch_file(name, "config.json") is not None)


def examine_model(name: str, options: InspectOptions, count_memory: MemoryCounter) -> tuple[bool | None, Page]:
    """Whether a model can be a target (None: only a load can tell), and all sections on it."""
    if any((Path(name) / file).exists() for file in ("drafter.json", checkpoint.BEST_FILE)):
        return False, [sections.describe_checkpoint(checkpoint.resolve(name))]
    document = find_outline(name)
    if document and not hub.is_folder(name) and not hub.is_hub_reachable():
        subject = describe_outline(name, document)
        return subject.is_target, list_sections(subject, options, count_memory)
    files = find_model_files(name)
    if files.kind == "adapter":
        return False, [sections.describe_adapter(files)]
    if files.kind == "GGUF":
        return False, [sections.describe_gguf(files), describe_module(name, options)]
    subject = examine_files(files, options, document)
    return subject.is_target, list_sections(subject, options, count_memory)


def examine_files(files: StoredModel, options: InspectOptions, document: dict[str, Any]) -> Subject:
    """A model of transformers, with problems that only its configuration and its tokenizer show.

    document: the document of conf/target; {}: none
    """
    config = load_config(files.name, trust_remote_code=options.target.trust_remote_code)
    support = examine_config(config, files.name)
    shards = None if files.remote or files.problems else open_files(files, config, support)
    if options.run and not support.refused and not files.problems:
        support = replace(support, **run_target(options))
    tokenizer = None if support.refused else read_tokenizer(files, options)
    return Subject(files.name, config, support, files, shards, tokenizer, document.get("tried"))


def describe_outline(name: str, document: dict[str, Any]) -> Subject:
    """A model that is out of reach, as its document in conf/target describes it."""
    outline = {key: value for key, value in document["outline"].items() if key != "of"}
    config = AutoConfig.for_model(**outline)
    support = examine_config(config, name)
    return Subject(name, config, support, None, None, None, document["tried"], document["template_options"])


def open_files(files: StoredModel, config: PreTrainedConfig, support: Support) -> Shards | None:
    """The opened weights; None, with a problem of the files, where they are not as the configuration says."""
    try:
        shards = open_shards(files.name, config)
    except ValueError as error:
        files.problems.append(str(error))
        return None
    is_plain = name_quantisation(config) is None
    misfit = find_misfit(support.outline, shards) if support.outline is not None and is_plain else None
    if misfit is not None:
        files.problems.append(misfit)
    return shards


def find_outline(name: str) -> dict[str, Any]:
    """The document of conf/target with the outline of this model; {}: the project has none."""
    for file in config_files.list_files("target"):
        document = config_files.read_file("target", file)
        if (document["outline"] or {}).get("of") == name:
            return document
    return {}


def list_sections(subject: Subject, options: InspectOptions, count_memory: MemoryCounter) -> Page:
    """All sections on a model of transformers."""
    outline = subject.support.outline
    page = [
        sections.describe_files(subject.files),
        sections.describe_model(subject.config, subject.support),
        sections.describe_target(subject.config, subject.support, subject.tried, is_target=subject.is_target),
    ]
    if outline is not None:
        page += [sections.describe_layers(outline), sections.describe_heads(subject.config, subject.name)]
    if subject.files is not None:
        page += list_file_sections(subject, subject.files, options)
    elif subject.template_options:
        page.append(sections.describe_listed_options(subject.template_options))
    if outline is not None:
        page.append(sections.describe_memory(outline, options.machine, count_memory(outline)))
    if subject.is_target:
        states = [section.facts.get("state") for section in page if section.name == MODULE]
        page.append(sections.describe_next_steps(subject.name, states[0] if states else None, options.base))
    elif subject.is_target is None:
        page.append(sections.advise_loading(subject.name))
    return page


def list_file_sections(subject: Subject, files: StoredModel, options: InspectOptions) -> Page:
    """The sections that need more of a model than its configuration."""
    page = [sections.describe_quantisation(subject.config, subject.shards)]
    if subject.tokenizer is not None:
        page = [sections.describe_template(subject.tokenizer), *page]
    if files.remote:
        page.append(sections.list_module_tensors(subject.config, files))
    elif subject.shards is not None:
        page.append(describe_module(files.name, options))
    return page


def read_tokenizer(files: StoredModel, options: InspectOptions) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None, with a problem of the files, where it cannot be read."""
    try:
        return load_tokenizer(files.name, trust_remote_code=options.target.trust_remote_code)
    except ValueError as error:
        files.problems.append(f"Its tokenizer cannot be read: {error}")
        return None


def run_target(options: InspectOptions) -> dict[str, Any]:
    """Fields of `Support` that a load of the model adds: what it has shown, or why it was refused."""
    start = time.perf_counter()
    try:
        with progress.start_task(f"loading {options.target.name}"):
            target = loading.load_target(options.target).target
    except ValueError as error:
        return {"reason": str(error), "refused": True}
    seconds = progress.format_duration(time.perf_counter() - start)
    dtype = str(target.dtype).removeprefix("torch.")
    return {"run": f"loaded in {seconds} as {dtype} on {target.device}: logits equal those of its own forward pass"}


def describe_module(name: str, options: InspectOptions) -> PageSection:
    """The state of the model's own MTP module, and the remedy for each finding."""
    diagnosis = diagnose_module(name, base=options.base)
    first, *others = diagnosis.lines()
    return PageSection(MODULE, diagnosis.to_json(), [first.removeprefix(f"MTP module of {name}: "), *others])
