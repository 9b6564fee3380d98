"""Tests of scripts/show_data.py: what cannot be shown is named with its file."""

import pytest

from scripts import show_data
from tests.support.commands import write_rows
from tests.support.targets import small_tokenizer


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("row=0", r"rows\.jsonl:1: Row r7 has no assistant turn, only user"),
        ("row=5", r"rows\.jsonl has no row 5\. Choose"),
    ],
)
def test_a_row_that_cannot_be_shown_is_named_with_its_file(run_script, tmp_path, argument, message):
    small_tokenizer().save_pretrained(tmp_path / "target")
    write_rows(tmp_path / "rows.jsonl", [{"id": "r7", "messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ValueError, match=message):
        run_script(show_data, f"data={tmp_path}/rows.jsonl", f"target.name={tmp_path}/target", argument)
