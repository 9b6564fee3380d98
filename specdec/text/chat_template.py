"""What a chat template makes of a conversation, learned by rendering.

A template leaves out, without a word, what it does not know: then a conversation that says something else there has the
same text.
"""

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.text.messages import MODE, MODE_NAMES, THOUGHT_NAMES, THOUGHTS, select_variables, write_value

MARKER = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # around what the assistant says, for transformers
SPEAKERS = ("system", "developer", "user", "assistant")  # every template that takes them writes what they say
WORD, OTHER_WORD = "specdecword", "specdecother"
TOOL = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class TemplateForm:
    """How a chat template takes what rows hold."""

    arguments: type | None  # of calls: dict, or str for JSON; None: neither is written
    mode: str | None  # its variable for the thinking mode; None: it has no such mode
    thoughts: str | None  # key of a message whose thoughts it writes; None: it has no place for thoughts
    variables: frozenset[str]  # names of all variables that it reads

    def fit(self, messages: list[dict]) -> list[dict]:
        """Messages in this form. Raises ValueError for thoughts that the template has no place for."""
        return [self._fit(message) for message in messages]

    def _fit(self, message: dict) -> dict:
        message = {key: value for key, value in message.items() if key != "weight"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_change(call, arguments=self._convert) for call in calls]
        if THOUGHTS in message and self.thoughts is None:
            raise ValueError(
                f"The chat template has no place for the thoughts of an assistant's message ({THOUGHTS}), so the target would not "
                "read them. Remove them, or choose a target whose chat template writes them."
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
    """An object that was given as JSON text; anything else as it is."""
    try:
        document = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return document if isinstance(document, dict) else arguments


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

    def text(*messages: dict, **options) -> str:
        try:
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
        except Exception:  # it refuses
            return ""

    question: dict = {"role": "user", "content": WORD}

    def writes(arguments: dict | str) -> bool:
        """Whether arguments are written, and neither as Python's text of a dict nor as JSON in JSON."""
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


def find_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of the variables that any of a tokenizer's chat templates reads; none if it cannot be parsed."""
    templates = tokenizer.chat_template or ""
    texts = list(templates.values()) if isinstance(templates, dict) else [templates]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    names: set[str] = set()
    for text in texts:
        with contextlib.suppress(jinja2.TemplateError):
            names |= jinja2.meta.find_undeclared_variables(environment.parse(MARKER.sub("", text)))
    return frozenset(names)


# Arguments of a template, beside messages


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> None:
    """Raises ValueError for an argument that the chat template does not read, so that it would change nothing."""
    form = find_form(tokenizer)
    for key, value in arguments.items():
        has_no_mode = key == MODE and form.mode is None and value
        if key == "tools" or key in form.variables or (key == MODE and not has_no_mode):
            continue
        lack = "has no thinking mode (enable_thinking changes nothing)" if key == MODE else f"reads no variable {key}"
        close = difflib.get_close_matches(key, form.variables, n=1)
        guess = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"{key}={write_value(value)}: the chat template of {tokenizer.name_or_path} {lack}.{guess} Leave it out."
        )


def select_known_arguments(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> dict[str, Any]:
    """Template arguments without `tools`, and without a thinking mode that the template does not have.

    The answer of another target may say a mode, too.
    """
    form = find_form(tokenizer) if tokenizer.chat_template else None
    has_mode = form is not None and (form.mode is not None or MODE in form.variables)
    return {key: value for key, value in select_variables(arguments).items() if key != MODE or has_mode}


def rename_mode(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with the template's own name for the thinking mode."""
    mode = find_form(tokenizer).mode or MODE
    return {mode if key == MODE else key: value for key, value in arguments.items()}


# Rendering


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any], *, add_generation_prompt: bool
) -> str:
    """The text of a conversation.

    arguments: variables of the template, as messages.read_arguments names them
    Raises ValueError for what the template refuses, or has no place for.
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
    except Exception as error:  # a template computes: 1 / 0, a macro that calls itself
        keys = ", ".join(dict.fromkeys(str(key) for message in messages for key in message))
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path or 'this tokenizer'} cannot write these messages ({type(error).__name__}: {error}). "
            f"Look at their keys, {keys}; if they are right, repair the template."
        ) from error


def check_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    arguments: dict[str, Any],
    text: str,
    *,
    add_generation_prompt: bool,
) -> None:
    """Raises ValueError if the template leaves out tools, their calls, or what a role says: the text is the same without it.

    text: what `render` makes of the same arguments. What the assistant says is compared in answer_mask.py.
    """
    changed: dict[str, tuple[list[dict], dict[str, Any]]] = {}
    if tools := arguments.get("tools"):
        changed["tools"] = messages, {**arguments, "tools": [_change(tool, name=lambda _: WORD) for tool in tools]}
    if any(message.get("tool_calls") for message in messages):
        changed["tool_calls"] = [_change_calls(message) for message in messages], arguments
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in SPEAKERS):
        copies = [{**message, "content": WORD} if message["role"] == role else message for message in messages]
        changed[f"messages of the role {role}"] = copies, arguments
    lost_names = []
    for name, (copies, changed_arguments) in changed.items():
        with contextlib.suppress(ValueError):  # it refuses the copy, so it reads what was changed
            if render(tokenizer, copies, changed_arguments, add_generation_prompt=add_generation_prompt) == text:
                lost_names.append(name)
    if lost_names:
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path} leaves out {' and '.join(lost_names)}, so the target would not read "
            "them. Remove them, or choose a target whose chat template writes them."
        )


def _change_calls(message: dict) -> dict:
    """The message with other arguments of all its calls."""
    if not message.get("tool_calls"):
        return message
    return {
        **message,
        "tool_calls": [_change(call, arguments=lambda _: {WORD: WORD}) for call in message["tool_calls"]],
    }


def extend_arguments(call: dict) -> dict:
    """The call of a tool with one more argument."""

    def extend(arguments: object) -> object:
        parsed = parse_object(arguments)
        return {**parsed, WORD: OTHER_WORD} if isinstance(parsed, dict) else {WORD: OTHER_WORD}

    return _change(call, arguments=extend)


def describe_missing_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why messages are refused, and what to do."""
    return (
        f"The tokenizer of {tokenizer.name_or_path} has no chat template, so it takes no messages. Give plain text "
        "(rows with prompt; to train on, with text, or with prompt and completion), choose an instruct model as "
        "target, or put a chat_template.jinja in the target's folder."
    )


def find_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], arguments: dict[str, Any]
) -> list[tuple[int, int]] | None:
    """Where the template's generation markers begin and end in the rendered text, in characters; None without markers."""
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if not MARKER.search(template):
        return None
    render: Callable[..., Any] = render_jinja_template  # whose annotation says that it gives a text
    options = {**tokenizer.special_tokens_map, **rename_mode(tokenizer, arguments)}
    fitted = find_form(tokenizer).fit(messages)
    _, (spans,) = render([fitted], chat_template=template, return_assistant_tokens_mask=True, **options)
    return spans
