"""accelerate launch train.py head=eagle    trains a drafter; validation decodes.

python train.py -m head=eagle,mtp optimizer.lr=3e-4,1e-3    trains several, one after the other, and compares them (docs/tracking.md)."""

import specdec.core.threads  # noqa: F401  says how threads wait, before torch is imported

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import hydra
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, set_seed
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, files
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Head
from specdec.measuring.measurement import Prompt, check_prompts
from specdec.measuring.report import Report
from specdec.target.model import Target
from train import display, multirun, optimization, overrides, progress, ranges, sharding, starting, tracking
from train.consistency import ConsistencyObjective
from train.data import reading
from train.data import rows as data
from train.data.encoding import Encoding, load_packs
from train.data.loader import Material, permutation
from train.data.packing import Packs
from train.data.stream import Plan, Stream
from train.feature_settings import FeatureSettings
from train.features.engine_features import EngineTarget
from train.finite import NotFiniteLoss
from train.group import Group
from train.lock import lock
from train.naming import named
from train.objective import Objective
from train.onpolicy import OnPolicy
from train.optimization import OptimizerSettings, schedule
from train.pages import facts
from train.pages.run_page import worth
from train.pages.samples import write_page
from train.processes import is_main, plain_warnings
from train.run_folder import RunFolder
from train.serving import Serving
from train.settings import Settings, fixed
from train.target_settings import TargetSettings, packs_rows
from train.trainer import MEASURED, Trainer
from train.validation import Validation
from train.validation_settings import ValidationSettings
from train.waiting import ProcessLost, Waiting

# An error that all processes find is told by the main one, and the launcher then ends the others. They wait so long with theirs.
SECONDS_FOR_MAIN = 10


def fit(config: DictConfig) -> int:
    """Trains as the configuration says. -> the exit status. Raises ValueError, which says what to change."""
    try:
        chosen = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    ranges.check(chosen, free=("head.",))  # a new head has options of its own
    path = Path("checkpoints") / str(config.run)
    progress.choose(config.progress, main=is_main())
    starting.recall_precision(config, path)
    if RunFolder(path, {}, fixed(OmegaConf.to_container(config, resolve=True))).check(resume=config.resume):
        if is_main():
            print(f"{path} holds a finished run: there is nothing left to do.")
        return 0
    tracking.check(config.tracker)
    accelerator = make_accelerator(config)
    with lock(path / "lock", of=path) if accelerator.is_main_process else contextlib.nullcontext():
        try:
            return fit_alone(config, path, accelerator)
        except (RuntimeError, MemoryError) as error:
            if (full := devices.out_of_memory(error)) is None:
                raise
            raise ValueError(f"{full}: {less_memory(config)}.") from error


