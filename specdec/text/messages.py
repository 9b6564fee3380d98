"""One name for each key of a message and of a row, for all names of other authors.

Data sets and servers have several names for one thing. The code reads the names on the left:

    message  tool_calls            also function_call; the role tool, also function behind such a call
             reasoning_content     also reasoning, thinking, thoughts: the assistant's thoughts before its content
             weight                also trainable, train, loss: 0 for an assistant's message that is context alone
    row      chat_template_kwargs  also enable_thinking, thinking (true or false), reasoning_effort
             tools                 a list, or its JSON
"""

import contextlib
import json
from typing import Any

MODE = "enable_thinking"  # name of the thinking mode among template arguments, whatever the template calls it
MODE_NAMES = (MODE, "thinking")  # names that chat templates and rows have for it
EFFORT = "reasoning_effort"
EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")  # values that some template has
# Names that some template has for how much the target thinks
THINKING_NAMES = (*MODE_NAMES, "thinking_mode", EFFORT, "thinking_effort", "low_effort")
ARGUMENTS = "chat_template_kwargs"
THOUGHTS = "reasoning_content"
THOUGHT_NAMES = (THOUGHTS, "reasoning", "thinking", "thoughts")
WEIGHT_NAMES = ("weight", "trainable", "train", "loss")
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


# Messages


def normalise_messages(messages: list[dict]) -> list[dict]:
    """Messages with the names above, without null values and empty lists of calls.

    Raises ValueError, naming the message, for two contradictory values of one key.
    """
    normalised: list[dict] = []
    for number, message in enumerate(messages):
        try:
            normalised.append(_normalise_message(message, normalised))
        except ValueError as error:
            raise ValueError(f"messages[{number}]: {error}") from None
    return normalised


def _normalise_message(message: dict, earlier: list[dict]) -> dict:
    message = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    _move_call(message)
    _move_thoughts(message)
    _move_weight(message)
    if message.get("role") == "function" and any("tool_calls" in before for before in earlier):
        message["role"] = "tool"
    if "tool_calls" in message or THOUGHTS in message:
        message.setdefault("content", "")
    return message


def _move_call(message: dict) -> None:
    """Turns a function_call, of OpenAI's interface before tool_calls, into a list of one call."""
    call = message.pop("function_call", None)
    if call is None:
        return
    if not isinstance(call, dict) or "name" not in call:
        raise ValueError('function_call must be {"name": .., "arguments": ..}.')
    if "tool_calls" in message:
        raise ValueError("it has function_call and tool_calls: keep one of them.")
    message["tool_calls"] = [{"type": "function", "function": call}]


def _move_thoughts(message: dict) -> None:
    texts = {name: message.pop(name) for name in THOUGHT_NAMES if name in message}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a text, the assistant's thoughts; it is a {type(text).__name__}.")
    thoughts = list(dict.fromkeys(text for text in texts.values() if text))
    if len(thoughts) > 1:
        raise ValueError(f"{' and '.join(texts)} hold different thoughts: keep one of them.")
    if thoughts and message.get("role") != "assistant":
        raise ValueError(f"{next(iter(texts))} is for the assistant's messages alone: remove it.")
    if thoughts:
        message[THOUGHTS] = thoughts[0]


def _move_weight(message: dict) -> None:
    weights = {name: message.pop(name) for name in WEIGHT_NAMES if name in message}
    for name, value in weights.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"{name}={json.dumps(value, default=str)} must be 0 or 1, false or true: a turn counts or not."
            )
        if value and message.get("role") != "assistant":
            raise ValueError(f"{name}={json.dumps(value)}: the assistant's messages alone are trained on. Remove it.")
    if len({bool(value) for value in weights.values()}) > 1:
        raise ValueError(f"{' and '.join(weights)} contradict each other: keep one of them.")
    if message.get("role") == "assistant" and not all(weights.values()):
        message["weight"] = 0


# Rows


