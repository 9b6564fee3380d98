"""All settings of a run: one frozen record of conf/train.yaml, built and checked once, before anything is loaded."""

import copy
import functools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specdec import checkpoint
from specdec.core import files, ranges
from specdec.core.precision import AUTO
from specdec.core.ranges import named, refuse
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Head
from specdec.options import config_files
from specdec.text.messages import check_template
from train.settings.hydra_text import read_weights

HERE = "here"  # conf/machine, of the machine that train.py runs on


@dataclass(frozen=True)
class TargetSettings:
    """conf/target"""

    name: str
    revision: str | None
    dtype: str
    device: str | None
    shard: bool
    trust_remote_code: bool
    tried: str | None = None  # where this project ran it; None: never
    outline: dict | None = None  # of its config.json, for plans where the target cannot be reached

    def __post_init__(self):
        where = self.device not in (None, "auto")
        refuse({f"device={self.device} must be null (where the head trains) or auto (over all GPUs).": where})


@dataclass(frozen=True)
class MachineSettings:
    """conf/machine: figures of the machine that a plan is made for; None, all of them: of this one"""

    name: str
    device: str | None = None  # cuda or cpu
    num: int | None = None  # processes, each with one device
    memory: float | None = None  # GB of a device
    disk: float | None = None  # GB that are free
    flops: float | None = None  # TFLOP/s of a device in bfloat16, at best
    bandwidth: float | None = None  # GB/s of a device's memory
    network: float | None = None  # GB/s from an engine to a process


@dataclass(frozen=True)
class DataSettings:
    """conf/data"""

    train: str | list[str] | dict[str, float]
    split: str | None
    heldout: str
    heldout_split: str | None
    length: int  # tokens of a pack
    pack: bool | None
    limit: int | None  # rows of each source
    hold_out: int  # rows
    tokens: int | None  # supervised ones
    cache: str  # folder
    workers: int | None


@dataclass(frozen=True)
class FeatureSettings:
    """conf/train.yaml, `features`: where the target's outputs come from"""

    mode: str  # cached, online or engine
    engine: str | list[str] | None
    folder: str

    def __post_init__(self):
        online = self.mode == "online" and self.urls
        wrong = {
            "mode=engine needs the URL of a server: engine=http://localhost:8000 (python scripts/launch_engine.py starts "
            "one).": self.mode == "engine" and not self.urls,
            "mode=online runs the target in this process: use mode=engine, or engine=null.": online,
        }
        refuse(wrong)

    @property
    def urls(self) -> str:
        """A comma list of the servers; empty if the target is in this process."""
        return ",".join(self.engine) if isinstance(self.engine, list) else self.engine or ""


@dataclass(frozen=True)
class OptimizerSettings:
    """conf/train.yaml, `optimizer`"""

    name: str
    lr: float
    muon_lr: float | None  # of the matrices that muon trains; None: lr
    betas: list[float]  # of AdamW
    weight_decay: float
    schedule: str
    warmup: float  # steps; below 1: a share of all steps
    decay: float  # share of the steps, of wsd
    final: float  # of lr, where a schedule ends

    def warmup_steps(self, steps: int) -> int:
        """Of a run of so many steps."""
        return round(self.warmup if self.warmup >= 1 else self.warmup * steps)


@dataclass(frozen=True)
class TrainSettings:
    """conf/train.yaml, `train`. Every unit is a step of the optimizer unless it says otherwise."""

    steps: int
    tokens: int | None  # to read, without padding; None: by epochs
    epochs: float  # times that the data is read
    hours: float | None  # of training, at most; None: any
    batch: int  # packs for each process and micro-batch
    accumulation: int  # micro-batches in a step
    max_grad_norm: float  # 0: gradients are not clipped
    log_every: int  # 0, here and below: never but at the end
    validate_every: int
    validate_first: bool  # before training too
    save_every: int | None  # None or 0: by minutes only
    save_minutes: float | None  # None or 0: by steps only; neither: at the end and after a signal
    skip_not_finite: bool  # leave out a step whose loss is not finite, rather than stop
    timeout: float  # minutes that a process waits for the others
    seed: int
    ema: float | None = None  # decay of the average of the weights; None: none is kept
    patience: int | None = None  # validations without a rise after which training ends; None: any

    @property
    def limit(self) -> float:
        """Of the gradient's norm; infinite: it is not clipped."""
        return self.max_grad_norm or math.inf


