"""Adapting a head to recorded answers: the rows, the gate, the mixing of weights, and the folder, which stands for the head in use.

best                    name of the head in use, such as heads/0002; replaced whole: a reader sees the old or the new
heads/0001/             a copy of the given head; heads/0002/ ..: accepted ones, with adaptation.json
rows/0002/              what that head was trained on, and what was held out: trained.jsonl, heldout.jsonl
adaptations/0002.json   what was measured and decided, of refused heads too; 0002.html: its page
adaptation.html         the page of the newest one
datastore               link to datastores/0002: texts to draft from (proposer=retrieval, proposer.suffix.datastore)
training/               what is under way: plan.json, the rows, and the run; removed once it is decided
lock                    while a process adapts here

rows, datastores and training hold texts of users: these folders are made for their owner alone (mode 700).
"""

import collections
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import files
from specdec.heads.base import Drafter
from specdec.measuring import figures
from specdec.measuring.figures import TAU, PromptCounts
from specdec.server import traffic_files
from train import progress, replaying
from train.answers import datastore
from train.data import reading
from train.data import rows as data
from train.pages.page import Section, Table, interval, render_page

ALL = "all"
ENOUGH = 8  # conversations, below which neither a slice is judged nor a category of it
FEWER = 2  # times the tolerance of all old answers: what a category of them may fall
KINDS = ("new", "old", "mix")  # held-out answers: the two that the gate looks at, and old ones to choose the mixture by
LONGEST_MATCH = 16  # tokens that the datastore is sorted by, as scripts/datastore.py
MOST_STORED = 2**22  # tokens of a datastore, the newest ones; sorting takes 40 bytes each
NEEDED = "Rows need token ids of this target (tokens, prompt_tokens, tokenizer, target) and a time."
UNSEEN = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]  # of rows that have token ids only
SLICES = {"new": "New answers, held out", "old": "Old answers, held out: what was forgotten"}
PartTable = dict[str, dict[str, Any]]  # by part: `all`, `category NAME`, `tag NAME`, `temperature T`
Tensors = dict[str, Tensor]


class TooFew(ValueError):
    """There are not enough rows yet; more may come."""


