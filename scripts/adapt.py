"""Trains a head further on recorded traffic, and takes the new one into use only if it drafts better and has not forgotten.

    python scripts/adapt.py checkpoint=checkpoints/shipped/mtp traffic=traffic out=adapted
    python scripts/serve.py checkpoint=adapted watch=30

The newest conversations are held out. The present head is judged on them by replay, and if training is worth it, it is
trained on the other new rows beside a share of old ones. OUT stands for the head in use; OUT/adaptation.html shows what was
measured and decided. With watch=SECONDS it goes on, whenever min_tokens new tokens have come. After Ctrl-C the same
command continues. docs/adapting.md has more.
"""

from helpers import adapting, loading
from helpers.adapt_options import Adapt, check, shares_of
from helpers.loading import Loaded
from helpers.options import options, run

import functools
import gc
import time
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from specdec import checkpoint
from specdec.heads.base import Drafter
from specdec.measuring.report import PromptCounts
from specdec.proposers import datastore
from train import progress
from train.adaptation import KINDS, Home, Plan, store
from train.adaptation_judging import Table, chosen, distinct, expected_tau, gate, judge, table, worth
from train.adaptation_mixing import choose, mix, tried
from train.adaptation_rows import (
    Answer,
    Older,
    Source,
    TooFew,
    encode,
    newest_tokens,
    num_tokens,
    read_traffic,
    split,
    without_prompts,
)
from train.answers.resumable import check_settings
from train.data import reading
from train.lock import lock

JUDGED = ("new", "old")  # what the gate looks at
FREE = ("checkpoint", "traffic", "out", "watch", "force", "settings")  # may change when an adaptation goes on


def main(arguments: list[str] | None = None) -> None:
    given = options(Adapt, __doc__, arguments)
    check(given)
    console = progress.Results()
    home = Home(Path(given.out))
    with lock(home.path / "lock", of=home.path), adapting.signals():
        home.begin(given.checkpoint)
        if given.watch is None:
            adapt(given, home, console)
        else:
            watch(given, home, console)


def watch(given: Adapt, home: Home, console: progress.Results) -> None:
    """Adapts whenever enough new rows have come, until a signal. Says so only when something has changed."""
    said = ""
    console.say(f"watching {given.traffic} every {given.watch:g} s; Ctrl-C ends it")
    try:
        while True:
            waiting = "an adaptation goes on" if home.training.exists() else look(given, home)
            if waiting is None or home.training.exists():
                try:
                    adapt(given, home, console)
                    waiting = look(given, home)
                except TooFew as error:
                    waiting = str(error)
            if waiting and waiting != said:
                console.say(waiting)
                said = waiting
            time.sleep(given.watch or 0)
    except KeyboardInterrupt:
        console.say(f"stopped; {home.path} stands for {home.current.name}")


def look(given: Adapt, home: Home) -> str | None:
    """None if no adaptation has looked yet at so many tokens that min_tokens of them are left to train on, or else what there is."""
    tried = max((each["until"] for each in home.history()), default=float("-inf"))
    try:
        answers, _ = read_traffic(Path(given.traffic), wanted(given, home))
    except TooFew as error:
        return str(error)
    tokens = int(num_tokens(answer for answer in answers if answer.time > tried) * (1 - given.heldout_share))
    return None if tokens >= given.min_tokens else f"{tokens:,} of {given.min_tokens:,} new tokens to train on"


def wanted(given: Adapt, home: Home) -> Source:
    """Whose answers the head is adapted to."""
    document = checkpoint.read_json(home.current / "drafter.json")
    name = given.target.name or str(document.get("target"))
    return Source(fingerprint_of(name, given.target.trust_remote_code), name, document.get("target_fingerprint"))


@functools.cache
def fingerprint_of(name: str, trust: bool) -> str:
    return datastore.fingerprint(loading.load_tokenizer(name, trust_remote_code=trust))


