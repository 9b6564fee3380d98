"""All options of a run: one frozen model of conf/train.yaml, checked once, before anything is loaded."""

import math
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from specdec import checkpoint
from specdec.core import extensions, files
from specdec.core.option_types import (
    FREE,
    Auto,
    BatchSize,
    Count,
    Duration,
    NonNegative,
    Options,
    Positive,
    PositiveShare,
    Seed,
    Share,
    ShareBelowOne,
    SmallCount,
    Text,
    Texts,
    Whole,
    Window,
    find_group,
    find_options,
    list_choices,
    list_fields,
    raise_first,
    read_options,
)
from specdec.core.precision import AUTO
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.options.config_files import fill, flatten
from specdec.proposers.growth import Children
from specdec.text.messages import check_template

THIS_MACHINE = "here"  # name of the machine that train.py runs on, in conf/machine
NORM_OPTIONS = ("norm_features", "norm_output")
DECIDED_ARGUMENTS = (*NORM_OPTIONS, "window", "window_causal")  # arguments of a head's class that a run may decide
ShareSize = Annotated[int, Field(ge=2, le=1024)]  # processes of a group
CHECKPOINTING = "gradient_checkpointing"  # option of an objective's class that a run decides
Weights = Annotated[dict, Field(min_length=1)]  # weights of the sources by name


class RunTargetOptions(Options):
    """conf/target"""

    name: Text
    revision: Text | None
    dtype: Literal["auto", "bfloat16", "float32", "float16", "float64"]
    device: Annotated[Text | None, FREE]
    shard: Annotated[bool | ShareSize, FREE]  # processes that hold a target together; True: all
    trust_remote_code: Annotated[bool, FREE]
    tried: Annotated[Text | None, FREE] = None  # place where this project ran it; None: never run
    # Variables of its chat template, with their values, the default first; None: not known
    template_options: Annotated[dict[str, Annotated[list, Field(min_length=1)]] | None, FREE] = None
    outline: Annotated[dict | None, FREE] = None  # fields of its config.json, for plans without the target

    @model_validator(mode="after")
    def check_device(self) -> Self:
        sentence = f"target.device={self.device} must be null (where the head trains) or auto (over all GPUs)."
        raise_first({sentence: self.device not in (None, "auto")})
        return self


class RunTargetConfig(RunTargetOptions):
    dtype: Literal["bfloat16", "float32", "float16", "float64"]


class MachineOptions(Options):
    """conf/machine: figures of the machine that a plan is made for; None, all of them: of this one"""

    name: Text
    device: Literal["cpu", "cuda"] | None = None
    num: SmallCount | None = None  # processes, each with one device
    memory: Positive | None = None  # GB of a device
    disk: Positive | None = None  # free GB
    flops: Positive | None = None  # TFLOP/s of a device in bfloat16, at best
    bandwidth: Positive | None = None  # GB/s of a device's memory
    network: Positive | None = None  # GB/s from an engine, or from another node, to a process
    nodes: SmallCount = 1  # machines, with equal numbers of processes
    link: Positive | None = None  # GB/s between the devices of a node, in one direction


class DataOptions(Options):
    """conf/data"""

    train: Text | Texts | Weights
    split: Annotated[Text | None, FREE]  # FREE: the rows are in the fingerprint
    heldout: Text
    heldout_split: Annotated[Text | None, FREE]
    length: Count | Auto  # tokens of a pack
    pack: Annotated[bool | None, FREE]  # FREE: the packs are in the fingerprint
    limit: Count | None  # rows of each source
    hold_out: Whole  # rows
    tokens: Count | None  # supervised tokens
    cache: Annotated[Text, FREE]  # folder
    workers: Annotated[SmallCount | None, FREE]


class DataConfig(DataOptions):
    length: Count


class RunDraftingOptions(Options):
    """conf/decode: arguments of `Drafting`"""

    depth: SmallCount | Auto
    width: SmallCount
    nodes: BatchSize | None
    children: Children
    rule: Literal["token", "block"]
    compile: bool | None
    cuda_graphs: bool | None
    window: Window | None


class RunDraftingConfig(RunDraftingOptions):
    depth: SmallCount


class AdapterOptions(Options):
    """conf/head, `adapter`, of heads that change the target"""

    lr: NonNegative
    delay: Whole  # steps in which the head learns alone


def fill_arguments(drafter: dict, *, norms: bool = False) -> dict:
    """`head.drafter` with values in place of auto, for a head that no run decides: it has no window."""
    values = dict.fromkeys(NORM_OPTIONS, norms) | {"window": None, "window_causal": True}
    return drafter | {name: value for name, value in values.items() if drafter.get(name) == AUTO}


