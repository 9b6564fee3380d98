"""What a run is made of, from its settings: processes, target, data, drafter, objective, optimizer, validation, trainer."""

import math
import pkgutil
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env, set_seed
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, fast, hub, precision, progress
from specdec.core.ranges import named, refuse
from specdec.core.sampling import Sampling
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Head
from specdec.measuring import trained_prompts
from specdec.measuring.measure import check_prompts
from specdec.measuring.replay import encode_written, warn_of_writers
from specdec.options import config_files
from specdec.target.fingerprint import UNREAD
from specdec.target.model import Target
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.chat_template import check_arguments
from specdec.text.conversations import Prompt
from train import processes
from train.data.encoding import Encoding, load_rows
from train.data.packing import Packs, Rows, draft_vocab
from train.features.feature_files import FeatureFolder
from train.features.loader import Material, permutation
from train.features.outputs import Features, Kept, Online
from train.loop import optimizer as optimization
from train.loop.state import RunFolder
from train.loop.trainer import MEASURED, Trainer
from train.loop.validate import Validation
from train.processes import Waiting, compute_by_main
from train.settings.options import RunConfig, fixed_settings, read_settings
from train.show import display

PRECISIONS = {"bf16": "bf16", "fp32": "no"}  # of train.py, and what accelerate calls them
IN_FLIGHT = 64  # texts that servers are asked for at once, by each process
SAMPLE = 2000  # documents that are looked for in a folder before training


def make_trainer(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    heldout: list[dict],
    packs: Packs,
    target: Target,
    *,
    path: Path,
    accelerator: Accelerator,
    console: progress.Results,
) -> Trainer:
    """The trainer of a run before its first step. path: the run's folder; heldout: rows of prompts or of recorded answers

    Refuses now what would fail after hours of training.
    """
    warn_of_writers(packs.writers, target)
    stop = data.stop_tokens(tokenizer, target.model.generation_config)
    rows = reading.spread(heldout, config.validation.num_prompts)
    texts = None
    if config.validation.recorded:
        texts = [encode_written(tokenizer, row) for row in rows]
        prompts = [Prompt(row["id"], row["category"], text.prompt) for row, text in zip(rows, texts)]
    else:
        with reading.at(str(config.data.heldout)):
            prompts = encode_prompts(config, tokenizer, packs, rows)
    num_trained = warn_of_copies(config, rows, packs)
    drafter, spec = make_drafter(config, target, packs)
    drafter.to(accelerator.device)
    with named("features"):
        engine = connect_engine(config, drafter, console)
    with named("head.objective"):
        objective = make(config.head["objective"], drafter)
    with named("optimizer"):
        optimizer = optimization.make_optimizer(drafter, config.optimizer, adapter=config.head.get("adapter"))
    display.start(progress.note, config, drafter, packs, len(prompts))
    validation = make_validation(config, drafter, prompts, stop, accelerator, console, engine)
    validation.texts, validation.num_trained = texts, num_trained
    material = make_material(config, drafter, packs, accelerator, engine)
    inputs = {"heldout": reading.digest_of(heldout), **target_inputs(target)}
    folder = RunFolder(path, spec, fixed_settings(config.document()) | inputs, target.identity)
    scheduler = optimization.schedule(optimizer, config.optimizer, steps=config.train.steps)
    parts: dict[str, Any] = {"material": material, "validation": validation, "settings": config.train, "folder": folder}
    return Trainer(accelerator, objective, optimizer, scheduler, **parts)


def warn_of_copies(config: RunConfig, rows: list[dict], packs: Packs) -> int:
    """How many held-out rows ask what is trained on, too, here or by the head that training starts from. Warns of them."""
    ids = trained_prompts.find(rows, trained_prompts.join(packs.prompt_digests, config.start))
    if ids and processes.is_main():
        name = "validation.answers" if config.validation.recorded else "data.heldout"
        copies = trained_prompts.count_copies(ids, len(rows), f"prompts of {name}")
        warnings.warn(f"{copies} are trained on, so tau flatters: give others.", stacklevel=2)
    return len(ids)


def make(settings: dict, *arguments: Any, **more: Any) -> Any:
    """What `_target_` names, made with the other settings. Raises ValueError for one that it does not have."""
    others = {key: value for key, value in settings.items() if key != "_target_"}
    try:
        return pkgutil.resolve_name(settings["_target_"])(*arguments, **others, **more)
    except TypeError as error:
        raise ValueError(str(error)) from error


# Processes and precision


