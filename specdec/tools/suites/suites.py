"""Public benchmarks as questions to decode, under the protocols of publications (protocols.py).

conf/suite/NAME.yaml     where a suite is published, which field is its prompt, how many questions it has, its licence

A question has one or more turns. The target's own answer to a turn comes before the next one.
"""

from specdec.options.command_line import read_numbers

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.measuring import questions
from specdec.measuring.answer_prompts import AnswerOptions
from specdec.measuring.questions import Question, QuestionOptions, QuestionSet, name_request
from specdec.options.target import TargetOptions
from specdec.target.model import load_tokenizer
from specdec.text import chat_template, reading, token_text
from specdec.text.conversations import Prompt
from specdec.text.messages import MODE
from specdec.tools.suites import cutting, ruler
from specdec.tools.suites.protocols import NO_PROTOCOL, Protocol, list_names, read_conf, read_protocol

FIELD = re.compile(r"\{(\w+)\}")  # fields of a template; other braces stand for themselves
MAX_LENGTH = 2**20  # tokens; a bound against misspelt numbers
SHAPES = ("chains", "trees")  # options of a protocol that give way to the user's own shape
# FastChat's conversation form vicuna_v1.1, which Spec-Bench sends to every target
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)


GeneratedOptions = QuestionOptions | AnswerOptions  # both name suite, subset, lengths and limit


@dataclass(frozen=True)
class Suite:
    """The questions of a public benchmark.

    digest: digest of the questions in the form in which they are asked
    note: differences from the published suite; empty for none
    """

    name: str
    title: str
    questions: list[Question]
    source: str
    digest: str
    licence: str
    note: str = ""


def name_key(subset: str) -> str:
    """The name of a subset as protocols spell it."""
    return subset.replace("-", "_").lower()


def as_list(value: str | list[str] | None) -> list[str]:
    """A list of the one name, the several names, or none."""
    return [value] if isinstance(value, str) else value or []


def list_presets(texts: dict[str, str]) -> dict[str, str]:
    """The texts of options that suite= and protocol= set.

    texts: texts of the options that the user sets
    Raises ValueError for names that do not exist.
    """
    presets: dict[str, Any] = {}
    suite = texts.get("suite", "")
    if suite:
        presets["prompts"] = "null"  # `answer` needs one of both
        presets["max_new_tokens"] = read_conf("suite", suite)["max_new_tokens"]
    if texts.get("protocol"):
        protocol = read_protocol(texts["protocol"])
        presets |= protocol.options
        if suite in protocol.max_new_tokens:
            presets["max_new_tokens"] = protocol.max_new_tokens[suite]
        if {*SHAPES, "decode.depth", "decode.width", "decode.nodes"} & set(texts):
            presets = {key: value for key, value in presets.items() if key not in SHAPES}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in presets.items()}


def read_questions(options: QuestionOptions, heads: Sequence[str]) -> QuestionSet:
    """The questions that the options name: `limit` of them, spread over the source.

    heads: folders of heads, whose template arguments are the defaults
    Raises ValueError as `read_protocol` and `load_suite`.
    """
    arguments = loading.read_template(options.template, heads=heads)
    protocol = read_protocol(options.protocol) if options.protocol else NO_PROTOCOL
    common: dict[str, Any] = {
        "arguments": arguments,
        "encode": functools.partial(encode_turn, arguments=arguments, protocol=protocol),
        "published": {name: read_protocol(name).counting for name in list_names("protocol")},
        "chat": protocol.chat,
    }
    if protocol.name:
        common["protocol"] = {"name": protocol.name, "title": protocol.title, "digest": protocol.digest}
    if options.suite is None:
        return dataclasses.replace(questions.read_rows(options, heads), **common)
    suite = read_suite(options, heads, protocol, arguments)
    return QuestionSet(
        suite.questions,
        suite.source,
        suite={"name": suite.name, "title": suite.title, "digest": suite.digest},
        stop=protocol.stop.get(suite.name, []),
        notes=[*filter(None, [suite.note]), f"licence: {suite.licence}"],
        licence=suite.licence,
        **common,
    )


# Questions of a chosen length


