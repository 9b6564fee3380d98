"""Options of decoding: sampling, verification, and the shapes of drafts. conf/command/decode.yaml has the defaults of `Drafting`."""

from specdec.options.command_line import split_list

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
    prefix_option_names,
)
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.options.command_types import MEMORY
from specdec.proposers.auto import AutoProposer
from specdec.proposers.base import Proposer

MAX_REQUESTS = 4096  # requests at once


def show_measuring(proposer: Proposer) -> None:
    """Lets proposer=auto show the progress of measuring costs, which it does once on a device."""
    if isinstance(proposer, AutoProposer):
        proposer.progress = functools.partial(progress.track_items, unit="sizes")


def read_temperatures(text: str) -> list[float]:
    """The numbers of a comma list. Raises ValueError for what is none."""
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(f"decode.temperature={text}: give numbers, such as 0 or 0,1.") from None


class SamplingOptions(Options):
    """Of the distribution of each token."""

    temperature: Text
    top_k: Count | None
    top_p: PositiveShare | None
    repetition_penalty: Positive

    def make_samplings(self) -> list[Sampling]:
        """One for each temperature."""
        temperatures = read_temperatures(self.temperature)
        with prefix_option_names("decode"):
            return [Sampling(value, self.top_k, self.top_p, self.repetition_penalty) for value in temperatures]

    def make_sampling(self) -> Sampling:
        """Raises ValueError for more than one temperature."""
        make_samplings = self.make_samplings()
        if len(make_samplings) > 1:
            raise ValueError(f"decode.temperature={self.temperature}: give one, and run this again for each other one.")
        return make_samplings[0]


class DraftingOptions(Options):
    """How drafts are made and verified, whatever their shape."""

    compile: bool | None
    cuda_graphs: bool | None
    children: Literal["distinct", "chosen"]
    rule: Literal["token", "block"]

    def make_drafting(self, shape: TreeShape | None = None) -> Drafting:
        """How to draft and verify. shape: None: of these options, or the usual one. Raises ValueError, naming an option."""
        settings = self.model_dump(include={field.name for field in dataclasses.fields(Drafting)})
        with prefix_option_names("decode"):
            make_drafting = Drafting(**settings | (dataclasses.asdict(shape) if shape else {}))
            _ = make_drafting.shape  # raises ValueError here, where the message names the options
        return make_drafting


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
    """Comma lists of chain lengths and of trees, DEPTHxWIDTHxNODES; chains first. Raises ValueError for what is no shape."""
    shapes = []
    for name, text, form, example in (
        ("chains", chains, "DEPTH", "1,2,3"),
        ("trees", trees, "DEPTHxWIDTHxNODES", "2x2x4,4x3x8"),
    ):
        for entry in split_list(text):
            number_texts = entry.split("x")
            if len(number_texts) != len(form.split("x")) or not all(
                number_text.isdecimal() for number_text in number_texts
            ):
                raise ValueError(f"{name}={text} cannot be read: give a comma list of {form}, such as {example}.")
            numbers = [int(number_text) for number_text in number_texts]
            shapes.append(TreeShape(*numbers) if name == "trees" else TreeShape(numbers[0], 1, numbers[0]))
    return shapes


def read_batches(text: str) -> list[int]:
    """batch=, in order. Raises ValueError for what is no list of numbers."""
    sizes = split_list(text)
    if not all(size.isdecimal() and 0 < int(size) <= MAX_REQUESTS for size in sizes):
        raise ValueError(f"batch={text}: give numbers from 1 to {MAX_REQUESTS}, such as 1,4,16.")
    return sorted({int(size) for size in sizes})


def cut_shapes(shapes: list[TreeShape], max_depth: int | None) -> list[TreeShape]:
    """The shapes for a drafter that takes `limit` steps (None: any number), no deeper than that, each once."""
    depths = [min(shape.depth, max_depth or shape.depth) for shape in shapes]
    limited_shapes = [TreeShape(d, shape.width, d if shape.chain else shape.nodes) for d, shape in zip(depths, shapes)]
    return list(dict.fromkeys(limited_shapes))
