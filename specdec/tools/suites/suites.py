"""Public benchmarks as questions to decode, and the protocols under which publications decode them.

conf/suite/NAME.yaml     where a suite is published, which field is its prompt, how many questions it has, its licence
conf/protocol/NAME.yaml  what a publication sends to the target, with which settings, and how it counts acceptance

A question has one or more turns. The target's own answer to a turn comes before the next one.
"""

import dataclasses
import difflib
import functools
import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from specdec import loading
from specdec.measuring import questions
from specdec.measuring.counting import Counting
from specdec.measuring.questions import Question, QuestionOptions, QuestionSet, name_request
from specdec.text import chat_template, reading, token_text
from specdec.text.conversations import Prompt
from specdec.text.messages import MODE

CONF = Path(__file__).with_name("conf")
FIELD = re.compile(r"\{(\w+)\}")  # of a template; other braces stand for themselves
name_key = lambda subset: subset.replace("-", "_").lower()  # a subset as protocols name it
as_list = lambda value: [value] if isinstance(value, str) else value or []  # of one name, several or none
# FastChat's conversation form vicuna_v1.1, which Spec-Bench sends to every target
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)


@dataclass(frozen=True)
class Suite:
    """digest: of the questions as they are asked; note: what is not as published, empty for nothing"""

    name: str
    title: str
    questions: list[Question]
    source: str
    digest: str
    licence: str
    max_new_tokens: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A file of conf/protocol. `templates`, `num`, `few_shot` and `max_new_tokens` are by suite, `system` for all or by suite."""

    name: str
    title: str
    source: str
    options: dict[str, Any]  # of the verbs that measure
    counting: Counting
    unsaid: str = ""  # what the publication leaves open, or the verbs cannot do as it does
    chat: str = "target"  # its chat template, vicuna, or none
    turns: str = "all"  # or first
    strip: bool = False  # blanks around the target's answers in the history
    system: str | dict[str, str] = ""
    templates: dict[str, str] = field(default_factory=dict)
    num: dict[str, int] = field(default_factory=dict)  # questions used
    order: str | dict[str, int] = "first"  # or {shuffle: seed of Python's random}, if there are more than are used
    few_shot: dict[str, dict[str, Any]] = field(default_factory=dict)  # rows put in front, and their template
    max_new_tokens: dict[str, int] = field(default_factory=dict)  # where it is not that of `options`
    stop: dict[str, list[str]] = field(default_factory=dict)  # texts that end an answer

    digest = property(lambda self: reading.digest_prompts([asdict(self)]))  # 16 hex digits of all fields


def read_protocol(name: str) -> Protocol:
    """Raises ValueError for a name that conf/protocol does not have."""
    document = read_conf("protocol", name)
    return Protocol(name=name, **document | {"counting": Counting(**document["counting"])})


def read_conf(kind: str, name: str) -> dict[str, Any]:
    """conf/KIND/NAME.yaml"""
    names = sorted(path.stem for path in (CONF / kind).glob("*.yaml"))
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        guess = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"There is no {kind}={name}.{guess} There are: {', '.join(names)}.")
    return yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())


def list_protocol_names() -> list[str]:
    return sorted(path.stem for path in (CONF / "protocol").glob("*.yaml"))


def list_presets(texts: dict[str, str]) -> dict[str, str]:
    """The texts of options that suite= and protocol= set. texts: those of the options that the user sets

    Raises ValueError for names that do not exist.
    """
    presets: dict[str, Any] = {}
    if suite := texts.get("suite"):
        presets["max_new_tokens"] = read_conf("suite", suite)["max_new_tokens"]
    if texts.get("protocol"):
        protocol = read_protocol(texts["protocol"])
        presets |= protocol.options
        if suite in protocol.max_new_tokens:
            presets["max_new_tokens"] = protocol.max_new_tokens[suite]
        if {"chains", "trees", "decode.depth", "decode.width", "decode.nodes"} & set(texts):
            presets = {key: value for key, value in presets.items() if key not in ("chains", "trees")}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in presets.items()}


def read_questions(options: QuestionOptions, heads: Sequence[str]) -> QuestionSet:
    """The questions, `limit` of them, spread over the source. heads: folders, whose template arguments are the defaults

    Raises ValueError as `read_protocol` and `load_suite`.
    """
    arguments = loading.read_template(options.template, heads=heads)
    protocol = read_protocol(options.protocol) if options.protocol else None
    published = {name: read_protocol(name).counting for name in list_protocol_names()}
    common: dict[str, Any] = {
        "arguments": arguments,
        "encode": functools.partial(encode_turn, arguments=arguments, protocol=protocol),
        "published": published,
    }
    if protocol is not None:
        common["protocol"] = {"name": protocol.name, "title": protocol.title, "digest": protocol.digest}
        common["chat"] = protocol.chat
    if options.suite is None:
        return dataclasses.replace(questions.read_rows(options, heads), **common)
    suite = load_suite(
        options.suite,
        options.prompts,
        split=options.split,
        subset=options.subset,
        protocol=protocol,
        licence_accepted=options.accept_licence,
    )
    return QuestionSet(
        reading.spread_rows(suite.questions, options.limit),
        options.prompts or suite.source,
        suite={"name": suite.name, "title": suite.title, "digest": suite.digest},
        stop=protocol.stop.get(suite.name, []) if protocol else [],
        notes=[*filter(None, [suite.note]), f"licence: {suite.licence}"],
        **common,
    )


# The questions of a suite


def load_suite(
    name: str,
    prompts: str | None = None,
    *,
    split: str | None = None,
    subset: str | None = None,
    protocol: Protocol | None = None,
    licence_accepted: bool = False,
) -> Suite:
    """The questions of conf/suite/NAME.yaml, in the published order or the protocol's.

    prompts: the published file, or a folder with it; None: a dataset that `datasets` finds by its name
    subset: one of the suite's, or a category; None: the suite's default. accepted: also under a licence that limits the use
    Raises ValueError for what does not exist, is damaged, or is not the suite.
    """
    entry = read_conf("suite", name)
    source = entry["source"] if isinstance(entry["source"], dict) else {"split": "test"}
    if split not in (None, source["split"]):
        raise ValueError(f"suite={name} is the split {source['split']}, not {split}: leave split= out.")
    if prompts is None and "hub" not in source:
        raise ValueError(f"suite={name} is not read from the Hub: give prompts=FILE or FOLDER. {entry['download']}")
    subsets: dict[str, int | None] = entry.get("subsets") or {"": entry["num"]}
    subsets_read = find_subsets(name, entry, list(subsets), prompts, subset)
    source_name = prompts or f"{source['hub']}, split {source['split']}"
    questions: list[Question] = []
    notes = describe_protocol(protocol, name, subsets_read) if protocol else []
    for subset_name in subsets_read:
        subset_rows = read_subset(name, entry | {"source": source}, prompts, subset_name, protocol)
        if not subset_rows and len(subsets_read) > 1:  # a folder with some of the subsets
            continue
        subset_label, num = (
            f"suite={name}" + f" subset={subset_name}" * bool(subset_name),
            subsets[subset_name] or len(subset_rows),
        )
        if len(subset_rows) > num or not subset_rows:
            raise ValueError(
                f"{source_name} is not {subset_label}: it has {len(subset_rows)} questions of {num}. {entry['download']}"
            )
        if len(subset_rows) < num:
            notes.append(f"{len(subset_rows)} of {num} published questions of {subset_label}")
        subset_questions = make_questions(name, entry, subset_rows, subset_name, protocol)
        digest = reading.digest_prompts([{"": read_turns(entry, row)} for _, row in subset_rows])
        if len(subset_rows) == num and digest not in entry.get("sha", {}).get(subset_name, digest):
            notes.append(f"not the published questions of {subset_label}")
        questions += choose_questions(subset_questions, protocol, name, subset_name)
    if subset is not None and subset not in subsets:
        kinds = dict.fromkeys(kind for question in questions for kind in (question.category, *question.tags))
        questions = [question for question in questions if subset in (question.category, *question.tags)]
        if not questions:
            known_names = ", ".join(filter(None, [*subsets, *kinds]))
            raise ValueError(f"suite={name} has no subset {subset}; it has: {known_names}.")
    if not questions:
        raise ValueError(f"{source_name} has no questions of suite={name}. {entry['download']}")
    licence = check_licence(entry, prompts, subsets_read, licence_accepted)
    digest = reading.digest_prompts([row for question in questions for row in question.turns])
    return Suite(
        name, entry["title"], questions, source_name, digest, licence, entry["max_new_tokens"], "; ".join(notes)
    )


def find_subsets(name: str, entry: dict, subsets: list[str], prompts: str | None, subset: str | None) -> list[str]:
    """The subsets to read: what is asked for, else that whose published file or folder `prompts` is, else the default."""
    if subset in subsets:
        return [str(subset)]
    path, default = Path(prompts or ""), [entry["subset"]] if "subset" in entry else subsets
    if prompts is None or not path.exists():
        return default
    for candidate, pattern in itertools.product(subsets, map(Path, as_list(entry["file"]))):
        inside = path.is_dir() and "{subset}" not in pattern.name  # the pattern names the folder
        full_pattern = path.absolute() / (pattern.name if inside else "")
        if "{subset}" in str(pattern) and full_pattern.match(str(pattern).replace("{subset}", candidate)):
            return [candidate]
    if len(default) > 1 and path.is_file():
        raise ValueError(f"Which part of suite={name} is {prompts}? Give subset=, one of {', '.join(subsets)}.")
    return default


def describe_protocol(protocol: Protocol, name: str, subsets: list[str]) -> list[str]:
    """What of a suite is not as the protocol has it."""
    suite_names = {*protocol.templates, *protocol.few_shot, *protocol.max_new_tokens, *protocol.stop}
    published = {*suite_names, *protocol.num} & {name, *map(name_key, subsets)}
    absence = "" if published else f"{protocol.title} publishes nothing on suite={name}"
    unapplied = ", ".join(part for part in subsets if name_key(part) in suite_names)
    unapplied = (
        unapplied and f"the templates, limits and stop texts of {protocol.title} for {unapplied} are not applied"
    )
    return [note for note in (absence, unapplied, protocol.unsaid) if note]


def check_licence(entry: dict, prompts: str | None, subsets: list[str], accepted: bool) -> str:
    """The suite's licence, and what was accepted. Raises ValueError for a file that limits the use, if that is not accepted."""
    stated = "{name} (forbids {forbids})".format(**entry["licence"])
    files = [file for part in subsets for file in find_published_files(entry["file"], prompts, part)] if prompts else []
    limit = reading.find_limit([*files, Path(prompts) / "data"]) if prompts else None
    if limit and not accepted:
        raise ValueError(f'{limit[0]} says "{limit[1]}": read it, and if it allows your use, give accept_licence=true.')
    return stated + (f' (accept_licence=true: {limit[0].name} says "{limit[1]}")' if limit else "")


