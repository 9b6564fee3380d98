"""Generated questions: lengths, right answers, and other questions for training."""

from specdec.options.command_line import read_command

import json
import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from scripts import answer
from specdec.measuring.evaluate import EvaluateOptions
from specdec.measuring.questions import QuestionSet
from specdec.tools.suites import ruler, suites
from tests.support.small_server import STOP, Model, SmallServer
from tests.support.targets import small_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A target without weights."""
    small_tokenizer().save_pretrained(tmp_path / "target")
    LlamaConfig(vocab_size=len(small_tokenizer()), eos_token_id=STOP).save_pretrained(tmp_path / "target")
    return tmp_path


def count_prompts(question_set: QuestionSet) -> list[int]:
    """The tokens of each prompt."""
    questions = question_set.questions
    return [len(question_set.make_prompt(question, 0, [], small_tokenizer()).tokens) for question in questions]


def count_words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("kind", ruler.KINDS)
@pytest.mark.parametrize("length", [1024, 2500, 4096])
def test_a_question_has_its_length_and_its_answer_once(kind, length):
    text, expected = ruler.make_question(kind, length, 3, count_words, split="test")
    assert 0.98 * length <= count_words(text) <= length
    assert len(set(expected)) == len(expected) > 3 and all(value in text for value in expected)
    assert (text, expected) == ruler.make_question(kind, length, 3, count_words, split="test")
    other = ruler.make_question(kind, length, 3, count_words, split="train")
    assert other[0] != text and not {*other[1]} & {*expected}


def test_a_text_whose_later_filler_has_more_tokens_stays_within_the_length():
    def count_tokens(text: str) -> int:
        return count_words(text) + 20 * max(0, count_words(text) - 1400)

    text, _ = ruler.make_question("tracing", 2500, 0, count_tokens, split="test")
    assert 2000 < count_tokens(text) <= 2500


def test_the_answer_of_each_kind_follows_from_its_text():
    text, expected = ruler.make_question("retrieval", 2048, 0, count_words, split="test")
    (place,) = re.findall(r"The (.+) has four codes", text)
    assert re.findall(rf"A code of the {place} is (\d+)\.", text) == expected
    text, expected = ruler.make_question("tracing", 2048, 0, count_words, split="test")
    value = text.rpartition("have the value ")[2].split()[0]
    values = {}
    for name, new in re.findall(r"Set (\w+) to (?:the value of )?(\w+)\.", text):
        values[name] = values.get(new, new)
    assert [name for name in values if values[name] == value] == expected
    text, expected = ruler.make_question("counting", 2048, 0, count_words, split="test")
    words = text.split("\n\n")[1].split()
    assert {*sorted(set(words), key=words.count)[-8:]} == {*expected}
    with pytest.raises(ValueError, match="lengths=100 is too short for suite=ruler: give 1024 or more"):
        ruler.make_question("counting", 100, 0, count_words, split="test")


def test_questions_to_evaluate_and_prompts_to_train_on_have_the_lengths_of_the_target(folder):
    arguments = ["suite=ruler", "lengths=5000,4096", "limit=4", f"target.name={folder}/target"]
    command = ["checkpoint=none", *arguments]
    options = read_command("evaluate", EvaluateOptions, None, command, presets=suites.list_presets)
    with pytest.raises(ValueError, match="suite=ruler is generated: leave prompts= and accept_licence= out"):
        suites.read_questions(options.model_copy(update={"prompts": "a.jsonl"}), [])
    question_set = suites.read_questions(options, [])
    categories = [f"{kind} {length}" for length in (4096, 5000) for kind in [*ruler.KINDS, "retrieval"]]
    assert [question.category for question in question_set.questions] == categories and options.max_new_tokens == 256
    lengths = count_prompts(question_set)
    assert all(0.98 * top <= length <= top for length, top in zip(lengths, [4096] * 4 + [5000] * 4))
    assert question_set.has_right_answers and not replace(question_set, questions=[]).has_right_answers
    first, second = question_set.questions[0], question_set.questions[1]
    values = first.turns[0]["expected"]
    counts = question_set.count_right_answers({first.id: f"{values[0]} and {values[2]}.", second.id: "none"})
    assert counts.startswith("retrieval 4096 2 of 8, tracing 4096 0 of 5, ")
    with SmallServer(Model()) as server:
        answer.main([*arguments, f"engine={server.url}", f"out={folder}/out.jsonl", "decode.temperature=0"])
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sorted(row["category"] for row in rows) == sorted(categories) and len(rows) == 8
    assert not {row["messages"][0]["content"] for row in rows} & {
        row.turns[0]["prompt"] for row in question_set.questions
    }


def test_a_system_message_of_the_protocol_is_sent_and_counts(folder):
    command = ["checkpoint=none", "suite=ruler", "protocol=eagle", "lengths=4096", "limit=1"]
    command.append(f"target.name={folder}/target")
    options = read_command("evaluate", EvaluateOptions, None, command, presets=suites.list_presets)
    question_set = suites.read_questions(options, [])
    (row,) = question_set.questions[0].turns
    assert [message["role"] for message in row["messages"]] == ["system", "user"] and row["expected"]
    assert 0.98 * 4096 <= count_prompts(question_set)[0] <= 4096


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["suite=gsm8k"], "suite=gsm8k is there to evaluate: give prompts=, or suite=ruler"),
        (["suite=ruler", "subset=magic"], "no subset=magic"),
        (["suite=ruler", "lengths=2k"], "lengths=2k: give numbers from 1 to"),
        (["suite=ruler", "prompts=a.jsonl"], "prompts=, rows to answer, or suite=ruler, not both"),
        ([], "Give a value for: prompts. See --help."),
    ],
)
def test_wrong_sources_of_prompts_are_refused(folder, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        answer.main([*arguments, f"out={folder}/out.jsonl", f"target.name={folder}/target"])
