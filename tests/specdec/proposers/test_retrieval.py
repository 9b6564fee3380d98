"""Retrieval: the datastore against slow searches, the tree against a slow trie, decoding, and refusals."""

import collections
import functools
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from specdec.proposers import datastore as store
from specdec.proposers import text as retrieval
from specdec.proposers.text import Retrieval, grow_trie
from specdec.target.model import load_tokenizer
from specdec.text import token_text
from tests.support.decoding import greedy, prompts_of, random_tokens

load_once = functools.cache(load_tokenizer)
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
SETTINGS = {"max": 8, "min": 1, "samples": 64, "num": 12, "depth": 4}


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(retrieval, "load_tokenizer", lambda name, **_: TOKENIZER)


def make(folder: Path, texts: list[list[int]], *, length: int = 8, fingerprint: str | None = None) -> str:
    tokens = store.join_texts(texts)
    document = {
        "tokenizer_fingerprint": fingerprint or token_text.digest_vocabulary(TOKENIZER),
        "num_texts": len(texts),
        "length": length,
    }
    store.write_datastore(folder, tokens, store.sort_places(tokens, length), document)
    return str(folder)


def random_texts(seed: int, *, num_texts: int = 12, vocab_size: int = 4) -> list[list[int]]:
    choose = random.Random(seed)
    return [choose.choices(range(vocab_size), k=choose.randint(1, 30)) for _ in range(num_texts)]


# The datastore


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_places_are_sorted_by_the_tokens_before_them(length):
    for texts in [[], [[0]], [[0, 0, 1]], *(random_texts(seed, vocab_size=3) for seed in range(5))]:
        tokens = store.join_texts(texts)
        padded = [store.SEPARATOR] * length + tokens.tolist()

        def backwards(position, padded=padded):
            return [padded[position + length - back] for back in range(length)]

        assert store.sort_places(tokens, length).tolist() == sorted(range(len(tokens)), key=backwards)


def ends(tokens: list[int], suffix: list[int]) -> list[int]:
    """Places where the suffix ends, by comparing at every place."""
    return [i for i in range(len(tokens)) if i + 1 >= len(suffix) and tokens[i + 1 - len(suffix) : i + 1] == suffix]


def test_matches_equal_those_of_a_naive_search(tmp_path):
    lengths = set()
    for seed in range(6):
        texts = random_texts(seed)
        datastore = store.read_datastore(
            Path(make(tmp_path / str(seed), texts)), token_text.digest_vocabulary(TOKENIZER)
        )
        tokens = list(datastore.tokens)
        queries = [random_tokens(number, 10, 5) for number in range(30)] + [text[:9] for text in texts]
        for text in queries:
            for longest in (3, 8):
                matches = datastore.matches(text, longest)
                lengths.add(len(matches))
                for num in range(1, min(longest, len(text)) + 1):
                    expected = ends(tokens, text[-num:])
                    entries = matches[num - 1] if num <= len(matches) else []
                    assert sorted(datastore.suffixes[entry] for entry in entries) == expected
    assert lengths == set(range(9))


def test_places_are_those_of_the_longest_matches(tmp_path, target):
    texts = random_texts(0, num_texts=40)
    for samples in (1, 5, 40, 1000):
        settings = {**SETTINGS, "samples": samples, "min": 2}
        proposer = Retrieval(target, datastore=make(tmp_path / str(samples), texts), **settings)
        tokens = list(proposer.store.tokens)
        for query in range(20):
            text = random_tokens(query, 10, 4)
            remaining = proposer.find_places(text)
            for num in range(8, 1, -1):
                here = ends(tokens, text[-num:])
                taken, remaining = remaining[: len(here)], remaining[len(here) :]
                assert set(taken) <= set(here) and len(set(taken)) == len(taken)
                assert len(taken) == len(here) or not remaining
            assert not remaining
            total = sum(len(ends(tokens, text[-num:])) for num in range(2, 9))
            assert len(proposer.find_places(text)) == min(samples, total)


def test_samples_lie_at_equal_distances(tmp_path, target):
    folder = make(tmp_path / "d", [[1, token] for token in range(2, 12)])
    proposer = Retrieval(target, datastore=folder, **{**SETTINGS, "samples": 5})
    assert proposer.find_places([1]) == [1, 7, 13, 19, 25]  # of 1, 4, 7, ..


# The tree


def paths(draft) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    node_paths: list[tuple[int, ...]] = [()]
    for token, parent in draft:
        node_paths.append((*node_paths[parent], token))
    return node_paths[1:]