def adapt(given: Adapt, home: Home, console: progress.Results) -> None:
    """One adaptation, or the rest of the one that was interrupted."""
    settings = {key: value for key, value in asdict(given).items() if key not in FREE}
    plan = home.read_plan()
    if plan is None:
        plan = prepare(given, home, settings, console)
        if plan is None:
            return
    else:
        advice = f"Give those again, or delete {home.training} to begin anew."
        check_settings(home.training, plan.about["settings"], settings, advice=advice)
        console.say(f"the adaptation {plan.number} goes on")
    trained = train(given, home, plan)
    judge_new(given, home, plan, trained, console)


def load(given: Adapt, folder: Path) -> Loaded:
    """The head with its target. Raises ValueError for a head that replay does not apply to."""
    if loading.adapts(folder):
        raise ValueError(
            f"{folder} changes its target, so answers recorded with it are others' then: train it by train.py start=."
        )
    loaded = loading.load(str(folder), given.target)
    if not isinstance(loaded.drafter, Drafter):
        raise ValueError(
            f"{folder} does not draft by steps, so it cannot be judged by replay: train it by train.py start=."
        )
    return loaded


def prepare(given: Adapt, home: Home, settings: dict, console: progress.Results) -> Plan | None:
    """Reads and splits the rows, updates the datastore, judges the head in use. -> what to train; None: it is not worth it"""
    begun = time.perf_counter()
    history = home.history()
    until = max((each["until"] for each in history if each["decision"] == "accepted"), default=float("-inf"))
    adapting.family(home.first, given.head)  # which refuses a wrong one now
    source = wanted(given, home)
    answers, left_out = read_traffic(Path(given.traffic), source)
    new = [answer for answer in answers if answer.time > until]
    if not new:
        raise TooFew(f"traffic={given.traffic} has no rows that are newer than those of the head in use: record more.")
    earlier = home.known("heldout")
    training, heldout = split(new, given.heldout_share)
    loaded = load(given, home.current)
    judged_old = read_old_heldout(given, loaded)
    training = newest_tokens(without_prompts(training, [*earlier, *judged_old]), given.max_tokens)
    older = open_older(given, home, loaded)
    slices = {
        "new": chosen(heldout, given.limits),
        "old": old_slice(given, older, [*heldout, *training], earlier, judged_old),
    }
    taken = [*heldout, *training, *slices["old"], *earlier, *judged_old]
    num = min(given.judged, len(older.rows) // 4) if shares_of(given.shares) != [1.0] else 0
    slices["mix"] = chosen(older.hold_out(num, without=taken), given.limits)
    if not slices["new"]:
        raise TooFew(
            f"None of the {len(heldout)} held-out answers has a prompt that fits into length={given.length}: raise it."
        )
    share = given.old_share / (1 - given.old_share)
    rest = older.sample(int(share * num_tokens(training)), without=[*taken, *slices["mix"]])
    number = home.next_number()
    if given.store:
        texts = [*rest, *(answer for answer in answers if answer.time <= until), *new]
        sorting = functools.partial(progress.track, what="sorting the datastore", unit="rounds")
        stored = store(home, number, texts, loaded.tokenizer, progress=sorting)
        console.say(f"{home.path / 'datastore'}: {stored:,} tokens to draft from")
    before = {kind: judge_slice(given, loaded, slices[kind], f"the head in use, {kind} answers") for kind in KINDS}
    read = [*training, *rest]
    tables = {kind: table(slices[kind], before[kind], trained=read) if slices[kind] else {} for kind in JUDGED}
    expected = expected_tau(slices["new"], slices["old"], before["old"]) if slices["old"] else None
    good, why = worth(tables["new"], expected, tokens=num_tokens(training), min_tokens=given.min_tokens)
    show(console, tables)
    console.say(f"worth training: {'yes' if good else 'no'}. {why}")
    start = str(home.current.relative_to(home.path))
    notes = notes_on(left_out, slices, new)
    about = {"until": max(answer.time for answer in new), "worth": f"{'Yes' if good else 'No'}. {why}", "notes": notes}
    about |= {"minutes": {"judging before": (time.perf_counter() - begun) / 60}, "settings": settings}
    if not good and not given.force:
        document = {
            "number": number,
            "decision": "not trained",
            "reasons": [why, "force=true trains anyway."],
            "start": start,
        }
        document |= {"in_use": start, "slices": tables, **about}
        console.say(f"not trained; force=true trains anyway. Page: {home.record(number, document)}")
        return None
    plan = Plan(number, start, read, len(training), slices, before, about)
    home.save_plan(plan, source.tokenizer)
    return plan


def judge_slice(given: Adapt, loaded: Loaded, answers: list[Answer], what: str) -> list[PromptCounts]:
    return judge(loaded.drafter, answers, given.limits, what=f"judging {what}")


def open_older(given: Adapt, home: Home, loaded: Loaded) -> Older:
    sources = adapting.old_sources(given.old, home.first, loaded.target.name)
    try:
        return Older(sources, loaded.tokenizer, split=given.old_split, seed=given.seed, further=home.known("trained"))
    except ValueError as error:
        raise ValueError(f"old={','.join(sources)}: {error} Give old=FILE, or old= for no old rows.") from None


def read_old_heldout(given: Adapt, loaded: Loaded) -> list[Answer]:
    """The answers of old_heldout=, none of which is trained on, whether it is judged or not."""
    if given.old_heldout is None:
        return []
    with reading.at(f"old_heldout={given.old_heldout}"):
        found = reading.load_conversations(given.old_heldout, split=given.old_split)
        rows = [encode(loaded.tokenizer, row) for row in found]
    return [answer for answer in rows if answer is not None]


def old_slice(
    given: Adapt, older: Older, new: list[Answer], earlier: list[Answer], judged_old: list[Answer]
) -> list[Answer]:
    """Old answers that are judged and not trained on, and those that earlier adaptations held out. judged_old: of old_heldout="""
    kept = chosen(without_prompts(earlier, new), given.limits)
    if given.old_heldout is None:
        return chosen(older.hold_out(given.judged, without=[*new, *earlier]), given.limits) + kept
    found = chosen(judged_old, given.limits)
    if not found:
        raise ValueError(
            f"old_heldout={given.old_heldout} has no answer of two tokens or more within length={given.length}."
        )
    return found + kept


def notes_on(left_out: dict[str, int], slices: dict[str, list[Answer]], new: list[Answer]) -> list[str]:
    notes = [f"{num} rows of the traffic were left out: {reason}." for reason, num in left_out.items()]
    inexact = sum(not answer.exact for answer in slices["new"])
    if inexact:
        notes.append(
            f"{inexact} of {len(slices['new'])} judged answers were written with top-k, top-p, a penalty, a grammar or the like, at an "
            "unknown temperature, or have ids that were made of their text. Replay takes them as drawn at their temperature "
            "alone (0 if it is unknown), so their tau is an estimate, before and after alike."
        )
    if not slices["old"]:
        notes.append("There are no old answers, so what was forgotten is not known.")
    return notes


def train(given: Adapt, home: Home, plan: Plan) -> Path:
    """Trains as the plan says. -> the trained head's folder. Raises KeyboardInterrupt if it was interrupted."""
    head = adapting.family(home.first, given.head)
    name = given.target.name or loading.target_of(home.path / plan.start)
    target = {key: value for key, value in asdict(given.target).items() if key != "name"}
    length, steps = sizes_of(given, plan)
    gc.collect()  # the target that judged
    status = adapting.train(
        adapting.arguments(
            home.training,
            start=home.path / plan.start,
            head=head,
            first=home.first,
            lr=given.lr or adapting.rate(home.first, head),
            steps=steps,
            length=length,
            target={"name": Path(name) if Path(name).exists() else name, **target},
            vocab=adapting.vocab(home.first),
            more=given.training,
        )
    )
    folder = home.training / "run"
    if not (folder / "finished").exists():
        if status in (0, 130):
            raise KeyboardInterrupt
        raise ValueError(
            f"Training ended with status {status}; what it said stands above. The same command continues it."
        )
    return folder / f"step_{steps:06d}"


def sizes_of(given: Adapt, plan: Plan) -> tuple[int, int]:
    """-> tokens of a pack, steps"""
    lengths = [len(answer.prompt) + len(answer.answer) for answer in plan.training]
    length = adapting.pack_length(lengths, given.length)
    return length, adapting.num_steps(lengths, given.epochs, given.training, length=length)


def judge_new(given: Adapt, home: Home, plan: Plan, trained: Path, console: progress.Results) -> None:
    """Judges the trained head, and takes it into use or not."""
    begun = time.perf_counter()
    loaded = load(given, trained)
    vocab = loaded.drafter.draft_to_target
    start = checkpoint.start(home.path / plan.start, loaded.target, {}, lambda _: vocab)[0].state_dict()
    whole = checkpoint.read_tensors(trained / "drafter.safetensors")

    def use(share: float) -> dict[str, Tensor]:
        tensors = mix(start, whole, share)
        loaded.drafter.load_state_dict(tensors)
        return tensors

    def look(share: float, kind: str) -> Table:
        return compare(given, plan, loaded, kind, f"{share:g} of the new weights")

    def look_to_choose(share: float) -> Table:
        use(share)
        return look(share, "mix")

    shares = sorted(shares_of(given.shares), reverse=True)
    first, mixing = choose(shares, look_to_choose, tolerance=given.tolerance) if plan.heldout["mix"] else (1.0, [])
    for share in [share for share in shares if share <= first]:
        tensors = use(share)
        tables = {kind: look(share, kind) for kind in JUDGED}
        good, reasons = gate(tables["new"], tables["old"], tolerance=given.tolerance)
        mixing.append(tried(share, "the gate's", tables["old"], given.tolerance))
        if good or reasons != mixing[-1]["forgotten"]:  # less of the new weights helps against forgetting alone
            break
    new, old = plan.training[: plan.num_new], plan.training[plan.num_new :]
    report = checkpoint.read_json(trained / "report.json")
    training = {
        "new_answers": len(new),
        "new_tokens": num_tokens(new),
        "old_answers": len(old),
        "old_tokens": num_tokens(old),
    }
    training |= {"mixing": mixing, "steps": sizes_of(given, plan)[1], "tokens_read": report["training"]["tokens"]}
    training |= {"lr": given.lr or adapting.rate(home.first, adapting.family(home.first, given.head))}
    minutes = {**plan.about["minutes"], "training": report["training"]["seconds"] / 60}
    minutes |= {"judging after": (time.perf_counter() - begun) / 60}
    number = plan.number
    document = {
        "number": number,
        "decision": "accepted" if good else "refused",
        "reasons": reasons,
        "start": plan.start,
    }
    document |= {"in_use": f"heads/{number}" if good else plan.start, "slices": tables, "training": training}
    document |= {**plan.about, "minutes": minutes}
    show(console, tables)
    page = home.record(number, document)
    if good:
        home.accept(plan, trained, tensors, document, datastore.fingerprint(loaded.tokenizer))
    home.finish()
    console.say(f"{document['decision']}: {' '.join(reasons)}")
    console.say(f"{home.path} stands for {document['in_use']}. Page: {page}")


def compare(given: Adapt, plan: Plan, loaded: Loaded, kind: str, head: str) -> Table:
    """tau of held-out answers before, and now with the loaded head."""
    answers = plan.heldout[kind]
    after = judge_slice(given, loaded, answers, f"{head}, {kind} answers")
    return table(answers, plan.before[kind], after, trained=plan.training) if answers else {}


def show(console: progress.Results, tables: dict[str, Table]) -> None:
    """tau of all parts, as lines."""
    for kind, parts in tables.items():
        for name, part in distinct(parts).items():
            low, high = part["before_ci"]
            line = f"{kind} answers, {name}: tau {part['before']:.3f} ({low:.2f} .. {high:.2f})"
            if "after" in part:
                low, high = part["change_ci"]
                line += f" -> {part['after']:.3f}, change {part['change']:+.3f} ({low:+.3f} .. {high:+.3f})"
            console.say(f"{line}, {part['conversations']} conversations, {part['trained']} in the training rows")


if __name__ == "__main__":
    run(main)
