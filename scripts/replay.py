"""Computes tau and survival by depth of a chain along answers that the target wrote, without decoding.

    python scripts/replay.py checkpoint=checkpoints/shipped/eagle answers=my_answers.jsonl hold_out=60
    python scripts/replay.py checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl    is the second one better?

The method is in docs/methods.md, section 2. By default it uses the rows that `data.hold_out` keeps from training.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from helpers import loading
from helpers.options import option, options, run, split
from specdec import figures, replay
from specdec.drafter import Head
from specdec.figures import PromptCounts
from train import data, progress, reading
from train.data import Row


@dataclass(frozen=True)
class ReplayDecodeOptions:
    temperature: float = option(0.0, "temperature at which the answers were written and drafts are drawn")
    depth: int = option(4, "drafts of the chain, or as many as the head can make")


@dataclass(frozen=True, kw_only=True)
class Replay:
    checkpoint: str = field(metadata={"help": f"{loading.CHECKPOINTS}; the others are compared with the first"})
    answers: str = field(metadata={"help": "conversations whose last message the target wrote"})
    hold_out: int | None = option(
        60, "use this many rows, the first at temperature 0; null: all rows at decode.temperature"
    )
    length: int = option(1024, "longer rows are cut to this many tokens")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: ReplayDecodeOptions = field(default_factory=ReplayDecodeOptions)


@dataclass(frozen=True)
class Text:
    """The last answer of a conversation, cut, and all before it."""

    category: str
    prompt: list[int]
    answer: list[int]


def main() -> None:
    chosen = options(Replay, __doc__)
    console = progress.Results()
    for folder in split(chosen.checkpoint):
        if loading.adapts(folder):
            raise ValueError(f"{folder} adapts its target, which did not write these answers: use scripts/evaluate.py.")
    heads = loading.load_runs(chosen.checkpoint, chosen.target)
    tokenizer = loading.shared_target(heads, chosen.target).tokenizer
    texts = [text_of(data.encode(tokenizer, row), chosen.length) for row in read_answers(chosen)]
    texts = [text for text in texts if len(text.answer) >= 2]
    if not texts:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    temperature, num_tokens = chosen.decode.temperature, sum(len(text.answer) - 1 for text in texts)
    first: list[PromptCounts] = []
    for number, head in enumerate(heads):
        depth = min(chosen.decode.depth, head.drafter.depth or chosen.decode.depth)
        counts, survival = judge(head.drafter, texts, chosen, depth)
        low, high = figures.interval(counts, figures.tau, 0)
        console.print(
            f"{head.folder}: replayed tau {figures.tau(counts):.3f} ({low:.2f} .. {high:.2f}), chain of {depth}, temperature "
            f"{temperature:g}, {len(texts)} answers, {num_tokens} tokens, survival by depth "
            + " ".join(f"{value:.3f}" for value in survival.tolist())
        )
        categories = sorted({text.category for text in texts})
        if len(categories) > 1:
            of = {name: [count for text, count in zip(texts, counts) if text.category == name] for name in categories}
            console.print("  " + ", ".join(f"{name} {figures.tau(part):.2f}" for name, part in of.items()))
        if number == 0:
            first = counts
        else:
            change, (low, high) = figures.tau_difference(counts, first)
            console.print(f"  {change:+.3f} ({low:+.3f} .. {high:+.3f}) against {heads[0].folder}, the same answers")


def text_of(row: Row, length: int) -> Text:
    start, stop = data.last_answer(row)
    return Text(row.category, row.tokens[:start], row.tokens[start : min(stop, length)])


def judge(drafter: Head, texts: list[Text], chosen: Replay, depth: int) -> tuple[list[PromptCounts], Tensor]:
    """-> what tau of each answer is made of; survival, [depth]"""
    counts, num_accepted = [], torch.zeros(depth, dtype=torch.float64)
    for text in progress.track(texts, "replay", unit="answers"):
        temperature = chosen.decode.temperature
        chances = replay.acceptance(drafter, text.prompt, text.answer, depth=depth, temperature=temperature)
        rounds, accepted = replay.rounds(chances)
        counts.append(PromptCounts(rounds, len(text.answer) - 1))
        num_accepted += accepted
    return counts, num_accepted / sum(each.num_rounds for each in counts)


def read_answers(chosen: Replay) -> list[dict]:
    """The conversations to replay, all written at one temperature."""
    rows = reading.load_conversations(chosen.answers)
    if chosen.hold_out is not None:
        rows, _ = reading.hold_out(rows, chosen.hold_out)
    temperature = chosen.decode.temperature
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{chosen.answers} has no row at decode.temperature={temperature:g}.")
    return rows


if __name__ == "__main__":
    run(main)