class HeadOptions(Options):
    """conf/head. drafter, objective: `_target_`, a class, and the options that it has"""

    drafter: dict
    objective: dict
    vocab_size: Count | Auto | None
    lr: NonNegative
    adapter: AdapterOptions | None = None
    optimizer: dict | None = None  # settings that conf/train.yaml takes from here

    @property
    def drafter_class(self) -> type[Head]:
        return checkpoint.load_head_class(str(self.drafter.get("_target_")))

    @model_validator(mode="after")
    def check_classes(self) -> Self:
        _check_arguments(self.drafter_class, fill_arguments(self.drafter), "head.drafter.")
        _check_arguments(pkgutil.resolve_name(self.objective["_target_"]), self.objective, "head.objective.")
        adapts = self.drafter_class.adapts_target and self.adapter is None
        raise_first(
            {"A head that adapts the target needs head.adapter: {lr, delay}, see conf/head/medusa2.yaml.": adapts}
        )
        return self


class HeadConfig(HeadOptions):
    vocab_size: Count | None


class FeatureOptions(Options):
    """conf/train.yaml, `features`: where the target's outputs come from"""

    mode: Literal["auto", "cached", "online", "engine"]
    engine: Text | Texts | None
    folder: Text

    @model_validator(mode="after")
    def check_engine(self) -> Self:
        wrong = {
            "features.mode=engine needs the URL of a server: features.engine=http://localhost:8000 (python "
            "scripts/launch_engine.py starts one).": self.mode == "engine" and not self.urls,
            "features.mode=online runs the target in this process: use features.mode=engine, or "
            "features.engine=null.": self.mode == "online" and self.urls,
        }
        raise_first(wrong)
        return self

    @property
    def urls(self) -> str:
        """A comma list of the servers; empty if the target is in this process."""
        return self.engine if isinstance(self.engine, str) else ",".join(self.engine or ())


class FeatureConfig(FeatureOptions):
    mode: Literal["cached", "online", "engine"]


class OptimizerOptions(Options):
    """conf/train.yaml, `optimizer`"""

    name: Literal["adamw", "adamw8bit", "muon"]
    lr: NonNegative
    muon_lr: NonNegative | None  # rate of the matrices that muon trains; None: lr
    betas: Annotated[list[ShareBelowOne], Field(min_length=2, max_length=2)]  # decay rates of AdamW's moments
    weight_decay: NonNegative
    schedule: Literal["cosine", "linear", "wsd", "constant"]
    warmup: NonNegative  # steps; below 1: a share of all steps
    decay: PositiveShare  # share of the steps in which wsd decays
    final: Share  # share of lr at the end of a schedule

    def warmup_steps(self, steps: int) -> int:
        """Steps of the warm-up in a run of `steps`."""
        return round(self.warmup if self.warmup >= 1 else self.warmup * steps)


class TrainOptions(Options):
    """conf/train.yaml, `train`. Every unit is a step of the optimizer unless it says otherwise."""

    steps: Count | Auto
    tokens: Annotated[Count | None, FREE]  # tokens to read, without padding; None: by epochs
    epochs: Annotated[Positive | Auto, FREE]  # times that the data is read
    hours: Annotated[Positive | Auto | None, FREE]  # hours of training, at most; None: no limit
    batch: BatchSize | Auto  # packs of a process' micro-batch
    accumulation: BatchSize | Auto  # micro-batches in a step
    max_grad_norm: NonNegative  # 0: gradients are not clipped
    log_every: Annotated[Whole, FREE]  # steps; 0, here and below: never but at the end
    validate_every: Annotated[Whole | Auto, FREE]
    validate_first: Annotated[bool, FREE]  # whether to validate before training, too
    save_every: Annotated[Whole | None, FREE]  # None or 0: by minutes only
    save_minutes: Annotated[NonNegative | None, FREE]  # None or 0: by steps only
    skip_not_finite: Annotated[bool, FREE]  # whether a step whose loss is not finite is left out
    timeout: Annotated[Duration, FREE]  # minutes that a process waits for the others
    seed: Seed
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # decay of the average of the weights; None: no average
    patience: Annotated[Count | None, FREE] = None  # validations without a rise that end training; None: any number
    context_parallel: Annotated[SmallCount, FREE] = 1  # processes of a group that divides each text

    @property
    def norm_limit(self) -> float:
        """Bound of the gradient's norm; infinite if gradients are not clipped."""
        return self.max_grad_norm or math.inf


class TrainConfig(TrainOptions):
    steps: Count
    epochs: Annotated[Positive, FREE]
    hours: Annotated[Positive | None, FREE]
    batch: BatchSize
    accumulation: BatchSize
    validate_every: Annotated[Whole, FREE]


