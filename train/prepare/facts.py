"""Facts on which decisions rest: data in packs, the shapes of the target, memory, and the speed of this device."""

import functools
import itertools
import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import PartialState
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, precision, progress
from specdec.core.option_types import prefix_option_names
from specdec.heads.base import Head
from specdec.target.model import Target, TargetOutput, load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.chat_template import check_arguments
from specdec.text.messages import write_value
from train.data.encoding import Encoding, load_rows
from train.data.packing import EncodedRows, Packs, choose_draft_vocab, pack_rows
from train.features.loader import Material, permute_packs
from train.features.outputs import ComputedFeatures
from train.loop import optimizer as optimization
from train.prepare import plan
from train.prepare.plan import instantiate
from train.processes import compute_by_main, make_mesh, share_texts
from train.settings.decide import Hardware, Memory, Pace, RunSizes, TargetFacts, TextLengths
from train.settings.options import RunOptions

CHARACTERS_PER_TOKEN = 4  # characters of a token, where the tokenizer cannot be reached
DEFAULT_LAYERS = 3  # hidden states that a head reads, where its layers are not known
TIMED_BATCHES = 4  # batches that measure the speed; the first warms up


class PlannedFacts:
    """Facts of a plan for another machine, from its figures. Without a tokenizer the lengths of rows are guessed.

    heldout: rows of prompts, or of recorded answers
    packs, texts: data in packs of the newest length; packs is None where rows are not encoded
    run_count: counts for the newest sizes; None for heads that change the target, and for what cannot be counted
    pace: None: not known, or not of this machine
    Raises ValueError for paths that do not exist, before the target is loaded.
    """

    def __init__(self, options: RunOptions, device: torch.device | None = None, num_processes: int = 1):
        """device, num_processes: device and number of the run's processes"""
        self.options = options
        self.hardware = compute_by_main(
            lambda: plan.find_hardware(options, device or torch.device("cpu"), num_processes),
            "this machine",
            minutes=options.train.timeout,
        )
        if options.plan:
            plan.check_plan(options, self.hardware)
        if options.validation.has_recorded_answers:
            self.heldout = reading.load_conversations(options.validation.answers, arguments=options.template)
        else:
            self.heldout = reading.load_prompts(options.data.heldout, split=options.data.heldout_split)
        self.outline: Target | None = None
        self.packs: Packs | None = None
        self.texts = TextLengths(numpy.zeros(0), 0, numpy.zeros(0))
        self.run_count: plan.RunCount | None = None
        self.pace: Pace | None = None

    @property
    def target_shapes(self) -> Target:
        """The target, or its outline. Raises ValueError for a target whose shapes cannot be told without values."""
        if self.outline is None:
            name = self.options.target.name
            raise ValueError(f"{name} cannot be counted without its values: plan=true loads it, on a machine that can.")
        return self.outline

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        with prefix_option_names("target"):
            target = self.options.target
            tokenizer = load_tokenizer(
                target.name, revision=target.revision, trust_remote_code=target.trust_remote_code
            )
            data.check_offsets(tokenizer)
            return tokenizer

    @cached_property
    def rows(self) -> tuple[EncodedRows, ndarray] | None:
        """Encoded rows, and the numbers of those that are trained on; None where there is no tokenizer."""
        try:
            tokenizer = self.tokenizer
        except ValueError:
            check_listed_options(self.options)
            return None
        return encode_rows(self.options, tokenizer)

    @cached_property
    def row_lengths(self) -> ndarray:
        if self.rows is None:
            return guess_lengths(self.options)
        rows, numbers = self.rows
        return rows.lengths[numbers]

    def choose_dtype(self) -> precision.DtypeChoice:
        return precision.DtypeChoice("bfloat16", "")

    def read_target(self, dtype: str) -> TargetFacts:
        self.dtype = dtype
        with prefix_option_names("target"):
            self.outline = plan.make_outline(self.options, plan.read_target_config(self.options), dtype)
        shapes = self.target_shapes
        limits = [limit for limit in (shapes.max_positions, shapes.rotary_boundary) if limit is not None]
        packed = decide_packing(shapes, length=1, pack=self.options.data.pack)
        return TargetFacts(shapes.vocab_size, min(limits, default=None), packed, count_drafts(self.options))

    def pack_rows(self, length: int) -> TextLengths:
        with prefix_option_names("data"):
            packed = decide_packing(self.target_shapes, length=length, pack=self.options.data.pack)
            if self.rows is None:
                self.texts = guess_packs(self.row_lengths, length)
            else:
                rows, numbers = self.rows
                self.packs = Packs(rows, length=length, packed=packed, row_numbers=numbers)
                self.texts = read_text_lengths(self.packs)
        return self.texts

    def cut_rows(self, length: int) -> TextLengths:
        lengths = numpy.minimum(self.texts.lengths, length)
        num_packs = max(self.texts.num_packs, math.ceil(lengths.sum() / length))
        self.texts = replace(self.texts, lengths=lengths, num_packs=num_packs)
        return self.texts

    def count_memory(self, sizes: RunSizes) -> Memory | None:
        self.run_count = None
        if self.outline is not None and not self.options.adapts_target:
            self.run_count = try_count_run(self.options, sizes, self.outline, self.texts, self.hardware)
        if self.run_count is None and self.options.plan:
            raise ValueError("plan=true: this head or this target is not counted. Take a few steps: train.steps=10.")
        return None if self.run_count is None else self.run_count.memory

    def count_features(self) -> int:
        layers = DEFAULT_LAYERS if self.run_count is None else len(self.run_count.drafter.target_layers)
        return plan.count_bytes_per_token(self.target_shapes, layers)

    def measure_pace(self, sizes: RunSizes) -> Pace:
        assert self.run_count is not None
        self.pace = self.run_count.pace
        return self.pace


