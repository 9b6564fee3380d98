"""Drafts what a grammar leaves no choice about: the brackets, names and quotes of a JSON schema."""

from specdec.core.grammar import Constraint
from specdec.core.tree import Nodes
from specdec.proposers.text import Guess, TextProposer
from specdec.target.model import Target


class Forced(TextProposer):
    """Drafts, as a chain, the tokens that the grammar of a row's answer forces; none where it leaves a choice.

    The target has no choice there either, so no such draft is refused. num: drafts, at most
    """

    linear = True
    constraints: list[Constraint | None] = []  # of the rows, once a batch has told them

    def __init__(self, target: Target, *, num: int):
        if num < 1:
            raise ValueError(f"num={num} must be at least 1.")
        self.depth = num

    def constrain(self, constraints):
        self.constraints = constraints

    def extend(self, row, new):
        pass

    def draft(self, row) -> Nodes:
        constraint = self.constraints[row] if self.constraints else None
        tokens = constraint.forced() if constraint else []
        return [(token, place) for place, token in enumerate(tokens[: self.depth])]

    def guess(self, row):
        return [Guess(token, place, 1.0, 0) for token, place in self.draft(row)]


def usual_forced(target: Target) -> Forced:
    """With the settings of conf/proposer/forced.yaml."""
    return Forced(target, num=16)
