"""What a run is made of, from its settings: processes, target, data, drafter, objective, optimizer, validation, trainer."""

import math
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, set_seed
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, fast, hub, precision
from specdec.core.sampling import Sampling
from specdec.heads.base import Head
from specdec.measuring.measure import Prompt, check_prompts
from specdec.target.model import Target, TargetOutput, load_tokenizer
from train import decide, display, distributed, optimization, plan, progress
from train.config import RunConfig, fixed_settings, flat, read_settings
from train.data import reading
from train.data import rows as data
from train.data.encoding import Encoding, load_rows
from train.data.loader import Material, permutation
from train.data.packing import Packs, Rows, draft_vocab
from train.data.rows import collate
from train.decide import Decision, Place, Texts
from train.distributed import Waiting, compute_by_main
from train.features.engine_client import EngineClient
from train.features.engine_features import EngineTarget
from train.features.feature_files import FeatureFolder
from train.features.outputs import Features, Kept, Online
from train.pages import facts
from train.ranges import named, refuse
from train.state import RunFolder
from train.trainer import MEASURED, Trainer
from train.validate import Validation

PRECISIONS = {"bf16": "bf16", "fp32": "no"}  # of train.py, and what accelerate calls them
IN_FLIGHT = 64  # texts that servers are asked for at once, by each process
CHARACTERS = 4  # of a token, where the tokenizer is not there
LAYERS = 3  # that a head reads whose layers are not known yet
SAMPLE = 2000  # documents that are looked for in a folder before training