class MeasuredFacts(PlannedFacts):
    """Facts of this machine, as the main process finds them. The target is loaded when a fact needs it."""

    def __init__(self, options: RunOptions, processes: PartialState):
        super().__init__(options, processes.device, processes.num_processes)
        self.processes = processes

    @cached_property
    def target(self) -> Target:
        return load_target(self.options, self.dtype, self.processes)

    @property
    def target_shapes(self) -> Target:
        return self.outline or self.target

    @cached_property
    def rows(self) -> tuple[EncodedRows, ndarray]:
        return encode_rows(self.options, self.tokenizer)

    def choose_dtype(self) -> precision.DtypeChoice:
        return compute_by_main(
            lambda: precision.choose_dtype(self.processes.device),
            "what the device computes in",
            minutes=self.options.train.timeout,
        )

    def measure_pace(self, sizes: RunSizes) -> Pace:
        """A plan's pace is that of the machine's figures where the run does not fit into its memory."""
        if self.run_count is not None and not self.run_count.memory.fits(self.hardware):
            return self.run_count.pace
        assert self.packs is not None
        pace = time_steps(self.options, sizes, self.packs, self.target, self.processes.device)
        self.pace = compute_by_main(lambda: pace, "the speed of this device", minutes=self.options.train.timeout)
        return self.pace


# Target and data


def load_target(options: RunOptions, dtype: str, processes: PartialState) -> Target:
    """The whole target, or only embeddings and output layer where a server has its layers."""
    target = options.target
    if target.device == "auto" and processes.num_processes > 1:
        raise ValueError(
            f"target.device=auto spreads one target over all GPUs, and {processes.num_processes} processes would each "
            "load one: use accelerate launch --num_processes 1, or target.device=null."
        )
    arguments: dict[str, Any] = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    with prefix_option_names("target"):
        arguments |= {"dtype": dtype, "device": target.device or processes.device}
        if options.features.urls:
            return Target.load_ends(target.name, **arguments | {"device": processes.device})
        if target.shard:
            size = processes.num_processes if target.shard is True else target.shard
            mesh = make_mesh("dp_shard", size, processes.device.type, f"shard={target.shard}".lower())
            return Target.load_sharded(target.name, mesh, **arguments)
        return Target.load(target.name, **arguments)


