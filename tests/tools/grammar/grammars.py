"""A grammar for tests without llguidance: which tokens may follow each text, given by a function."""

import functools
import itertools
import random
from collections.abc import Callable

from specdec.core.constraint import Constraint
from specdec.tools.grammar.grammar import GrammarConstraint


class Language:
    """Like llguidance.LLMatcher. may(text) -> the tokens that may follow a text"""

    def __init__(self, may: Callable[[tuple[int, ...]], set[int]], vocab_size: int):
        self.may, self.vocab_size, self.text = may, vocab_size, ()

    def deep_copy(self) -> "Language":
        copy = Language(self.may, self.vocab_size)
        copy.text = self.text
        return copy

    def consume_token(self, token: int) -> bool:
        fits = token in self.may(self.text)
        if fits:
            self.text += (token,)
        return fits

    def validate_tokens(self, tokens: list[int]) -> int:
        copy = self.deep_copy()
        return next((place for place, token in enumerate(tokens) if not copy.consume_token(token)), len(tokens))

    def is_accepting(self) -> bool:
        """A text is a sentence where token 3 may follow, which ends answers."""
        return 3 in self.may(self.text)

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        bits = sum(1 << token for token in self.may(self.text))
        return bits.to_bytes(4 * -(-self.vocab_size // 32), "little")

    def compute_ff_tokens(self) -> list[int]:
        text, forced = self.text, []
        while len(forced) < 8 and len(self.may(text)) == 1:
            (token,) = self.may(text)
            forced.append(token)
            text += (token,)
        return forced


@functools.cache
def some_of(text: tuple[int, ...], vocab_size: int, seed: int) -> frozenset[int]:
    """A random set of tokens, not empty; the same for the same text."""
    chosen = random.Random(f"{seed} {text}")
    sets = [part for num in range(1, vocab_size + 1) for part in itertools.combinations(range(vocab_size), num)]
    return frozenset(chosen.choice(sets))


def random_constraint(vocab_size: int, seed: int = 0, stop: frozenset[int] = frozenset()) -> Constraint:
    return GrammarConstraint(Language(lambda text: set(some_of(text, vocab_size, seed)), vocab_size), stop)
