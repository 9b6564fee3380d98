"""Settings of the training loop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """conf/train.yaml, `train`. Every unit is a step of the optimizer unless it says otherwise."""

    steps: int
    batch: int  # packs for each process and micro-batch
    accumulation: int  # micro-batches in a step
    max_grad_norm: float
    log_every: int
    validate_every: int
    validate_first: bool  # before training too
    save_every: int
    best_by: str  # the figure that chooses the best checkpoint: tau or speedup
    skip_not_finite: bool  # leave out a step whose loss is not finite, rather than stop
    timeout: float  # minutes that a process waits for the others
    seed: int
    shard: bool = False  # each process keeps a part of the drafter and of its training state (FSDP2)
    ema: float | None = None  # decay of the average of the weights; None: none is kept

    def __post_init__(self):
        if self.best_by not in ("tau", "speedup"):
            raise ValueError(f"best_by={self.best_by} must be tau or speedup.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema={self.ema} must lie between 0 and 1, such as 0.999; null: no average.")


def fixed(config: dict) -> dict:
    """The settings that a run's figures depend on, by dotted name."""
    free: tuple[str, ...] = ("resume", "tracker", "threads", "features", "decode", "validation", "run", "progress")
    free += ("target.device", "target.tp", "target.shard", "target.trust_remote_code")
    # What is read, a stream and its buffer too, is in the fingerprint
    free += tuple(f"data.{key}" for key in ("split", "heldout_split", "cache", "workers", "ahead", "stream", "buffer"))
    freely = "log_every validate_every validate_first save_every best_by timeout skip_not_finite shard".split()
    free += tuple(f"train.{key}" for key in freely)
    return flat(config, without=free)


def flat(config: dict, prefix: str = "", *, without: tuple[str, ...] = ()) -> dict:
    """Settings by dotted name. without: names of settings and of groups that are left out"""
    found: dict = {}
    for key, value in config.items():
        if prefix + key not in without:
            inner = isinstance(value, dict)
            found |= flat(value, f"{prefix}{key}.", without=without) if inner else {prefix + key: value}
    return found