def start_processes(config: RunConfig) -> tuple[Accelerator, RunConfig]:
    """Seeds everything, sets the threads of a CPU, and puts what the device computes in, in the place of `auto`."""
    if config.fast is not None:
        fast.turn_off(config.fast)
    set_seed(config.train.seed)
    transformers.utils.logging.disable_progress_bar()
    processes.check_launcher()
    # Said outright, or several processes would not find each other
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    timeout = timedelta(minutes=config.train.timeout + 1)  # a little more than the trainer waits, which says what for
    config = choose_precision(config, PartialState(cpu=cpu, timeout=timeout).device)
    mixed, handlers = PRECISIONS[config.precision], [InitProcessGroupKwargs(timeout=timeout)]
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed, kwargs_handlers=handlers)
    # One process has `cuda`, which no tensor's device equals
    accelerator.state.device = devices.numbered(accelerator.device)
    if accelerator.device.type == "cpu":  # the launcher sets one thread a process
        torch.set_num_threads(config.threads or processes.count_threads(accelerator.num_processes))
    for sentence in processes.find_ignored_flags(config.precision, accelerator.num_processes):
        warnings.warn(sentence, stacklevel=2)
    return accelerator, config


def recall(config: RunConfig, path: Path) -> RunConfig:
    """What was decided in the first launch of a run that is resumed, on whatever machine, in the place of each `auto`.

    path: of the run
    """
    then = read_settings(path / "config.yaml") if config.resume else {}
    dtype = then.get("target", {}).get("dtype", precision.AUTO)
    config = config.with_precision(then.get("precision", precision.AUTO), dtype)
    known = config_files.flatten(then)
    return config.settle({name: known[name] for name in config.open if name in known})


def choose_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """Puts what the main process' device computes in, in the place of each `auto`, and says so."""
    asked = precision.AUTO in (config.precision, config.target.dtype)
    if not asked and device.type != "cpu":
        return config
    choose = lambda: precision.choose(device)
    choice = compute_by_main(choose, "what the device computes in", minutes=config.train.timeout)
    config = config.with_precision({"bfloat16": "bf16", "float32": "fp32"}[choice.dtype], choice.dtype)
    chosen = f"precision={config.precision} target.dtype={config.target.dtype}"
    if asked:
        progress.note(f"{chosen} ({choice.reason})")
    elif choice.dtype == "float32" and "bf" in f"{config.precision} {config.target.dtype}":
        progress.note(f"{chosen} is slow here ({choice.reason}); auto is fp32 and float32")
    return config


# Target and data


def load_target(config: RunConfig, accelerator: Accelerator) -> Target:
    """The whole target, or only what is before and behind its layers where a server has these."""
    chosen, num = config.target, accelerator.num_processes
    if chosen.device == "auto" and num > 1:
        raise ValueError(
            f"target.device=auto spreads one target over all GPUs, and {num} processes would each load one: use accelerate "
            "launch --num_processes 1, or target.device=null."
        )
    given: dict[str, Any] = {"revision": chosen.revision, "trust_remote_code": chosen.trust_remote_code}
    with named("target"):
        given |= {"dtype": chosen.dtype, "device": chosen.device or accelerator.device}
        if config.features.urls:
            return Target.load_ends(chosen.name, **given | {"device": accelerator.device})
        if chosen.shard:
            return Target.load_sharded(chosen.name, **given)
        return Target.load(chosen.name, **given)


def target_inputs(target: Target) -> dict[str, str | None]:
    """Digests by which a resumed run knows its target. Where layers were not read, only the embeddings are compared."""
    whole = target.fingerprint()
    return {"target": None if UNREAD in whole else whole, "embeddings": target.embeddings_fingerprint()}


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


def encode_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Rows, numpy.ndarray]:
    """The conversations, and the numbers of those that are trained on."""
    chosen = config.data
    check_arguments(tokenizer, config.template)
    with named("data"):
        encoding = Encoding(
            tokenizer, Path(chosen.cache), chosen.split, chosen.limit, workers=chosen.workers, arguments=config.template
        )
        # whichever process encodes shows it
        return load_rows(chosen.train, encoding, hold_out=chosen.hold_out, tokens=chosen.tokens)


def encode_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, packs: Packs, rows: list[dict]
) -> list[Prompt]:
    """Held-out prompts, with the template arguments of the rows that are trained on, unless the settings or a prompt say others."""
    return data.encode_prompts(rows, tokenizer, {**packs.arguments, **config.template})


# The drafter


def pin_start(config: RunConfig, path: Path) -> RunConfig:
    """Adds the commit to `start` if that is a head on the Hub: today's, or in a resumed run the one of its first launch.

    path: of the run
    """
    start = config.start
    if start is None:
        return config
    if not hub.is_head(start):
        checkpoint.read_document(checkpoint.resolve(start))  # refused now, before anything is loaded
        return config
    recorded = checkpoint.read_facts(path).get("start", {})
    if config.resume and recorded.get("given") == start:
        return replace(config, start=recorded["used"])
    pin = lambda: hub.pinned(checkpoint.resolve(start))
    pinned = compute_by_main(pin, "the head that training starts from", minutes=config.train.timeout)
    return replace(config, start=pinned)


