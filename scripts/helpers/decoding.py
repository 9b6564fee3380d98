"""Options of decoding: sampling, verification, and the shapes of drafts. The defaults are those of `Drafting`."""

from helpers.loading import Opened, read_yaml
from helpers.options import option, split

import functools
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from specdec.core.compile import Runner
from specdec.core.grammar import FORMS, Grammar, Grammars
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import Prompt
from specdec.proposers.auto import Auto
from specdec.proposers.base import Proposer
from train import progress
from train.ranges import named

COMPILE = "compile for the shapes that occur: slow at first, then faster rounds"


def show_measuring(proposer: Proposer) -> None:
    """Lets proposer=auto show the progress of measuring costs, which it does once on a device."""
    if isinstance(proposer, Auto):
        proposer.progress = functools.partial(progress.track, unit="sizes")


@dataclass(frozen=True)
class CompileOptions:
    compile: bool | None = option(Drafting.compile, COMPILE)
    cuda_graphs: bool = option(
        Drafting.cuda_graphs, "on a GPU at temperature 0, start each pass of the target as a CUDA graph"
    )

    def runner(self) -> Runner:
        """What runs the target's passes."""
        return Runner(bool(self.compile), cuda_graphs=self.cuda_graphs)


@dataclass(frozen=True)
class DecodeOptions(CompileOptions):
    """All settings of decoding."""

    temperature: str = option("0", "0 is greedy; a comma list measures each temperature")
    top_k: int | None = option(Sampling.top_k, "sample from the K most probable tokens only")
    top_p: float | None = option(Sampling.top_p, "sample from the most probable tokens of this total probability only")
    repetition_penalty: float = option(Sampling.repetition_penalty, "above 1: tokens that occurred become less likely")
    children: str = option(Drafting.children, "children in a tree at temperature > 0: chosen or distinct")
    rule: str = option(Drafting.rule, "acceptance rule: token, block (whole paths), or typical (needs lossy=true)")
    lossy: bool = option(Drafting.lossy, "allow acceptance rules that change the distribution of answers")
    compile: bool | None = option(None, f"{COMPILE}; null: as in decode.file, else false")
    file: str | None = option(
        None, "report.json of a comparison of shapes: the fastest shape in it replaces the settings of drafting here"
    )
    depth: int = option(Drafting.depth, "drafts along a path")
    width: int = option(Drafting.width, "nodes expanded at each depth of a tree (EAGLE-2); 1 is a chain")
    nodes: int | None = option(Drafting.nodes, "drafts in a tree; null: depth for a chain, else depth x width")
    grammar: str | None = option(
        None, f"grammar of the answers: {FORMS}; rows: that of each row of prompts= (its field grammar)"
    )

    def drafting(self, shape: TreeShape | None = None) -> Drafting:
        """How to draft and verify. shape: instead of the one of these options. Raises ValueError, naming an option."""
        if self.file is not None and shape is None:
            return read_drafting(self.file, compile=self.compile, cuda_graphs=self.cuda_graphs)
        names = ("children", "rule", "lossy", "cuda_graphs")
        chosen = asdict(shape) if shape else {"depth": self.depth, "width": self.width, "nodes": self.nodes}
        with named("decode"):
            common = {name: getattr(self, name) for name in names}
            drafting = Drafting(compile=bool(self.compile), **common, **chosen)
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


@dataclass(frozen=True)
class Ruled:
    """What `decode.grammar=` says. given: for all answers; None: each prompt has its own"""

    grammars: Grammars
    given: Grammar | None

    @classmethod
    def of(cls, name: str | None, loaded: Opened) -> "Ruled | None":
        """None without a grammar. Raises ValueError for one that cannot be used."""
        if name is None:
            return None
        grammars = Grammars(loaded.tokenizer, loaded.target.vocab_size, loaded.stop)
        with named("decode"):
            given = None if name == "rows" else Grammar.parse(name)
        grammars.constraint(given)  # raises now, before anything is decoded
        return cls(grammars, given)

    def apply(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with the grammars of their answers. Raises ValueError if there is none, or one cannot be used."""
        ruled = [replace(prompt, grammar=self.given or prompt.grammar) for prompt in prompts]
        if not any(prompt.grammar for prompt in ruled):
            raise ValueError(
                'decode.grammar=rows: no row has a grammar. Add a field such as "grammar": {"json_schema": {..}}, or give '
                f"one grammar for all: {FORMS}."
            )
        for prompt in ruled:
            try:
                self.grammars.constraint(prompt.grammar)
            except ValueError as error:
                raise ValueError(f"Row {prompt.id}: {error}") from None
        return ruled


def read_drafting(path: str, *, compile: bool | None, cuda_graphs: bool = False) -> Drafting:
    """The settings of drafting in a report; `compile` replaces its own unless None, cuda_graphs=True too.

    Raises ValueError if the file cannot be read or lacks a setting.
    """
    try:
        document = read_yaml(Path(path))
        document = document.get("drafting", document)  # older files hold nothing else
        document.pop("stopping", None)  # an option of older versions
        document["cuda_graphs"] = cuda_graphs or document.get("cuda_graphs", False)  # older files lack it
        missing = [item.name for item in fields(Drafting) if item.name not in document]
        if missing:
            raise KeyError(f"it lacks {', '.join(missing)}")
        with named("decode"):
            drafting = Drafting(**{**document, "compile": document["compile"] if compile is None else compile})
            _ = drafting.shape  # raises errors here, which name the file
        return drafting
    except (OSError, TypeError, KeyError) as error:
        raise ValueError(
            f"decode.file={path} cannot be used ({error}): give the report.json of specdec evaluate chains=1,2,3."
        ) from error


@dataclass(frozen=True)
class ShapesOptions:
    """Shapes that a command compares."""

    chains: str = option("3", "comma list of chain lengths")
    trees: str = option("", "comma list of trees, each DEPTHxWIDTHxNODES; empty: no tree")

    def shapes(self) -> list[TreeShape]:
        """Chains first. Raises ValueError for what is no shape."""
        chains = [TreeShape(depth, 1, depth) for (depth,) in read_shapes("chains", self.chains, 1, "1,2,3")]
        return chains + [TreeShape(*shape) for shape in read_shapes("trees", self.trees, 3, "2x2x4,4x3x8")]


def read_shapes(name: str, text: str, num_parts: int, example: str) -> list[list[int]]:
    """A comma list of shapes, each `num_parts` numbers joined by x."""
    try:
        shapes = [[int(part) for part in shape.split("x")] for shape in split(text)]
    except ValueError:
        shapes = [[]]
    if any(len(shape) != num_parts for shape in shapes):
        form = "DEPTH" if num_parts == 1 else "DEPTHxWIDTHxNODES"
        raise ValueError(f"{name}={text} cannot be read: give a comma list of {form}, such as {example}.")
    return shapes


def cut(shapes: list[TreeShape], limit: int | None) -> list[TreeShape]:
    """The shapes for a drafter that takes `limit` steps (None: any number), no deeper than that, each once."""
    depths = [min(shape.depth, limit or shape.depth) for shape in shapes]
    cuts = [TreeShape(d, shape.width, d if shape.chain else shape.nodes) for d, shape in zip(depths, shapes)]
    return list(dict.fromkeys(cuts))
