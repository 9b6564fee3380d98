"""Tests of rows that hold the token ids that the target read and wrote: training uses these ids as they are."""

import copy

import pytest

from tests.small_server import STOP
from tests.support import small_tokenizer, write_rows
from train.data import encoding
from train.data import rows as data


def kept_row(**changes) -> dict:
    tokenizer = small_tokenizer()
    digest, _ = data.vocabulary(tokenizer, len(tokenizer))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the the"}]
    prompt = data.encode_prompt(tokenizer, messages[:1])
    letters = [
        token for letter in "the the" for token in tokenizer(letter)["input_ids"]
    ]  # not as the tokenizer cuts it
    row = {"id": "x", "category": "c", "messages": messages, "tokens": [*prompt, *letters, STOP],
           "prompt_tokens": len(prompt), "tokenizer": digest}  # fmt: skip
    return row | changes


def test_kept_ids_reach_the_packs(tmp_path):
    tokenizer, row = small_tokenizer(), kept_row()
    plain = data.encode(tokenizer, {**row, "tokens": None})
    assert plain.tokens != row["tokens"] and tokenizer.decode(row["tokens"]) == tokenizer.decode(plain.tokens).rstrip(
        "\n"
    )
    write_rows(tmp_path / "rows.jsonl", [row, {key: row[key] for key in ("id", "messages")}])
    settings = encoding.Encoding(tokenizer, tmp_path / "cache")
    packs = encoding.load_packs(str(tmp_path / "rows.jsonl"), settings, length=64, packed=False)
    found = {tuple(each.tokens): each.mask for number in range(2) for each in packs[number]}
    num_new = len(row["tokens"]) - row["prompt_tokens"]
    assert found[tuple(row["tokens"])] == [False] * row["prompt_tokens"] + [True] * num_new
    assert tuple(plain.tokens) in found


def test_ids_of_another_tokenizer_are_not_used():
    tokenizer = small_tokenizer()
    for row in (kept_row(tokenizer="0" * 16), kept_row(tokenizer=None)):
        with pytest.warns(UserWarning, match="Row x and perhaps others have token ids of another tokenizer"):
            assert data.encode(tokenizer, row) == data.encode(tokenizer, {**row, "tokens": None})
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["something"])
    with pytest.warns(UserWarning, match="another tokenizer"):
        data.encode(longer, kept_row())


def test_fields_of_the_same_name_that_others_write_are_left_alone():
    row = kept_row(prompt_tokens=None, tokens=17, thinking="I think")
    assert data.encode(small_tokenizer(), row).tokens


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokens": [1, 2, 10**6]}, "ids from 0 to"),
        ({"tokens": [1, 2, -1]}, "ids from 0 to"),
        ({"tokens": [1, 2, True]}, "ids from 0 to"),
        ({"tokens": "abc"}, "ids from 0 to"),
        ({"prompt_tokens": 0}, "prompt_tokens=0 must be at least 1"),
        ({"prompt_tokens": 10**6}, "below the number of tokens"),
        ({"prompt_tokens": 1.5}, "prompt_tokens=1.5"),
        ({"prompt_tokens": [3]}, r"prompt_tokens=\[3\]"),
    ],
)
def test_ids_that_cannot_be_right_are_refused(changes, what):
    with pytest.raises(ValueError, match=f"Row x: .*{what}"):
        data.encode(small_tokenizer(), kept_row(**changes))