def read_subset(
    name: str, entry: dict, prompts: str | None, subset: str, protocol: Protocol | None
) -> list[tuple[str, dict]]:
    """(place, row) of each question of a subset; none where a folder lacks its file.

    Values of fields that neither the suite nor the protocol names are let go: tests beside a question may be megabytes.
    """
    source = entry["source"]
    names = {*entry.get("within", {})}.union(*(as_list(entry.get(key)) for key in ("prompt", "id", "category")))
    names |= {*FIELD.findall(f"{entry.get('template')} {protocol}")}
    located_rows: Iterable[tuple[str, dict]]
    try:
        if prompts is None:
            data = reading.open_dataset(source["hub"], source["split"], config=source.get("config"))
            located_rows = ((f"{source['hub']} row {index}", reading.to_row("", row)) for index, row in enumerate(data))
        elif files := find_published_files(entry["file"], prompts, subset):
            located_rows = itertools.chain.from_iterable(reading.read_rows(str(file), None) for file in files)
        elif subset and Path(prompts).is_dir():
            return []
        else:
            located_rows = reading.read_rows(prompts, source["split"])
        subset_rows = [
            (location, {key: row[key] if key in names else None for key in row}) for location, row in located_rows
        ]
    except ValueError as error:
        raise ValueError(f"suite={name}: {error} {entry['download']}") from error
    for key, (lower, upper) in entry.get("within", {}).items():
        subset_rows = [
            (location, row)
            for location, row in subset_rows
            if not isinstance(row.get(key), int) or lower <= row[key] <= upper
        ]
    return subset_rows


