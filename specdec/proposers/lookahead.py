"""Lookahead decoding (2402.02057): the target guesses ahead of itself; plain Jacobi decoding is the smallest case.

A window of columns moves before the text. A column is a trajectory of Jacobi iteration: N - 1 tokens at consecutive
positions, each of which was the target's likeliest after those before it, one round later than the one before. With
window=3 columns a, b, c, ngram=4, and the newest committed token, the root, at position p:

    position    p      p+1    p+2    p+3    p+4    p+5    p+6
    level 0     root   a0     b0     c0                          a chain under the root
    level 1                   a1     b1     c1                   a1 hangs under a0, b1 under b0, c1 under c0
    level 2                          a2     b2     c2            a2 hangs under a1, b2 under b1, c2 under c1
    choices                                 a3     b3     c3     the target's likeliest token after a2, b2, c2

So c2 sees the text, the root, a0 b0 c0 and c1: the paper's mask is that of a tree's ancestors. After the round a0 a1 a2 a3,
b0 b1 b2 b3 and c0 c1 c2 c3 go to the pool, and the columns are a1 a2 a3, b1 b2 b3, c1 c2 c3. The root has moved on by one
position and one more for each accepted draft, and a guess stays at its position:

    none accepted    the root is at p+1, and right behind it, at p+2, is a1's place: the columns are a, b, c
    one accepted     the root is at p+2: a1 has passed, b1 is right behind the root, and the columns are b, c, a

A column that has passed begins again at the end, where its place in the text is wrong, but its tokens still follow one
another. In the first rounds columns begin with one token of the text each, and get a level a round.

The n-grams of the pool that begin with the root's token hang under the root. Nodes that have the same path are one node,
in the window too: what the target says there is the same.
"""

from specdec.proposers.text import TextProposer
from specdec.target import Target
from specdec.tree import Nodes


class Lookahead(TextProposer):
    """Proposes at most window * (ngram - 1) nodes for the window and guesses * (ngram - 1) of the pool.

    window: columns; ngram: N, tokens of an n-gram; guesses: n-grams that the pool keeps and proposes for each first token,
    those that were found last; from_text: whether the pool also takes the n-grams of the prompt and the answer
    With ngram=2 and guesses=0 it is Jacobi decoding: a chain of `window` guesses, each the target's choice of the round
    before. At temperature > 0 the window still iterates the likeliest tokens.
    """

    watches = True

    def __init__(self, target: Target, *, window: int, ngram: int, guesses: int, from_text: bool):
        if window < 1:
            raise ValueError(f"proposer.window={window} must be at least 1 column.")
        if ngram < 2:
            raise ValueError(f"proposer.ngram={ngram} must be at least 2: the token to go by and one to guess.")
        if guesses < 0:
            raise ValueError(f"proposer.guesses={guesses} must be at least 0; 0 keeps no pool.")
        self.window, self.ngram, self.guesses, self.from_text = window, ngram, guesses, from_text
        self.depth = window + ngram - 2  # of the last column's last level

    def clear(self):
        num_rows = len(self.texts)
        self.columns: list[list[list[int]]] = [[] for _ in range(num_rows)]  # the tokens of each, the oldest first
        self.ends: list[list[int]] = [[] for _ in range(num_rows)]  # the node of each column's last token
        self.pools: list[dict[int, dict[tuple[int, ...], None]]] = [{} for _ in range(num_rows)]  # the latest last

    def extend(self, row, new):
        columns, accepted = self.columns[row], len(new) - 1
        self.columns[row] = columns[accepted:] + columns[:accepted]
        if self.from_text:
            text = self.texts[row]
            for end in range(max(self.ngram, len(text) - len(new) + 1), len(text) + 1):
                self.keep(row, text[end - self.ngram : end])

    def draft(self, row):
        text, columns = self.texts[row], self.columns[row]
        if not columns:
            columns += [[text[number * len(text) // self.window]] for number in range(self.window)]
        draft: Nodes = []
        numbers: dict[tuple[int, int], int] = {}  # of nodes, by token and parent

        def hang(tokens, node: int) -> int:
            """-> the number of the last"""
            for token in tokens:
                if (token, node) not in numbers:
                    draft.append((token, node))
                    numbers[token, node] = len(draft)
                node = numbers[token, node]
            return node

        ends, node = [], 0
        for first, *later in columns:
            node = hang([first], node)
            ends.append(hang(later, node))
        self.ends[row] = ends
        for guess in self.pools[row].get(text[-1], ()):
            hang(guess, 0)
        return draft

    def watch(self, tree, choices):
        for row, said in enumerate(choices.tolist()):
            for column, end in zip(self.columns[row], self.ends[row]):
                column.append(said[end])
                if len(column) == self.ngram:
                    self.keep(row, column)
                    del column[0]

    def keep(self, row: int, ngram: list[int]) -> None:
        """Puts it into the pool, in the place of the one of its first token that was found longest ago."""
        first, *guess = ngram
        pool = self.pools[row].setdefault(first, {})
        pool.pop(tuple(guess), None)
        pool[tuple(guess)] = None
        if len(pool) > self.guesses:
            del pool[next(iter(pool))]
