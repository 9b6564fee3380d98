"""Computes tau and survival by depth of a chain along answers that the target wrote, without decoding.

    python scripts/replay.py checkpoint=checkpoints/shipped/mtp answers=my_answers.jsonl hold_out=60
    python scripts/replay.py checkpoint=checkpoints/a,checkpoints/b answers=my_answers.jsonl    is the second one better?

The method is in docs/methods.md, section 2. By default it uses the rows that `data.hold_out` keeps from training.
"""

from helpers import loading
from helpers.options import option, options, run, split

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specdec.measuring import figures
from specdec.measuring.figures import PromptCounts
from train import progress, validate
from train.data import reading
from train.data import rows as data
from train.validate import Written


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
    split: str | None = option(None, loading.SPLIT)
    length: int = option(1024, "longer rows are cut to this many tokens")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: ReplayDecodeOptions = field(default_factory=ReplayDecodeOptions)


def main() -> None:
    chosen = options(Replay, __doc__)
    console = progress.Results()
    for folder in split(chosen.checkpoint):
        if loading.adapts(folder):
            raise ValueError(f"{folder} adapts its target, which did not write these answers: use scripts/evaluate.py.")
    heads = loading.load_runs(chosen.checkpoint, chosen.target)
    tokenizer = loading.shared_target(heads, chosen.target).tokenizer
    texts, categories = answers_of(chosen, tokenizer)
    temperature, num_tokens = chosen.decode.temperature, sum(len(text.answer) - 1 for text in texts)
    first: list[PromptCounts] = []
    for number, head in enumerate(heads):
        judged = validate.replay_texts(head.drafter, texts, depth=chosen.decode.depth, what="replay")
        counts = validate.count_replays(judged)
        survival = sum(accepted for _, accepted in judged) / sum(rounds for rounds, _ in judged)
        low, high = figures.interval(counts, figures.tau, 0)
        console.print(
            f"{head.folder}: replayed tau {figures.tau(counts):.3f} ({low:.2f} .. {high:.2f}), chain of {len(survival)}, temperature "
            f"{temperature:g}, {len(texts)} answers, {num_tokens} tokens, survival by depth "
            + " ".join(f"{value:.3f}" for value in survival.tolist())
        )
        if len(names := sorted(set(categories))) > 1:
            of = {name: [count for each, count in zip(categories, counts) if each == name] for name in names}
            console.print("  " + ", ".join(f"{name} {figures.tau(part):.2f}" for name, part in of.items()))
        if number == 0:
            first = counts
        else:
            change, (low, high) = figures.tau_difference(counts, first)
            console.print(f"  {change:+.3f} ({low:+.3f} .. {high:+.3f}) against {heads[0].folder}, the same answers")


def answers_of(chosen: Replay, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Written], list[str]]:
    """The answers to judge, cut, and their categories. Raises ValueError if there is none."""
    texts, categories = [], []
    for row in read_answers(chosen):
        with reading.at(chosen.answers):
            encoded = data.encode(tokenizer, row)
        start, stop = data.last_answer(encoded)
        answer = encoded.tokens[start : min(stop, chosen.length)]
        if len(answer) >= 2:
            texts.append(Written(encoded.tokens[:start], answer, chosen.decode.temperature))
            categories.append(encoded.category)
    if not texts:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    return texts, categories


def read_answers(chosen: Replay) -> list[dict]:
    """The conversations to replay, all written at one temperature."""
    rows = reading.load_conversations(chosen.answers, split=chosen.split)
    if chosen.hold_out is not None:
        rows, _ = reading.hold_out(rows, chosen.hold_out)
    temperature = chosen.decode.temperature
    rows = [row for row in rows if row.get("temperature", temperature) == temperature]
    if not rows:
        raise ValueError(f"{chosen.answers} has no row at decode.temperature={temperature:g}.")
    return rows


if __name__ == "__main__":
    run(main)
