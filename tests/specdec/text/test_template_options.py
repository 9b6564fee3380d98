"""Options of chat templates: small templates with the variables that families have, and what is refused."""

import pytest

from specdec.text.chat_template import check_arguments
from specdec.text.template_options import (
    ANSWER,
    BEGINNING,
    HISTORY,
    QUESTION,
    SYSTEM,
    TOOLS,
    find_template_error,
    has_markers,
    list_options,
    takes_tools,
)
from specdec.tools.inspect.sections import describe_template
from tests.support.conversations import with_template

TALK = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>"
EFFORT_FIRST = (  # as Qwen3.8: closed values, a thinking mode, and thoughts that stay by default
    "{%- set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}"
    "{%- if effort not in ['xhigh', 'medium', 'low'] %}{{ raise_exception('effort') }}{% endif %}"
    "{%- set keep = preserve_thinking | default(true) %}"
    "{{ bos_token }}{% if effort != 'medium' %}Think {{ effort }}. {% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and (keep or loop.last) %}({{ m.reasoning_content }}){% endif %}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<bot>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
    "{% endif %}"
)
PRINTED = (  # as gpt-oss: any value is written into the system message
    "{%- macro head() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Date {{ strftime_now('%Y') }}. Reasoning: {{ reasoning_effort }}{% endmacro %}{{ head() }}" + TALK + "{% endif %}"
)
TITLED = (  # as GLM-5.3: an effort in its own system message, and a mode that shows behind the user's text
    "{% set ns = namespace(effort=reasoning_effort or 'max') %}{% if ns.effort in ('max', 'high', 'low') %}"
    "<system>Effort: {{ ns.effort | capitalize }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}"
    "{% endif %}"
)
QUIET = (  # as Gemma 4: thinking is off by default
    "{% if enable_thinking %}<think>{% endif %}" + TALK + "{{ '' if enable_thinking | default(false) else '(empty)' }}"
    "{% endif %}"
)
PLAIN_MODE = TALK + "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"  # as DeepSeek
LEVELS = (  # as Kimi K3: a mode and closed levels
    "{% set level = (thinking_effort | default('max')).lower() %}"
    "{% if level == 'max' %}{% elif level in ['high', 'medium', 'low'] %}<system>{{ level }}\n"
    "{% else %}{{ raise_exception(level) }}{% endif %}" + PLAIN_MODE.replace("is defined and thinking", "is not false")
)
MAPPED = (  # as Hy3: levels by a dictionary; a level that it lacks changes nothing
    "{% set marks = {'no_think': '', 'low': '~', 'high': '!'} %}"
    + TALK
    + "{% if reasoning_effort in marks %}{{ marks[reasoning_effort] }}{% endif %}{% endif %}"
)
TWO = (  # as Mistral Small 4: two levels, others raise
    "{% set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort is not none else 'none' %}"
    "{% if effort == 'high' %}THINK {% elif effort != 'none' %}{{ raise_exception('no') }}{% endif %}"
    + TALK
    + "{% endif %}"
)
LOW = (  # as Nemotron 3: two switches, and thoughts that are cut from earlier answers
    "{% set low = low_effort if low_effort is defined else False %}"
    "{% set cut = truncate_history_thinking if truncate_history_thinking is defined else True %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content if m.reasoning_content and not cut }}"
    "{{ m.content }}{% if m.role == 'user' and low %}{short}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% if enable_thinking | default(True) %}<think>{% endif %}{% endif %}"
)
DATED = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul' %}{% endif %}Today {{ date_string }}" + PLAIN_MODE
)

