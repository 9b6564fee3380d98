"""Trains a head further on recorded traffic, and takes the new one into use only if it drafts better and has not forgotten.

    specdec adapt checkpoint=checkpoints/shipped/mtp traffic=traffic out=adapted
    specdec serve checkpoint=adapted

The newest conversations are held out, and the present head is judged on them by replay. Then it is trained on the other new
rows, beside a share of old ones, and judged again. OUT stands for the head in use; OUT/adaptations has what was measured and
decided. With watch=SECONDS it goes on, whenever min_tokens new tokens have come. After Ctrl-C the same command continues.
docs/adapting.md has more.
"""

from helpers import loading
from helpers.options import option, options, run, split

import gc
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

import train.overrides as overrides
from specdec import checkpoint
from specdec.heads.base import Drafter
from specdec.proposers import datastore
from train import adapt as adaptation
from train import decide, progress
from train.adapt_folder import AdaptationPlan, Home
from train.answers.resumable import check_settings
from train.config import flat, read_settings
from train.data import reading
from train.lock import lock

FREE = ("checkpoint", "traffic", "out", "watch", "settings")  # options that may change when an adaptation goes on
OWN = {
    "run",
    "start",
    "resume",
    "head",
    "data.train",
    "data.length",
    "train.steps",
}  # options of train.py that are not the user's
TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SHIPPED = "data/answers.jsonl.gz"  # answers of the default target, on which the shipped heads were trained
ROUND = 128  # tokens: packs have a multiple of it, so that the target's passes have few shapes
LOWER = 1 / 3  # of the learning rate that the head was trained with
# Of heads that are trained with Muon: rates of AdamW, with which adapting was measured, and their objective then
ADAMW_LR = {"eagle3": 2.5e-4, "mtp": 7e-4}
AS_MEASURED: dict[str, dict] = {
    "eagle3": {"depth": 7, "supervise": "answers"},
    "mtp": {"depth": 3, "supervise": "answers"},
}
SHOWN = re.compile(r"step +\d+/\d+|Resumed|Ctrl-C|SIGTERM")  # lines of train.py


@dataclass(frozen=True, kw_only=True)
class Adapt:
    checkpoint: str = field(metadata={"help": loading.CHECKPOINT})
    traffic: str = field(metadata={"help": "folder of recorded answers: .jsonl files"})
    out: str = field(metadata={"help": "folder of the adapted heads; it stands for the head in use", "folder": True})
    old: str | None = option(
        None,
        "files that the head was trained on (a,b), some of whose rows are held out to judge forgetting; null: those of its "
        "config.yaml, or the shipped ones; empty: none",
    )
    old_share: float = option(0.3, "share of the tokens trained on that are old ones")
    heldout_share: float = option(0.2, "share of the conversations that are held out, the newest")
    epochs: float = option(3.0, "how often rows are read")
    lr: float | None = option(None, "learning rate; null: a third of the head's own")
    tolerance: float = option(0.03, "share by which tau of old answers may fall")
    min_tokens: int = option(5000, "new tokens of answers that training needs")
    watch: float | None = option(None, "go on, and look for new rows every so many seconds; null: once")
    length: int = option(1024, "tokens of an answer with its prompt that are judged and trained on, at most")
    training: dict[str, str] = field(
        default_factory=dict,
        metadata={"prefix": "training.", "help": "options of train.py, such as training.train.batch=4"},
    )
    target: loading.TargetOptions = field(default_factory=loading.TargetOptions)


def main(arguments: list[str] | None = None) -> None:
    given = options(Adapt, __doc__, arguments)
    overrides.check(given.training, "training.")
    if own := sorted(OWN & set(given.training)):
        raise ValueError(f"training.{own[0]}= is chosen by this command: leave it out.")
    console = progress.Results()
    home = Home(Path(given.out))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with lock(home.path / "lock", of=home.path):
            home.begin(given.checkpoint)
            if given.watch is None:
                adapt(given, home, console)
            else:
                watch(given, home, console)
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(given: Adapt, home: Home, console: progress.Results) -> None:
    """Adapts whenever enough new rows have come, until a signal. Says so only when something has changed."""
    said = ""
    console.say(f"watching {given.traffic} every {given.watch:g} s; Ctrl-C ends it")
    try:
        while True:
            try:
                adapt(given, home, console)
            except adaptation.TooFew as error:
                if str(error) != said:
                    console.say(said := str(error))
            time.sleep(given.watch or 0)
    except KeyboardInterrupt:
        console.say(f"stopped; {home.path} stands for {home.current.name}")


