"""Tests of numbers in sentences."""

import pytest

from specdec.core.wording import format_count


@pytest.mark.parametrize(
    ("num", "noun", "text"),
    [
        (1, "prompt", "1 prompt"),
        (0, "prompt", "0 prompts"),
        (1200, "later turn", "1,200 later turns"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
    ],
)
def test_a_number_has_the_form_of_its_noun(num, noun, text):
    assert format_count(num, noun) == text
