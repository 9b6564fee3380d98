"""Tests of answers that are written piece by piece: together the pieces are the text before the first stop string."""

import random

import pytest

from specdec.core.answer_text import StoppedText, TextDecoder, TextStream
from tests.support.targets import byte_fallback_tokenizer, small_tokenizer


@pytest.fixture(scope="module", params=[small_tokenizer, byte_fallback_tokenizer])
def tokenizer(request):
    return request.param()


def begin(tokenizer, stop_strings: list[str]) -> StoppedText:
    return StoppedText(TextStream(TextDecoder.from_tokenizer(tokenizer)), stop_strings)


def pieces(text: StoppedText, tokens: list[int]) -> list[str]:
    return [*(text.add(token) for token in tokens), text.end()]


def test_text_ends_before_the_stop_string_that_is_complete_first(tokenizer):
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(draw.choices("abé天 ", k=draw.randrange(1, 30)))
        stops = ["".join(draw.choices("abé天 ", k=draw.randrange(1, 4))) for _ in range(draw.randrange(3))]
        streamed = begin(tokenizer, stops)
        text_pieces, shown = pieces(streamed, tokenizer(text)["input_ids"]), ""
        ends = [num for num in range(1, 1 + len(text)) if any(stop in text[:num] for stop in stops)]
        complete = text[: ends[0]] if ends else ""  # up to where a stop string is complete
        end = min((complete.find(stop) for stop in stops if stop in complete), default=len(text))
        assert "".join(text_pieces) == text[:end]
        assert streamed.stopped == (end < len(text))
        for piece in text_pieces[:-1]:  # nothing is given out that would have to be taken back
            shown += piece
            assert text[:end].startswith(shown)


def test_what_cannot_begin_a_stop_string_is_given_out_at_once(tokenizer):
    streamed = begin(tokenizer, ["END"])
    assert [streamed.add(token) for token in tokenizer("xEyEN")["input_ids"]][-1] == ""
    assert streamed.end() == "EN"
