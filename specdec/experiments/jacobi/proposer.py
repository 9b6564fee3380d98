"""Lookahead decoding (2402.02057): the target guesses its own next tokens; the smallest case is plain Jacobi decoding.

A window of columns stands ahead of the text. A column is a trajectory of Jacobi iteration: N - 1 tokens at consecutive
positions, each the target's most likely token after those before it, and one round younger. With window=3 columns a, b,
c, ngram=4, and the newest committed token, the root, at position p:

    position    p      p+1    p+2    p+3    p+4    p+5    p+6
    level 0     root   a0     b0     c0                          a chain under the root
    level 1                   a1     b1     c1                   a1 hangs under a0, b1 under b0, c1 under c0
    level 2                          a2     b2     c2            a2 hangs under a1, b2 under b1, c2 under c1
    choices                                 a3     b3     c3     the target's most likely token after a2, b2, c2

After the round a0 a1 a2 a3, b0 .. b3 and c0 .. c3 go to the pool, and the columns are a1 a2 a3, b1 b2 b3, c1 c2 c3.
Guesses keep their positions, so a column that the root has passed by accepted drafts becomes the last one. The n-grams
of the pool that begin with the root's token hang under the root. Nodes with the same path are one node.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from specdec.core.option_types import Count, Whole
from specdec.core.tree import Nodes
from specdec.proposers.text import TextProposer
from specdec.target.model import Target


@dataclass
class Window:
    """The columns and the pool of one row."""

    columns: list[list[int]] = field(default_factory=list)  # the tokens of each column, the oldest first
    ends: list[int] = field(default_factory=list)  # the node of each column's last token
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)  # first token -> guesses, latest last


class Lookahead(TextProposer):
    """Proposes at most window * (ngram - 1) nodes for the window and guesses * (ngram - 1) nodes from the pool.

    window: number of columns; ngram: N, tokens of an n-gram
    guesses: number of n-grams that the pool keeps and proposes for each first token: the latest ones

    With ngram=2 and guesses=0 it is Jacobi decoding: a chain of `window` guesses, each of them the target's choice of
    the round before. At temperature > 0 the window still iterates the most likely tokens.
    """

    watches = True

    def __init__(self, target: Target, *, window: Count, ngram: Annotated[int, Field(ge=2, le=1024)], guesses: Whole):
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.linear = ngram == 2 and guesses == 0
        self.depth = window + ngram - 2  # the depth of the last column's last level

    def start_row(self, text):
        return Window()

    def extend(self, row, new):
        state, accepted = self.states[row], len(new) - 1
        state.columns = state.columns[accepted:] + state.columns[:accepted]

    def draft(self, row):
        text, state = self.texts[row], self.states[row]
        if not state.columns:
            state.columns = [[text[number * len(text) // self.window]] for number in range(self.window)]
        draft: Nodes = []
        node_numbers: dict[tuple[int, int], int] = {}  # {(token, parent): node}

        def add_path(tokens, node: int) -> int:
            """Adds tokens below a node -> the number of the last one."""
            for token in tokens:
                if (token, node) not in node_numbers:
                    draft.append((token, node))
                    node_numbers[token, node] = len(draft)
                node = node_numbers[token, node]
            return node

        state.ends, node = [], 0
        for first, *later in state.columns:
            node = add_path([first], node)
            state.ends.append(add_path(later, node))
        for guess in state.pool.get(text[-1], ()):
            add_path(guess, 0)
        return draft

    def watch(self, tree, choices):
        for row, tokens in enumerate(choices.tolist()):
            for column, end in zip(self.states[row].columns, self.states[row].ends):
                column.append(tokens[end])
                if len(column) == self.ngram:
                    self._store_ngram(row, column)
                    del column[0]

    def _store_ngram(self, row: int, ngram: list[int]) -> None:
        """Adds an n-gram to the pool, and drops the oldest one with its first token if there are too many."""
        first, *guess = ngram
        pool = self.states[row].pool.setdefault(first, {})
        pool.pop(tuple(guess), None)
        pool[tuple(guess)] = None
        if len(pool) > self.guesses:
            del pool[next(iter(pool))]