# template -> {name: (values, default, places, whether others raise)}
SWITCH = (True, False)
FAMILIES = {
    "Qwen3.8": (EFFORT_FIRST, {
        "reasoning_effort": (("xhigh", "medium", "low"), "xhigh", (BEGINNING,), True),
        "enable_thinking": (SWITCH, True, (ANSWER,), False),
        "preserve_thinking": (SWITCH, True, (HISTORY,), False),
    }),
    "gpt-oss": (PRINTED, {"reasoning_effort": (("medium",), "medium", (BEGINNING,), False)}),
    "GLM-5.3": (TITLED, {
        "reasoning_effort": (("max", "high", "low"), "max", (BEGINNING,), False),
        "enable_thinking": (SWITCH, True, (QUESTION, ANSWER), False),
    }),
    "Gemma 4": (QUIET, {"enable_thinking": (SWITCH, False, (BEGINNING, ANSWER), False)}),
    "DeepSeek": (PLAIN_MODE, {"thinking": (SWITCH, False, (ANSWER,), False)}),
    "Kimi K3": (LEVELS, {
        "thinking_effort": (("max", "high", "medium", "low"), "max", (BEGINNING,), True),
        "thinking": (SWITCH, True, (ANSWER,), False),
    }),
    "Hy3": (MAPPED, {"reasoning_effort": (("no_think", "low", "high"), "no_think", (ANSWER,), False)}),
    "Mistral Small 4": (TWO, {"reasoning_effort": (("high", "none"), "none", (BEGINNING,), True)}),
    "Nemotron 3": (LOW, {
        "enable_thinking": (SWITCH, True, (ANSWER,), False),
        "low_effort": (SWITCH, False, (QUESTION,), False),
        "truncate_history_thinking": (SWITCH, True, (HISTORY,), False),
    }),
    "Llama 3.1": (DATED, {
        "date_string": (("26 Jul",), "26 Jul", (BEGINNING,), False),
        "thinking": (SWITCH, False, (ANSWER,), False),
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_family_are_found(family):
    template, expected = FAMILIES[family]
    options = list_options(with_template(template))
    found = {option.name: (option.values, option.default, option.places, option.strict) for option in options}
    assert {name: (set(values), *rest) for name, (values, *rest) in found.items()} == {
        name: (set(values), *rest) for name, (values, *rest) in expected.items()
    }


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("Qwen3.8", {"reasoning_effort": "high"}, "refuses this value. It takes xhigh, medium, low"),
        ("Qwen3.8", {"preserve_thinking": "no"}, "does nothing for this value. It takes true, false"),
        ("Qwen3.8", {"thinking_effort": "low"}, r"Did you mean reasoning_effort \(xhigh, medium, low\)\?"),
        ("Nemotron 3", {"low_effort": "high"}, "does not know this value. It takes true, false"),
        ("gpt-oss", {"reasoning_effort": "hihg"}, "does not know this value. It takes medium, low, high"),
        ("gpt-oss", {"reasoning_effort": "max"}, "does not know this value. It takes medium, low, high"),
        ("gpt-oss", {"enable_thinking": True}, r"no thinking mode .* mean reasoning_effort \(medium, low, high\)"),
        ("GLM-5.3", {"reasoning_effort": "medium"}, "does not know this value. It takes max, high, low"),
        ("Gemma 4", {"reasoning_effort": "low"}, r"Did you mean enable_thinking \(true, false\)"),
        ("DeepSeek", {"thinking_mode": "on"}, r"Did you mean thinking \(true, false\)"),
        ("Kimi K3", {"reasoning_effort": "low"}, r"Did you mean thinking_effort \(max, high, medium, low\)"),
        ("Kimi K3", {"thinking_effort": "xhigh"}, "refuses this value. It takes max, high, medium, low"),
        ("Hy3", {"reasoning_effort": "medium"}, "does nothing for this value. It takes no_think, low, high"),
        ("Mistral Small 4", {"reasoning_effort": "low"}, "refuses this value. It takes high, none"),
        ("Nemotron 3", {"low_effrt": True}, r"Did you mean low_effort \(true, false\)"),
        ("Nemotron 3", {"colour": "red"}, r"reads no variable colour\. Leave it out"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_take_is_refused_by_name(family, arguments, message):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name}=.*: the chat template of .*{message}"):
        check_arguments(with_template(FAMILIES[family][0]), arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_takes_is_taken(family):
    template, options = FAMILIES[family]
    tokenizer = with_template(template)
    for name, (values, *_) in options.items():
        for value in values:
            check_arguments(tokenizer, {"enable_thinking" if name == "thinking" else name: value})
    check_arguments(tokenizer, {"enable_thinking": False, "tools": []})
    if family == "Llama 3.1":
        check_arguments(tokenizer, {"date_string": "1 May"})


def test_values_of_one_effort_are_known_where_the_template_tests_for_one():
    tokenizer = with_template(
        "{% if reasoning_effort != 'none' %}[{{ reasoning_effort }}]{% endif %}" + TALK + "{% endif %}"
    )
    check_arguments(tokenizer, {"reasoning_effort": "high"})
    with pytest.raises(ValueError, match="does not know this value"):
        check_arguments(tokenizer, {"reasoning_effort": "hgih"})


def test_tools_and_markers_are_found():
    marked = TALK.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + "{% endif %}"
    for template, tools, markers in ((EFFORT_FIRST, True, False), (marked, False, True)):
        tokenizer = with_template(template)
        assert (takes_tools(tokenizer), has_markers(tokenizer)) == (tools, markers)
    (option,) = list_options(with_template("{{ 'few' if short and tools }}" + TALK + "{% endif %}"))
    assert option.places == (TOOLS,) and option.default is False
    assert option.describe() == "short: true, false (default); with tools"


def test_templates_without_options_have_none():
    own = (
        "{% if messages[1:] %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{{ rest[:0] }}"
    )
    for template in (TALK + "{% endif %}", "{% if %}", own + TALK + "{% endif %}"):
        assert list_options(with_template(template)) == []
    (option,) = list_options(with_template(TALK + "{{ hint }}{% endif %}"))
    assert (option.values, option.places, option.describe()) == (
        (),
        (ANSWER,),
        "hint: any text; behind the assistant's tag",
    )


def test_a_mode_between_system_and_question_is_found():
    template = (
        "{% for m in messages %}{{ '/off ' if m.role == 'user' and thinking is false }}" + TALK.partition("%}")[2]
    )
    (option,) = list_options(with_template(template + "{% endif %}"))
    assert option.places == (SYSTEM,) and option.default is True


def test_an_option_that_holds_several_values_takes_lists():
    for test in ("'browser' in builtin_tools", "builtin_tools and 'browser' not in builtin_tools"):
        tokenizer = with_template("{{ 'Browse. ' if " + test + " }}" + TALK + "{% endif %}")
        (option,) = list_options(tokenizer)
        assert (option.values, option.free, option.strict) == ((), True, False)
        for value in (["browser"], ["python"], ["browser", "python"]):
            check_arguments(tokenizer, {"builtin_tools": value})


BUDGET = (  # as Seed-OSS: a number, compared by size and written
    "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}"
    "{% if thinking_budget == 0 %}None. {% elif thinking_budget > 0 %}Up to {{ thinking_budget }}. {% endif %}"
)


@pytest.mark.parametrize(
    ("beginning", "line"),
    [
        (BUDGET, "thinking_budget: 0, -1 (default), other numbers; beginning"),
        (
            "{{ 'Long. ' if thinking_budget | default(-1) > 512 }}",
            "thinking_budget: 512, -1 (default), other numbers; beginning",
        ),
        (
            "{{ 'Short. ' if thinking_budget | default(-1) < -2 }}",
            "thinking_budget: -2, -1 (default), other numbers; beginning",
        ),
    ],
)
def test_all_numbers_are_taken_where_they_are_ordered(beginning, line):
    tokenizer = with_template(beginning + TALK + "{% endif %}")
    assert [option.describe() for option in list_options(tokenizer)] == [line]
    for value in (-1, 0, 1, 511, 512.5, 4096, -3):
        check_arguments(tokenizer, {"thinking_budget": value})
    with pytest.raises(ValueError, match=r"refuses this value\. It takes .*-1"):
        check_arguments(tokenizer, {"thinking_budget": "long"})


def test_numbers_that_an_ordered_option_refuses_are_refused():
    tokenizer = with_template(
        "{% if depth | default(3) >= 9 %}{{ raise_exception('deep') }}{% endif %}" + TALK + "{% endif %}"
    )
    check_arguments(tokenizer, {"depth": 8})
    with pytest.raises(ValueError, match="refuses this value"):
        check_arguments(tokenizer, {"depth": 10})


def test_a_template_that_cannot_be_parsed_is_told():
    broken, sound = with_template(TALK + "{% endif %}\n{% for x in %}"), with_template(TALK + "{% endif %}")
    assert find_template_error(sound) is None
    error = find_template_error(broken)
    assert error is not None and error.startswith("Expected an expression") and error.endswith("(line 3)"), error
    assert describe_template(broken).lines == [f"the chat template cannot be parsed: {error}"]


def test_an_effort_that_is_merely_written_takes_what_models_know():
    tokenizer = with_template(PRINTED)
    (option,) = list_options(tokenizer)
    assert option.describe() == "reasoning_effort: medium (default), low, high; beginning"
    for effort in ("low", "medium", "high"):
        check_arguments(tokenizer, {"reasoning_effort": effort})
    for effort in ("no_think", "none", "xhigh"):
        with pytest.raises(ValueError, match=r"does not know this value\. It takes medium, low, high\."):
            check_arguments(tokenizer, {"reasoning_effort": effort})
    assert list_options(with_template(TITLED))[1].describe() == "reasoning_effort: max (default), high, low; beginning"
