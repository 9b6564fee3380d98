"""What the scripts that decode share: the checkpoint, its target, the tree's shape."""

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import yaml
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.drafter import Head
from specdec.drafting import Drafting
from specdec.proposers.stopping import Stopping
from specdec.sampling import Sampling
from specdec.target import Target, load_tokenizer
from train import data
from train.naming import named

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class TargetOptions:
    name: str | None = field(
        default=None, metadata={"help": "folder or Hub name of the target; null: the checkpoint's"}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "bfloat16, float32, float16 or float64"})
    device: str | None = field(default=None, metadata={"help": "cpu or cuda; null: cuda if there is one"})


@dataclass(frozen=True)
class TokenizerOptions:
    """For commands that read the target's tokenizer and not its weights."""

    name: str = field(
        default="targets/smollm2-135m", metadata={"help": "folder or Hub name of the target, for its tokenizer"}
    )


@dataclass(frozen=True)
class DecodeOptions:
    temperature: str = field(default="0", metadata={"help": "0 is greedy; a comma list measures each"})
    top_k: int | None = field(default=None, metadata={"help": "sample from so many tokens only"})
    top_p: float | None = field(default=None, metadata={"help": "sample from the likeliest tokens of this mass only"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "above 1: tokens seen before are less likely"})
    file: str | None = field(
        default=None, metadata={"help": "YAML of decode settings, as scripts/tune.py writes; replaces those below"}
    )
    depth: int = field(default=2, metadata={"help": "drafts along a path"})
    width: int = field(default=1, metadata={"help": "nodes widened at each depth (EAGLE-2's tree); 1 is a chain"})
    nodes: int | None = field(
        default=None, metadata={"help": "drafts in a tree; null: depth for a chain, else depth x width"}
    )
    children: str = field(
        default="chosen",
        metadata={"help": "of a tree, at temperature > 0: chosen, or sampled: distinct or independent"},
    )
    rule: str = field(default="token", metadata={"help": "token, block (whole paths) or typical (needs lossy=true)"})
    lossy: bool = field(default=False, metadata={"help": "allow rules that change what the target says"})
    compile: bool | None = field(
        default=None,
        metadata={
            "help": "compile for the shapes that occur: slow start, fast rounds; null: as decode.file, else false"
        },
    )

    def drafting(self) -> Drafting:
        if self.file is not None:
            return read_drafting(self.file, compile=self.compile)
        with named("decode"):
            drafting = Drafting(
                depth=self.depth,
                width=self.width,
                nodes=self.nodes,
                children=self.children,  # type: ignore[arg-type]  # it is checked there
                rule=self.rule,
                lossy=self.lossy,
                compile=bool(self.compile),
            )
            _ = drafting.shape  # so that a size that cannot be is refused here
            return drafting

    def samplings(self) -> list[Sampling]:
        try:
            temperatures = [float(value) for value in self.temperature.split(",")]
        except ValueError:
            raise ValueError(f"decode.temperature={self.temperature}: give numbers, such as 0 or 0,1.") from None
        with named("decode"):
            return [Sampling(value, self.top_k, self.top_p, self.repetition_penalty) for value in temperatures]


def read_drafting(path: str, *, compile: bool | None) -> Drafting:
    """What scripts/tune.py wrote. Raises ValueError with what to do."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
        missing = [item.name for item in fields(Drafting) if item.name not in found]
        if missing:
            raise KeyError(f"it lacks {', '.join(missing)}")
        with named("decode"):
            drafting = Drafting(**{**found, "compile": found["compile"] if compile is None else compile})
            _ = (
                drafting.shape,
                Stopping(**(drafting.stopping or {})),
            )  # here, where a mistake can be told from its place
            return drafting
    except (OSError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ValueError(
            f"decode.file={path} cannot be used ({error}): give a file that scripts/tune.py wrote."
        ) from error


@dataclass(frozen=True)
class Opened:
    """A target, ready to answer."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    stop: set[int]


@dataclass(frozen=True)
class Loaded(Opened):
    """A checkpoint beside its target."""

    folder: Path
    drafter: Head


def use_threads() -> None:
    """All cores, unless OMP_NUM_THREADS says otherwise."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def run_names(folders: list[Path]) -> list[str]:
    """A run's folder has its own name, a step's its run's too. Raises ValueError if two are called the same."""
    names = [path.name if (path / "best").is_file() else f"{path.parent.name}/{path.name}" for path in folders]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two runs are called {', '.join(twice)}: list each once, or rename a folder.")
    return names


def trained_on(folder: Path) -> str | None:
    """The training data that the run's config.yaml names, by the file's name; None if there is no such file."""
    for path in (folder / "config.yaml", folder.parent / "config.yaml"):
        if path.exists():
            return Path(str(OmegaConf.load(path).data.train)).name
    return None


def load_target(options: TargetOptions, *, default: str | None = None) -> Opened:
    """default: its name, where the options give none; without one, that of conf/target. Raises ValueError as Target.load."""
    use_threads()
    name = options.name or default or str(OmegaConf.load(CONF / "target" / "smollm2-135m.yaml").name)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with named("target"):
        target = Target.load(name, dtype=options.dtype, device=device)
    tokenizer = load_tokenizer(name)
    return Opened(target, tokenizer, data.stop_tokens(tokenizer, target.model.generation_config))


def target_of(folder: Path) -> str:
    """The name of the target that a checkpoint was trained for."""
    return str(checkpoint.read_json(folder / "drafter.json").get("target"))


def load(folder: str, options: TargetOptions) -> Loaded:
    """Raises ValueError, with what to do, for a wrong folder or target."""
    path = checkpoint.resolve(folder)
    opened = load_target(options, default=target_of(path))
    drafter = checkpoint.load(path, opened.target)
    if opened.target.adapted:
        print(f"{path} adapts its target: all outputs are those of the adapted one.", file=sys.stderr)
    return Loaded(**vars(opened), folder=path, drafter=drafter)
