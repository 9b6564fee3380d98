"""Tests of scripts/adapt.py: a tiny head is adapted to traffic, refused, interrupted and watched."""

from specdec.options.command_line import read_command

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir

from scripts import adapt as command
from scripts import export
from specdec import checkpoint
from specdec.core.lock import hold_lock
from specdec.measuring import answers as answering
from specdec.measuring import trained_prompts
from specdec.target.model import Target
from specdec.text import token_text
from specdec.tools.adapt import adapt
from specdec.tools.adapt.answers import RecordedAnswer
from tests.support import (
    ROOT,
    child_environment,
    load_head,
    make_drafter,
    same_weights,
    save_eagle,
    save_target,
    small_tokenizer,
    train_command,
    write_rows,
)
from train.settings.hydra_text import make_search_path, quote_arguments


def interrupt(*_):
    raise KeyboardInterrupt


TINY = [
    "target.dtype=float32", "min_tokens=50", "epochs=30", "lr=3e-3", "training.precision=fp32", "training.threads=1", "training.head.objective.losses.kl=0", "training.head.objective.losses.smooth_l1=0",
    "training.head.objective.losses.ce=1", "training.validation.num_prompts=1", "progress=quiet",
]  # fmt: skip


SAY, TEXT = "Count to {n}.", "Hello world, hello world, hello {n}, hello world."


def rows_of(
    numbers, *, target: str, category: str = "counting", say: str = SAY, text: str = TEXT, **fields
) -> list[dict]:
    """Traffic: conversation n asks for n, at second n."""
    tokenizer = small_tokenizer()
    rows = []
    for n in numbers:
        prompt = tokenizer(say.format(n=n))["input_ids"]
        answer = tokenizer(text.format(n=n))["input_ids"]
        rows.append({
            "id": f"{category}-{n}", "time": float(n), "conversation": f"c{n}", "category": category, "tags": ["short"],
            "messages": None, "tokens": prompt + answer, "prompt_tokens": len(prompt), "temperature": 0.0,
            "tokenizer": token_text.digest_vocabulary(tokenizer), "target": target, **fields,
        })  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def adapt_folder(tmp_path_factory):
    """A tiny target with a head, old rows, and traffic of 40 conversations."""
    folder = tmp_path_factory.mktemp("adapting")
    save_eagle(folder / "head", save_target(folder / "target"))
    (folder / "traffic").mkdir()
    write_rows(folder / "traffic" / "traffic-000001.jsonl", rows_of(range(1, 41), target=str(folder / "target")))
    messages = lambda n: [
        {"role": "user", "content": f"Say {n}."},
        {"role": "assistant", "content": f"{n} is followed by {n + 1}."},
    ]
    write_rows(folder / "old.jsonl", [{"id": f"old-{n}", "messages": messages(n)} for n in range(30)])
    write_rows(folder / "prompts.jsonl", [{"prompt": "Count to 3."}])
    return folder


