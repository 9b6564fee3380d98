"""Tests of scripts/adapt.py: a tiny head is adapted to traffic, refused, interrupted and watched."""

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import adapt as command
from scripts import export
from specdec import checkpoint
from specdec.core.lock import hold_lock
from specdec.measuring import answers as answering
from specdec.measuring import trained_prompts
from specdec.target.model import Target
from specdec.text import token_text
from specdec.tools.adapt import adapt
from tests.support.commands import ROOT, start, write_rows
from tests.support.drafters import load_head, make_drafter, save_eagle
from tests.support.runs import same_weights, train_in_process
from tests.support.targets import save_target, small_tokenizer

TINY = """
    target.dtype=float32 min_tokens=50 epochs=30 lr=3e-3 training.precision=fp32 training.threads=1 progress=quiet
    training.head.objective.losses.kl=0 training.head.objective.losses.smooth_l1=0
    training.head.objective.losses.ce=1 training.validation.num_prompts=1
""".split()
TEXT = "Hello world, hello world, hello {n}, hello world."


def interrupt(*_):
    raise KeyboardInterrupt


def make_rows(numbers, target, *, category="counting", question="Count to {n}.", text=TEXT, **fields) -> list[dict]:
    """Traffic: conversation n asks for n, at second n."""
    tokenizer, rows = small_tokenizer(), []
    for n in numbers:
        prompt, answer = (tokenizer(form.format(n=n))["input_ids"] for form in (question, text))
        row = {"id": f"{category}-{n}", "time": float(n), "conversation": f"c{n}", "category": category}
        row |= {"messages": None, "tokens": prompt + answer, "prompt_tokens": len(prompt), "temperature": 0.0}
        row |= {"tokenizer": token_text.digest_vocabulary(tokenizer), "target": str(target), "tags": ["short"]}
        rows.append(row | fields)
    return rows


@pytest.fixture(scope="module")
def adapt_folder(tmp_path_factory):
    """A tiny target with a head, old rows, and traffic of 40 conversations."""
    folder = tmp_path_factory.mktemp("adapting")
    save_eagle(folder / "head", save_target(folder / "target"))
    objective = {"losses": {"kl": 1.0, "smooth_l1": 1.0, "jsd": 0.0, "lk": 0.0}, "eta": 3.0, "depth": 2}
    config = {"head": {"objective": {"_target_": "train.objective.Objective", **objective}}}  # of an earlier version
    (folder / "head" / "config.yaml").write_text(json.dumps(config))
    (folder / "traffic").mkdir()
    write_rows(folder / "traffic" / "traffic-000001.jsonl", make_rows(range(1, 41), folder / "target"))
    old = [{"id": f"old-{n}", "prompt": f"Say {n}.", "completion": f"{n}, then {n + 1}."} for n in range(30)]
    write_rows(folder / "old.jsonl", old)
    write_rows(folder / "prompts.jsonl", [{"prompt": "Count to 3."}])
    return folder


def list_options(folder: Path, out: Path, *changes: str) -> list[str]:
    """The arguments of the command, changed by later ones."""
    options = {"checkpoint": folder / "head", "traffic": folder / "traffic", "out": out, "old": folder / "old.jsonl"}
    options |= {"training.data.heldout": folder / "prompts.jsonl"}
    options |= dict(change.split("=", 1) for change in (*TINY, *changes))
    return [f"{key}={value}" for key, value in options.items()]


