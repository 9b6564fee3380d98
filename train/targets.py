"""The target of a training run: loaded as its settings say, or refused with what to change."""

from typing import Any

from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.target import Target, load_tokenizer
from train.feature_settings import FeatureSettings
from train.naming import named


def load_target(config: DictConfig, accelerator: Accelerator) -> tuple[Target, PreTrainedTokenizerBase]:
    device = config.target.device
    if device not in (None, "auto"):
        raise ValueError(f"target.device={device} must be null (where the head trains) or auto (over all GPUs).")
    if device == "auto" and accelerator.num_processes > 1:
        raise ValueError(
            f"target.device=auto spreads one target over all GPUs, and {accelerator.num_processes} processes would each "
            "load one: use accelerate launch --num_processes 1, or target.device=null."
        )
    engine = feature_settings(config).urls
    if config.target.shard:
        check_shard(config)
    origin = {key: config.target[key] for key in ("revision", "trust_remote_code")}
    with named("target"):
        given = {"dtype": config.target.dtype, "device": device or accelerator.device, **origin}
        if engine:
            target = Target.load_ends(config.target.name, **given | {"device": accelerator.device})
        elif config.target.shard:
            target = Target.load_sharded(config.target.name, **given)
        else:
            target = Target.load(config.target.name, tp=config.target.tp, **given)
        return target, load_tokenizer(config.target.name, **origin)


def check_shard(config: DictConfig) -> None:
    """Raises ValueError for what a target with its layers in parts over all processes cannot do."""
    if config.target.tp > 1:
        raise ValueError(
            f"target.tp={config.target.tp} cuts a target over some processes that read the same, and target.shard=true keeps its "
            "layers in parts over all of them: use one of the two."
        )
    if checkpoint.drafter_class(config.head.drafter._target_).adapts_target:
        raise ValueError(
            f"target.shard=true: head={config.head.drafter._target_} changes the target, which must then be whole in each process: "
            "set target.shard=false."
        )
    if config.train.best_by == "speedup":
        raise ValueError(
            "target.shard=true: train.best_by=speedup would measure how fast layers are gathered for each pass, and not how fast "
            "drafts are: use train.best_by=tau."
        )
    if config.data.on_policy and config.features.mode != "online":
        raise ValueError(
            f"target.shard=true: with data.on_policy={config.data.on_policy} some processes read files while others need the "
            "target: use features.mode=online."
        )


def feature_settings(config: DictConfig) -> FeatureSettings:
    """Raises ValueError for what only a target in this process can do, if a server is to read the texts."""
    given: Any = OmegaConf.to_container(config.features, resolve=True)
    with named("features"):
        settings = FeatureSettings(**given)
    adapts = checkpoint.drafter_class(config.head.drafter._target_).adapts_target
    needed = [
        (adapts, "the head changes the target"),
        (config.data.on_policy, "data.on_policy lets the target judge texts that the draft writes"),
        (config.train.best_by != "tau", f"train.best_by={config.train.best_by} is measured by decoding"),
        (config.target.tp > 1, f"target.tp={config.target.tp} cuts a target in these processes"),
        (config.target.shard, "target.shard=true keeps the target's layers in these processes"),
    ]
    for applies, reason in needed:
        if settings.urls and applies:
            raise ValueError(
                f"features.engine={settings.urls}: {reason}, for which the target must be in this process: use "
                "features.mode=online."
            )
    return settings