def adapt(given: Adapt, home: Home, console: progress.Results) -> None:
    """One adaptation, or the rest of the one that was interrupted. Raises TooFew if there is too little to train on."""
    settings = {key: value for key, value in asdict(given).items() if key not in FREE}
    plan = home.read_plan()
    if plan is None:
        plan = prepare(given, home, settings, console)
    else:
        then = {key: value for key, value in plan.about["settings"].items() if key in settings}  # some options went
        advice = f"Give those again, or delete {home.training} to begin anew."
        check_settings(home.training, then, settings, advice=advice)
        console.say(f"the adaptation {plan.number} goes on")
    judge_new(given, home, plan, train(given, home, plan), console)


def check_head(folder: Path) -> None:
    """Raises ValueError for a head that replay does not apply to."""
    kind = checkpoint.drafter_class(str(checkpoint.read_json(folder / "drafter.json").get("_target_")))
    if kind.adapts_target or not issubclass(kind, Drafter):
        raise ValueError(
            f"{folder}: a {kind.__name__} cannot be judged by replay along answers of the unchanged target: train it by "
            "train.py start=."
        )


def check_tokens(tokens: int, needed: int) -> None:
    if tokens < needed:
        raise adaptation.TooFew(f"{tokens:,} of {needed:,} new tokens to train on (min_tokens): record more.")


def prepare(given: Adapt, home: Home, settings: dict, console: progress.Results) -> AdaptationPlan:
    """Reads and splits the rows. -> what to train. With watch=, enough of the rows must be new to all adaptations."""
    check_head(home.current)
    find_head(home.first)  # which refuses a wrong one now
    document = checkpoint.read_json(home.current / "drafter.json")
    name = given.target.name or str(document.get("target"))
    tokenizer = loading.load_tokenizer(name, trust_remote_code=given.target.trust_remote_code)
    source = adaptation.TrafficSource(datastore.fingerprint(tokenizer), name, document.get("target_fingerprint"))
    answers, left_out = adaptation.read_traffic(Path(given.traffic), source)
    past = [(each["until"], each["decision"]) for each in home.history()]
    tried = max((until for until, _ in past), default=-math.inf)
    known = max((until for until, decision in past if decision == "accepted"), default=-math.inf)
    if given.watch is not None:
        tokens = adaptation.count_tokens(answer for answer in answers if answer.time > tried)
        check_tokens(int(tokens * (1 - given.heldout_share)), given.min_tokens)
    new = [answer for answer in answers if answer.time > known]
    if not new:
        raise adaptation.TooFew(
            f"traffic={given.traffic} has no rows that are newer than those of the head in use: record more."
        )
    training, heldout = adaptation.split_newest(new, given.heldout_share)
    earlier = home.known("heldout")
    training = adaptation.drop_known(training, earlier)
    check_tokens(tokens := adaptation.count_tokens(training), given.min_tokens)
    num = len({answer.conversation for answer in heldout if len(answer.prompt) + 2 <= given.length})
    if num < adaptation.ENOUGH:
        raise adaptation.TooFew(
            f"{num} held-out conversations fit into length={given.length}: a head is judged by {adaptation.ENOUGH} or more. Record more."
        )
    if left_out:
        console.say(f"rows of the traffic that are left out: {left_out}")
    sources = find_old(given.old, home.first, source.target)
    adapted = [{**answer.to_row(source.tokenizer), "category": "adapted"} for answer in home.known("trained")]
    most = int(given.old_share / (1 - given.old_share) * tokens)
    old, rest = choose_old(sources, adapted, tokenizer, taken=[*heldout, *training, *earlier], most=most)
    old += adaptation.drop_known(earlier, [*heldout, *training])
    slices = {kind: adaptation.choose_judged(each, given.length) for kind, each in (("new", heldout), ("old", old))}
    about = {"until": max(answer.time for answer in new), "settings": settings}
    start = str(home.current.relative_to(home.path))
    plan = AdaptationPlan(home.next_number(), start, [*training, *rest], len(training), slices, about)
    home.save_plan(plan, source.tokenizer)
    return plan


