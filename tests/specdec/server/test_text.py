"""Tests of answers that are written piece by piece: together the pieces are the decoded answer."""

import functools
import random

import pytest

from specdec.server.text import StreamedText
from tests.support import small_tokenizer

TEXTS = ["", "The sky is blue.", "é, 日本語 and 😀 in one", "a\n\n b  c", "x" * 30, "stop st sto STOP"]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def decode(tokenizer):
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


def pieces(streamed: StreamedText, tokens: list[int]) -> list[str]:
    return [*(streamed.add(token) for token in tokens), streamed.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer, decode, text):
    found = pieces(StreamedText(decode), tokenizer(text)["input_ids"])
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_pieces_of_any_tokens_are_what_the_whole_answer_decodes_to(tokenizer, decode):
    """Bytes that are no characters, and special tokens, too."""
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(40))]
        assert "".join(pieces(StreamedText(decode), tokens)).replace("\ufffd", "") == decode(tokens).replace(
            "\ufffd", ""
        )


def test_text_ends_before_the_stop_string_that_is_complete_first(tokenizer, decode):
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(draw.choices("abé ", k=draw.randrange(1, 30)))
        stops = ["".join(draw.choices("abé ", k=draw.randrange(1, 4))) for _ in range(draw.randrange(3))]
        streamed = StreamedText(decode, stops)
        found, shown = pieces(streamed, tokenizer(text)["input_ids"]), ""
        ends = [num for num in range(1, 1 + len(text)) if any(stop in text[:num] for stop in stops)]
        complete = text[: ends[0]] if ends else ""  # up to where a stop string is complete
        end = min((complete.find(stop) for stop in stops if stop in complete), default=len(text))
        assert "".join(found) == text[:end]
        assert streamed.stopped == (end < len(text))
        for piece in found[:-1]:  # nothing is given out that would have to be taken back
            shown += piece
            assert text[:end].startswith(shown)


def test_what_cannot_begin_a_stop_string_is_given_out_at_once(tokenizer, decode):
    streamed = StreamedText(decode, ["END"])
    assert [streamed.add(token) for token in tokenizer("xEyEN")["input_ids"]][-1] == ""
    assert streamed.end() == "EN"
