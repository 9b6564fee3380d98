"""Computes tau and survival by depth of a chain along answers that the target wrote, without decoding.

    python scripts/replay.py checkpoint=checkpoints/shipped/eagle answers=my_answers.jsonl hold_out=60

The method is in docs/methods.md, section 2. By default it uses the rows that `data.hold_out` keeps from training.
"""

from dataclasses import dataclass, field

from helpers import loading
from helpers.options import option, options, run
from specdec import replay
from train import data, progress, reading


@dataclass(frozen=True)
class ReplayDecodeOptions:
    temperature: float = option(0.0, "temperature at which the answers were written and drafts are drawn")
    depth: int = option(4, "drafts of the chain")


@dataclass(frozen=True, kw_only=True)
class Replay:
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    answers: str = field(metadata={"help": "conversations whose last message the target wrote"})
    hold_out: int | None = option(
        60, "use this many rows, the first at temperature 0; null: all rows at decode.temperature"
    )
    length: int = option(1024, "longer rows are cut to this many tokens")
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)
    decode: ReplayDecodeOptions = field(default_factory=ReplayDecodeOptions)


def main() -> None:
    chosen = options(Replay, __doc__)
    console = progress.Results()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    if loaded.target.adapted:
        raise ValueError(
            f"{loaded.folder} adapts its target, which did not write these answers: use scripts/evaluate.py."
        )
    rows = [data.encode(loaded.tokenizer, row) for row in read_answers(chosen)]
    temperature = chosen.decode.temperature
    depth = min(chosen.decode.depth, loaded.drafter.depth or chosen.decode.depth)
    num_emitted, num_rounds, num_accepted = 0, 0.0, 0.0
    for row in progress.track(rows, "replay", unit="answers"):
        start, stop = data.last_answer(row)
        tokens = row.tokens[: min(stop, chosen.length)]
        if len(tokens) - start < 2:
            continue
        chances = replay.acceptance(
            loaded.drafter, tokens[:start], tokens[start:], depth=depth, temperature=temperature
        )
        rounds, accepted = replay.rounds(chances)
        num_emitted += len(tokens) - start - 1
        num_rounds, num_accepted = num_rounds + rounds, num_accepted + accepted
    if not num_rounds:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    survival = " ".join(f"{value:.3f}" for value in (num_accepted / num_rounds).tolist())
    console.print(
        f"{loaded.folder}: replayed tau {num_emitted / num_rounds:.3f} (chain of {depth}, temperature {temperature:g}, "
        f"{len(rows)} answers, {num_emitted} tokens), survival by depth {survival}"
    )


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
