"""Suffix decoding (2411.04975): what followed most often where a text stood as this one stands now.

The authors' library, arctic-inference, has no wheels and is built against a torch of vLLM's; this is as good and as fast.
"""

import heapq
import itertools
import math
from typing import NamedTuple

from specdec.proposers.text import TextProposer
from specdec.target import Target
from specdec.tree import Nodes


class Suffix(TextProposer):
    """Drafts the likeliest ways on from the longest end of the text that occurred before; the longer that is, the more.

    It is looked for in the row's own text and in the memory, the answers of earlier batches; where it is as long in both,
    the row's own text counts. The paper takes whichever promises more accepted drafts instead; measured, its tau is 1 % lower.
    Rows of a batch do not see one another's texts, so what a row drafts does not depend on its neighbours.

    num: drafts of a tree at most; factor, offset: and at most ceil(factor * length of the match) + offset
    least: the least estimated chance of a draft, and of all before it
    memory: how many tokens of the latest answers are surely kept; up to twice as many are. 0: none
    """

    def __init__(self, target: Target, *, num: int, factor: float, offset: int, least: float, memory: int):
        for name, value, low in (("num", num, 1), ("factor", factor, 0), ("offset", offset, 0), ("memory", memory, 0)):
            if value < low:
                raise ValueError(f"proposer.{name}={value} must be at least {low}.")
        if factor == offset == 0:
            raise ValueError(
                f"proposer.factor={factor} with proposer.offset={offset} drafts nothing: raise one of them."
            )
        if not 0 <= least < 1:
            raise ValueError(f"proposer.least={least} must be a probability below 1.")
        self.num, self.factor, self.offset, self.least, self.memory = num, factor, offset, least, memory
        self.depth = num
        self.forget()
        self.texts: list[list[int]] = []
        self.starts: list[int] = []

    def forget(self):
        self.younger, self.older = Automaton(), Automaton()  # two generations of memory

    def begin(self, tokens, num):
        self.starts = num.tolist()  # of the answers
        super().begin(tokens, num)

    def finish(self, nums):
        for text, start, num in zip(self.texts, self.starts, nums):
            self.remember(text[start : start + num])

    def remember(self, answer: list[int]) -> None:
        """Forgets the older generation when the younger is full."""
        answer = answer[: self.memory]
        if self.younger.num_tokens + len(answer) > self.memory:
            self.younger, self.older = Automaton(), self.younger
        self.younger.begin()
        for token in answer:
            self.younger.append(token)

    def clear(self):
        self.own = [Automaton() for _ in self.texts]
        self.matches = [(NOWHERE, NOWHERE) for _ in self.texts]  # the text's end in each generation

    def extend(self, row, new):
        young, old = self.matches[row]
        for token in new:
            self.own[row].append(token)
            young, old = self.younger.follow(young, token), self.older.follow(old, token)
        self.matches[row] = young, old

    def draft(self, row):
        own, (young, old) = self.own[row], self.matches[row]
        places = (own, own.repeated()), (self.younger, young), (self.older, old)
        known, match = max(places, key=lambda place: place[1].length)  # of equals the first
        if match.length == 0:
            return []
        num = min(self.num, math.ceil(self.factor * match.length) + self.offset)
        return known.likeliest(match.state, num, self.least)


class Match(NamedTuple):
    """How much of a text's end an automaton knows."""

    state: int
    length: int


NOWHERE = Match(0, 0)


class Automaton:
    """A suffix automaton: the substrings of texts that may grow, each with the number of its occurrences.

    Substrings that end at the same places are one state, which `lengths` tells the longest of; the longest that ends at
    more places is the state's link, and a token more leads to a child. State 0 is the empty string. There are fewer than
    two states a token. A token costs as many steps as the text's end has states along its links: few, up to one for each
    token in a text of a single token again and again.
    """

    def __init__(self):
        self.children: list[dict[int, int]] = [{}]  # token -> state
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.last = 0  # the text so far
        self.num_tokens = 0

    def begin(self) -> None:
        """The next token begins another text."""
        self.last = 0

    def append(self, token: int) -> None:
        state, known = self.last, self.children[self.last].get(token)
        if known is not None:  # from another text
            self.last = self._exactly(state, token, known)
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
        """The state of the longest string of `state` and the token; made from `child`, if that holds longer ones too."""
        length = self.lengths[state] + 1
        if self.lengths[child] == length:
            return child
        part = self._add(dict(self.children[child]), self.links[child], length, self.counts[child])
        self.links[child] = part
        while state >= 0 and self.children[state].get(token) == child:
            self.children[state][token] = part
            state = self.links[state]
        return part

    def _add(self, children: dict[int, int], link: int, length: int, count: int) -> int:
        self.children.append(children)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def repeated(self) -> Match:
        """The longest end of the text that occurred before."""
        state = max(0, self.links[self.last])
        return Match(state, self.lengths[state])

    def follow(self, match: Match, token: int) -> Match:
        """The longest end of what was matched and the token that occurs."""
        state, length = match
        while token not in self.children[state]:
            if state == 0:
                return NOWHERE
            state = self.links[state]
            length = self.lengths[state]
        return Match(self.children[state][token], length + 1)

    def likeliest(self, state: int, num: int, least: float) -> Nodes:
        """At most `num` tokens that may follow the state's strings, the likeliest first; of equals, the first found.

        A token's chance is its share of what followed, a path's the product; it is at least `least`. Where nothing ever
        followed, as at the end of a text that so runs on into itself, the longest end of it that something followed counts.
        """
        draft: Nodes = []
        order = itertools.count()
        heap: list[tuple[float, int, int, int, int]] = []  # minus the chance, order, token, parent, state
        chance = 1.0
        while True:
            while state > 0 and not self.children[state]:
                state = self.links[state]
            if state > 0:
                following = [(token, child, self.counts[child]) for token, child in self.children[state].items()]
                total = sum(count for _, _, count in following)
                for token, child, count in following:
                    if chance * count / total >= least:
                        heapq.heappush(heap, (-chance * count / total, next(order), token, len(draft), child))
            if not heap or len(draft) == num:
                return draft
            negative, _, token, parent, state = heapq.heappop(heap)
            chance = -negative
            draft.append((token, parent))