def choose_old(
    sources: list[str], adapted: list[dict], tokenizer: PreTrainedTokenizerBase, *, taken: adaptation.Answers, most: int
) -> tuple[adaptation.Answers, adaptation.Answers]:
    """-> old answers that forgetting is judged on, the same ones at every adaptation, and others to train on.

    adapted: rows of earlier adaptations; taken: answers that are used already; most: tokens of the second ones
    """
    try:
        rows = [row for name in sources for row in reading.load_conversations(name)]
        drawn = list(itertools.islice(adaptation.draw_old(rows, tokenizer), adaptation.JUDGED))
        unused = adaptation.drop_known(adaptation.draw_old([*rows, *adapted], tokenizer), [*taken, *drawn])
    except ValueError as error:
        raise ValueError(f"old={','.join(sources)}: {error} Give old=FILE, or old= for no old rows.") from None
    return adaptation.drop_known(drawn, taken), adaptation.take_tokens(unused, most)


def judge_new(given: Adapt, home: Home, plan: AdaptationPlan, trained: Path, console: progress.Results) -> None:
    """Judges the trained head, and takes it into use or not."""
    loaded = loading.load(str(home.path / plan.start), given.target)
    heads = {"the head in use": loaded.drafter, "the new head": checkpoint.load(trained, loaded.target)}
    changes = {}
    for kind, answers in plan.heldout.items():
        counts = [
            adaptation.judge(head, answers, length=given.length, what=f"judging {name}, {kind} answers")
            for name, head in heads.items()
        ]
        changes[kind] = part = adaptation.TauChange.of(answers, *counts)
        if part:
            (low, high), (least, most) = part.before_ci, part.change_ci
            console.say(
                f"{kind} answers: tau {part.before:.3f} ({low:.2f} .. {high:.2f}) -> {part.after:.3f}, change "
                f"{part.change:+.3f} ({least:+.3f} .. {most:+.3f}), {part.conversations} conversations"
            )
    assert changes["new"] is not None
    good, reasons = adaptation.decide(changes["new"], changes["old"], tolerance=given.tolerance)
    tokens = [adaptation.count_tokens(part) for part in (plan.training[: plan.num_new], plan.training[plan.num_new :])]
    document = {
        "number": plan.number,
        "decision": "accepted" if good else "refused",
        "reasons": reasons,
        "start": plan.start,
        "in_use": f"heads/{plan.number}" if good else plan.start,
        "slices": {kind: change and asdict(change) for kind, change in changes.items()},
        "training": {"new_tokens": tokens[0], "old_tokens": tokens[1], "steps": size_training(given, plan)[1]},
        **plan.about,
    }
    home.decide(plan, trained, document, datastore.fingerprint(loaded.tokenizer))
    console.say(f"{document['decision']}: {' '.join(reasons)}")
    console.say(f"{home.path} stands for {document['in_use']}")


# Training: train.py in a process of its own, with the settings of the head


def settings_of(head: Path) -> dict[str, Any]:
    """config.yaml beside the head, of the run that it comes from; {} without one"""
    path = head / "config.yaml"
    return read_settings(path) if path.exists() else {}


def find_head(head: Path) -> str:
    """The first file of conf/head for a checkpoint's class."""
    kind = checkpoint.read_json(head / "drafter.json")["_target_"]
    for path in sorted((loading.CONF / "head").glob("*.yaml")):
        if OmegaConf.load(path).drafter._target_ == kind:
            return path.stem
    raise ValueError(f"{head}: no file of conf/head trains a {kind}.")