@pytest.mark.parametrize(("num", "depth"), [(1, 3), (7, 1), (10, 4), (1000, 5)])
def test_the_tree_holds_the_most_frequent_paths_of_the_trie(num, depth):
    for seed in range(10):
        texts = random_texts(seed)
        tokens = store.join_texts(texts)
        choose = random.Random(seed)
        places = choose.choices([i for i, token in enumerate(tokens) if token != store.SEPARATOR], k=25)
        counts: collections.Counter = collections.Counter()
        for place in places:
            path: tuple[int, ...] = ()
            for token in tokens[place + 1 : place + 1 + depth].tolist():
                if token == store.SEPARATOR:
                    break
                path = (*path, token)
                counts[path] += 1
        drafted = paths(grow_trie(memoryview(tokens), places, num=num, depth=depth))
        assert len(set(drafted)) == len(drafted) == min(num, len(counts))
        best = sorted((-count, len(path)) for path, count in counts.items())
        assert sorted((-counts[path], len(path)) for path in drafted) == best[:num]


def test_matches_and_drafts_do_not_cross_the_end_of_a_text(tmp_path, target):
    proposer = Retrieval(target, datastore=make(tmp_path / "d", [[1, 2], [3, 4, 5], [3]]), **SETTINGS)
    proposer.texts = [[1, 2], [2, 3], [1], [5], [6], [0, 3, 4]]
    drafts = [paths(proposer.draft(row)) for row in range(6)]
    assert drafts == [[], [(4,), (4, 5)], [(2,)], [], [], [(5,)]]
    assert [len(proposer.store.matches(text, 8)) for text in proposer.texts] == [2, 1, 1, 1, 0, 2]


# Decoding


def decode(target, proposer):
    return greedy(target, proposer).generate(prompts_of(target), 21)


def test_answers_that_are_in_the_datastore_are_accepted(tmp_path, target):
    prompts, plain = prompts_of(target), decode(target, None).tokens
    folder = make(tmp_path / "own", [prompt + answer for prompt, answer in zip(prompts, plain)])
    generation = decode(target, Retrieval(target, datastore=folder, **SETTINGS))
    assert generation.tokens == plain
    assert generation.accepted == [[4] * 4] * 5  # tau = 5, the maximum at depth 4
    other = Retrieval(target, datastore=make(tmp_path / "other", random_texts(1, vocab_size=61)), **SETTINGS)
    assert max(max(row) for row in decode(target, other).accepted) < 2


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max": 2, "min": 3}, "^max=2 must be at least min=3"),
        ({"max": 9}, "^max=9 exceeds the 8 tokens .* by 9 tokens"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(tmp_path, target, change, message):
    with pytest.raises(ValueError, match=message):
        Retrieval(target, datastore=make(tmp_path / "d", [[1]]), **{**SETTINGS, **change})


def test_damaged_and_foreign_datastores_are_refused(tmp_path, target):
    def refused(folder, message):
        with pytest.raises(ValueError, match=message):
            Retrieval(target, datastore=str(folder), **SETTINGS)

    refused(
        tmp_path / "nowhere",
        "does not exist. A datastore is a folder that specdec.proposers.datastore.write_datastore made",
    )
    refused(tmp_path, "is not a datastore")
    refused(make(tmp_path / "empty", []), "is empty: it holds no tokens. A datastore is a folder that")
    refused(
        make(tmp_path / "foreign", [[1]], fingerprint="f00"), "made with another tokenizer .*f00.* Make one with the"
    )
    whole = make(tmp_path / "whole", [[1, 2, 3]])
    for name in ("tokens.npy", "suffixes.npy", "datastore.json"):
        for number, keep in enumerate((-4, 40, 4, 0)):
            damaged = Path(shutil.copytree(whole, tmp_path / f"{name}{number}"))
            (damaged / name).write_bytes((damaged / name).read_bytes()[:keep])
            refused(damaged, "damaged or not whole .* make it again")
    for name, array in [("short", numpy.zeros(4, "int32")), ("wide", numpy.zeros(5, "int64"))]:
        damaged = Path(shutil.copytree(whole, tmp_path / name))
        numpy.save(damaged / "suffixes.npy", array)
        refused(damaged, "is damaged: datastore.json counts 3 tokens in 1 texts, .* Take another copy")
    missing = Path(shutil.copytree(whole, tmp_path / "missing"))
    (missing / "tokens.npy").unlink()
    refused(missing, "damaged or not whole")
    (tmp_path / "a_file").write_text("text")
    refused(tmp_path / "a_file", "is not a datastore")


def test_a_datastore_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(path, array):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    with pytest.raises(ValueError, match=r"could not be written .*No space left.*Free some disk space"):
        make(tmp_path / "d", [[1]])
    assert not list(tmp_path.iterdir())
