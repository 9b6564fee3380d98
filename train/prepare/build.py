"""Builds a run from its settings: processes, target, data, drafter, objective, optimizer, validation, trainer."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import transformers
import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env, set_seed
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, fast, files, hub, precision, progress
from specdec.core.answer_text import TextDecoder
from specdec.core.option_types import prefix_option_names, raise_first
from specdec.core.sampling import Sampling
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Head
from specdec.measuring import trained_prompts
from specdec.measuring.contexts import TrainedLength
from specdec.measuring.measure import MeasureSettings, check_prompts
from specdec.measuring.replay import AnsweredPrompt, encode_answered_prompt, warn_of_writers
from specdec.target.fingerprint import UNREAD
from specdec.target.model import Target
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.conversations import Prompt
from train.data.packing import Packs, measure_coverage
from train.features.feature_files import FeatureFolder
from train.features.loader import Material, permute_packs
from train.features.outputs import ComputedFeatures, Features, StoredFeatures
from train.loop import optimizer as optimization
from train.loop.served_validation import ServedValidation
from train.loop.state import RunFolder
from train.loop.trainer import MIN_MEASURED_PACKS, Trainer
from train.loop.validate import Validation
from train.prepare import plan
from train.prepare.facts import MeasuredFacts, PlannedFacts, make_drafter
from train.prepare.plan import instantiate
from train.processes import (
    ProcessGroup,
    check_launcher,
    compute_by_main,
    count_threads,
    find_ignored_flags,
    is_main,
    share_texts,
)
from train.settings import record
from train.settings.decide import Decided, decide
from train.settings.options import RunConfig, RunOptions, fill_from_record, list_fixed_settings, read_settings
from train.show import display

ACCELERATE_PRECISIONS = {"bf16": "bf16", "fp32": "no"}  # accelerate's names of precisions
TEXTS_IN_FLIGHT = 64  # texts that each process asks servers for at once
SAMPLED_DOCUMENTS = 2000  # documents that are looked up in a folder of features before training, at most


def make_trainer(
    config: RunConfig, facts: MeasuredFacts, *, path: Path, accelerator: Accelerator, console: progress.Results
) -> Trainer:
    """The trainer of a run before its first step. path: the run's folder

    Refuses now what would fail after hours of training.
    """
    tokenizer, packs, target, options = facts.tokenizer, facts.packs, facts.target, config.head
    assert packs is not None
    packs.warn_of_losses()
    warn_of_writers(packs.writers, target)
    rows = reading.spread_rows(facts.heldout, config.validation.num_prompts)
    texts, prompts = encode_prompts(config, tokenizer, packs, rows)
    num_trained = warn_of_copies(rows, packs, config.start, recorded=texts is not None)
    drafter, spec = make_drafter(config, options.drafter, options.vocab_size, target, packs)
    longest = find_longest(config.start, facts)
    spec = {**spec, "trained_length": longest}
    drafter.to(accelerator.device)
    limited = config.drafting.limit_window(drafter)
    trained_length = TrainedLength.from_head("this run", longest, limited)
    for sentence in trained_length.describe_longer([len(prompt.tokens) for prompt in prompts]) if is_main() else ():
        warnings.warn(f"Held-out prompts: {sentence}", stacklevel=2)
    with prefix_option_names("features"):
        engine = connect_engine(config.features.urls, drafter, console)
    with prefix_option_names("head.objective"):
        objective = instantiate(options.objective, drafter)
    if config.train.context_parallel > 1:
        objective.text_share = share_texts(config.train.context_parallel, accelerator.device.type, config.data.length)
    with prefix_option_names("optimizer"):
        adapter = None if options.adapter is None else options.adapter.model_dump()
        optimizer = optimization.make_optimizer(drafter, config.optimizer, adapter=adapter)
    display.print_start(progress.print_note, drafter, packs, len(prompts))
    validation = Validation(
        accelerator,
        drafter,
        prompts,
        options=config.validation,
        drafting=config.drafting,
        measuring=make_measuring(config, facts),
        console=console,
        engine=engine,
    )
    check_validation(validation, drafter, source=config.data.heldout, ema=config.train.ema)
    validation.texts, validation.num_trained = texts, num_trained
    validation.served = make_served(config, facts, prompts, spec, path)
    if validation.served is not None:
        validation.served.reader = engine
        connect_served(validation.served, drafter, facts, minutes=config.train.timeout)
    validation.text_decoder = TextDecoder.from_tokenizer(tokenizer)
    features = make_features(config, drafter, packs, accelerator, engine)
    inputs = {"heldout": reading.digest_prompts(facts.heldout), **digest_target(target)}
    scheduler = optimization.make_schedule(optimizer, config.optimizer, steps=config.train.steps)
    return Trainer(
        accelerator,
        objective,
        optimizer,
        scheduler,
        material=Material(packs, config.data.length, features),
        validation=validation,
        settings=config.train,
        folder=RunFolder(path, spec, list_fixed_settings(config.document()) | inputs),
    )


def warn_of_copies(rows: list[dict], packs: Packs, start: str | None, *, recorded: bool) -> int:
    """The number of held-out prompts that are trained on, here or by the head of `start`. Warns of them."""
    ids = trained_prompts.find_trained_rows(rows, trained_prompts.join_digests(packs.prompt_digests, start))
    if ids and is_main():
        name = "validation.answers" if recorded else "data.heldout"
        copies = trained_prompts.count_copies(ids, len(rows), f"prompts of {name}")
        warnings.warn(f"{copies} are trained on, so tau flatters: give others.", stacklevel=2)
    return len(ids)


def find_longest(start: str | None, facts: MeasuredFacts) -> int:
    """Tokens of the longest text that the drafter is trained on, here or before. start: checkpoint"""
    before = None if start is None else checkpoint.find_trained_length(checkpoint.resolve(start))
    return max(int(facts.texts.lengths.max()), before or 0)


# Processes and precision


def start_processes(options: RunOptions) -> PartialState:
    """Seeds everything, sets the threads of a CPU, and joins the processes of the run."""
    if options.fast is not None:
        fast.turn_off(options.fast)
    set_seed(options.train.seed)
    transformers.utils.logging.disable_progress_bar()
    check_launcher()
    # A little more than the trainer waits, which says what for
    timeout = timedelta(minutes=options.train.timeout + 1)
    processes = PartialState(cpu=uses_cpu(), timeout=timeout)
    # One process has `cuda`, which no tensor's device equals
    processes.device = devices.number_device(processes.device)
    if processes.device.type == "cpu":  # the launcher sets one thread a process
        torch.set_num_threads(options.threads or count_threads(processes.num_processes))
    return processes


def uses_cpu() -> bool:
    """Whether a run is on the CPU. It is stated, because several processes would not find each other otherwise."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def start_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator of a run. Warns of flags that the run does not follow, and of a slow precision."""
    # Buffers are made alike in all processes and never change in a forward pass; gradients stay where they are summed
    settings = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=uses_cpu(), mixed_precision=ACCELERATE_PRECISIONS[config.precision], kwargs_handlers=[settings]
    )
    for sentence in find_ignored_flags(config.precision, accelerator.num_processes):
        warnings.warn(sentence, stacklevel=2)
    choice = precision.choose_dtype(accelerator.device)
    precisions = f"precision={config.precision} target.dtype={config.target.dtype}"
    if choice.dtype == "float32" and "bf" in precisions and accelerator.device.type == "cpu":
        progress.print_note(f"{precisions} is slow here ({choice.reason}); auto is fp32 and float32")
    return accelerator


