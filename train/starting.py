"""What the head of a run begins from: a checkpoint that is trained further, and the draft vocabulary."""

from pathlib import Path

from torch import Tensor

from specdec import checkpoint, hub
from specdec.target import Target
from train import progress
from train.packing import Packs, draft_vocab
from train.pages import facts
from train.processes import by_main


def pinned(start: str | None, path: Path, *, resume: bool | str, minutes: float) -> str | None:
    """Returns `start`. For a head on the Hub the commit is added: today's, or in a resumed run the one of its first launch.

    path: of the run; minutes: that the processes wait for the main one
    """
    if start is None:
        return None
    if not hub.is_head(start):
        checkpoint.read_json(checkpoint.resolve(start) / "drafter.json")  # refused now, before anything is loaded
        return start
    recorded = facts.read(path).get("start", {})
    if resume and recorded.get("given") == start:
        return recorded["used"]
    return by_main(lambda: hub.pinned(checkpoint.resolve(start)), "the head that training starts from", minutes=minutes)


def vocabulary(
    packs: Packs,
    target: Target,
    start: str | None,
    choice: str,
    size: int | None,
    *,
    minutes: float,
    before: Tensor | None = None,
) -> Tensor | None:
    """The draft vocabulary of a new head, or of a checkpoint `start`, which had `before`: increasing ids [W]; None: all tokens

    choice, size: start_vocab and head.vocab_size; minutes: that the processes wait for the main one
    Raises ValueError for a choice that a new head does not have.
    """
    if start is None:
        if choice != "keep":
            raise ValueError(f"start_vocab={choice} is for a checkpoint that is trained further: give start=, too.")
        choice = "data"
    vocab = by_main(
        lambda: draft_vocab(packs, choice, before, size=size, num_tokens=target.vocab_size),
        "the draft vocabulary",
        minutes=minutes,
    )
    if choice == "more" and before is not None and vocab is not None and len(vocab) == len(before):
        progress.note(
            f"start_vocab=more adds no token: the head drafts {len(before):,}, and an eighth more than head.vocab_size={size} are "
            "allowed, of tokens that are frequent here and could not be drafted"
        )
    return vocab