def read_arguments(row: dict) -> dict[str, Any]:
    """A row's inputs of the chat template besides messages: variables by name, and `tools` if there are any.

    The thinking mode is called MODE. `thinking` counts only if it is true or false, as some rows have other values
    there. Raises ValueError for values that cannot be read, and for two that contradict each other.
    """
    named_values = [(ARGUMENTS, key, value) for key, value in _read_dictionary(row.get(ARGUMENTS)).items()]
    for name in (*MODE_NAMES, EFFORT):
        value = row.get(name)
        if value is not None and (name != "thinking" or isinstance(value, bool)):
            named_values.append((name, name, value))
    arguments: dict[str, Any] = {}
    for field, key, value in named_values:
        key = MODE if key in MODE_NAMES else key
        if key == MODE and not isinstance(value, bool):
            raise ValueError(f"{field}: {MODE} must be true or false, not {json.dumps(value, default=str)}.")
        if arguments.setdefault(key, value) != value:
            raise ValueError(f"{field} says another {key} than the rest of the row: keep one of them.")
    tools = read_tools(row.get("tools"))
    return {**arguments, "tools": tools} if tools else arguments


def _read_dictionary(value: Any) -> dict[str, Any]:
    """A dictionary of arguments, or its JSON.

    Raises ValueError for other values, and for an argument that no row may set.
    """
    if value is None:
        return {}
    value = _read_json(value)
    if not isinstance(value, dict):
        raise ValueError(f'{ARGUMENTS} must be an object such as {{"{MODE}": false}}, or its JSON.')
    for name in RESERVED:
        if name in value:
            raise ValueError(f"{ARGUMENTS} may not hold {name}: it is not a variable of the chat template.")
    return {key: argument for key, argument in value.items() if argument is not None}


def _read_json(value: Any) -> Any:
    """The value of a JSON text, as in data sets with one type a column; any other value unchanged"""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def select_variables(arguments: dict[str, Any]) -> dict[str, Any]:
    """Template arguments without `tools`: the variables of the chat template"""
    return {key: value for key, value in arguments.items() if key != "tools"}


def read_tools(tools: Any) -> list[dict] | None:
    """Tools that the assistant may call; None for none. Raises ValueError if they are no list of objects."""
    tools = _read_json(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('tools must be a list such as [{"type": "function", "function": {"name": ..}}], or its JSON.')
    return tools or None


def write_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Template arguments and `tools` as keys of a row; empty without arguments"""
    variables = select_variables(arguments)
    tools = {"tools": arguments["tools"]} if "tools" in arguments else {}
    return ({ARGUMENTS: variables} if variables else {}) | tools


def set_defaults(row: dict, arguments: dict[str, Any]) -> dict:
    """The row with its template arguments under ARGUMENTS, over those of a command"""
    row_arguments = select_variables(read_arguments(row))
    fields = {key: value for key, value in row.items() if key not in (ARGUMENTS, *MODE_NAMES, EFFORT)}
    return {**fields, ARGUMENTS: {**arguments, **row_arguments}}


def describe_arguments(arguments: dict[str, Any]) -> str:
    """Template arguments as on a command line, such as template.enable_thinking=false; a phrase for none"""
    return (
        " ".join(f"template.{key}={write_value(value)}" for key, value in sorted(arguments.items()))
        or "template's defaults"
    )


def write_value(value: Any) -> str:
    """A text as it is; any other value as JSON"""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_arguments(written: dict[str, str]) -> dict[str, Any]:
    """Template arguments of a command, template.KEY=VALUE -> {KEY: value}. Values are JSON, or else text.

    Raises ValueError as `read_arguments` does.
    """
    values: dict[str, Any] = {}
    for key, text in written.items():
        lowered = text.lower()
        try:
            values[key] = json.loads(lowered if lowered in ("true", "false", "null") else text)
        except (ValueError, RecursionError):
            values[key] = text
    return check_template(values)


def check_template(values: dict[str, Any]) -> dict[str, Any]:
    """The option `template` with its mode called MODE. Raises ValueError, naming the option, for impossible values."""
    for key, value in values.items():
        if key in RESERVED:
            raise ValueError(f"template.{key}: {key} is not a variable of the chat template. Leave it out.")
        if key in MODE_NAMES and not isinstance(value, bool | None):
            raise ValueError(f"template.{key}={write_value(value)} must be true or false.")
    modes = {value for key, value in values.items() if key in MODE_NAMES and value is not None}
    if len(modes) > 1:
        raise ValueError(f"template.{' and template.'.join(MODE_NAMES)} contradict each other: give one of them.")
    return {MODE if key in MODE_NAMES else key: value for key, value in values.items() if value is not None}
