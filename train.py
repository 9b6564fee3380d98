"""accelerate launch train.py head=eagle    trains a drafter; validation decodes."""

import os
import sys
import warnings
from pathlib import Path

import hydra
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from specdec import checkpoint, rules
from specdec.drafter import Head
from specdec.evaluate import Drafting, Prompt, measure, summarise
from specdec.sampling import Sampling
from specdec.target import Target, load_tokenizer
from train import data, display, reading
from train.features import Cached, Online
from train.onpolicy import OnPolicy
from train.trainer import Settings, Trainer, parameter_groups, schedule


def fit(config: DictConfig) -> int:
    """Trains as the configuration says; ValueError says what to change. -> the exit status"""
    folder = Path("checkpoints") / str(config.run)
    display.check_folder(folder, resume=config.resume)
    os.environ.setdefault("WANDB_MODE", "online" if display.wandb_logged_in() else "offline")
    set_seed(config.train.seed)
    transformers.utils.logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # said outright, or several processes would not find each other
        mixed_precision={"bf16": "bf16", "fp32": "no"}[config.precision],
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=folder,
    )
    if accelerator.device.type == "cpu":  # the launcher sets one thread a process
        torch.set_num_threads(config.threads or max(1, os.cpu_count() // accelerator.num_processes))
    main = accelerator.is_main_process
    console = Console(quiet=not main)
    drafting = Drafting(**OmegaConf.to_container(config.decode))
    sampling = Sampling(temperature=config.validation.temperature)

    target = Target.load(
        config.target.name, dtype=config.target.dtype, revision=config.target.revision, device=accelerator.device
    )
    tokenizer = load_tokenizer(config.target.name, revision=config.target.revision)
    stop = data.stop_tokens(tokenizer, target.model.generation_config)
    conversations = reading.load_conversations(config.data.train, split=config.data.split, limit=config.data.limit)
    _, conversations = reading.hold_out(conversations, config.data.hold_out)
    encoded = data.first_tokens([data.encode(tokenizer, row) for row in conversations], config.data.tokens)
    packs = data.Packs(encoded, length=config.data.length)
    prompts = [
        Prompt(row["id"], row["category"], data.encode_prompt(tokenizer, row["messages"]))
        for row in reading.spread(reading.load_prompts(config.data.heldout), config.validation.num_prompts)
    ]
    drafter, spec = make_drafter(config, target, packs)
    drafter.to(accelerator.device)
    objective = instantiate(config.head.objective, drafter, _convert_="all")
    optimizer = torch.optim.AdamW(
        parameter_groups(drafter, config.optimizer.weight_decay, adapter=config.head.get("adapter")),
        lr=config.optimizer.lr,
        betas=tuple(config.optimizer.betas),
        fused=True,
    )
    scheduler = schedule(
        optimizer, steps=config.train.steps, warmup=config.optimizer.warmup, final=config.optimizer.final
    )
    collate = lambda indices: data.collate([packs[i] for i in indices], length=config.data.length, pad_token=0)
    display.start(console, config, target, drafter, packs, prompts)

    if drafter.adapts_target and "adapter" not in config.head:
        raise ValueError("A head that adapts the target needs head.adapter: {lr, delay}, see conf/head/medusa2.yaml.")
    drafting.decoder(
        target, drafting.proposer(drafter), sampling=sampling, stop=stop
    )  # refuses now what validation would refuse later
    if drafter.adapts_target:
        features = None  # the objective reads the target itself, with gradient
    elif config.features.mode == "online":
        features = Online(target, drafter.target_layers)
    else:
        features = Cached(
            target,
            drafter.target_layers,
            packs=packs,
            length=config.data.length,
            folder=Path(config.features.folder),
            also=config.features.layers,
        )
        if features.num_missing:
            console.print(
                f"features up to {features.num_bytes / 1e9:.2f} GB will be written to {config.features.folder} as they are needed"
            )
        if main:
            features.open()
        accelerator.wait_for_everyone()

    on_policy = None
    if config.data.on_policy:
        on_policy = OnPolicy(
            drafter,
            packs,
            length=config.data.length,
            fraction=config.data.on_policy,
            temperature=config.data.on_policy_temperature,
            stop=stop,
        )

    def validate(frozen) -> dict:
        rows = measure(
            target,
            drafting.proposer(frozen),
            drafting,
            prompts,
            replayed=frozen,
            sampling=sampling,
            max_new_tokens=config.validation.max_new_tokens,
            stop=stop,
            seed=config.train.seed,
        )
        summary = summarise(
            rows,
            depth=drafting.depth,
            temperature=sampling.temperature,
            adapted=target.adapted,
            lossy=drafting.rule in rules.LOSSY,
        )
        display.validation(console, summary, drafting.shape)
        return {"shape": str(drafting.shape), **summary}

    about = flatten(OmegaConf.to_container(config, resolve=True))
    trainer = Trainer(
        accelerator,
        objective,
        optimizer,
        scheduler,
        packs=packs,
        collate=collate,
        features=features,
        on_policy=on_policy,
        validate=validate,
        settings=Settings(**config.train),
        spec=spec,
        about=about,
        folder=folder,
    )
    if not (config.resume and trainer.resume()) and config.start is None:
        trainer.solve(config.solve_packs)
    if main:
        OmegaConf.save(config, folder / "config.yaml", resolve=True)
    plain = {key: value if isinstance(value, int | float | str) else str(value) for key, value in about.items()}
    accelerator.init_trackers("specdec", plain, {"wandb": {"name": str(config.run)}})
    trainer.fit()
    accelerator.end_training()
    display.end(console, folder, trainer)
    return 130 if trainer.interrupted else 0


def make_drafter(config: DictConfig, target: Target, packs: data.Packs) -> tuple[Head, dict]:
    """A fresh drafter as the configuration says, or that of the checkpoint `start`, and its spec for checkpoints."""
    spec = OmegaConf.to_container(config.head.drafter)
    if config.start is None:
        vocab = data.frequent_tokens(packs, config.head.vocab_size, num_tokens=target.vocab_size)
        return instantiate(config.head.drafter, target, vocab=vocab, _convert_="all"), spec
    drafter, found = checkpoint.start(config.start, target)
    if found["_target_"] != spec["_target_"]:
        raise ValueError(
            f"start={config.start} holds {found['_target_']} and head={config.head.drafter._target_}: give head= the family "
            "of the checkpoint. Its sizes and vocabulary are then the checkpoint's, the objective is the head's."
        )
    return drafter, found


def flatten(config: dict, prefix: str = "") -> dict:
    """The settings that a run's figures depend on, by dotted name."""
    free = ("resume", "tracker", "threads", "features", "decode", "validation", "run", "head.objective._target_")
    free += tuple(f"train.{key}" for key in ("log_every", "validate_every", "validate_first", "save_every", "best_by"))
    flat = {}
    for key, value in config.items():
        if prefix + key not in free:
            flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    try:
        status = fit(config)
    except InstantiationException as error:
        if not isinstance(error.__cause__, ValueError | TypeError):
            raise
        status = f"error: {error.__cause__}"
    except (ValueError, OSError) as error:
        status = f"error: {error}"
    except KeyboardInterrupt:
        status = "Stopped at once. resume=true continues from the last save."
    sys.exit(status)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(print(__doc__, display.usage(Path(__file__).parent / "conf"), sep="\n"))
    main()