class ValidationOptions(Options):
    """conf/train.yaml, `validation`: how a drafter is judged while it is trained"""

    num_prompts: Count | Auto | None  # None: all
    max_new_tokens: Count | Auto
    temperature: NonNegative
    decode: Literal["best", "end", "always"]
    auto: Literal["never", "end"]
    share: NonNegative | None  # share of the training time; None: no limit
    answers: Text  # folder of answers, or file of recorded ones
    engine: Text | None  # URL of a server that drafts with the head of each validation
    baseline: Text | None  # URL of a server of the target without drafts
    loads: Annotated[list[SmallCount], Field(min_length=1)]  # requests at once
    engine_folder: Text | None  # folder of the heads for the engine; None: inside the run's folder
    timeout: Duration  # seconds of silence after which the engine is given up

    @property
    def has_recorded_answers(self) -> bool:
        """Whether recorded answers are replayed, each at its own temperature, in place of those to data.heldout."""
        return self.answers.endswith(".jsonl")


class ValidationConfig(ValidationOptions):
    num_prompts: Count | None
    max_new_tokens: Count


class RunOptions(Options):
    """conf/train.yaml as the user gives it: an option may be auto. Raises ValueError for what does not fit together."""

    head: HeadOptions
    target: RunTargetOptions
    data: DataOptions
    decode: Annotated[RunDraftingOptions, FREE]
    template: dict  # variables of the chat template, for rows and prompts without their own
    run: Annotated[Text, FREE]
    machine: Annotated[MachineOptions, FREE]
    plan: Annotated[bool, FREE]
    start: Text | None
    start_vocab: Literal["keep", "data"]
    resume: Annotated[Literal[True, False, "auto"], FREE]
    tracker: Annotated[Literal["none", "wandb", "tensorboard", "trackio"], FREE]
    progress: Annotated[Literal["auto", "rich", "plain", "quiet"], FREE]
    trust_code: Annotated[bool, FREE] = False
    threads: Annotated[SmallCount | None, FREE]
    precision: Literal["auto", "bf16", "fp32"]
    fast: Annotated[Text | Texts | None, FREE]
    solve_packs: Whole | Auto
    features: Annotated[FeatureOptions, FREE]
    optimizer: OptimizerOptions
    train: TrainOptions
    validation: Annotated[ValidationOptions, FREE]

    @field_validator("run")
    @classmethod
    def check_run(cls, run: str) -> str:
        sentence = f"run={run} leaves checkpoints/, where runs are: give a name, or the absolute path of a folder."
        raise_first({sentence: ".." in Path(run).parts and not Path(run).is_absolute()})
        return run

    @field_validator("template")
    @classmethod
    def read_template(cls, template: dict) -> dict:
        return check_template(template)

    @model_validator(mode="after")
    def check_together(self) -> Self:
        start, urls, adapts = self.start_vocab, self.features.urls, self.adapts_target
        here = "for which the target must be in this process: use features.mode=online."
        engine, baseline = self.validation.engine, self.validation.baseline
        size, head = self.train.context_parallel, self.head.drafter["_target_"]
        head_class = self.head.drafter_class
        is_divided = issubclass(head_class, Drafter) and getattr(head_class, "context_kind", "path") != "text"
        served, shared, new = f"features.engine={urls}:", "target.shard=true:", self.start is None and start != "keep"
        wrong = {
            f"start_vocab={start} is for a checkpoint that is trained further: give start=, too.": new,
            # A server reads the texts
            f"{served} the head changes the target, {here}": urls and adapts,
            f"validation.engine={engine}: the head changes the target, and the engine has the original one: leave it "
            "out.": engine is not None and adapts,
            f"validation.baseline={baseline} is compared with an engine: give validation.engine=URL, too.": (
                baseline is not None and engine is None
            ),
            f"{served} target.shard=true keeps the target's layers in these processes, {here}": urls
            and self.target.shard,
            # The target's layers are in parts
            f"{shared} head={head} changes the target, which must then be whole in each "
            "process: set target.shard=false.": self.target.shard and adapts,
            # Processes divide texts
            f"train.context_parallel={size}: head={head} reads whole texts, so processes cannot divide them: leave it "
            "out.": size > 1 and (adapts or not is_divided),
        }
        raise_first(wrong)
        return self

    @property
    def plans_other_machine(self) -> bool:
        """Whether a plan is made for another machine."""
        return self.plan and self.machine.name != THIS_MACHINE

    @property
    def adapts_target(self) -> bool:
        return self.head.drafter_class.adapts_target

    def document(self) -> dict:
        """The options in groups, as conf/train.yaml has them."""
        return self.model_dump(exclude_unset=True, warnings=False)  # about whole numbers in fields of others

    def describe_remedies(self) -> str:
        """The options of this run that lower its need of memory, as words of a sentence."""
        objective, train = self.head.objective, self.train
        lower, give = [f"data.length={self.data.length}"], []
        if train.batch != 1:
            lower.append(f"train.batch={train.batch} (raise train.accumulation={train.accumulation} as much)")
        if getattr(self.head.drafter_class, "depth", 0) is None:
            lower.append(f"head.objective.depth={objective['depth']}")
        if objective.get(CHECKPOINTING) is False:
            give.append(f"head.objective.{CHECKPOINTING}=true")
        if self.start is None and self.head.vocab_size is None:
            give.append("head.vocab_size=32000")
        if self.target.device is None and not self.features.urls:
            give.append("target.device=auto with more GPUs")
        return f"lower {' or '.join(lower)}" + (f", or give {' or '.join(give)}" if give else "")


