"""Suffix decoding (2411.04975): drafts are the most frequent continuations of the text's end in earlier texts.

The authors' library, arctic-inference, has no wheels and must be built against vLLM's torch. This implementation drafts
as well and as fast.
"""

import heapq
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec.core.option_types import Count, NonNegative, ShareBelowOne, Text, Whole
from specdec.proposers import datastore as store
from specdec.proposers.text import Guess, TextProposer
from specdec.target.loading import load_tokenizer
from specdec.target.model import Target
from specdec.text import token_text

UNSEEN = 2.0  # other tokens that might have followed a string of one token; chosen on data/train.jsonl


class SuffixMatch(NamedTuple):
    """The longest end of a text that occurs in an automaton."""

    state: int
    length: int


NOWHERE = SuffixMatch(0, 0)


@dataclass
class RowMemory:
    """The state of a row."""

    automaton: "Automaton"  # automaton of the row's text
    start: int = 0  # position of the answer's first token
    young: SuffixMatch = NOWHERE  # longest match in each generation of the memory
    old: SuffixMatch = NOWHERE


class Suffix(TextProposer):
    """Drafts the most frequent continuations of the longest end of the text that occurred before.

    This end is looked up in the row's own text and in the memory of finished answers. If the match is equally long in
    both, the row's own text is used. (The paper uses the one with more expected accepted drafts, which measured 1 %
    less tau.) Rows of a batch do not read one another's texts. A finished answer enters the memory when the next prompt
    takes its row, or else at the end of the batch.

    num: largest number of drafts; factor, offset: at most ceil(factor * length of the match) + offset drafts
    least: smallest estimated probability that a draft and all drafts before it are accepted
    memory: number of tokens of the latest answers that are surely kept; up to twice as many are kept. 0: none
    datastore: folder as specdec/proposers/datastore.py writes it, whose last texts are remembered at first; None: none
    """

    def __init__(
        self,
        target: Target,
        *,
        num: Count,
        factor: NonNegative,
        offset: Whole,
        least: ShareBelowOne,
        memory: Whole,
        datastore: Text | None = None,
    ):
        if factor == offset == 0:
            raise ValueError(f"factor={factor} with offset={offset} drafts nothing: raise one of them.")
        self.num, self.factor, self.offset, self.least, self.memory = num, factor, offset, least, memory
        self.depth = num
        self.initial_texts = [] if datastore is None else read_last_texts(target, datastore, memory)
        self.reset_history()
        self.texts: list[list[int]] = []
        self.states: list[RowMemory] = []

    def reset_history(self):
        self.younger, self.older = Automaton(), Automaton()  # two generations of memory
        for text in self.initial_texts:
            self.remember(text)

    def begin(self, tokens, num):
        self.ended: list[list[int]] = []  # answers of rows that left the batch
        super().begin(tokens, num)
        for state, start in zip(self.states, num.tolist()):
            state.start = start

    def finish(self, answer_lengths):
        self._remember_ended([self._answer(row, num) for row, num in enumerate(answer_lengths)])

    def _answer(self, row: int, num: int) -> list[int]:
        start = self.states[row].start
        return self.texts[row][start : start + num]

    def _remember_ended(self, answers: list[list[int]]) -> None:
        for answer in self.ended + answers:
            self.remember(answer)
        self.ended = []

    def remember(self, answer: list[int]) -> None:
        """Adds an answer to the younger generation. A full one becomes the older one, whose texts are dropped."""
        answer = answer[: self.memory]
        if self.younger.num_tokens + len(answer) > self.memory:
            self.younger, self.older = Automaton(), self.younger
        self.younger.start_text()
        for token in answer:
            self.younger.append(token)

    def start_row(self, text):
        return RowMemory(Automaton())

    def extend(self, row, new):
        for token in new:
            self.states[row].automaton.append(token)
        self._follow(row, new)

    def _follow(self, row: int, new: list[int]) -> None:
        state = self.states[row]
        for token in new:
            state.young, state.old = self.younger.follow(state.young, token), self.older.follow(state.old, token)

    def select(self, rows, answer_lengths):
        self.ended += [self._answer(row, answer_lengths[row]) for row in range(len(self.texts)) if row not in rows]
        super().select(rows, answer_lengths)

    def replace(self, rows, answer_lengths, opening):
        self._remember_ended([self._answer(row, answer_lengths[row]) for row in rows])
        super().replace(rows, answer_lengths, opening)
        for row, start in zip(rows, opening.num.tolist()):
            self.states[row].start = start
        for row in set(range(len(self.texts))).difference(rows):  # the memory has changed
            self.states[row].young = self.states[row].old = NOWHERE
            self._follow(row, self.texts[row])

    def draft(self, row):
        return [(guess.token, guess.parent) for guess in self.guess(row)]

    def guess(self, row):
        state = self.states[row]
        sources = (
            (state.automaton, state.automaton.find_repeated()),
            (self.younger, state.young),
            (self.older, state.old),
        )
        automaton, match = max(sources, key=lambda source: source[1].length)  # of equals the first
        if match.length == 0:
            return []
        num = min(self.num, math.ceil(self.factor * match.length) + self.offset)
        return automaton.most_likely(match, num, self.least)


