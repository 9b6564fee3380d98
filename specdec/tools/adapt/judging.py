"""Judging a head that is adapted: tau by replay in groups of answers, the likely gain of training, and the gate."""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from specdec.heads.base import Drafter, Head
from specdec.measuring import replay, report
from specdec.measuring.page import format_figure
from specdec.measuring.report import PromptCounts
from specdec.text.messages import describe_arguments
from specdec.tools.adapt.answers import Answers, RecordedAnswer, count_tokens

MIN_CONVERSATIONS = 8  # fewest conversations of a group, and of a decision: intervals over fewer say little
CHAIN_DEPTH = 4  # drafts of the chain that heads are judged with
MAX_ANSWERS = 100  # most answers of new and of old rows that heads are judged by
ALL_ANSWERS = "all"  # the group of all answers
REPEAT_CONTEXT = 3  # tokens before a token that repeats another answer
# Training is likely to pay from either of these on: share of repeated tokens, and relative gap of tau to old answers
MIN_REPEATS, MIN_GAP = 0.08, 0.2
MEASURED_GAINS = (
    "On 12,000 tokens shipped/mtp won 10 % where these were 9 % and +24 %, and nothing where they were 6 % and +10 % "
    "(results/48-what-adapting-wins.md)."
)
HEADING = "## Adapted to traffic"


def sample_answers(answers: Answers, length: int, num: int | None = None) -> Answers:
    """At most `num` of the answers, spread over the list; None: MAX_ANSWERS.

    length: bound of the tokens of a prompt and two tokens of its answer; longer answers are cut later
    """
    fitting = [answer for answer in answers if len(answer.prompt) + 2 <= length]
    num = num or MAX_ANSWERS
    stride = max(1.0, len(fitting) / num)
    return [fitting[int(index * stride)] for index in range(min(num, len(fitting)))]


def score_answers(drafter: Head, answers: Answers, *, length: int, label: str) -> list[PromptCounts]:
    """The rounds and emitted tokens of each answer, by replay at the temperature of the answer.

    length: tokens at which a prompt with its answer is cut; label: text of the progress bar
    """
    assert isinstance(drafter, Drafter)
    texts = [answer.cut(length) for answer in answers]
    return replay.count_replays(replay.replay_texts(drafter, texts, depth=CHAIN_DEPTH, label=label))


def merge_counts(keys: Sequence[str], counts: Sequence[PromptCounts]) -> list[PromptCounts]:
    """The sums of the counts with equal keys, in the order of the keys.

    Answers of one conversation are alike, so intervals are over these.
    """
    totals: dict[str, PromptCounts] = {}
    for key, count in zip(keys, counts, strict=True):
        total = totals.get(key, PromptCounts(0, 0))
        totals[key] = PromptCounts(total.num_rounds + count.num_rounds, total.num_emitted + count.num_emitted)
    return list(totals.values())


@dataclass(frozen=True)
class TauChange:
    """tau of answers before and after training, with 95 % intervals over conversations.

    answers, tokens: number of answers and of their tokens; after, change: None before training
    change_ci: paired interval
    """

    conversations: int
    answers: int
    tokens: int
    before: float
    before_ci: list[float]
    after: float | None = None
    after_ci: list[float] | None = None
    change: float | None = None
    change_ci: list[float] | None = None

    @classmethod
    def compare(
        cls, answers: Answers, counts_before: list[PromptCounts], counts_after: list[PromptCounts] | None = None
    ) -> "TauChange | None":
        """The change of tau over all answers; None without answers. counts: rounds and emitted tokens of each answer"""
        if not answers:
            return None
        names = [answer.conversation for answer in answers]
        before = merge_counts(names, counts_before)
        tau, interval = report.compute_tau(before), report.bootstrap_interval(before, report.compute_tau, 0)
        untrained = cls(len(before), len(answers), count_tokens(answers), tau, interval)
        if counts_after is None:
            return untrained
        after = merge_counts(names, counts_after)
        tau, interval = report.compute_tau(after), report.bootstrap_interval(after, report.compute_tau, 0)
        change, change_ci = report.measure_tau_difference(after, before)
        return replace(untrained, after=tau, after_ci=interval, change=change, change_ci=change_ci)

    @property
    def cells(self) -> list[str]:
        """Cells of a table: conversations, tau before, tau after, change."""
        before, after = format_figure(self.before, self.before_ci), format_figure(self.after, self.after_ci)
        return [str(self.conversations), before, after, format_figure(self.change, self.change_ci, digits=3, sign="+")]


