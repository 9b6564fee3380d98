"""Options of a chat template: its variables beside messages and tools, their values, and what they change.

The template's parsed tree names the variables, and the values that it compares them with. Rendering with each value,
and without any, tells the default, the values that raise, and where the prompt changes.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from specdec.text.messages import EFFORTS, RESERVED, THOUGHT_NAMES, write_value

MARKER = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # around the assistant's text, for transformers
WORD, OTHER_WORD = "specdecword", "specdecother"
TOOL = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": {"type": "object", "properties": {}}},
}
HELPERS = ("raise_exception", "strftime_now")  # functions that transformers gives a template
SPECIAL_TOKEN = re.compile(r"^(\w+_token|\w+_token_id|additional_special_tokens|extra_special_tokens)$")
# Filters and methods that leave a value what it is
CASTS = ("default", "d", "lower", "upper", "trim", "string", "capitalize", "title", "strip", "int", "float")
WRITTEN_EFFORTS = ("low", "medium", "high")  # values that models know whose template merely writes the effort
ORDERS = ("lt", "lteq", "gt", "gteq")  # names of comparisons by size

# Places of a prompt that an option changes
BEGINNING, SYSTEM, QUESTION = "beginning", "behind the system message", "behind the user's message"
ANSWER, HISTORY, TOOLS = "behind the assistant's tag", "earlier answers", "with tools"
SYSTEM_WORD, QUESTION_WORD = "specdecsystem", "specdecquestion"


@dataclass(frozen=True)
class TemplateOption:
    """A variable of a chat template."""

    name: str
    values: tuple  # values that the template takes, in its own order: true and false for a test of its truth
    default: Any = None  # value that has the effect of none; None: unknown
    places: tuple[str, ...] = ()  # where it changes the prompt; empty: nowhere in the prompts that were tried
    raising: tuple = ()  # values of the template that make it raise
    strict: bool = False  # whether all other values raise
    free: bool = False  # whether the template also writes the value itself
    ordered: bool = False  # whether the template compares it by size, so that all numbers count
    writes_any: bool = False  # whether the template writes any text
    further_values: tuple = ()  # values of a merely written effort that models know, beside those of the template

    @property
    def accepted(self) -> tuple:
        """Values that are named where another one is refused"""
        return (*self.values, *self.further_values)

    def describe(self) -> str:
        """The option in a line, such as: enable_thinking: true (default), false; behind the assistant's tag"""
        names = [f"{write_value(value)}{' (default)' * _is_among(value, [self.default])}" for value in self.accepted]
        names += ["others raise"] * self.strict + ["other numbers"] * self.ordered
        names += ["any text is written" if names else "any text"] * (
            self.writes_any and not (self.ordered or self.further_values)
        )
        return "; ".join([f"{self.name}: {', '.join(names) or 'any value'}", *self.places])


def list_options(tokenizer: PreTrainedTokenizerBase) -> list[TemplateOption]:
    """The options of a tokenizer's chat template, by name; none without a template, or for one that cannot be parsed"""
    return list(_list_options(tokenizer, repr(tokenizer.chat_template)))  # a template, or several by name


