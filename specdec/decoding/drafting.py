"""One frozen record of all settings of drafting and verifying, which makes the decoder and the proposer."""

from dataclasses import dataclass
from typing import TypeVar

from specdec.core import rules
from specdec.core.compile import Runner
from specdec.core.option_types import prefix_option_names
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.heads.base import Drafter, Head
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer
from specdec.proposers.growth import Children, check_children
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target

HeadType = TypeVar("HeadType", bound=Head)


@dataclass(frozen=True)
class Drafting:
    """All settings of drafting and verifying. Their defaults are those of every command (conf/decode/chain.yaml).

    depth: number of drafts along a path; width, nodes: see TreeShape
        nodes None: `depth` for a chain, else depth x width
    children: choice of the children of a tree's node, see HeadProposer
    rule: acceptance rule, see Decoder
    compile: whether the target's passes and the drafter's steps are compiled for each shape
    cuda_graphs: whether each pass of the target, and the drafter's steps of a round, are one CUDA graph
        None for both: the faster mode on a GPU, measured at the first use; neither on a CPU
    window: positions that each layer of a head sees; None: as the head was made

    Raises ValueError for an unknown value of `children` or `rule`.
    """

    depth: int = 2
    width: int = 1
    nodes: int | None = None
    children: Children = "distinct"
    rule: str = "token"
    compile: bool | None = None
    cuda_graphs: bool | None = None
    window: int | None = None

    def __post_init__(self):
        check_children(self.children)
        rules.check_rule(self.rule)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.width, self.depth * self.width if self.nodes is None else self.nodes)

    def runner(self) -> Runner:
        """A new runner of the target's passes, which decoders of one target can share."""
        return Runner(self.compile, cuda_graphs=self.cuda_graphs)

    def limit_window(self, head: HeadType) -> HeadType:
        """The head with the window of these settings. Raises ValueError for a head that takes none."""
        with prefix_option_names("decode"):
            return head.with_window(self.window)

    def proposer(self, drafter: Head) -> Proposer:
        """A proposer that drafts with a trained head. A head that does not draft by steps makes its own."""
        drafter = self.limit_window(drafter)
        if not isinstance(drafter, Drafter):
            return drafter.make_proposer(self)
        with prefix_option_names("decode"):
            drafter.check_window(self.depth)
        return HeadProposer(
            drafter, self.shape, children=self.children, compile=self.compile, cuda_graphs=self.cuda_graphs
        )

    def decoder(self, target: Target, proposer: Proposer | None, **arguments) -> Decoder:
        """A decoder with this acceptance rule. arguments: all other arguments of Decoder"""
        return Decoder(target, proposer, rule=self.rule, **arguments)

    def replayable(self, drafter: Head, sampling: Sampling) -> bool:
        """Whether replay can compute tau: it needs chains of a drafter's steps, verified token by token."""
        if not isinstance(drafter, Drafter):
            return False
        exact = sampling.greedy or self.rule == "token"
        return self.shape.chain and sampling.kind != "cut" and exact


def choose_proposer(target: Target, head: Head, drafting: Drafting | None) -> tuple[Drafting, Proposer]:
    """The settings and the proposer of a trained head. drafting: None: the number of drafts is chosen every round"""
    settings = drafting or Drafting(min(2, head.depth or 2))
    proposer = settings.proposer(head)
    if drafting is None and isinstance(proposer, HeadProposer):
        proposer = AutoProposer.make_default(target, proposer)
    return settings, proposer
