"""What is known and decided before a run is built: data in packs, options that were `auto`, memory, and the speed of this device."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, progress
from specdec.core.ranges import named
from specdec.target.model import Target, TargetOutput, load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading
from train.data.batches import collate
from train.data.packing import Packs
from train.features.loader import permutation
from train.features.outputs import Online
from train.loop import optimizer as optimization
from train.prepare import build, plan
from train.processes import Waiting, compute_by_main
from train.settings import decide
from train.settings.decide import Decision, Place, TextLengths
from train.settings.options import OPEN_NULL, RunConfig

CHARACTERS = 4  # of a token, where the tokenizer is not there
LAYERS = 3  # that a head reads whose layers are not known yet
TRIED = 4  # batches with which the speed is measured, of which the first warms up
BRIEF = 50  # steps that are given, below which it is not measured


@dataclass(frozen=True)
class Prepared:
    """What is known before the target is loaded.

    heldout: rows of prompts, or of recorded answers; counted: None for heads that change the target, and for what cannot be counted
    target: None if it was not needed yet
    tokenizer, packs: None in a plan for another machine, if the tokenizer cannot be reached: then `texts` are guessed
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase | None
    heldout: list[dict]
    packs: Packs | None
    texts: TextLengths
    place: Place
    counted: plan.Counted | None
    target: Target | None
    open: tuple[str, ...] = ()  # options that were left open


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
    if config.validation.recorded:
        heldout = reading.load_conversations(config.validation.answers, arguments=config.template)
    else:
        heldout = reading.load_prompts(config.data.heldout, split=config.data.heldout_split)
    tokenizer, rows, numbers, left = None, None, None, config.open
    try:
        with named("target"):
            origin: Any = {"revision": config.target.revision, "trust_remote_code": config.target.trust_remote_code}
            tokenizer = load_tokenizer(config.target.name, **origin)
            data.check_offsets(tokenizer)
    except ValueError:
        if not config.elsewhere:
            raise
        lengths = guess_lengths(config)
    else:
        rows, numbers = build.encode_rows(config, tokenizer)
        lengths = rows.lengths[numbers]
    if outline is None and load is None:
        raise ValueError(
            f"{config.target.name} cannot be counted without its values: plan=true loads it, on a machine that can."
        )
    target = None if outline or load is None else load(config)
    shapes = outline or target
    assert shapes is not None
    limits = [each for each in (shapes.max_positions, shapes.rotary_boundary) if each is not None]
    free, shrinks = "data.length" in config.open, "train.batch" in config.open
    packed = build.packs_rows(shapes, length=1, pack=config.data.pack)
    read: Any = {"most": min(limits, default=None), "packed": packed, "depth": most_drafts(config)}
    config = decided(config, decide.reading(config, place, lengths, **read))
    while True:
        with named("data"):
            build.packs_rows(shapes, length=config.data.length, pack=config.data.pack)
            packs = None
            if rows is not None:
                packs = Packs(rows, length=config.data.length, packed=packed, numbers=numbers)
        texts = TextLengths.of(packs) if packs else TextLengths.guessed(lengths, config.data.length)
        config = decided(config, decide.vocabulary(config, texts, all_tokens=shapes.vocab_size))
        config = decide.settle(config, decide.start(config, decide.tokens_wanted(config, texts)))  # said with the steps
        config = decided(config, decide.batches(config, place, texts))
        counted = None if outline is None or config.adapts_target else count(config, outline, texts, place)
        if counted is None:
            break
        wrong = plan.problems(config, counted.memory, place)
        if not wrong:
            break
        smaller = make_smaller(config, counted.memory, place, length=free, batch=shrinks)
        if smaller is None:
            if config.plan:
                break
            raise ValueError(f"This run does not fit: {wrong[0]} plan=true shows what it needs.")
        config = decided(replace(config, open=(*config.open, smaller.name)), [smaller])
    layers = len(counted.drafter.target_layers) if counted else LAYERS
    size = plan.bytes_per_token(shapes, layers)
    config = decided(config, decide.features(config, place, texts, bytes_per_token=size))
    return Prepared(config, tokenizer, heldout, packs, texts, place, counted, target, left)


def most_drafts(config: RunConfig) -> int:
    """How many drafts the head can make in a row, as far as its settings say; for a checkpoint that is trained further, its own."""
    spec = config.head["drafter"]
    if config.start is not None:
        spec = checkpoint.read_document(checkpoint.resolve(config.start))
    known = [spec.get(name) for name in ("num_heads", "num_modules", "num_drafts")]
    return min([each for each in (*known, config.decode.nodes) if isinstance(each, int)], default=4)


