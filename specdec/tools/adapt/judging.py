"""Judging a head that is adapted: tau by replay in groups of answers, what training is likely to win, and the gate."""

import collections
from dataclasses import dataclass, replace

from specdec.heads.base import Drafter, Head
from specdec.measuring import replay
from specdec.measuring import report as figures
from specdec.measuring.report import PromptCounts
from specdec.text.messages import describe_arguments
from specdec.tools.adapt.answers import Answers, RecordedAnswer, count_tokens

MIN_CONVERSATIONS = 8  # conversations, below which no head and no group of answers is judged
CHAIN_DEPTH = 4  # drafts of the chain that heads are judged with
MAX_ANSWERS = 100  # answers of new and of old rows that are judged, at most
ALL_ANSWERS = "all"  # the group of all answers
REPEAT_CONTEXT = 3  # tokens after which a repetition is looked for
MIN_REPEATS, MIN_GAP = 0.08, 0.2  # share of repeated tokens, and gap, from either of which training is likely to pay
MEASURED_GAINS = (
    "On 12,000 tokens shipped/mtp won 10 % where these were 9 % and +24 %, and nothing where they were 6 % and +10 % "
    "(results/48-what-adapting-wins.md)."
)
HEADING = "## Adapted to traffic"


def sample_answers(answers: Answers, length: int, num_answers: int | None = None) -> Answers:
    """At most `most` (None: JUDGED) of the answers, spread over the list. length: tokens of an answer with its prompt; long answers are cut later"""
    fitting = [answer for answer in answers if len(answer.prompt) + 2 <= length]
    num_answers = num_answers or MAX_ANSWERS
    step = max(1.0, len(fitting) / num_answers)
    return [fitting[int(place * step)] for place in range(min(num_answers, len(fitting)))]


def score_answers(drafter: Head, answers: Answers, *, length: int, label: str) -> list[PromptCounts]:
    """What tau of each answer is made of, by replay at the temperature that it was written at.

    length: tokens of an answer with its prompt, beyond which it is cut; what: is shown
    """
    assert isinstance(drafter, Drafter)
    texts = [replace(answer, answer=answer.answer[: length - len(answer.prompt)]) for answer in answers]
    return replay.count_replays(replay.replay_texts(drafter, texts, depth=CHAIN_DEPTH, label=label))


@dataclass(frozen=True)
class TauChange:
    """tau of answers before and after training, with 95 % intervals over conversations. None: not trained yet"""

    conversations: int
    answers: int
    tokens: int
    before: float
    before_ci: list[float]
    after: float | None = None
    after_ci: list[float] | None = None
    change: float | None = None
    change_ci: list[float] | None = None  # paired

    @classmethod
    def compare(
        cls, answers: Answers, counts_before: list[PromptCounts], counts_after: list[PromptCounts] | None = None
    ) -> "TauChange | None":
        """before, after: of each answer. None without answers."""
        if not answers:
            return None
        sums_before = _sum_by_conversation(answers, counts_before)
        sizes = len(sums_before), len(answers), count_tokens(answers)
        change_so_far = cls(
            *sizes, figures.compute_tau(sums_before), figures.bootstrap_interval(sums_before, figures.compute_tau, 0)
        )
        if counts_after is None:
            return change_so_far
        sums_after = _sum_by_conversation(answers, counts_after)
        change, interval = figures.measure_tau_difference(sums_after, sums_before)
        tau_after: dict = {
            "after": figures.compute_tau(sums_after),
            "after_ci": figures.bootstrap_interval(sums_after, figures.compute_tau, 0),
        }
        return replace(change_so_far, **tau_after, change=change, change_ci=interval)

    @property
    def cells(self) -> list[str]:
        """Of a table: conversations, tau before, tau after, change."""
        parts = [(self.before, self.before_ci, "", 2), (self.after, self.after_ci, "", 2)]
        parts.append((self.change, self.change_ci, "+", 3))
        spans = [
            f"{tau:{sign}.{n}f} ({ci[0]:{sign}.{n}f} .. {ci[1]:{sign}.{n}f})" if tau is not None and ci else ""
            for tau, ci, sign, n in parts
        ]
        return [str(self.conversations), *spans]


def _sum_by_conversation(answers: Answers, counts: list[PromptCounts]) -> list[PromptCounts]:
    """Answers of one conversation are alike, so intervals are over conversations."""
    sums: dict[str, list[float]] = {}
    for answer, count in zip(answers, counts, strict=True):
        total = sums.setdefault(answer.conversation, [0.0, 0.0])
        total[0] += count.num_rounds
        total[1] += count.num_emitted
    return [PromptCounts(*total) for total in sums.values()]


# Groups of answers

Groups = dict[str, TauChange]


def find_groups(answers: Answers) -> dict[str, list[int]]:
    """Places of all answers, and of those of each category, temperature and dictionary of template arguments.

    What has fewer than ENOUGH conversations is pooled as `other`. A kind of group that all answers share is left out.
    """
    groups = {ALL_ANSWERS: list(range(len(answers)))}
    for kind in ("category", "temperature", "arguments"):
        places = collections.defaultdict(list)
        for place, answer in enumerate(answers):
            places[name_group(answer, kind)].append(place)
        if len(places) == 1:
            continue
        for name, indices in sorted(places.items()):
            few = len({answers[place].conversation for place in indices}) < MIN_CONVERSATIONS
            groups.setdefault(f"other {kind}" if few else name, []).extend(indices)
    return groups


def name_group(answer: RecordedAnswer, kind: str) -> str:
    """The group of an answer among those of one kind: category, temperature or arguments."""
    if kind == "arguments":
        return describe_arguments(answer.arguments)
    return f"temperature {answer.temperature:g}" if kind == "temperature" else f"category {answer.category}"