def make_drafter(config: RunConfig, target: Target, packs: Packs) -> tuple[Head, dict]:
    """A new drafter as the settings say, or the one of the checkpoint `start`, and its spec for checkpoints."""
    spec = config.head["drafter"]
    if config.start is None:
        vocab = choose_vocab(config, target, packs)
        with named("head.drafter"):
            return make(spec, target, vocab=vocab), spec
    new_vocab = None if config.start_vocab == "keep" else lambda before: choose_vocab(config, target, packs)
    drafter, start_spec = checkpoint.start(config.start, target, spec, new_vocab)
    if start_spec["_target_"] != spec["_target_"]:
        raise ValueError(
            f"start={config.start} holds {start_spec['_target_']} and head={spec['_target_']}: give head= "
            "the family of the checkpoint. Its sizes and vocabulary are then the checkpoint's, the objective is the head's."
        )
    return drafter, start_spec


def choose_vocab(config: RunConfig, target: Target, packs: Packs) -> Tensor | None:
    """The draft vocabulary: increasing ids [W]; None: all tokens."""
    count = lambda: draft_vocab(packs, size=config.head["vocab_size"], num_tokens=target.vocab_size)
    return compute_by_main(count, "the draft vocabulary", minutes=config.train.timeout)


# The target's outputs


def connect_engine(config: RunConfig, drafter: Head, console: progress.Results) -> EngineTarget | None:
    """The servers that read texts, tried; None: the target in this process does."""
    chosen, target = config.features, drafter.target
    if not chosen.urls:
        return None
    client = EngineClient(chosen.urls, in_flight=IN_FLIGHT, longest=5, say=console.say)
    return EngineTarget(client, target, drafter.target_layers)


def open_features(
    config: RunConfig, drafter: Head, packs: Packs, accelerator: Accelerator, engine: EngineTarget | None
) -> Features:
    """The source of the target's outputs: computed for every batch, or kept in a folder, which the main process makes.

    Says how large a folder will be. Raises ValueError for a folder of another target or a disk too small.
    """
    chosen, target, layers = config.features, drafter.target, drafter.target_layers
    if chosen.mode == "online":
        return Online(target, layers)
    if chosen.mode == "engine":
        return Kept(target, layers, folder=None, reader=engine)
    num = config.train.steps * config.train.batch * config.train.accumulation * accelerator.num_processes
    num = max(num, config.solve_packs if config.start is None else 0, MEASURED)
    folder = FeatureFolder(target, layers, Path(chosen.folder))
    size = folder.num_bytes(count_missing(folder, packs, permutation(len(packs), config.train.seed)[:num]))
    if size:
        folder.check_space(size)
        progress.note(f"features up to {size / 1e9:.2f} GB will be written to {chosen.folder} as they are needed")
    if accelerator.is_main_process:
        folder.open()
    return Kept(target, layers, folder=folder, reader=engine)


def count_missing(folder: FeatureFolder, packs: Packs, reads: list[int]) -> int:
    """Tokens that a folder lacks of the documents of some packs; of many documents it looks for an even sample."""
    numbers = numpy.unique(numpy.concatenate([packs.members[packs.ends[at] : packs.ends[at + 1]] for at in reads]))
    sample = numbers[:: math.ceil(len(numbers) / SAMPLE)]
    texts = [torch.tensor(packs.rows.arrays(number, packs.length)[0]) for number in sample.tolist()]
    missing = sum(len(text) for text in texts if not folder.has(text))
    return round(missing * len(numbers) / len(sample))


def make_material(
    config: RunConfig,
    drafter: Head,
    packs: Packs,
    accelerator: Accelerator,
    engine: EngineTarget | None,
) -> Material:
    """What steps are made of."""
    features = None  # the objective reads an adapted target itself, with gradient
    if not drafter.adapts_target:
        with named("features"):
            features = open_features(config, drafter, packs, accelerator, engine)
        waiting = Waiting(config.train.timeout, accelerator.process_index, accelerator.num_processes)
        with waiting("the folder of features"):
            accelerator.wait_for_everyone()
    return Material(packs, config.data.length, features)


# Validation


def make_validation(
    config: RunConfig,
    drafter: Head,
    prompts: list[Prompt],
    stop: set[int],
    accelerator: Accelerator,
    console: progress.Results,
    engine: EngineTarget | None,
) -> Validation:
    """What the trainer calls at every validation."""
    drafting, sampling = config.decode, Sampling(temperature=config.validation.temperature)
    if engine is None:
        with named("decode"):
            proposer, runner = drafting.proposer(drafter), drafting.runner()
            decoder = drafting.decoder(drafter.target, proposer, sampling=sampling, stop=stop, runner=runner)
        with named("validation"):
            check_prompts(decoder, prompts, config.validation.max_new_tokens, source=config.data.heldout)
    validation = Validation(accelerator, drafter, prompts, config=config, stop=stop, console=console, engine=engine)
    ema, needs = config.train.ema, "a chain (decode=chain) and validation.decode=best or end"
    wrong = {
        "features.engine=: without the target in this process a drafter is judged by replay, which needs "
        f"{needs}. Or use features.mode=online.": engine is not None,
        f"train.ema={ema} lets replay choose between the weights and their average, and replay does not apply here: it needs "
        f"{needs}, and a head that leaves the target as it is. Or set train.ema=null.": ema is not None,
    }
    refuse(wrong if not validation.replays else {})
    return validation