@pytest.fixture
def run_adapt(adapt_folder, tmp_path, monkeypatch, run_script, blank_charts):
    """run_adapt("key=value", ...) -> what was printed; OUT is `adapted` in a new working directory"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 12)

    monkeypatch.setattr(adapt, "run_train", train_in_process)
    return lambda *changes: run_script(command, *list_options(adapt_folder, Path("adapted"), *changes))


def read_record(number: str = "0002") -> dict:
    return json.loads(Path("adapted", "adaptations", f"{number}.json").read_text())


def name_in_use() -> str:
    return checkpoint.resolve("adapted").name


def test_a_head_that_rises_is_taken_into_use_and_adapted_further(adapt_folder, run_adapt, tmp_path):
    out = run_adapt("tolerance=0.9")
    record, home = read_record(), Path("adapted")
    assert record["decision"] == "accepted" and "accepted: tau of the new answers" in out
    assert checkpoint.resolve("adapted") == home / "heads" / "0002" and (home / "heads" / "0001").is_dir()
    new, old = record["slices"]["new"], record["slices"]["old"]
    assert new["change"] > 0.2 and new["change_ci"][0] > 0
    assert new["conversations"] == 8 and old["answers"] == 12  # the first MAX_ANSWERS of 30
    assert record["training"]["new_tokens"] > record["training"]["old_tokens"] > 0
    assert json.loads((home / "heads" / "0002" / "adaptation.json").read_text()) == record
    assert not (home / "training").exists()
    digests = trained_prompts.read_digests(home / "heads" / "0002")
    assert len(digests) >= record["training"]["new_tokens"] / 100  # of its run
    heldout = (home / "rows" / "0002" / "heldout.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in heldout] == [f"counting-{n}" for n in range(33, 41)]
    with pytest.raises(ValueError, match="no rows that are newer"):
        run_adapt("tolerance=0.9")

    new_traffic = f"traffic={shutil.copytree(adapt_folder / 'traffic', tmp_path / 'more')}"
    write_rows(tmp_path / "more" / "traffic-000002.jsonl", make_rows(range(41, 61), adapt_folder / "target"))
    with pytest.raises(ValueError, match=r"length=1024 has room for 4 held-out conversations: a head is judged by 8"):
        run_adapt(new_traffic)
    with pytest.raises(ValueError, match=r"of 5,000 new tokens to train on \(min_tokens\)"):
        run_adapt(new_traffic, "min_tokens=5000")
    out = run_adapt(new_traffic, "heldout_share=0.5", "lr=1e-12", "epochs=0.1")
    later = read_record("0003")
    assert later["decision"] == "refused" and "not surely a rise" in out
    assert later["start"] == later["in_use"] == "heads/0002" and not (home / "heads" / "0003").exists()
    assert later["slices"]["new"]["conversations"] == 10  # of the rows that came since
    assert later["slices"]["old"]["conversations"] == 12  # old rows, and what was held out before


def test_a_head_that_was_made_to_forget_is_refused(adapt_folder, run_adapt, tmp_path, monkeypatch):
    """A high rate and no old rows: other answers are learned, and those that it was adapted to before are lost."""
    run_adapt("tolerance=0.9")
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 40)
    before = read_record()["slices"]["new"]
    (tmp_path / "more").mkdir()
    text = "other {n} other other {n} {n} other {n} other other"
    rows = make_rows(range(41, 91), adapt_folder / "target", category="other", question="Other {n}!", text=text)
    write_rows(tmp_path / "more" / "traffic-000001.jsonl", rows)
    out = run_adapt(f"traffic={tmp_path / 'more'}", "old_share=0", "lr=1e-2")
    record = read_record("0003")
    assert record["decision"] == "refused" and record["slices"]["new"]["change_ci"][0] > 0  # it learned
    assert re.search(r"refused: tau of old answers falls by \d+\.\d%", out) and len(record["reasons"]) == 1
    old_group = record["groups"]["old"]["category counting"]  # what the adaptation before had held out
    assert old_group["before"] == pytest.approx(before["after"]) and old_group["change_ci"][1] < 0
    assert name_in_use() == "0002" and not Path("adapted/heads/0003").exists()


def count_common(field: str, plan: adapt.AdaptationPlan) -> int:
    """The conversations or prompts that are in several of the groups of answers of a plan."""
    values = []
    for answers in (plan.training, *plan.heldout.values()):
        values += {str(getattr(answer, field)) for answer in answers}
    return len(values) - len(set(values))


def test_prompts_are_answered_first(adapt_folder, run_adapt, monkeypatch):
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 40)
    prompts = adapt_folder / "questions.jsonl"
    write_rows(prompts, [{"id": f"p{n}", "category": "ab"[n % 2], "prompt": f"Count to {n}."} for n in range(60)])
    arguments = [f"prompts={prompts}", "traffic=null", "answer.max_new_tokens=8", "answer.batch=8", "min_tokens=20"]
    written, write = [], answering.OwnDecoder.write

    def write_some(writer, jobs):
        for group in write(writer, jobs):
            yield group
            written.extend(job.id for job, _ in group)
            if len(written) > 30:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="run the same command again"):
        patch.setattr(answering.OwnDecoder, "write", write_some)
        run_adapt(*arguments)
    out = run_adapt(*arguments, "dry_run=true")
    answers = [json.loads(line) for line in Path("adapted/answers/answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in answers][: len(written)] == written and len(answers) == 120
    assert Path("adapted/answers").stat().st_mode & 0o777 == 0o700
    assert "Training is likely to" in out and "dry_run: without it the same command trains" in out
    assert not Path("adapted/training/run").exists() and "new: temperature 1" in out and "new: other category" in out
    plan = adapt.AdaptationFolder(Path("adapted")).read_plan()
    assert count_common("conversation", plan) == 0  # both answers to a prompt are on one side
    assert {answer.temperature for answer in plan.heldout["new"]} == {0.0, 1.0}
    assert "the adaptation 0002 goes on" in run_adapt(*arguments)
    assert read_record()["where"] == "prompts" and read_record()["foreseen"]["gap"] is not None
    if read_record()["decision"] == "accepted":
        with pytest.raises(ValueError, match=r"prompts=.* has no rows that are newer"):
            run_adapt(*arguments)
    with pytest.raises(ValueError, match="begun with other settings: temperature"):
        run_adapt(*arguments, "answer.decode.temperature=0")


def test_the_source_and_the_target_are_pinned(adapt_folder, run_adapt, tmp_path):
    head = shutil.copytree(adapt_folder / "head", tmp_path / "head")
    target = Target.load(str(adapt_folder / "target"), dtype="float32")
    source, option = Path("adapted/source.json"), f"checkpoint={head}"
    run_adapt(option, "dry_run=true")
    record = json.loads(source.read_text())
    assert record["target_fingerprint"] == target.fingerprint()
    digest = hashlib.sha256((head / "drafter.safetensors").read_bytes()).hexdigest()
    assert record["sha256"]["drafter.safetensors"] == digest

    def run_with(fingerprint: str) -> None:
        source.write_text(json.dumps({**record, "target_fingerprint": fingerprint}))
        Path("adapted/training/before.json").unlink(missing_ok=True)
        run_adapt(option, "dry_run=true")

    with pytest.raises(ValueError, match=r"is another target \(fingerprint .*put that one back"):
        run_with("v2." + "0" * 16)
    with pytest.warns(UserWarning, match="adapted names its target .*of an earlier version.* choose another out="):
        run_with("0" * 16)
    assert json.loads(source.read_text()) == record
    source.write_text(json.dumps(record))
    save_eagle(head, target, seed=3)
    with pytest.raises(ValueError, match=rf"another head than checkpoint={head} is now.*whose files differ"):
        run_adapt(option)


def describe(tensors: dict) -> dict:
    return {name: (value.dtype, value.shape) for name, value in tensors.items()}


@pytest.mark.parametrize(("head", "layout"), [("mtp", "vllm"), pytest.param("eagle", "eagle", marks=pytest.mark.full)])
def test_a_published_head_is_given_back_in_its_layout(adapt_folder, run_adapt, run_script, monkeypatch, head, layout):
    name, loaded = f"target.name={adapt_folder / 'target'}", Target.load(str(adapt_folder / "target"), dtype="float32")
    checkpoint.save(Path("own"), make_drafter(loaded, head).float(), load_head(head)["drafter"])
    run_script(export, "checkpoint=own", f"format={layout}", "out=published", name, "target.dtype=float32")
    arguments = ["checkpoint=published", name, "tolerance=0.9"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adapt, "export_checkpoint", interrupt)
        run_adapt(*arguments)
    assert read_record()["decision"] == "accepted" and name_in_use() == "0002"
    with pytest.raises(ValueError, match="no rows that are newer"):  # after what was left to do
        run_adapt(*arguments)
    published, exported = (Path(folder, "model.safetensors") for folder in ("published", "adapted/export/0002"))
    before, after = checkpoint.read_tensors(published), checkpoint.read_tensors(exported)
    assert describe(before) == describe(after) and any(not torch.equal(before[key], after[key]) for key in before)
    assert published.with_name("config.json").read_text() == exported.with_name("config.json").read_text()
    weights = [checkpoint.load(folder, loaded).state_dict() for folder in ("adapted", "adapted/export/0002")]
    assert same_weights(*weights)
    card, digest = exported.with_name("README.md").read_text(), hashlib.sha256(published.read_bytes()).hexdigest()
    assert card.count("## Adapted to traffic") == 1 and digest in card and "new: all" in card and "old: all" in card
    assert "## Serve it in an engine" in card


def test_what_was_interrupted_goes_on(run_adapt, monkeypatch):
    train = adapt.run_train
    monkeypatch.setattr(adapt, "run_train", lambda arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        run_adapt("tolerance=0.9")
    assert name_in_use() == "0001" and Path("adapted/training/plan.json").exists()
    with pytest.raises(ValueError, match=r"begun with other settings: epochs \(then 30.0, now 2.0\)"):
        run_adapt("tolerance=0.9", "epochs=2")
    monkeypatch.setattr(adapt, "run_train", train)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adapt.AdaptationFolder, "_set_current", interrupt)
        run_adapt("tolerance=0.9")
    assert name_in_use() == "0001"  # the new head is there, and not in use
    assert "the adaptation 0002 goes on" in run_adapt("tolerance=0.9") and name_in_use() == "0002"
    assert len(list(Path("adapted/adaptations").glob("*.json"))) == 1


@pytest.mark.full
def test_the_command_passes_a_signal_to_training_and_goes_on(adapt_folder, tmp_path):
    def launch(out):
        changes = ["epochs=600", "tolerance=0.9", "progress=plain", "training.train.log_every=1"]
        return start(["scripts/adapt.py", *list_options(adapt_folder, out, *changes)])

    with launch(tmp_path / "adapted") as child:
        next(line for line in child.stdout if line.startswith("step"))
        child.send_signal(signal.SIGINT)
        printed = child.stdout.read()
        assert child.wait(timeout=120) == 130 and "accepted" not in printed
    assert checkpoint.resolve(tmp_path / "adapted").name == "0001"
    with launch(os.path.relpath(tmp_path / "adapted", ROOT)) as child:  # the same folder
        printed = child.stdout.read()
        assert child.wait(timeout=120) == 0
    assert "goes on" in printed and "Resumed from step" in printed and "accepted" in printed
    assert checkpoint.resolve(tmp_path / "adapted").name == "0002"


def test_a_folder_is_watched(adapt_folder, run_adapt, monkeypatch, tmp_path):
    traffic, looks = tmp_path / "traffic", []
    traffic.mkdir()

    def sleep(seconds):
        looks.append(name_in_use())
        if len(looks) == 1:
            shutil.copy(adapt_folder / "traffic" / "traffic-000001.jsonl", traffic)
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(adapt, "time", SimpleNamespace(sleep=sleep))  # for this command alone, not for other threads
    out = run_adapt("watch=5", f"traffic={traffic}", "tolerance=0.9")
    assert looks == ["0001", "0002", "0002", "0002"] and out.count("there are none") == 1
    assert out.count("0 of 50 new tokens to train on") == 1 and "stopped; adapted stands for 0002" in out


def test_watching_counts_what_is_left_to_train_on(adapt_folder, run_adapt, monkeypatch):
    """As after the split: otherwise each look would begin an adaptation that ends at once."""
    rows = make_rows(range(1, 41), adapt_folder / "target")
    total = sum(len(row["tokens"]) - row["prompt_tokens"] for row in rows)
    monkeypatch.setattr(adapt, "time", SimpleNamespace(sleep=interrupt))
    assert "new tokens to train on (min_tokens)" in run_adapt("watch=5", f"min_tokens={total}")
    trained = []
    monkeypatch.setattr(adapt, "run_train", lambda arguments: trained.append(arguments) or 130)
    run_adapt("watch=5", f"min_tokens={int(0.7 * total)}")
    assert len(trained) == 1


def test_what_forgetting_is_judged_on_is_not_trained_on(run_adapt, monkeypatch):
    monkeypatch.setattr(adapt, "run_train", lambda arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        run_adapt("old_share=0.9")
    plan = adapt.AdaptationFolder(Path("adapted")).read_plan()
    assert len(plan.heldout["validation"]) == 3  # a tenth of the rest chooses the step
    assert len(plan.heldout["old"]) == 12 and plan.num_new == 29 and len(plan.training) == 29 + 30 - 12
    assert count_common("prompt", plan) == 0


# Refusals


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("traffic=nowhere is not a folder", ["traffic=nowhere"]),
        ("prompts.jsonl is not a folder", ["traffic={folder}/prompts.jsonl"]),
        ("drafter.json does not exist", ["checkpoint={folder}/traffic"]),
        ("Give traffic=FOLDER of recorded answers, or prompts=FILE", ["traffic=null"]),
        ("one of them", ["prompts={folder}/prompts.jsonl"]),
        ("answer. options say how prompts= are answered", ["answer.batch=2"]),
        ("watch= waits for traffic", ["watch=5", "dry_run=true"]),
        ("training.run= is chosen by this command", ["training.run=5"]),
        ("Give old=FILE", ["old=missing.jsonl"]),
    ],
)
def test_options_that_cannot_be_used_are_refused(adapt_folder, run_adapt, sentence, arguments):
    with pytest.raises(ValueError, match=sentence):
        run_adapt(*(argument.format(folder=adapt_folder) for argument in arguments))


@pytest.mark.parametrize(
    ("sentence", "numbers", "changes"),
    [
        ("has no row .* there are none", [], {}),
        ("1 of another target or tokenizer", [1], {"target": "targets/other"}),
        ("2 of another target or tokenizer", [1, 2], {"tokenizer": "0" * 16}),
        ("1 without token ids or a time", [1], {"tokens": None}),
        ("1 damaged", [1], {"tokens": ["a"]}),
        ("Nothing is left to train on", [1], {}),
    ],
)
def test_rows_that_cannot_be_used_are_refused(adapt_folder, run_adapt, tmp_path, sentence, numbers, changes):
    rows = [row | changes for row in make_rows(numbers, adapt_folder / "target")]
    (tmp_path / "traffic").mkdir()
    write_rows(tmp_path / "traffic" / "traffic-000001.jsonl", rows)
    with pytest.raises(ValueError, match=sentence):
        run_adapt("traffic=traffic")


def test_folders_of_others_are_refused(adapt_folder, run_adapt, tmp_path):
    for argument in (f"checkpoint={adapt_folder / 'head'}", "checkpoint=adapted"):
        with pytest.raises(ValueError, match="min_tokens"):
            run_adapt(argument, "min_tokens=5000")
    save_eagle(tmp_path / "other", Target.load(str(adapt_folder / "target"), dtype="float32"), seed=5)
    with pytest.raises(ValueError, match="adaptations of another head"):
        run_adapt(f"checkpoint={tmp_path / 'other'}")
    with (
        hold_lock(Path("adapted/lock"), resource=Path("adapted")),
        pytest.raises(ValueError, match="adapted is in use"),
    ):
        run_adapt()
    shutil.rmtree("adapted")
    for name in ("mine.txt", "best"):  # `best` as in the folder of a run
        Path("adapted").mkdir(exist_ok=True)
        Path("adapted", name).write_text("text")
        with pytest.raises(ValueError, match="holds no adaptation"):
            run_adapt()