def find_published_files(names: str | list[str], prompts: str, subset: str) -> list[Path]:
    """The published files of a subset in a folder, by the first of several names that is there; else the file itself."""
    folder = Path(prompts)
    if not folder.is_dir():
        return reading.find_files(prompts)
    patterns = [each.replace("{subset}", subset) for each in as_list(names)]
    patterns = [each for each in patterns if each[:3] != "../" or each.startswith(f"../{folder.resolve().name}/")]
    paths = next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])
    if not (paths or subset or any((folder / each).exists() for each in ("dataset_info.json", "dataset_dict.json"))):
        raise ValueError(f"the folder {prompts} has no {' or '.join(patterns)}.")
    return paths


def make_questions(
    name: str, entry: dict, subset_rows: list[tuple[str, dict]], subset: str, protocol: Protocol | None
) -> list[Question]:
    """part: the subset, empty for a suite without: it is the category of rows that have none, and stands before ids"""
    template, few_shot, system = entry.get("template"), None, ""
    if protocol is not None:
        template, few_shot = protocol.templates.get(name, template), protocol.few_shot.get(name)
        system = (
            protocol.system if isinstance(protocol.system, str) else protocol.system.get(name_key(subset) or name, "")
        )
    shots = [fill_template(few_shot["template"], row) for _, row in subset_rows[: few_shot["rows"]]] if few_shot else []
    keys = [find_value(row, entry.get("id")) for _, row in subset_rows]
    ids = [f"{subset}/" * bool(subset) + str(index if key is None else key) for index, key in enumerate(keys)]
    questions = []
    for question_id, (location, row) in zip(reading.number_ids(ids), subset_rows):
        with reading.name_location(location):
            originals = read_turns(entry, row)
            texts = [fill_template(template, row)] if template else [*originals]
            texts[0] = "".join(shots) + texts[0]
            task = str(find_value(row, entry.get("category")) or subset or name)
            category = entry.get("tasks", {}).get(task, task)
            tags = (task,) if task != category else ()
            shared_fields = {"id": question_id, "category": category, "tags": [*tags], "grammar": None, "place": location, "plain": bool(few_shot)}  # fmt: skip
            turns = [
                {**shared_fields, "prompt": text, "messages": [{"role": "user", "content": text}], "original": original}
                for text, original in zip(texts[:1] if protocol and protocol.turns == "first" else texts, originals)
            ]
            if system:
                turns[0] |= {"prompt": None, "messages": [{"role": "system", "content": system}, *turns[0]["messages"]]}
        questions.append(Question(question_id, category, tuple(turns), tags))
    return questions