@dataclass(frozen=True)
class ValidationSettings:
    """conf/train.yaml, `validation`: how a drafter is judged while it is trained"""

    num_prompts: int
    max_new_tokens: int
    temperature: float
    decode: str  # best, end or always
    auto: str  # never or end
    share: float | None  # of the training time; None: any
    answers: str  # folder, or a file of recorded answers

    @property
    def recorded(self) -> bool:
        """Whether recorded answers are replayed, each at its own temperature, in place of those to data.heldout."""
        return self.answers.endswith(".jsonl")


PARTS: dict[str, Any] = {
    "target": TargetSettings,
    "machine": MachineSettings,
    "data": DataSettings,
    "decode": Drafting,
    "features": FeatureSettings,
    "optimizer": OptimizerSettings,
    "train": TrainSettings,
    "validation": ValidationSettings,
}


@dataclass(frozen=True)
class RunConfig:
    """conf/train.yaml. Raises ValueError, naming the option, for what does not fit together."""

    head: dict  # drafter, objective, vocab_size, lr and, for heads that change the target, adapter
    target: TargetSettings
    data: DataSettings
    decode: Drafting
    template: dict  # variables of the chat template, by name, for rows and prompts that do not say them
    run: str
    machine: MachineSettings
    plan: bool
    start: str | None
    start_vocab: str
    resume: bool | str
    tracker: str
    progress: str
    threads: int | None
    precision: str
    fast: str | list[str] | None
    solve_packs: int
    features: FeatureSettings
    optimizer: OptimizerSettings
    train: TrainSettings
    validation: ValidationSettings
    open: tuple[str, ...] = ()  # options that are auto, which hold a provisional value until `settle`

    @classmethod
    def of(cls, document: dict) -> "RunConfig":
        """document: conf/train.yaml with the user's options, in groups; a path may begin with ~"""
        data = {**document["data"], "train": read_weights(document["data"]["train"])}
        document = files.expand_home({**document, "data": data})
        ranges.check(document, free=("head.",))  # a new head has options of its own
        document, left = take_provisional(document)
        document["template"] = check_template(document["template"] or {})
        parts: dict[str, Any] = {"open": left}
        for name, part in PARTS.items():
            with named(name):
                parts[name] = _make(part, document[name], f"{name}.")
        return _make(cls, document | parts)

    def __post_init__(self):
        start, target, features = self.start_vocab, self.target, self.features
        adapts, urls = self.adapts_target, features.urls
        here = "for which the target must be in this process: use features.mode=online."
        served, shared, new = f"features.engine={urls}:", "target.shard=true:", self.start is None and start != "keep"
        wrong = {
            f"start_vocab={start} is for a checkpoint that is trained further: give start=, too.": new,
            "A head that adapts the target needs head.adapter: {lr, delay}, see conf/head/medusa2.yaml.": adapts
            and "adapter" not in self.head,
            # A server reads the texts
            f"{served} the head changes the target, {here}": urls and adapts,
            f"{served} target.shard=true keeps the target's layers in these processes, {here}": urls and target.shard,
            # The target's layers are in parts
            f"{shared} head={self.head['drafter']['_target_']} changes the target, which must then be whole in each process: set "
            "target.shard=false.": target.shard and adapts,
        }
        refuse(wrong)

    @property
    def elsewhere(self) -> bool:
        """Whether a plan is made for another machine."""
        return self.plan and self.machine.name != HERE

    @property
    def drafter_class(self) -> type[Head]:
        return checkpoint.drafter_class(self.head["drafter"]["_target_"])

    @property
    def adapts_target(self) -> bool:
        return self.drafter_class.adapts_target

    def with_precision(self, precision: str, dtype: str) -> "RunConfig":
        """These in the place of each `auto`. dtype: of the target"""
        target = replace(self.target, dtype=dtype) if self.target.dtype == AUTO else self.target
        return replace(self, precision=precision if self.precision == AUTO else self.precision, target=target)

    def settle(self, decided: dict[str, Any]) -> "RunConfig":
        """These values, by dotted name, in the place of each `auto`."""
        document = self.document()
        for name, value in decided.items():
            *groups, key = name.split(".")
            functools.reduce(dict.__getitem__, groups, document)[key] = value
        left = tuple(name for name in self.open if name not in decided)
        return replace(RunConfig.of(document), open=left)

    def document(self) -> dict:
        """In groups, as conf/train.yaml has it."""
        return {key: value for key, value in asdict(self).items() if key != "open"}

    def less_memory(self) -> str:
        """Which options of this run lower the memory that it needs."""
        objective, train = self.head["objective"], self.train
        lower, give = [f"data.length={self.data.length}"], []
        if train.batch > 1:
            lower.append(f"train.batch={train.batch} (raise train.accumulation={train.accumulation} as much)")
        if getattr(self.drafter_class, "depth", 0) is None:
            lower.append(f"head.objective.depth={objective['depth']}")
        if objective.get("gradient_checkpointing") is False:
            give.append("head.objective.gradient_checkpointing=true")
        if self.start is None and self.head.get("vocab_size", 0) is None:
            give.append("head.vocab_size=32000")
        if self.target.device is None and not self.features.urls:
            give.append("target.device=auto with more GPUs")
        return f"lower {' or '.join(lower)}" + (f", or give {' or '.join(give)}" if give else "")


