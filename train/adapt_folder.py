"""The folder of an adaptation, which stands for the head in use wherever a checkpoint is asked for.

best                    name of the head in use, such as heads/0002; replaced whole: a reader sees the old or the new
heads/0001/             a copy of the given head; heads/0002/ ..: accepted ones, with adaptation.json
rows/0002/              what that head was trained on, and what was held out: trained.jsonl, heldout.jsonl
adaptations/0002.json   what was measured and decided, of refused heads too
adaptation.html         the same of all adaptations, as a page
training/               what is under way: plan.json, the rows, and the run; removed once it is decided
lock                    while a process adapts here

rows and training hold texts of users: these folders are made for their owner alone (mode 700).
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.core import files
from specdec.measuring.report import TAU
from train.adapt import Answers, read_answers, to_lines
from train.pages.page import Section, Table, render_page, write_figure

KINDS = ("new", "old")  # held-out answers that the gate looks at


@dataclass(frozen=True)
class AdaptationPlan:
    """One adaptation from its rows on. Everything that follows is the same after an interruption.

    number: of the new head; start: the head that is trained further, such as heads/0001
    training: answers to train on, num_new new ones and then old ones; heldout: answers of all KINDS
    about: further facts, as JSON
    """

    number: str
    start: str
    training: Answers
    num_new: int
    heldout: dict[str, Answers]
    about: dict


class Home:
    """The folder of an adaptation (see above). Only one process writes, which holds the lock."""

    def __init__(self, path: Path):
        self.path, self.training, self.first = path, path / "training", path / "heads" / "0001"

    @property
    def current(self) -> Path:
        """The folder of the head in use."""
        return checkpoint.resolve(self.path)

    def begin(self, given: str) -> None:
        """Copies the head into a new folder. Raises ValueError if the folder is of another head, or `given` is none."""
        source = checkpoint.resolve(given)
        checkpoint.read_json(source / "drafter.json")  # which says what is wrong
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
        self._install("0001", source)
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
        document = {"number": plan.number, "start": plan.start, "num_new": plan.num_new, "about": plan.about}
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
            document["about"],
        )

    def record(self, number: str, document: dict) -> Path:
        """Writes what was measured and decided, and the page of all adaptations. -> the page"""
        folder = self.path / "adaptations"
        folder.mkdir(exist_ok=True)
        files.write_text(folder / f"{number}.json", json.dumps(document, indent=1) + "\n")
        page = self.path / "adaptation.html"
        files.write_text(page, render_adaptations(self.history(), title=self.path.name))
        return page

    def accept(self, plan: AdaptationPlan, trained: Path, document: dict, tokenizer: str) -> None:
        """Takes the trained head into use. From the last line on, everyone gets it."""
        rows = self.path / "rows" / plan.number
        _make_private(rows.parent)
        _make_private(rows)
        files.write_text(rows / "trained.jsonl", to_lines(plan.training[: plan.num_new], tokenizer))
        files.write_text(rows / "heldout.jsonl", to_lines(plan.heldout["new"], tokenizer))
        self._install(plan.number, trained)
        files.write_text(self.path / "heads" / plan.number / "adaptation.json", json.dumps(document, indent=1) + "\n")
        self._use(plan.number)

    def finish(self) -> None:
        """Removes what was under way."""
        if self.training.exists():
            files.remove(self.training)

    def _install(self, number: str, source: Path) -> None:
        tensors = {"drafter.safetensors": checkpoint.read_tensors(source / "drafter.safetensors")}
        documents = {"drafter.json": checkpoint.read_json(source / "drafter.json")}
        files.write_folder(self.path / "heads" / number, tensors=tensors, documents=documents)

    def _use(self, number: str) -> None:
        files.write_text(self.path / "best", f"heads/{number}\n")


def _make_private(folder: Path) -> None:
    """For its owner alone, as recorded traffic is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # it may be of an earlier version


def render_adaptations(history: list[dict[str, Any]], *, title: str) -> str:
    """history: documents as adaptation.json, the oldest first; some of earlier versions"""
    heads = ["number", "decision", "answers", "conversations", "tau before (95 %)", "tau after", "change", "why"]
    rows = []
    for each in reversed(history):
        for kind in KINDS:
            if not (part := each["slices"][kind]) or not (part := part.get("all", part)):
                continue
            figures = [
                write_figure(part["before"], part["before_ci"]),
                write_figure(part["after"], part["after_ci"]),
                write_figure(part["change"], part["change_ci"], digits=3, sign="+"),
            ]
            why = " ".join(each["reasons"])
            rows.append([each["number"], each["decision"], kind, str(part["conversations"]), *figures, why])
    last = history[-1]
    about = f"tau: {TAU}; by replay along held-out recorded answers. Intervals are over conversations; that of a change is paired."
    texts = [f"Head in use: {last['in_use']}.", about]
    section = Section(texts=texts, table=Table(heads, rows), points=last["notes"])
    verdict = {"accepted": "yes", "refused": "no"}.get(last["decision"], "unsure"), " ".join(last["reasons"])
    return render_page(title, data={"history": history}, verdict=verdict, sections=[section])
