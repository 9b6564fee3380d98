"""Options of decoding: sampling, verification, and the shapes of drafts.

conf/command/decode.yaml has the defaults of `Drafting` and `Sampling`.
"""

from specdec.options.command_line import read_numbers, split_list

import dataclasses
import functools
from typing import Annotated, Literal

from specdec.core import progress
from specdec.core.option_types import (
    BatchSize,
    Count,
    Options,
    Positive,
    PositiveShare,
    SmallCount,
    Text,
    Window,
    prefix_option_names,
)
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.options.command_types import MEMORY
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer

MAX_REQUESTS = 4096  # bound of batch=, far above what one device decodes at once


def show_measuring(proposer: Proposer) -> None:
    """Lets proposer=auto show how far it is with its costs, which it measures once on a device."""
    if isinstance(proposer, AutoProposer):
        proposer.progress = functools.partial(progress.track_items, unit="sizes")


def read_temperatures(text: str) -> list[float]:
    """The numbers of a comma list. Raises ValueError for any other text."""
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(f"decode.temperature={text}: give numbers, such as 0 or 0,1.") from None


class SamplingOptions(Options):
    """Options of the distribution from which each token is drawn."""

    temperature: Text
    top_k: Count | None
    top_p: PositiveShare | None
    repetition_penalty: Positive

    def make_samplings(self) -> list[Sampling]:
        """The sampling of each temperature."""
        temperatures = read_temperatures(self.temperature)
        with prefix_option_names("decode"):
            return [Sampling(value, self.top_k, self.top_p, self.repetition_penalty) for value in temperatures]

    def make_sampling(self) -> Sampling:
        """The only sampling. Raises ValueError for more than one temperature."""
        samplings = self.make_samplings()
        if len(samplings) > 1:
            raise ValueError(f"decode.temperature={self.temperature}: give one, and run this again for each other one.")
        return samplings[0]


class DraftingOptions(Options):
    """How drafts are made and verified, whatever their shape."""

    compile: bool | None
    cuda_graphs: bool | None
    children: Literal["distinct", "chosen"]
    rule: Literal["token", "block"]
    window: Window | None

    def make_drafting(self, shape: TreeShape | None = None) -> Drafting:
        """The way to draft and verify. shape: shape of drafts; None: that of these options, or the usual one

        Raises ValueError, with the option's name, for settings that do not fit together.
        """
        settings = self.model_dump(include={field.name for field in dataclasses.fields(Drafting)})
        with prefix_option_names("decode"):
            drafting = Drafting(**settings | (dataclasses.asdict(shape) if shape else {}))
            _ = drafting.shape  # raises ValueError here, where the message names the options
        return drafting


class ShapedDraftingOptions(DraftingOptions):
    """How drafts are made and verified, in one shape."""

    depth: SmallCount
    width: SmallCount
    nodes: Annotated[BatchSize | None, MEMORY]


class RoundOptions(SamplingOptions, DraftingOptions):
    """All options of decoding but the shape."""


class DecodeOptions(SamplingOptions, ShapedDraftingOptions):
    """All options of decoding."""


def read_shapes(chains: str, trees: str) -> list[TreeShape]:
    """The shapes of two comma lists, of chain lengths and of trees DEPTHxWIDTHxNODES; chains first.

    Raises ValueError for an entry that is no shape.
    """
    lengths = read_number_lists("chains", chains, form="DEPTH", example="1,2,3")
    sizes = read_number_lists("trees", trees, form="DEPTHxWIDTHxNODES", example="2x2x4,4x3x8")
    return [TreeShape(depth, 1, depth) for (depth,) in lengths] + [TreeShape(*numbers) for numbers in sizes]


def read_number_lists(name: str, text: str, *, form: str, example: str) -> list[list[int]]:
    """The entries of a comma list, each some numbers joined by x. name, form, example: for the message of ValueError"""
    entries = [entry.split("x") for entry in split_list(text)]
    for entry in entries:
        if len(entry) != len(form.split("x")) or not all(map(str.isdecimal, entry)):
            raise ValueError(f"{name}={text} cannot be read: give a comma list of {form}, such as {example}.")
    return [list(map(int, entry)) for entry in entries]


def read_batches(text: str) -> list[int]:
    """The batch sizes of batch=, increasing. Raises ValueError for what is no list of such numbers."""
    return read_numbers("batch", text, MAX_REQUESTS)


def cut_shapes(shapes: list[TreeShape], max_depth: int | None) -> list[TreeShape]:
    """The shapes, each once, for a drafter that takes at most `max_depth` steps; None: any number."""
    limited = []
    for shape in shapes:
        depth = min(shape.depth, max_depth or shape.depth)
        limited.append(TreeShape(depth, shape.width, depth if shape.chain else shape.nodes))
    return list(dict.fromkeys(limited))
