"""Options of decoding: sampling, verification, and the shapes of drafts. The defaults are those of `Drafting`."""

from specdec.options.command_line import option, split

import functools
from dataclasses import asdict, dataclass

from specdec.core import progress
from specdec.core.ranges import named
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer

MOST = 4096  # requests at once
COMPILE = "compile for the shapes that occur: slow at first, then faster rounds"


def show_measuring(proposer: Proposer) -> None:
    """Lets proposer=auto show the progress of measuring costs, which it does once on a device."""
    if isinstance(proposer, Auto):
        proposer.progress = functools.partial(progress.track, unit="sizes")


@dataclass(frozen=True)
class DecodeOptions:
    """Settings of decoding."""

    compile: bool | None = option(Drafting.compile, f"{COMPILE}; null: on a GPU what is faster, on a CPU not")
    cuda_graphs: bool | None = option(
        Drafting.cuda_graphs, "on a GPU, start passes and rounds of drafts as CUDA graphs; null: if that is faster"
    )
    temperature: str = option("0", "0 is greedy; a comma list measures each temperature")
    top_k: int | None = option(Sampling.top_k, "sample from the K most probable tokens only")
    top_p: float | None = option(Sampling.top_p, "sample from the most probable tokens of this total probability only")
    repetition_penalty: float = option(Sampling.repetition_penalty, "above 1: tokens that occurred become less likely")
    children: str = option(Drafting.children, "children in a tree at temperature > 0: distinct or chosen")
    rule: str = option(Drafting.rule, "acceptance rule: token, or block (whole paths)")
    depth: int = option(Drafting.depth, "drafts along a path")
    width: int = option(
        Drafting.width,
        "children of a node, and nodes of each depth that get some (a block drafter's: all); 1 is a chain",
    )
    nodes: int | None = option(Drafting.nodes, "drafts in a tree; null: depth for a chain, else depth x width")

    def drafting(self, shape: TreeShape | None = None) -> Drafting:
        """How to draft and verify. shape: instead of the one of these options. Raises ValueError, naming an option."""
        names = ("children", "rule", "compile", "cuda_graphs")
        chosen = asdict(shape) if shape else {"depth": self.depth, "width": self.width, "nodes": self.nodes}
        with named("decode"):
            drafting = Drafting(**{name: getattr(self, name) for name in names}, **chosen)
            _ = drafting.shape  # raises ValueError here, where the message names the options
        return drafting

    def samplings(self) -> list[Sampling]:
        """One for each temperature."""
        try:
            temperatures = [float(value) for value in self.temperature.split(",")]
        except ValueError:
            raise ValueError(f"decode.temperature={self.temperature}: give numbers, such as 0 or 0,1.") from None
        with named("decode"):
            return [Sampling(value, self.top_k, self.top_p, self.repetition_penalty) for value in temperatures]

    def sampling(self) -> Sampling:
        """Raises ValueError for more than one temperature."""
        samplings = self.samplings()
        if len(samplings) > 1:
            raise ValueError(f"decode.temperature={self.temperature}: give one, and run this again for each other one.")
        return samplings[0]


def read_shapes(chains: str, trees: str) -> list[TreeShape]:
    """Comma lists of chain lengths and of trees, DEPTHxWIDTHxNODES; chains first. Raises ValueError for what is no shape."""
    found = []
    for name, text, form, example in (
        ("chains", chains, "DEPTH", "1,2,3"),
        ("trees", trees, "DEPTHxWIDTHxNODES", "2x2x4,4x3x8"),
    ):
        for each in split(text):
            parts = each.split("x")
            if len(parts) != len(form.split("x")) or not all(part.isdecimal() for part in parts):
                raise ValueError(f"{name}={text} cannot be read: give a comma list of {form}, such as {example}.")
            numbers = [int(part) for part in parts]
            found.append(TreeShape(*numbers) if name == "trees" else TreeShape(numbers[0], 1, numbers[0]))
    return found


def read_batches(text: str) -> list[int]:
    """batch=, in order. Raises ValueError for what is no list of numbers."""
    sizes = split(text)
    if not all(size.isdecimal() and 0 < int(size) <= MOST for size in sizes):
        raise ValueError(f"batch={text}: give numbers from 1 to {MOST}, such as 1,4,16.")
    return sorted({int(size) for size in sizes})


def cut(shapes: list[TreeShape], limit: int | None) -> list[TreeShape]:
    """The shapes for a drafter that takes `limit` steps (None: any number), no deeper than that, each once."""
    depths = [min(shape.depth, limit or shape.depth) for shape in shapes]
    cuts = [TreeShape(d, shape.width, d if shape.chain else shape.nodes) for d, shape in zip(depths, shapes)]
    return list(dict.fromkeys(cuts))
