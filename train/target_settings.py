"""The target of a run, as conf/target says."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from specdec.target.model import Target, load_tokenizer
from train.data import rows as data


@dataclass(frozen=True)
class TargetSettings:
    """conf/target. Raises ValueError for what does not fit together."""

    name: str
    revision: str | None
    dtype: str
    device: str | None
    tp: int
    shard: bool
    trust_remote_code: bool

    def __post_init__(self):
        if self.device not in (None, "auto"):
            raise ValueError(f"device={self.device} must be null (where the head trains) or auto (over all GPUs).")
        if self.shard and self.tp > 1:
            raise ValueError(
                f"tp={self.tp} cuts a target over some processes that read the same, and shard=true keeps its layers in parts over "
                "all of them: use one of the two."
            )

    def check(self, *, head: str, adapts: bool, best_by: str, on_policy: float, mode: str) -> None:
        """Raises ValueError for what a target with its layers in parts over all processes cannot do in a run with these settings.

        adapts: whether the head changes the target; best_by: of `train`; on_policy: of `data`; mode: of `features`
        """
        if self.shard and adapts:
            raise ValueError(
                f"target.shard=true: head={head} changes the target, which must then be whole in each process: set "
                "target.shard=false."
            )
        if self.shard and best_by == "speedup":
            raise ValueError(
                "target.shard=true: train.best_by=speedup would measure how fast layers are gathered for each pass, and not how "
                "fast drafts are: use train.best_by=tau."
            )
        if self.shard and on_policy and mode != "online":
            raise ValueError(
                f"target.shard=true: with data.on_policy={on_policy} some processes read files while others need the target: use "
                "features.mode=online."
            )

    def load(self, device: torch.device, *, num_processes: int, ends: bool) -> tuple[Target, PreTrainedTokenizerBase]:
        """device: of this process; ends: only what is before and behind the layers, which a server has"""
        if self.device == "auto" and num_processes > 1:
            raise ValueError(
                f"device=auto spreads one target over all GPUs, and {num_processes} processes would each load one: use accelerate "
                "launch --num_processes 1, or device=null."
            )
        if self.shard and not ends:
            load: Callable[..., Target] = Target.load_sharded
        else:
            load = Target.load_ends if ends else functools.partial(Target.load, tp=self.tp)
        where = device if ends else self.device or device
        revision, trusted = self.revision, self.trust_remote_code
        tokenizer = load_tokenizer(self.name, revision=revision, trust_remote_code=trusted)
        data.check_offsets(tokenizer)
        return load(self.name, dtype=self.dtype, device=where, revision=revision, trust_remote_code=trusted), tokenizer


def packs_rows(target: Target, *, length: int, pack: bool | None) -> bool:
    """Whether rows of `length` tokens hold several conversations. pack: as the user wishes; None: if the target can read them so

    Raises ValueError for a length, or for packing, that the target cannot read.
    """
    limit, boundary = target.max_positions, target.rotary_boundary
    if limit is not None and length > limit:
        raise ValueError(f"data.length={length}: {target.name} reads {limit} positions, so lower it to at most that.")
    if boundary is not None and length > boundary:
        raise ValueError(
            f"data.length={length}: {target.name} turns keys by other angles in texts longer than {boundary} tokens "
            "(LongRoPE), and would in all rows of a batch at once: lower it to at most that."
        )
    if pack and target.recurrent:
        raise ValueError(
            f"data.pack=true: {target.name} has recurrent or convolution layers, whose state would run from one conversation into "
            "the next. Leave data.pack=null, which then gives each conversation a row of its own."
        )
    return not target.recurrent if pack is None else pack