def fill_from_first_launch(options: RunOptions, path: Path) -> RunOptions:
    """The options with the decisions of a resumed run's first launch in place of `auto`. path: folder of the run"""
    return fill_from_record(options, read_settings(path / "config.yaml")) if options.resume else options


@contextlib.contextmanager
def name_remedies(options: RunOptions) -> Iterator[None]:
    """Within, an error of full memory becomes a ValueError with the options that lower the need."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (full := devices.describe_out_of_memory(error)) is None:
            raise
        raise ValueError(f"{full}: {options.describe_remedies()}.") from error


# Target and data


def digest_target(target: Target) -> dict[str, str | None]:
    """Digests of a target. A resumed run compares them. Where layers were not read, it compares only the embeddings."""
    fingerprint = target.fingerprint()
    return {"target": None if UNREAD in fingerprint else fingerprint, "embeddings": target.embeddings_fingerprint()}


def encode_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, packs: Packs, rows: list[dict]
) -> tuple[list[AnsweredPrompt] | None, list[Prompt]]:
    """Recorded answers, if rows are these, and held-out prompts.

    Prompts have the template arguments of the rows that are trained on, unless settings or prompts name others.
    """
    if config.validation.has_recorded_answers:
        texts = [encode_answered_prompt(tokenizer, row) for row in rows]
        return texts, [Prompt(row["id"], row["category"], text.prompt) for row, text in zip(rows, texts)]
    with reading.name_location(str(config.data.heldout)):
        return None, data.encode_prompts(rows, tokenizer, {**packs.template_arguments, **config.template})


# The drafter


def pin_start(options: RunOptions, path: Path) -> RunOptions:
    """Adds the commit to `start` if that is a head on the Hub. A resumed run has the commit of its first launch.

    path: folder of the run
    """
    start = options.start
    if start is None:
        return options
    if not hub.is_hub_head(start):
        checkpoint.read_document(checkpoint.resolve(start))  # refused now, before anything is loaded
        return options
    recorded = checkpoint.read_facts(path).get("start", {})
    if options.resume and recorded.get("given") == start:
        return options.model_copy(update={"start": recorded["used"]})
    pinned = compute_by_main(
        lambda: hub.pin_commit(checkpoint.resolve(start)),
        "the head that training starts from",
        minutes=options.train.timeout,
    )
    return options.model_copy(update={"start": pinned})


# The target's outputs


def connect_engine(urls: str, drafter: Head, console: progress.Results) -> EngineTarget | None:
    """The servers that read texts; None if the target in this process does. urls: comma list"""
    if not urls:
        return None
    client = EngineClient(urls, in_flight=TEXTS_IN_FLIGHT, longest=5, say=console.say)
    return EngineTarget(client, drafter.target, drafter.target_layers)


def make_features(
    config: RunConfig, drafter: Head, packs: Packs, accelerator: Accelerator, engine: EngineTarget | None
) -> Features | None:
    """The source of the target's outputs, once all processes have it; None if the objective reads an adapted target."""
    if drafter.adapts_target:
        return None
    with prefix_option_names("features"):
        features = open_features(config, drafter, packs, accelerator, engine)
    compute_by_main(lambda: None, "the folder of features", minutes=config.train.timeout)
    return features