def make_smaller(
    config: RunConfig, memory: plan.Memory, place: Place, *, length: bool, batch: bool
) -> decide.Decision | None:
    """Half of what is in memory at once; None if nothing that was left open would help. length, batch: which of them was"""
    reason = f"{memory} were too much for {place.memory / 1e9:.1f} GB"
    if plan.starts_too_large(memory, place) or memory.fixed > plan.ROOM * place.memory:
        return None
    if batch and config.train.batch > 1:
        return decide.Decision("train.batch", config.train.batch // 2, reason)
    if length and config.data.length > decide.SHORTEST[place.device]:
        return decide.Decision("data.length", config.data.length // 2, reason)
    return None


def count(config: RunConfig, outline: Target, texts: TextLengths, place: Place) -> plan.Counted | None:
    """None for a head that cannot be counted without values; its own refusals come when it is made."""
    try:
        with torch.random.fork_rng(devices=[]):  # what is counted draws, too
            return plan.count_run(config, outline, texts, place, build.make)
    except plan.WITHOUT_VALUES as error:
        if config.plan:
            raise ValueError(f"This target with this head cannot be counted ({error}).") from error
        return None


def decided(config: RunConfig, decisions: list[Decision]) -> RunConfig:
    """With these decisions, each of which is said with its reason."""
    for decision in decisions:
        if decision.reason:
            progress.note(f"auto     {decision}")
    return decide.settle(config, decisions)


def guess_lengths(config: RunConfig) -> numpy.ndarray:
    """Tokens of each row, where the tokenizer cannot be reached: its characters over CHARACTERS, [R]"""
    name, found = config.target.name, []
    for source in reading.read_sources(config.data.train):
        for _, row in itertools.islice(reading.read_rows(source, config.data.split), config.data.limit):
            found.append(len(str(row.get("messages") or row.get("text") or row)) // CHARACTERS + 1)
    progress.note(f"The tokenizer of {name} cannot be reached: {CHARACTERS} characters are counted as a token.")
    return numpy.array(found, dtype=numpy.int64)


# The speed of this device


def choose_steps(prepared: Prepared, target: Target, accelerator: Accelerator) -> tuple[Prepared, decide.Pace | None]:
    """Decides steps and validations by the speed of this device, if they are open. -> also the speed, if it was measured"""
    config = prepared.config
    brief = "train.steps" not in config.open and config.train.steps < BRIEF and not config.plan
    names = {"train.steps", "train.accumulation", "train.validate_every"}
    brief = brief or not (config.plan or names & set(config.open))  # nothing depends on the speed
    pace = decide.Pace(0.0, 0.0, 0.0) if brief else try_steps(prepared, target, accelerator)
    with Waiting(config.train.timeout, accelerator.process_index, accelerator.num_processes)(
        "the speed of this device"
    ):
        pace = broadcast_object_list([pace])[0]
    return settle_steps(prepared, pace), None if brief else pace


def settle_steps(prepared: Prepared, pace: decide.Pace) -> Prepared:
    """With steps, validations, and the start that suits so many tokens."""
    texts, place = prepared.texts, prepared.place
    config = decided(prepared.config, decide.training(prepared.config, place, texts, pace))
    tokens = config.train.steps * decide.tokens_of_step(config, texts, place.num)
    again = replace(config, open=tuple(name for name in OPEN_NULL if name in prepared.open))
    return replace(prepared, config=decided(again, decide.start(again, tokens)))


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
    # The first batch on a GPU proves and compiles; processes that hold a target together must take the same number
    patient = device.type != "cpu" or target.share.size > 1
    measure = functools.partial(plan.measure_pace, tokens=tokens, wait=lambda: devices.wait(device), patient=patient)
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        progress.start("measuring this device"),
    ):
        if config.adapts_target:  # a second drafter would change it again
            online = Online(target, ())
            read = measure(lambda n: online(texts[n]), lambda n: None, lambda: None).read
            return decide.Pace(0.0, 4 * read, 0.0)
        drafter = build.make_drafter(config, target, packs)[0].to(device)
        with named("head.objective"):
            objective = build.make(config.head["objective"], drafter).train()
        with named("optimizer"):
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

        pace = measure(read_texts, take_step, update)
    return replace(pace, read=0.0) if served else pace


def show_plan(config: RunConfig, path: Path) -> str:
    """What `plan=true` prints: of this machine, after a few steps that are thrown away, or of another one from its figures."""
    here = not config.elsewhere
    if here:
        accelerator, config = build.start_processes(config)
        device, num = accelerator.device, accelerator.num_processes
    else:
        device, num = torch.device("cpu"), 1
        config = config.with_precision("bf16", "bfloat16")
    prepared = prepare(config, device, num, (lambda given: build.load_target(given, accelerator)) if here else None)
    if prepared.counted is None:
        raise ValueError("plan=true: this head or this target is not counted. Take a few steps: train.steps=10.")
    fits = True
    memory, pace, drafter = prepared.counted.memory, prepared.counted.pace, prepared.counted.drafter
    if here and not plan.problems(prepared.config, memory, prepared.place):
        target = prepared.target or build.load_target(prepared.config, accelerator)
        prepared, measured = choose_steps(prepared, target, accelerator)
        assert measured is not None
        pace, memory = measured, plan.measured_memory(memory, device)
    else:
        fits = not here
        prepared = settle_steps(prepared, pace)
    made = plan.make_plan(prepared.config, drafter, prepared.texts, prepared.place, memory, pace if fits else None)
    return f"{plan.heading(prepared.config, path, prepared.place)}\n{made}"