def find_old(given: str | None, head: Path, target: str) -> list[str]:
    """Files of the rows that the head was trained on. given: None: those of its config.yaml, or the shipped ones"""
    if given is not None:
        return split(given)
    recorded = settings_of(head).get("data", {}).get("train")
    if recorded is not None:
        return list(reading.read_sources(recorded))
    if Path(target).name == Path(loading.DEFAULT_TARGET).name:
        return [SHIPPED]
    raise ValueError(
        f"It is not recorded what {head} was trained on: give old=FILE with such rows, or old= for none (then nothing "
        "keeps the head from forgetting, and nothing shows it)."
    )


def size_training(given: Adapt, plan: AdaptationPlan) -> tuple[int, int]:
    """-> tokens of a pack, and steps that read all rows `epochs` times.

    A pack holds the longest row, in a multiple of ROUND: at least the usual tokens, and at most `length` if that is more.
    """
    lengths = [len(answer.prompt) + len(answer.answer) for answer in plan.training]
    length = max(decide.SHORTEST["cpu"], min(given.length, ROUND * math.ceil(max(lengths) / ROUND)))
    packs = sum(min(each, length) for each in lengths) / length
    together = int(given.training.get("train.batch", 1)) * int(given.training.get("train.accumulation", 1))
    return length, max(1, math.ceil(given.epochs * packs / together))


def train(given: Adapt, home: Home, plan: AdaptationPlan) -> Path:
    """Trains as the plan says. -> the trained head's folder. Raises KeyboardInterrupt if it was interrupted."""
    gc.collect()  # the target that judged
    length, steps = size_training(given, plan)
    status = run_train(make_arguments(given, home, plan, length, steps))
    folder = home.training / "run"
    if not (folder / "finished").exists():
        if status in (0, 130):
            raise KeyboardInterrupt
        raise ValueError(
            f"Training ended with status {status}; what it said stands above. The same command continues it."
        )
    return folder / f"step_{steps:06d}"


def make_arguments(given: Adapt, home: Home, plan: AdaptationPlan, length: int, steps: int) -> list[str]:
    """Arguments of train.py. The user's `training.` options have the last word."""
    folder = home.training.resolve()  # out= may be relative in one launch and absolute in the next
    name = given.target.name or loading.target_of(home.path / plan.start)
    target = {**asdict(given.target), "name": Path(name) if Path(name).exists() else name}
    settings, head = settings_of(home.first), find_head(home.first)
    objective = settings.get("head", {}).get("objective", {})
    recorded = settings.get("optimizer", {})
    own_lr = recorded.get("lr") or OmegaConf.load(loading.CONF / "head" / f"{head}.yaml").lr
    if head in ADAMW_LR and (not recorded or recorded.get("name") == "muon"):
        own_lr = ADAMW_LR[head]
    objective = objective or AS_MEASURED.get(head, {})
    values: dict[str, Any] = {
        **{f"head.objective.{key}": value for key, value in flat(objective).items() if key != "_target_"},
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
        "optimizer.lr": given.lr or LOWER * float(own_lr),
        "optimizer.warmup": min(20, steps // 10),
        "train.steps": steps,
        "train.batch": 1,
        "train.accumulation": 1,
        "train.validate_every": steps,  # the last step is taken, not the best one: adapt.py judges it
        "train.save_every": max(1, min(100, steps // 5)),
        "train.log_every": max(1, min(20, steps // 10)),
        "validation.num_prompts": 2,
        "validation.max_new_tokens": 8,
        "validation.decode": "end",
        "validation.auto": "never",
        "validation.answers": folder / "answers",
        **{f"target.{key}": value for key, value in target.items()},
        **given.training,
    }
    rows = f"data.train=[{quote(folder / 'train.jsonl')}]"
    return [f"head={head}", rows, *(f"{key}={quote(value)}" for key, value in values.items())]


def quote(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return overrides.quoted(str(value)) if isinstance(value, Path) else str(value)


def run_train(arguments: list[str]) -> int:
    """Runs train.py, and shows its steps: what else it says is of a run that ends with this command. -> its exit status

    Ctrl-C and SIGTERM are passed on to it, so that it saves its state after its step.
    """
    command = [sys.executable, str(TRAIN), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        while True:
            try:
                for line in child.stdout:
                    if SHOWN.match(line):
                        progress.note(line.rstrip())
                return child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)


if __name__ == "__main__":
    run(main)