@functools.lru_cache(maxsize=8)
def _list_options(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[TemplateOption, ...]:
    """template: the tokenizer's templates, which may change"""
    uses = _find_uses(tokenizer)
    options = [_make_option(tokenizer, name, uses[name]) for name in sorted(uses)]
    # a variable that the template sets itself is an option only if another value changes something
    return tuple(option for option in options if option.places or option.raising or not uses[option.name].assigned)


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes tools into a prompt"""
    texts, plain = _render_prompts(tokenizer, tools=[TOOL]), _render_prompts(tokenizer)
    return any(text is not None and text != plain_text for text, plain_text in zip(texts, plain))


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template marks the assistant's text ({% generation %})"""
    return any(MARKER.search(text) for text in _list_templates(tokenizer))


# The parsed template


def find_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names of the variables that a tokenizer's chat templates read; none for a template that cannot be parsed"""
    names: set[str] = set()
    for tree in _parse_templates(tokenizer):
        names |= jinja2.meta.find_undeclared_variables(tree)
    return frozenset(names)


def _list_templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    templates = tokenizer.chat_template or ""
    return list(templates.values()) if isinstance(templates, dict) else [templates]


def find_template_error(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a chat template of the tokenizer cannot be parsed, as a phrase; None: all can, or there is none"""
    for text in _list_templates(tokenizer):
        try:
            _parse(text)
        except jinja2.TemplateSyntaxError as error:
            return f"{error.message} (line {error.lineno})"
    return None


def _parse_templates(tokenizer: PreTrainedTokenizerBase) -> list[nodes.Template]:
    trees = []
    for text in _list_templates(tokenizer):
        with contextlib.suppress(jinja2.TemplateError):
            trees.append(_parse(text))
    return trees


def _parse(text: str) -> nodes.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(MARKER.sub("", text))


@dataclass
class _Uses:
    """What a template does with a variable."""

    values: list = field(default_factory=list)  # values that it compares the variable with
    defaults: list = field(default_factory=list)  # values that it takes in place of none
    assigned: bool = False  # whether a value is assigned to it, too
    tested: bool = False  # whether the variable's truth is tested
    written: bool = False  # whether anything else is done with it, such as writing it
    ordered: bool = False  # whether a size is compared with it

    @property
    def foreign(self) -> list:
        """Values beside all of the template: numbers above and below where it has numbers alone"""
        constants = [value for value in [*self.values, *self.defaults] if value is not None]
        if all(map(_is_number, constants)) and (constants or self.ordered):
            return [max([*constants, 0]) + 1, min([*constants, 0]) - 1]
        return [WORD]

    def add(self, values: Iterator) -> None:
        for value in values:
            if isinstance(value, str | int | float) and not _is_among(value, self.values):
                self.values.append(value)


def _is_among(value: Any, values: Sequence) -> bool:
    """Whether the value is one of these; True is not 1."""
    return any(type(value) is type(known) and value == known for known in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _find_uses(tokenizer: PreTrainedTokenizerBase) -> dict[str, _Uses]:
    """What the templates do with their options, by name."""
    helpers = {*HELPERS, *RESERVED, *jinja2.sandbox.ImmutableSandboxedEnvironment().globals}
    names = [name for name in find_variables(tokenizer) - helpers if not SPECIAL_TOKEN.match(name)]
    uses = {name: _Uses() for name in names}
    for tree in _parse_templates(tokenizer):
        _Reader(tree, uses).read(tree)
    return uses


class _Reader:
    """Reads what a template does with some variables, also under the names that it assigns them to."""

    def __init__(self, tree: nodes.Template, uses: dict[str, _Uses]):
        self.uses = uses
        self.aliases = {name: {name} for name in uses}  # {name: options that its value comes from}
        self.constants: dict[str, list] = {}  # {name: values of a list or keys of a dictionary}
        assignments = [*tree.find_all(nodes.Assign)] * 2  # twice, for names that macros assign later
        for assignment in assignments:
            for name, value in _list_targets(assignment):
                self.aliases.setdefault(name, set()).update(self.sources(value))
                self.constants.setdefault(name, self.list_constants(value))

    def sources(self, node: Any) -> set[str]:
        """The options that the value of an expression may be."""
        match node:
            case nodes.Name():
                return self.aliases.get(node.name, set())
            case nodes.Getattr(node=nodes.Name(name=owner), attr=attribute):
                return self.aliases.get(f"{owner}.{attribute}", set())
            case nodes.Filter(name=name, node=argument) if name in CASTS:
                return self.sources(argument)
            case nodes.Call(node=nodes.Getattr(node=argument, attr=name)) if name in CASTS:
                return self.sources(argument)
            case nodes.CondExpr():
                return self.sources(node.expr1) | (self.sources(node.expr2) if node.expr2 else set())
            case nodes.And() | nodes.Or():
                return self.sources(node.left) | self.sources(node.right)
        return set()

    def list_constants(self, node: Any) -> list:
        """The constants of an expression: one, those of a list, the keys of a dictionary, or those of such a name."""
        match node:
            case nodes.Const():
                return [node.value]
            case nodes.Neg(node=nodes.Const(value=value)) if _is_number(value):
                return [-value]
            case nodes.List() | nodes.Tuple():
                return self.list_all_constants(node.items)
            case nodes.Dict():
                return self.list_all_constants(pair.key for pair in node.items)
            case nodes.Name():
                return self.constants.get(node.name, [])
        return []

    def list_all_constants(self, items: Iterable[nodes.Node]) -> list:
        constants = (item for item in items if isinstance(item, nodes.Const | nodes.Neg))
        return [value for item in constants for value in self.list_constants(item)]

    def read(self, node: nodes.Node) -> None:
        match node:
            case nodes.If():
                self.read_truth(node.test)
                self.read_all([*node.body, *node.elif_, *node.else_])
            case nodes.Assign():
                self.read_assignment(node)
            case nodes.CondExpr():
                self.read_truth(node.test)
                self.read_all(child for child in (node.expr1, node.expr2) if child is not None)
            case nodes.Not():
                self.read_truth(node.node)
            case nodes.Compare():
                self.read_comparison(node)
            case nodes.Test():
                self.read_test(node)
            case _:
                self.read_value(node)

    def read_value(self, node: nodes.Node) -> None:
        """Reads an expression of which the value counts."""
        match node:
            case nodes.Getitem() if self.list_constants(node.node) and self.sources(node.arg):
                self.compare(node.arg, node.node)
            case nodes.Name() | nodes.Getattr() if self.sources(node):
                self.mark(node, written=True)
            case _:
                self.read_default(node)
                self.read_all(node.iter_child_nodes())

    def read_all(self, children: Any) -> None:
        for child in children:
            self.read(child)

    def read_truth(self, node: nodes.Node) -> None:
        """Reads an expression of which only the truth counts."""
        match node:
            case nodes.Not():
                self.read_truth(node.node)
            case nodes.And() | nodes.Or():
                self.read_truth(node.left)
                self.read_truth(node.right)
            case nodes.Name() | nodes.Getattr() | nodes.Filter() if self.sources(node):
                self.mark(node, tested=True)
                self.read_default(node)
            case _:
                self.read(node)

    def read_comparison(self, node: nodes.Compare) -> None:
        for operand in node.ops:
            if operand.op in ("in", "notin") and self.sources(operand.expr):  # "browser" in builtin_tools
                self.mark(operand.expr, written=True)
                self.read_default(operand.expr)
            else:
                self.compare(node.expr, operand.expr)
                self.compare(operand.expr, node.expr)
            for side in (node.expr, operand.expr) if operand.op in ORDERS else ():
                self.mark(side, ordered=True)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        self.read_all(operand for operand in operands if not self.sources(operand))

    def read_test(self, node: nodes.Test) -> None:
        if not self.sources(node.node):
            return self.read_all(node.iter_child_nodes())
        if node.name in ("true", "false"):
            self.mark(node.node, tested=True)
        for argument in node.args or []:
            self.compare(node.node, argument)

    def compare(self, node: nodes.Node, constants: nodes.Node) -> None:
        for name in self.sources(node):
            self.uses[name].add(iter(self.list_constants(constants)))
        self.read_default(node)

    def mark(self, node: nodes.Node, *, tested: bool = False, written: bool = False, ordered: bool = False) -> None:
        for name in self.sources(node):
            self.uses[name].tested |= tested
            self.uses[name].written |= written
            self.uses[name].ordered |= ordered

    def read_assignment(self, node: nodes.Assign) -> None:
        """Reads an assignment: what it does with options, and the default that it states."""
        for name, value in _list_targets(node):
            if name in self.uses:  # {% if x is not defined %}{% set x = 3 %}
                self.uses[name].assigned = True
                self.uses[name].defaults += [] if self.sources(value) else self.list_constants(value)
            if not self.sources(value):
                self.read(value)
            self.read_default(value)
            if isinstance(value, nodes.CondExpr):
                self.read_truth(value.test)

    def read_default(self, node: Any) -> None:
        """Reads the default of `x | default(3)`, `x or 3`, and `x if x is defined else 3`."""
        match node:
            case nodes.Filter(name="default" | "d", args=[default, *_]):
                pairs = [(node.node, default)]
            case nodes.Or():
                pairs = [(node.left, node.right)]
            case nodes.CondExpr() if node.expr2 is not None:
                pairs = [(node.expr1, node.expr2), (node.expr2, node.expr1)]
            case nodes.Filter() if node.node is not None:
                return self.read_default(node.node)
            case _:
                return
        for source, default in pairs:
            for name in self.sources(source):
                self.uses[name].defaults += self.list_constants(default)


def _list_targets(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of what an assignment names; the fields of a namespace as name.field."""
    target, value = node.target, node.node
    if isinstance(target, nodes.NSRef):
        yield f"{target.name}.{target.attr}", value
    elif isinstance(target, nodes.Name):
        is_namespace = isinstance(value, nodes.Call) and getattr(value.node, "name", None) == "namespace"
        for keyword in value.kwargs if is_namespace else ():
            yield f"{target.name}.{keyword.key}", keyword.value
        if not is_namespace:
            yield target.name, value


# Rendering with each value


@dataclass(frozen=True)
class _Trial:
    """The prompts with one value of an option."""

    value: Any
    texts: list[str | None]  # renderings of `_list_prompts`
    raises: bool
    silent: bool  # same texts as without the option


def _make_option(tokenizer: PreTrainedTokenizerBase, name: str, uses: _Uses) -> TemplateOption:
    plain = _render_prompts(tokenizer)
    trials = [_try_value(tokenizer, name, value, plain) for value in _list_values(uses)]
    foreign = [_try_value(tokenizer, name, value, plain) for value in uses.foreign]
    values = tuple(trial.value for trial in trials if not trial.raises)
    writes_any = any(_is_written(str(trial.value), trial.texts, plain) for trial in foreign)
    return TemplateOption(
        name=name,
        values=values,
        default=_choose_default(trials, uses),
        places=tuple(_find_places(plain, [*trials, *foreign])),
        raising=tuple(trial.value for trial in trials if trial.raises),
        strict=bool(trials) and not uses.ordered and all(trial.raises for trial in foreign),
        free=uses.written,
        ordered=uses.ordered,
        writes_any=writes_any,
        further_values=_list_efforts(name, uses, values) if writes_any else (),
    )


def _list_efforts(name: str, uses: _Uses, values: tuple) -> tuple:
    """The values of a merely written effort that models know, beside these; none for other options"""
    is_text = not uses.values and uses.foreign == [WORD]
    return tuple(effort for effort in WRITTEN_EFFORTS if is_text and name.endswith("effort") and effort not in values)


def _try_value(tokenizer: PreTrainedTokenizerBase, name: str, value: Any, plain: list[str | None]) -> _Trial:
    texts = _render_prompts(tokenizer, **{name: value})
    return _Trial(value, texts, _raises(texts, plain), texts == plain)


def _list_values(uses: _Uses) -> list:
    """The values that a template compares a variable with, its stated defaults, or true and false for a test alone."""
    values = list(uses.values)
    if uses.tested and not uses.written and not values:
        values = [True, False]
    for value in uses.defaults:
        if value not in (None, "") and not _is_among(value, values):
            values.append(value)
    return values


def _choose_default(trials: list[_Trial], uses: _Uses) -> Any:
    """The only value without effect, or else the default that the template states; None: unknown"""
    silent = [trial.value for trial in trials if trial.silent]
    stated = [value for value in uses.defaults if value is not None]
    return silent[0] if len(silent) == 1 else next(iter(stated), None)


@functools.lru_cache(maxsize=1)
def _list_prompts() -> list[tuple[list[dict], dict]]:
    """Conversations that show an option, each with further arguments of the template."""
    system = {"role": "system", "content": SYSTEM_WORD}
    question: dict = {"role": "user", "content": QUESTION_WORD}
    answer: dict = {"role": "assistant", "content": WORD, **dict.fromkeys(THOUGHT_NAMES, OTHER_WORD)}
    call = {"id": "specdec01", "type": "function", "function": {"name": WORD, "arguments": {}}}
    result = {"role": "tool", "name": WORD, "tool_call_id": "specdec01", "content": WORD}
    history, calls = [question, answer, question], [question, {**answer, "content": "", "tool_calls": [call]}, result]
    prompts = [
        (prompt, {"add_generation_prompt": asks}) for prompt in ([system, question], [question]) for asks in (0, 1)
    ]
    return [*prompts, (history, {"add_generation_prompt": 1}), (calls, {"add_generation_prompt": 1, "tools": [TOOL]})]


def _render_prompts(tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[str | None]:
    """The texts of `_list_prompts` with these options; None for those that the template refuses."""
    return [_render(tokenizer, messages, {**asking, **options}) for messages, asking in _list_prompts()]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], options: dict) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # the template refuses, or cannot compute with the value
        return None


def _raises(texts: list[str | None], plain: list[str | None]) -> bool:
    """Whether the template refuses all prompts that it takes without the option."""
    taken = [text for text, plain_text in zip(texts, plain) if plain_text is not None]
    return bool(taken) and not any(text is not None for text in taken)


def _find_places(plain: list[str | None], trials: list[_Trial]) -> Iterator[str]:
    """Yields the places of the prompt that differ from the plain one with some value."""
    places: set[str] = set()
    for texts in [trial.texts for trial in trials if not (trial.raises or trial.silent)]:
        changed = _compare_prompts(*texts[:2], *plain[:2]) or _compare_prompts(*texts[2:4], *plain[2:4])
        if not changed and texts[4] != plain[4]:
            changed = {HISTORY}
        if not changed and texts[5] != plain[5]:
            changed = {TOOLS}
        places |= changed
    yield from (place for place in (BEGINNING, SYSTEM, QUESTION, ANSWER, HISTORY, TOOLS) if place in places)


def _compare_prompts(text: str | None, prompt: str | None, plain: str | None, plain_prompt: str | None) -> set[str]:
    """The places where two forms of a conversation differ.

    text, plain: the conversation in both forms; prompt, plain_prompt: the same with the beginning of an answer
    """
    if text is None or prompt is None or plain is None or plain_prompt is None:
        return set()
    pattern = f"{SYSTEM_WORD}|{QUESTION_WORD}"
    places = [BEGINNING, *(SYSTEM if word == SYSTEM_WORD else QUESTION for word in re.findall(pattern, plain))]
    sections, plain_sections = re.split(pattern, text), re.split(pattern, plain)
    if len(sections) != len(plain_sections):
        return {BEGINNING}
    changed = {place for place, section, other in zip(places, sections, plain_sections) if section != other}
    return changed | ({ANSWER} if prompt.removeprefix(text) != plain_prompt.removeprefix(plain) else set())


# Values of an option


def find_fault(tokenizer: PreTrainedTokenizerBase, option: TemplateOption, value: Any) -> str | None:
    """What is wrong with a value of an option, as the end of a sentence about the template; None: nothing"""
    if _is_among(value, option.accepted) or not option.accepted:
        return None
    return _find_fault(tokenizer, repr(tokenizer.chat_template), option, json.dumps(value, default=repr))


@functools.lru_cache(maxsize=64)
def _find_fault(
    tokenizer: PreTrainedTokenizerBase, template: str, option: TemplateOption, value_json: str
) -> str | None:
    value, plain = json.loads(value_json), _render_prompts(tokenizer)
    trial = _try_value(tokenizer, option.name, value, plain)
    if option.ordered and _is_number(value) and not trial.raises:
        return None
    if trial.raises or trial.silent:
        return "refuses this value" if trial.raises else "does nothing for this value"
    return None if _is_known(tokenizer, option, trial, plain) else "does not know this value"


def _is_known(
    tokenizer: PreTrainedTokenizerBase, option: TemplateOption, trial: _Trial, plain: list[str | None]
) -> bool:
    """Whether the value has another effect than those of the template. For a written effort: whether models know it"""
    if not option.free:
        trials = [_try_value(tokenizer, option.name, value, plain) for value in option.values]
        return trial.texts not in [own_trial.texts for own_trial in trials]
    if not option.name.endswith("effort"):
        return True
    return not option.further_values and trial.value in EFFORTS and _is_written(trial.value, trial.texts, plain)


def _is_written(value: str, texts: list[str | None], plain: list[str | None]) -> bool:
    """Whether the value stands in the texts, and not in the plain ones."""
    pairs = ((text or "", plain_text or "") for text, plain_text in zip(texts, plain))
    return any(text.lower().count(value) > plain_text.lower().count(value) for text, plain_text in pairs)
