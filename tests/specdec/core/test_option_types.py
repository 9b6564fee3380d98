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


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("group.steps", 0, "group.steps=0 must be a whole number of 1 or more, or auto."),
        ("group.steps", True, "group.steps=true must be a whole number of 1 or more, or auto."),
        ("group.steps", 1.0, "group.steps=1.0 must be a whole number of 1 or more, or auto."),
        ("group.steps", 2**53 + 1, "group.steps=9007199254740993 must be a whole number from 1 to 9007199254740992, or auto."),
        ("group.hours", -1, "group.hours=-1 must be a number above 0, or auto, or null."),
        ("group.hours", 10**400, f"group.hours={'1' + 76 * '0'}... must be a number above 0 and at most 1e+30, or auto, or null."),
        ("group.batch", "x", "group.batch=x must be a whole number from 1 to 65536, or auto."),
        ("group.clip", float("inf"), "group.clip=inf must be a number from 0 to 1e+30."),
        ("group.clip", float("nan"), "group.clip=nan must be a number of 0 or more."),
        ("group.ema", 1, "group.ema=1 must be a number above 0 and below 1, or null."),
        ("group.betas", [0.9], "group.betas=[0.9] must be a list of 2, each a number of at least 0 and below 1."),
        ("group.betas", [0.9, 1], "group.betas=[0.9,1] must be a list of 2, each a number of at least 0 and below 1."),
        ("group.log_every", None, "group.log_every=null must be a whole number of 1 or more."),
        ("group.patience", 0, "group.patience=0 must be a whole number of 1 or more, or null."),
        ("group", 3, "group=3 must be settings, such as {r: 8}."),
        ("run", "", "run= must be a text that is not empty."),
        ("resume", "yes", "resume=yes must be one of true, false, auto."),
        ("device", "tpu", "device=tpu must be one of cpu, cuda, null."),
        ("plan", "yes", "plan=yes must be true or false."),
        ("pack", 1, "pack=1 must be true or false, or null."),
        ("sources", [], "sources=[] must be a text that is not empty, or a list of one or more of these, or sources with their weights, "
         "such as {a.jsonl: 2, b.jsonl: 0.5}."),
        ("engine", 5, "engine=5 must be a text that is not empty, or a list of one or more of these, or null."),
        ("modules", [], "modules=[] must be a list of one or more texts, such as [q_proj,v_proj]."),
        ("layers", [None], "layers=[null] must be a list of one or more values, each a whole number, or null."),
        ("wait", 0, "wait=0 must be a number above 0 and at most 1000000."),
        ("share", 2, "share=2 must be a number from 0 to 1, or null."),
        ("lora", 3, "lora=3 must be settings, such as {r: 8}, or null."),
        ("group.stepz", 3, "There is no option 'group.stepz'. Did you mean 'group.steps'? See --help."),
        ("xyzzy", 3, "There is no option 'xyzzy'. See --help."),
    ],
)  # fmt: skip
def test_a_refusal_names_the_option_and_what_it_may_be(name, value, sentence):
    with pytest.raises(ValueError) as refused:
        read(name, value)
    assert str(refused.value) == sentence


def test_values_that_fit():
    assert read("group.clip", 3).group.clip == 3 and read("group.steps", "auto").group.steps == "auto"
    assert read("group.betas", [0, 0.5]).group.betas == [0, 0.5] and read("layers", []).layers == []
    assert read("resume", True).resume is True and read("group.clip", HUGE).group.clip == HUGE
    for sources in ("a", ["a", "b"], {"a": 2, "b": 0.5}):
        assert read("sources", sources).sources == sources


def test_two_options_that_do_not_go_together_and_unknown_ones_first():
    with pytest.raises(ValueError, match=r"^group\.batch=7 does not go with group\.clip=0\.$"):
        read_options(Run, {"group": {"batch": 7, "clip": 0}})
    with pytest.raises(ValueError, match=r"^There is no option 'head\.runn'\. Did you mean 'head\.run'\?"):
        read_options(Run, {"plan": 3, "runn": "a"}, "head.")


def test_a_value_that_must_be_given():
    class Command(Options):
        data: Text
        out: Text

    with pytest.raises(ValueError, match=r"^Give a value for: data, out\. See --help\.$"):
        read_options(Command, {})


def test_a_text_becomes_a_value_of_the_options_type():
    fields = list_fields(Run)
    values = {
        ("group.steps", "3"): 3, ("group.steps", "auto"): "auto", ("group.steps", "3.5"): "3.5", ("group.hours", "null"): None,
        ("group.clip", "1e-3"): 1e-3, ("plan", "Yes"): True, ("pack", "0"): False, ("run", "null"): "null", ("run", "[a]"): "[a]",
        ("run", "1e3"): "1e3", ("engine", "[a,b]"): ["a", "b"], ("layers", "[1,2]"): [1, 2], ("sources", "{a: 1}"): {"a": 1},
        ("engine", "none"): None, ("sources", "[a"): "[a",
    }  # fmt: skip
    for (name, text), value in values.items():
        converted = convert_text(fields[name], text)
        assert converted == value and type(converted) is type(value), name


class Base:
    def __init__(self, target: object, *, inputs: int, size: Count | None = None, vocab: bytes | None = None):
        pass


class Head(Base):
    def __init__(
        self,
        target: object,
        *,
        layers: Integers | None = None,
        source: Text | bytes = "a",
        weights: dict[str, Share],
        **others,
    ):
        pass


def test_keyword_arguments_of_a_class_are_its_options():
    model = find_options(Head)
    assert set(model.model_fields) == {"layers", "source", "weights", "size"} and find_options(Head) is model
    assert read_options(model, {"weights": {"a": 1}, "layers": [2]}).model_dump(exclude_unset=True) == {
        "weights": {"a": 1},
        "layers": [2],
    }
    for document, sentence in (
        ({"weights": {"a": 2}}, r"head\.weights\.a=2 must be a number from 0 to 1"),
        ({"weights": {}, "size": 0}, r"head\.size=0 must be a whole number of 1 or more, or null"),
        ({"weights": {}, "source": ""}, r"head\.source= must be a text that is not empty"),
        ({"weights": {}, "inputs": 1}, r"There is no option 'head\.inputs'"),
        ({}, r"Give a value for: head\.weights"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}\\."):
            read_options(model, document, "head.")


def test_help_says_what_an_option_may_be_and_a_resumed_run_knows_what_is_free():
    fields = list_fields(Run)
    assert describe_bounds(fields["group.batch"]) == "a whole number from 1 to 65536, or auto"
    assert describe_bounds(fields["device"]) == "one of cpu, cuda, null"
    assert [name for name, field in fields.items() if FREE in field.metadata] == ["group.log_every", "group.patience"]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("depth=5 is more than 4: lower depth=", "decode.depth=5 is more than 4: lower decode.depth="),
        ("other.depth=5 stays, and so does {lr=1}", "other.depth=5 stays, and so does {decode.lr=1}"),
        ("nodes=null and width=1", "decode.nodes=null and decode.width=1"),
        ("no option here", "no option here"),
    ],
)
def test_messages_name_the_option(message, sentence):
    with pytest.raises(ValueError) as caught, prefix_option_names("decode"):
        raise ValueError(message)
    assert str(caught.value) == sentence


def test_only_messages_of_value_errors_are_renamed():
    with pytest.raises(TypeError, match=r"^depth=5$"), prefix_option_names("decode"):
        raise TypeError("depth=5")
