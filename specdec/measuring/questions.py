"""Questions that a target answers, and the form in which they are asked."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import model_validator
from transformers import PreTrainedTokenizerBase

from specdec import loading
from specdec.core import extensions
from specdec.core.answer_text import StopStrings, TextDecoder
from specdec.core.option_types import Count, Options, Seed, Text, raise_first
from specdec.core.resumable import digest_bytes
from specdec.measuring import trained_prompts
from specdec.measuring.counting import ENGINES, SPECDEC, Counting
from specdec.options.command_types import MEMORY, TemplateSettings
from specdec.options.target import TargetOptions
from specdec.text import chat_template, conversations, reading
from specdec.text.conversations import Prompt


class QuestionOptions(Options):
    """Options of verbs that measure: which questions are asked."""

    suite: Text | None
    subset: Text | None
    protocol: Text | None
    accept_licence: bool
    prompts: Text | None
    split: Text | None
    lengths: Text | None
    template: TemplateSettings
    limit: Count | None
    target: TargetOptions

    @model_validator(mode="after")
    def check_suite(self) -> "QuestionOptions":
        of_suites = self.subset or self.lengths or self.accept_licence
        raise_first(
            {"subset=, lengths= and accept_licence= are of suite=: give it, too.": of_suites and self.suite is None}
        )
        return self


class MeasureOptions(QuestionOptions):
    """The questions, and how they are answered: what `evaluate`, `judge` and `choose` share."""

    max_new_tokens: Annotated[Count, MEMORY]
    ignore_stop: bool
    seed: Seed
    verbose: bool


@dataclass(frozen=True)
class Question:
    """A question of one or several turns."""

    id: str
    category: str
    turns: tuple[dict, ...]  # rows as from reading.load_prompts: new messages of a turn; `original`: published text
    tags: tuple[str, ...] = ()


# (question, turn from 0, the target's answers to earlier turns, tokenizer) -> the prompt of the turn
EncodeTurn = Callable[[Question, int, Sequence[str], PreTrainedTokenizerBase], Prompt]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one source, how they are asked, and how publications count acceptance on them.

    source: file, folder or name of the rows
    arguments: variables of the chat template, for questions without own ones
    encode: maker of prompts; None where the target's answers are recorded already
    suite, protocol: {name, title, digest}; None: rows of prompts=, and this project's own protocol
    chat: target (its chat template), vicuna, or none
    stop: texts that end an answer
    published: ways to count, by the names of their protocols
    notes: sentences on differences from the publication
    licence: licence of the questions; None: unknown
    """

    questions: list[Question]
    source: str
    arguments: dict[str, Any] = field(default_factory=dict)
    encode: EncodeTurn | None = None
    suite: dict[str, str] | None = None
    protocol: dict[str, str] | None = None
    chat: str = "target"
    stop: Sequence[str] = ()
    published: Mapping[str, Counting] = field(default_factory=dict)
    notes: Sequence[str] = ()
    licence: str | None = None

    @property
    def num_turns(self) -> int:
        """The turns of the longest question."""
        return max(len(question.turns) for question in self.questions)

    @property
    def countings(self) -> dict[str, Counting]:
        """The ways to count by name: this project's own, those of publications, and those of engines."""
        return {"specdec": SPECDEC, **self.published, **ENGINES}

    def make_prompt(
        self, question: Question, turn: int, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> Prompt:
        """The prompt of a turn. answers: the target's answers to earlier turns

        Raises ValueError for a prompt that cannot be encoded.
        """
        assert self.encode is not None
        return self.encode(question, turn, answers, tokenizer)

    def make_stop_strings(self, tokenizer: PreTrainedTokenizerBase) -> StopStrings | None:
        """The texts that end an answer; None without any.

        Raises ValueError, naming the protocol, for a text that no answer can hold.
        """
        if self.protocol is None or not self.stop:
            return None
        with reading.name_location(f"protocol={self.protocol['name']}"):
            return StopStrings(list(self.stop), TextDecoder.from_tokenizer(tokenizer))

    def describe(self, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The questions as settings of a measurement. tokenizer: None: a server encodes the prompts"""
        arguments = self.arguments
        if tokenizer is not None:
            arguments = chat_template.select_known_arguments(tokenizer, arguments)
        return {
            "prompts": self.source,
            "suite": self.suite,
            "protocol": self.protocol,
            "num_questions": len(self.questions),
            "questions_digest": reading.digest_prompts([row for question in self.questions for row in question.turns]),
            "stop_texts": list(self.stop),
            "chat": self._describe_chat(tokenizer),
            "template": arguments,
        }

    def _describe_chat(self, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """The form in which questions are sent, as text. Rows that are plain text stay plain text."""
        if self.chat == "vicuna":
            return "the conversation of Vicuna"
        if self.chat == "target" and tokenizer is None:
            return "the server's chat template"
        if self.chat == "target" and tokenizer is not None and tokenizer.chat_template:
            return f"chat template {digest_bytes(repr(tokenizer.chat_template).encode())}"
        return "bare text"

    @property
    def has_right_answers(self) -> bool:
        """Whether the values of right answers are known."""
        return bool(self.questions) and all("expected" in question.turns[0] for question in self.questions)

    def count_right_answers(self, answers: Mapping[str, str]) -> str:
        """The number of values of right answers that the target's have, by category. answers: texts by question's id"""
        num_values: Counter[str] = Counter()
        num_right: Counter[str] = Counter()
        for question in self.questions:
            values = question.turns[0]["expected"]
            num_values[question.category] += len(values)
            num_right[question.category] += sum(value in answers.get(question.id, "") for value in values)
        return ", ".join(f"{category} {num_right[category]} of {num}" for category, num in num_values.items())

    def list_notes(self, heads: Mapping[str, Path]) -> list[str]:
        """Sentences on differences from the publication, and on heads that were trained on questions.

        heads: folders by name
        """
        rows = [{**question.turns[0], "id": question.id} for question in self.questions]
        return [*self.notes, *find_copies(rows, heads)]


def read_plain_questions(source: str, split: str | None = None) -> list[Question]:
    """The rows of prompts= as questions of one turn. Raises ValueError as reading.load_prompts."""
    with reading.name_location(source):
        rows = reading.spread_rows(reading.load_prompts(source, split=split), None)
    ids = reading.number_ids([row["id"] for row in rows])
    return [Question(id, row["category"], (row,), tuple(row["tags"])) for id, row in zip(ids, rows)]


def read_questions(options: QuestionOptions, heads: Sequence[str]) -> QuestionSet:
    """The rows of prompts=, where there is no specdec/tools/suites.

    Raises ValueError as `read_rows`, and for suite= and protocol=.
    """
    raise_first({f"suite= and protocol= need {extensions.PACKAGE}/tools/suites.": options.suite or options.protocol})
    return read_rows(options, heads)


def read_rows(options: QuestionOptions, heads: Sequence[str]) -> QuestionSet:
    """The rows of prompts=, `limit` of them, spread over the file. heads: folders with default template arguments

    Raises ValueError as reading.load_prompts.
    """
    source = options.prompts or loading.PROMPTS
    arguments = loading.read_template(options.template, heads=heads)
    rows = reading.spread_rows(read_plain_questions(source, options.split), options.limit)
    return QuestionSet(rows, source, arguments, functools.partial(encode_turn, arguments=arguments))


def encode_turn(
    question: Question,
    turn: int,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    arguments: dict[str, Any],
) -> Prompt:
    """The prompt of a turn, counted from 0, by the chat template: earlier turns with the target's answers, then itself.

    Raises ValueError as conversations.encode_row.
    """
    row = question.turns[turn]
    messages: list[dict] = []
    for earlier, answer in zip(question.turns, answers[:turn]):
        messages += [*earlier["messages"], {"role": "assistant", "content": answer}]
    if messages:
        row = {**row, "prompt": None, "messages": [*messages, *row["messages"]]}
    tokens = conversations.encode_row(tokenizer, row, arguments)
    return Prompt(name_request(question, turn), question.category, tokens, question.tags)


def find_copies(rows: Sequence[dict], heads: Mapping[str, Path]) -> Iterator[str]:
    """Yields a sentence for each head that was trained on some of the prompts. heads: folders by name"""
    for name, folder in heads.items():
        digests = trained_prompts.read_digests(folder)
        if digests is None:
            continue
        ids = trained_prompts.find_trained_rows(rows, digests)
        if ids:
            copies = trained_prompts.count_copies(ids, len(rows), "prompts")
            yield f"{copies} are among those that {name} was trained on: its figures flatter"


def read_answers(
    source: str,
    *,
    arguments: dict[str, Any],
    temperature: float,
    split: str | None = None,
    limit: int | None = None,
    hold_out: int | None = None,
) -> QuestionSet:
    """Conversations whose last message the target wrote at a temperature, as questions of one turn.

    hold_out: number of rows that are used, the first ones of temperature 0; None: all
    Raises ValueError if there is no such row.
    """
    rows = reading.load_conversations(source, split=split, arguments=arguments)
    if hold_out is not None:
        rows = [rows[i] for i in reading.choose_held_out([row.get("temperature") == 0 for row in rows], hold_out)]
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{source} has no row at decode.temperature={temperature:g}.")
    questions = [Question(row["id"], row["category"], (row,)) for row in reading.spread_rows(rows, limit)]
    return QuestionSet(questions, source, arguments)


def name_request(question: Question, turn: int) -> str:
    """The id of a turn's prompt."""
    return question.id if len(question.turns) == 1 else f"{question.id} turn {turn + 1}"
