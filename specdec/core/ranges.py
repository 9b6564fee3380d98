"""What every option may be: of conf/*.yaml, of conf/proposer, and the numbers of the scripts' options. One table for all commands, because
the same word means the same thing everywhere.

An option is looked up by its full name, then without the groups in front: head.drafter.window, drafter.window, window. A name that ends
with * stands for all options of a group. Draft.num_layers is that of the class Draft alone.
"""

import contextlib
import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

LARGEST, HUGE = 2**53, 1e30  # whole numbers, and others, for which nothing else is said
Value = Any  # as OmegaConf's containers hold it: a number, text, true or false, null, a list or a dict


@dataclass(frozen=True)
class Range:
    """kind: int, float, bool, str or dict; None: anything. choices: the only values, instead of a kind

    least, most: of numbers; above, below: whether these bounds themselves are left out. null, auto: whether these words are allowed
    lists: no, also (one value or a list), only (a list), weighted (also, or values by weight)
    num: values of such a list; None: one or more; empty: whether none at all mean something, too
    """

    kind: type | None = None
    choices: tuple = ()
    least: float = -HUGE
    most: float = HUGE
    above: bool = False
    below: bool = False
    null: bool = False
    auto: bool = False
    lists: str = "no"
    num: int | None = None
    empty: bool = False

    @property
    def or_null(self) -> "Range":
        return replace(self, null=True)

    @property
    def or_auto(self) -> "Range":
        return replace(self, auto=True)

    @property
    def or_list(self) -> "Range":
        return replace(self, lists="also")

    @property
    def or_empty(self) -> "Range":
        return replace(self, empty=True)

    def list_of(self, num: int | None = None) -> "Range":
        return replace(self, lists="only", num=num)

    @property
    def text(self) -> bool:
        """Whether a value stays as it is written on the command line."""
        return self.kind is str and not self.choices

    def fits(self, value: Value) -> bool:
        if value is None or self.kind is None:
            return self.null or self.kind is None
        if self.auto and value == "auto":
            return True
        if isinstance(value, dict):
            return self.kind is dict or (self.lists == "weighted" and bool(value))
        if isinstance(value, list | tuple):
            return self.lists != "no" and self._fits_number(len(value)) and all(map(self._fits, value))
        return self.lists != "only" and self._fits(value)

    def _fits_number(self, num: int) -> bool:
        """Whether a list may have so many values."""
        return self.num == num or (self.num is None and (num > 0 or self.empty))

    def _fits(self, value: Value) -> bool:
        if self.choices:
            return any(value == each and type(value) is type(each) for each in self.choices)
        if self.kind is str:
            return isinstance(value, str) and value != ""
        if self.kind is bool:
            return isinstance(value, bool)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float if self.kind is float else int)
            or self.kind is dict
        ):
            return False
        enough = value > self.least if self.above else value >= self.least  # false for NaN
        return enough and (value < self.most if self.below else value <= self.most)

    def words(self, value: Value) -> str:
        """What an option must be, when it is `value`."""
        if self.choices:
            said = [show(each) for each in (*self.choices, *([None] if self.null else []))]
            return " or ".join(said) if len(said) < 3 else f"one of {', '.join(said)}"
        kinds: dict = {str: "a text that is not empty", bool: "true or false", dict: "settings, such as {r: 8}"}
        one = kinds.get(self.kind) or self._number(value)
        many = (
            f"a list of {self.num or 'one or more values'}, each {one}"
            if self.kind is not str
            else "a list of one or more texts, such as [q_proj,v_proj]"
        )
        also = f"{one}, or a list of one or more of these"
        one = {
            "no": one,
            "also": also,
            "only": many,
            "weighted": f"{also}, or sources with their weights, such as {{a.jsonl: 2, b.jsonl: 0.5}}",
        }[self.lists]
        words = [word for word, allowed in (("auto", self.auto), ("null", self.null)) if allowed]
        return ", or ".join([one, *words])

    def _number(self, value: Value) -> str:
        one = "a whole number" if self.kind is int else "a number"
        if self.most in (LARGEST, HUGE) and not (isinstance(value, int | float) and value > self.most):
            if self.least in (-LARGEST, -HUGE):
                return one
            return f"{one} above {self.least}" if self.above else f"{one} of {self.least} or more"
        if self.above or self.below:
            most = f"below {self.most}" if self.below else f"at most {self.most}"
            return f"{one} {'above' if self.above else 'of at least'} {self.least} and {most}"
        return f"{one} from {self.least} to {self.most}"


def whole(least: int = -LARGEST, most: int = LARGEST) -> Range:
    return Range(int, least=least, most=most)


def number(least: float = -HUGE, most: float = HUGE, *, above: bool = False, below: bool = False) -> Range:
    return Range(float, least=least, most=most, above=above, below=below)


