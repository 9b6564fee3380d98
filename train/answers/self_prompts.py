"""Prompts that the target writes itself (Magpie, 2406.08464): it continues its chat template at the start of the user's turn.

    given    <user>
    written        Why is the sky blue?<end>

What it writes is filtered: texts that are unfinished, empty, short or long, that repeat themselves, or that are nearly the same
as an earlier one are dropped. Repetition is the share of token 4-grams that occurred before in the text. Near duplicates are
found by MinHash over character 5-grams (Broder, 1997), with the bands of locality-sensitive hashing: texts that share any of
BANDS groups of ROWS hashes count as the same, which is likely from a Jaccard similarity of about 0.75 on.
"""

import collections
import itertools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
from transformers import PreTrainedTokenizerBase

from train.answers.answering import Job, Writer, Written
from train.answers.resumable import Resumable
from train.data import chat_template
from train.data import rows as data

PLACE = "What the user says"  # stands for the user's turn while the template is cut
SHORTEST, LONGEST = 10, 8_000  # characters
REPEATED = 0.3  # share of 4-grams
SHINGLE, BANDS, ROWS = 5, 16, 8
PRIME = 2**31 - 1
FEWEST, ENOUGH = 0.02, 500  # share of texts that must be kept, judged from so many texts on


@dataclass(frozen=True)
class Opening:
    """Where the user's turn begins and what ends it."""

    tokens: list[int]
    ends: frozenset[int]


def find_opening(tokenizer: PreTrainedTokenizerBase, stop: set[int]) -> Opening:
    """stop: the tokens that end an answer. Raises ValueError for a chat template that cannot be cut there."""
    text = chat_template.render(tokenizer, [{"role": "user", "content": PLACE}], add_generation_prompt=True)
    before, found, after = text.partition(PLACE)
    special = data.find_special(tokenizer)
    behind = tokenizer(after, add_special_tokens=False)["input_ids"]
    end = next((token for token in behind if token in special), None)
    if not found or PLACE in after or end is None:
        raise ValueError(
            f"prompts=self: the chat template of {tokenizer.name_or_path} has no special token behind the user's turn, or it "
            "changes the turn, so the target cannot write one. Give prompts=FILE."
        )
    return Opening(tokenizer(before, add_special_tokens=False)["input_ids"], frozenset({end, *stop}))


class Filter:
    """Judges texts one after the other; `counts` are the reasons so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.counts: collections.Counter[str] = collections.Counter()
        self.known: set[tuple[int, int]] = set()  # (band, hash)
        random = numpy.random.default_rng(0)
        self.factors, self.offsets = random.integers(1, PRIME, size=(2, BANDS * ROWS, 1), dtype=numpy.uint64)

    def judge(self, text: str, finish: str) -> str | None:
        """-> why the text is dropped; None if it is kept"""
        reason = self._find_reason(text, finish)
        self.counts[reason or "kept"] += 1
        return reason

    def recall(self, text: str, reason: str | None) -> None:
        """Counts a text that was judged before."""
        self.counts[reason or "kept"] += 1
        if not reason:
            self.known |= self._bands(text)

    def _find_reason(self, text: str, finish: str) -> str | None:
        if finish != "stop":
            return "unfinished"
        if not text:
            return "empty"
        if not SHORTEST <= len(text) <= LONGEST:
            return "too short" if len(text) < SHORTEST else "too long"
        if self._repetition(text) > REPEATED:
            return "repeats itself"
        bands = self._bands(text)
        if bands & self.known:
            return "nearly the same as another"
        self.known |= bands
        return None

    def _repetition(self, text: str) -> float:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    def _bands(self, text: str) -> set[tuple[int, int]]:
        normal = " ".join(re.findall(r"\w+", text.lower())) or text
        shingles = {normal[start : start + SHINGLE] for start in range(max(1, len(normal) - SHINGLE + 1))}
        hashes = numpy.array([zlib.crc32(each.encode()) % PRIME for each in shingles], dtype=numpy.uint64)
        least = ((self.factors * hashes + self.offsets) % PRIME).min(axis=1).astype(numpy.uint32)  # [BANDS * ROWS]
        rows = least.reshape(BANDS, ROWS)
        return {(band, zlib.crc32(row.tobytes())) for band, row in enumerate(rows)}


def write(
    tokenizer: PreTrainedTokenizerBase,
    writer: Writer,
    opening: Opening,
    out: Resumable,
    *,
    num: int,
    temperature: float,
    block: int,
) -> Iterator[tuple[Filter, int]]:
    """Writes rows {id, category, prompt} to `out` until `num` of them are kept; the others have the reason in `dropped`.

    block: texts that the writer gets at once. Yields the filter and the number of new tokens after every group of texts.
    Raises ValueError if hardly a text is kept.
    """
    judge = Filter(tokenizer)
    for row in out.rows:
        judge.recall(row["prompt"], row.get("dropped"))
    finished = {row["id"] for row in out.rows}
    first = len(finished) // block * block
    for start in itertools.count(first, block):
        if judge.counts["kept"] >= num:
            return
        jobs = [Job(name(n), "self", temperature, [], opening.tokens) for n in range(start, start + block)]
        for group in writer.write(jobs, finished):
            out.append(*rows_of(group, judge, num))
            yield judge, sum(written.num_tokens for _, written in group)
            if judge.counts["kept"] >= num:
                return
            check(judge)


def name(number: int) -> str:
    return f"self-{number:07d}"


def rows_of(group: list[tuple[Job, Written]], judge: Filter, num: int) -> Iterator[dict]:
    for job, written in group:
        if judge.counts["kept"] >= num:
            return
        text = written.text.strip()
        row = {"id": job.id, "category": job.category, "prompt": text}
        reason = judge.judge(text, written.finish)
        yield row | ({"dropped": reason} if reason else {})


def check(judge: Filter) -> None:
    total = judge.counts.total()
    if total >= ENOUGH and judge.counts["kept"] < FEWEST * total:
        raise ValueError(
            f"Only {judge.counts['kept']} of {total} prompts that the target wrote are good ({summary(judge.counts)}). Raise "
            "self_prompts.temperature= or self_prompts.max_tokens=, or give prompts=FILE: this target cannot write prompts of its own."
        )


def summary(counts: collections.Counter[str]) -> str:
    """Why texts were dropped."""
    return ", ".join(f"{num} {reason}" for reason, num in counts.most_common() if reason != "kept") or "none dropped"