# Rows


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer of the target, with what was known when it was written."""

    id: str
    conversation: str
    time: float  # seconds
    category: str
    tags: tuple[str, ...]
    temperature: float
    prompt: list[int]
    answer: list[int]
    exact: bool  # whether its ids were drawn at a known temperature, and by that alone, as replay takes it
    messages: list[dict]

    def to_row(self, tokenizer: str) -> dict:
        """As train.py reads it. tokenizer: `datastore.fingerprint`"""
        row = {**asdict(self), "tokens": self.prompt + self.answer, "prompt_tokens": len(self.prompt)}
        del row["prompt"], row["answer"]
        return {**row, "tokenizer": tokenizer}

    @classmethod
    def from_row(cls, row: dict, *, place: str) -> "RecordedAnswer":
        """Of a row with token ids. place: its id, if it has none. Raises KeyError, TypeError, ValueError for another."""
        tokens, num = row["tokens"], row["prompt_tokens"]
        if not all(type(token) is int and token >= 0 for token in tokens) or type(num) is not int or num < 1:
            raise ValueError("not a list of token ids")
        name = str(place if row.get("id") is None else row["id"])
        drawn = row.get("top_k") in (None, 0, -1) and all(
            row.get(key) in (None, 1) for key in ("top_p", "repetition_penalty")
        )
        free = row.get("grammar") is None and not row.get("other_law")
        as_written = free and row.get("ids") != "retokenised" and row.get("temperature") is not None
        return cls(
            id=name,
            conversation=str(name if row.get("conversation") is None else row["conversation"]),
            time=float(row.get("time") or 0.0),
            category=str(row.get("category") or ALL),
            tags=tuple(map(str, row.get("tags") or ())),
            temperature=float(row.get("temperature") or 0.0),
            prompt=tokens[:num],
            answer=tokens[num:],
            exact=row.get("exact", drawn and as_written),
            messages=row.get("messages") or UNSEEN,
        )


Answers = list[RecordedAnswer]


@dataclass(frozen=True)
class Source:
    """Whose answers are wanted. tokenizer: `datastore.fingerprint`; target: its name"""

    tokenizer: str
    target: str
    target_fingerprint: str | None = None

    def wrote(self, row: dict) -> bool:
        """By fingerprints, or by names where one is unknown or of quantised weights. A row may leave out its target."""
        prints = row.get("target_fingerprint"), self.target_fingerprint
        if all(each is not None and "-" not in str(each) for each in prints):
            return prints[0] == prints[1]
        return row.get("target") is None or Path(str(row["target"])).name == Path(self.target).name

    def parse(self, row: dict | None, *, place: str) -> RecordedAnswer | str:
        """The answer in a row of traffic, or why it is left out."""
        try:
            if row is None or not reading.has_ids(row):
                return "damaged" if row is None else "without token ids"
            if row.get("tokenizer") != self.tokenizer:
                return "with ids of another tokenizer"
            if not self.wrote(row):
                return "of another target"
            if row.get("time") is None:
                return "without a time"
            answer = RecordedAnswer.from_row(row, place=place)
        except (ValueError, TypeError, KeyError, RecursionError):
            return "damaged"
        return answer if len(answer.answer) > 1 else "shorter than two tokens"


def read_traffic(folder: Path, wanted: Source) -> tuple[Answers, dict[str, int]]:
    """-> the answers in a folder of traffic, in the order of their times; why rows were left out, and how many each.

    A last line without its end is being written, and is not looked at.
    Raises ValueError if there is no such folder, TooFew if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    parsed = [wanted.parse(row, place=place) for place, row in traffic_files.read_lines(paths)]
    left_out = collections.Counter(each for each in parsed if isinstance(each, str))
    found = [each for each in parsed if isinstance(each, RecordedAnswer)]
    if not found:
        why = " and ".join(f"{num} {reason}" for reason, num in left_out.items()) or "there are none"
        raise TooFew(f"traffic={folder} has no row of {wanted.target} that can be used: {why}. {NEEDED}")
    return sorted(found, key=lambda answer: answer.time), dict(left_out)


def read_answers(path: Path) -> Answers:
    """A file that `to_lines` has written. Raises ValueError if it is damaged."""
    try:
        return [RecordedAnswer.from_row(json.loads(line), place="") for line in path.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): take another copy of it.") from None


def to_lines(answers: Iterable[RecordedAnswer], tokenizer: str) -> str:
    """The content of a file of rows."""
    return "".join(json.dumps(answer.to_row(tokenizer), ensure_ascii=False) + "\n" for answer in answers)


def count_tokens(answers: Iterable[RecordedAnswer]) -> int:
    """Of the answers, without their prompts."""
    return sum(len(answer.answer) for answer in answers)