# Groups of answers

Groups = dict[str, TauChange]


def find_groups(answers: Answers) -> dict[str, list[int]]:
    """Indices of all answers, and of those of each category, temperature and dictionary of template arguments.

    Groups of fewer than MIN_CONVERSATIONS conversations are pooled as `other`. A kind of group that all answers share
    is left out.
    """
    groups = {ALL_ANSWERS: list(range(len(answers)))}
    for kind in ("category", "temperature", "arguments"):
        indices_by_name = collections.defaultdict(list)
        for index, answer in enumerate(answers):
            indices_by_name[name_group(answer, kind)].append(index)
        if len(indices_by_name) == 1:
            continue
        for name, indices in sorted(indices_by_name.items()):
            is_small = len({answers[index].conversation for index in indices}) < MIN_CONVERSATIONS
            groups.setdefault(f"other {kind}" if is_small else name, []).extend(indices)
    return groups


def name_group(answer: RecordedAnswer, kind: str) -> str:
    """The group of an answer among those of one kind: category, temperature or arguments."""
    if kind == "arguments":
        return describe_arguments(answer.arguments)
    return f"temperature {answer.temperature:g}" if kind == "temperature" else f"category {answer.category}"


def compare_groups(
    answers: Answers, counts_before: list[PromptCounts], counts_after: list[PromptCounts] | None = None
) -> Groups:
    """tau of each group, ALL_ANSWERS first; {} without answers. counts: rounds and emitted tokens of each answer"""
    groups: Groups = {}
    for name, indices in find_groups(answers).items():
        group, before = [answers[index] for index in indices], [counts_before[index] for index in indices]
        after = counts_after and [counts_after[index] for index in indices]
        change = TauChange.compare(group, before, after)
        if change:
            groups[name] = change
    return groups


def list_changes(groups: Groups) -> dict[str, dict]:
    """The groups as JSON."""
    return {name: asdict(change) for name, change in groups.items()}


