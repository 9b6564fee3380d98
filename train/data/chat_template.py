"""What a chat template makes of a conversation, found by rendering.

A template leaves out, without a word, what it does not know: then a conversation that says something else there has the
same text.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MODES = ("enable_thinking", "thinking")  # names that templates have for the thinking mode
SPEAKERS = ("system", "developer", "user", "assistant")  # every template that takes them writes what they say
WORD, OTHER = "specdecword", "specdecother"
TOOL = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": {"type": "object", "properties": {}}},
}


def options_of(row: dict) -> dict:
    """What beside its messages decides how a row is rendered: `thinking` and `tools`, as far as the row has them.

    Raises ValueError for tools that cannot be rendered. Rows of others may have anything under the name `thinking`.
    """
    found = {}
    if isinstance(row.get("thinking"), bool):
        found["thinking"] = row["thinking"]
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():  # as data sets hold them whose columns have one type
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('tools must be a list such as [{"type": "function", "function": {"name": ..}}], or its JSON.')
    return found | ({"tools": tools} if tools else {})


@dataclass(frozen=True)
class TemplateForm:
    """How a chat template takes what rows hold."""

    arguments: type | None  # of calls: dict, or str for JSON; None: neither is written
    mode: str | None  # its variable for the thinking mode; None: it has no such mode
    without: str  # what it writes behind a prompt with thinking=false; empty: nothing

    def fit(self, messages: list[dict]) -> list[dict]:
        """Messages in this form."""
        fitted = []
        for message in messages:
            if calls := message.get("tool_calls"):
                message = {**message, "tool_calls": [_change(call, arguments=self._convert) for call in calls]}
            fitted.append(message)
        return fitted

    def _convert(self, arguments: object) -> object:
        arguments = {} if arguments is None else arguments
        if self.arguments is str and isinstance(arguments, dict):
            return json.dumps(arguments, ensure_ascii=False)
        return parse_arguments(arguments) if self.arguments is dict else arguments


def parse_arguments(arguments: object) -> object:
    """An object that was given as JSON text; anything else as it is."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _change(call: dict, **changes: Callable) -> dict:
    """A copy of a tool or of a call of one, with some fields of its function changed."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _change(call["function"], **changes)}
    return call | {key: change(call.get(key)) for key, change in changes.items()}


def find_form(tokenizer: PreTrainedTokenizerBase) -> TemplateForm:
    return _find_form(tokenizer, repr(tokenizer.chat_template))  # which may be several, by name


@functools.lru_cache(maxsize=8)
def _find_form(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForm:
    """template: the tokenizer's, which may change"""

    def text(*messages: dict, **more) -> str:
        try:
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, **more))
        except Exception:  # it refuses
            return ""

    question: dict = {"role": "user", "content": WORD}

    def writes(arguments: dict | str) -> bool:
        """Whether arguments are written, and neither as Python's text of a dict nor as JSON in JSON."""
        function = {"name": "specdecname", "arguments": arguments}
        call = {"id": "specdec01", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "specdecname", "tool_call_id": "specdec01", "content": "a"}
        found = text(question, answer, tools=[TOOL]) or text(question, answer, result, tools=[TOOL])
        wrong = (f"'{OTHER}'", f'\\"{OTHER}')
        return OTHER in found and "specdecvalue" in found and not any(each in found for each in wrong)

    arguments = {OTHER: "specdecvalue"}
    kinds: list[tuple[type, dict | str]] = [(dict, arguments), (str, json.dumps(arguments))]
    asked = functools.partial(text, question, add_generation_prompt=True)
    mode = next((mode for mode in MODES if asked(**{mode: True}) != asked(**{mode: False})), None)
    prompt, without = asked(), asked(**{mode: False}) if mode else ""
    return TemplateForm(
        next((kind for kind, given in kinds if writes(given)), None),
        mode,
        without.removeprefix(prompt) if without.startswith(prompt) else "",
    )


