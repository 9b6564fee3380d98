"""An adaptation from its first row to the head in use: reading and splitting rows, judging, training and exporting."""

from specdec.options.command_line import read_command, split_list

import gc
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import model_validator
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.core import files, progress
from specdec.core.lock import hold_lock
from specdec.core.option_types import (
    FREE,
    Count,
    Duration,
    Model,
    NonNegative,
    Options,
    Positive,
    ShareBelowOne,
    Text,
    Whole,
    raise_first,
)
from specdec.core.resumable import check_settings
from specdec.core.wording import format_count
from specdec.export.folder import STITCHED_CARD
from specdec.heads.base import Drafter, Head
from specdec.heads.native_modules.diagnosis import split_name
from specdec.measuring.answer_prompts import AnswerOptions, answer_prompts
from specdec.measuring.exporting import ExportOptions, export_checkpoint
from specdec.measuring.report import PromptCounts
from specdec.options import config_files
from specdec.options.command_types import MEMORY, OutputFolder, Prefix
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.text import reading, token_text
from specdec.tools.adapt import answers as adaptation
from specdec.tools.adapt import judging, rescue
from specdec.tools.adapt.folder import KINDS, AdaptationFolder, AdaptationPlan

FIXED_OPTIONS = {*"run start resume head data.train data.length train.steps".split()}  # options that this command sets
TRAIN_SCRIPT = config_files.HOME / "train.py"
SHIPPED_ANSWERS = "data/answers.jsonl.gz"  # answers of the default target, on which the shipped heads were trained
PACK_MULTIPLE = 128  # tokens; packs have a multiple of it, so that the target's passes have few shapes
SHORTEST_PACK = 512  # tokens of a pack, unless `length` is less
LR_SHARE = 1 / 3  # learning rate over that of the head's training (results/36-accepted-adaptations.md)
ADAMW_LR = {"eagle3": 2.5e-4, "mtp": 7e-4}  # rates of AdamW for heads that are trained with Muon
# Present options in place of losses and of a weighting of earlier versions, by group
REPLACEMENTS = {"losses": "losses.kl=1", "weighting": "weighting=decay"}
VALIDATIONS = 10  # validations of a training
PATIENCE = 3  # validations without a rise of tau that end a training
NUM_VALIDATION_ANSWERS = 32  # most answers that choose the step
SHOWN_LINES = re.compile(r"step +\d+[/:]|Resumed|Ctrl-C|SIGTERM")  # lines of train.py that are shown


class AdaptOptions(Options):
    checkpoint: Annotated[Text, FREE]
    out: Annotated[OutputFolder, FREE]
    source: Annotated[Text | None, FREE]
    traffic: Annotated[Text | None, FREE]
    prompts: Annotated[Text | None, FREE]
    old: str | None
    old_share: ShareBelowOne
    heldout_share: ShareBelowOne
    epochs: Positive
    lr: NonNegative | None
    tolerance: NonNegative
    min_tokens: Whole
    watch: Annotated[Duration | None, FREE]
    dry_run: Annotated[bool, FREE]
    length: Annotated[Count, MEMORY]
    answer: Annotated[dict[str, str], Prefix("answer"), FREE]
    training: Annotated[dict[str, str], Prefix("training")]
    target: TargetOptions

    @model_validator(mode="after")
    def check_sources(self) -> "AdaptOptions":
        raise_first(
            {
                "Give traffic=FOLDER of recorded answers, or prompts=FILE that the target answers first: one of "
                "them.": (self.traffic is None) == (self.prompts is None),
                "answer. options say how prompts= are answered: give prompts=, or leave them out.": (
                    self.answer and not self.prompts
                ),
                "watch= waits for traffic: give traffic=, without dry_run=.": (
                    self.watch and (self.prompts or self.dry_run)
                ),
            }
        )
        return self