# What an option that is auto holds until train/settings/decide.py has looked at the device and the data
PROVISIONAL: dict[str, Any] = {
    "data.length": 512,
    "head.vocab_size": 8192,
    "features.mode": "online",
    "decode.depth": 2,
    "train.steps": 1000,
    "train.epochs": 1.0,
    "train.hours": None,
    "train.batch": 1,
    "train.accumulation": 1,
    "train.validate_every": 250,
    "validation.num_prompts": 8,
    "validation.max_new_tokens": 48,
}
OPEN_NULL: dict[str, Any] = {  # the same of options that are null
    "solve_packs": 200,
    "head.drafter.norm_features": False,
    "head.drafter.norm_output": False,
}
LENGTHS = ("train.tokens", "train.epochs", "train.hours")  # that say how long to train, as train.steps does


def take_provisional(document: dict) -> tuple[dict, tuple[str, ...]]:
    """-> the settings with a provisional value in the place of each `auto`, and the names of these options"""
    document, found = copy.deepcopy(document), []
    served = {"features.mode": "engine"} if document["features"].get("engine") else {}
    for name, value in {**PROVISIONAL, **OPEN_NULL, **served}.items():
        *groups, key = name.split(".")
        place = functools.reduce(dict.__getitem__, groups, document)
        if key in place and place[key] == (None if name in OPEN_NULL else AUTO):
            place[key] = value
            found.append(name)
    return document, tuple(found)


def read_settings(path: Path) -> dict:
    """The config.yaml of a run in groups; {} where there is none."""
    document = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    for part in document.get("head", {}).values():
        if isinstance(part, dict) and "_target_" in part:
            part["_target_"] = checkpoint.find_class(part["_target_"])
    return document


def _make(part: type, given: dict, group: str = "") -> Any:
    """part: a dataclass; group: the beginning of its options' names"""
    for key in given.keys() - part.__dataclass_fields__.keys():  # type: ignore[attr-defined]
        raise ValueError(f"There is no option {group + key!r}. See --help.")
    return part(**given)


def refuse_two_lengths(document: dict) -> None:
    """Raises ValueError where a user says in two ways how long to train. document: as the user gives it"""
    known = config_files.flatten(document)
    given = [name for name in LENGTHS if known[name] not in (None, AUTO)]
    wrong = {
        f"train.steps={known['train.steps']} says how long to train, so {''.join(given[:1])} would change nothing: give one of "
        "them.": known["train.steps"] != AUTO and given,
        "train.tokens and train.epochs both say how much to read: give one of them.": {*LENGTHS[:2]} <= {*given},
    }
    refuse(wrong)


# Settings by dotted name


def fixed_settings(document: dict) -> dict:
    """The settings that a run's figures depend on, by dotted name."""
    free: tuple[str, ...] = (
        "resume",
        "plan",
        "machine",
        "tracker",
        "threads",
        "fast",
        "features",
        "decode",
        "validation",
        "run",
        "progress",
    )
    free += tuple(f"target.{key}" for key in ("device", "shard", "trust_remote_code", "tried", "outline"))
    # What is read is in the fingerprint
    free += tuple(f"data.{key}" for key in ("split", "heldout_split", "cache", "workers"))
    freely = "tokens epochs hours log_every validate_every validate_first patience save_every save_minutes timeout skip_not_finite"
    free += tuple(f"train.{key}" for key in freely.split())
    return config_files.flatten(document, without=free)
