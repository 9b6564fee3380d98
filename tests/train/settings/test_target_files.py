"""Files of conf/target beside docs/targets.md: options of chat templates."""

import re

import pytest

from tests.support.commands import ROOT
from tests.target_table import PAGE
from tests.train.composing import compose_options

FILES = {path.stem: path for path in sorted((ROOT / "conf/target").glob("*.yaml")) if path.stem != "base"}


def write(value) -> str:
    return str(value).lower() if isinstance(value, bool) else value


@pytest.mark.parametrize("name", FILES)
def test_the_page_has_the_template_options_of_a_target(name):
    target = compose_options(f"target={name}").target
    table = PAGE.read_text().split("<!-- options -->")[1].split("<!-- end -->")[0]
    rows = [re.split(r" *\| *", row.strip("| ")) for row in table.splitlines() if row.startswith("| ")][1:]
    listed = [options for _, names, options, _ in rows if name in names.split(", ")]
    if target.template_options is None:
        assert not listed
        return
    (listed_options,) = listed
    expected = {key: ", ".join(map(write, values)) for key, values in target.template_options.items()}
    assert expected == dict(option.split(": ") for option in re.sub(r" \(.*?\)", "", listed_options).split("; "))
