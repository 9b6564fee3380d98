"""The records of a kind of head in public layouts.

Each module of export/ ends with its families; families.py joins them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdec.export.layout import Layout, Parsed, Tensors, read_container_layers
from specdec.heads.base import Drafter
from specdec.target.model import Target

# as in engine_facts.yaml
SAFEAILAB, LLAMA_CPP, SGLANG, OPENVINO = "SafeAILab's code", "llama.cpp", "SGLang", "OpenVINO GenAI"


def always(drafter: Any) -> bool:
    """True for every head."""
    return True


@dataclass(frozen=True)
class Clause:
    """A text about those heads for which `find` gives a value that is not false, empty or None.

    In the text {value} stands for this value, and {drafter.NAME} for an attribute of the head.
    """

    text: str
    find: Callable[[Any], Any] = always


def pick_texts(clauses: Sequence[Clause], drafter: Drafter) -> list[str]:
    """The texts of those clauses that apply to a head."""
    values = ((clause, clause.find(drafter)) for clause in clauses)
    return [clause.text.format(drafter=drafter, value=value) for clause, value in values if value]


# for heads that draft token by token
SGLANG_STEPS = Clause(" --speculative-num-steps <num> --speculative-eagle-topk 1")
TARGET_FOLDER = Clause(" --target-model-dir <target>")  # of llama.cpp's converter
SAMPLING_NOTE = Clause(
    "At temperature 0 nothing else is needed. Above it, drafts are sampled here, and vLLM takes the most likely ones "
    "unless "
    '"draft_sample_method": "probabilistic" is in its configuration: tau differs.'
)

SGLANG_WINDOW = Clause(" --speculative-draft-window-size {value}", lambda drafter: drafter.window)
FIRST_DRAFT = "the first draft of a round"  # it has no window in SGLang, but for EAGLE-3


@dataclass(frozen=True)
class FullAttention(Clause):
    """The note on an engine in which every draft of a head with a window sees all positions."""


def note_full_attention(engine: str, drafts: str = "every draft") -> Clause:
    """The note on an engine without a head's window. drafts: words for those that it lets see all"""
    kind = Clause if drafts == FIRST_DRAFT else FullAttention
    text = f"Layers of this head see {{value:,}} positions, and {drafts} sees all in {engine}: acceptance in longer "
    return kind(f"{text}texts may be lower than with the window.", lambda drafter: drafter.window)


@dataclass(frozen=True)
class EngineRules:
    """The differences between one engine, or one format, and training, for the heads of a family."""

    refusals: Sequence[Clause] = ()  # reasons why the engine would run a head otherwise; the first is the error
    options: Sequence[Clause] = ()  # further options of the launch line, each with a space before it
    notes: Sequence[Clause] = ()  # sentences for the model card
    settings: Mapping[str, Any] = field(default_factory=dict)  # further entries of the engine's configuration
    draft_vocabulary: bool = True  # False: the engine drafts from all V tokens, whatever the checkpoint's vocabulary
    drops_last: bool = False  # whether the engine leaves out the last draft of a block whose anchor predicts
    unfit_engines: Sequence[Clause] = ()  # beginnings of the names of engines whose lines are left out


@dataclass(frozen=True)
class PublishedFiles:
    """The contents of a folder that another project published."""

    folder: Path
    config: dict  # config.json, verbatim
    tensors: Tensors  # the weights, by public name
    side_files: dict[str, Any]  # contents of further files of torch.save, by file name
    paths: list[Path]  # all files that were read

    @property
    def flat(self) -> dict:
        """The configuration on one level: that of a Speculators container with the fields of its layers."""
        return {**read_container_layers(self.config), **self.config}


@dataclass
class RestoredHead:
    """A head in the layout that it was published in. Restore steps change it in place."""

    drafter: Any
    config: dict
    tensors: Tensors  # {public name: tensor}
    side_files: dict[str, Any]


Reader = Callable[[PublishedFiles, Target], Parsed]  # -> constructor arguments, own tensors
Writer = Callable[[Any], Layout]  # takes a drafter of its family only
NameMap = Callable[[dict, Iterable[str]], dict[str, str]]  # configuration, public names -> own names by public ones


@dataclass(frozen=True)
class ExportFamily:
    """One kind of head in public layouts."""

    kind: str  # eagle3, dspark, ..: the name in formats, in docs and in engine_facts.yaml
    head_class: type[Drafter]
    labels: Mapping[str, str]  # rows of the table of docs/serving.md: key of the facts -> text
    inputs: Literal[
        "states", "last_state", "draft"
    ]  # needs of the head: inner states of the target, its last one, none
    writers: Mapping[str, Writer] = field(default_factory=dict)  # {format: writer}; "" for formats that are not named
    engines: Mapping[str, EngineRules] = field(default_factory=dict)  # {format: rules}; "nvidia" for NVIDIA's engines
    recognises: Callable[[PublishedFiles], bool] = lambda files: False  # whether a published folder is of this kind
    read: Reader | None = None  # None: no layout of its own is read
    public_names: NameMap = lambda config, names: {}  # for reading and restoring
    container_field: str | None = None  # field without which readers of Speculators' containers guess differently
    draft_vocabulary: bool = True  # whether the layout has a place for a draft vocabulary
    vocabulary_file: str | None = None  # side file that holds it; None: the tensors d2t and t2d do
    selects: Callable[[Any], bool] = always  # whether a head of the class is of this kind, where it has several
    whole_block: bool = False  # whether engines draft exactly as many tokens as the head was trained for
    restore_steps: Sequence[Callable[[RestoredHead], None]] = ()  # changes after all tensors are written back

    @property
    def head(self) -> str:
        """The dotted path of the class, as in drafter.json."""
        return f"{self.head_class.__module__}.{self.head_class.__name__}"

    def accepts(self, drafter: Drafter) -> bool:
        """Whether a drafter is of this kind; the first family that accepts it counts."""
        return isinstance(drafter, self.head_class) and self.selects(drafter)

    def find_writer(self, format_name: str) -> Writer:
        """The writer for a format that takes the family."""
        return self.writers.get(format_name) or self.writers[""]

    def find_rules(self, format_name: str) -> EngineRules:
        """The rules for a format; the default ones if nothing differs there."""
        return self.engines.get(format_name, EngineRules())
