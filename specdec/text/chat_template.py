"""A chat template's treatment of a conversation, learned by rendering.

A template silently leaves out what it does not know. Then a conversation with other content there has the same text.
"""

import contextlib
import difflib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.text.messages import (
    MODE,
    MODE_NAMES,
    THINKING_NAMES,
    THOUGHT_NAMES,
    THOUGHTS,
    select_variables,
    write_value,
)
from specdec.text.template_options import (
    MARKER,
    OTHER_WORD,
    TOOL,
    WORD,
    TemplateOption,
    find_fault,
    find_variables,
    list_options,
)

SPEAKERS = ("system", "developer", "user", "assistant")  # roles whose content every template writes


@dataclass(frozen=True)
class TemplateForm:
    """The form in which a chat template takes the contents of rows."""

    arguments: type | None  # type of calls' arguments: dict, or str for JSON; None: neither is written
    mode: str | None  # its variable for the thinking mode, None without such a mode
    thoughts: str | None  # a message's key for thoughts, None without a place for them
    variables: frozenset[str]  # names of all variables read

    def fit(self, messages: list[dict]) -> list[dict]:
        """Messages in this form. Raises ValueError for thoughts that the template has no place for."""
        return [self._fit(message) for message in messages]

    def _fit(self, message: dict) -> dict:
        message = {key: value for key, value in message.items() if key != "weight"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_change(call, arguments=self._convert) for call in calls]
        if THOUGHTS in message and self.thoughts is None:
            raise ValueError(
                f"The chat template has no place for the thoughts of an assistant's message ({THOUGHTS}), so the "
                "target would not read them. Remove them, or choose a target whose chat template writes them."
            )
        if THOUGHTS in message:
            message[str(self.thoughts)] = message.pop(THOUGHTS)
        return message

    def _convert(self, arguments: object) -> object:
        arguments = {} if arguments is None else arguments
        if self.arguments is str and isinstance(arguments, dict):
            return json.dumps(arguments, ensure_ascii=False)
        return parse_object(arguments) if self.arguments is dict else arguments


def parse_object(arguments: object) -> object:
    """An object from its JSON text; any other value unchanged"""
    try:
        document = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return document if isinstance(document, dict) else arguments


def _change(call: dict, **changes: Callable) -> dict:
    """A copy of a tool, or of a tool's call, with some fields of its function changed"""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _change(call["function"], **changes)}
    return call | {key: change(call.get(key)) for key, change in changes.items()}


def find_form(tokenizer: PreTrainedTokenizerBase) -> TemplateForm:
    """The form of a tokenizer's chat template"""
    return _find_form(tokenizer, repr(tokenizer.chat_template))  # a template, or several by name


@functools.lru_cache(maxsize=8)
def _find_form(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForm:
    """template: the tokenizer's templates, which may change"""

    def text(*messages: dict, **options) -> str:
        try:
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
        except Exception:  # the template refuses
            return ""

    question: dict = {"role": "user", "content": WORD}

    def writes(arguments: dict | str) -> bool:
        """True if arguments are written, and neither as Python's text of a dict nor as JSON in JSON."""
        function = {"name": "specdecname", "arguments": arguments}
        call = {"id": "specdec01", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "specdecname", "tool_call_id": "specdec01", "content": "a"}
        rendered = text(question, answer, tools=[TOOL]) or text(question, answer, result, tools=[TOOL])
        wrong = (f"'{OTHER_WORD}'", f'\\"{OTHER_WORD}')
        return OTHER_WORD in rendered and "specdecvalue" in rendered and not any(part in rendered for part in wrong)

    def writes_thoughts(key: str) -> bool:
        return OTHER_WORD in text(question, {"role": "assistant", "content": WORD, key: OTHER_WORD})

    arguments = {OTHER_WORD: "specdecvalue"}
    kinds: list[tuple[type, dict | str]] = [(dict, arguments), (str, json.dumps(arguments))]
    render_question = functools.partial(text, question, add_generation_prompt=True)
    mode = next(
        (mode for mode in MODE_NAMES if render_question(**{mode: True}) != render_question(**{mode: False})), None
    )
    return TemplateForm(
        arguments=next((kind for kind, example in kinds if writes(example)), None),
        mode=mode,
        thoughts=next(filter(writes_thoughts, THOUGHT_NAMES), None),
        variables=find_variables(tokenizer),
    )


# Arguments of a template, beside messages


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> None:
    """Raises ValueError for an argument that the chat template does not read, and for a value that it does not take."""
    form, options = find_form(tokenizer), {option.name: option for option in list_options(tokenizer)}
    for key, value in arguments.items():
        name = (form.mode or MODE) if key == MODE else key
        if name in options:
            _check_value(tokenizer, options[name], key, value)
        elif key not in ("tools", *form.variables) and (key != MODE or value):
            lack = (
                "has no thinking mode (enable_thinking changes nothing)" if key == MODE else f"reads no variable {key}"
            )
            guess = _describe_guess(_find_near_options(options, key))
            template = f"the chat template of {tokenizer.name_or_path}"
            raise ValueError(f"{key}={write_value(value)}: {template} {lack}.{guess} Leave it out.")


def _check_value(tokenizer: PreTrainedTokenizerBase, option: TemplateOption, key: str, value: Any) -> None:
    if fault := find_fault(tokenizer, option, value):
        values = ", ".join(map(write_value, option.accepted))
        raise ValueError(
            f"{key}={write_value(value)}: the chat template of {tokenizer.name_or_path} {fault}. It takes {values}."
        )


def _find_near_options(options: dict[str, TemplateOption], key: str) -> list[TemplateOption]:
    """The options that an unknown argument may mean: one with a similar name, or all for thinking."""
    close = difflib.get_close_matches(key, options, n=1, cutoff=0.8)
    thinking = [name for name in THINKING_NAMES if name in options and key in THINKING_NAMES]
    alike = [name for name in thinking if name.endswith("effort") == key.endswith("effort")]
    return [options[name] for name in close or alike or thinking]


def _describe_guess(options: list[TemplateOption]) -> str:
    names = [f"{option.name} ({', '.join(map(write_value, option.accepted))})" for option in options]
    return f" Did you mean {' or '.join(names)}?" if names else ""


def select_known_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> dict[str, Any]:
    """Template arguments without `tools`, and without a thinking mode that the template lacks.

    Answers of other targets may state a mode, too.
    """
    form = find_form(tokenizer) if tokenizer.chat_template else None
    has_mode = form is not None and (form.mode is not None or MODE in form.variables)
    return {key: value for key, value in select_variables(arguments).items() if key != MODE or has_mode}


def rename_mode(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with the template's own name for the thinking mode"""
    mode = find_form(tokenizer).mode or MODE
    return {mode if key == MODE else key: value for key, value in arguments.items()}


# Rendering


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any], *, add_generation_prompt: bool
) -> str:
    """The text of a conversation.

    arguments: variables of the template, as messages.read_arguments names them
    Raises ValueError if the template refuses the messages, or has no place for a part of them.
    """
    if not tokenizer.chat_template:
        raise ValueError(describe_missing_template(tokenizer))
    fitted = find_form(tokenizer).fit(messages)
    try:
        options = rename_mode(tokenizer, arguments) | {"add_generation_prompt": add_generation_prompt}
        return str(tokenizer.apply_chat_template(fitted, tokenize=False, **options))
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"The chat template refuses a conversation with the roles {roles}: {error}") from error
    except Exception as error:  # templates compute: 1 / 0, endless recursion
        keys = ", ".join(dict.fromkeys(str(key) for message in messages for key in message))
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path or 'this tokenizer'} cannot write these messages "
            f"({type(error).__name__}: {error}). Look at their keys, {keys}; if they are right, repair the template."
        ) from error


