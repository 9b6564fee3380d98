"""Numbers in sentences."""

import pytest

from specdec.core.wording import format_count


@pytest.mark.parametrize(
    ("num", "noun", "text"),
    [
        (0, "prompt", "0 prompts"),
        (1, "prompt", "1 prompt"),
        (2, "held-out prompt", "2 held-out prompts"),
        (1200, "later turn", "1,200 later turns"),
    ],
)
def test_one_has_no_plural(num, noun, text):
    assert format_count(num, noun) == text