def fit_alone(config: DictConfig, path: Path, accelerator: Accelerator) -> int:
    """`fit` in a folder that no other launch writes to."""
    console = progress.Results()
    given = config.start
    pinned = starting.pinned(given, path, resume=config.resume, minutes=config.train.timeout)
    config.start = overrides.literals(pinned)
    target, tokenizer = load_target(config, accelerator)
    stop = data.stop_tokens(tokenizer, target.model.generation_config)
    loaded = load_data(config, tokenizer, target, accelerator)
    packs, stream = (loaded.first, loaded) if isinstance(loaded, Stream) else (loaded, None)
    rows = reading.load_prompts(config.data.heldout, split=config.data.heldout_split)
    with reading.at(str(config.data.heldout)):
        prompts = encode_prompts(config, tokenizer, packs, reading.spread(rows, config.validation.num_prompts))
    drafter, spec = make_drafter(config, target, packs)
    drafter.to(accelerator.device)
    with named("features"):
        engine = feature_settings(config).connect(drafter, say=console.say)
    objective = make_objective(config, drafter)
    optimizer, scheduler = make_optimizer(config, drafter)
    settings = make_settings(config)
    if settings.shard:
        with named("train"):
            sharding.check(drafter, optimizer=config.optimizer.name, on_policy=config.data.on_policy)
    display.start(progress.note, config, target, drafter, packs, prompts)
    validation = make_validation(config, drafter, prompts, stop, accelerator, console, engine)
    material = make_material(config, drafter, packs, stream, stop, accelerator, engine)
    tracker = tracking.Tracking(config.tracker if accelerator.is_main_process else "none", path)
    inputs = {"heldout": reading.digest_of(rows), **target_inputs(target), "files": stream and stream.files}
    folder = RunFolder(path, spec, fixed(OmegaConf.to_container(config, resolve=True)) | inputs)
    trainer = Trainer(
        accelerator, objective, optimizer, scheduler, material=material, validation=validation, settings=settings, folder=folder,
        serve=make_serve(config, console.say), record=tracker.record,
    )  # fmt: skip
    if not (config.resume and trainer.resume()):
        trainer.prepare(config.solve_packs if config.start is None else 0, fresh=config.start is None)
    if accelerator.is_main_process:
        files.write_text(path / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        settings_used = OmegaConf.to_container(config, resolve=True)
        facts.write(
            path, settings_used, drafter, packs, arguments=multirun.arguments(str(config.run)),
            num_prompts=len(prompts), num_processes=accelerator.num_processes, start=given,
        )  # fmt: skip
    with tracker.running(str(config.run), trainer.folder.settings, step=trainer.step):
        fit_trainer(trainer)
        if accelerator.is_main_process and trainer.best:
            page = write_page(path, validation, tokenizer, prompts=config.data.heldout, split=config.data.heldout_split)
            console.say(f"report: {page}")
            report = checkpoint.read_json(page.with_name("report.json"))
            tracker.report(trainer.step, "best", report)
            tracker.page(trainer.step, page, worth(Report.from_json(report))[1])
    display.end(console, trainer)
    return 130 if trainer.interrupted == signal.SIGINT else 0  # a scheduler is to see that all is well


def less_memory(config: DictConfig) -> str:
    """Which options of this run lower the memory that it needs."""
    objective, train = config.head.objective, config.train
    lower, give = [f"data.length={config.data.length}"], []
    if train.batch > 1:
        lower.append(f"train.batch={train.batch} (raise train.accumulation={train.accumulation} as much)")
    if getattr(checkpoint.drafter_class(config.head.drafter._target_), "depth", 0) is None:
        lower.append(f"head.objective.depth={objective.depth}")
    if objective.get("gradient_checkpointing") is False:
        give.append("head.objective.gradient_checkpointing=true")
    if config.start is None and config.head.get("vocab_size", 0) is None:
        give.append("head.vocab_size=32000")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not train.shard:
        give.append("train.shard=true")
    if config.target.device is None and not feature_settings(config).urls:
        give.append("target.device=auto with more GPUs")
    return f"lower {' or '.join(lower)}" + (f", or give {' or '.join(give)}" if give else "")


def target_inputs(target: Target) -> dict[str, str | None]:
    """Digests by which a resumed run knows its target. Of quantised and of unread layers only the embeddings are compared."""
    whole = target.fingerprint()
    return {"target": None if "-" in whole else whole, "embeddings": target.embeddings_fingerprint()}


def fit_trainer(trainer: Trainer) -> None:
    """`trainer.fit`, whose errors then say how to go on."""
    try:
        trainer.fit()
    except NotFiniteLoss as error:
        raise ValueError(
            f"{error} Look at these rows, lower optimizer.lr or train.max_grad_norm, or leave such steps out with "
            "train.skip_not_finite=true; then use resume=true."
        ) from error
    except ProcessLost as error:
        raise ProcessLost(f"{error} Continue with resume=true.") from error
    except ValueError as error:
        raise ValueError(f"{error} Then continue with resume=true.") from error


def make_accelerator(config: DictConfig) -> Accelerator:
    """Seeds everything, decides what is `auto` of the precision, and sets the threads of a CPU."""
    set_seed(config.train.seed)
    transformers.utils.logging.disable_progress_bar()
    with named("train"):
        plugin = sharding.plugin(config.train.shard)
    cpu = not torch.accelerator.is_available()  # said outright, or several processes would not find each other
    timeout = timedelta(minutes=config.train.timeout + 1)  # a little more than the trainer waits, which says what for
    starting.choose_precision(config, PartialState(cpu=cpu, timeout=timeout).device)
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=starting.PRECISIONS[config.precision],
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    with named("train"):
        sharding.start(accelerator, plugin)
    accelerator.state.device = devices.numbered(
        accelerator.device
    )  # one process has `cuda`, which no tensor's device equals
    if accelerator.device.type == "cpu":  # the launcher sets one thread a process
        torch.set_num_threads(config.threads or max(1, os.cpu_count() // accelerator.num_processes))
    return accelerator


def load_target(config: DictConfig, accelerator: Accelerator) -> tuple[Target, PreTrainedTokenizerBase]:
    ends = bool(feature_settings(config).urls)
    with named("target"):
        settings = TargetSettings(**config.target)
    settings.check(
        head=config.head.drafter._target_,
        adapts=checkpoint.drafter_class(config.head.drafter._target_).adapts_target,
        best_by=config.train.best_by,
        on_policy=config.data.on_policy,
        mode=config.features.mode,
    )
    with named("target"):
        return settings.load(accelerator.device, num_processes=accelerator.num_processes, ends=ends)


def feature_settings(config: DictConfig) -> FeatureSettings:
    """Raises ValueError for what only a target in this process can do, if a server is to read the texts."""
    with named("features"):
        settings = FeatureSettings(**OmegaConf.to_container(config.features, resolve=True))
    settings.check(
        adapts=checkpoint.drafter_class(config.head.drafter._target_).adapts_target,
        best_by=config.train.best_by,
        on_policy=config.data.on_policy,
        tp=config.target.tp,
        shard=config.target.shard,
    )
    return settings


def load_data(
    config: DictConfig, tokenizer: PreTrainedTokenizerBase, target: Target, accelerator: Accelerator
) -> Packs | Stream:
    """The conversations that are trained on, all of them packed, or read as they come."""
    packed = packs_rows(target, length=config.data.length, pack=config.data.pack)
    chosen = OmegaConf.to_container(config.data, resolve=True)
    same = {key: chosen[key] for key in ("train", "hold_out", "tokens", "length", "thinking")} | {"packed": packed}
    with named("data"):
        if config.data.stream:
            plan = Plan(
                tokenizer=tokenizer, split=config.data.split, limit=config.data.limit, buffer=config.data.buffer,
                seed=config.train.seed, **same,
            )  # fmt: skip
            group = Group.of(accelerator, target)
            return Stream(plan, process=group.number, num_processes=group.num)
        encoding = Encoding(
            tokenizer,
            Path(config.data.cache),
            config.data.split,
            config.data.limit,
            config.data.workers,
            same.pop("thinking"),
        )
        return load_packs(encoding=encoding, **same)  # whichever process encodes shows it


def encode_prompts(
    config: DictConfig, tokenizer: PreTrainedTokenizerBase, packs: Packs, rows: list[dict]
) -> list[Prompt]:
    """Held-out prompts, in the thinking mode of the rows that are trained on, unless the configuration or a prompt says another."""
    thinking = packs.modes[0] if config.data.thinking is None and len(packs.modes) == 1 else config.data.thinking
    return data.encode_prompts(rows, tokenizer, thinking=thinking, trained=packs.modes)


def make_drafter(config: DictConfig, target: Target, packs: Packs) -> tuple[Head, dict]:
    """A new drafter as the configuration says, or the one of the checkpoint `start`, and its spec for checkpoints."""
    spec = OmegaConf.to_container(config.head.drafter, resolve=True)
    make_vocab = functools.partial(
        starting.vocabulary, packs, target, config.start, config.start_vocab, config.head.vocab_size, minutes=config.train.timeout,
    )  # fmt: skip
    if config.start is None:
        vocab = make_vocab()
        with named("head.drafter"):
            drafter = build(config.head.drafter, target, vocab=vocab)
    else:
        drafter, start_spec = checkpoint.start(
            config.start,
            target,
            spec,
            None if config.start_vocab == "keep" else lambda before: make_vocab(before=before),
        )
        if start_spec["_target_"] != spec["_target_"]:
            raise ValueError(
                f"start={config.start} holds {start_spec['_target_']} and head={config.head.drafter._target_}: give head= "
                "the family of the checkpoint. Its sizes and vocabulary are then the checkpoint's, the objective is the head's."
            )
        spec = start_spec
    if drafter.adapts_target and "adapter" not in config.head:
        raise ValueError("A head that adapts the target needs head.adapter: {lr, delay}, see conf/head/medusa2.yaml.")
    return drafter, spec


def make_objective(config: DictConfig, drafter: Head) -> Objective | ConsistencyObjective:
    with named("head.objective"):
        return build(config.head.objective, drafter)


def make_optimizer(
    config: DictConfig, drafter: Head
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    with named("optimizer"):
        settings = OptimizerSettings(**OmegaConf.to_container(config.optimizer, resolve=True))
        optimizer = optimization.make_optimizer(drafter, settings, adapter=config.head.get("adapter"))
    return optimizer, schedule(optimizer, settings, steps=config.train.steps)


def make_validation(
    config: DictConfig,
    drafter: Head,
    prompts: list[Prompt],
    stop: set[int],
    accelerator: Accelerator,
    console: progress.Results,
    engine: EngineTarget | None,
) -> Validation:
    """What the trainer calls at every validation. Refuses now what validation would refuse after hours of training."""
    with named("decode"):
        drafting = Drafting(**OmegaConf.to_container(config.decode, resolve=True))
    with named("validation"):
        settings = ValidationSettings(**OmegaConf.to_container(config.validation, resolve=True))
        sampling = Sampling(temperature=settings.temperature)
    with named("decode"):
        if engine is None:
            decoder = drafting.decoder(
                drafter.target, drafting.proposer(drafter), sampling=sampling, stop=stop, runner=drafting.runner()
            )
    with named("validation"):
        if engine is None:
            check_prompts(decoder, prompts, settings.max_new_tokens, source=config.data.heldout)
    validation = Validation(
        accelerator,
        drafter,
        drafting,
        prompts,
        settings=settings,
        best_by=config.train.best_by,
        stop=stop,
        seed=config.train.seed,
        show=lambda report: display.validation(console, report, drafting.shape),
        say=console.say,
        engine=engine,
    )
    settings.check(replays=validation.replays, engine=engine is not None, ema=config.train.ema)
    return validation


def make_material(
    config: DictConfig,
    drafter: Head,
    packs: Packs,
    stream: Stream | None,
    stop: set[int],
    accelerator: Accelerator,
    engine: EngineTarget | None,
) -> Material:
    """The packs, and the target's outputs for them: computed for every batch, or kept on disk."""
    features = None  # the objective reads an adapted target itself, with gradient
    if not drafter.adapts_target:
        num = config.train.steps * config.train.batch * config.train.accumulation
        num *= Group.of(accelerator, drafter.target).num
        num = max(num, config.solve_packs if config.start is None else 0, MEASURED)
        with named("features"):
            features = feature_settings(config).open(
                drafter,
                packs,
                engine=engine,
                streamed=stream is not None,
                reads=permutation(len(packs), config.train.seed)[:num],
                main=accelerator.is_main_process,
                say=progress.note,
            )
        waiting = Waiting(config.train.timeout, accelerator.process_index, accelerator.num_processes)
        with waiting("the folder of features"):
            accelerator.wait_for_everyone()
    on_policy = None
    if config.data.on_policy:
        with named("data"):
            chosen = {key: config.data[key] for key in ("length", "on_policy", "on_policy_temperature")}
            on_policy = OnPolicy(drafter, packs, stop=stop, **chosen)
    with named("data"):
        return Material(packs, config.data.length, features, on_policy, stream, config.data.ahead)


def make_serve(config: DictConfig, say: Callable[[str], None]) -> Serving | None:
    """What serves the best step at the end, if that is asked for."""
    chosen, target = config.validation, config.target
    if chosen.served is None:
        return None
    if chosen.temperature > 0 or config.decode.depth is None:
        raise ValueError(
            "validation.served= serves chains at temperature 0: use decode=chain and validation.temperature=0."
        )
    given = {"prompts": config.data.heldout, "split": config.data.heldout_split}
    given |= {"thinking": config.data.thinking, "limit": chosen.num_prompts, "max_new_tokens": chosen.max_new_tokens}
    given |= {f"target.{key}": target[key] for key in ("name", "dtype", "trust_remote_code")}
    with named("validation"):
        return Serving(chosen.served, given | {"num_drafts": config.decode.depth}, say)


def make_settings(config: DictConfig) -> Settings:
    """Also called by the benchmark of training steps, which measures other commits, too."""
    with named("train"):
        return Settings(**config.train)


def build(config: DictConfig, *arguments, **more):
    """What `_target_` names, made with the other settings. Raises ValueError for one that it does not have."""
    settings = OmegaConf.to_container(config, resolve=True)
    try:
        return get_object(settings.pop("_target_"))(*arguments, **settings, **more)
    except TypeError as error:
        raise ValueError(str(error)) from error


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    job = multirun.run_of(HydraConfig.get())
    if job is not None:
        config.run = overrides.literal(job)
        with plain_warnings():
            return multirun.run_job(fit, config)
    try:
        with plain_warnings():
            status = fit(config)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (ValueError, OSError) as error:
        if not is_main() and not isinstance(error, ProcessLost):
            time.sleep(SECONDS_FOR_MAIN)
        status = f"error: {files.explain(error) if isinstance(error, OSError) else error}"
    except KeyboardInterrupt:
        print("Stopped at once. resume=true continues from the last save.", file=sys.stderr)
        status = 130
    finally:
        progress.close()
    sys.exit(status)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, display.usage(Path(__file__).parent / "conf"), sep="\n")
        sys.exit()
    sys.argv[1:] = overrides.as_written(sys.argv[1:])
    try:
        main()
    except SystemExit as ended:  # Hydra has said that it does not know an option, without saying which one is like it
        if ended.code == 1 and (wrong := display.unknown(Path(__file__).parent / "conf", sys.argv[1:])):
            ended.code = wrong
        raise
