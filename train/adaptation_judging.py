"""Judging a head along recorded answers by replay, and what follows: is training worth it, is the new head taken?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.heads.base import Drafter
from specdec.measuring import figures
from specdec.measuring.figures import PromptCounts
from train import validate
from train.adaptation_rows import Answer

ALL = "all"
ENOUGH = 8  # conversations, below which neither a slice is judged nor a category of it
FEWER = 2  # times the tolerance of all old answers: what a category of them may fall
LEAST_GAIN = 0.02  # expected share of tau that makes training worth its minutes
Table = dict[str, dict[str, Any]]  # by part: `all`, `category NAME`, `tag NAME`, `temperature T`


@dataclass(frozen=True)
class Limits:
    """How much is judged. depth: of the chain; num: answers of a slice; length: tokens of an answer with its prompt"""

    depth: int
    num: int
    length: int


def chosen(answers: list[Answer], limits: Limits) -> list[Answer]:
    """Those that are judged, spread over the list. Too long prompts are left out; long answers are cut later."""
    fit = [answer for answer in answers if len(answer.prompt) + 2 <= limits.length]
    step = max(1.0, len(fit) / limits.num)
    return [fit[int(place * step)] for place in range(min(limits.num, len(fit)))]


def judge(drafter: Drafter, answers: Sequence[Answer], limits: Limits, *, what: str) -> list[PromptCounts]:
    """What tau is made of, of each answer, by replay at the temperature that it was written at. what: is shown"""
    texts = [
        validate.Written(each.prompt, each.answer[: limits.length - len(each.prompt)], each.temperature)
        for each in answers
    ]
    return validate.count_replays(validate.replay_texts(drafter, texts, depth=limits.depth, what=what))


def table(
    answers: Sequence[Answer],
    before: list[PromptCounts],
    after: list[PromptCounts] | None = None,
    *,
    trained: Sequence[Answer],
) -> Table:
    """tau of all answers, each category, tag and temperature, before and after, with 95 % intervals over conversations.

    trained: answers that the head is trained on, whose conversations are counted
    """
    parts, known = _parts(answers), _parts(trained)
    found = {}
    for name in sorted(parts, key=lambda name: (name != ALL, name)):
        conversations = {trained[number].conversation for number in known.get(name, [])}
        found[name] = _part(answers, before, after, parts[name]) | {"trained": len(conversations)}
    return found


def distinct(parts: Table) -> Table:
    """Without categories, tags and temperatures that all answers have."""
    return {name: part for name, part in parts.items() if name == ALL or part["answers"] < parts[ALL]["answers"]}


def _parts(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """Numbers of the answers of each part."""
    parts: dict[str, list[int]] = {ALL: list(range(len(answers)))}
    for number, answer in enumerate(answers):
        temperature = f"temperature {answer.temperature:g}"
        for name in (f"category {answer.category}", *(f"tag {tag}" for tag in answer.tags), temperature):
            parts.setdefault(name, []).append(number)
    return parts


def _part(
    answers: Sequence[Answer], before: list[PromptCounts], after: list[PromptCounts] | None, numbers: list[int]
) -> dict[str, Any]:
    """Of the answers with these numbers."""
    then, now = (_by_conversation(answers, counts, numbers) for counts in (before, after or before))
    found: dict[str, Any] = {
        "conversations": len(then),
        "answers": len(numbers),
        "tokens": sum(len(answers[number].answer) for number in numbers),
        "before": figures.tau(then),
        "before_ci": figures.interval(then, figures.tau, 0),
    }
    if after is not None:
        change, span = figures.tau_difference(now, then)
        found |= {"after": figures.tau(now), "after_ci": figures.interval(now, figures.tau, 0)}
        found |= {"change": change, "change_ci": span}
    return found


def _by_conversation(answers: Sequence[Answer], counts: list[PromptCounts], numbers: list[int]) -> list[PromptCounts]:
    """Answers of one conversation are alike, so intervals are over conversations."""
    sums: dict[str, list[float]] = {}
    for number in numbers:
        total = sums.setdefault(answers[number].conversation, [0.0, 0.0])
        total[0] += counts[number].num_rounds
        total[1] += counts[number].num_emitted
    return [PromptCounts(*total) for total in sums.values()]


def expected_tau(new: Sequence[Answer], old: Sequence[Answer], before: list[PromptCounts]) -> tuple[float, list[str]]:
    """tau of the new answers if the head drafted each as well as the old ones of its category that were written at its temperature.

    before: of the old answers, of which there must be some. For a category that has none at this temperature all of the category
    count; for one that has none at all, all at this temperature; else all.
    -> it, and what of the new answers has no old ones like it
    """
    sums: dict[tuple[str | None, float | None], list[PromptCounts]] = {}
    for answer, counts in zip(old, before, strict=True):
        for key in _kinds(answer):
            sums.setdefault(key, []).append(counts)
    taus = {key: figures.tau(counts) for key, counts in sums.items()}
    rounds = sum(len(each.answer) / next(taus[key] for key in _kinds(each) if key in taus) for each in new)
    unlike = {
        f"category {each.category}" + (f" at temperature {each.temperature:g}" if (each.category, None) in taus else "")
        for each in new
        if _kinds(each)[0] not in taus
    }
    return sum(len(each.answer) for each in new) / rounds, sorted(unlike)


def _kinds(answer: Answer) -> list[tuple[str | None, float | None]]:
    """The kinds of answers that it may be compared with, the most similar one first: category and temperature; None: any"""
    category, temperature = answer.category, answer.temperature
    return [(category, temperature), (category, None), (None, temperature), (None, None)]


def worth(new: Table, expected: tuple[float, list[str]] | None, *, tokens: int, min_tokens: int) -> tuple[bool, str]:
    """Whether training is worth it before anything is known of the new head, and why.

    expected: see `expected_tau`; None: there are no old answers. tokens: of the new answers that can be trained on
    """
    tau, num = new[ALL]["before"], new[ALL]["conversations"]
    if tokens < min_tokens:
        return False, f"{tokens:,} new tokens to train on are fewer than min_tokens={min_tokens:,}."
    if num < ENOUGH:
        return False, f"{num} held-out conversations are too few to judge a head by: {ENOUGH} are needed."
    if expected is None:
        return True, f"There are {tokens:,} new tokens, and no old answers to compare tau {tau:.2f} with."
    old, unlike = expected
    gain = old / tau - 1
    same = f"there is no {' and no '.join(unlike)} among them" if unlike else "of the same categories and temperatures"
    said = f"tau is {tau:.2f} on the new answers, and {old:.2f} on old ones ({same}; {gain:+.1%})"
    if gain >= LEAST_GAIN:
        return True, f"{said}: training on {tokens:,} new tokens may win up to that."
    if unlike:
        return True, f"{said}, which says little about what is new."
    return False, f"{said}: there is less than {LEAST_GAIN:.0%} to win."


def gate(new: Table, old: Table, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken: there are ENOUGH new conversations, the tau of their answers rises, its whole interval
    above 0, and nothing is forgotten (`forgotten`).

    -> the decision, with every reason against it, or else the reason for it
    """
    change, (low, high) = new[ALL]["change"], new[ALL]["change_ci"]
    rise = f"tau of the new answers changes by {change:+.3f} ({low:+.3f} .. {high:+.3f})"
    against = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if (num := new[ALL]["conversations"]) < ENOUGH:  # whose interval says little
        against.append(f"{num} held-out conversations are too few to judge a head by: {ENOUGH} are needed.")
    against += forgotten(old, tolerance)
    kept = (
        f"old answers fall by no more than {tolerance:.0%}, and no category of them by more than {FEWER * tolerance:.0%}"
        if old
        else "there are no old answers, so what it forgot is not known"
    )
    return not against, against or [f"{rise}, and {kept}."]


def forgotten(old: Table, tolerance: float) -> list[str]:
    """What fell too far: tau of all old answers by more than a share `tolerance`, that of a category with ENOUGH conversations by
    more than FEWER times as much.

    A category is measured on a part of the conversations. In two adaptations of seven categories with 24 each, the standard errors of their
    changes were 0.8 to 2.1 %: if all of them fall by 1.5 %, one falls by more than 3 % for about every second head.
    """
    found = []
    for name, part in old.items():
        fall = 1 - part["after"] / part["before"]
        if name != ALL and not (name.startswith("category ") and part["conversations"] >= ENOUGH):
            continue
        most = tolerance if name == ALL else FEWER * tolerance
        if fall > most:
            found.append(
                f"tau of old answers ({name}) falls by {fall:.1%}, from {part['before']:.2f} to {part['after']:.2f}: "
                f"more than {most:.0%} (tolerance={tolerance:g}{'' if name == ALL else f', {FEWER} times that for a category'})."
            )
    return found