def choice(*choices: Value) -> Range:
    return Range(type(choices[-1]), choices)


FLAG, TEXT, GROUP, ANY = Range(bool), Range(str), Range(dict), Range()
POSITIVE, SHARE = number(0, above=True), number(0, 1)
LONG = number(0, 10**6, above=True)  # seconds or minutes
COUNT, SIZE, FEW, EVERY = whole(1), whole(1, 2**20), whole(1, 1024), whole(0)

RANGES = {
    # A run
    "run": TEXT, "start": TEXT.or_null, "start_vocab": choice("keep", "data"), "resume": choice(True, False, "auto"),
    "plan": FLAG, "machine.name": TEXT, "machine.device": choice("cpu", "cuda").or_null, "machine.num": FEW.or_null, "machine.*": POSITIVE.or_null,
    "target.tried": TEXT.or_null, "target.outline": GROUP.or_null, "tracker": choice("none", "wandb", "tensorboard", "trackio"), "progress": choice("auto", "rich", "plain", "quiet"),
    "template": GROUP, "template.*": ANY, "threads": FEW.or_null, "precision": choice("auto", "bf16", "fp32"), "fast": TEXT.or_list.or_null, "solve_packs": whole(0).or_null, "_target_": TEXT,
    # The target
    "target.name": TEXT, "target.revision": TEXT.or_null, "target.device": TEXT.or_null, "target.shard": FLAG,
    "target.dtype": choice("auto", "bfloat16", "float32", "float16", "float64"), "trust_remote_code": FLAG,
    # Data and features
    "data.train": Range(str, lists="weighted"), "data.heldout": TEXT, "split": TEXT.or_null, "heldout_split": TEXT.or_null, "length": COUNT, "pack": FLAG.or_null,
    "limit": COUNT.or_null, "hold_out": whole(0), "data.tokens": COUNT.or_null, "data.length": COUNT.or_auto,
    "cache": TEXT, "workers": FEW.or_null,
    "features.mode": choice("auto", "cached", "online", "engine"), "features.engine": TEXT.or_list.or_null,
    "in_flight": whole(1, 65536), "features.folder": TEXT,
    # Optimizer and loop
    "optimizer.name": choice("adamw", "adamw8bit", "muon"), "lr": number(0), "muon_lr": number(0).or_null,
    "betas": number(0, 1, below=True).list_of(2), "weight_decay": number(0), "schedule": choice("cosine", "linear", "wsd", "constant"),
    "warmup": number(0), "optimizer.decay": number(0, 1, above=True), "final": SHARE, "steps": COUNT, "batch": whole(1, 65536),
    "train.steps": COUNT.or_auto, "train.tokens": COUNT.or_null, "train.epochs": POSITIVE.or_auto, "train.hours": POSITIVE.or_auto.or_null,
    "train.batch": whole(1, 65536).or_auto, "accumulation": whole(1, 65536).or_auto, "max_grad_norm": number(0), "log_every": EVERY, "train.validate_every": EVERY.or_auto, "save_every": EVERY.or_null,
    "save_minutes": number(0).or_null,
    "validate_first": FLAG, "patience": COUNT.or_null, "skip_not_finite": FLAG, "timeout": LONG,
    "seed": whole(0, 2**32 - 1), "ema": number(0, 1, above=True, below=True).or_null,
    # Validation
    "num_prompts": COUNT.or_null, "max_new_tokens": COUNT, "validation.num_prompts": COUNT.or_null.or_auto, "validation.max_new_tokens": COUNT.or_auto, "temperature": number(0), "validation.decode": choice("best", "end", "always"),
    "validation.auto": choice("never", "end"), "validation.share": number(0).or_null,
    "validation.answers": TEXT,
    # Heads
    "vocab_size": COUNT.or_null, "head.vocab_size": COUNT.or_null.or_auto, "delay": whole(0), "num_drafts": FEW, "num_layers": FEW, "Draft.num_layers": FEW.or_null,
    "num_heads": FEW, "num_blocks": whole(0, 1024), "num_modules": FEW.or_null, "lora_rank": SIZE, "lora_alpha": POSITIVE,
    "lora_modules": TEXT.list_of(), "target_layers": whole().list_of().or_null, "copy_layers": whole().list_of().or_empty.or_null,
    "full_layers": whole(0).list_of().or_empty.or_null, "intermediate_size": SIZE.or_null, "drafter.width": SIZE.or_null,
    "dependence": GROUP.or_null, "dependence.*": ANY, "dependence.kind": TEXT, "dependence.table": FLAG, "convolution": FEW.or_null,
    "dependence.rank": SIZE, "dependence.top": whole(2), "dependence.hidden": SIZE.or_null, "dependence.form": choice("plain", "gated", "rnn"),
    "drafter.window": whole(2).or_null, "mask_token": whole(0).or_null, "drafter.model": TEXT.or_null,
    "lora": GROUP.or_null, "borrow_embeddings": FLAG.or_null,
    **dict.fromkeys(
        "anchor_predicts fuse confidence window_causal own_output norm_features norm_output zero_first "
        "attention_bias gradient_checkpointing".split(),
        FLAG,
    ),
    "NativeMTP.lora_rank": SIZE.or_null, "NativeMTP.zero_first": FLAG.or_null, "recycle_norm": FLAG.or_null,
    "drafter.source": TEXT.or_null, "drafter.layout": TEXT.or_null,
    "drafter.own_output": FLAG.or_null, "drafter.norm_features": FLAG.or_null, "drafter.norm_output": FLAG.or_null,
    "compile": FLAG.or_null, "cuda_graphs": FLAG.or_null,
    # Objectives
    "losses.*": number(0), "decay": number(0), "weighting": choice("decay", "dpace", "vat"), "objective.temperature": POSITIVE,
    "eta": number(0), "noise": number(0), "supervise": choice("answers", "text"), "anchors": COUNT.or_null,
    "keep": number(0, 1, above=True), "chunk": COUNT.or_null, "passes": whole(0, 1024),
    # Decoding
    "depth": FEW, "decode.depth": FEW.or_auto, "width": FEW, "nodes": whole(1, 65536).or_null, "children": choice("distinct", "chosen"),
    "rule": choice("token", "block"), "top_k": COUNT.or_null, "top_p": number(0, 1, above=True).or_null,
    "repetition_penalty": POSITIVE,
    # Proposers
    "members": TEXT.or_list, "inner": TEXT, "proposer.costs": TEXT.or_null, "choose": FLAG, "num": COUNT, "sinks": whole(0), "window": COUNT,
    "proposer.model": TEXT, "proposer.checkpoint": TEXT.or_null, "proposer.decode": ANY,
    "proposer.layers": whole().or_list.or_null, "ngram": whole(2, 1024), "guesses": whole(0), "datastore": TEXT.or_null,
    "min": FEW, "max": FEW, "samples": COUNT, "factor": number(0), "offset": number(0), "least": number(0, 1, below=True), "memory": whole(0),
    # Numbers of the scripts alone
    **dict.fromkeys(
        "judged max_length max_model_len prefill_tokens prompt queue rounds rows tokens max_tokens".split(),
        COUNT,
    ),
    **dict.fromkeys("minutes watch".split(), LONG),
    "epochs": POSITIVE, "tp": FEW, "min_tokens": whole(0), "row": whole(0),
    "port": whole(0, 65535), "old_share": number(0, 1, below=True),
    "heldout_share": number(0, 1, below=True), "tolerance": number(0),
}  # fmt: skip