def split_newest(answers: Answers, share: float) -> tuple[Answers, Answers]:
    """-> answers to train on, and those of the newest conversations. A conversation is as new as its newest answer.

    share: of the conversations that are held out. Training loses the answers to prompts that are held out too.
    Raises TooFew if nothing is left to train on.
    """
    newest: dict[str, float] = {}
    for answer in answers:
        newest[answer.conversation] = max(answer.time, newest.get(answer.conversation, answer.time))
    order = sorted(newest, key=lambda name: (newest[name], name))
    held = set(order[len(order) - max(1, round(share * len(order))) :])
    heldout = [answer for answer in answers if answer.conversation in held]
    training = without_prompts([answer for answer in answers if answer.conversation not in held], heldout)
    if not training:
        raise TooFew(
            f"{len(order)} conversations, of which {len(held)} are held out, leave nothing to train on: record more, "
            "lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def without_prompts(answers: Iterable[RecordedAnswer], others: Iterable[RecordedAnswer]) -> Answers:
    """Those whose prompt, and whose conversation, is none of the others'."""
    return list(filter(_unlike(others), answers))


def _unlike(others: Iterable[RecordedAnswer]) -> Callable[[RecordedAnswer], bool]:
    others = list(others)
    prompts, conversations = {tuple(other.prompt) for other in others}, {other.conversation for other in others}
    return lambda answer: tuple(answer.prompt) not in prompts and answer.conversation not in conversations


def keep_newest(answers: Answers, most: int | None) -> Answers:
    """The newest answers with at most so many tokens; answers [..] in the order of their times"""
    kept, total = len(answers), 0
    while kept and most is not None and (total := total + len(answers[kept - 1].answer)) <= most:
        kept -= 1
    return answers if most is None else answers[kept:]


class OldRows:
    """Rows that the head was trained on before, encoded when they are needed. Their order follows from the seed and their ids.

    sources: as data.train; further: answers of earlier adaptations
    """

    def __init__(
        self, sources: list[str], tokenizer: PreTrainedTokenizerBase, *, split: str | None, seed: int, further: Answers
    ):
        self.tokenizer, self.seed, self.further = tokenizer, seed, further
        self.name = f"old={','.join(sources)}"
        self.rows: list[dict | RecordedAnswer] = [
            row for source in sources for row in reading.load_conversations(source, split=split)
        ]

    def hold_out(self, num: int, *, without: Answers) -> Answers:
        """`num` rows of the sources, evenly from their categories: the same ones at every adaptation."""
        places: collections.Counter[str] = collections.Counter()
        order = []
        for row in self._drawn(self.rows):
            category = row.category if isinstance(row, RecordedAnswer) else str(row["category"])
            order.append((places[category], category, row))
            places[category] += 1
        encoded = self._encoded([row for _, _, row in sorted(order, key=lambda each: each[:2])], without)
        return [answer for _, answer in zip(range(num), encoded)]

    def sample(self, tokens: int, *, without: Answers) -> Answers:
        """Rows with so many tokens of answers, of the sources and of earlier adaptations."""
        found: Answers = []
        encoded, total = self._encoded(self._drawn([*self.rows, *self.further]), without), 0
        while total < tokens and (answer := next(encoded, None)) is not None:
            found.append(answer)
            total += len(answer.answer)
        return found

    def _drawn(self, rows: Iterable[dict | RecordedAnswer]) -> list[dict | RecordedAnswer]:
        name = lambda row: row.id if isinstance(row, RecordedAnswer) else row["id"]
        return sorted(rows, key=lambda row: hashlib.sha256(f"{self.seed} {name(row)}".encode()).digest())

    def _encoded(self, rows: Iterable[dict | RecordedAnswer], without: Answers) -> Iterator[RecordedAnswer]:
        wanted = _unlike(without)
        for row in rows:
            with reading.at(self.name):
                answer = row if isinstance(row, RecordedAnswer) else encode_answer(self.tokenizer, row)
            if answer is not None and wanted(answer):
                yield answer


def encode_answer(tokenizer: PreTrainedTokenizerBase, row: dict) -> RecordedAnswer | None:
    """The last answer of a row of `reading.load_conversations`; None if it has fewer than two tokens.

    Answers to one prompt, which scripts/answer.py calls PROMPT@TEMPERATURE, are one conversation.
    """
    encoded = data.encode(tokenizer, row)
    start, stop = data.last_answer(encoded)
    tokens: dict = {"tokens": encoded.tokens[:stop], "prompt_tokens": start}
    tokens["conversation"] = row.get("conversation") or f"old {encoded.id.rpartition('@')[0] or encoded.id}"
    return RecordedAnswer.from_row({**row, **tokens}, place=encoded.id) if stop - start > 1 else None


# The gate: tau by replay, and whether the new head is taken


@dataclass(frozen=True)
class Limits:
    """How much is judged. depth: of the chain; num: answers of a slice; length: tokens of an answer with its prompt"""

    depth: int
    num: int
    length: int

    def choose(self, answers: Answers) -> Answers:
        """Those that are judged, spread over the list. Too long prompts are left out; long answers are cut later."""
        fit = [answer for answer in answers if len(answer.prompt) + 2 <= self.length]
        step = max(1.0, len(fit) / self.num)
        return [fit[int(place * step)] for place in range(min(self.num, len(fit)))]

    def judge(self, drafter: Drafter, answers: Answers, *, what: str) -> list[PromptCounts]:
        """What tau is made of, of each answer, by replay at the temperature that it was written at. what: is shown"""
        texts = [
            replaying.Written(each.prompt, each.answer[: self.length - len(each.prompt)], each.temperature)
            for each in answers
        ]
        return replaying.prompt_counts(replaying.rounds(drafter, texts, depth=self.depth, what=what))


def compare_parts(answers: Answers, before: list[PromptCounts], after: list[PromptCounts]) -> PartTable:
    """tau of all answers, each category, tag and temperature, before and after, with 95 % intervals over conversations.

    Categories, tags and temperatures that all answers have are left out.
    """
    parts: dict[str, list[int]] = {ALL: list(range(len(answers)))} if answers else {}
    for number, answer in enumerate(answers):
        temperature = f"temperature {answer.temperature:g}"
        for name in (f"category {answer.category}", *(f"tag {tag}" for tag in answer.tags), temperature):
            parts.setdefault(name, []).append(number)
    found: PartTable = {}
    for name in sorted(parts, key=lambda name: (name != ALL, name)):
        numbers = parts[name]
        if name != ALL and len(numbers) == len(answers):
            continue
        then, now = (_by_conversation(answers, counts, numbers) for counts in (before, after))
        change, span = figures.tau_difference(now, then)
        found[name] = {
            "conversations": len(then),
            "answers": len(numbers),
            "tokens": count_tokens(answers[number] for number in numbers),
            "before": figures.tau(then),
            "before_ci": figures.interval(then, figures.tau, 0),
            "after": figures.tau(now),
            "after_ci": figures.interval(now, figures.tau, 0),
            "change": change,
            "change_ci": span,
        }
    return found


def _by_conversation(answers: Answers, counts: list[PromptCounts], numbers: list[int]) -> list[PromptCounts]:
    """Answers of one conversation are alike, so intervals are over conversations."""
    sums: dict[str, list[float]] = {}
    for number in numbers:
        total = sums.setdefault(answers[number].conversation, [0.0, 0.0])
        total[0] += counts[number].num_rounds
        total[1] += counts[number].num_emitted
    return [PromptCounts(*total) for total in sums.values()]


def decide(new: PartTable, old: PartTable, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken: there are ENOUGH new conversations, the tau of their answers rises, its whole interval
    above 0, and nothing is forgotten (`find_forgotten`).

    -> the decision, with every reason against it, or else the reason for it
    """
    change, (low, high) = new[ALL]["change"], new[ALL]["change_ci"]
    rise = f"tau of the new answers changes by {change:+.3f} ({low:+.3f} .. {high:+.3f})"
    against = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if (num := new[ALL]["conversations"]) < ENOUGH:  # whose interval says little
        against.append(f"{num} held-out conversations are too few to judge a head by: {ENOUGH} are needed.")
    against += find_forgotten(old, tolerance)
    kept = (
        f"old answers fall by no more than {tolerance:.0%}, and no category of them by more than {FEWER * tolerance:.0%}"
        if old
        else "there are no old answers, so what it forgot is not known"
    )
    return not against, against or [f"{rise}, and {kept}."]


def find_forgotten(old: PartTable, tolerance: float) -> list[str]:
    """What fell too far: tau of all old answers by more than a share `tolerance`, that of a category with ENOUGH conversations by
    more than FEWER times as much.

    A category is measured on a part of the conversations. In two adaptations of seven categories with 24 each, the standard errors of their
    changes were 0.8 to 2.1 %: if all of them fall by 1.5 %, one falls by more than 3 % for about every second head.
    """
    found = []
    for name, part in old.items():
        fall = 1 - part["after"] / part["before"]
        if name != ALL and not (name.startswith("category ") and part["conversations"] >= ENOUGH):
            continue
        most = tolerance if name == ALL else FEWER * tolerance
        if fall > most:
            found.append(
                f"tau of old answers ({name}) falls by {fall:.1%}, from {part['before']:.2f} to {part['after']:.2f}: "
                f"more than {most:.0%} (tolerance={tolerance:g}{'' if name == ALL else f', {FEWER} times that for a category'})."
            )
    return found


# Weights between the head in use and the trained one (WiSE-FT, 2109.01903): a part of what was forgotten comes back


def mix_weights(start: Tensors, trained: Tensors, share: float) -> Tensors:
    """(1 - share) * start + share * trained, in the types of `trained`. Tensors of integers are those of `trained`.

    Raises ValueError if names or shapes differ.
    """
    if {name: each.shape for name, each in start.items()} != {name: each.shape for name, each in trained.items()}:
        raise ValueError("The trained head has other tensors than the one it comes from: give shares=1.")
    return {
        name: start[name].double().lerp(new.double(), share).to(new.dtype) if new.is_floating_point() else new
        for name, new in trained.items()
    }


def describe_share(share: float, answers: str, table: PartTable, tolerance: float) -> dict[str, Any]:
    """What a share of the trained weights forgets, as JSON. answers: whose table it is; table: {} without old answers"""
    fall = 1 - table[ALL]["after"] / table[ALL]["before"] if table else None
    return {"share": share, "answers": answers, "fall": fall, "forgotten": find_forgotten(table, tolerance)}


def choose_share(
    shares: Sequence[float], judge: Callable[[float], PartTable], *, tolerance: float
) -> tuple[float, list[dict[str, Any]]]:
    """The first share by which nothing is forgotten, or else the last one, and what was tried.

    shares: of the trained weights, the largest first; judge(share) -> the table of the answers to choose by
    tolerance: as the gate's
    """
    looks: list[dict[str, Any]] = []
    for share in shares:
        looks.append(describe_share(share, "to choose by", judge(share), tolerance))
        if not looks[-1]["forgotten"]:
            break
    return looks[-1]["share"], looks


# The folder


@dataclass(frozen=True)
class Plan:
    """One adaptation from its rows on. Everything that follows is the same after an interruption.

    number: of the new head; start: the head that is trained further, such as heads/0001
    training: answers to train on, num_new new ones and then old ones; heldout: answers of all KINDS
    before: what tau of these is made of with the head in use; about: further facts, as JSON
    """

    number: str
    start: str
    training: Answers
    num_new: int
    heldout: dict[str, Answers]
    before: dict[str, list[PromptCounts]]
    about: dict


class Home:
    """The folder of an adaptation (see above). Only one process writes, which holds the lock."""

    def __init__(self, path: Path):
        self.path, self.training = path, path / "training"

    @property
    def current(self) -> Path:
        """The folder of the head in use."""
        return checkpoint.resolve(self.path)

    @property
    def first(self) -> Path:
        """The folder of the head that everything began with."""
        return self.path / "heads" / "0001"

    def begin(self, given: str) -> None:
        """Copies the head into a new folder. Raises ValueError if the folder is of another head, or `given` is none."""
        source = checkpoint.resolve(given)
        document = checkpoint.read_json(source / "drafter.json")
        files.check(source / "drafter.json", source / "drafter.safetensors")
        if (self.path / "best").exists() and self.first.is_dir():
            content = lambda folder: (folder / "drafter.safetensors").read_bytes()
            if content(source) not in (content(self.current), content(self.first)):
                raise ValueError(
                    f"out={self.path} holds adaptations of another head than checkpoint={given}: give another out=."
                )
            return
        if self.path.exists() and {path.name for path in self.path.iterdir()} - {"heads", "lock"}:
            raise ValueError(f"out={self.path} exists and holds no adaptation: choose a new folder, or delete it.")
        self._install("0001", checkpoint.read_tensors(source / "drafter.safetensors"), document)
        config = next((path for path in (source / "config.yaml", source.parent / "config.yaml") if path.exists()), None)
        if config:
            files.write_text(self.first / "config.yaml", config.read_text())
        self._use("0001")

    def history(self) -> list[dict]:
        """All adaptations so far, the oldest first."""
        return [checkpoint.read_json(path) for path in sorted((self.path / "adaptations").glob("*.json"))]

    def known(self, name: str) -> Answers:
        """Answers of earlier, accepted adaptations. name: trained or heldout"""
        paths = sorted((self.path / "rows").glob(f"*/{name}.jsonl"))
        return [answer for path in paths for answer in read_answers(path)]

    def next_number(self) -> str:
        """Of the next head: adaptations are numbered on, whatever was decided."""
        names = [path.stem for folder in ("heads", "adaptations") for path in (self.path / folder).glob("*")]
        taken = [int(name) for name in names if re.fullmatch(r"\d+", name)]  # not 0002.json.partial, which a kill left
        return f"{max(taken, default=0) + 1:04d}"

    def save_plan(self, plan: Plan, tokenizer: str) -> None:
        """Once this is written, the adaptation goes on from it."""
        partial = self.path / "training.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _make_private(partial)
        for name, answers in {"train": plan.training, **plan.heldout}.items():
            (partial / f"{name}.jsonl").write_text(to_lines(answers, tokenizer))
        counts = {kind: [[each.num_rounds, each.num_emitted] for each in plan.before[kind]] for kind in KINDS}
        document = {"number": plan.number, "start": plan.start, "num_new": plan.num_new}
        document |= {"before": counts, "about": plan.about}
        (partial / "plan.json").write_text(json.dumps(document, indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            files.sync(path)
        partial.rename(self.training)

    def read_plan(self) -> Plan | None:
        """What was under way; None if nothing was."""
        if not self.training.exists():
            return None
        document = checkpoint.read_json(self.training / "plan.json", what="An adaptation that has begun has it")
        return Plan(
            document["number"],
            document["start"],
            read_answers(self.training / "train.jsonl"),
            document["num_new"],
            {kind: read_answers(self.training / f"{kind}.jsonl") for kind in KINDS},
            {kind: [PromptCounts(*each) for each in document["before"][kind]] for kind in KINDS},
            document["about"],
        )

    def record(self, number: str, document: dict) -> Path:
        """Writes what was measured and decided, and its page. -> the page"""
        folder = self.path / "adaptations"
        folder.mkdir(exist_ok=True)
        files.write_text(folder / f"{number}.json", json.dumps(document, indent=1) + "\n")
        page = render_adaptation(self.history(), title=f"{self.path.name}, adaptation {number}")
        files.write_text(folder / f"{number}.html", page)
        files.write_text(self.path / "adaptation.html", page)
        return self.path / "adaptation.html"

    def accept(self, plan: Plan, trained: Path, tensors: Tensors, document: dict, tokenizer: str) -> None:
        """Takes a head into use: these tensors, and the other files of a checkpoint. From the last line on, everyone gets it."""
        rows = self.path / "rows" / plan.number
        _make_private(rows.parent)
        _make_private(rows)
        files.write_text(rows / "trained.jsonl", to_lines(plan.training[: plan.num_new], tokenizer))
        files.write_text(rows / "heldout.jsonl", to_lines(plan.heldout["new"], tokenizer))
        self._install(plan.number, tensors, checkpoint.read_json(trained / "drafter.json"))
        files.write_text(self.path / "heads" / plan.number / "adaptation.json", json.dumps(document, indent=1) + "\n")
        self._use(plan.number)

    def store(self, number: str, answers: Answers, tokenizer: PreTrainedTokenizerBase) -> int:
        """Makes the datastore of some answers, the newest last, and lets OUT/datastore lead to it. -> its tokens

        Whoever has the one before it open keeps it until it is replaced again.
        """
        special = data.find_special(tokenizer)
        texts: list[list[int]] = []
        for answer in answers:
            mask = [False] * len(answer.prompt) + [True] * len(answer.answer)
            row = data.Row(answer.id, answer.category, answer.prompt + answer.answer, mask)
            texts += datastore.turns(row, special)
        first, total = len(texts), 0
        while first and total + len(texts[first - 1]) <= MOST_STORED:
            first -= 1
            total += len(texts[first])
        stores = self.path / "datastores"
        _make_private(stores)
        shutil.rmtree(stores / number, ignore_errors=True)
        about = {"source": "adaptation", "keep": "answers", "limit": None}
        shown = lambda rounds: progress.track(rounds, "sorting the datastore", unit="rounds")
        datastore.build(stores / number, texts[first:], tokenizer, length=LONGEST_MATCH, about=about, progress=shown)
        link = self.path / "datastore.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("datastores") / number)
        os.replace(link, self.path / "datastore")
        for old in sorted(stores.iterdir())[:-2]:
            shutil.rmtree(old)
        return total

    def finish(self) -> None:
        """Removes what was under way."""
        if self.training.exists():
            files.remove(self.training)

    def _install(self, number: str, tensors: Tensors, document: dict) -> None:
        folder = self.path / "heads" / number
        files.write_folder(folder, tensors={"drafter.safetensors": tensors}, documents={"drafter.json": document})

    def _use(self, number: str) -> None:
        files.write_text(self.path / "best", f"heads/{number}\n")


def _make_private(folder: Path) -> None:
    """For its owner alone, as recorded traffic is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # it may be of an earlier version


def render_adaptation(history: list[dict[str, Any]], *, title: str) -> str:
    """The page of the last adaptation. history: documents as adaptation.json, the oldest first; some of earlier versions"""
    document = history[-1]
    signed = lambda pair: f"{pair[0]:+.3f} .. {pair[1]:+.3f}"
    answer = {"accepted": "yes", "refused": "no"}.get(document["decision"], "unsure")
    training = document.get("training", {})
    tiles = [
        (name.replace("_", " "), f"{training[name]:,}", "")
        for name in ("new_tokens", "old_tokens", "steps")
        if name in training
    ]
    tiles += [(f"minutes, {name}", f"{value:.1f}", "") for name, value in document["minutes"].items()]
    about = f"tau: {TAU}; by replay along the recorded answers. Intervals are 95 % bootstrap intervals over conversations; that of a change is paired."
    sections = [Section(texts=[f"Head in use: {document['in_use']}. Before: {document['start']}.", about], tiles=tiles)]
    for kind, name in SLICES.items():
        rows = []
        for part, row in document["slices"][kind].items():
            cells = [
                part,
                str(row["conversations"]),
                f"{row['tokens']:,}",
                f"{row['before']:.3f}",
                interval(row["before_ci"]),
            ]
            if "after" in row:
                cells += [
                    f"{row['after']:.3f}",
                    interval(row["after_ci"]),
                    f"{row['change']:+.3f}",
                    signed(row["change_ci"]),
                ]
            rows.append(cells)
        heads = ["part", "conversations", "tokens", "tau before", "95 %", "tau after", "95 %", "change", "95 %"]
        if rows:
            sections.append(Section(name, table=Table(heads[: len(rows[0])], rows)))
    points = [
        f"{each['share']:g} of the new weights, judged by old answers {each['answers']}: {' '.join(each['forgotten']) or 'nothing is forgotten.'}"
        for each in training.get("mixing", [])
    ]
    if points:
        sections.append(Section("How much of the new weights", points=points))
    if document["notes"]:
        sections.append(Section("To know", points=document["notes"]))
    if len(history) > 1:
        past = [
            [
                each["number"],
                each["decision"],
                *(f"{part[when]:.2f}" if when in part else "-" for when in ("before", "after")),
                " ".join(each["reasons"]),
            ]
            for each in history
            for part in [each["slices"]["new"][ALL]]
        ]
        sections.append(
            Section("All adaptations", table=Table(["number", "decision", "tau before", "tau after", "why"], past))
        )
    said = f"{document['decision'].capitalize()}: {' '.join(document['reasons'])}"
    return render_page(title, data={"history": history}, verdict=(answer, said), sections=sections)