def find_value(row: dict, names: str | list[str] | None) -> Any:
    """The first of several fields that a row has."""
    return next((row[each] for each in as_list(names) if row.get(each) not in (None, "")), None)


def read_turns(entry: dict, row: dict) -> list[str]:
    """The published texts of a row's turns: of a text, a list of texts, or a list of a user's messages."""
    names = as_list(entry["prompt"])
    value = find_value(row, names)
    if value is None:
        raise ValueError(f"no field {' or '.join(names)}, which holds the prompt (the row has: {', '.join(row)}).")
    content = lambda turn: turn.get("content") if isinstance(turn, dict) and turn.get("role") == "user" else turn
    turns: list[Any] = [content(each) for each in (value if isinstance(value, list) else [value])]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"its prompt must be a text, or a list of texts or of a user's messages: {value!r:.80}.")
    if "placeholder" in entry and any(turn.startswith(entry["placeholder"]) for turn in turns):
        raise ValueError(f"the prompt is a placeholder, which the maker's script fills. {entry['download']}")
    return turns


def fill_template(templates: str | list[str], row: dict) -> str:
    """The first of several templates whose fields the row has, filled in. Lists of texts are lines."""
    fitting = [template for template in as_list(templates) if all(row.get(key) for key in FIELD.findall(template))]
    if not fitting:
        missing = ", ".join(key for key in FIELD.findall(as_list(templates)[-1]) if not row.get(key))
        raise ValueError(f"no field {missing}, which the prompt is made of (the row has: {', '.join(row)}).")
    write = lambda value: "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    return FIELD.sub(lambda match: write(row[match[1]]), fitting[0])


