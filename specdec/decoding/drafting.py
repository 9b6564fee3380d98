"""How to draft and verify: one frozen record of all settings, and the decoder and proposer that it describes."""

from dataclasses import dataclass

from specdec.core import rules
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.heads.base import Drafter, Head
from specdec.proposers.base import Proposer
from specdec.proposers.growth import Children, check_children
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target


@dataclass(frozen=True)
class Drafting:
    """How to draft and verify. The defaults of this class are the defaults of every command (conf/decode/chain.yaml).

    depth: drafts along a path; width, nodes: see TreeShape. nodes=None means `depth` for a chain, else depth x width
    children: how the children of a tree's node are made, see HeadProposer
    rule: the acceptance rule, see Decoder
    compile: whether the target's passes and the drafter's steps are compiled for the shapes that occur
    cuda_graphs: whether each pass of the target, and the drafter's steps of a round, are one CUDA graph
        None: on a GPU what is faster, measured at the first use; on a CPU neither

    Raises ValueError for an unknown value of `children` or `rule`.
    """

    depth: int = 2
    width: int = 1
    nodes: int | None = None
    children: Children = "distinct"
    rule: str = "token"
    compile: bool | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self):
        check_children(self.children)
        rules.check_rule(self.rule)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.width, self.depth * self.width if self.nodes is None else self.nodes)

    def runner(self) -> Runner:
        """What runs the target's passes; decoders of one target can share it."""
        return Runner(self.compile, cuda_graphs=self.cuda_graphs)

    def proposer(self, drafter: Head) -> Proposer:
        """The proposer that drafts with a trained head; a head that does not draft by steps makes its own."""
        if not isinstance(drafter, Drafter):
            return drafter.make_proposer(self)
        return HeadProposer(
            drafter, self.shape, children=self.children, compile=self.compile, cuda_graphs=self.cuda_graphs
        )

    def decoder(self, target: Target, proposer: Proposer | None, **arguments) -> Decoder:
        """A decoder with this acceptance rule; arguments: the other ones of Decoder."""
        return Decoder(target, proposer, rule=self.rule, **arguments)

    def replayable(self, drafter: Head, sampling: Sampling) -> bool:
        """Whether replay computes tau under these settings: fixed chains of a drafter's steps, verified token by token."""
        if not isinstance(drafter, Drafter):
            return False
        exact = sampling.greedy or self.rule == "token"
        return self.shape.chain and sampling.kind != "cut" and exact
