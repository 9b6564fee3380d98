"""The code's shape: simple functions, no folded expressions, names that say what they hold."""

import pytest

from tests.shape import COMPLEXITY_LIMIT, ROOTS, find_faults, read_sources

HIGHEST_COMPLEXITY = 15  # of a function in EXCEPTIONS
EXCEPTIONS: dict[str, int] = {}  # complexity of the functions above the limit; entries may only go


@pytest.fixture(scope="module", params=ROOTS)
def faults_of_files(request):
    return [find_faults(path, source) for path, source in read_sources(paths=(request.param,))]


def test_every_rule_finds_its_fault():
    source = """
def prune(found, rows):
    first = 0 if rows else 1 if found else 2
    pairs = [a for row in rows for a in row if a]
    sums = [[b for b in row] for row in rows]
    kept = {c for row in rows if (c := row)}
    low, high, middle = min(rows), max(rows), sorted(rows)
    self.done = first
    return kept
"""
    sentences = "\n".join(find_faults("a.py", source).sentences)
    for sentence in (
        "a.py:3: a conditional",
        "a.py:4: a comprehension with two",
        "a.py:5: a comprehension inside",
        "a.py:6: a walrus",
        "a.py:7: three calls",
        "a.py:2: the parameter 'found'",
        "a.py:8: the attribute 'done'",
    ):
        assert sentence in sentences
    assert "'kept'" not in sentences  # a short life


def test_complexity_counts_what_is_folded():
    branches = "if rows and columns:\n        return [row for row in rows if row]\n    return 1 if rows else 2"
    folded = f"def count(rows, columns):\n    {branches}"
    assert find_faults("a.py", folded).complexities == {}
    long = folded + "".join(f"\n    if rows == {number} or not columns:\n        rows = 1" for number in range(4))
    assert find_faults("a.py", long).complexities == {"a.py:count": 14}


def test_files_follow_the_rules(faults_of_files):
    assert [sentence for faults in faults_of_files for sentence in faults.sentences] == []


def test_functions_are_simple(faults_of_files):
    """Except for EXCEPTIONS, whose complexities are as they say, and no higher than the highest."""
    complexities = {name: value for faults in faults_of_files for name, value in faults.complexities.items()}
    paths = {faults.path for faults in faults_of_files}
    expected = {name: value for name, value in EXCEPTIONS.items() if name.split(":")[0] in paths}
    assert complexities == expected, f"split functions above {COMPLEXITY_LIMIT}; strike those that no longer are"
    assert all(value <= HIGHEST_COMPLEXITY for value in expected.values())


def test_exceptions_are_few():
    assert len(EXCEPTIONS) <= 20