# Rendering


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    *,
    add_generation_prompt: bool,
    thinking: bool | None = None,
    tools: list[dict] | None = None,
) -> str:
    """thinking: what the template gets as enable_thinking; None: nothing. tools: those that the assistant may call"""
    if not tokenizer.chat_template:
        raise ValueError(without_template(tokenizer))
    try:
        given = template_arguments(tokenizer, thinking, tools) | {"add_generation_prompt": add_generation_prompt}
        return str(tokenizer.apply_chat_template(find_form(tokenizer).fit(messages), tokenize=False, **given))
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"The chat template refuses a conversation with the roles {roles}: {error}") from error
    except Exception as error:  # a template computes: 1 / 0, a macro that calls itself
        keys = ", ".join(dict.fromkeys(str(key) for message in messages for key in message))
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path or 'this tokenizer'} cannot write these messages ({type(error).__name__}: {error}). "
            f"Look at their keys, {keys}; if they are right, repair the template."
        ) from error


def template_arguments(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, tools: list[dict] | None = None
) -> dict:
    """What the chat template gets beside the messages."""
    mode = {} if thinking is None else {find_form(tokenizer).mode or MODES[0]: thinking}
    return mode | ({"tools": tools} if tools else {})


def check_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    text: str,
    *,
    tools: list[dict] | None = None,
    **options,
) -> None:
    """Raises ValueError if the template leaves out tools, their calls, or what a role says: the text is the same without it.

    text: what `render` makes of the messages; options: as of `render`
    """
    changed: dict[str, tuple[list[dict], list[dict] | None]] = {}
    if tools:
        changed["tools"] = messages, [_change(tool, name=lambda _: WORD) for tool in tools]
    if any(message.get("tool_calls") for message in messages):
        call = lambda each: _change(each, arguments=lambda _: {WORD: WORD})
        copies = [
            {**message, "tool_calls": [*map(call, message["tool_calls"])]} if message.get("tool_calls") else message
            for message in messages
        ]
        changed["tool_calls"] = copies, tools
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in SPEAKERS):
        copies = [{**message, "content": WORD} if message["role"] == role else message for message in messages]
        changed[f"messages of the role {role}"] = copies, tools
    lost = []
    for name, (copies, others) in changed.items():
        with contextlib.suppress(ValueError):  # it refuses the copy, so it reads what was changed
            if render(tokenizer, copies, tools=others, **options) == text:
                lost.append(name)
    if lost:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path} leaves out {' and '.join(lost)}, so the target would not read "
            "them. Remove them, or choose a target whose chat template writes them."
        )


def without_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why messages are refused, and what to do."""
    return (
        f"The tokenizer of {tokenizer.name_or_path} has no chat template, so it takes no messages. Give plain text "
        "(rows with prompt; to train on, with text, or with prompt and completion), choose an instruct model as "
        "target, or put a chat_template.jinja in the target's folder."
    )


def known_mode(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> bool | None:
    """The mode that a row says, if the target's template has one: the answer of another target may say one, too."""
    return thinking if tokenizer.chat_template and find_form(tokenizer).mode else None


def check_mode(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    """Raises ValueError if a thinking mode is asked for that the chat template does not have."""
    if thinking is not None and find_form(tokenizer).mode is None:
        raise ValueError(
            f"thinking={str(thinking).lower()}: the chat template of {tokenizer.name_or_path} has no thinking mode "
            "(enable_thinking changes nothing). Leave thinking= out."
        )


def find_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict
) -> list[tuple[int, int]] | None:
    """Where the template's generation markers begin and end in the rendered text, in characters; None without markers.

    arguments: as apply_chat_template takes them
    """
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if not MARKERS.search(template):
        return None
    render: Callable[..., Any] = render_jinja_template  # whose annotation says that it gives a text
    given = {**tokenizer.special_tokens_map, **arguments}
    _, (spans,) = render([messages], chat_template=template, return_assistant_tokens_mask=True, **given)
    return spans