@pytest.fixture
def run_adapt(adapt_folder, tmp_path, monkeypatch, run_script):
    """run_adapt("key=value", ...) -> what was printed; OUT is `adapted` in a new working directory"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 12)

    def train(arguments: list[str]) -> int:
        arguments = [argument for argument in arguments if not argument.startswith("hydra.")]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("train", overrides=[*quote_arguments(arguments), "progress=quiet", make_search_path()])
        Path(config.run).mkdir(parents=True, exist_ok=True)
        return train_command().fit(config)

    monkeypatch.setattr(adapt, "run_train", train)

    def run(*changes: str) -> str:
        options = {
            "checkpoint": adapt_folder / "head",
            "traffic": adapt_folder / "traffic",
            "out": "adapted",
            "old": adapt_folder / "old.jsonl",
        }
        options |= {"training.data.heldout": adapt_folder / "prompts.jsonl"}
        options |= dict(each.split("=", 1) for each in (*TINY, *changes))
        return run_script(command, *(f"{key}={value}" for key, value in options.items()))

    return run


def document(number: str = "0002") -> dict:
    return json.loads(Path("adapted", "adaptations", f"{number}.json").read_text())


def test_a_head_that_rises_is_taken_into_use(adapt_folder, run_adapt, tmp_path):
    out = run_adapt("tolerance=0.9")
    record, home = document(), Path("adapted")
    assert record["decision"] == "accepted" and "accepted: tau of the new answers" in out
    assert checkpoint.resolve("adapted") == home / "heads" / "0002" and (home / "heads" / "0001").is_dir()
    new, old = record["slices"]["new"], record["slices"]["old"]
    assert new["change"] > 0.2 and new["change_ci"][0] > 0
    assert new["conversations"] == 8 and old["answers"] == 12  # the first JUDGED of 30
    assert record["training"]["new_tokens"] > record["training"]["old_tokens"] > 0
    assert json.loads((home / "heads" / "0002" / "adaptation.json").read_text()) == record
    assert not (home / "training").exists()
    assert (
        len(trained_prompts.read_digests(home / "heads" / "0002")) >= record["training"]["new_tokens"] / 100
    )  # of its run
    heldout = [json.loads(line)["id"] for line in (home / "rows" / "0002" / "heldout.jsonl").read_text().splitlines()]
    assert heldout == [f"counting-{n}" for n in range(33, 41)]
    with pytest.raises(ValueError, match="no rows that are newer"):
        run_adapt("tolerance=0.9")
    new_traffic = tmp_path / "more"
    shutil.copytree(adapt_folder / "traffic", new_traffic)
    write_rows(new_traffic / "traffic-000002.jsonl", rows_of(range(41, 61), target=str(adapt_folder / "target")))
    with pytest.raises(
        ValueError, match=r"4 held-out conversations fit into length=1024: a head is judged by 8 or more"
    ):
        run_adapt(f"traffic={new_traffic}")
    with pytest.raises(ValueError, match=r"of 5,000 new tokens to train on \(min_tokens\)"):
        run_adapt(f"traffic={new_traffic}", "min_tokens=5000")
    run_adapt(f"traffic={new_traffic}", "heldout_share=0.5", "lr=1e-12", "epochs=0.1")
    later = document("0003")
    assert later["start"] == later["in_use"] == "heads/0002"
    assert later["slices"]["new"]["conversations"] == 10  # of the rows that came since
    heldout_ids = {
        json.loads(line)["id"] for line in (home / "rows" / "0002" / "heldout.jsonl").read_text().splitlines()
    }
    assert later["slices"]["old"]["conversations"] == 12 and heldout_ids  # old rows, and what was held out before


def test_a_head_that_does_not_rise_is_refused(run_adapt):
    out = run_adapt("lr=1e-12", "epochs=0.1")
    assert document()["decision"] == "refused" and "not surely a rise" in out
    assert checkpoint.resolve("adapted") == Path("adapted/heads/0001") and not Path("adapted/heads/0002").exists()


def test_a_head_that_was_made_to_forget_is_refused(adapt_folder, run_adapt, tmp_path, monkeypatch):
    """A high rate and no old rows: other answers are learned, and those that the head was adapted to before are lost."""
    run_adapt("tolerance=0.9")
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 40)
    before, new_traffic = document()["slices"]["new"], tmp_path / "more"
    text = "other {n} other other {n} {n} other {n} other other"
    new_traffic.mkdir()
    rows = rows_of(range(41, 91), target=str(adapt_folder / "target"), category="other", say="Other {n}!", text=text)
    write_rows(new_traffic / "traffic-000001.jsonl", rows)
    out = run_adapt(f"traffic={new_traffic}", "old_share=0", "lr=1e-2")
    record = document("0003")
    assert record["decision"] == "refused" and record["slices"]["new"]["change_ci"][0] > 0  # it learned
    assert re.search(r"refused: tau of old answers falls by \d+\.\d%", out) and len(record["reasons"]) == 1
    old_group = record["groups"]["old"]["category counting"]  # what the adaptation before had held out
    assert old_group["before"] == pytest.approx(before["after"]) and old_group["change_ci"][1] < 0
    assert checkpoint.resolve("adapted").name == "0002" and not Path("adapted/heads/0003").exists()


def test_prompts_are_answered_first(adapt_folder, run_adapt, monkeypatch):
    monkeypatch.setattr("specdec.tools.adapt.judging.MAX_ANSWERS", 40)
    prompts = adapt_folder / "questions.jsonl"
    write_rows(prompts, [{"id": f"p{n}", "category": "ab"[n % 2], "prompt": f"Count to {n}."} for n in range(60)])
    arguments = [f"prompts={prompts}", "traffic=null", "answer.max_new_tokens=8", "answer.batch=8", "min_tokens=20"]
    written = []

    def interrupted(writer, jobs):
        for group in write(writer, jobs):
            yield group
            written.extend(job.id for job, _ in group)
            if len(written) > 30:
                raise KeyboardInterrupt

    write = answering.OwnDecoder.write
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="run the same command again"):
        patch.setattr(answering.OwnDecoder, "write", interrupted)
        run_adapt(*arguments)
    out = run_adapt(*arguments, "dry_run=true")
    answers = [json.loads(line) for line in Path("adapted/answers/answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in answers][: len(written)] == written and len(answers) == 120
    assert Path("adapted/answers").stat().st_mode & 0o777 == 0o700
    assert "Training is likely to" in out and "dry_run: without it the same command trains" in out
    assert not Path("adapted/training/run").exists() and "new: temperature 1" in out and "new: other category" in out
    plan = adapt.AdaptationFolder(Path("adapted")).read_plan()
    kinds = [{answer.conversation for answer in each} for each in (plan.training, *plan.heldout.values())]
    assert sum(map(len, kinds)) == len(set().union(*kinds))  # both answers to a prompt are on one side
    assert {answer.temperature for answer in plan.heldout["new"]} == {0.0, 1.0}
    assert "the adaptation 0002 goes on" in run_adapt(*arguments)
    assert document()["where"] == "prompts" and document()["foreseen"]["gap"] is not None
    if document()["decision"] == "accepted":
        with pytest.raises(ValueError, match=r"prompts=.* has no rows that are newer"):
            run_adapt(*arguments)
    with pytest.raises(ValueError, match="begun with other settings: temperature"):
        run_adapt(*arguments, "answer.decode.temperature=0")


def test_the_source_and_the_target_are_pinned(adapt_folder, run_adapt, tmp_path):
    shutil.copytree(adapt_folder / "head", tmp_path / "head")
    checkpoint_option = f"checkpoint={tmp_path / 'head'}"
    run_adapt(checkpoint_option, "dry_run=true")
    source_record = json.loads(Path("adapted/source.json").read_text())
    assert (
        source_record["target_fingerprint"] == Target.load(str(adapt_folder / "target"), dtype="float32").fingerprint()
    )
    content = (tmp_path / "head" / "drafter.safetensors").read_bytes()
    assert source_record["sha256"]["drafter.safetensors"] == hashlib.sha256(content).hexdigest()
    before = Path("adapted/training/before.json")
    old = Target.load(
        str(adapt_folder / "target"), dtype="float32"
    ).identity.old_text  # as an earlier version pinned it
    Path("adapted/source.json").write_text(json.dumps({**source_record, "target_fingerprint": old}))
    before.unlink()
    run_adapt(checkpoint_option, "dry_run=true")
    assert json.loads(Path("adapted/source.json").read_text()) == source_record
    Path("adapted/source.json").write_text(json.dumps({**source_record, "target_fingerprint": "0" * 16}))
    before.unlink()
    with pytest.raises(ValueError, match=r"is another target \(fingerprint .*put that one back"):
        run_adapt(checkpoint_option)
    Path("adapted/source.json").write_text(json.dumps(source_record))
    save_eagle(tmp_path / "head", Target.load(str(adapt_folder / "target"), dtype="float32"), seed=3)
    with pytest.raises(
        ValueError, match=rf"another head than checkpoint={tmp_path / 'head'} is now.*whose files differ"
    ):
        run_adapt(checkpoint_option)


@pytest.mark.parametrize(("head", "layout"), [("mtp", "vllm"), pytest.param("eagle", "eagle", marks=pytest.mark.full)])
def test_a_published_head_is_given_back_in_its_layout(adapt_folder, run_adapt, run_script, monkeypatch, head, layout):
    target, spec = f"target.name={adapt_folder / 'target'}", load_head(head)["drafter"]
    drafter = make_drafter(Target.load(str(adapt_folder / "target"), dtype="float32"), head).float()
    checkpoint.save(Path("own"), drafter, spec)
    run_script(export, "checkpoint=own", f"format={layout}", "out=published", target, "target.dtype=float32")
    arguments = ["checkpoint=published", target, "tolerance=0.9"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adapt, "export_checkpoint", interrupt)
        run_adapt(*arguments)
    assert document()["decision"] == "accepted" and checkpoint.resolve("adapted").name == "0002"
    with pytest.raises(ValueError, match="no rows that are newer"):  # after what was left to do
        run_adapt(*arguments)
    files = [Path(folder, "model.safetensors") for folder in ("published", "adapted/export/0002")]
    before, after = map(checkpoint.read_tensors, files)
    shapes = lambda tensors: {name: (value.dtype, value.shape) for name, value in tensors.items()}
    assert shapes(before) == shapes(after) and any(not torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads(file.with_name("config.json").read_text()) for file in files]
    assert configs[0] == configs[1]
    loaded = Target.load(str(adapt_folder / "target"), dtype="float32")
    given_weights, exported_weights = (
        checkpoint.load(folder, loaded).state_dict() for folder in ("adapted", "adapted/export/0002")
    )
    assert same_weights(given_weights, exported_weights)
    card = Path("adapted/export/0002/README.md").read_text()
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert card.count("## Adapted to traffic") == 1 and digest in card and "new: all" in card and "old: all" in card
    assert "## Serve it in an engine" in card
    tensors = {name: value + 1 for name, value in before.items()}
    safetensors.torch.save_file(tensors, files[0])  # as somebody replaces a repository
    with pytest.raises(
        ValueError, match="checkpoint=published is now: it was begun with published, whose files differ"
    ):
        run_adapt(*arguments)


def test_what_was_interrupted_goes_on(run_adapt, monkeypatch):
    train = adapt.run_train
    monkeypatch.setattr(adapt, "run_train", lambda arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        run_adapt("tolerance=0.9")
    assert checkpoint.resolve("adapted").name == "0001" and Path("adapted/training/plan.json").exists()
    with pytest.raises(ValueError, match=r"begun with other settings: epochs \(then 30.0, now 2.0\)"):
        run_adapt("tolerance=0.9", "epochs=2")
    monkeypatch.setattr(adapt, "run_train", train)

    def killed(home, number):
        raise RuntimeError("kill -9")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(adapt.AdaptationFolder, "_set_current", killed)
        run_adapt("tolerance=0.9")
    assert checkpoint.resolve("adapted").name == "0001"  # the new head is there, and not in use
    out = run_adapt("tolerance=0.9")
    assert "the adaptation 0002 goes on" in out and checkpoint.resolve("adapted").name == "0002"
    assert len(list(Path("adapted/adaptations").glob("*.json"))) == 1


@pytest.mark.full
def test_the_command_passes_a_signal_to_training_and_goes_on(adapt_folder, tmp_path):
    options = {
        "checkpoint": adapt_folder / "head",
        "traffic": adapt_folder / "traffic",
        "out": tmp_path / "adapted",
        "old": adapt_folder / "old.jsonl",
    }
    options |= dict(each.split("=", 1) for each in (*TINY, "epochs=60", "tolerance=0.9", "progress=plain"))
    options |= {"training.data.heldout": adapt_folder / "prompts.jsonl", "training.train.log_every": 1}

    def started() -> subprocess.Popen:
        command = [sys.executable, "scripts/adapt.py", *(f"{key}={value}" for key, value in options.items())]
        return subprocess.Popen(command, cwd=ROOT, env=child_environment(), stdout=subprocess.PIPE, text=True)

    with started() as child:
        next(line for line in child.stdout if line.startswith("step"))
        child.send_signal(signal.SIGINT)
        printed = child.stdout.read()
        assert child.wait(timeout=120) == 130 and "accepted" not in printed
    assert checkpoint.resolve(tmp_path / "adapted").name == "0001"
    options["out"] = os.path.relpath(tmp_path / "adapted", ROOT)  # the same folder
    with started() as child:
        printed = child.stdout.read()
        assert child.wait(timeout=120) == 0
    assert "goes on" in printed and "Resumed from step" in printed and "accepted" in printed
    assert checkpoint.resolve(tmp_path / "adapted").name == "0002"


def test_a_folder_is_watched(adapt_folder, run_adapt, monkeypatch, tmp_path):
    traffic = tmp_path / "traffic"
    traffic.mkdir()
    looks = []

    def sleep(seconds):
        looks.append(checkpoint.resolve("adapted").name)
        if len(looks) == 1:
            shutil.copy(adapt_folder / "traffic" / "traffic-000001.jsonl", traffic)
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(adapt, "time", SimpleNamespace(sleep=sleep))  # for this command alone, not for other threads
    out = run_adapt("watch=5", f"traffic={traffic}", "tolerance=0.9")
    assert looks == ["0001", "0002", "0002", "0002"]
    assert (
        out.count("0 of 50 new tokens to train on") == 1
        and out.count("there are none") == 1
        and "stopped; adapted stands for 0002" in out
    )


def test_packs_hold_the_longest_row_and_steps_read_all_rows(tmp_path):
    def size(lengths, *arguments):
        row = lambda num: {"tokens": [1] * num, "prompt_tokens": 3}
        answers = [RecordedAnswer.from_row(row(num), default_id="a") for num in lengths]
        required = ["checkpoint=a", "traffic=b", f"out={tmp_path}/c"]
        options = read_command("adapt", adapt.AdaptOptions, None, [*required, *arguments])
        return adapt.size_training(options, adapt.AdaptationPlan("", "", answers, 0, {}, {}))

    assert [size([10, longest])[0] for longest in (20, 512, 513, 700, 2000)] == [512, 512, 640, 768, 1024]
    assert size([700], "length=300")[0] == 512  # as train.py has it
    assert size([512, 256, 2000], "epochs=2", "length=512")[1] == 2 * 2.5
    assert size([512] * 8, "epochs=2", "training.train.batch=2", "training.train.accumulation=2")[1] == 4


def test_watching_counts_what_is_left_to_train_on(adapt_folder, run_adapt, monkeypatch):
    """As after the split: otherwise each look would begin an adaptation that ends at once."""
    total = sum(
        len(row["tokens"]) - row["prompt_tokens"] for row in rows_of(range(1, 41), target=str(adapt_folder / "target"))
    )

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapt, "time", SimpleNamespace(sleep=stop))
    assert "new tokens to train on (min_tokens)" in run_adapt("watch=5", f"min_tokens={total}")
    trained = []
    monkeypatch.setattr(adapt, "run_train", lambda arguments: trained.append(arguments) or 130)
    run_adapt("watch=5", f"min_tokens={int(0.7 * total)}")
    assert len(trained) == 1


def test_what_forgetting_is_judged_on_is_not_trained_on(adapt_folder, run_adapt, monkeypatch):
    monkeypatch.setattr(adapt, "run_train", lambda arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        run_adapt("old_share=0.9")
    plan = adapt.AdaptationFolder(Path("adapted")).read_plan()
    prompts = {tuple(answer.prompt) for answer in plan.training}
    assert len(plan.heldout["validation"]) == 3  # a tenth of the rest chooses the step
    assert len(plan.heldout["old"]) == 12 and plan.num_new == 29 and len(plan.training) == 29 + 30 - 12
    kinds = [{tuple(answer.prompt) for answer in each} for each in plan.heldout.values()]
    assert sum(map(len, [prompts, *kinds])) == len(prompts.union(*kinds))  # no prompt is in two of them


def test_what_cannot_be_adapted_to_is_refused(adapt_folder, run_adapt, tmp_path):
    target = str(adapt_folder / "target")
    folder = tmp_path / "bad"
    folder.mkdir()

    def refuse(message: str, *arguments: str, rows: list[dict] | None = None) -> None:
        shutil.rmtree("adapted", ignore_errors=True)
        if rows is not None:
            write_rows(folder / "traffic-000001.jsonl", rows)
            arguments = (*arguments, f"traffic={folder}")
        with pytest.raises(ValueError, match=message):
            run_adapt(*arguments)

    refuse("traffic=nowhere is not a folder", "traffic=nowhere")
    refuse("has no row .* there are none", rows=[])
    refuse("1 of another target or tokenizer", rows=rows_of([1], target="targets/other"))
    refuse("2 of another target or tokenizer", rows=rows_of([1, 2], target=target, tokenizer="0" * 16))
    refuse("1 without token ids or a time", rows=rows_of([1], target=target, tokens=None))
    refuse("1 damaged", rows=rows_of([1], target=target, tokens=["a"]))
    refuse("leave nothing to train on", rows=rows_of([1], target=target))
    refuse("drafter.json does not exist", f"checkpoint={folder}")
    refuse("tolerance=-1", "tolerance=-1")
    refuse("Give traffic=FOLDER of recorded answers, or prompts=FILE", "traffic=null")
    refuse("one of them", f"prompts={adapt_folder / 'prompts.jsonl'}")
    refuse("answer. options say how prompts= are answered", "answer.batch=2")
    refuse("watch= waits for traffic", "watch=5", "dry_run=true")
    for own in ("run", "train.steps"):
        refuse(f"training.{own}= is chosen by this command", f"training.{own}=5")
    refuse("heldout_share=1.0 must be a number of at least 0 and below 1", "heldout_share=1")
    refuse("Give old=FILE", "old=missing.jsonl")
    write_rows(folder / "traffic-000001.jsonl", [])
    with (
        hold_lock(Path("adapted/lock"), resource=Path("adapted")),
        pytest.raises(ValueError, match="adapted is in use by"),
    ):
        run_adapt()
    shutil.rmtree("adapted")
    Path("adapted").mkdir()
    Path("adapted", "mine.txt").write_text("text")
    with pytest.raises(ValueError, match="holds no adaptation"):
        run_adapt()
    Path("adapted", "mine.txt").rename("adapted/best")  # as in the folder of a run
    with pytest.raises(ValueError, match="holds no adaptation"):
        run_adapt()


def test_a_folder_of_another_head_is_refused(adapt_folder, run_adapt, tmp_path):
    with pytest.raises(ValueError, match="min_tokens"):
        run_adapt("min_tokens=5000")
    save_eagle(tmp_path / "other", Target.load(str(adapt_folder / "target"), dtype="float32"), seed=5)
    with pytest.raises(ValueError, match="adaptations of another head"):
        run_adapt(f"checkpoint={tmp_path / 'other'}")
    with pytest.raises(ValueError, match="min_tokens"):
        run_adapt("checkpoint=adapted", "min_tokens=5000")
