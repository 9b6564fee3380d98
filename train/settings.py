"""Settings of the training loop."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """conf/train.yaml, `train`; train/ranges.py has checked them. Every unit is a step of the optimizer unless it says otherwise."""

    steps: int
    batch: int  # packs for each process and micro-batch
    accumulation: int  # micro-batches in a step
    max_grad_norm: float  # 0: gradients are not clipped
    log_every: int  # 0, here and below: never but at the end
    validate_every: int
    validate_first: bool  # before training too
    save_every: int | None  # None or 0: by minutes only
    save_minutes: float | None  # None or 0: by steps only; neither: at the end and after a signal
    best_by: str  # the figure that chooses the best checkpoint: tau or speedup
    skip_not_finite: bool  # leave out a step whose loss is not finite, rather than stop
    timeout: float  # minutes that a process waits for the others
    seed: int
    shard: bool = False  # each process keeps a part of the drafter and of its training state (FSDP2)
    ema: float | None = None  # decay of the average of the weights; None: none is kept

    @property
    def limit(self) -> float:
        """Of the gradient's norm; infinite: it is not clipped."""
        return self.max_grad_norm or math.inf


def fixed(config: dict) -> dict:
    """The settings that a run's figures depend on, by dotted name."""
    free: tuple[str, ...] = ("resume", "tracker", "threads", "features", "decode", "validation", "run", "progress")
    free += ("target.device", "target.tp", "target.shard", "target.trust_remote_code")
    # What is read, a stream and its buffer too, is in the fingerprint
    free += tuple(f"data.{key}" for key in ("split", "heldout_split", "cache", "workers", "ahead", "stream", "buffer"))
    freely = (
        "log_every validate_every validate_first save_every save_minutes best_by timeout skip_not_finite shard".split()
    )
    free += tuple(f"train.{key}" for key in freely)
    return flat(config, without=free)


INPUTS = {  # digests among the settings of a run; earlier versions recorded only the data
    "data": "the training data",
    "files": "the files of the training data",
    "target": "the target's weights",
    "embeddings": "the target's embeddings",
    "heldout": "the held-out prompts",
}


def flat(config: dict, prefix: str = "", *, without: tuple[str, ...] = ()) -> dict:
    """Settings by dotted name. without: names of settings and of groups that are left out"""
    found: dict = {}
    for key, value in config.items():
        if prefix + key not in without:
            inner = isinstance(value, dict)
            found |= flat(value, f"{prefix}{key}.", without=without) if inner else {prefix + key: value}
    return found
