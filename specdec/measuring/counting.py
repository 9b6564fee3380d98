"""Acceptance length as publications count it.

An answer of N tokens took R rounds, which accepted a_1 .. a_R drafts: N = 1 + sum(a_i + 1). Its first token comes from
the prompt's pass. Publications differ in numerator, denominator, and in the unit of their mean. All of it follows from
a_1 .. a_R, except drafts that were accepted behind the end of an answer: these are never counted here (at most one
round of an answer).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specdec.measuring.measure import PromptResult

First = Literal["out", "token", "round"]  # keys of FIRSTS
Mean = Literal["rounds", "answers", "questions"]  # keys of MEANS
End = Literal["none", "alone", "with others"]  # a token that ends an answer: missing, alone in its round, or not
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
    """The numbers of one answer from which all acceptance lengths follow."""

    answer: str  # id of the prompt
    question: str  # id of the question
    accepted: int  # accepted drafts of all rounds
    rounds: int
    end: End = "none"

    @classmethod
    def from_result(cls, result: PromptResult, stop: Container[int]) -> "AnswerCounts":
        """The counts of a drafted answer. stop: ids of tokens that end an answer"""
        prompt, accepted = result.prompt, result.drafted.accepted[0]
        has_end = bool(accepted) and result.drafted.tokens[0][-1] in stop
        end = classify_end(has_end, has_end and not accepted[-1])
        return cls(prompt.id, prompt.question_id, sum(accepted), len(accepted), end)


def classify_end(has_end: bool, is_alone: bool) -> End:
    """The kind of an answer's end. has_end: a token ended it; is_alone: the round of this token emitted nothing else"""
    if not has_end:
        return "none"
    return "alone" if is_alone else "with others"


@dataclass(frozen=True)
class Counting:
    """One way to count acceptance length, as the YAML of a protocol describes it."""

    first: First = "out"  # treatment of an answer's first token
    bonus: bool = True  # the target's own token of a round counts
    mean: Mean = "rounds"  # unit of the mean
    behind_end: bool = False  # the publication counts drafts behind the end of an answer; only named here, not counted
    end: bool = True  # a token that ends an answer counts; otherwise a round with this token alone does not count

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
        """The acceptance length; nan without a round. Answers without a round do not enter a mean over answers."""
        groups: dict[str, list[AnswerCounts]] = defaultdict(list)
        for answer in counts:
            group = {"rounds": "", "answers": answer.answer, "questions": answer.question}[self.mean]
            groups[group].append(answer)
        lengths = [self._divide(answers) for answers in groups.values()]
        known_lengths = [length for length in lengths if not math.isnan(length)]
        return statistics.fmean(known_lengths) if known_lengths else math.nan

    def _divide(self, answers: Sequence[AnswerCounts]) -> float:
        """Counted tokens over counted rounds of all answers; nan without a round."""
        counts = [self._count(answer) for answer in answers]
        num_rounds = sum(rounds for _, rounds in counts)
        return sum(tokens for tokens, _ in counts) / num_rounds if num_rounds else math.nan

    def _count(self, answer: AnswerCounts) -> tuple[int, int]:
        """The counted tokens and the counted rounds of an answer."""
        rounds = answer.rounds
        tokens = answer.accepted + (rounds if self.bonus else 0)
        if not self.end and rounds and answer.end != "none":
            tokens, rounds = tokens - 1, rounds - (answer.end == "alone")
        return tokens + (self.first != "out"), rounds + (self.first == "round")


SPECDEC = Counting()
# The counters of engines, and the numerator of an acceptance rate
ENGINES = {"vLLM": Counting(behind_end=True), "SGLang": Counting(first="token"), "drafts alone": Counting(bonus=False)}


def join_equal(countings: Mapping[str, Counting]) -> dict[str, Counting]:
    """The countings, with one entry for all that give the same number, under their joined names."""
    names: dict[Counting, list[str]] = {}
    for name, counting in countings.items():
        names.setdefault(replace(counting, behind_end=False), []).append(name)
    return {", ".join(equal_names): counting for counting, equal_names in names.items()}