def open_features(
    config: RunConfig, drafter: Head, packs: Packs, accelerator: Accelerator, engine: EngineTarget | None
) -> Features:
    """The source of the target's outputs: a target, servers, or a folder, which the main process makes.

    Prints the size of the folder. Raises ValueError for a folder of another target, or a disk that is too small.
    """
    options, train, target = config.features, config.train, drafter.target
    if options.mode == "online":
        return ComputedFeatures(target, drafter.target_layers)
    if options.mode == "engine":
        return StoredFeatures(target, drafter.target_layers, folder=None, reader=engine)
    num = train.steps * train.batch * train.accumulation * accelerator.num_processes
    num = max(num, config.solve_packs if config.start is None else 0, MIN_MEASURED_PACKS)
    folder = FeatureFolder(target, drafter.target_layers, Path(options.folder))
    size = folder.count_bytes(count_missing(folder, packs, permute_packs(len(packs), train.seed)[:num]))
    if size:
        folder.check_space(size)
        progress.print_note(
            f"features up to {size / 1e9:.2f} GB will be written to {options.folder} as they are needed"
        )
    if accelerator.is_main_process:
        folder.create()
    return StoredFeatures(target, drafter.target_layers, folder=folder, reader=engine)


def count_missing(folder: FeatureFolder, packs: Packs, reads: list[int]) -> int:
    """The tokens that a folder lacks of packs' documents, by an even sample. reads: numbers of packs"""
    numbers = numpy.unique(
        numpy.concatenate([packs.packed_rows[packs.pack_ends[at] : packs.pack_ends[at + 1]] for at in reads])
    )
    sample = numbers[:: math.ceil(len(numbers) / SAMPLED_DOCUMENTS)]
    texts = [torch.tensor(packs.encoded.read_arrays(number, packs.length)[0]) for number in sample.tolist()]
    missing = sum(len(text) for text in texts if not folder.contains(text))
    return round(missing * len(numbers) / len(sample))


# Validation


def make_measuring(config: RunConfig, facts: MeasuredFacts) -> MeasureSettings:
    """How held-out prompts are answered."""
    stop = data.list_stop_tokens(facts.tokenizer, facts.target.model.generation_config)
    sampling, options = Sampling(temperature=config.validation.temperature), config.validation
    return MeasureSettings(sampling, stop, options.max_new_tokens, seed=config.train.seed)


