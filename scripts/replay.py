"""python scripts/replay.py checkpoint=DIR answers=FILE [hold_out=60 temperature=0 depth=4]

What a chain would be worth along answers that the target wrote, without decoding: tau and survival by depth, replayed
round by round (methods: `specdec/replay.py`). By default over the rows that `data.hold_out` keeps from training.
"""

from dataclasses import dataclass, field

import rich.console
from rich.progress import track

from helpers import loading
from helpers.options import options, run
from specdec import replay
from train import data, reading


@dataclass(frozen=True)
class Replay:
    checkpoint: str = field(metadata={"help": "a step's folder, or a run's folder for its best step"})
    answers: str = field(metadata={"help": "conversations whose last message the target wrote"})
    hold_out: int | None = field(
        default=60,
        metadata={"help": "the first rows at temperature 0 (data.hold_out); null: all rows at `temperature`"},
    )
    temperature: float = field(
        default=0.0, metadata={"help": "at which these answers were written, and drafts are made"}
    )
    depth: int = field(default=4, metadata={"help": "drafts a round"})
    length: int = field(default=1024, metadata={"help": "longer rows are cut"})
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def main() -> None:
    chosen = options(Replay, __doc__)
    console = rich.console.Console()
    loaded = loading.load(chosen.checkpoint, chosen.target)
    if loaded.target.adapted:
        raise ValueError(
            f"{loaded.folder} adapts its target, which did not write these answers: use scripts/evaluate.py."
        )
    conversations = reading.load_conversations(chosen.answers)
    if chosen.hold_out is not None:
        conversations, _ = reading.hold_out(conversations, chosen.hold_out)
    conversations = [row for row in conversations if row.get("temperature", chosen.temperature) == chosen.temperature]
    if not conversations:
        raise ValueError(f"{chosen.answers} has no row at temperature={chosen.temperature:g}.")
    depth = min(chosen.depth, loaded.drafter.depth or chosen.depth)
    emitted, rounds, accepted = 0, 0.0, 0.0
    rows = [data.encode(loaded.tokenizer, row) for row in conversations]
    for row in track(rows, console=console, transient=True):
        start, stop = data.last_answer(row)
        tokens = row.tokens[: min(stop, chosen.length)]
        if len(tokens) - start < 2:
            continue
        accept = replay.acceptance(
            loaded.drafter, tokens[:start], tokens[start:], depth=depth, temperature=chosen.temperature
        )
        some, counts = replay.rounds(accept)
        emitted, rounds, accepted = emitted + len(tokens) - start - 1, rounds + some, accepted + counts
    if not rounds:
        raise ValueError(f"No answer has a second token within length={chosen.length}: raise it.")
    survival = " ".join(f"{value:.3f}" for value in (accepted / rounds).tolist())
    console.print(
        f"{loaded.folder}: replayed tau {emitted / rounds:.3f} (chain of {depth}, temperature {chosen.temperature:g}, "
        f"{len(rows)} answers, {emitted} tokens), survival by depth {survival}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(main)
