"""Answers with the counts and times of their rounds, and where an answer ends."""

from dataclasses import dataclass, field

from specdec.core.answer_text import StopStrings

STAGES = ("draft", "verify", "keep", "other")


@dataclass(frozen=True)
class Round:
    """The tokens that one round emitted in each row; a finished row emits none."""

    tokens: list[list[int]]  # [B][.] accepted drafts, then the target's own token, cut at the end of the answer
    accepted: list[int]  # [B] how many of these tokens are drafts


@dataclass
class Generation:
    """Answers, and counts and times of their rounds. The first token of an answer is read off the prompt, before any round."""

    tokens: list[list[int]]  # [B][.] the answers
    accepted: list[list[int]]  # [B][rounds] drafts that each round emitted; it emits one token more
    drafted: list[int] = field(default_factory=list)  # [rounds] nodes of each round's tree, without the root
    seconds: float = 0.0  # of all rounds: wall clock, without compiling; of an answer in a batch its share
    elapsed: float = 0.0  # the same, but whole, with prompts of others that are read meanwhile: what its user waits
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # the parts of `seconds`

    def add_times(self, cost: "RoundCost", share: float = 1.0) -> None:
        """Adds a round's times, or a share of them."""
        self.seconds += cost.seconds * share
        self.elapsed += cost.seconds
        self.compile_seconds += cost.compile_seconds * share
        for stage, spent in cost.stages.items():
            self.stages[stage] += spent * share


def count_rounds_reaching(accepted: list[int], depth: int) -> list[int]:
    """accepted: drafts that each round emitted -> [depth] rounds that emitted at least 1, 2, .. drafts"""
    return [sum(count >= least for count in accepted) for least in range(1, depth + 1)]


@dataclass(frozen=True)
class RoundCost:
    """Times of one round, as in Generation. On a GPU, `keep` and `other` are those of the round before: nobody waits for them."""

    seconds: float
    compile_seconds: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Ends:
    """What ends an answer. tokens: ids that end it and belong to it; strings: None: no text does"""

    tokens: frozenset[int]
    strings: StopStrings | None = None

    def begin(self, prompt: list[int]) -> "Ends":
        """The same for one answer, whose text it reads as the tokens come."""
        return Ends(self.tokens, self.strings and self.strings.begin(prompt))

    def cut_tokens(self, written: list[int], new: list[int]) -> tuple[list[int], bool]:
        """-> those of the new tokens, which follow `written`, that belong to the answer; whether it ends with them"""
        end = next((place + 1 for place, token in enumerate(new) if token in self.tokens), None)
        new = new[:end]
        if self.strings and new:
            last = self.strings.end(written, new)
            new, end = new[:last], end if last is None else last
        return new, end is not None