def check_validation(validation: Validation, drafter: Head, *, source: str, ema: float | None) -> None:
    """Raises ValueError if the first validation would fail. source: file of the prompts; ema: `train.ema`"""
    if validation.engine is None:
        drafting, measuring = validation.drafting, validation.measuring
        with prefix_option_names("decode"):
            proposer, runner = drafting.proposer(drafter), drafting.runner()
            sampling, stop = measuring.sampling, measuring.stop
            decoder = drafting.decoder(drafter.target, proposer, sampling=sampling, stop=stop, runner=runner)
        with prefix_option_names("validation"):
            check_prompts(decoder, validation.prompts, measuring.max_new_tokens, source=source)
    needs = "a chain (decode=chain) and validation.decode=best or end"
    wrong = {
        "features.engine=: without the target in this process a drafter is judged by replay, which needs "
        f"{needs}. Or use features.mode=online.": validation.engine is not None,
        f"train.ema={ema} lets replay choose between the weights and their average, and replay does not apply here: it "
        f"needs {needs}, and a head that leaves the target as it is. Or set train.ema=null.": ema is not None,
    }
    raise_first(wrong if not validation.replays else {})


def make_served(
    config: RunConfig, facts: MeasuredFacts, prompts: list[Prompt], spec: dict, path: Path
) -> ServedValidation | None:
    """The validation in an engine; None without one. spec: see `ServedValidation`; path: folder of the run"""
    if config.validation.engine is None:
        return None
    measuring, console = make_measuring(config, facts), progress.Results()
    group = ProcessGroup(0, 1)  # the main process alone has a share of the requests
    return ServedValidation(config.validation, config.decode.depth, measuring, prompts, spec, path, group, console)


def connect_served(served: ServedValidation, drafter: Head, facts: MeasuredFacts, *, minutes: float) -> None:
    """Tries the servers, and puts the drafter into the engine, as later validations will do.

    Raises ValueError for servers that will not do.
    """

    def try_servers() -> None:
        progress.print_note(f"engine   {served.check_servers(facts.target, facts.tokenizer, drafter)}")

    compute_by_main(try_servers, "the engine of validation", minutes=minutes)


def record_run(config: RunConfig, trainer: Trainer, *, arguments: list[str], start: str | None) -> None:
    """Writes config.yaml, about.json and prompts of a run. arguments: words for train.py; start: user's `start`"""
    path, document, packs = trainer.folder.path, config.document(), trainer.material.packs
    files.write_text(path / "config.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    drafter, num_trained = trainer.drafter, trainer.validation.num_trained
    vocab = drafter.draft_to_target
    figures = {
        "conversations": len(packs.packed_rows),
        "supervised tokens": packs.num_supervised,
        **({"held-out prompts trained on": num_trained} if num_trained else {}),
        "covered": 1.0 if vocab is None else measure_coverage(packs, vocab.cpu()),
        "fingerprint": packs.fingerprint,
        **({"template": packs.template_arguments} if packs.template_arguments else {}),
    }
    num = trainer.num_processes
    record.write_facts(path, document, drafter, figures, start=start, arguments=arguments, num_processes=num)
    trained_prompts.write_digests(path, trained_prompts.join_digests(packs.prompt_digests, config.start))


# Plans


def print_decisions(decided: Decided) -> None:
    for decision in decided.decisions:
        if decision.reason:
            progress.print_note(f"auto     {decision}")


def show_plan(options: RunOptions, path: Path) -> str:
    """The plan that `plan=true` prints: of this machine, after a few steps, or of another one, from its figures."""
    facts = PlannedFacts(options) if options.plans_other_machine else MeasuredFacts(options, start_processes(options))
    decided = decide(options, facts)
    print_decisions(decided)
    config, run_count = decided.config, facts.run_count
    assert run_count is not None
    if facts.packs is not None:
        facts.packs.warn_of_losses()
    memory, pace = run_count.memory, facts.pace
    if isinstance(facts, MeasuredFacts) and pace is not None:
        memory = plan.measure_memory(memory, facts.processes.device)
    printed_plan = plan.make_plan(config, run_count, facts.texts, facts.hardware, memory, pace)
    return f"{plan.describe_plan(config, path, facts.hardware)}\n{printed_plan}{describe_served(config, facts, path)}"


def describe_served(config: RunConfig, facts: PlannedFacts, path: Path) -> str:
    """A line of the plan on the engine of validation, which gets no head now; empty without one."""
    if not isinstance(facts, MeasuredFacts) or facts.packs is None or config.validation.engine is None:
        return ""
    _, prompts = encode_prompts(config, facts.tokenizer, facts.packs, reading.spread_rows(facts.heldout, 1))
    try:
        served = make_served(config, facts, prompts, {}, path)
        return "" if served is None else f"\nengine   {served.check_servers(facts.target, facts.tokenizer)}"
    except ValueError as error:
        return f"\ndoes not fit: {error}"