def choose_questions(
    questions_of_subset: list[Question], protocol: Protocol | None, name: str, subset: str
) -> list[Question]:
    """As many as the protocol uses, in its order."""
    num = None if protocol is None else protocol.num.get(name, protocol.num.get(name_key(subset)))
    if protocol is None or num is None or num >= len(questions_of_subset):
        return questions_of_subset
    if isinstance(protocol.order, dict):
        questions_of_subset = [*questions_of_subset]
        random.Random(protocol.order["shuffle"]).shuffle(questions_of_subset)
    return questions_of_subset[:num]


# Prompts


def encode_turn(
    question: Question,
    turn: int,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    arguments: dict[str, Any] | None = None,
    protocol: Protocol | None = None,
) -> Prompt:
    """The prompt of a turn, counted from 0, behind the turns before it and the target's answers to them.

    arguments: as of rows.encode_prompts; a thinking mode that the protocol sets is left out where the target has none
    Raises ValueError for several turns of a target without a chat template, and as rows.encode_row.
    """
    history = [answer.strip() if protocol and protocol.strip else answer for answer in answers[:turn]]
    assert len(history) == turn, "each earlier turn needs its answer"
    row = question.turns[turn]
    form = "none" if row.get("plain") else protocol.chat if protocol else "target"
    if turn and (form == "none" or (form == "target" and not tokenizer.chat_template)):
        raise ValueError(
            f"Question {question.id} has several turns, and there is no form to write them in: choose an instruct model as "
            "target, or protocol=specbench, which writes them as plain text."
        )
    if form == "target":
        try:
            return questions.encode_turn(
                question, turn, history, tokenizer, arguments=fit_arguments(tokenizer, arguments or {}, protocol)
            )
        except ValueError as error:
            if protocol is None or question.turns[0]["messages"][0]["role"] != "system":
                raise
            reason = f"protocol={protocol.name} sends a system message, which this target cannot take: choose an instruct model"
            raise ValueError(f"{reason} or another protocol.") from error
    texts = [earlier_turn["messages"][-1]["content"] for earlier_turn in question.turns[: turn + 1]]
    tokens = token_text.encode_text(tokenizer, write_vicuna(texts, history) if form == "vicuna" else texts[0])
    return Prompt(name_request(question, turn), question.category, tokens, question.tags)


def fit_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any], protocol: Protocol | None
) -> dict[str, Any]:
    """Template arguments without a thinking mode that the protocol sets and the target does not have."""
    mode = protocol.options.get(f"template.{MODE}") if protocol else None
    return chat_template.select_known_arguments(tokenizer, arguments) if arguments.get(MODE) == mode else arguments


def write_vicuna(turns: Sequence[str], answers: Sequence[str]) -> str:
    """The text of a conversation whose last turn is to be answered, in the form of Vicuna."""
    text = VICUNA
    for turn, answer in zip(turns, [*answers, ""]):
        text += f"USER: {turn} ASSISTANT:" + (f" {answer}</s>" if answer else "")
    return text
