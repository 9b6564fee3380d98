"""Suites of long texts: their makers' prompts, cut in the middle to each length."""

from specdec.options.command_line import read_command

import datasets
import pytest

from specdec.measuring.evaluate import EvaluateOptions
from specdec.tools.suites import suites
from specdec.tools.suites.cutting import cut_middle
from tests.support.commands import write_rows
from tests.support.targets import small_tokenizer

CHOICES = {f"choice_{letter}": f" choice {letter} " for letter in "ABCD"}
LONG = {"_id": "x1", "domain": "Books", "question": " Who? ", "context": "\nIt is. " * 900, "answer": "A", **CHOICES}


@pytest.fixture
def read(tmp_path):
    """read(option, ..): the questions of a folder, and their prompts in tokens"""
    small_tokenizer().save_pretrained(tmp_path / "target")

    def read(*arguments):
        command = ["checkpoint=none", f"target.name={tmp_path}/target", *arguments]
        options = read_command("evaluate", EvaluateOptions, None, command, presets=suites.list_presets)
        question_set = suites.read_questions(options, [])
        make = question_set.make_prompt
        return question_set, [make(question, 0, [], small_tokenizer()).tokens for question in question_set.questions]

    return read


def test_longbench_v2_is_asked_as_its_makers_ask_and_cut_in_the_middle(tmp_path, read):
    rows = [LONG, LONG | {"_id": "x2", "context": "It is short."}]
    write_rows(tmp_path / "suite.json", rows)
    question_set, prompts = read("suite=longbench_v2", f"prompts={tmp_path}/suite.json", "lengths=700,1200")
    long, short = question_set.questions[:2]
    assert [question.category for question in question_set.questions] == ["Books 700"] * 2 + ["Books 1200"] * 2
    start = "Please read the following text and answer the question below.\n\n<text>\n"
    choices = "".join(f"\n({letter}) choice {letter}" for letter in "ABCD")
    end = f"\n</text>\n\nWhat is the correct answer to this question: Who?\nChoices:{choices}\n\n"
    end += 'Format your response as follows: "The correct answer is (insert answer here)".'
    assert short.turns[0]["prompt"] == f"{start}It is short.{end}"
    assert long.turns[0]["prompt"].startswith(f"{start}It is. ") and long.turns[0]["prompt"].endswith(end)
    assert 0.98 * 700 <= len(prompts[0]) <= 700 and 0.98 * 1200 <= len(prompts[2]) <= 1200
    assert "cut in the middle: 1 of 2 at 700 tokens, 1 of 2 at 1,200 tokens" in question_set.notes[0]
    _, prompts = read("suite=longbench_v2", f"prompts={tmp_path}/suite.json", "lengths=1200", "protocol=eagle")
    assert 0.98 * 1200 <= len(prompts[0]) <= 1200  # with a system message
    with pytest.raises(ValueError, match="lengths=20 leaves nothing of the texts"):
        read("suite=longbench_v2", f"prompts={tmp_path}/suite.json", "lengths=20")
    with pytest.raises(ValueError, match="suite=gsm8k is asked as it is published: leave lengths= out"):
        read("suite=gsm8k", f"prompts={tmp_path}/suite.json", "lengths=700")


def test_infinitebench_has_a_prompt_for_each_task(tmp_path, read, monkeypatch):
    choice = {"id": 0, "context": "def f(): pass", "input": "Which?", "answer": ["B"], "options": ["f", "g", "h", "i"]}
    call = {"id": 1, "context": "def func_1(x): ...", "input": "Give me func_1(-3) now.", "options": []}
    find = {"id": 2, "context": "[1, 2]", "input": "The second largest number of the list is: ", "options": []}
    for name, row in {"code_debug": choice, "code_run": call, "math_find": find}.items():
        write_rows(tmp_path / f"{name}.jsonl", [row])
    texts = []
    for name in ("code_debug", "code_run", "math_find"):
        question_set, _ = read("suite=infinitebench", f"prompts={tmp_path}", f"subset={name}")
        texts.append(question_set.questions[0].turns[0]["prompt"])
    assert "A. f\nB. g\nC. h\nD. i" in texts[0] and "named func_1.\n\ndef func_1(x)" in texts[1]
    assert "return value of func_1(-3)." in texts[1]
    assert texts[2] == f"What is the second largest number in the following list?\n\n[1, 2]\n\n{find['input']}"
    calls, rows = [], datasets.Dataset.from_list([{"id": 0, "context": "A book.", "input": "", "options": ["a"]}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: calls.append((*names, options)) or rows)
    question_set, _ = read("suite=infinitebench")
    assert calls == [("xinrongzhang2022/InfiniteBench", None, {"split": "longbook_sum_eng"})]
    assert question_set.questions[0].turns[0]["prompt"] == "Summarize the following book.\n\nA book."
    assert question_set.questions[0].category == "longbook_sum_eng 2048" and len(question_set.questions) == 2


def test_no_more_is_encoded_of_a_text_than_stays():
    tokenizer, encoded = small_tokenizer(), []

    def count_tokens(text: str) -> int:
        encoded.append(len(text))
        return len(tokenizer(text)["input_ids"])

    text = cut_middle("one two three " * 100_000, 200, count_tokens, tokenizer)
    assert count_tokens(text) <= 200 and max(encoded) < 16 * 200
    assert text.startswith("one two three one") and text.endswith("two three ")


def test_a_text_that_fits_is_not_cut_however_many_characters_its_tokens_have():
    text = "uncharacteristically " * 100
    assert cut_middle(text, 110, lambda text: len(text.split()), lambda text, **_: {"input_ids": text.split()}) == text
