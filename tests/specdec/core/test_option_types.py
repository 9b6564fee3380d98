"""Models of options: sentences of refusals, texts of a command line, and names of options in messages."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from specdec.core.option_types import (
    FREE,
    HUGE,
    Auto,
    BatchSize,
    Count,
    Duration,
    Integer,
    Integers,
    NonNegative,
    Options,
    Positive,
    Share,
    Text,
    Texts,
    convert_text,
    describe_bounds,
    find_options,
    format_value,
    list_fields,
    prefix_option_names,
    raise_first,
    read_options,
)


class Group(Options):
    steps: Count | Auto = 3
    hours: Positive | Auto | None = None
    batch: BatchSize | Auto = 1
    clip: NonNegative = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field([0.9, 0.95])
    log_every: Annotated[Count, FREE] = 20
    patience: Annotated[Count | None, FREE] = None

    @model_validator(mode="after")
    def check_batch(self) -> "Group":
        raise_first({"group.batch=7 does not go with group.clip=0.": self.batch == 7 and self.clip == 0})
        return self


class Run(Options):
    run: Text = "run"
    resume: Literal[True, False, "auto"] = False
    device: Literal["cpu", "cuda"] | None = None
    plan: bool = False
    pack: bool | None = None
    sources: Text | Texts | Annotated[dict[str, Any], Field(min_length=1)] = "a"
    engine: Text | Texts | None = None
    modules: Texts = Field(["a"])
    layers: list[Integer] | None = None
    wait: Duration = 1.0
    share: Share | None = 1.0
    lora: dict[str, Any] | None = None
    group: Group = Group()


def read(name: str, value: Any) -> Run:
    group, _, key = name.rpartition(".")
    return read_options(Run, {group: {key: value}} if group else {key: value})


REFUSED = [
    ("group.steps", 1.0, "a whole number of 1 or more, or auto"),
    ("group.steps", 2**53 + 1, "a whole number from 1 to 9007199254740992, or auto"),
    ("group.hours", -1, "a number above 0, or auto, or null"),
    ("group.hours", 10**400, "a number above 0 and at most 1e+30, or auto, or null"),
    ("group.ema", 1, "a number above 0 and below 1, or null"),
    ("group.betas", [0.9], "a list of 2, each a number of at least 0 and below 1"),
    ("group.betas", [0.9, 1], "a list of 2, each a number of at least 0 and below 1"),
    ("group.log_every", None, "a whole number of 1 or more"),
    ("group.patience", 0, "a whole number of 1 or more, or null"),
    ("group", 3, "settings, such as {r: 8}"),
    ("run", "", "a text that is not empty"),
    ("resume", "yes", "one of true, false, auto"),
    ("device", "tpu", "one of cpu, cuda, null"),
    ("pack", 1, "true or false, or null"),
    ("sources", [], "a text that is not empty, or a list of one or more of these, or sources with their weights, "
     "such as {a.jsonl: 2, b.jsonl: 0.5}"),
    ("engine", 5, "a text that is not empty, or a list of one or more of these, or null"),
    ("modules", [], "a list of one or more texts, such as [q_proj,v_proj]"),
    ("layers", [None], "a list of one or more values, each a whole number, or null"),
    ("wait", 0, "a number above 0 and at most 1000000"),
    ("share", 2, "a number from 0 to 1, or null"),
    ("lora", 3, "settings, such as {r: 8}, or null"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "bounds"), REFUSED)
def test_a_refusal_names_the_option_and_its_bounds(name, value, bounds):
    with pytest.raises(ValueError) as refused:
        read(name, value)
    assert str(refused.value) == f"{name}={format_value(value)} must be {bounds}."


def test_values_that_fit():
    assert read("group.clip", 3).group.clip == 3 and read("group.steps", "auto").group.steps == "auto"
    assert read("group.betas", [0, 0.5]).group.betas == [0, 0.5] and read("layers", []).layers == []
    assert read("resume", True).resume is True and read("group.clip", HUGE).group.clip == HUGE
    for sources in ("a", ["a", "b"], {"a": 2, "b": 0.5}):
        assert read("sources", sources).sources == sources
    assert format_value((None, True, 0.5, "x")) == "[null,true,0.5,x]"
    assert format_value(10**400) == "1" + 76 * "0" + "..."


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"group": {"batch": 7, "clip": 0}}, "group.batch=7 does not go with group.clip=0."),
        ({"group": {"stepz": 3}}, "There is no option 'group.stepz'. Did you mean 'group.steps'? See --help."),
        ({"xyzzy": 3}, "There is no option 'xyzzy'. See --help."),
        ({"plan": 3, "runn": "a"}, "There is no option 'runn'. Did you mean 'run'? See --help."),
    ],
)
def test_options_that_do_not_go_together_and_unknown_ones_before_others(document, sentence):
    with pytest.raises(ValueError) as refused:
        read_options(Run, document)
    assert str(refused.value) == sentence


def test_a_text_becomes_a_value_of_the_options_type():
    texts = {
        "group.steps": {"3": 3, "auto": "auto", "3.5": "3.5"}, "group.hours": {"null": None}, "plan": {"Yes": True},
        "group.clip": {"1e-3": 1e-3}, "pack": {"0": False}, "run": {"null": "null", "[a]": "[a]", "1e3": "1e3"},
        "engine": {"[a,b]": ["a", "b"], "none": None}, "layers": {"[1,2]": [1, 2]},
        "sources": {"{a: 1}": {"a": 1}, "[a": "[a"},
    }  # fmt: skip
    for name, values in texts.items():
        for text, value in values.items():
            converted = convert_text(list_fields(Run)[name], text)
            assert converted == value and type(converted) is type(value), name


Weights = dict[str, Share]


class Base:
    def __init__(self, target: object, *, inputs: int, size: Count | None = None, vocab: bytes | None = None):
        pass


class Head(Base):
    def __init__(
        self, target, *, layers: Integers | None = None, source: Text | bytes = "a", weights: Weights, **arguments
    ):
        pass


def test_keyword_arguments_of_a_class_are_its_options():
    model = find_options(Head)
    assert set(model.model_fields) == {"layers", "source", "weights", "size"} and find_options(Head) is model
    filled = read_options(model, {"weights": {"a": 1}, "layers": [2]})
    assert filled.model_dump(exclude_unset=True) == {"weights": {"a": 1}, "layers": [2]}
    for document, sentence in (
        ({"weights": {"a": 2}}, r"head\.weights\.a=2 must be a number from 0 to 1"),
        ({"weights": {}, "size": 0}, r"head\.size=0 must be a whole number of 1 or more, or null"),
        ({"weights": {}, "source": ""}, r"head\.source= must be a text that is not empty"),
        ({"weights": {}, "inputs": 1}, r"There is no option 'head\.inputs'"),
        ({}, r"Give a value for: head\.weights\. See --help"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}\\."):
            read_options(model, document, "head.")


def test_help_says_what_an_option_may_be_and_a_resumed_run_knows_what_is_free():
    fields = list_fields(Run)
    assert describe_bounds(fields["group.batch"]) == "a whole number from 1 to 65536, or auto"
    assert describe_bounds(fields["device"]) == "one of cpu, cuda, null"
    assert [name for name, field in fields.items() if FREE in field.metadata] == ["group.log_every", "group.patience"]


@pytest.mark.parametrize(
    ("message", "renamed"),
    [
        ("depth=5 is more than 4: lower depth=", "decode.depth=5 is more than 4: lower decode.depth="),
        ("other.depth=5 stays, and so does {lr=1}", "other.depth=5 stays, and so does {decode.lr=1}"),
        ("nodes=null and width=1", "decode.nodes=null and decode.width=1"),
        ("no option here", "no option here"),
    ],
)
def test_messages_of_value_errors_name_the_option(message, renamed):
    for kind, expected in ((ValueError, renamed), (TypeError, message)):
        with pytest.raises(kind) as caught, prefix_option_names("decode"):
            raise kind(message)
        assert str(caught.value) == expected
