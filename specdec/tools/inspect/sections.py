"""The sections of the page on a model: each has facts for the JSON document, and lines for the terminal."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import progress
from specdec.core.shards import Shards
from specdec.core.wording import format_count
from specdec.export.engines import FORMATS as EXPORT_FORMATS
from specdec.heads.native_modules.diagnosis import NONE as NO_MODULE
from specdec.heads.native_modules.diagnosis import SOUND
from specdec.target.fingerprint import in_mtp_module
from specdec.target.model import Target
from specdec.target.quantised import describe_reading, find_obstacle, name_quantisation
from specdec.text.chat_template import find_form
from specdec.text.messages import write_value
from specdec.text.template_options import find_template_error, has_markers, list_options, takes_tools
from specdec.tools.inspect.model_files import MAX_NAMED, StoredModel
from specdec.tools.inspect.support import (
    FORMATS,
    HEADS,
    HeadSupport,
    Support,
    count_layers,
    is_tested,
    list_heads,
    make_vocabulary_twin,
    measure_size,
    read_tested_families,
)

GB = 1e9
MODULE = "MTP module"  # name of its section
FORMAT_NAMES = {engine: name for name, engine in FORMATS.items()}
MAX_REFUSAL_LENGTH = 180  # characters of a refusal on the terminal
USABLE_STATES = (SOUND, "tuned", "quantised")  # states of an MTP module that is trained as it is
UNKNOWN = "not known to load"
CELLS = {"yes": "yes", UNKNOWN: "?"}  # cells of the table of heads; all else: no


@dataclass(frozen=True)
class PageSection:
    """A part of the page. facts: its content in the JSON document

    lines: its content on the terminal, broken at its width; table: lines before them that are not broken
    """

    name: str
    facts: dict[str, Any]
    lines: list[str]
    table: Sequence[str] = ()


def format_size(num: int) -> str:
    """A number of parameters in millions or billions."""
    return f"{num / 1e9:.2f} B" if num >= 1e9 else f"{num / 1e6:.1f} M"


def print_page(page: Sequence[PageSection], console: progress.Results) -> None:
    """Prints sections, with their names on the left and their lines beside them."""
    margin = 2 + max(len(section.name) for section in page)
    for section in page:
        for number, line in enumerate([*section.table, *section.lines]):
            heading = f"{section.name if number == 0 else '':<{margin}}"
            is_broken = number >= len(section.table)
            console.print(wrap_line(heading, line, console.width) if is_broken else heading + line)


def wrap_line(heading: str, line: str, width: int) -> str:
    """A line behind its heading, broken between words where it is too long."""
    if len(heading) + len(line) <= width:
        return heading + line
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = heading, " " * len(heading)
    return wrapper.fill(line)


def describe_files(files: StoredModel | None) -> PageSection:
    """Where the model is, how large its files are, and what is missing or damaged. files: None: only an outline"""
    if files is None:
        lines = ["the Hub cannot be reached: figures follow from its outline in conf/target"]
        return PageSection("files", {"kind": "outline"}, lines)
    size = "of unknown size" if files.num_bytes is None else f"{files.num_bytes / GB:,.2f} GB"
    place = "on the Hub, not here: headers alone were read" if files.remote else "here"
    dtypes = ", ".join(f"{num} {dtype}" for dtype, num in files.dtypes.items())
    lines = [f"{files.kind}, {format_count(len(files.tensors), 'tensor')} ({dtypes}), {size}, {place}"]
    facts = {"kind": files.kind, "bytes": files.num_bytes, "dtypes": files.dtypes, "remote": files.remote}
    return PageSection("files", {**facts, "problems": files.problems}, [*lines, *files.problems])


def describe_model(config: PreTrainedConfig, support: Support) -> PageSection:
    """The family, and the sizes of the text part."""
    text_config = config.get_text_config(decoder=True)
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "text_model_type": text_config.model_type,
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
    }
    inside = "" if config.model_type == text_config.model_type else f", whose text part is {text_config.model_type}"
    positions = facts["max_position_embeddings"]
    context = f", {positions:,} positions" if positions else ""
    lines = [f"{config.model_type}{inside}: width {facts['hidden_size']:,}, {facts['vocab_size']:,} tokens{context}"]
    if support.outline is not None:
        size = measure_size(support.outline)
        facts |= asdict(size)
        active = ""
        if size.experts is not None:
            chosen = f"{size.experts[1]} of {size.experts[0]} experts"
            active = f", {format_size(size.active_parameters)} of them for a token ({chosen})"
        lines.append(f"{format_size(size.parameters)} parameters in the text part{active}")
    return PageSection("model", facts, lines)


def describe_target(
    config: PreTrainedConfig, support: Support, tried: str | None, *, is_target: bool | None
) -> PageSection:
    """Whether the model can be a target, and what that rests on.

    tried: file of results of this project with the model; is_target: None: only a load can tell
    """
    model_type, tested = config.get_text_config(decoder=True).model_type, is_tested(config)
    verdict = {True: "yes", False: "no", None: "only a load can tell"}[is_target]
    reason = support.reason.split(". ")[0] if is_target is None else support.reason
    if is_target is False and not support.refused:
        reason = "Its files are not whole, or not as its configuration says."
    lines = [f"{verdict}. {reason}" if reason else verdict]
    if is_target is not False:
        basis = "tiny models of its type are tested" if tested else f"no model of the type {model_type} is tested"
        lines.append(f"{basis}; this project has run it ({tried})" if tried else f"{basis}; this project never ran it")
    if support.run:
        lines.append(support.run)
    facts = {"verdict": verdict, "reason": reason, "family_is_tested": tested, "tried": tried, "run": support.run}
    return PageSection("target", facts, lines)


def refuse_model(reason: str) -> PageSection:
    """The verdict on files that no configuration of a target can be read from."""
    return PageSection("target", {"verdict": "no", "reason": reason}, [f"no. {reason}"])


def describe_layers(target: Target) -> PageSection:
    """The kinds of layers, and what follows from them for drafts and for training texts."""
    kinds, reach = count_layers(target), target.layer_kinds.reach
    compiled = target.config.model_type in read_tested_families().compiled
    facts = {
        "kinds": kinds,
        "reach": reach,
        "verifies": "chains" if target.recurrent else "chains and trees",
        "packed_training": True,  # recurrent layers read each document of a pack by itself
        "compiled_decoding": compiled,
        "max_positions": target.max_positions,
    }
    layers = ", ".join(f"{num} {kind.replace('_', ' ')}" for kind, num in kinds.items())
    window = f"; the shortest window is {reach:,} positions, so drafts must be shorter" if reach else ""
    compiling = "compiled decoding" if compiled else "no compiled decoding"
    return PageSection(
        "layers", facts, [f"{layers}{window}", f"verifies {facts['verifies']}; trains in packs; {compiling}"]
    )


def describe_heads(config: PreTrainedConfig, name: str) -> PageSection:
    """The heads that can draft for the model, and the engines that serve their exports."""
    heads = list_heads(make_vocabulary_twin(config, name))
    engines = list(FORMATS.values())
    width = max(map(len, HEADS.values())) + 2
    table = ["".join([" " * width, *(f"{engine:<11}" for engine in engines)]).rstrip()]
    for head in heads:
        cells = ["cannot be trained"] if head.refusal else [f"{CELLS.get(head.engines[e], 'no'):<11}" for e in engines]
        table.append("".join([f"{HEADS[head.head]:<{width}}", *cells]).rstrip())
    lines = list_target_refusals(heads)
    if any(UNKNOWN in head.engines.values() for head in heads):
        lines.append("?: the engine's source gives no hidden states of this family")
    facts = {head.head: {"trains": not head.refusal, "refusal": head.refusal, **head.engines} for head in heads}
    return PageSection("heads", facts, lines, table)


def list_target_refusals(heads: Sequence[HeadSupport]) -> list[str]:
    """Why heads have no export for this target, in short. Kinds of heads that an engine lacks are not named.

    The JSON document has the whole sentences.
    """
    engines_by_refusal: dict[str, list[str]] = {}
    for head in heads:
        answers = {"": head.refusal} if head.refusal else head.engines
        for engine, answer in answers.items():
            takes = not engine or head.head in EXPORT_FORMATS[FORMAT_NAMES[engine]].takes
            if takes and answer not in CELLS:
                summary = textwrap.shorten(answer.split(". ")[0], MAX_REFUSAL_LENGTH, placeholder=" ..")
                engines_by_refusal.setdefault(f"{HEADS[head.head]}: {summary}", []).append(engine)
    return [
        f"{refusal} ({', '.join(filter(None, names))})".replace(" ()", "")
        for refusal, names in engines_by_refusal.items()
    ]


def describe_next_steps(name: str, module_state: str | None, base: str | None) -> PageSection:
    """The commands with which an owner of the model goes on.

    module_state: state of its MTP module; None: not examined; base: the model that it comes from, if it is known
    """
    target = f"target.name={shlex.quote(name)}"
    lines = [
        f"specdec answer {target} prompts=my_prompts.jsonl out=my_answers.jsonl decode.temperature=0,1",
        f"python train.py head=eagle3 {target} data.train=my_answers.jsonl plan=true",
    ]
    if module_state in USABLE_STATES:
        lines.append(f"python train.py head=native_mtp {target} data.train=my_answers.jsonl plan=true")
    elif module_state not in (None, NO_MODULE, "never had"):
        models = f"checkpoint={shlex.quote(name)} source={shlex.quote(base or 'BASE')}"
        lines.append(f"specdec adapt {models} prompts=my_prompts.jsonl old= out=rescued")
    return PageSection("next", {"commands": lines}, [], lines)


def advise_loading(name: str) -> PageSection:
    """The command that tells whether a model can be a target, where its configuration does not."""
    command = f"specdec inspect target.name={shlex.quote(name)} run=true"
    return PageSection("next", {"commands": [command]}, [], [command])


def describe_template(tokenizer: PreTrainedTokenizerBase) -> PageSection:
    """The chat template: its options, its places for tools and thoughts, and its generation markers."""
    if not tokenizer.chat_template:
        advice = "a base model: prompts are plain text (docs/targets.md)"
        return PageSection("template", {"chat_template": False}, [f"no chat template, {advice}"])
    if error := find_template_error(tokenizer):
        return PageSection(
            "template", {"chat_template": True, "reason": error}, [f"the chat template cannot be parsed: {error}"]
        )
    template_options = list_options(tokenizer)
    abilities = {
        "tools": takes_tools(tokenizer),
        "thoughts": find_form(tokenizer).thoughts is not None,
        "generation markers": has_markers(tokenizer),
    }
    words = [f"{name} {'yes' if is_there else 'no'}" for name, is_there in abilities.items()]
    lines = [", ".join(words), *(option.describe() for option in template_options)]
    facts = {"chat_template": True, **abilities, "options": [asdict(option) for option in template_options]}
    return PageSection("template", facts, lines)


def describe_listed_options(template_options: dict[str, list]) -> PageSection:
    """The options of a chat template that is out of reach, as conf/target lists them."""
    lines = []
    for name, values in template_options.items():
        default, *others = map(write_value, values)
        lines.append(f"{name}: {', '.join([f'{default} (default)', *others])}")
    return PageSection("template", {"options": template_options}, lines)


def describe_quantisation(config: PreTrainedConfig, shards: Shards | None) -> PageSection:
    """The quantisation of the weights, and how they are read in this process. shards: None: not here, or damaged"""
    obstacle = find_obstacle(config)
    facts = {"method": name_quantisation(config), "obstacle": obstacle}
    return PageSection("quantisation", facts, [describe_reading(config, shards)])


def list_module_tensors(config: PreTrainedConfig, files: StoredModel) -> PageSection:
    """The tensors of an MTP module on the Hub, by their names alone."""
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    names = [name for name in files.tensors if in_mtp_module(name, num_layers)]
    lines = [f"{format_count(len(names), 'tensor')} by name; their values are examined once the model is here"]
    return PageSection(MODULE, {"tensors": names}, lines)


def describe_memory(target: Target, machine: str, training: dict[str, str]) -> PageSection:
    """Memory of weights and cache. training: memory of training by head, in words"""
    size = measure_size(target)
    weights = size.parameters * target.dtype.itemsize
    facts = {"weights": weights, "cache_per_token": size.entry_bytes, "machine": machine, "training": training}
    cache = f"{size.entry_bytes / 1024:,.0f} KiB of cache for a token ({size.entry_bytes * 8192 / GB:.2f} GB for 8,192)"
    lines = [f"{weights / GB:,.2f} GB of weights in bfloat16; {cache}"]
    return PageSection(
        "memory", facts, [*lines, *(f"training {head} on {machine}: {text}" for head, text in training.items())]
    )


def describe_adapter(files: StoredModel) -> PageSection:
    """An adapter's base, and what to do with it."""
    base, rank = files.fields.get("base_model_name_or_path"), files.fields.get("r")
    modules = files.fields.get("target_modules")
    names = ", ".join(modules[:MAX_NAMED]) if isinstance(modules, list) else str(modules)
    facts = {"base": base, "rank": rank, "kind": files.fields.get("peft_type"), "target_modules": modules}
    merge = "merge it into its base and save the result (peft: merge_and_unload, save_pretrained)"
    lines = [
        f"{facts['kind']} adapter of rank {rank} on {base} ({names})",
        f"no target by itself: {merge}, then inspect that; an MTP module comes from the base (source={base})",
    ]
    return PageSection("adapter", facts, lines)


