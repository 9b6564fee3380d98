"""What `choose` chooses from, and for what: its options, drafters in their shapes, and the target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from specdec.core import progress
from specdec.core.option_types import Count, Text, Whole
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.loading import OpenTarget
from specdec.measuring.questions import QuestionSet
from specdec.measuring.runs import ComparedHead
from specdec.options.command_types import MEMORY, OutputFolder, ProposerSettings
from specdec.options.decoding import RoundOptions
from specdec.proposers.base import Proposer
from specdec.tools.choose.round_costs import RoundCosts
from specdec.tools.judge.server import ServerOptions, TriedServer

MAX_DRAFTS = 16
MIN_REQUESTS = 8  # to a server at a load, and prompts that are decoded at once
TIMED_DRAFTS = (1, 2, 4, 8, 16)  # of the chains whose rounds are timed


class ChooseOptions(ServerOptions):
    checkpoint: str
    proposers: str
    proposer_settings: ProposerSettings
    trees: Annotated[str, MEMORY]
    loads: Text
    contexts: str
    costs: str
    answers: Text | None
    hold_out: Whole | None
    length: Annotated[Count, MEMORY]
    out: OutputFolder
    decode: RoundOptions


@dataclass(frozen=True)
class DrafterShape:
    """A drafter in one shape. make_proposer: a proposer of its own; source: what it is made from

    chain: its drafts, 0 for what is no chain of a head; timed: whether its rounds are timed
    """

    drafter: str
    shape: str
    make_proposer: Callable[[], Proposer]
    drafting: Drafting
    source: str
    chain: int = 0
    timed: bool = True

    @property
    def costs(self) -> str:
        """The name of its points in the table of costs, which a drafter's chains share."""
        return self.drafter if self.chain or not self.shape else f"{self.drafter}, {self.shape}"


@dataclass(frozen=True)
class ChoiceTask:
    """contexts: tokens before a round; empty for that of the texts. known_costs: of costs=; tried: the server of engine="""

    options: ChooseOptions
    question_set: QuestionSet
    loads: list[int]
    contexts: list[int]
    sampling: Sampling
    runs: list[ComparedHead]
    opened: OpenTarget
    known_costs: RoundCosts | None
    tried: TriedServer | None
    console: progress.Results
