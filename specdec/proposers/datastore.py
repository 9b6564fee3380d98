"""A datastore: a memory-mapped folder of texts, sorted so that the places that follow given tokens are found quickly.

tokens.npy      int32 [T]  tokens of all texts, with a separator before the first text and after every text
suffixes.npy    int32 [T]  places of tokens.npy, sorted by the token there, then by the token before it, and so on
datastore.json  {tokenizer_fingerprint, num_tokens, num_texts, length, ...}; `length`: tokens compared in sorting

The places after given tokens form one range, and the range of a longer ending lies inside it:

    tokens     -1  a  b  c -1  b  b  c  d -1        ends with c: places 3, 7       with b c: 3, 7      with a b c: 3
    place       0  1  2  3  4  5  6  7  8  9        followed by: nothing, d
"""

import bisect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy

from specdec.core import files, untrusted

SEPARATOR = -1
ADVICE = "A datastore is a folder that specdec.proposers.datastore.write_datastore made"


@dataclass(frozen=True)
class Datastore:
    """Both memory-mapped arrays; an entry is read as an int."""

    tokens: memoryview  # [T]
    suffixes: memoryview  # [T]
    length: int  # number of tokens by which `suffixes` is sorted

    def matches(self, text: list[int], longest: int) -> list[range]:
        """The places where the last 1, 2, .. `longest` tokens of `text` occur, as ranges of `suffixes`.

        The list ends before the first length that occurs nowhere.
        """
        assert longest <= self.length
        entries, ranges = range(len(self.suffixes)), []
        for back in range(min(longest, len(text))):
            entries = self._narrow(entries, back, text[-1 - back])
            if not entries:
                break
            ranges.append(entries)
        return ranges

    def _narrow(self, entries: range, back: int, token: int) -> range:
        """The entries whose place has `token` as the token `back` places before it."""
        tokens = self.tokens

        def token_at(position: int) -> int:
            return tokens[position - back]  # the index is never negative: the first separator ends every match

        first = bisect.bisect_left(self.suffixes, token, entries.start, entries.stop, key=token_at)
        last = bisect.bisect_right(self.suffixes, token, first, entries.stop, key=token_at)
        return range(first, last)


def join_texts(texts: Iterable[list[int]]) -> numpy.ndarray:
    """[T] int32: token ids of texts, none empty, with separators. Raises ValueError for 2^31 tokens or more."""
    parts = [numpy.array([SEPARATOR], dtype=numpy.int32)]
    for text in texts:
        parts.append(numpy.array([*text, SEPARATOR], dtype=numpy.int32))
    joined = numpy.concatenate(parts)
    if len(joined) >= 2**31:
        raise ValueError(f"{len(joined)} tokens are more than a datastore can count (2^31): give less data.")
    return joined


def sort_places(tokens: numpy.ndarray, length: int, progress: Callable[[list], Iterable] = iter) -> numpy.ndarray:
    """Returns `suffixes` [T] of tokens [T]; ties keep the order of places. Needs about 40 bytes for each token.

    Prefix doubling (Manber and Myers, 1990): let the places be sorted by n tokens. Then sorting pairs of ranks, at a
    place and n places before it, sorts them by 2n tokens.
    """
    ranks = tokens.astype(numpy.int64) - SEPARATOR  # [T] from 0
    order = numpy.argsort(ranks, kind="stable")
    covered = [1]
    while covered[-1] < length:
        covered.append(min(2 * covered[-1], length))
    for before, after in progress(list(zip(covered, covered[1:]))):
        keys = ranks * (ranks.max() + 1)
        keys[after - before :] += ranks[: before - after]
        order = numpy.argsort(keys, kind="stable")
        keys = keys[order]
        ranks[order[0]] = 0
        ranks[order[1:]] = numpy.cumsum(keys[1:] != keys[:-1])
    return order.astype(numpy.int32)


def write_datastore(folder: Path, tokens: numpy.ndarray, suffixes: numpy.ndarray, document: dict) -> None:
    """Writes a datastore, whose folder appears whole or not at all. Raises ValueError if it cannot be written.

    document: tokenizer_fingerprint, num_texts, length, and any further entries
    """
    document = {**document, "num_tokens": len(tokens) - document["num_texts"] - 1}
    with files.replace_folder(folder) as partial:
        numpy.save(partial / "tokens.npy", tokens)
        numpy.save(partial / "suffixes.npy", suffixes)
        (partial / "datastore.json").write_text(json.dumps(document, indent=2) + "\n")


def read_datastore(folder: Path, tokenizer_fingerprint: str) -> Datastore:
    """Maps a datastore that was made with this tokenizer. Raises ValueError, with what to do, if it cannot be used."""
    if not folder.exists():
        raise ValueError(f"datastore={folder} does not exist. {ADVICE}.")
    if not (folder / "datastore.json").is_file():
        raise ValueError(f"datastore={folder} is not a datastore: it has no datastore.json. {ADVICE}.")
    try:
        document = untrusted.read_json(untrusted.find_inside(folder, "datastore.json"))
        made_with = document["tokenizer_fingerprint"]
        length, num_tokens, num_texts = (int(document[key]) for key in ("length", "num_tokens", "num_texts"))
        tokens, suffixes = (
            numpy.lib.format.open_memmap(
                untrusted.find_inside(folder, name), mode="r"
            )  # archives and pickles are refused
            for name in ("tokens.npy", "suffixes.npy")
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"datastore={folder} is damaged or not whole ({type(error).__name__}: {error}): take another copy "
            "of it, or make it again."
        ) from error
    for array in (tokens, suffixes):
        if array.shape != (num_tokens + num_texts + 1,) or array.dtype != numpy.int32:
            raise ValueError(
                f"datastore={folder} is damaged: datastore.json counts {num_tokens} tokens in {num_texts} "
                f"texts, but an array has shape {array.shape} and type {array.dtype}. Take another copy of "
                "it, or make it again."
            )
    if made_with != tokenizer_fingerprint:
        raise ValueError(
            f"datastore={folder} was made with another tokenizer (fingerprint {made_with}, the target's is "
            f"{tokenizer_fingerprint}), so its tokens mean other texts. Make one with the target's own tokenizer."
        )
    if not num_tokens:
        raise ValueError(f"datastore={folder} is empty: it holds no tokens. {ADVICE}.")
    return Datastore(tokens.data, suffixes.data, length)