def find(name: str) -> Range | None:
    """The declaration of an option; None if it has none."""
    parts = name.split(".")
    for start in range(len(parts)):
        for last in (parts[-1], "*"):
            found = RANGES.get(".".join([*parts[start:-1], last]))
            if found is not None:
                return found
    return None


def check(settings: dict, *, free: tuple[str, ...] = ()) -> None:
    """Raises ValueError, with its name, for the first option that is not what it may be, or that does not exist.

    settings: in groups, or by dotted name; free: beginnings of names that need no declaration
    """
    for name, value, declared in _options(settings):
        if declared is None and not name.startswith(free):
            close = difflib.get_close_matches(name.rpartition(".")[2], RANGES, n=1)
            raise ValueError(
                f"There is no option {name!r}.{f' Did you mean {close[0]!r}?' if close else ''} See --help."
            )
        if declared is not None and not declared.fits(value):
            raise ValueError(f"{name}={show(value)} must be {declared.words(value)}.")


def _options(settings: dict, prefix: str = "") -> Iterator[tuple[str, Value, Range | None]]:
    owner = str(settings.get("_target_")).rpartition(".")[2]
    for key, value in settings.items():
        declared = RANGES.get(f"{owner}.{key}") or find(f"{prefix}{key}")
        if isinstance(value, dict) and declared is None:
            yield from _options(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, declared


def show(value: Value) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(wrong: dict[str, Any]) -> None:
    """Raises ValueError with the first sentence whose condition holds."""
    for sentence, applies in wrong.items():
        if applies:
            raise ValueError(sentence)


@contextlib.contextmanager
def named(prefix: str, *, only: Collection[str] | None = None) -> Iterator[None]:
    """Within, a ValueError that names an argument, `depth=`, names the option of this group instead, `decode.depth=`.

    A name that has a prefix already, and a value behind an equals sign, are left alone. only: the arguments that belong
    to this group; None: all.
    """

    def add_prefix(match: re.Match) -> str:
        name = match[1]
        return f"{prefix}.{name}=" if only is None or name in only else match[0]

    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"(?<![\w.=/'\"-])([a-z]\w*)=", add_prefix, str(error))) from error
