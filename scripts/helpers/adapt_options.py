"""Options of adapt.py."""

from helpers import adapting, loading
from helpers.options import option, split

from dataclasses import dataclass, field

import train.overrides as overrides
from train.adaptation_judging import Limits


@dataclass(frozen=True, kw_only=True)
class Adapt:
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    traffic: str = field(metadata={"help": "folder of recorded answers: .jsonl files"})
    out: str = field(metadata={"help": "folder of the adapted heads; it stands for the head in use", "folder": True})
    old: str | None = option(
        None,
        "files that the head was trained on (a,b); null: those of its config.yaml, or the shipped ones; empty: none",
    )
    old_heldout: str | None = option(
        None, "answers that forgetting is judged on; null: some of old, not trained on here"
    )
    old_split: str | None = option(None, f"of old= and old_heldout=: {loading.SPLIT}")
    old_share: float = option(0.3, "share of the tokens trained on that are old ones")
    heldout_share: float = option(0.2, "share of the conversations that are held out, the newest")
    epochs: float = option(3.0, "how often rows are read")
    lr: float | None = option(None, "learning rate; null: a third of the head's own")
    tolerance: float = option(0.03, "share by which tau of old answers may fall; twice that for each category")
    shares: str = option(
        "1,0.75,0.5,0.25",
        "comma list: shares of the trained weights, the rest being those of the head in use; the largest one that forgets little "
        "enough on old answers kept for this choice is judged",
    )
    min_tokens: int = option(5000, "new tokens of answers that training needs")
    max_tokens: int | None = option(None, "most new tokens that are trained on, the newest; null: all")
    force: bool = option(False, "train even if it is not worth it")
    watch: float | None = option(None, "go on, and look for new rows every so many seconds; null: once")
    depth: int = option(4, "drafts of the chain that heads are judged with")
    judged: int = option(100, "answers of new and of old rows that are judged, at most")
    length: int = option(1024, "tokens of an answer with its prompt that are judged and trained on, at most")
    store: bool = option(True, "make OUT/datastore of the rows, for proposer=retrieval and proposer.suffix.datastore")
    head: str | None = option(None, "file of conf/head whose objective trains; null: by the checkpoint's class")
    seed: int = option(0, "of the choice of old rows")
    training: dict[str, str] = field(
        default_factory=dict,
        metadata={"prefix": "training.", "help": "options of train.py, such as training.data.length=1024"},
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)

    @property
    def limits(self) -> Limits:
        return Limits(self.depth, self.judged, self.length)


def check(given: Adapt) -> None:
    """Raises ValueError for options outside of their range."""
    shares_of(given.shares)
    overrides.check(given.training, "training.")
    if own := sorted(adapting.OWN & set(given.training)):
        raise ValueError(f"training.{own[0]}= is chosen by this command: leave it out.")


def shares_of(text: str) -> list[float]:
    """Raises ValueError for what is no list of shares."""
    try:
        found = [float(each) for each in split(text)]
    except ValueError:
        found = []
    if not found or not all(0 < each <= 1 for each in found):
        raise ValueError(f"shares={text} must be a comma list of numbers above 0, up to 1, such as 1,0.5.")
    return found
