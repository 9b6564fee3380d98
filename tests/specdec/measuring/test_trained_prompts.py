"""Held-out prompts that were trained on: copies, what of a source is trained on, and the record in a run's folder."""

from pathlib import Path

import numpy
import pytest

from specdec.measuring import trained_prompts
from specdec.text import reading
from tests.support.commands import write_rows
from tests.support.runs import load_packs
from tests.support.targets import small_tokenizer
from train.data.encoding import Encoding

USER, MORE, OTHER = "How far is the moon?", "And the sun?", "What is a drum?"


def talk(*texts: str, system: str | None = None, **fields) -> dict:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + messages, **fields}


def digest(*rows: dict) -> numpy.ndarray:
    return numpy.unique(numpy.concatenate([numpy.array(trained_prompts.digest_row(row), numpy.int64) for row in rows]))


def hold_out(tmp_path: Path, *rows: dict) -> list[dict]:
    """Rows as prompts are read, named h0, h1, .."""
    write_rows(tmp_path / "held.jsonl", [{"id": f"h{number}", **row} for number, row in enumerate(rows)])
    return reading.load_prompts(str(tmp_path / "held.jsonl"))


TRAINED = [talk(USER, "Far.", MORE, "Farther."), {"prompt": "Complete this", "completion": "text"}]


@pytest.mark.parametrize(
    ("row", "is_copy"),
    [
        (talk(USER, "Another answer."), True),
        ({"prompt": " how far  is the MOON?\n"}, True),
        (talk(USER, "Be brief.", OTHER, system="Help."), True),  # its first prompt was trained on
        (talk(MORE), True),  # a question that came later in a conversation
        (talk(OTHER, USER, MORE), False),  # what follows an answer is another prompt
        ({"prompt": "Complete this"}, True),
        ({"prompt": "Far."}, False),  # an answer
        ({"prompt": OTHER}, False),
    ],
)
def test_a_held_out_prompt_that_is_asked_in_training_is_a_copy(row, is_copy, tmp_path):
    rows = hold_out(tmp_path, {"prompt": OTHER}, row)
    assert trained_prompts.find_trained_rows(rows, digest(*TRAINED)) == ["h1"] * is_copy


def test_rows_of_token_ids_and_published_texts_are_compared_too():
    row = {"tokens": [5, 6, 7, 8], "prompt_tokens": 2, "id": "a"}
    unusable = [{"text": "What follows nothing asks nothing."}, {"messages": 5}, {"messages": [5]}, {"prompt": [5]}]
    digests = digest(row, *unusable)
    assert len(digests) == 1
    assert trained_prompts.find_trained_rows([row, {**row, "prompt_tokens": 3, "id": "b"}], digests) == ["a"]
    question = {"id": "c", "messages": [{"role": "user", "content": f"Solve: {USER}"}], "original": USER}
    assert trained_prompts.find_trained_rows([question], digest(talk(USER, "Far."))) == ["c"]


def test_only_rows_that_are_trained_on_count(tmp_path):
    rows = [talk(f"Question {number}?", "Yes.", temperature=number % 2) for number in range(6)]
    sources = {str(tmp_path / "a.jsonl"): rows[:4], str(tmp_path / "b.jsonl"): rows[4:]}
    for source, rows_of_source in sources.items():
        write_rows(Path(source), rows_of_source)
    encoding = Encoding(small_tokenizer(), tmp_path / "cache")
    packs = load_packs(list(sources), encoding, length=64, packed=True, hold_out=2)
    prompts = hold_out(tmp_path, *({"prompt": f"question {number}?"} for number in range(7)))
    trained = trained_prompts.find_trained_rows(prompts, packs.prompt_digests)
    assert trained == ["h1", "h3", "h4", "h5"]  # h0 and h2 are held out
    twice = load_packs({next(iter(sources)): 2.0}, encoding, length=64, packed=False)
    assert numpy.array_equal(twice.prompt_digests, digest(*rows[:4]))


def test_a_runs_folder_says_what_was_trained_on(tmp_path):
    run, digests = tmp_path / "run", digest(talk(USER, "Far."))
    step = run / "step_000001"
    step.mkdir(parents=True)
    assert trained_prompts.read_digests(step) is None
    trained_prompts.write_digests(run, trained_prompts.join_digests(digests, None))
    for folder in (step, run):
        assert numpy.array_equal(trained_prompts.read_digests(folder), digests)
    assert trained_prompts.read_digests(run / "other") is None
    (run / "best").write_text("step_000001\n")
    further = digest(talk(OTHER, "Round."))
    assert set(trained_prompts.join_digests(further, str(run))) == {*digests, *further}
    (run / trained_prompts.FILE).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is missing, truncated or damaged"):
        trained_prompts.read_digests(run)