def read_suite(options: QuestionOptions, heads: Sequence[str], protocol: Protocol, arguments: dict[str, Any]) -> Suite:
    """The suite of the options: `limit` of its questions, with lengths= at each length.

    Raises ValueError as `load_suite`, and for lengths= of a suite without them.
    """
    entry = read_conf("suite", str(options.suite))
    if "lengths" not in entry:
        if options.lengths:
            raise ValueError(f"suite={options.suite} is asked as it is published: leave lengths= out.")
        suite = load_options_suite(options, protocol)
        return dataclasses.replace(suite, questions=reading.spread_rows(suite.questions, options.limit))
    tokenizer = open_tokenizer(options.target, heads)
    unit = f"lengths are in tokens of {tokenizer.name_or_path}"
    settings: dict[str, Any] = {"tokenizer": tokenizer, "arguments": arguments, "protocol": protocol}
    if "generated" in entry:
        if options.prompts or options.accept_licence:
            raise ValueError(f"suite={options.suite} is generated: leave prompts= and accept_licence= out.")
        rows = generate(options, options.split or "test", **settings)
        questions = [Question(row["id"], row["category"], (row,)) for row in rows]
        licence, digest = "{name} (forbids {forbids})".format(**entry["licence"]), reading.digest_prompts(rows)
        return Suite(str(options.suite), entry["title"], questions, entry["title"], digest, licence, unit)
    suite = load_options_suite(options, protocol)
    questions = reading.spread_rows(suite.questions, options.limit)
    cut, note = cutting.cut_questions(
        questions, read_lengths(options), functools.partial(count_prompt, **settings), tokenizer
    )
    return dataclasses.replace(suite, questions=cut, note="; ".join(filter(None, [suite.note, unit, note])))


def load_options_suite(options: QuestionOptions, protocol: Protocol) -> Suite:
    """The whole suite that the options name. Raises ValueError as `load_suite`."""
    return load_suite(
        str(options.suite),
        options.prompts,
        split=options.split,
        subset=options.subset,
        protocol=protocol,
        licence_accepted=options.accept_licence,
    )


def read_lengths(options: GeneratedOptions) -> list[int]:
    """The lengths of the options, or those of the suite. Raises ValueError for what is no list of lengths."""
    return read_numbers("lengths", options.lengths or read_conf("suite", str(options.suite))["lengths"], MAX_LENGTH)


