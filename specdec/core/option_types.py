"""Options of every command: frozen models, their types, and the sentence for each value that is refused."""

import contextlib
import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, create_model
from pydantic.fields import FieldInfo

LARGEST = 2**53  # default bound of whole numbers, which are exact as floats up to it
HUGE = 1e30  # default bound of other numbers, finite in float32
FREE = "free"  # metadata of options that a resumed run may change
TRUTH_VALUES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
ERROR_ORDER = {"extra_forbidden": 0, "missing": 1}  # errors that come before all others

Auto = Literal["auto"]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Names = Annotated[Sequence[Text], Field(min_length=1)]  # names of layers
Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
SmallCount = Annotated[int, Field(ge=1, le=1024)]  # numbers of layers, drafts or processes
BatchSize = Annotated[int, Field(ge=1, le=65536)]
Width = Annotated[int, Field(ge=1, le=2**20)]  # width of a layer, or a rank
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
AS_WRITTEN = WrapValidator(lambda value, validate: (validate(value), value)[1])  # keeps 1 as 1, not 1.0
NonNegative = Annotated[float, Field(ge=0, le=HUGE), AS_WRITTEN]
Positive = Annotated[float, Field(gt=0, le=HUGE), AS_WRITTEN]
Share = Annotated[float, Field(ge=0, le=1), AS_WRITTEN]
PositiveShare = Annotated[float, Field(gt=0, le=1), AS_WRITTEN]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1), AS_WRITTEN]
Duration = Annotated[float, Field(gt=0, le=10**6), AS_WRITTEN]  # seconds or minutes
Integers = Annotated[Sequence[Integer], Field(min_length=1)]
Layers = Sequence[Whole]  # layers by number, from 0; an empty list is allowed
Window = Annotated[int, Field(ge=2, le=LARGEST)]  # positions that an attention layer sees
REMOVED_CHOICES = {("head", "consistency"), ("proposer", "lookahead"), ("proposer", "layerskip")}  # option, value
LISTS = (list, Sequence)
PLAIN_TYPES = (
    int,
    float,
    bool,
    str,
    types.NoneType,
    list,
    Sequence,
    dict,
    Literal,
    Any,
)  # types of a document's values

Model = TypeVar("Model", bound="Options")


class Options(BaseModel):
    """Options of a command, or of one of its groups."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


@functools.cache
def find_options(maker: Callable[..., Any]) -> type[Options]:
    """The options of a class or function that a `_target_` names: its own `Options`, else its keyword arguments.

    A constructor with further arguments (**) also takes those of the next class in the method resolution order, but for
    arguments that it must give itself. Arguments that no document can hold, such as tensors, are no options.
    """
    declared = getattr(maker, "Options", None)
    if declared is not None:
        return declared
    fields: dict[str, Any] = {}
    constructors = _list_constructors(maker)
    for constructor in reversed(constructors):
        hints = get_type_hints(constructor, include_extras=True)
        for parameter in inspect.signature(constructor).parameters.values():
            plain = _plain_type(hints.get(parameter.name, Any))
            default = ... if parameter.default is parameter.empty else parameter.default
            is_passed = default is ... and constructor is not constructors[0]
            if parameter.kind is parameter.KEYWORD_ONLY and plain is not None and not is_passed:
                fields[parameter.name] = (plain, default)
    return create_model(f"{maker.__name__}Options", __base__=Options, **fields)


def _list_constructors(maker: Callable[..., Any]) -> list[Any]:
    """The constructors that get the keyword arguments of a class, its own first; a function alone"""
    if not isinstance(maker, type):
        return [maker]
    constructors: list[Any] = []
    for owner in maker.__mro__:
        if "__init__" in vars(owner):
            constructors.append(vars(owner)["__init__"])
            parameters = inspect.signature(constructors[-1]).parameters.values()
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break
    return constructors


def _plain_type(annotation: Any) -> Any:
    """The types of an annotation that a document can hold; None for none"""
    members = [member for member in _list_members(annotation) if _is_plain(member)]
    if not members or members == [types.NoneType]:
        return None
    return Union[tuple(members)]  # noqa: UP007  the list is known only at run time


def _is_plain(annotation: Any) -> bool:
    kind, _ = read_bounds(annotation)
    items = get_args(kind) if get_origin(kind) in (*LISTS, dict) else ()
    return (get_origin(kind) or kind) in PLAIN_TYPES and all(map(_is_plain, items))


def read_options(model: type[Model], document: dict[str, Any], prefix: str = "") -> Model:
    """The document as a model. prefix: groups in front of its options' names, such as head.drafter.

    Raises ValueError with one sentence, which names the option and its possible values.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ValueError(describe_error(error.errors(), model, document, prefix)) from None