@dataclass(frozen=True)
class Prepared:
    """What is known before the target is loaded.

    heldout: rows of prompts; counted: None for heads that change the target, and for what cannot be counted
    target: None if it was not needed yet
    tokenizer, packs: None in a plan for another machine, if the tokenizer cannot be reached: then `texts` are guessed
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase | None
    heldout: list[dict]
    packs: Packs | None
    texts: Texts
    place: Place
    counted: plan.Counted | None
    target: Target | None


def prepare(
    config: RunConfig, device: torch.device, num: int, load: Callable[[RunConfig], Target] | None = None
) -> Prepared:
    """Reads and packs the data, decides how, and counts what a process needs. device, num: of the processes

    load: loads the target, if its shapes cannot be told without values; None: in a plan for another machine

    Raises ValueError for paths that do not exist and for a run that cannot fit, before the target is loaded.
    """
    place = compute_by_main(lambda: plan.find_place(config, device, num), "this machine", minutes=config.train.timeout)
    with named("target"):
        outline = plan.make_outline(config, plan.read_config(config))
    heldout = reading.load_prompts(config.data.heldout, split=config.data.heldout_split)
    tokenizer, rows, numbers = None, None, None
    try:
        with named("target"):
            origin: Any = {"revision": config.target.revision, "trust_remote_code": config.target.trust_remote_code}
            tokenizer = load_tokenizer(config.target.name, **origin)
            data.check_offsets(tokenizer)
    except ValueError:
        if config.machine.name == plan.HERE:
            raise
        lengths = guess_lengths(config)
    else:
        rows, numbers = encode_rows(config, tokenizer)
        lengths = rows.lengths[numbers]
    if outline is None and load is None:
        raise ValueError(
            f"{config.target.name} cannot be counted without its values: plan=true loads it, on a machine that can."
        )
    target = None if outline or load is None else load(config)
    shapes = outline or target
    assert shapes is not None
    limits = [each for each in (shapes.max_positions, shapes.rotary_boundary) if each is not None]
    free = "data.length" in config.open
    config = decided(config, decide.reading(config, place, lengths, most=min(limits, default=None)))
    while True:
        with named("data"):
            packed = packs_rows(shapes, length=config.data.length, pack=config.data.pack)
            packs = Packs(rows, length=config.data.length, packed=packed, numbers=numbers) if rows else None
        texts = Texts.of(packs) if packs else Texts.guessed(lengths, config.data.length)
        config = decided(config, decide.vocabulary(config, texts, all_tokens=shapes.vocab_size))
        config = decided(config, decide.batches(config, place, texts))
        counted = None if outline is None or config.adapts_target else count(config, outline, texts, place)
        if counted is None:
            break
        wrong = plan.problems(config, counted.memory, place)
        if not wrong or (config.plan and not free):
            break
        if (
            not free
            or config.data.length <= decide.SHORTEST[place.device]
            or counted.memory.fixed > plan.ROOM * place.memory
        ):
            if config.plan:
                break
            raise ValueError(f"This run does not fit: {wrong[0]} plan=true shows what it needs.")
        shorter = decide.Decision(
            "data.length", config.data.length // 2, f"{counted.memory} were too much for {place.memory / 1e9:.1f} GB"
        )
        config = decided(replace(config, open=(*config.open, "data.length")), [shorter])
    layers = len(counted.drafter.target_layers) if counted else LAYERS
    size = (layers + 1) * shapes.width * shapes.embed.weight.element_size()
    config = decided(config, decide.features(config, place, texts, bytes_per_token=size))
    return Prepared(config, tokenizer, heldout, packs, texts, place, counted, target)


def count(config: RunConfig, outline: Target, texts: Texts, place: Place) -> plan.Counted | None:
    """None for a head that cannot be counted without values; its own refusals come when it is made."""
    try:
        with torch.random.fork_rng(devices=[]):  # what is counted draws, too
            return plan.count_run(config, outline, texts, place, make)
    except plan.WITHOUT_VALUES as error:
        if config.plan:
            raise ValueError(f"This target with this head cannot be counted ({error}).") from error
        return None


def decided(config: RunConfig, decisions: list[Decision]) -> RunConfig:
    """With these decisions, each of which is said with its reason."""
    for decision in decisions:
        progress.note(f"auto     {decision}")
    return decide.settle(config, decisions)


def make_trainer(
    prepared: Prepared, target: Target, path: Path, accelerator: Accelerator, console: progress.Results
) -> Trainer:
    """The trainer of a run before its first step. path: the run's folder

    Refuses now what would fail after hours of training.
    """
    config, packs = prepared.config, prepared.packs
    assert packs is not None and prepared.tokenizer is not None
    stop = data.stop_tokens(prepared.tokenizer, target.model.generation_config)
    rows = reading.spread(prepared.heldout, config.validation.num_prompts)
    with reading.at(str(config.data.heldout)):
        prompts = encode_prompts(config, prepared.tokenizer, packs, rows)
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
    material = make_material(config, drafter, packs, accelerator, engine)
    inputs = {"heldout": reading.digest_of(prepared.heldout), **target_inputs(target)}
    folder = RunFolder(path, spec, fixed_settings(config.document()) | inputs)
    scheduler = optimization.schedule(optimizer, config.optimizer, steps=config.train.steps)
    parts: dict[str, Any] = {"material": material, "validation": validation, "settings": config.train, "folder": folder}
    return Trainer(accelerator, objective, optimizer, scheduler, **parts)


# The speed of this device

TRIED = 4  # batches with which it is measured, of which the first warms up
BRIEF = 50  # steps that are given, below which it is not measured


def choose_steps(prepared: Prepared, target: Target, accelerator: Accelerator) -> tuple[Prepared, decide.Pace | None]:
    """Decides steps and validations by the speed of this device, if they are open. -> also the speed, if it was measured"""
    config = prepared.config
    brief = "train.steps" not in config.open and config.train.steps < BRIEF and not config.plan
    names = {"train.steps", "train.accumulation", "train.validate_every", "train.hours", "train.epochs"}
    if not config.plan and not names & set(config.open):
        return prepared, None
    pace = decide.Pace(0.0, 0.0, 0.0) if brief else try_steps(prepared, target, accelerator)
    with Waiting(config.train.timeout, accelerator.process_index, accelerator.num_processes)(
        "the speed of this device"
    ):
        pace = broadcast_object_list([pace])[0]
    chosen = decided(config, decide.training(config, prepared.place, prepared.texts, pace))
    return replace(prepared, config=chosen), None if brief else pace


def try_steps(prepared: Prepared, target: Target, accelerator: Accelerator) -> decide.Pace:
    """Takes a few steps with a drafter that is thrown away, and measures them. All processes call this together."""
    config, packs, device = prepared.config, prepared.packs, accelerator.device
    assert packs is not None
    order = permutation(len(packs), config.train.seed)
    size = min(config.train.batch, len(order))
    chosen = [[packs[order[(turn * size + place) % len(order)]] for place in range(size)] for turn in range(TRIED)]
    texts = [collate(each, length=config.data.length, pad_token=0).to(device) for each in chosen]
    tokens = [int((batch.documents >= 0).sum()) for batch in texts]
    outputs: dict[int, Any] = {}
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        progress.start("measuring this device"),
    ):
        if config.adapts_target:  # a second drafter would change it again
            online = Online(target, ())
            read = plan.measure_pace(
                lambda n: online(texts[n]), lambda n: None, lambda: None, tokens, lambda: wait_for(device)
            ).read
            return decide.Pace(0.0, 4 * read, 0.0)
        drafter = make_drafter(config, target, packs)[0].to(device)
        objective = make(config.head["objective"], drafter).train()
        optimizer = optimization.make_optimizer(drafter, config.optimizer)
        online, served = Online(target, drafter.target_layers), bool(config.features.urls)

        def read_texts(number: int) -> None:
            shape = (*texts[number].tokens.shape, len(drafter.target_layers) * target.width)
            given = [
                torch.randn(each, dtype=target.dtype, device=device) for each in (shape, (*shape[:2], target.width))
            ]
            outputs[0] = TargetOutput(*given) if served else online(texts[number])

        def take_step(number: int) -> None:
            with accelerator.autocast():
                loss = objective(texts[number], outputs[0], compare=False)
            (loss.total / tokens[number]).backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        pace = plan.measure_pace(read_texts, take_step, update, tokens, lambda: wait_for(device))
    return replace(pace, read=0.0) if served else pace


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show_plan(config: RunConfig, path: Path) -> str:
    """What `plan=true` prints: of this machine, after a few steps that are thrown away, or of another one from its figures."""
    here = config.machine.name == plan.HERE
    if here:
        accelerator, config = start_processes(config)
        device, num = accelerator.device, accelerator.num_processes
    else:
        device, num = torch.device("cpu"), 1
        config = config.with_precision("bf16", "bfloat16")
    prepared = prepare(config, device, num, (lambda given: load_target(given, accelerator)) if here else None)
    if prepared.counted is None:
        raise ValueError("plan=true: this head or this target is not counted. Take a few steps: train.steps=10.")
    memory, pace, drafter = prepared.counted.memory, prepared.counted.pace, prepared.counted.drafter
    if here and not plan.problems(prepared.config, memory, prepared.place):
        target = prepared.target or load_target(prepared.config, accelerator)
        prepared, measured = choose_steps(prepared, target, accelerator)
        assert measured is not None
        pace, memory = measured, plan.measured_memory(memory, device)
    else:
        chosen = decided(prepared.config, decide.training(prepared.config, prepared.place, prepared.texts, pace))
        prepared = replace(prepared, config=chosen)
    made = plan.make_plan(prepared.config, drafter, prepared.texts, prepared.place, memory, pace)
    return f"{plan.heading(prepared.config, path, prepared.place)}\n{made}"


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
    distributed.check_accelerate()
    cpu = not torch.accelerator.is_available()  # said outright, or several processes would not find each other
    timeout = timedelta(minutes=config.train.timeout + 1)  # a little more than the trainer waits, which says what for
    config = choose_precision(config, PartialState(cpu=cpu, timeout=timeout).device)
    mixed, handlers = PRECISIONS[config.precision], [InitProcessGroupKwargs(timeout=timeout)]
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed, kwargs_handlers=handlers)
    # One process has `cuda`, which no tensor's device equals
    accelerator.state.device = devices.numbered(accelerator.device)
    if accelerator.device.type == "cpu":  # the launcher sets one thread a process
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // accelerator.num_processes))
    return accelerator, config


def recall(config: RunConfig, path: Path) -> RunConfig:
    """What was decided in the first launch of a run that is resumed, on whatever machine, in the place of each `auto`.

    path: of the run
    """
    then = read_settings(path / "config.yaml") if config.resume else {}
    dtype = then.get("target", {}).get("dtype", precision.AUTO)
    config = config.with_precision(then.get("precision", precision.AUTO), dtype)
    known = flat(then)
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
    """Digests by which a resumed run knows its target. Of quantised and of unread layers only the embeddings are compared."""
    whole = target.fingerprint()
    return {"target": None if "-" in whole else whole, "embeddings": target.embeddings_fingerprint()}


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
    source: dict[str, Any] = {name: getattr(chosen, name) for name in ("split", "limit", "thinking")}
    with named("data"):
        encoding = Encoding(tokenizer, Path(chosen.cache), workers=chosen.workers, **source)
        # whichever process encodes shows it
        return load_rows(chosen.train, encoding, hold_out=chosen.hold_out, tokens=chosen.tokens)


def guess_lengths(config: RunConfig) -> numpy.ndarray:
    """Tokens of each row, where the tokenizer cannot be reached: its characters over CHARACTERS, [R]"""
    name, found = config.target.name, []
    for source in reading.read_sources(config.data.train):
        for _, row in reading.read_rows(source, config.data.split):
            found.append(len(str(row.get("messages") or row.get("text") or row)) // CHARACTERS + 1)
    progress.note(f"The tokenizer of {name} cannot be reached: {CHARACTERS} characters are counted as a token.")
    return numpy.array(found, dtype=numpy.int64)


def encode_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, packs: Packs, rows: list[dict]
) -> list[Prompt]:
    """Held-out prompts, in the thinking mode of the rows that are trained on, unless the settings or a prompt say another."""
    thinking = packs.modes[0] if config.data.thinking is None and len(packs.modes) == 1 else config.data.thinking
    return data.encode_prompts(rows, tokenizer, thinking=thinking)


# The drafter


def pin_start(config: RunConfig, path: Path) -> RunConfig:
    """Adds the commit to `start` if that is a head on the Hub: today's, or in a resumed run the one of its first launch.

    path: of the run
    """
    start = config.start
    if start is None:
        return config
    if not hub.is_head(start):
        checkpoint.read_json(checkpoint.resolve(start) / "drafter.json")  # refused now, before anything is loaded
        return config
    recorded = facts.read(path).get("start", {})
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
