"""An adaptation from its first row to the head in use: what is trained on, judged, and given back."""

from specdec.options.command_line import read_command, split_list

import functools
import gc
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
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
    NonNegative,
    Options,
    Positive,
    ShareBelowOne,
    Text,
    Whole,
    raise_first,
)
from specdec.core.resumable import check_settings
from specdec.export.folder import STITCHED_CARD
from specdec.heads.base import Drafter, Head
from specdec.measuring.answer_prompts import AnswerOptions, answer_prompts
from specdec.measuring.exporting import ExportOptions, export_checkpoint
from specdec.measuring.report import PromptCounts
from specdec.options import config_files
from specdec.options.command_types import MEMORY, OutputFolder, Prefix
from specdec.options.target import TargetOptions
from specdec.target.model import Target
from specdec.text import reading, token_text
from specdec.tools.adapt import answers as adaptation
from specdec.tools.adapt import judging
from specdec.tools.adapt.folder import KINDS, AdaptationFolder, AdaptationPlan

FIXED_OPTIONS = {
    *"run start resume head data.train data.length train.steps".split()
}  # options of train.py that are not the user's
TRAIN_SCRIPT = config_files.HOME / "train.py"
SHIPPED_ANSWERS = "data/answers.jsonl.gz"  # answers of the default target, on which the shipped heads were trained
PACK_MULTIPLE = 128  # tokens: packs have a multiple of it, so that the target's passes have few shapes
SHORTEST_PACK = 512  # tokens of a pack, at least, unless `length` is less
LR_SHARE = 1 / 3  # of the learning rate that the head was trained with
ADAMW_LR = {"eagle3": 2.5e-4, "mtp": 7e-4}  # of heads that are trained with Muon: rates of AdamW
VALIDATIONS, PATIENCE = 10, 3  # of a training, and how many without a rise of tau end it
NUM_VALIDATION_ANSWERS = 32  # answers that choose the step, at most
SHOWN_LINES = re.compile(r"step +\d+[/:]|Resumed|Ctrl-C|SIGTERM")  # lines of train.py


