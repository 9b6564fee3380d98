"""The folder of an adaptation, which stands for the head in use wherever a checkpoint is asked for.

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

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec import checkpoint
from specdec.core import files
from specdec.measuring.report import TAU, PromptCounts
from train import progress
from train.adapt import ALL, Answers, Tensors, read_answers, to_lines
from train.answers import datastore
from train.data import rows as data
from train.pages.page import Section, Table, render_page, write_figure

KINDS = ("new", "old", "mix")  # held-out answers: the two that the gate looks at, and old ones to choose the mixture by
LONGEST_MATCH = 16  # tokens that the datastore is sorted by, as scripts/datastore.py
MOST_STORED = 2**22  # tokens of a datastore, the newest ones; sorting takes 40 bytes each
SLICES = {"new": "New answers, held out", "old": "Old answers, held out: what was forgotten"}


@dataclass(frozen=True)
class AdaptationPlan:
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

    def save_plan(self, plan: AdaptationPlan, tokenizer: str) -> None:
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

    def read_plan(self) -> AdaptationPlan | None:
        """What was under way; None if nothing was."""
        if not self.training.exists():
            return None
        document = checkpoint.read_json(self.training / "plan.json", what="An adaptation that has begun has it")
        return AdaptationPlan(
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

    def accept(self, plan: AdaptationPlan, trained: Path, tensors: Tensors, document: dict, tokenizer: str) -> None:
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
    heads = ["part", "conversations", "tokens", "tau before (95 %)", "tau after", "change"]
    for kind, name in SLICES.items():
        rows = [
            [
                part,
                str(row["conversations"]),
                f"{row['tokens']:,}",
                write_figure(row["before"], row["before_ci"]),
                write_figure(row.get("after"), row.get("after_ci")),
                write_figure(row.get("change"), row.get("change_ci"), digits=3, sign="+"),
            ]
            for part, row in document["slices"][kind].items()
        ]
        sections.append(Section(name, table=Table(heads, rows)))
    answers = {"the gate's": "the gate's old answers"}
    points = [
        f"{each['share']:g} of the new weights, on {answers.get(each['answers'], 'old answers to choose by')}: "
        + (" ".join(each["forgotten"]) or "nothing is forgotten.")
        for each in training.get("mixing", [])
    ]
    sections.append(Section("How much of the new weights", points=points))
    sections.append(Section("To know", points=document["notes"]))
    past = []
    for each in history:
        part = each["slices"]["new"][ALL]
        taus = [write_figure(part.get(when)) for when in ("before", "after")]
        past.append([each["number"], each["decision"], *taus, " ".join(each["reasons"])])
    heads = ["number", "decision", "tau before", "tau after", "why"]
    sections.append(Section("All adaptations", table=Table(heads, past if len(past) > 1 else [])))
    said = f"{document['decision'].capitalize()}: {' '.join(document['reasons'])}"
    return render_page(title, data={"history": history}, verdict=(answer, said), sections=sections)