def check_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    arguments: dict[str, Any],
    text: str,
    *,
    add_generation_prompt: bool,
) -> None:
    """Raises ValueError if the template leaves out tools, their calls,
    or a role's content, so that the text stays the same.

    text: result of `render` for the same arguments. answer_mask.py compares the assistant's content.
    """
    lost_names = []
    for name, copies, changed_arguments in _list_changes(messages, arguments):
        with contextlib.suppress(ValueError):  # a refusal shows that the change was read
            if render(tokenizer, copies, changed_arguments, add_generation_prompt=add_generation_prompt) == text:
                lost_names.append(name)
    if lost_names:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path} leaves out {' and '.join(lost_names)}, so the target would "
            "not read them. Remove them, or choose a target whose chat template writes them."
        )


def _list_changes(messages: list[dict], arguments: dict[str, Any]) -> Iterator[tuple[str, list[dict], dict[str, Any]]]:
    """Yields (what is changed, messages, arguments): copies with other tools, calls, or contents of a role."""
    if tools := arguments.get("tools"):
        yield "tools", messages, {**arguments, "tools": [_change(tool, name=lambda _: WORD) for tool in tools]}
    if any(message.get("tool_calls") for message in messages):
        yield "tool_calls", [_change_calls(message) for message in messages], arguments
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in SPEAKERS):
        copies = [{**message, "content": WORD} if message["role"] == role else message for message in messages]
        yield f"messages of the role {role}", copies, arguments


def _change_calls(message: dict) -> dict:
    """The message with other arguments of all its calls."""
    if not message.get("tool_calls"):
        return message
    calls = [_change(call, arguments=lambda _: {WORD: WORD}) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def extend_arguments(call: dict) -> dict:
    """The call of a tool with one more argument"""

    def extend(arguments: object) -> object:
        parsed = parse_object(arguments)
        return {**parsed, WORD: OTHER_WORD} if isinstance(parsed, dict) else {WORD: OTHER_WORD}

    return _change(call, arguments=extend)


def describe_missing_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why messages are refused, and what to do"""
    return (
        f"The tokenizer of {tokenizer.name_or_path} has no chat template, so it takes no messages. Give plain text "
        "(rows with prompt; to train on, with text, or with prompt and completion), choose an instruct model as "
        "target, or put a chat_template.jinja in the target's folder."
    )


def find_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any]
) -> list[tuple[int, int]] | None:
    """Begins and ends of the template's generation markers in the rendered text, in characters; None without markers"""
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if not MARKER.search(template):
        return None
    render: Callable[..., Any] = render_jinja_template  # its annotation is wrong
    options = {**tokenizer.special_tokens_map, **rename_mode(tokenizer, arguments)}
    fitted = find_form(tokenizer).fit(messages)
    _, (spans,) = render([fitted], chat_template=template, return_assistant_tokens_mask=True, **options)
    return spans
