"""The task of `choose`: its options, drafters in their shapes, and the target."""

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
from specdec.measuring.servers.server import ServerOptions, TriedServer
from specdec.options.command_types import MEMORY, OutputFolder, ProposerSettings
from specdec.options.decoding import RoundOptions
from specdec.proposers.base import Proposer
from specdec.tools.choose.round_costs import RoundCosts

MAX_DRAFTS = 16  # longest chain; acceptance of deeper drafts is near 0 for all heads of this project
MIN_REQUESTS = 8  # requests to a server at a load, and prompts that are decoded at once
TIMED_DRAFTS = (1, 2, 4, 8, 16)  # chains whose rounds are timed; seconds in between are interpolated


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
    """A drafter in one shape.

    make_proposer: maker of a new proposer; source: digest or configuration that names the drafter in caches
    chain: drafts of a head's chain, 0 for another shape; timed: whether its rounds are timed
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
    """The options with everything that was loaded for them.

    contexts: tokens before a round; empty for those of the texts
    known_costs: costs of costs=; tried: server of engine=
    """

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
