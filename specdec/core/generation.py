"""Answers with the counts and times of their rounds, and the ends of answers."""

from dataclasses import dataclass, field

from specdec.core.answer_text import StopStrings

STAGES = ("draft", "verify", "keep", "other", "round")  # round: a whole one that a device makes alone


@dataclass(frozen=True)
class Round:
    """The tokens that one round emitted in each row; none in a finished row."""

    tokens: list[list[int]]  # [B][.] accepted drafts and the target's own token, up to the answer's end
    accepted: list[int]  # [B] number of drafts among these tokens


@dataclass
class Generation:
    """Answers, with counts and times of their rounds.

    The prompt's pass gives an answer's first token, before any round.
    """

    tokens: list[list[int]]  # [B][.] the answers
    accepted: list[list[int]]  # [B][rounds] drafts that each round emitted, besides a token of the target
    drafted: list[int] = field(default_factory=list)  # [rounds] nodes of each round's tree, without the root
    seconds: float = 0.0  # wall clock of all rounds without compiling; an answer's share of its batch
    elapsed: float = 0.0  # the user's wait: whole rounds, and other users' prompts between them
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # `seconds` by stage

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a round emitted, on average (tau); None without a round."""
        num_rounds = sum(map(len, self.accepted))
        return self._num_emitted / num_rounds if num_rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Measured speed of the rounds, without the prompt's pass and compiling; None without a round."""
        return self._num_emitted / self.seconds if self.seconds else None

    @property
    def _num_emitted(self) -> int:
        """Number of tokens of all rounds."""
        return sum(len(tokens) - 1 for tokens in self.tokens)

    def add_times(self, cost: "RoundCost", share: float = 1.0) -> None:
        """Adds a share of a round's times."""
        self.seconds += cost.seconds * share
        self.elapsed += cost.seconds
        self.compile_seconds += cost.compile_seconds * share
        for stage, spent in cost.stages.items():
            self.stages[stage] += spent * share


def count_rounds_reaching(accepted: list[int], depth: int) -> list[int]:
    """accepted: drafts that each round emitted -> [depth] rounds that emitted at least 1, 2, .. drafts"""
    return [sum(map(least.__le__, accepted)) for least in range(1, depth + 1)]


@dataclass(frozen=True)
class RoundCost:
    """Times of one round, as in Generation.

    On a GPU, `keep` and `other` are those of the round before, to avoid a wait.
    """

    seconds: float
    compile_seconds: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Ends:
    """The ends of an answer. tokens: ids that end it and belong to it; strings: texts that end it, or None"""

    tokens: frozenset[int]
    strings: StopStrings | None = None

    def begin(self, prompt: list[int]) -> "Ends":
        """The same ends for one answer, whose text they read token by token"""
        return Ends(self.tokens, self.strings and self.strings.begin(prompt))

    def cut_tokens(self, written: list[int], new: list[int]) -> tuple[list[int], bool]:
        """-> the `new` tokens that belong to the answer, and True if it ends with them.

        written: its tokens before them
        """
        end = next((place + 1 for place, token in enumerate(new) if token in self.tokens), None)
        new = new[:end]
        if self.strings and new:
            last = self.strings.end(written, new)
            new = new[:last]
            end = end if last is None else last
        return new, end is not None