def make_groups_table(groups_by_kind: dict[str, Groups]) -> str:
    """A table in Markdown with aligned cells. groups_by_kind: groups of new and of old answers"""
    rows = [["answers", "conversations", "tau before", "tau after", "change"]]
    for kind, groups in groups_by_kind.items():
        rows += [[f"{kind}: {name}", *change.cells] for name, change in groups.items()]
    if not any(row[3] for row in rows[1:]):  # before training
        rows = [row[:3] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def make_card(document: dict) -> str:
    """The section of a model card on an adaptation: tau before and after, and its origin. document: adaptation.json"""
    groups_by_kind: dict[str, Groups] = {}
    for kind, groups in document["groups"].items():
        groups_by_kind[kind] = {name: TauChange(**change) for name, change in groups.items()}
    training, source = document["training"], document["source"]
    new_tokens, old_tokens = training["new_tokens"], training["old_tokens"]
    facts = {
        "adapted from": source["source"],
        "its files, SHA-256": ", ".join(f"{name} {digest}" for name, digest in source["sha256"].items()),
        "target": f"{source['target']}, fingerprint {source['target_fingerprint']}",
        "trained on": f"{new_tokens:,} tokens of new answers, beside {old_tokens:,} of old ones",
        "step": f"{training['step']} of {training['steps']}, chosen by answers that are not in this table",
    }
    paragraphs = [
        HEADING,
        f"tau: tokens emitted per target pass of a round, replayed along held-out answers "
        f"with a chain of {CHAIN_DEPTH}, "
        "and 95 % intervals over conversations. New answers are those of the traffic, old ones of rows that the head "
        "was trained on before.",
        make_groups_table(groups_by_kind),
        "\n".join(["| | |\n|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]),
        " ".join(document["reasons"]),
    ]
    return "\n\n".join(paragraphs) + "\n"


# What training is likely to win


def predict_gain(new: Groups, old: Groups, heldout: Answers, training: Answers) -> dict:
    """The prediction whether training on traffic pays: {gap, repeats, likely, said: a sentence with the figures}.

    heldout: new answers of the groups; training: answers that would be trained on
    gap: relative difference of tau of old answers at the same temperatures; repeats: as of `count_repeats`
    The rule is from few measurements (results/48-what-adapting-wins.md).
    """
    repeats = count_repeats(heldout, training)
    reason = f"{repeats:.0%} of the tokens follow from other answers of this traffic"
    gap = None
    if old:
        changes = [old.get(f"temperature {answer.temperature:g}") or old[ALL_ANSWERS] for answer in heldout]
        rounds = sum(len(answer.answer) / change.before for answer, change in zip(heldout, changes))
        old_tau, new_tau = count_tokens(heldout) / rounds, new[ALL_ANSWERS].before
        gap = old_tau / new_tau - 1
        reason += f"; tau is {new_tau:.2f} here, and {old_tau:.2f} on old answers at the same temperatures ({gap:+.0%})"
    likely = repeats >= MIN_REPEATS or (gap or 0) >= MIN_GAP
    verdict = f"Training is likely to {'pay' if likely else 'win little'}"
    return {"gap": gap, "repeats": repeats, "likely": likely, "said": f"{verdict}: {reason}. {MEASURED_GAINS}"}


def count_repeats(heldout: Answers, training: Answers) -> float:
    """The share of held-out tokens that follow the same REPEAT_CONTEXT tokens in the last training answer with them."""
    follows: dict[tuple[int, ...], int] = {}
    for answer in training:
        follows.update(list_continuations(answer))
    hits = [follows.get(run) == token for answer in heldout for run, token in list_continuations(answer)]
    return sum(hits) / max(1, len(hits))


def list_continuations(answer: RecordedAnswer) -> Iterator[tuple[tuple[int, ...], int]]:
    """(REPEAT_CONTEXT tokens, next token) at each token of an answer."""
    tokens = answer.prompt + answer.answer
    for index in range(max(REPEAT_CONTEXT, len(answer.prompt)), len(tokens)):
        yield tuple(tokens[index - REPEAT_CONTEXT : index]), tokens[index]


# The gate


def decide_acceptance(new: TauChange, old: TauChange | None, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken, with every reason against it, or else the reason for it.

    It is taken if there are MIN_CONVERSATIONS new conversations or more, tau of their answers rises with its whole
    interval above 0, and tau of old answers falls by no more than the share `tolerance`.
    """
    assert new.change is not None and new.change_ci is not None
    low, high = new.change_ci
    rise = f"tau of the new answers changes by {new.change:+.3f} ({low:+.3f} .. {high:+.3f})"
    objections = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if new.conversations < MIN_CONVERSATIONS:
        objections.append(
            f"A head is judged by {MIN_CONVERSATIONS} held-out conversations or more, and there is only "
            f"{new.conversations}."
        )
    if old and old.after is not None and 1 - old.after / old.before > tolerance:
        objections.append(
            f"tau of old answers falls by {1 - old.after / old.before:.1%}, from {old.before:.2f} to {old.after:.2f}: "
            f"more than {tolerance:.0%} (tolerance={tolerance:g})."
        )
    old_result = f"old answers fall by no more than {tolerance:.0%}"
    return not objections, objections or [
        f"{rise}, and {old_result if old else 'there are no old answers, so what it forgot is not known'}."
    ]