def run_adaptations(options: AdaptOptions, console: progress.Results) -> None:
    """Adapts once, or with watch= whenever there are enough new rows. Raises ValueError for what cannot be adapted."""
    fixed = sorted(FIXED_OPTIONS & set(options.training))
    if fixed:
        raise ValueError(f"training.{fixed[0]}= is chosen by this command: leave it out.")
    home = AdaptationFolder(Path(options.out))

    def load_target() -> Target:
        target = select_target(options, home)
        name = loading.find_target_name(checkpoint.resolve(options.checkpoint), target.name)
        return loading.load_target(target, default=name).target

    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with hold_lock(home.path / "lock", resource=home.path):
            start = rescue.prepare_module(home, options.checkpoint, options.source, options.target.name, console)
            home.install_given_head(start, load_target)
            finish_adaptation(options, home, console)  # an earlier launch may have been interrupted in it
            if options.watch is None:
                adapt_head(options, home, console)
            else:
                watch_traffic(options, home, console)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def watch_traffic(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> None:
    """Adapts whenever enough new rows have come, until a signal. Prints a lack of rows only when it has changed."""
    last_message = ""
    console.say(f"watching {options.traffic} every {options.watch:g} s; Ctrl-C ends it")
    try:
        while True:
            try:
                adapt_head(options, home, console)
            except adaptation.TooFewAnswers as error:
                if str(error) != last_message:
                    last_message = str(error)
                    console.say(last_message)
            time.sleep(options.watch or 0)
    except KeyboardInterrupt:
        console.say(f"stopped; {home.path} stands for {home.current.name}")


def adapt_head(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> None:
    """Makes one adaptation, or finishes an interrupted one. Raises TooFewAnswers if there is too little to train on."""
    fields = AdaptOptions.model_fields
    settings = {name: value for name, value in options.model_dump().items() if FREE not in fields[name].metadata}
    plan = home.read_plan()
    if plan is None:
        plan = prepare_plan(options, home, settings, console)
    else:
        advice = f"Give those again, or delete {home.training} to begin anew."
        check_settings(home.training, plan.facts["settings"], settings, advice=advice)
        console.say(f"the adaptation {plan.number} goes on")
    measured = home.read_measured() or score_head_in_use(options, home, plan)
    show_groups(console, plan, read_counts(measured))
    console.say(measured["foreseen"]["said"])
    if options.dry_run:
        console.say(f"dry_run: without it the same command trains. To begin anew, delete {home.training}.")
        return
    decide_on_trained_head(options, home, plan, measured, train_head(options, home, plan, measured["depth"]), console)
    finish_adaptation(options, home, console)


def finish_adaptation(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> None:
    """Exports an accepted head, and diagnoses the model that it is stitched into, unless that was done."""
    export_accepted_head(options, home)
    rescue.diagnose_result(home, console)


def check_head(folder: Path) -> None:
    """Raises ValueError for a head that replay does not apply to."""
    kind = checkpoint.load_head_class(str(checkpoint.read_json(folder / "drafter.json").get("_target_")))
    if kind.adapts_target or not issubclass(kind, Drafter):
        raise ValueError(
            f"{folder}: a {kind.__name__} cannot be judged by replay along answers of the unchanged target: "
            "train it by "
            "train.py start=."
        )


def check_tokens(tokens: int, needed: int) -> None:
    """Raises TooFewAnswers for less tokens to train on than min_tokens."""
    if tokens < needed:
        raise adaptation.TooFewAnswers(f"{tokens:,} of {needed:,} new tokens to train on (min_tokens): give more rows.")


def read_values(verb: str, model: type[Model], values: dict[str, Any]) -> Model:
    """The options of another verb with these values."""
    return read_command(verb, model, None, [f"{key}={value}" for key, value in values.items()])


def write_answers(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> Path:
    """Lets the target answer prompts=, as far as it has not done so. Returns the file of answers."""
    path = home.make_private("answers") / "answers.jsonl"
    values = {"prompts": options.prompts, "out": path, **list_target_options(options, home), **options.answer}
    answer_prompts(read_values("answer", AnswerOptions, values), console)
    return path


def prepare_plan(
    options: AdaptOptions, home: AdaptationFolder, settings: dict, console: progress.Results
) -> AdaptationPlan:
    """Reads and splits the rows, and records them. Returns the answers to train on and to judge by.

    Raises ValueError for a head or rows that cannot be used, TooFewAnswers for too few rows.
    """
    check_head(home.current)
    find_head_option(home.first_head)  # raises ValueError before anything is read
    source, tokenizer = open_source(options, home)
    sources = find_old_sources(options.old, home.first_head, source.target)
    new_answers, left_out = read_new_answers(options, home, source, console)

    # Split the new answers
    training, heldout = adaptation.split_newest(new_answers, options.heldout_share)
    training, validation = adaptation.split_newest(training, options.heldout_share / 2)
    earlier_heldout = home.read_earlier_answers("heldout")
    training = adaptation.drop_known_answers(training, earlier_heldout)
    tokens = adaptation.count_tokens(training)
    check_tokens(tokens, options.min_tokens)
    check_heldout(heldout, options.length)
    if left_out:
        console.say(f"rows of the traffic that are left out: {left_out}")

    # Choose old answers, some to judge forgetting by and some to train on
    adapted = [answer.to_row(source.tokenizer) for answer in home.read_earlier_answers("trained")]
    used_answers = [*heldout, *validation, *training]
    old_heldout, old_training = choose_old_answers(
        sources,
        adapted,
        tokenizer,
        used_answers=[*used_answers, *earlier_heldout],
        max_tokens=int(options.old_share / (1 - options.old_share) * tokens),
    )
    old_heldout += adaptation.drop_known_answers(earlier_heldout, used_answers)

    # Sample the answers that heads are judged by, and record the plan
    slices = {
        "new": judging.sample_answers(heldout, options.length),
        "old": judging.sample_answers(old_heldout, options.length),
        "validation": sample_validation(validation, options.length),
    }
    facts = {"until": max(answer.time for answer in new_answers), "where": name_source(options), "settings": settings}
    start = str(home.current.relative_to(home.path))
    plan = AdaptationPlan(home.next_number(), start, [*training, *old_training], len(training), slices, facts)
    home.save_plan(plan, source.tokenizer)
    return plan


def name_source(options: AdaptOptions) -> str:
    """The option that names the new rows."""
    return "traffic" if options.prompts is None else "prompts"


def open_source(
    options: AdaptOptions, home: AdaptationFolder
) -> tuple[adaptation.TrafficSource, PreTrainedTokenizerBase]:
    """The target whose answers are wanted, and its tokenizer."""
    document = checkpoint.read_json(home.current / "drafter.json")
    target = select_target(options, home)
    name, trusted = target.name or str(document.get("target")), target.trust_remote_code
    tokenizer = loading.load_tokenizer(name, trust_remote_code=trusted)
    fingerprint = home.source_record.get("target_fingerprint", document.get("target_fingerprint"))
    vocabulary = token_text.digest_vocabulary(tokenizer)
    writer = name if target == options.target else split_name(options.checkpoint)[0]  # served before the repair
    return adaptation.TrafficSource(vocabulary, writer, fingerprint), tokenizer


def read_new_answers(
    options: AdaptOptions, home: AdaptationFolder, source: adaptation.TrafficSource, console: progress.Results
) -> tuple[adaptation.Answers, str]:
    """The answers that are newer than those of the head in use, and in words the rows that were left out.

    Raises TooFewAnswers without any; with watch=, enough of them must be new to all adaptations.
    """
    name = name_source(options)
    history = [record for record in home.read_history() if record["where"] == name]
    if options.prompts is None:
        answers, left_out = adaptation.read_traffic(Path(str(options.traffic)), source)
    else:
        path = write_answers(options, home, console)
        answers, left_out = adaptation.read_written(path, source, [record["until"] for record in history])
    if options.watch is not None:
        check_untried(options, answers, history)
    accepted = [record["until"] for record in history if record["decision"] == "accepted"]
    last_accepted = max(accepted, default=-math.inf)
    new_answers = [answer for answer in answers if answer.time > last_accepted]
    if not new_answers:
        raise adaptation.TooFewAnswers(
            f"{name}={getattr(options, name)} has no rows that are newer than those of the head in use: give more."
            + (f" Left out: {left_out}." if left_out else "")
        )
    return new_answers, left_out


def check_untried(options: AdaptOptions, answers: adaptation.Answers, history: list[dict]) -> None:
    """Raises TooFewAnswers where too few tokens are new to all adaptations. Held-out tokens do not count."""
    last_tried = max((record["until"] for record in history), default=-math.inf)
    tokens = adaptation.count_tokens(answer for answer in answers if answer.time > last_tried)
    training_share = (1 - options.heldout_share) * (1 - options.heldout_share / 2)
    check_tokens(int(tokens * training_share), options.min_tokens)


def check_heldout(heldout: adaptation.Answers, length: int) -> None:
    """Raises TooFewAnswers where too few held-out conversations fit into `length` tokens."""
    num = len({answer.conversation for answer in heldout if len(answer.prompt) + 2 <= length})
    if num < judging.MIN_CONVERSATIONS:
        raise adaptation.TooFewAnswers(
            f"length={length} has room for {format_count(num, 'held-out conversation')}: a head is judged by "
            f"{judging.MIN_CONVERSATIONS} or more. Give more."
        )


def sample_validation(answers: adaptation.Answers, length: int) -> adaptation.Answers:
    """The answers that choose the step, cut to `length` tokens. Raises TooFewAnswers if none of them fits."""
    sample = judging.sample_answers(answers, length, NUM_VALIDATION_ANSWERS)
    if not sample:
        raise adaptation.TooFewAnswers(
            f"No answer that chooses the step fits into length={length}: raise it, or give more rows."
        )
    return [answer.cut(length) for answer in sample]


def choose_old_answers(
    sources: list[str],
    adapted: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    used_answers: adaptation.Answers,
    max_tokens: int,
) -> tuple[adaptation.Answers, adaptation.Answers]:
    """Old answers that forgetting is judged by, the same ones at every adaptation, and others to train on.

    adapted: rows of earlier adaptations; used_answers: answers that have another use
    max_tokens: bound of the tokens to train on
    Raises ValueError for sources that cannot be read.
    """
    try:
        rows = [row for name in sources for row in reading.load_conversations(name)]
        heldout = list(itertools.islice(adaptation.draw_old_answers(rows, tokenizer), judging.MAX_ANSWERS))
        drawn = adaptation.draw_old_answers([*rows, *adapted], tokenizer)
        unused = adaptation.drop_known_answers(drawn, [*used_answers, *heldout])
    except ValueError as error:
        raise ValueError(f"old={','.join(sources)}: {error} Give old=FILE, or old= for no old rows.") from None
    return adaptation.drop_known_answers(heldout, used_answers), adaptation.limit_tokens(unused, max_tokens)


def score_kinds(options: AdaptOptions, plan: AdaptationPlan, head: Head, name: str) -> dict[str, list[PromptCounts]]:
    """The rounds and emitted tokens of each held-out answer, by kind. name: name of the head for the progress bar"""
    counts = {}
    for kind in KINDS:
        label = f"judging {name}, {kind} answers"
        counts[kind] = judging.score_answers(head, plan.heldout[kind], length=options.length, label=label)
    return counts


def score_head_in_use(options: AdaptOptions, home: AdaptationFolder, plan: AdaptationPlan) -> dict:
    """Measures the head in use, and predicts the gain of training. The document is kept for later launches."""
    loaded = loading.load_head(str(home.path / plan.start), select_target(options, home))
    home.pin_target(loaded.target)
    assert isinstance(loaded.drafter, Drafter)
    counts = score_kinds(options, plan, loaded.drafter, "the head in use")
    new, old = (judging.compare_groups(plan.heldout[kind], counts[kind]) for kind in KINDS)
    document = {
        "counts": {kind: list(map(astuple, counts[kind])) for kind in KINDS},
        "foreseen": judging.predict_gain(new, old, plan.heldout["new"], plan.new_training),
        "depth": min(judging.CHAIN_DEPTH, loaded.drafter.depth or judging.CHAIN_DEPTH),  # chain that chooses a step
    }
    home.write_measured(document)
    return document


def read_counts(measured: dict) -> dict[str, list[PromptCounts]]:
    """The counts of a document of `score_head_in_use`, by kind."""
    return {kind: list(itertools.starmap(PromptCounts, measured["counts"][kind])) for kind in KINDS}


def show_groups(
    console: progress.Results,
    plan: AdaptationPlan,
    counts_before: dict[str, list[PromptCounts]],
    counts_after: dict[str, list[PromptCounts]] | None = None,
) -> dict[str, judging.Groups]:
    """Prints tau by group, and returns the groups by kind."""
    groups_by_kind = {
        kind: judging.compare_groups(
            plan.heldout[kind], counts_before[kind], counts_after[kind] if counts_after else None
        )
        for kind in KINDS
    }
    console.print(judging.make_groups_table(groups_by_kind))
    return groups_by_kind


def decide_on_trained_head(
    options: AdaptOptions,
    home: AdaptationFolder,
    plan: AdaptationPlan,
    measured: dict,
    trained: Path,
    console: progress.Results,
) -> None:
    """Measures the trained head, and takes it into use or not. measured: document of `score_head_in_use`"""
    start = home.path / plan.start
    opened = loading.load_target(select_target(options, home), default=loading.find_target_name(start))
    home.pin_target(opened.target)
    step = int(trained.name.removeprefix("step_"))
    counts = counts_before = read_counts(measured)
    if step > 0:  # step 0 is the head in use
        counts = score_kinds(options, plan, checkpoint.load(trained, opened.target), "the new head")
    groups = show_groups(console, plan, counts_before, counts)
    new, old = groups["new"][judging.ALL_ANSWERS], groups["old"].get(judging.ALL_ANSWERS)
    accepted, reasons = judging.decide_acceptance(new, old, tolerance=options.tolerance)
    if step == 0:
        reasons.append("No step of the training drafted better than its start on the answers that choose the step.")
    document = {
        "number": plan.number,
        "decision": "accepted" if accepted else "refused",
        "reasons": reasons,
        "start": plan.start,
        "in_use": f"heads/{plan.number}" if accepted else plan.start,
        "slices": {"new": asdict(new), "old": old and asdict(old)},
        "groups": {kind: judging.list_changes(groups[kind]) for kind in KINDS},
        "foreseen": measured["foreseen"],
        "training": {
            "new_tokens": adaptation.count_tokens(plan.new_training),
            "old_tokens": adaptation.count_tokens(plan.training[plan.num_new :]),
            "step": step,
            "steps": size_training(options, plan)[1],
        },
        "source": home.source_record,
        **plan.facts,
    }
    if home.diagnosis_record is not None:
        document["diagnosis"] = home.diagnosis_record
    home.record_decision(plan, trained, document, token_text.digest_vocabulary(opened.tokenizer))
    console.say(f"{document['decision']}: {' '.join(reasons)}")
    console.say(f"{home.path} stands for {document['in_use']}")


def export_accepted_head(options: AdaptOptions, home: AdaptationFolder) -> None:
    """Writes the card of an accepted head, and the head in the layout of the given one, unless that was done."""
    head, path = home.current, home.current / "adaptation.json"
    if not path.exists():  # the given head
        return
    document, card = checkpoint.read_json(head / "drafter.json"), judging.make_card(checkpoint.read_json(path))
    files.write_text(head / "README.md", card)
    if document.get("published") is None:  # the given head was a checkpoint of this project
        return
    out, is_native_mtp = home.path / "export" / head.name, str(document["_target_"]).endswith(".NativeMTP")
    if not out.exists():
        gc.collect()  # frees the target that judged
        values = {"checkpoint": head, "out": out, "format": "stitched" if is_native_mtp else "published"}
        values |= list_target_options(options, home)
        export_checkpoint(read_values("export", ExportOptions, values))
    card_file = out / (STITCHED_CARD if is_native_mtp else "README.md")
    text = card_file.read_text()
    if judging.HEADING not in text:
        for name, content in files.encode_files(card_file.parent, {card_file.name: f"{text}\n{card}"}).items():
            files.write_text(card_file.with_name(name), content.decode())


def select_target(options: AdaptOptions, home: AdaptationFolder) -> TargetOptions:
    """The options of the target, which by default is the repaired model, if there is one."""
    if options.target.name is not None or home.repaired_model is None:
        return options.target
    return options.target.model_copy(update={"name": str(home.repaired_model.resolve())})


def list_target_options(options: AdaptOptions, home: AdaptationFolder) -> dict[str, Any]:
    """The options of the target as another command takes them."""
    target = select_target(options, home)
    name = loading.find_target_name(home.first_head, target.name)
    values = target.model_dump() | {"name": Path(name) if Path(name).exists() else name}
    return {f"target.{key}": value for key, value in values.items() if value is not None}


# Training: train.py in a process of its own, with the settings of the head


def read_run_settings(path: Path) -> dict:
    """The config.yaml of a run; {} where there is none."""
    return loading.read_yaml(path) if path.exists() else {}


def find_head_option(head: Path) -> str:
    """The first file of conf/head for a checkpoint's class. Raises ValueError where none trains it."""
    kind = checkpoint.read_json(head / "drafter.json")["_target_"]
    for name, path in config_files.list_files("head").items():
        if yaml.safe_load(path.read_text())["drafter"]["_target_"] == kind:
            return name
    raise ValueError(f"{head}: no file of conf/head trains a {kind}.")


def find_old_sources(old_option: str | None, head: Path, target: str) -> list[str]:
    """Files of the rows that the head was trained on.

    old_option: comma list; None: the files in the head's config.yaml, or the shipped answers
    Raises ValueError where they are not known.
    """
    if old_option is not None:
        return split_list(old_option)
    recorded = read_run_settings(head / "config.yaml").get("data", {}).get("train")
    if recorded is not None:
        return list(reading.read_sources(recorded))
    if Path(target).name == Path(loading.DEFAULT_TARGET).name:
        return [SHIPPED_ANSWERS]
    raise ValueError(
        f"It is not recorded what {head} was trained on: give old=FILE with such rows, or old= for none (then nothing "
        "keeps the head from forgetting, and nothing shows it)."
    )


def size_training(options: AdaptOptions, plan: AdaptationPlan) -> tuple[int, int]:
    """The tokens of a pack, and the steps that read all rows `epochs` times.

    A pack holds the longest row in a multiple of PACK_MULTIPLE: at least SHORTEST_PACK tokens, and at most `length` if
    that is more.
    """
    lengths = [len(answer.prompt) + len(answer.answer) for answer in plan.training]
    length = max(SHORTEST_PACK, min(options.length, PACK_MULTIPLE * math.ceil(max(lengths) / PACK_MULTIPLE)))
    packs = sum(min(tokens, length) for tokens in lengths) / length
    packs_per_step = int(options.training.get("train.batch", 1)) * int(options.training.get("train.accumulation", 1))
    return length, max(1, math.ceil(options.epochs * packs / packs_per_step))


def train_head(options: AdaptOptions, home: AdaptationFolder, plan: AdaptationPlan, depth: int) -> Path:
    """Trains by the plan. Returns the folder of the best step, which may be the start's.

    depth: drafts of the chain that chooses the step
    Raises KeyboardInterrupt if it was interrupted, ValueError if it failed.
    """
    gc.collect()  # frees the target that judged
    status = run_train(make_arguments(options, home, plan, depth))
    folder = home.training / "run"
    if not (folder / "finished").exists():
        if status in (0, 130):
            raise KeyboardInterrupt
        raise ValueError(
            f"Training ended with status {status}; what it said stands above. The same command continues it."
        )
    return checkpoint.resolve(folder)


def make_arguments(options: AdaptOptions, home: AdaptationFolder, plan: AdaptationPlan, depth: int) -> list[str]:
    """The arguments of train.py. The user's `training.` options override all others."""
    length, steps = size_training(options, plan)
    folder = home.training.resolve()  # out= may be relative in one launch and absolute in the next
    settings, head = read_run_settings(home.first_head / "config.yaml"), find_head_option(home.first_head)
    recorded = settings.get("optimizer", {})
    trained_lr = recorded.get("lr") or yaml.safe_load(config_files.list_files("head")[head].read_text())["lr"]
    if head in ADAMW_LR and (not recorded or recorded.get("name") == "muon"):
        trained_lr = ADAMW_LR[head]
    values: dict[str, Any] = {
        "head.objective.supervise": "answers",
        **list_recorded_objective(settings, head, options.training),
        "run": folder / "run",
        "start": (home.path / plan.start).resolve(),
        "resume": "auto",
        "features.folder": folder / "features",
        "data.cache": folder / "data-cache",
        "data.length": length,
        "optimizer.name": "adamw",  # LR_SHARE was measured with it
        "optimizer.weight_decay": 0.0,
        "optimizer.schedule": "cosine",
        "optimizer.final": 0.05,
        "optimizer.lr": LR_SHARE * float(trained_lr) if options.lr is None else options.lr,
        "optimizer.warmup": min(20, steps // 10),
        "train.steps": steps,
        "train.batch": 1,
        "train.accumulation": 1,
        "train.validate_every": max(1, steps // VALIDATIONS),
        "train.patience": PATIENCE,
        "train.save_every": max(1, min(100, steps // 5)),
        "train.log_every": max(1, min(20, steps // 10)),
        "validation.answers": folder / "validation.jsonl",
        "validation.num_prompts": NUM_VALIDATION_ANSWERS,
        "validation.max_new_tokens": 8,  # two prompts are decoded at the end
        "validation.decode": "end",
        "validation.auto": "never",
        "decode.depth": depth,
        **list_target_options(options, home),
        **options.training,
    }
    rows = f"data.train=[{json.dumps(str(folder / 'train.jsonl'))}]"
    return [f"head={head}", rows, *(f"{key}={format_value(value)}" for key, value in values.items())]


def list_recorded_objective(settings: dict, head: str, changes: dict[str, str]) -> dict[str, Any]:
    """The recorded options of the objective that still exist, as train.py takes them.

    settings: config.yaml of a run; head: name in conf/head; changes: options of the user, without `training.`
    Raises ValueError for one that an earlier version used, unless the user chooses another.
    """
    recorded = config_files.flatten(settings.get("head", {}).get("objective", {}))
    head_settings = yaml.safe_load(config_files.list_files("head")[head].read_text())
    documents = config_files.read_file("objective", "base"), head_settings.get("objective", {})
    names = {name for document in documents for name in config_files.flatten(document)} - {"_target_"}
    used_names = {name for name, value in recorded.items() if value} - names
    if recorded.get("weighting") == "vat":
        used_names.add("weighting")
    for name in used_names:
        group = name.partition(".")[0]
        if group in REPLACEMENTS and not any(change.startswith(f"head.objective.{group}") for change in changes):
            raise ValueError(
                f"The head was trained with {name}={recorded[name]}, which this version no longer has: give "
                f"training.head.objective.{REPLACEMENTS[group]}, or use an earlier version."
            )
    return {f"head.objective.{name}": value for name, value in recorded.items() if name in names}


def format_value(value: Any) -> str:
    """A value as it is written on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def run_train(arguments: list[str]) -> int:
    """Runs train.py, and shows the lines of its steps. Returns its exit status.

    Ctrl-C and SIGTERM are passed on to it, so that it saves its state after its step.
    """
    command = [sys.executable, str(TRAIN_SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        while True:
            try:
                for line in child.stdout:
                    if SHOWN_LINES.match(line):
                        progress.print_note(line.rstrip())
                return child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
