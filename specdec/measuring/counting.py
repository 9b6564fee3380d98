"""Acceptance length as publications count it.

An answer of N tokens took R rounds, which accepted a_1 .. a_R drafts: N = 1 + sum(a_i + 1), its first token comes from the prompt's
pass. Publications differ in what stands over the line, what stands below it, and in what they take the mean of. All of it follows from
a_1 .. a_R, but for drafts that were accepted behind the end of an answer: they are never counted here (at most one round of an answer).
"""

import math
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specdec.measuring.measure import PromptResult

First = Literal["out", "token", "round"]
Mean = Literal["rounds", "answers", "questions"]
End = Literal["none", "alone", "with others"]
FIRSTS = {
    "out": "the answer's first token is not counted",
    "token": "the answer's first token is counted, the prompt's pass is not",
    "round": "the prompt's pass is a round of one token",
}
MEANS = {
    "rounds": "all rounds pooled",
    "answers": "mean over answers",
    "questions": "mean over questions, their turns joined",
}


@dataclass(frozen=True)
class AnswerCounts:
    """accepted: drafts in all rounds; end: whether a token that ends the answer was emitted, and with others of its round or alone"""

    answer: str
    question: str
    accepted: int
    rounds: int
    end: End = "none"

    @classmethod
    def from_result(cls, result: PromptResult, stop: Container[int] = ()) -> "AnswerCounts":
        """stop: tokens that end an answer"""
        prompt, accepted = result.prompt, result.drafted.accepted[0]
        ended = bool(accepted) and result.drafted.tokens[0][-1] in stop
        return cls(
            prompt.id, prompt.question_id, sum(accepted), len(accepted), classify_end(ended, ended and not accepted[-1])
        )


def classify_end(has_end: bool, is_alone: bool) -> End:
    """ended: whether a token ended the answer; alone: whether its round emitted nothing else"""
    return "none" if not has_end else "alone" if is_alone else "with others"


@dataclass(frozen=True)
class Counting:
    """first: what becomes of an answer's first token; bonus: whether the target's own token of a round counts; mean: of what

    behind_end: whether the publication counts drafts that were accepted behind the end of an answer, which is only said here
    end: whether a token that ends an answer counts; without it, a round that emits nothing else is none
    """

    first: First = "out"
    bonus: bool = True
    mean: Mean = "rounds"
    behind_end: bool = False
    end: bool = True

    def __post_init__(self):
        if self.first not in FIRSTS or self.mean not in MEANS:
            raise ValueError(
                f"first={self.first}, mean={self.mean}: give one of {', '.join(FIRSTS)}, and one of {', '.join(MEANS)}."
            )

    def __str__(self) -> str:
        bonus = "the target's own token of a round is counted" if self.bonus else "only accepted drafts are counted"
        omission = (
            "; the publication also counts drafts behind the end, which are left out here" if self.behind_end else ""
        )
        end = "" if self.end else "; a token that ends an answer is not counted"
        return f"{MEANS[self.mean]}; {FIRSTS[self.first]}; {bonus}{end}{omission}"

    def compute_length(self, counts: Sequence[AnswerCounts]) -> float:
        """The acceptance length; nan without a round."""
        ratio = lambda answers: _divide_sums([self._count(answer) for answer in answers])
        if self.mean == "rounds":
            return ratio(counts)
        key = (lambda answer: answer.answer) if self.mean == "answers" else (lambda answer: answer.question)
        return _average_known([ratio(group) for group in _group_counts(counts, key)])

    def _count(self, answer: AnswerCounts) -> tuple[int, int]:
        """-> tokens that are counted, rounds"""
        rounds = answer.rounds
        tokens = answer.accepted + (rounds if self.bonus else 0)
        if not self.end and rounds and answer.end != "none":
            tokens, rounds = tokens - 1, rounds - (answer.end == "alone")
        return tokens + (self.first != "out"), rounds + (self.first == "round")


SPECDEC = Counting()
# As the counters of engines have it, and as an acceptance rate has it
ENGINES = {"vLLM": Counting(behind_end=True), "SGLang": Counting(first="token"), "drafts alone": Counting(bonus=False)}


def join_equal(countings: Mapping[str, Counting]) -> dict[str, Counting]:
    """The same with one entry for all that give the same number, under their names."""
    names: dict[Counting, list[str]] = {}
    for name, counting in countings.items():
        names.setdefault(replace(counting, behind_end=False), []).append(name)
    return {", ".join(equal_names): counting for counting, equal_names in names.items()}


def _divide_sums(counts: Sequence[tuple[int, int]]) -> float:
    tokens, rounds = (sum(column) for column in zip(*counts, (0, 0)))
    return tokens / rounds if rounds else math.nan


def _average_known(values: Sequence[float]) -> float:
    """Of those that are known: an answer of one token has no round."""
    known_values = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known_values) if known_values else math.nan


def _group_counts(counts: Sequence[AnswerCounts], key: Callable[[AnswerCounts], str]) -> list[list[AnswerCounts]]:
    groups: dict[str, list[AnswerCounts]] = {}
    for answer in counts:
        groups.setdefault(key(answer), []).append(answer)
    return list(groups.values())