def decide_packing(target: Target, *, length: int, pack: bool | None) -> bool:
    """Whether rows of `length` tokens hold several conversations. pack: the user's choice; None: they do

    Raises ValueError for a length that the target cannot read.
    """
    limit, boundary = target.max_positions, target.rotary_boundary
    if limit is not None and length > limit:
        raise ValueError(f"data.length={length}: {target.name} reads {limit} positions, so lower it to at most that.")
    if boundary is not None and length > boundary:
        raise ValueError(
            f"data.length={length}: {target.name} turns keys by other angles in texts longer than {boundary} tokens "
            "(LongRoPE), and would in all rows of a batch at once: lower it to at most that."
        )
    return pack is not False


def encode_rows(options: RunOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[EncodedRows, numpy.ndarray]:
    """The conversations, and the numbers of those that are trained on."""
    sources, template = options.data, options.template
    check_arguments(tokenizer, template)
    with prefix_option_names("data"):
        folder = Path(sources.cache)
        encoding = Encoding(
            tokenizer, folder, sources.split, sources.limit, workers=sources.workers, arguments=template
        )
        # whichever process encodes shows it
        return load_rows(sources.train, encoding, hold_out=sources.hold_out, tokens=sources.tokens)


def check_listed_options(options: RunOptions) -> None:
    """Raises ValueError for a value of the chat template that the target's file in conf/target does not list."""
    target = options.target
    if target.template_options is None or (target.outline or {}).get("of") != target.name:
        return
    lists = {key: ", ".join(map(write_value, values)) for key, values in target.template_options.items()}
    for key, value in options.template.items():
        if value not in target.template_options.get(key, ()):
            listed = "; ".join(f"{name}: {values}" for name, values in lists.items()) or "no option"
            raise ValueError(
                f"template.{key}={write_value(value)}: the chat template of {target.name} does not take it. It takes "
                f"{listed}."
            )


def read_text_lengths(packs: Packs) -> TextLengths:
    lengths = numpy.minimum(packs.encoded.lengths[packs.packed_rows], packs.length)
    return TextLengths(lengths, len(packs), packs.supervised_counts.numpy())


def guess_packs(lengths: ndarray, length: int) -> TextLengths:
    """The data in packs, from guessed lengths."""
    cut = numpy.minimum(lengths, length)
    num = int(pack_rows(cut, length).max(initial=0)) + 1
    return TextLengths(cut, num, numpy.zeros(0, dtype=numpy.int64))


def guess_lengths(options: RunOptions) -> ndarray:
    """Tokens of each row, where the tokenizer cannot be reached: its characters over CHARACTERS_PER_TOKEN, [R]"""
    lengths = []
    for source in reading.read_sources(options.data.train):
        for _, row in itertools.islice(reading.read_rows(source, options.data.split), options.data.limit):
            lengths.append(len(str(row.get("messages") or row.get("text") or row)) // CHARACTERS_PER_TOKEN + 1)
    progress.print_note(
        f"The tokenizer of {options.target.name} cannot be reached: {CHARACTERS_PER_TOKEN} characters are counted as a "
        "token."
    )
    return numpy.array(lengths, dtype=numpy.int64)


def count_drafts(options: RunOptions) -> int:
    """The drafts that the head can make in a row, by its settings, or by those of the checkpoint `start`."""
    spec = options.head.drafter
    if options.start is not None:
        spec = checkpoint.read_document(checkpoint.resolve(options.start))
    numbers = [spec.get(name) for name in ("num_heads", "num_modules", "num_drafts")]
    return min([number for number in (*numbers, options.decode.nodes) if isinstance(number, int)], default=4)


def try_count_run(
    options: RunOptions, sizes: RunSizes, outline: Target, texts: TextLengths, hardware: Hardware
) -> plan.RunCount | None:
    """The counts of a run; None for a head that cannot be counted. Its own refusals come when it is made."""
    try:
        with torch.random.fork_rng(devices=[]):  # constructors draw random numbers
            return plan.count_run(options, sizes, outline, texts, hardware)
    except plan.META_ERRORS as error:
        if options.plan:
            raise ValueError(f"This target with this head cannot be counted ({error}).") from error
        return None


# The drafter


def make_drafter(
    options: RunOptions, spec: dict, vocab_size: int | None, target: Target, packs: Packs
) -> tuple[Head, dict]:
    """A new drafter as the settings say, or the one of the checkpoint `start`, and its spec for checkpoints.

    spec: `head.drafter`, decided
    """

    def choose_vocab(old_vocab: Tensor | None = None) -> Tensor | None:
        return compute_by_main(
            lambda: choose_draft_vocab(packs, size=vocab_size, num_tokens=target.vocab_size),
            "the draft vocabulary",
            minutes=options.train.timeout,
        )

    if options.start is None:
        vocab = choose_vocab()
        with prefix_option_names("head.drafter"):
            return instantiate(spec, target, vocab=vocab), spec
    new_vocab = None if options.start_vocab == "keep" else choose_vocab
    drafter, start_spec = checkpoint.load_for_training(options.start, target, spec, new_vocab)
    if start_spec["_target_"] != spec["_target_"]:
        raise ValueError(
            f"start={options.start} holds {start_spec['_target_']} and head={spec['_target_']}: give head= "
            "the family of the checkpoint. Its sizes and vocabulary are then the checkpoint's, the objective is the "
            "head's."
        )
    return drafter, start_spec


# The speed of this device


def time_steps(options: RunOptions, sizes: RunSizes, packs: Packs, target: Target, device: torch.device) -> Pace:
    """The pace of a few steps with a drafter that is thrown away. All processes call this together."""
    order = permute_packs(len(packs), options.train.seed)
    size, material = min(sizes.batch, len(order)), Material(packs, sizes.length, None)
    texts = []
    for start in range(0, TIMED_BATCHES * size, size):
        rows = [packs[order[position % len(order)]] for position in range(start, start + size)]
        texts.append(material.collate(rows).move_to(device))
    tokens = [int((batch.documents >= 0).sum()) for batch in texts]
    outputs: dict[int, Any] = {}
    # The first batch on a GPU proves and compiles. Processes that divide a target or an update must take as many steps
    patient = device.type != "cpu" or torch.distributed.is_initialized()
    measure = functools.partial(
        plan.measure_pace, tokens=tokens, wait=lambda: devices.wait_for_device(device), patient=patient
    )
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        progress.start_task("measuring this device"),
    ):
        if options.adapts_target:  # a second drafter would change it again
            online = ComputedFeatures(target, ())
            read = measure(lambda n: online(texts[n]), lambda n: None, lambda: None).read
            return Pace(0.0, 4 * read, 0.0)
        drafter = make_drafter(options, sizes.drafter, sizes.vocab_size, target, packs)[0].to(device)
        with prefix_option_names("head.objective"):
            objective: Any = plan.make_objective(options, sizes, drafter).train()
        objective.text_share = share_texts(options.train.context_parallel, device.type, sizes.length)
        with prefix_option_names("optimizer"):
            optimizer = optimization.make_optimizer(drafter, options.optimizer)
        online, served = ComputedFeatures(target, drafter.target_layers), bool(options.features.urls)

        def read_texts(number: int) -> None:
            shape = (*texts[number].tokens.shape, len(drafter.target_layers) * target.width)
            shapes = (shape, (*shape[:2], target.width))
            random = [torch.randn(size, dtype=target.dtype, device=device) for size in shapes]
            outputs[0] = TargetOutput(*random) if served else online(texts[number])

        def take_step(number: int) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=sizes.precision == "bf16"):
                loss = objective(texts[number], outputs[0], compare=False)
            (loss.total / tokens[number]).backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        pace = measure(read_texts, take_step, update)
    return replace(pace, read=0.0) if served else pace