def open_tokenizer(target: TargetOptions, heads: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer by which lengths are counted: that of target.name=, else of the first head's target."""
    name = target.name or (loading.find_target_name(checkpoint.resolve(heads[0])) if heads else loading.DEFAULT_TARGET)
    return load_tokenizer(name, trust_remote_code=target.trust_remote_code)


def count_prompt(row: dict, **settings: Any) -> int:
    """The tokens of the prompt of a row. settings: see `encode_turn`"""
    return len(encode_turn(Question("", "", (row,)), 0, (), **settings).tokens)


def generate_rows(
    options: GeneratedOptions, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> list[dict]:
    """Rows of a generated suite to train on: other questions than `read_questions` has.

    Raises ValueError for a suite that is not generated, which is there to evaluate.
    """
    if "generated" not in read_conf("suite", str(options.suite)):
        raise ValueError(f"suite={options.suite} is there to evaluate: give prompts=, or suite=ruler.")
    return generate(options, "train", tokenizer=tokenizer, arguments=arguments)


def generate(options: GeneratedOptions, split: str, *, protocol: Protocol = NO_PROTOCOL, **settings: Any) -> list[dict]:
    """The rows of `ruler.make_rows` for the options, as the protocol asks them. Raises ValueError as it does.

    settings: see `encode_turn`
    """
    name = str(options.suite)

    def count_tokens(text: str) -> int:
        row = {"id": "", "category": "", "prompt": text, "messages": [{"role": "user", "content": text}], "tags": []}
        return count_prompt(protocol.add_system(row, name), protocol=protocol, **settings)

    num = options.limit or read_conf("suite", name)["num"]
    rows = ruler.make_rows(options.subset, read_lengths(options), num, count_tokens, split=split)
    return [protocol.add_system(row, name) for row in rows]


# The questions of a suite


def load_suite(
    name: str,
    prompts: str | None = None,
    *,
    split: str | None = None,
    subset: str | None = None,
    protocol: Protocol = NO_PROTOCOL,
    licence_accepted: bool = False,
) -> Suite:
    """The questions of conf/suite/NAME.yaml, in the published order or the protocol's.

    prompts: the published file, or a folder with it; None: a dataset that `datasets` finds by its name
    subset: a subset of the suite, or a category; None: the suite's default
    licence_accepted: whether a licence that limits the use is accepted
    Raises ValueError for what does not exist, is damaged, or is not the suite.
    """
    reader = open_suite(name, prompts, split, protocol)
    entry = reader.entry
    subsets_read = reader.find_subsets(subset)
    notes = reader.describe_protocol(subsets_read)
    questions: list[Question] = []
    for subset_name in subsets_read:
        rows = reader.read_subset(subset_name)
        if rows or len(subsets_read) == 1:  # a folder may have some of the subsets
            reader.check_number(subset_name, rows)
            questions += reader.make_questions(subset_name, rows)
            notes += reader.compare_with_published(subset_name, rows)
    if subset is not None and subset not in reader.subsets:
        questions = reader.filter_category(questions, subset)
    if not questions:
        raise ValueError(f"{reader.source_name} has no questions of suite={name}. {entry['download']}")
    licence = reader.check_licence(subsets_read, licence_accepted)
    digest = reading.digest_prompts([row for question in questions for row in question.turns])
    return Suite(name, entry["title"], questions, reader.source_name, digest, licence, "; ".join(notes))


def open_suite(name: str, prompts: str | None, split: str | None, protocol: Protocol) -> "SuiteReader":
    """A reader of the suite's rows. Raises ValueError for another split, and where prompts= is needed."""
    entry = read_conf("suite", name)
    source = entry["source"] if isinstance(entry["source"], dict) else {"split": "test"}
    if split not in (None, source["split"]):
        own_split = source["split"].replace("{subset}", "of each subset")
        raise ValueError(f"suite={name} is the split {own_split}, not {split}: leave split= out.")
    if prompts is None and "hub" not in source:
        raise ValueError(f"suite={name} is not read from the Hub: give prompts=FILE or FOLDER. {entry['download']}")
    return SuiteReader(name, entry | {"source": source}, prompts, protocol)


@dataclass(frozen=True)
class SuiteReader:
    """A suite with the place of its published rows.

    entry: conf/suite/NAME.yaml, its `source` as a dictionary with a split
    prompts: published file or folder; None: a dataset of the Hub
    """

    name: str
    entry: dict[str, Any]
    prompts: str | None
    protocol: Protocol

    @property
    def subsets(self) -> dict[str, int | None]:
        """Published questions by subset; None where the number is not known. A suite without subsets has one, ""."""
        return self.entry.get("subsets") or {"": self.entry["num"]}

    @property
    def source_name(self) -> str:
        source = self.entry["source"]
        return self.prompts or f"{source['hub']}, split {source['split'].replace('{subset}', 'of each subset')}"

    def label(self, subset: str) -> str:
        """The options that name a subset."""
        return f"suite={self.name}" + f" subset={subset}" * bool(subset)

    def find_subsets(self, subset: str | None) -> list[str]:
        """The subsets to read: the given one, else that whose published file `prompts` is, else the default.

        Raises ValueError for a file of an unknown subset.
        """
        subsets = list(self.subsets)
        if subset in subsets:
            return [str(subset)]
        default = [self.entry["subset"]] if "subset" in self.entry else subsets
        path = Path(self.prompts or "")
        if self.prompts is None or not path.exists():
            return default
        for candidate, pattern in itertools.product(subsets, as_list(self.entry["file"])):
            if is_subset_file(path, pattern, candidate):
                return [candidate]
        if len(default) > 1 and path.is_file():
            raise ValueError(f"Which part of suite={self.name} is {path}? Give subset=, one of {', '.join(subsets)}.")
        return default

    def describe_protocol(self, subsets: list[str]) -> list[str]:
        """Sentences on how the suite is asked otherwise than in the protocol."""
        protocol = self.protocol
        if not protocol.name:
            return []
        adapted = {*protocol.templates, *protocol.few_shot, *protocol.max_new_tokens, *protocol.stop}
        notes = [protocol.unsaid] if protocol.unsaid else []
        unapplied = [subset for subset in subsets if name_key(subset) in adapted]
        if unapplied:
            names = ", ".join(unapplied)
            notes.insert(0, f"the templates, limits and stop texts of {protocol.title} for {names} are not applied")
        if not {*adapted, *protocol.num} & {self.name, *map(name_key, subsets)}:
            notes.insert(0, f"{protocol.title} publishes nothing on suite={self.name}")
        return notes

    def read_subset(self, subset: str) -> list[tuple[str, dict]]:
        """(location, row) of each question of a subset; none where a folder lacks its file.

        Values of fields that neither the suite nor the protocol names are dropped: tests beside a question may be
        megabytes.
        """
        entry, ranges = self.entry, self.entry.get("within", {})
        names = {*ranges, *FIELD.findall(f"{entry.get('template')} {self.protocol}")}
        names.update(*(as_list(entry.get(key)) for key in ("prompt", "id", "category")))
        names.update(source for source, _ in entry.get("derived", {}).values())
        try:
            rows = [(location, drop_values(row, names)) for location, row in self.open_rows(subset)]
        except ValueError as error:
            raise ValueError(f"suite={self.name}: {error} {entry['download']}") from error
        return [(location, row) for location, row in rows if is_within(row, ranges)]

    def open_rows(self, subset: str) -> Iterable[tuple[str, dict]]:
        """(location, row) of each published row of a subset, read one after the other."""
        source = self.entry["source"]
        if self.prompts is None:
            split = source["split"].replace("{subset}", subset)
            dataset = reading.open_dataset(source["hub"], split, config=source.get("config"))
            return ((f"{source['hub']} row {index}", reading.to_row("", row)) for index, row in enumerate(dataset))
        files = find_published_files(self.entry["file"], self.prompts, subset)
        if not files and subset and Path(self.prompts).is_dir():
            return []
        if not files:
            return reading.read_rows(self.prompts, source["split"])
        return itertools.chain.from_iterable(reading.read_rows(str(file), None) for file in files)

    def check_number(self, subset: str, rows: Sequence) -> None:
        """Raises ValueError for no row, and for more rows than are published."""
        num = self.subsets[subset] or len(rows)
        if not 0 < len(rows) <= num:
            raise ValueError(
                f"{self.source_name} is not {self.label(subset)}: it has {len(rows)} questions of {num}. "
                f"{self.entry['download']}"
            )

    def compare_with_published(self, subset: str, rows: list[tuple[str, dict]]) -> list[str]:
        """A note where the rows are fewer or other ones than published."""
        num = self.subsets[subset] or len(rows)
        if len(rows) < num:
            return [f"{len(rows)} of {num} published questions of {self.label(subset)}"]
        digest = reading.digest_prompts([{"": read_turns(self.entry, row)} for _, row in rows])
        published = self.entry.get("sha", {}).get(subset, digest)
        return [] if digest in published else [f"not the published questions of {self.label(subset)}"]

    def make_questions(self, subset: str, rows: list[tuple[str, dict]]) -> list[Question]:
        """The questions of a subset: as many as the protocol uses, in its order.

        subset: its name stands before ids, and is the category of rows without one; empty for a suite without subsets
        """
        few_shot = self.protocol.few_shot.get(self.name, {"rows": 0})
        examples = "".join(fill_template(few_shot["template"], row) for _, row in rows[: few_shot["rows"]])
        keys = [find_value(row, self.entry.get("id")) for _, row in rows]
        ids = [f"{subset}/" * bool(subset) + str(index if key is None else key) for index, key in enumerate(keys)]
        questions = []
        for question_id, (location, row) in zip(reading.number_ids(ids), rows):
            with reading.name_location(location):
                questions.append(self.make_question(question_id, location, row, subset, examples))
        num = self.protocol.num.get(self.name, self.protocol.num.get(name_key(subset), len(questions)))
        if num < len(questions) and isinstance(self.protocol.order, dict):
            random.Random(self.protocol.order["shuffle"]).shuffle(questions)
        return questions[:num]

    def make_question(self, question_id: str, location: str, row: dict, subset: str, examples: str) -> Question:
        """The question of a row. examples: text in front of it, which makes it plain text without a chat template"""
        originals = read_turns(self.entry, row)
        texts = self.fill_texts(row, subset) or [*originals]
        texts[0] = examples + texts[0]
        task = str(find_value(row, self.entry.get("category")) or subset or self.name)
        category = self.entry.get("tasks", {}).get(task, task)
        tags = [task] if task != category else []
        common = {"id": question_id, "category": category, "tags": tags, "grammar": None, "place": location}
        common["plain"] = bool(examples)
        turns = [
            {**common, "prompt": text, "messages": [{"role": "user", "content": text}], "original": original}
            for text, original in zip(texts[:1] if self.protocol.turns == "first" else texts, originals)
        ]
        turns[0] = self.protocol.add_system(turns[0], name_key(subset) or self.name)
        return Question(question_id, category, tuple(turns), tuple(tags))

    def fill_texts(self, row: dict, subset: str) -> list[str]:
        """The text of the row's template; none for a suite without a template."""
        template = self.protocol.templates.get(self.name, self.entry.get("template"))
        if isinstance(template, dict):
            template = template[subset]
        if not template:
            return []
        text = fill_template(template, derive_fields(self.entry, row))
        return [text.strip() if self.entry.get("strip") else text]

    def filter_category(self, questions: list[Question], category: str) -> list[Question]:
        """The questions of a category or task. Raises ValueError, naming what there is, where there are none."""
        chosen = [question for question in questions if category in (question.category, *question.tags)]
        if not chosen:
            kinds = dict.fromkeys(kind for question in questions for kind in (question.category, *question.tags))
            names = ", ".join(filter(None, [*self.subsets, *kinds]))
            raise ValueError(f"suite={self.name} has no subset {category}; it has: {names}.")
        return chosen

    def check_licence(self, subsets: list[str], accepted: bool) -> str:
        """The suite's licence, and what was accepted. Raises ValueError for a limit of the use that is not accepted."""
        licence = "{name} (forbids {forbids})".format(**self.entry["licence"])
        if not self.prompts:
            return licence
        files = [file for subset in subsets for file in find_published_files(self.entry["file"], self.prompts, subset)]
        limit = reading.find_limit([*files, Path(self.prompts) / "data"])
        if limit is None:
            return licence
        path, phrase = limit
        if not accepted:
            raise ValueError(f'{path} says "{phrase}": read it, and if it allows your use, give accept_licence=true.')
        return f'{licence} (accept_licence=true: {path.name} says "{phrase}")'


def is_subset_file(path: Path, pattern: str, subset: str) -> bool:
    """Whether a file or folder has the published name of a subset. pattern: a published name with {subset}"""
    name = Path(pattern).name
    inside = path.is_dir() and "{subset}" not in name  # the pattern names the folder
    whole = path.absolute() / (name if inside else "")
    return "{subset}" in pattern and whole.match(pattern.replace("{subset}", subset))


def find_published_files(names: str | list[str], prompts: str, subset: str) -> list[Path]:
    """The files of a subset in a folder, by the first published name that is there. A file is itself the published one.

    Raises ValueError for a folder without a published file, unless it lacks one subset.
    """
    folder = Path(prompts)
    if not folder.is_dir():
        return reading.find_files(prompts)
    patterns = [name.replace("{subset}", subset) for name in as_list(names)]
    patterns = [name for name in patterns if name[:3] != "../" or name.startswith(f"../{folder.resolve().name}/")]
    for pattern in patterns:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    if not subset and not any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        raise ValueError(f"the folder {prompts} has no {' or '.join(patterns)}.")
    return []


def drop_values(row: dict, names: Iterable[str]) -> dict:
    """The row with None for the value of each field that is not in `names`."""
    return {key: value if key in names else None for key, value in row.items()}


def is_within(row: dict, ranges: dict[str, tuple[int, int]]) -> bool:
    """Whether the whole numbers of a row lie in their ranges. A field without a whole number counts as within."""
    bounds = ranges.items()
    return all(not isinstance(row.get(key), int) or lower <= row[key] <= upper for key, (lower, upper) in bounds)


def find_value(row: dict, names: str | list[str] | None) -> Any:
    """The value of the first of several fields that a row has; None where it has none of them."""
    return next((row[name] for name in as_list(names) if row.get(name) not in (None, "")), None)


def read_turns(entry: dict, row: dict) -> list[str]:
    """The published texts of a row's turns: of a text, a list of texts, or a list of a user's messages.

    Raises ValueError for a row without them, and for a placeholder of the maker.
    """
    names = as_list(entry["prompt"])
    value = find_value(row, names)
    if value is None:
        raise ValueError(f"no field {' or '.join(names)}, which holds the prompt (the row has: {', '.join(row)}).")
    turns: list[Any] = [find_content(turn) for turn in (value if isinstance(value, list) else [value])]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"its prompt must be a text, or a list of texts or of a user's messages: {value!r:.80}.")
    if "placeholder" in entry and any(turn.startswith(entry["placeholder"]) for turn in turns):
        raise ValueError(f"the prompt is a placeholder, which the maker's script fills. {entry['download']}")
    return turns


def find_content(turn: Any) -> Any:
    """The content of a user's message; any other value is returned as it is."""
    return turn.get("content") if isinstance(turn, dict) and turn.get("role") == "user" else turn


def derive_fields(entry: dict, row: dict) -> dict:
    """The row with the fields that a suite derives: an item of a list, or a pattern in a text; without blanks if so."""
    fields = dict(row)
    for name, (source, part) in entry.get("derived", {}).items():
        value = row.get(source)
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            fields[name] = value[part]
        elif isinstance(value, str) and isinstance(part, str) and (match := re.search(part, value)):
            fields[name] = match[1]
    if entry.get("strip"):
        fields = {key: value.strip() if isinstance(value, str) else value for key, value in fields.items()}
    return fields


def fill_template(templates: str | list[str], row: dict) -> str:
    """The first of several templates whose fields the row has, filled in. Lists of texts become lines.

    Raises ValueError where the row lacks a field of each template.
    """
    for template in as_list(templates):
        missing = [key for key in FIELD.findall(template) if not row.get(key)]
        if not missing:
            return FIELD.sub(lambda match: write_value(row[match[1]]), template)
    raise ValueError(f"no field {', '.join(missing)}, which the prompt is made of (the row has: {', '.join(row)}).")


def write_value(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# Prompts


def encode_turn(
    question: Question,
    turn: int,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    arguments: dict[str, Any] | None = None,
    protocol: Protocol = NO_PROTOCOL,
) -> Prompt:
    """The prompt of a turn, counted from 0, behind the turns before it and the target's answers to them.

    arguments: variables of the chat template
    Raises ValueError for several turns of a target without a chat template, and as questions.encode_turn.
    """
    history = [answer.strip() if protocol.strip else answer for answer in answers[:turn]]
    assert len(history) == turn, "each earlier turn needs its answer"
    form = "none" if question.turns[turn].get("plain") else protocol.chat
    if turn and form != "vicuna" and not (form == "target" and tokenizer.chat_template):
        raise ValueError(
            f"Question {question.id} has several turns, and there is no form to write them in: choose an instruct "
            "model as target, or protocol=specbench, which writes them as plain text."
        )
    if form != "target":
        texts = [row["messages"][-1]["content"] for row in question.turns[: turn + 1]]
        tokens = token_text.encode_text(tokenizer, write_vicuna(texts, history) if form == "vicuna" else texts[0])
        return Prompt(name_request(question, turn), question.category, tokens, question.tags)
    return encode_chat_turn(question, turn, history, tokenizer, arguments or {}, protocol)


def encode_chat_turn(
    question: Question,
    turn: int,
    history: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    arguments: dict[str, Any],
    protocol: Protocol,
) -> Prompt:
    """The prompt of a turn by the target's chat template.

    A thinking mode that the protocol sets is left out where the target has none.
    Raises ValueError, which names a refused system message.
    """
    try:
        if arguments.get(MODE) == protocol.options.get(f"template.{MODE}"):
            arguments = chat_template.select_known_arguments(tokenizer, arguments)
        return questions.encode_turn(question, turn, history, tokenizer, arguments=arguments)
    except ValueError as error:
        if not protocol.name or question.turns[0]["messages"][0]["role"] != "system":
            raise
        raise ValueError(
            f"protocol={protocol.name} sends a system message, which this target cannot take: choose an instruct model "
            "or another protocol."
        ) from error


def write_vicuna(turns: Sequence[str], answers: Sequence[str]) -> str:
    """The text of a conversation whose last turn is to be answered, in the form of Vicuna."""
    text = VICUNA
    for turn, answer in zip(turns, [*answers, ""]):
        text += f"USER: {turn} ASSISTANT:" + (f" {answer}</s>" if answer else "")
    return text
