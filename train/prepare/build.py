"""What a run is made of, from its settings: processes, target, data, drafter, objective, optimizer, validation, trainer."""

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
from accelerate.utils import parse_flag_from_env, set_seed
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import devices, fast, files, hub, precision, progress
from specdec.core.option_types import prefix_option_names, raise_first
from specdec.core.sampling import Sampling
from specdec.engines.client import EngineClient
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Drafter, Head
from specdec.measuring import trained_prompts
from specdec.measuring.measure import check_prompts
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
from train.loop.state import RunFolder
from train.loop.trainer import MIN_MEASURED_PACKS, Trainer
from train.loop.validate import Validation
from train.prepare import plan
from train.prepare.facts import MeasuredFacts, PlannedFacts, make_drafter
from train.prepare.plan import instantiate
from train.processes import Waiting, check_launcher, compute_by_main, count_threads, find_ignored_flags, is_main
from train.settings import record
from train.settings.decide import Decided, decide
from train.settings.options import RunConfig, RunOptions, fill_from_record, list_fixed_settings, read_settings
from train.show import display

ACCELERATE_PRECISIONS = {"bf16": "bf16", "fp32": "no"}  # of train.py, and what accelerate calls them
TEXTS_IN_FLIGHT = 64  # texts that servers are asked for at once, by each process
SAMPLED_DOCUMENTS = 2000  # documents that are looked for in a folder before training


def make_trainer(
    config: RunConfig, facts: MeasuredFacts, *, path: Path, accelerator: Accelerator, console: progress.Results
) -> Trainer:
    """The trainer of a run before its first step. path: the run's folder

    Refuses now what would fail after hours of training.
    """
    tokenizer, packs, target, options = facts.tokenizer, facts.packs, facts.target, config.head
    assert packs is not None
    warn_of_writers(packs.writers, target)
    rows = reading.spread_rows(facts.heldout, config.validation.num_prompts)
    texts, prompts = encode_prompts(config, tokenizer, packs, rows)
    num_trained = warn_of_copies(rows, packs, config.start, recorded=texts is not None)
    drafter, spec = make_drafter(config, options.drafter, options.vocab_size, target, packs)
    drafter.to(accelerator.device)
    with prefix_option_names("features"):
        engine = connect_engine(config.features.urls, drafter, console)
    with prefix_option_names("head.objective"):
        objective = instantiate(options.objective, drafter)
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
        seed=config.train.seed,
        stop=data.list_stop_tokens(tokenizer, target.model.generation_config),
        console=console,
        engine=engine,
    )
    check_validation(validation, drafter, source=config.data.heldout, ema=config.train.ema)
    validation.texts, validation.num_trained = texts, num_trained
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
        folder=RunFolder(path, spec, list_fixed_settings(config.document()) | inputs, target.identity),
    )


def warn_of_copies(rows: list[dict], packs: Packs, start: str | None, *, recorded: bool) -> int:
    """How many held-out rows ask what is trained on, too, here or by the head that training starts from. Warns of them."""
    ids = trained_prompts.find_trained_rows(rows, trained_prompts.join_digests(packs.prompt_digests, start))
    if ids and is_main():
        name = "validation.answers" if recorded else "data.heldout"
        copies = trained_prompts.count_copies(ids, len(rows), f"prompts of {name}")
        warnings.warn(f"{copies} are trained on, so tau flatters: give others.", stacklevel=2)
    return len(ids)


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
    """Whether a run is on the CPU. This is said outright, or several processes would not find each other."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def start_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator of a run whose precision is decided. Warns of what the run does not follow, and of a slow precision."""
    accelerator = Accelerator(cpu=uses_cpu(), mixed_precision=ACCELERATE_PRECISIONS[config.precision])
    for sentence in find_ignored_flags(config.precision, accelerator.num_processes):
        warnings.warn(sentence, stacklevel=2)
    choice = precision.choose_dtype(accelerator.device)
    precisions = f"precision={config.precision} target.dtype={config.target.dtype}"
    if choice.dtype == "float32" and "bf" in precisions and accelerator.device.type == "cpu":
        progress.print_note(f"{precisions} is slow here ({choice.reason}); auto is fp32 and float32")
    return accelerator


def fill_from_first_launch(options: RunOptions, path: Path) -> RunOptions:
    """What was decided in the first launch of a run that is resumed, on whatever machine, in the place of each `auto`.

    path: of the run
    """
    return fill_from_record(options, read_settings(path / "config.yaml")) if options.resume else options