def read_last_texts(target: Target, folder: str, num: int) -> list[list[int]]:
    """Reads the last texts of a datastore with at most `num` tokens together; of the first text perhaps the end only.

    Raises ValueError as `datastore.read_datastore`.
    """
    tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
    tokens = store.read_datastore(Path(folder), token_text.digest_vocabulary(tokenizer)).tokens[-1 - num :].tolist()
    groups = itertools.groupby(tokens, key=lambda token: token == store.SEPARATOR)
    return [list(group) for separator, group in groups if not separator]


def make_default_suffix(target: Target) -> Suffix:
    """With the settings of conf/proposer/suffix.yaml, which a test compares."""
    return Suffix(target, num=16, factor=2.0, offset=4, least=0.1, memory=50000)


class Automaton:
    """A suffix automaton: all substrings of texts that may grow, each with the number of its occurrences.

    Substrings that end at the same places form one state, and `lengths` has the length of its longest string. The link
    of a state leads to the state of its longest suffix that ends at more places. A child is reached by one more token.
    State 0 is the empty string. There are fewer than two states for each token. Appending a token takes one step for
    each state along the links of the text's end. These are few; in a text of a single token, one for each token so far.
    """

    def __init__(self):
        self.children: list[dict[int, int]] = [{}]  # token -> state
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.last = 0  # state of the current text
        self.num_tokens = 0

    def start_text(self) -> None:
        """Starts another text with the next token."""
        self.last = 0

    def append(self, token: int) -> None:
        """Adds the next token of the current text."""
        state, child = self.last, self.children[self.last].get(token)
        if child is not None:  # from another text
            self.last = self._exactly(state, token, child)
        else:
            self.last = self._add({}, 0, self.lengths[state] + 1, 0)
            while state >= 0 and token not in self.children[state]:
                self.children[state][token] = self.last
                state = self.links[state]
            if state >= 0:
                self.links[self.last] = self._exactly(state, token, self.children[state][token])
        self.num_tokens += 1
        state = self.last
        while state > 0:
            self.counts[state] += 1
            state = self.links[state]

    def _exactly(self, state: int, token: int, child: int) -> int:
        """The state whose longest string is that of `state` and the token. A `child` with a longer one is split."""
        length = self.lengths[state] + 1
        if self.lengths[child] == length:
            return child
        split = self._add(dict(self.children[child]), self.links[child], length, self.counts[child])
        self.links[child] = split
        while state >= 0 and self.children[state].get(token) == child:
            self.children[state][token] = split
            state = self.links[state]
        return split

    def _add(self, children: dict[int, int], link: int, length: int, count: int) -> int:
        self.children.append(children)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def find_repeated(self) -> SuffixMatch:
        """The longest end of the current text that occurred before."""
        state = max(0, self.links[self.last])
        return SuffixMatch(state, self.lengths[state])

    def follow(self, match: SuffixMatch, token: int) -> SuffixMatch:
        """The longest end, of the matched string and the token, that occurs."""
        state, length = match
        while token not in self.children[state]:
            if state == 0:
                return NOWHERE
            state = self.links[state]
            length = self.lengths[state]
        return SuffixMatch(self.children[state][token], length + 1)

    def most_likely(self, match: SuffixMatch, num: int, least: float) -> list[Guess]:
        """Returns at most `num` nodes that may follow the state's strings, likeliest first; of equals the first found.

        The probability of a token is its share of all tokens that followed. That of a path is the product, and must be
        at least `least`. If nothing ever followed a string, as at the end of a text, its longest suffix with a follower
        is used. A guess states a smaller probability, as if UNSEEN / length of the string other tokens had followed.
        """
        draft: list[Guess] = []
        order = itertools.count()
        # (-probability of the path, order, stated probability, token, parent, state, depth)
        heap: list[tuple[float, int, float, int, int, int, int]] = []
        state, probability, depth = match.state, 1.0, 0
        while True:
            while state > 0 and not self.children[state]:
                state = self.links[state]
            if state > 0:
                following = [(token, child, self.counts[child]) for token, child in self.children[state].items()]
                total = sum(count for _, _, count in following)
                for token, child, count in following:
                    if probability * count / total >= least:
                        matched = match.length + depth
                        stated = count / (total + UNSEEN / matched)
                        path = -probability * count / total
                        heapq.heappush(heap, (path, next(order), stated, token, len(draft), child, depth + 1))
            if not heap or len(draft) == num:
                return draft
            negative, _, stated, token, parent, state, depth = heapq.heappop(heap)
            probability = -negative
            draft.append(Guess(token, parent, stated))