class RunConfig(RunOptions):
    """The options of a run without auto."""

    head: HeadConfig
    target: RunTargetConfig
    data: DataConfig
    decode: Annotated[RunDraftingConfig, FREE]
    precision: Literal["bf16", "fp32"]
    solve_packs: Whole
    features: Annotated[FeatureConfig, FREE]
    train: TrainConfig
    validation: Annotated[ValidationConfig, FREE]

    @property
    def drafting(self) -> Drafting:
        return Drafting(**self.decode.model_dump())


def _check_arguments(class_or_function: Callable[..., Any], settings: dict, prefix: str) -> None:
    """Raises ValueError for settings that a class does not take. prefix: groups in front of their names"""
    read_options(
        find_options(class_or_function), {name: value for name, value in settings.items() if name != "_target_"}, prefix
    )


def list_auto_options() -> list[str]:
    """Names of the options that a run decides where they are auto."""
    final = list_fields(RunConfig)
    fields = list_fields(RunOptions).items()
    names = [name for name, field in fields if AUTO in {*list_choices(field)} - {*list_choices(final[name])}]
    arguments = [f"head.drafter.{name}" for name in DECIDED_ARGUMENTS]
    return [*names, *arguments, f"head.objective.{CHECKPOINTING}"]


LENGTH_OPTIONS = (
    "train.tokens",
    "train.epochs",
    "train.hours",
)  # options for the length of training, as train.steps is


def read_run(document: dict) -> RunOptions:
    """The options of a run. document: conf/train.yaml with the user's values, in groups; a path may begin with ~

    Raises ValueError, naming the option, for what does not exist or does not fit together.
    """
    if document.get(extensions.TRUST_CODE) is True:
        extensions.trust_code()
    data = {**document["data"], "train": read_weights(document["data"]["train"])}
    options = read_options(RunOptions, files.expand_home({**document, "data": data}))
    refuse_two_lengths(options.train)
    return options


def read_weights(text: Any) -> Any:
    """The weights by source of a text whose keys Hydra's grammar does not have; anything else as it is."""
    if not isinstance(text, str) or not text.startswith("{") or os.path.exists(text):
        return text
    try:
        weights = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    numbers = isinstance(weights, dict) and all(isinstance(each, int | float) for each in weights.values())
    return weights if numbers else text


def refuse_two_lengths(train: TrainOptions) -> None:
    """Raises ValueError where a user says in two ways how long to train."""
    values = {"train.tokens": train.tokens, "train.epochs": train.epochs, "train.hours": train.hours}
    lengths = [name for name, value in values.items() if value not in (None, AUTO)]
    wrong = {
        f"train.steps={train.steps} says how long to train, so {''.join(lengths[:1])} would change nothing: give one "
        "of them.": train.steps != AUTO and lengths,
        "train.tokens and train.epochs both say how much to read: give one of them.": {*LENGTH_OPTIONS[:2]}
        <= {*lengths},
    }
    raise_first(wrong)


def fill_from_record(options: RunOptions, record: dict) -> RunOptions:
    """The options of a resumed run, with the decisions of its first launch in place of auto. record: its config.yaml"""
    document, recorded = options.document(), flatten(record)
    is_open = {name for name, value in flatten(document).items() if value == AUTO}
    if recorded:  # runs of earlier versions, whose heads had no such option
        recorded.setdefault("head.drafter.window", None)
    values = {name: recorded[name] for name in list_auto_options() if name in is_open and name in recorded}
    return read_options(RunOptions, fill(document, values))


def read_settings(path: Path) -> dict:
    """The config.yaml of a run in groups; {} where there is none."""
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


# Settings by dotted name


def list_fixed_settings(document: dict, model: type[Options] = RunOptions, prefix: str = "") -> dict:
    """The settings that a run's figures depend on, by dotted name. document: options in groups"""
    fixed: dict = {}
    for key, value in document.items():
        field = model.model_fields.get(key, FieldInfo())
        group = find_group(field)
        if FREE in field.metadata:
            continue
        if group is not None:
            fixed |= list_fixed_settings(value or {}, group, f"{prefix}{key}.")
        else:
            fixed |= flatten({key: value}, prefix)
    return fixed