@contextlib.contextmanager
def name_remedies(options: RunOptions) -> Iterator[None]:
    """Within, memory that does not suffice ends in a sentence with the options that lower what is needed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (full := devices.describe_out_of_memory(error)) is None:
            raise
        raise ValueError(f"{full}: {options.describe_remedies()}.") from error


# Target and data


def digest_target(target: Target) -> dict[str, str | None]:
    """Digests by which a resumed run knows its target. Where layers were not read, only the embeddings are compared."""
    fingerprint = target.fingerprint()
    return {"target": None if UNREAD in fingerprint else fingerprint, "embeddings": target.embeddings_fingerprint()}


def encode_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, packs: Packs, rows: list[dict]
) -> tuple[list[AnsweredPrompt] | None, list[Prompt]]:
    """Recorded answers, if rows are these, and held-out prompts, with the template arguments of the rows that are trained on, unless
    the settings or a prompt say others."""
    if config.validation.has_recorded_answers:
        texts = [encode_answered_prompt(tokenizer, row) for row in rows]
        return texts, [Prompt(row["id"], row["category"], text.prompt) for row, text in zip(rows, texts)]
    with reading.name_location(str(config.data.heldout)):
        return None, data.encode_prompts(rows, tokenizer, {**packs.template_arguments, **config.template})


# The drafter


def pin_start(options: RunOptions, path: Path) -> RunOptions:
    """Adds the commit to `start` if that is a head on the Hub: today's, or in a resumed run the one of its first launch.

    path: of the run
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
    pin = lambda: hub.pin_commit(checkpoint.resolve(start))
    pinned = compute_by_main(pin, "the head that training starts from", minutes=options.train.timeout)
    return options.model_copy(update={"start": pinned})


# The target's outputs


def connect_engine(urls: str, drafter: Head, console: progress.Results) -> EngineTarget | None:
    """The servers that read texts, tried; None: the target in this process does. urls: a comma list"""
    if not urls:
        return None
    client = EngineClient(urls, in_flight=TEXTS_IN_FLIGHT, longest=5, say=console.say)
    return EngineTarget(client, drafter.target, drafter.target_layers)


def make_features(
    config: RunConfig, drafter: Head, packs: Packs, accelerator: Accelerator, engine: EngineTarget | None
) -> Features | None:
    """The source of the target's outputs, once all processes have it; None: the objective reads an adapted target itself, with gradient."""
    if drafter.adapts_target:
        return None
    with prefix_option_names("features"):
        features = open_features(config, drafter, packs, accelerator, engine)
    waiting = Waiting(config.train.timeout, accelerator.process_index, accelerator.num_processes)
    with waiting("the folder of features"):
        accelerator.wait_for_everyone()
    return features


def open_features(
    config: RunConfig, drafter: Head, packs: Packs, accelerator: Accelerator, engine: EngineTarget | None
) -> Features:
    """The source of the target's outputs: computed for every batch, or kept in a folder, which the main process makes.

    Says how large a folder will be. Raises ValueError for a folder of another target or a disk too small.
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
    """Tokens that a folder lacks of the documents of some packs; of many documents it looks for an even sample."""
    numbers = numpy.unique(
        numpy.concatenate([packs.packed_rows[packs.pack_ends[at] : packs.pack_ends[at + 1]] for at in reads])
    )
    sample = numbers[:: math.ceil(len(numbers) / SAMPLED_DOCUMENTS)]
    texts = [torch.tensor(packs.encoded.read_arrays(number, packs.length)[0]) for number in sample.tolist()]
    missing = sum(len(text) for text in texts if not folder.contains(text))
    return round(missing * len(numbers) / len(sample))


# Validation


def check_validation(validation: Validation, drafter: Head, *, source: str, ema: float | None) -> None:
    """Raises ValueError for what would fail at the first validation. source: of the prompts; ema: `train.ema`"""
    if validation.engine is None:
        drafting, options = validation.drafting, validation.settings
        with prefix_option_names("decode"):
            proposer, runner = drafting.proposer(drafter), drafting.runner()
            sampling = Sampling(temperature=options.temperature)
            decoder = drafting.decoder(drafter.target, proposer, sampling=sampling, stop=validation.stop, runner=runner)
        with prefix_option_names("validation"):
            check_prompts(decoder, validation.prompts, options.max_new_tokens, source=source)
    needs = "a chain (decode=chain) and validation.decode=best or end"
    wrong = {
        "features.engine=: without the target in this process a drafter is judged by replay, which needs "
        f"{needs}. Or use features.mode=online.": validation.engine is not None,
        f"train.ema={ema} lets replay choose between the weights and their average, and replay does not apply here: it needs "
        f"{needs}, and a head that leaves the target as it is. Or set train.ema=null.": ema is not None,
    }
    raise_first(wrong if not validation.replays else {})


def record_run(config: RunConfig, trainer: Trainer, *, arguments: list[str], start: str | None) -> None:
    """Writes what a run was made of to its folder. arguments: of train.py; start: as the user wrote it"""
    path, document, packs = trainer.folder.path, config.document(), trainer.material.packs
    files.write_text(path / "config.yaml", yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    drafter, num_trained = trainer.drafter, trainer.validation.num_trained
    vocab = drafter.draft_to_target if isinstance(drafter, Drafter) else None
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
    """What `plan=true` prints: of this machine, after a few steps that are thrown away, or of another one from its figures."""
    facts = PlannedFacts(options) if options.plans_other_machine else MeasuredFacts(options, start_processes(options))
    decided = decide(options, facts)
    print_decisions(decided)
    config, counted = decided.config, facts.run_count
    assert counted is not None
    memory, pace = counted.memory, facts.pace
    if isinstance(facts, MeasuredFacts) and pace is not None:
        memory = plan.measure_memory(memory, facts.processes.device)
    printed_plan = plan.make_plan(config, counted.drafter, facts.texts, facts.hardware, memory, pace)
    return f"{plan.describe_plan(config, path, facts.hardware)}\n{printed_plan}"