def compare_groups(
    answers: Answers, counts_before: list[PromptCounts], counts_after: list[PromptCounts] | None = None
) -> Groups:
    """before, after: of each answer. -> tau of each group, ALL first; {} without answers"""
    pick = lambda items, places: [items[place] for place in places]
    changes = {
        name: TauChange.compare(
            pick(answers, places), pick(counts_before, places), counts_after and pick(counts_after, places)
        )
        for name, places in find_groups(answers).items()
    }
    return {name: change for name, change in changes.items() if change}


def make_groups_table(groups_by_kind: dict[str, Groups]) -> str:
    """Markdown with aligned cells. judged: groups of new and old answers"""
    rows = [["answers", "conversations", "tau before", "tau after", "change"]]
    rows += [
        [f"{kind}: {name}", *change.cells] for kind, groups in groups_by_kind.items() for name, change in groups.items()
    ]
    rows = [row if any(each[3] for each in rows[1:]) else row[:3] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in rows)


def make_card(document: dict) -> str:
    """The section of a model card on an adaptation: tau before and after, and what it was made of. document: adaptation.json"""
    groups_by_kind = {
        kind: {name: TauChange(**each) for name, each in groups.items()} for kind, groups in document["groups"].items()
    }
    training, source = document["training"], document["source"]
    facts = {
        "adapted from": source["source"],
        "its files, SHA-256": ", ".join(f"{name} {digest}" for name, digest in source["sha256"].items()),
        "target": f"{source['target']}, fingerprint {source['target_fingerprint']}",
        "trained on": f"{training['new_tokens']:,} tokens of new answers, beside {training['old_tokens']:,} of old ones",
        "step": f"{training['step']} of {training['steps']}, chosen by answers that are not in this table",
    }
    paragraphs = [
        HEADING,
        f"tau: tokens emitted per target pass of a round, replayed along held-out answers with a chain of {CHAIN_DEPTH}, and 95 % intervals "
        "over conversations. New answers are those of the traffic, old ones of rows that the head was trained on before.",
        make_groups_table(groups_by_kind),
        "\n".join(["| | |\n|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]),
        " ".join(document["reasons"]),
    ]
    return "\n\n".join(paragraphs) + "\n"


# What training is likely to win


def predict_gain(new: Groups, old: Groups, heldout: Answers, training: Answers) -> dict:
    """Whether training on traffic is likely to pay. -> gap, repeats, likely, and a sentence with what was measured

    judged: the new answers of the groups; training: those that would be trained on. Gap: by how much tau of old answers at the same
    temperatures is higher. Repeats: `count_repeats`. The rule is from few measurements (results/48-what-adapting-wins.md).
    """
    repeats = count_repeats(heldout, training)
    reason = f"{repeats:.0%} of the tokens follow from other answers of this traffic"
    gap = None
    if old:
        taus = [(old.get(f"temperature {each.temperature:g}") or old[ALL_ANSWERS]).before for each in heldout]
        rounds = sum(len(each.answer) / tau for each, tau in zip(heldout, taus))
        old_tau, new_tau = count_tokens(heldout) / rounds, new[ALL_ANSWERS].before
        gap = old_tau / new_tau - 1
        reason += f"; tau is {new_tau:.2f} here, and {old_tau:.2f} on old answers at the same temperatures ({gap:+.0%})"
    likely = repeats >= MIN_REPEATS or (gap or 0) >= MIN_GAP
    verdict = f"Training is likely to {'pay' if likely else 'win little'}"
    return {"gap": gap, "repeats": repeats, "likely": likely, "said": f"{verdict}: {reason}. {MEASURED_GAINS}"}


def count_repeats(heldout: Answers, training: Answers) -> float:
    """The share of the judged tokens that answers to train on have after the same RUN tokens, where these came last."""
    follows: dict[tuple[int, ...], int] = {}
    pairs = lambda answer: (
        (tuple(tokens[place - REPEAT_CONTEXT : place]), tokens[place])
        for tokens in [answer.prompt + answer.answer]
        for place in range(max(REPEAT_CONTEXT, len(answer.prompt)), len(tokens))
    )
    for answer in training:
        follows.update(pairs(answer))
    hits = [follows.get(run) == token for answer in heldout for run, token in pairs(answer)]
    return sum(hits) / max(1, len(hits))


# The gate


def decide_acceptance(new: TauChange, old: TauChange | None, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken: there are ENOUGH new conversations, tau of their answers rises, its whole interval
    above 0, and that of old answers falls by no more than a share `tolerance`.

    -> the decision, with every reason against it, or else the reason for it
    """
    assert new.change is not None and new.change_ci is not None
    low, high = new.change_ci
    rise = f"tau of the new answers changes by {new.change:+.3f} ({low:+.3f} .. {high:+.3f})"
    objections = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if new.conversations < MIN_CONVERSATIONS:  # whose interval says little
        objections.append(
            f"{new.conversations} held-out conversations are too few to judge a head by: {MIN_CONVERSATIONS} are needed."
        )
    if old and old.after is not None and (fall := 1 - old.after / old.before) > tolerance:
        objections.append(
            f"tau of old answers falls by {fall:.1%}, from {old.before:.2f} to {old.after:.2f}: more than {tolerance:.0%} "
            f"(tolerance={tolerance:g})."
        )
    old_result = f"old answers fall by no more than {tolerance:.0%}"
    return not objections, objections or [
        f"{rise}, and {old_result if old else 'there are no old answers, so what it forgot is not known'}."
    ]
