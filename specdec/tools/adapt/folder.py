"""The folder of an adaptation, which stands for the head in use wherever a checkpoint is asked for.

best                    name of the head in use, such as heads/0002; replaced whole: a reader sees the old or the new
heads/0001/             a copy of the given head; heads/0002/ ..: accepted ones, with adaptation.json
rows/0002/              what that head was trained on, and what was held out: trained.jsonl, heldout.jsonl
adaptations/0002.json   what was measured and decided, of refused heads too
training/               what is under way: plan.json, the rows, before.json, and the run; removed once it is decided
source.json             the given head and the target, with digests: what is adapted here
diagnosis.json          what was found and repaired in the MTP module of a whole model
answers/                the target's answers to prompts=, with their settings
export/0002/            an accepted head in the layout that the given one came in, with its card; 0001: a repaired model
lock                    while a process adapts here

rows and training hold texts of users: these folders are made for their owner alone (mode 700).
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from specdec import checkpoint
from specdec.core import files, hub
from specdec.measuring import trained_prompts
from specdec.target.fingerprint import describe_outdated, is_outdated
from specdec.target.model import Target
from specdec.tools.adapt.answers import Answers, read_answers, to_lines

KINDS = ("new", "old")  # kinds of held-out answers that decide on a head
OWN_FILES = ("drafter.json", "drafter.safetensors")
SOURCE, DIAGNOSIS = "source.json", "diagnosis.json"
SLICES = (*KINDS, "validation")  # the last ones choose the step of the training


@dataclass(frozen=True)
class AdaptationPlan:
    """One adaptation from its rows on. All later work follows from it, also after an interruption.

    number: number of the new head; start: head that is trained further, such as heads/0001
    training: answers to train on, `num_new` new ones and then old ones; heldout: answers of all SLICES
    facts: further facts, as JSON
    """

    number: str
    start: str
    training: Answers
    num_new: int
    heldout: dict[str, Answers]
    facts: dict

    @property
    def new_training(self) -> Answers:
        """The new answers to train on."""
        return self.training[: self.num_new]


class AdaptationFolder:
    """The folder of an adaptation (see above). Only one process writes, which holds the lock."""

    def __init__(self, path: Path):
        self.path, self.training, self.first_head = path, path / "training", path / "heads" / "0001"

    @property
    def current(self) -> Path:
        """The folder of the head in use."""
        return checkpoint.resolve(self.path)

    def install_given_head(self, option: str, load_target: Callable[[], Target]) -> None:
        """Copies the head of checkpoint= into a new folder, and records its origin.

        A head in a published layout becomes a checkpoint of this project. load_target: called for such a head
        Raises ValueError for a folder of another head, a head that has changed since, and for one that does not exist.
        """
        source = checkpoint.resolve(option)
        is_checkpoint = (source / "drafter.json").exists()
        if is_checkpoint:
            files.check_files(*(source / name for name in OWN_FILES))
        if (self.path / "best").exists() and self.first_head.is_dir():
            if not source.absolute().is_relative_to(self.path.absolute()):
                self._check_source(option, source)
            return
        self.check_new()
        source_record: dict = {"checkpoint": option, "source": hub.pin_commit(source)}
        if is_checkpoint:
            source_record["sha256"] = digest_files(source, OWN_FILES)
            self._install_head("0001", source)
            configs = [path for path in (source / "config.yaml", source.parent / "config.yaml") if path.exists()]
            if configs:
                files.write_text(self.first_head / "config.yaml", configs[0].read_text())
        else:
            target = load_target()
            drafter, spec = checkpoint.load_for_training(source, target, {})
            source_record |= {"sha256": spec["published"]["sha256"], **_describe_target(target)}
            checkpoint.save(self.first_head, drafter, spec)
        self._write_source(source_record)
        self._set_current("0001")

    def check_new(self) -> None:
        """Raises ValueError if the folder has other files than those of an adaptation that has just begun."""
        begun = {"heads", "lock", "answers", "export", SOURCE, DIAGNOSIS}
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if {name for name in names if not name.endswith(".partial")} - begun:
            raise ValueError(f"out={self.path} exists and holds no adaptation: choose a new folder, or delete it.")

    def _check_source(self, option: str, source: Path) -> None:
        """Raises ValueError if the given head is not the one that was adapted here."""
        source_record = self.source_record
        if digest_files(source, source_record["sha256"]) != source_record["sha256"]:
            raise ValueError(
                f"out={self.path} holds adaptations of another head than checkpoint={option} is now: it was begun with "
                f"{source_record['source']}, whose files differ. Give that revision or copy, choose another out=, or "
                f"delete {self.path}."
            )

    @property
    def source_record(self) -> dict:
        """The head that is adapted here: checkpoint=, source, sha256 by file, and once it was loaded the target."""
        return checkpoint.read_json(self.path / SOURCE)

    def _write_source(self, source_record: dict) -> None:
        files.write_text(self.path / SOURCE, json.dumps(source_record, indent=1) + "\n")

    def pin_target(self, target: Target) -> None:
        """Records the target. Raises ValueError if its weights are not those with which the adaptations here began."""
        source_record, target_record = self.source_record, _describe_target(target)
        recorded_fingerprint = source_record.get("target_fingerprint", target_record["target_fingerprint"])
        if is_outdated(recorded_fingerprint):
            clause = describe_outdated(f"{self.path} names its target {source_record['target']}", target.name)
            warnings.warn(f"{clause}: if it is another, choose another out=.", stacklevel=2)
        elif not target.matches(recorded_fingerprint):
            raise ValueError(
                f"{target.name} is another target (fingerprint {target_record['target_fingerprint']}) "
                "than the one with "
                f"which {self.path} was begun ({source_record['target']}, {recorded_fingerprint}): "
                "put that one back, or "
                "choose another out=."
            )
        self._write_source(source_record | target_record)

    def make_private(self, name: str) -> Path:
        """Makes a folder inside for its owner alone, as recorded traffic is. Returns it."""
        folder = self.path / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def read_history(self) -> list[dict]:
        """The records of all adaptations so far, the oldest first."""
        return [checkpoint.read_json(path) for path in sorted((self.path / "adaptations").glob("*.json"))]

    def read_earlier_answers(self, name: str) -> Answers:
        """The answers of earlier, accepted adaptations. name: trained or heldout"""
        paths = sorted((self.path / "rows").glob(f"*/{name}.jsonl"))
        return [answer for path in paths for answer in read_answers(path)]

    def next_number(self) -> str:
        """The number of the next head. Refused adaptations count, too."""
        names = [path.stem for folder in ("heads", "adaptations") for path in (self.path / folder).glob("*")]
        numbers = [int(name) for name in names if re.fullmatch(r"\d+", name)]  # a kill may leave 0002.json.partial
        return f"{max(numbers, default=0) + 1:04d}"

    def save_plan(self, plan: AdaptationPlan, tokenizer: str) -> None:
        """Writes the plan as a whole. Later launches of the command go on from it."""
        shutil.rmtree(self.path / "training.partial", ignore_errors=True)
        partial = self.make_private("training.partial")
        for name, answers in {"train": plan.training, **plan.heldout}.items():
            (partial / f"{name}.jsonl").write_text(to_lines(answers, tokenizer))
        document = {"number": plan.number, "start": plan.start, "num_new": plan.num_new, "about": plan.facts}
        (partial / "plan.json").write_text(json.dumps(document, indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            files.sync_path(path)
        partial.rename(self.training)

    def read_plan(self) -> AdaptationPlan | None:
        """The plan of an adaptation that is under way; None if there is none."""
        if not self.training.exists():
            return None
        document = checkpoint.read_json(self.training / "plan.json", advice="An adaptation that has begun has it")
        return AdaptationPlan(
            document["number"],
            document["start"],
            read_answers(self.training / "train.jsonl"),
            document["num_new"],
            {kind: read_answers(self.training / f"{kind}.jsonl") for kind in SLICES},
            document["about"],
        )

    def record_decision(self, plan: AdaptationPlan, trained: Path, document: dict, tokenizer: str) -> None:
        """Records the decision, takes an accepted head into use, and removes the files of the training.

        document: figures and decision; tokenizer: fingerprint as of token_text.digest_vocabulary
        """
        (self.path / "adaptations").mkdir(exist_ok=True)
        text = json.dumps(document, indent=1) + "\n"
        files.write_text(self.path / "adaptations" / f"{plan.number}.json", text)
        if document["decision"] == "accepted":
            self.make_private("rows")
            rows = self.make_private(f"rows/{plan.number}")
            files.write_text(rows / "trained.jsonl", to_lines(plan.new_training, tokenizer))
            files.write_text(rows / "heldout.jsonl", to_lines(plan.heldout["new"], tokenizer))
            self._install_head(plan.number, trained)
            files.write_text(self.path / "heads" / plan.number / "adaptation.json", text)
            self._set_current(plan.number)  # from here on, all readers get it
        files.remove_folder(self.training)

    def read_measured(self) -> dict | None:
        """The measurement of the head in use for the adaptation that is under way; None if there is none yet."""
        path = self.training / "before.json"
        return checkpoint.read_json(path) if path.exists() else None

    def write_measured(self, document: dict) -> None:
        files.write_text(self.training / "before.json", json.dumps(document) + "\n")

    def _install_head(self, number: str, source: Path) -> None:
        tensors = {"drafter.safetensors": checkpoint.read_tensors(source / "drafter.safetensors")}
        documents = {"drafter.json": checkpoint.read_json(source / "drafter.json")}
        prompts = trained_prompts.find_file(source)
        if prompts is not None:
            tensors[trained_prompts.FILE] = checkpoint.read_tensors(prompts)
        files.write_folder(self.path / "heads" / number, tensors=tensors, documents=documents)

    @property
    def diagnosis_record(self) -> dict | None:
        """What was found and repaired in a model's MTP module; None: nothing was looked for."""
        path = self.path / DIAGNOSIS
        return checkpoint.read_json(path) if path.exists() else None

    @property
    def was_begun_undiagnosed(self) -> bool:
        """Whether an adaptation is here that looked for no damage, as those of earlier versions."""
        return self.diagnosis_record is None and (self.path / "best").exists()

    @property
    def repaired_model(self) -> Path | None:
        """The folder of the model with a repaired module; None: it needed no repair."""
        record = self.diagnosis_record
        return self.path / "export" / "0001" if record and record["changes"] else None

    def record_diagnosis(self, record: dict) -> None:
        files.write_text(self.path / DIAGNOSIS, json.dumps(record, indent=1) + "\n")

    def record_result(self, diagnosis: dict) -> None:
        """Adds the diagnosis after an adaptation to its records, in the folder and beside an accepted head."""
        document = self.read_history()[-1]
        document["diagnosis"]["after"] = diagnosis
        text = json.dumps(document, indent=1) + "\n"
        files.write_text(self.path / "adaptations" / f"{document['number']}.json", text)
        if document["decision"] == "accepted":
            files.write_text(self.path / document["in_use"] / "adaptation.json", text)

    def _set_current(self, number: str) -> None:
        files.write_text(self.path / "best", f"heads/{number}\n")


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files by name; empty for a file that does not exist."""
    paths = {name: folder / name for name in names}
    return {name: files.hash_file(path) if path.is_file() else "" for name, path in paths.items()}


def _describe_target(target: Target) -> dict:
    return {"target": target.name, "target_fingerprint": target.fingerprint()}