def describe_checkpoint(folder: Path) -> PageSection:
    """A trained head: its target, and what its layers see of texts longer than those of training."""
    document, length = checkpoint.read_document(folder), checkpoint.find_trained_length(folder)
    kind, target, window = document["_target_"].rpartition(".")[2], document.get("target"), document.get("window")
    seen = "all positions" if window is None else format_count(window, "position")
    if checkpoint.keeps_windows(document):
        seen = "the positions that the target's own module does"
    if window is not None and document.get("full_layers"):
        seen += f", but layers {list(document['full_layers'])} all"
    longest = "of unknown length" if length is None else f"of at most {length:,} tokens"
    lines = [f"{kind} for {target}, trained on texts {longest}; layers see {seen}", checkpoint.advise_window(folder)]
    facts = {"kind": kind, "target": target, "window": window, "trained_length": length}
    return PageSection("head", facts, [line for line in lines if line])


def describe_gguf(files: StoredModel) -> PageSection:
    """The fields of a GGUF file, and what can be done with it."""
    architecture = str(files.fields.get("general.architecture"))
    keys = ("block_count", "context_length", "embedding_length", "nextn_predict_layers")
    facts = {"architecture": architecture, "name": files.fields.get("general.name")}
    facts |= {key: files.fields.get(f"{architecture}.{key}") for key in keys}
    parameters = sum(math.prod(tensor.shape) for tensor in files.tensors.values())
    facts |= {"parameters": parameters, "chat_template": "tokenizer.chat_template" in files.fields}
    lines = [
        f"{architecture}: {facts['block_count']} layers of width {facts['embedding_length']}, "
        f"{format_size(parameters)} parameters",
        "no target in this process, which reads safetensors: take the folder that the file was made from, and let "
        "llama.cpp's server write the answers (specdec answer engine=URL)",
    ]
    return PageSection("GGUF", facts, lines)