def check_value(name: str, field: FieldInfo, value: Any) -> None:
    """Raises ValueError for a value that an option does not take."""
    annotation: Any = Annotated[field.annotation, *field.metadata, FREE]
    try:
        TypeAdapter(annotation, config=Options.model_config).validate_python(value)
    except ValidationError:
        raise ValueError(_describe_refusal(name, value, field)) from None


# Sentences


def describe_error(errors: list[Any], model: type[Options], document: dict[str, Any], prefix: str = "") -> str:
    """The sentence for the first of pydantic's errors about a document"""
    error = min(errors, key=lambda error: ERROR_ORDER.get(error["type"], 2))
    if error["type"] == "value_error":  # a validator's own sentence
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        names = [prefix + name for name in list_fields(model)]
        return describe_unknown(prefix + ".".join(map(str, error["loc"])), names)
    if error["type"] == "missing":
        names = [prefix + ".".join(map(str, error["loc"])) for error in errors if error["type"] == "missing"]
        return f"Give a value for: {', '.join(names)}. See --help."
    name, value, field = _find_value(error["loc"], list_fields(model), document)
    return _describe_refusal(prefix + name, value, field)


def _describe_refusal(name: str, value: Any, field: FieldInfo | None) -> str:
    return f"{name}={format_value(value)} must be {describe_bounds(field, value)}."


def _find_value(
    location: Sequence[Any], fields: dict[str, FieldInfo], document: Any
) -> tuple[str, Any, FieldInfo | None]:
    """Name, value and field of the option of an error. location: keys, also within a value, and tags of unions"""
    name = ""
    for key in location:
        name = f"{name}.{key}".removeprefix(".")
        document = document[key]
        if name in fields:
            break
    field = fields.get(name)
    within = location[name.count(".") + 1 :]
    if field is None or not within or get_origin(field.annotation) is not dict:
        return name, document, field
    return f"{name}.{within[0]}", document[within[0]], FieldInfo.from_annotation(get_args(field.annotation)[1])


def describe_unknown(name: str, names: Collection[str]) -> str:
    """The sentence for an option that does not exist. names: options that do, with their groups"""
    group, _, last = name.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == group}
    close = [other for other in names if other.startswith(f"{name}.")]  # the options of a group
    close = close or [siblings[key] for key in difflib.get_close_matches(last, siblings, n=1, cutoff=0.5)]
    elsewhere = [other for other in names if other.endswith(f".{last}")]
    close = close or difflib.get_close_matches(name, elsewhere, n=1, cutoff=0)
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no option {name!r}.{guess} See --help."


def describe_unknown_choice(option: str, name: str, choices: Collection[str]) -> str:
    """The sentence for a value of an option, such as head, that is none of the choices"""
    if (option, name) in REMOVED_CHOICES:
        return f"{option}={name} was removed: an earlier version of specdec has it."
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    guess = f" Did you mean {option}={close[0]}?" if close else ""
    return f"There is no {option}={name}.{guess} There are: {', '.join(choices)}."


def describe_bounds(field: FieldInfo | None, value: Any = None) -> str:
    """The possible values of an option.

    field: None for a group; value: refused value; a number above all bounds names them
    """
    if field is None:
        return "settings, such as {r: 8}"
    words: list[str] = []
    choices: list[str] = []
    null = False
    for kind, bounds in map(read_bounds, list_types(field)):
        if get_origin(kind) is Literal:
            choices += [format_value(choice) for choice in get_args(kind)]
        elif kind is types.NoneType:
            null = True
        else:
            words.append(_describe_type(kind, bounds, value, first=not words))
    choices += ["null"] if null else []
    if words:
        return ", or ".join(words + choices)
    return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"


def _describe_type(kind: Any, bounds: dict[str, Any], value: Any, *, first: bool) -> str:
    """One type of an option. first: True if no other type stands before it"""
    origin = get_origin(kind) or kind
    if origin in LISTS and not first:
        return "a list of one or more of these"
    if origin is dict and not first:
        return "sources with their weights, such as {a.jsonl: 2, b.jsonl: 0.5}"
    if origin in LISTS:
        item, item_bounds = read_bounds(get_args(kind)[0])
        if item is str:
            return "a list of one or more texts, such as [q_proj,v_proj]"
        num = bounds["min_length"] if "max_length" in bounds else "one or more values"
        return f"a list of {num}, each {_describe_type(item, item_bounds, value, first=True)}"
    if kind in (int, float):
        return _describe_number(kind, bounds, value)
    return {str: "a text that is not empty", bool: "true or false"}.get(kind, "settings, such as {r: 8}")