class AdaptOptions(Options):
    checkpoint: Annotated[Text, FREE]
    out: Annotated[OutputFolder, FREE]
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
                "Give traffic=FOLDER of recorded answers, or prompts=FILE that the target answers first: one of them.": (
                    (self.traffic is None) == (self.prompts is None)
                ),
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
    if refused_options := sorted(FIXED_OPTIONS & set(options.training)):
        raise ValueError(f"training.{refused_options[0]}= is chosen by this command: leave it out.")
    home = AdaptationFolder(Path(options.out))
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with hold_lock(home.path / "lock", resource=home.path):
            name = lambda: loading.find_target_name(checkpoint.resolve(options.checkpoint), options.target.name)
            home.install_given_head(
                options.checkpoint, lambda: loading.load_target(options.target, default=name()).target
            )
            export_accepted_head(options, home)  # what an earlier launch was interrupted in
            if options.watch is None:
                adapt_head(options, home, console)
            else:
                watch_traffic(options, home, console)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def watch_traffic(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> None:
    """Adapts whenever enough new rows have come, until a signal. Says so only when something has changed."""
    last_message = ""
    console.say(f"watching {options.traffic} every {options.watch:g} s; Ctrl-C ends it")
    try:
        while True:
            try:
                adapt_head(options, home, console)
            except adaptation.TooFewAnswers as error:
                if str(error) != last_message:
                    console.say(last_message := str(error))
            time.sleep(options.watch or 0)
    except KeyboardInterrupt:
        console.say(f"stopped; {home.path} stands for {home.current.name}")


def adapt_head(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> None:
    """One adaptation, or the rest of the one that was interrupted. Raises TooFew if there is too little to train on."""
    settings = {
        name: value
        for name, value in options.model_dump().items()
        if FREE not in AdaptOptions.model_fields[name].metadata
    }
    plan = home.read_plan()
    if plan is None:
        plan = prepare_plan(options, home, settings, console)
    else:
        recorded_settings = {
            key: value for key, value in plan.facts["settings"].items() if key in settings
        }  # some options went
        advice = f"Give those again, or delete {home.training} to begin anew."
        check_settings(home.training, recorded_settings, settings, advice=advice)
        console.say(f"the adaptation {plan.number} goes on")
    measured = home.read_measured() or score_head_in_use(options, home, plan)
    show_groups(console, plan, measured["counts"])
    console.say(measured["foreseen"]["said"])
    if options.dry_run:
        console.say(f"dry_run: without it the same command trains. To begin anew, delete {home.training}.")
        return
    decide_on_trained_head(options, home, plan, measured, train_head(options, home, plan, measured["depth"]), console)
    export_accepted_head(options, home)


def check_head(folder: Path) -> None:
    """Raises ValueError for a head that replay does not apply to."""
    kind = checkpoint.load_head_class(str(checkpoint.read_json(folder / "drafter.json").get("_target_")))
    if kind.adapts_target or not issubclass(kind, Drafter):
        raise ValueError(
            f"{folder}: a {kind.__name__} cannot be judged by replay along answers of the unchanged target: train it by "
            "train.py start=."
        )


def check_tokens(tokens: int, needed: int) -> None:
    if tokens < needed:
        raise adaptation.TooFewAnswers(f"{tokens:,} of {needed:,} new tokens to train on (min_tokens): give more rows.")


def write_answers(options: AdaptOptions, home: AdaptationFolder, console: progress.Results) -> Path:
    """Lets the target answer prompts=, or go on with it. -> the file of answers"""
    folder = home.make_private("answers")
    values = {
        "prompts": options.prompts,
        "out": folder / "answers.jsonl",
        **list_target_options(options, home),
        **options.answer,
    }
    arguments = [f"{key}={value}" for key, value in values.items()]
    answer_prompts(read_command("answer", AnswerOptions, None, arguments), console)
    return folder / "answers.jsonl"


def prepare_plan(
    options: AdaptOptions, home: AdaptationFolder, settings: dict, console: progress.Results
) -> AdaptationPlan:
    """Reads and splits the rows. -> what to train. With watch=, enough of the rows must be new to all adaptations."""
    check_head(home.current)
    find_head_option(home.first_head)  # which refuses a wrong one now
    document = checkpoint.read_json(home.current / "drafter.json")
    name = options.target.name or str(document.get("target"))
    tokenizer = loading.load_tokenizer(name, trust_remote_code=options.target.trust_remote_code)
    fingerprint = home.source_record.get("target_fingerprint", document.get("target_fingerprint"))
    trusted = options.target.trust_remote_code
    read_fingerprint = functools.cache(lambda: Target.load_ends(name, trust_remote_code=trusted).identity)
    source = adaptation.TrafficSource(token_text.digest_vocabulary(tokenizer), name, fingerprint, read_fingerprint)
    sources = find_old_sources(options.old, home.first_head, source.target)
    option_name = "traffic" if options.prompts is None else "prompts"
    earlier_decisions = [
        (decision_record["until"], decision_record["decision"])
        for decision_record in home.read_history()
        if decision_record.get("where", "traffic") == option_name
    ]
    if options.prompts is None:
        answers, left_out = adaptation.read_traffic(Path(str(options.traffic)), source)
    else:
        written = write_answers(options, home, console)
        answers, left_out = adaptation.read_written(written, source, [end for end, _ in earlier_decisions])
    last_tried = max((end for end, _ in earlier_decisions), default=-math.inf)
    last_accepted = max((until for until, decision in earlier_decisions if decision == "accepted"), default=-math.inf)
    if options.watch is not None:
        tokens = adaptation.count_tokens(answer for answer in answers if answer.time > last_tried)
        training_share = (1 - options.heldout_share) * (1 - options.heldout_share / 2)  # to train on
        check_tokens(int(tokens * training_share), options.min_tokens)
    new_answers = [answer for answer in answers if answer.time > last_accepted]
    if not new_answers:
        raise adaptation.TooFewAnswers(
            f"{option_name}={getattr(options, option_name)} has no rows that are newer than those of the head in use: give more."
            + (f" Left out: {left_out}." if left_out else "")
        )
    training, heldout = adaptation.split_newest(new_answers, options.heldout_share)
    training, validation = adaptation.split_newest(training, options.heldout_share / 2)
    earlier_heldout = home.read_earlier_answers("heldout")
    training = adaptation.drop_known_answers(training, earlier_heldout)
    check_tokens(tokens := adaptation.count_tokens(training), options.min_tokens)
    num_conversations = len({answer.conversation for answer in heldout if len(answer.prompt) + 2 <= options.length})
    if num_conversations < judging.MIN_CONVERSATIONS:
        raise adaptation.TooFewAnswers(
            f"{num_conversations} held-out conversations fit into length={options.length}: a head is judged by {judging.MIN_CONVERSATIONS} or more. Give more."
        )
    if left_out:
        console.say(f"rows of the traffic that are left out: {left_out}")
    adapted = [answer.to_row(source.tokenizer) for answer in home.read_earlier_answers("trained")]
    max_old_tokens = int(options.old_share / (1 - options.old_share) * tokens)
    old_heldout, old_training = choose_old_answers(
        sources,
        adapted,
        tokenizer,
        used_answers=[*heldout, *validation, *training, *earlier_heldout],
        max_tokens=max_old_tokens,
    )
    old_heldout += adaptation.drop_known_answers(earlier_heldout, [*heldout, *validation, *training])
    slices = {kind: judging.sample_answers(each, options.length) for kind, each in zip(KINDS, (heldout, old_heldout))}
    chosen = judging.sample_answers(validation, options.length, NUM_VALIDATION_ANSWERS)
    slices["validation"] = [replace(each, answer=each.answer[: options.length - len(each.prompt)]) for each in chosen]
    if not chosen:
        raise adaptation.TooFewAnswers(
            f"No answer that chooses the step fits into length={options.length}: raise it, or give more rows."
        )
    about = {"until": max(answer.time for answer in new_answers), "where": option_name, "settings": settings}
    start = str(home.current.relative_to(home.path))
    plan = AdaptationPlan(home.next_number(), start, [*training, *old_training], len(training), slices, about)
    home.save_plan(plan, source.tokenizer)
    return plan


def choose_old_answers(
    sources: list[str],
    adapted: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    used_answers: adaptation.Answers,
    max_tokens: int,
) -> tuple[adaptation.Answers, adaptation.Answers]:
    """-> old answers that forgetting is judged on, the same ones at every adaptation, and others to train on.

    adapted: rows of earlier adaptations; taken: answers that are used already; most: tokens of the second ones
    """
    try:
        rows = [row for name in sources for row in reading.load_conversations(name)]
        heldout = list(itertools.islice(adaptation.draw_old_answers(rows, tokenizer), judging.MAX_ANSWERS))
        unused = adaptation.drop_known_answers(
            adaptation.draw_old_answers([*rows, *adapted], tokenizer), [*used_answers, *heldout]
        )
    except ValueError as error:
        raise ValueError(f"old={','.join(sources)}: {error} Give old=FILE, or old= for no old rows.") from None
    return adaptation.drop_known_answers(heldout, used_answers), adaptation.limit_tokens(unused, max_tokens)


def score_kinds(options: AdaptOptions, plan: AdaptationPlan, head: Head, name: str) -> dict[str, list[PromptCounts]]:
    """What tau of each held-out answer is made of. name: of the head"""
    return {
        kind: judging.score_answers(
            head, plan.heldout[kind], length=options.length, label=f"judging {name}, {kind} answers"
        )
        for kind in KINDS
    }


def score_head_in_use(options: AdaptOptions, home: AdaptationFolder, plan: AdaptationPlan) -> dict:
    """Judges the head in use, and foresees what training wins; kept for the comparison and for a launch that goes on."""
    loaded = loading.load_head(str(home.path / plan.start), options.target)
    home.pin_target(loaded.target)
    assert isinstance(loaded.drafter, Drafter)
    counts = score_kinds(options, plan, loaded.drafter, "the head in use")
    new, old = (judging.compare_groups(plan.heldout[kind], counts[kind]) for kind in KINDS)
    counts_by_kind = {kind: [[count.num_rounds, count.num_emitted] for count in counts[kind]] for kind in KINDS}
    document = {
        "counts": counts_by_kind,
        "foreseen": judging.predict_gain(new, old, plan.heldout["new"], plan.training[: plan.num_new]),
        "depth": min(
            judging.CHAIN_DEPTH, loaded.drafter.depth or judging.CHAIN_DEPTH
        ),  # of the chain that chooses a step
    }
    home.write_measured(document)
    return document


def show_groups(
    console: progress.Results,
    plan: AdaptationPlan,
    counts_before: dict,
    counts_after: dict[str, list[PromptCounts]] | None = None,
) -> dict[str, judging.Groups]:
    """Prints tau by group. before: counts as `judge_before` keeps them. -> the groups"""
    groups_by_kind = {
        kind: judging.compare_groups(
            plan.heldout[kind],
            [PromptCounts(*pair) for pair in counts_before[kind]],
            None if counts_after is None else counts_after[kind],
        )
        for kind in KINDS
    }
    console.say(judging.make_groups_table(groups_by_kind))
    return groups_by_kind


def decide_on_trained_head(
    options: AdaptOptions,
    home: AdaptationFolder,
    plan: AdaptationPlan,
    measured: dict,
    trained: Path,
    console: progress.Results,
) -> None:
    """Judges the trained head, and takes it into use or not. before: of `judge_before`"""
    opened = loading.load_target(options.target, default=loading.find_target_name(home.path / plan.start))
    home.pin_target(opened.target)
    step = int(trained.name.removeprefix("step_"))
    counts = {kind: [PromptCounts(*pair) for pair in measured["counts"][kind]] for kind in KINDS}
    if step > 0:  # else it is the head in use
        counts = score_kinds(options, plan, checkpoint.load(trained, opened.target), "the new head")
    groups_by_kind = show_groups(console, plan, measured["counts"], counts)
    new, old = groups_by_kind["new"][judging.ALL_ANSWERS], groups_by_kind["old"].get(judging.ALL_ANSWERS)
    accepted, reasons = judging.decide_acceptance(new, old, tolerance=options.tolerance)
    answers_by_field = {"new_tokens": plan.training[: plan.num_new], "old_tokens": plan.training[plan.num_new :]}
    tokens = {name: adaptation.count_tokens(answers) for name, answers in answers_by_field.items()}
    if step == 0:
        reasons.append("No step of the training drafted better than its start on the answers that choose the step.")
    document = {
        "number": plan.number,
        "decision": "accepted" if accepted else "refused",
        "reasons": reasons,
        "start": plan.start,
        "in_use": f"heads/{plan.number}" if accepted else plan.start,
        "slices": {"new": asdict(new), "old": old and asdict(old)},
        "groups": {
            kind: {name: asdict(each) for name, each in groups.items()} for kind, groups in groups_by_kind.items()
        },
        "foreseen": measured["foreseen"],
        "training": tokens | {"step": step, "steps": size_training(options, plan)[1]},
        "source": home.source_record,
        **plan.facts,
    }
    home.record_decision(plan, trained, document, token_text.digest_vocabulary(opened.tokenizer))
    console.say(f"{document['decision']}: {' '.join(reasons)}")
    console.say(f"{home.path} stands for {document['in_use']}")


def export_accepted_head(options: AdaptOptions, home: AdaptationFolder) -> None:
    """Writes the card of an accepted head, and the head in the layout that the given one came in, unless that was done."""
    head, path = home.current, home.current / "adaptation.json"
    record = checkpoint.read_json(path) if path.exists() else {}
    if "groups" not in record:  # the given head, or one of an earlier version
        return
    document, card = checkpoint.read_json(head / "drafter.json"), judging.make_card(record)
    files.write_text(head / "README.md", card)
    if document.get("published") is None:  # it came as a checkpoint of ours
        return
    out, is_native_mtp = home.path / "export" / head.name, str(document["_target_"]).endswith(".NativeMTP")
    if not out.exists():
        gc.collect()  # the target that judged
        values = {
            "checkpoint": head,
            "out": out,
            "format": "stitched" if is_native_mtp else "published",
        } | list_target_options(options, home)
        arguments = [f"{key}={value}" for key, value in values.items()]
        export_checkpoint(read_command("export", ExportOptions, None, arguments))
    card_file = out / (STITCHED_CARD if is_native_mtp else "README.md")
    text = card_file.read_text()
    if judging.HEADING not in text:
        for name, content in files.encode_file(card_file, f"{text}\n{card}").items():
            files.write_text(card_file.with_name(name), content.decode())


def list_target_options(options: AdaptOptions, home: AdaptationFolder) -> dict[str, Any]:
    """The options of the target that another command takes."""
    name = loading.find_target_name(home.first_head, options.target.name)
    target = options.target.model_dump() | {"name": Path(name) if Path(name).exists() else name}
    return {f"target.{key}": value for key, value in target.items() if value is not None}


# Training: train.py in a process of its own, with the settings of the head


def read_run_settings(path: Path) -> dict:
    """The config.yaml of a run; {} where there is none."""
    return loading.read_yaml(path) if path.exists() else {}


def find_head_option(head: Path) -> str:
    """The first file of conf/head for a checkpoint's class."""
    kind = checkpoint.read_json(head / "drafter.json")["_target_"]
    for name, path in config_files.list_files("head").items():
        if yaml.safe_load(path.read_text())["drafter"]["_target_"] == kind:
            return name
    raise ValueError(f"{head}: no file of conf/head trains a {kind}.")


def find_old_sources(old_option: str | None, head: Path, target: str) -> list[str]:
    """Files of the rows that the head was trained on. listed: comma list; None: those of its config.yaml, or the shipped ones"""
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
    """-> tokens of a pack, and steps that read all rows `epochs` times.

    A pack holds the longest row, in a multiple of ROUND: at least the usual tokens, and at most `length` if that is more.
    """
    lengths = [len(answer.prompt) + len(answer.answer) for answer in plan.training]
    length = max(SHORTEST_PACK, min(options.length, PACK_MULTIPLE * math.ceil(max(lengths) / PACK_MULTIPLE)))
    packs = sum(min(each, length) for each in lengths) / length
    packs_per_step = int(options.training.get("train.batch", 1)) * int(options.training.get("train.accumulation", 1))
    return length, max(1, math.ceil(options.epochs * packs / packs_per_step))


def train_head(options: AdaptOptions, home: AdaptationFolder, plan: AdaptationPlan, depth: int) -> Path:
    """Trains as the plan says. -> the folder of the best step, the start's or a later one. depth: of the chain that chooses it

    Raises KeyboardInterrupt if it was interrupted.
    """
    gc.collect()  # the target that judged
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
    """Arguments of train.py. The user's `training.` options have the last word."""
    length, steps = size_training(options, plan)
    folder = home.training.resolve()  # out= may be relative in one launch and absolute in the next
    settings, head = read_run_settings(home.first_head / "config.yaml"), find_head_option(home.first_head)
    objective = settings.get("head", {}).get("objective", {})
    recorded = settings.get("optimizer", {})
    trained_lr = recorded.get("lr") or yaml.safe_load(config_files.list_files("head")[head].read_text())["lr"]
    if head in ADAMW_LR and (not recorded or recorded.get("name") == "muon"):
        trained_lr = ADAMW_LR[head]
    values: dict[str, Any] = {
        "head.objective.supervise": "answers",
        **{
            f"head.objective.{key}": value
            for key, value in config_files.flatten(objective).items()
            if key != "_target_"
        },
        "run": folder / "run",
        "start": (home.path / plan.start).resolve(),
        "resume": "auto",
        "features.folder": folder / "features",
        "data.cache": folder / "data-cache",
        "data.length": length,
        "optimizer.name": "adamw",  # with which LOWER was measured (results/36-accepted-adaptations.md)
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
        "validation.max_new_tokens": 8,  # of the two prompts that are decoded at the end
        "validation.decode": "end",
        "validation.auto": "never",
        "decode.depth": depth,
        **list_target_options(options, home),
        **options.training,
    }
    rows = f"data.train=[{json.dumps(str(folder / 'train.jsonl'))}]"
    return [f"head={head}", rows, *(f"{key}={format_value(value)}" for key, value in values.items())]


def format_value(value: Any) -> str:
    """A value as it is written on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def run_train(arguments: list[str]) -> int:
    """Runs train.py, and shows its steps: what else it says is of a run that ends with this command. -> its exit status

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