def _describe_number(kind: type, bounds: dict[str, Any], value: Any) -> str:
    noun = "a whole number" if kind is int else "a number"
    lower = bounds.get("ge", bounds.get("gt", -HUGE))
    upper = bounds.get("le", bounds.get("lt", HUGE))
    too_large = isinstance(value, int | float) and value > upper
    if upper in (LARGEST, HUGE) and not too_large:
        if lower in (-LARGEST, -HUGE):
            return noun
        return f"{noun} above {lower}" if "gt" in bounds else f"{noun} of {lower} or more"
    if "gt" in bounds or "lt" in bounds:
        above = "above" if "gt" in bounds else "of at least"
        below = "below" if "lt" in bounds else "at most"
        return f"{noun} {above} {lower} and {below} {upper}"
    return f"{noun} from {lower} to {upper}"


def format_value(value: Any) -> str:
    """A value as on the command line"""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_first(sentences: dict[str, Any]) -> None:
    """Raises ValueError with the first sentence whose condition holds. sentences: conditions by sentence"""
    for sentence, applies in sentences.items():
        if applies:
            raise ValueError(sentence)


@contextlib.contextmanager
def prefix_option_names(prefix: str, *, only: Collection[str] | None = None) -> Iterator[None]:
    """Within, a ValueError that names an argument, `depth=`, names the option of a group instead, `decode.depth=`.

    Names with a prefix, and values behind an equals sign, stay. only: arguments of the group; None: all
    """

    def add_prefix(match: re.Match) -> str:
        name = match[1]
        return f"{prefix}.{name}=" if only is None or name in only else match[0]

    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"(?<![\w.=/'\"-])([a-z]\w*)=", add_prefix, str(error))) from error


# Types of options


def list_fields(model: type[Options], prefix: str = "") -> dict[str, FieldInfo]:
    """All options of a model by name, with the groups in front"""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        group = find_group(field)
        fields |= list_fields(group, f"{prefix}{name}.") if group else {f"{prefix}{name}": field}
    return fields


def find_group(field: FieldInfo) -> type[Options] | None:
    """The model of a field that is a group; None for an option"""
    for kind, _ in map(read_bounds, list_types(field)):
        if isinstance(kind, type) and issubclass(kind, Options):
            return kind
    return None


def list_types(field: FieldInfo) -> list[Any]:
    """The types of a field's union, or its only type, with their bounds"""
    members = _list_members(field.annotation)
    return [Annotated[field.annotation, *field.metadata]] if len(members) == 1 and field.metadata else members


def _list_members(annotation: Any) -> list[Any]:
    return list(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else [annotation]


def list_kinds(field: FieldInfo) -> set[Any]:
    """The types of a field's union without those of their items: list for a list of texts"""
    return {get_origin(kind) or kind for kind, _ in map(read_bounds, list_types(field))}


def list_choices(field: FieldInfo) -> list[Any]:
    """The values of a field's literals, such as auto"""
    choices: list[Any] = []
    for kind, _ in map(read_bounds, list_types(field)):
        choices += get_args(kind) if get_origin(kind) is Literal else []
    return choices


def read_bounds(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """A type without its bounds, and the bounds by pydantic's names"""
    if get_origin(annotation) is not Annotated:
        return annotation, {}
    kind, *metadata = get_args(annotation)
    bounds: dict[str, Any] = {}
    for entry in metadata:
        for bound in getattr(entry, "metadata", [entry]):
            bounds |= {name: getattr(bound, name) for name in getattr(bound, "__slots__", ()) if hasattr(bound, name)}
    return kind, bounds


def convert_text(field: FieldInfo, text: str) -> Any:
    """The value of a text on a command line, by the field's type. Other texts stay, and `read_options` refuses them."""
    kinds = list_kinds(field)
    if types.NoneType in kinds and text.lower() in ("null", "none"):
        return None
    if bool in kinds and text.lower() in TRUTH_VALUES:
        return TRUTH_VALUES[text.lower()]
    for number in (int, float):
        if number in kinds:
            with contextlib.suppress(ValueError):
                return number(text)
    if kinds & {*LISTS, dict} and text.startswith(("[", "{")):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(text)
    return text
