"""Tests of the demo: sizes by the speeds of a machine, days of a service, and its parts with a tiny target."""

import dataclasses
import json
from pathlib import Path

import pytest

from scripts import demo as command
from specdec import checkpoint
from specdec.core.lock import hold_lock
from specdec.tools.demo import budget, comparison, training
from specdec.tools.demo.budget import COMPARED_QUESTIONS, SHOWN_TOKENS, Speeds, TextSizes, plan_demo
from specdec.tools.demo.service import read_service
from tests.support.commands import ROOT, train_command, write_rows
from tests.support.drafters import save_eagle
from tests.support.targets import save_target

DAY = 86400
SIZES = TextSizes(rows=234, row_tokens=280, heldout=49, prompt_tokens=170, compared_tokens=40, pack=512)
SLOW = Speeds(start=12.0, token=0.1, drafted=0.06, read=1 / 250)
QUICK = Speeds(start=6.0, token=0.01, drafted=0.006, read=1 / 5000)


# Budgets


def scale_speeds(factor: float) -> Speeds:
    """The speeds of a machine that takes `factor` times as long as SLOW."""
    return Speeds(**{name: factor * value for name, value in dataclasses.asdict(SLOW).items()})


@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_the_parts_of_a_slow_machine_fill_their_minutes(factor):
    plan = plan_demo(scale_speeds(factor), SIZES, minutes=8)
    assert sum(plan.seconds) <= 480 and all(seconds <= limit for seconds, limit in zip(plan.seconds, (60, 300, 120)))
    assert plan.seconds[1] > 0.95 * 300 or plan.rows == SIZES.rows
    slower = plan_demo(scale_speeds(2 * factor), SIZES, minutes=8)
    for name in ("shown_tokens", "rows", "steps", "judged_answers", "questions"):
        assert getattr(slower, name) <= getattr(plan, name)
    assert slower.rows < plan.rows


def test_a_quick_machine_takes_less():
    plan = plan_demo(QUICK, SIZES, minutes=8)
    assert plan.rows == SIZES.rows and sum(plan.seconds) < 120
    assert (plan.shown_tokens, plan.questions) == (SHOWN_TOKENS[1], COMPARED_QUESTIONS[1])


@pytest.mark.parametrize("factor", [0.5, 1, 2, 4])
def test_steps_that_are_slower_than_planned_are_validated_in_time(monkeypatch, factor):
    """Training ends at the first validation behind its moment. A step takes about three replays at most."""
    speeds, num_passes = scale_speeds(factor), budget.EPOCHS / budget.NUM_VALIDATIONS
    plan = plan_demo(speeds, SIZES, minutes=8)
    monkeypatch.setattr(budget, "STEP_READS", 3.0)
    seconds = budget.TRAINING_STARTS * speeds.start + 2 * budget.NUM_CHOOSING * SIZES.row_tokens * speeds.read
    row_seconds = SIZES.row_tokens * (speeds.read + num_passes * speeds.find_step(SIZES.step_tokens))
    assert seconds + plan.rows * row_seconds < (1 - budget.JUDGING_SHARE) * budget.OVERRUN * plan.seconds[1]


def test_what_is_least_is_done_however_slow_the_machine_is():
    plan = plan_demo(Speeds(**dict.fromkeys(dataclasses.asdict(SLOW), 100.0)), SIZES, minutes=1)
    assert (
        plan.steps >= 1
        and plan.judged_answers >= 8
        and plan.questions == COMPARED_QUESTIONS[0]
        and plan.seconds[1] > 1000
    )


def test_a_part_ends_at_its_moment(monkeypatch):
    moments = iter(range(100))
    monkeypatch.setattr(budget.time, "perf_counter", lambda: next(moments))
    assert list(budget.until(3.5, "abcdefghi", least=2)) == ["a", "b", "c", "d", "e", "f"]
    assert list(budget.until(-1, "abcdefghi", least=2)) == ["a", "b"]


# The service


def write_service(folder: Path, days: range) -> list[str]:
    """Three questions a day with their answers. Returns the options that name them."""
    questions, answers = [], []
    for number in range(3 * len(days)):
        content = f"Count from {number}."
        time = DAY * (days[0] + number / 3)
        questions.append({"id": str(number), "time": time, "messages": [{"role": "user", "content": content}]})
        completion = f"{number} is followed by {number + 1}, then by {number + 2}."
        answers.append({"id": str(number), "finish": "stop", "completion": completion})
    write_rows(folder / "questions.jsonl", questions)
    write_rows(folder / "answers.jsonl", answers[::-1])
    return [f"prompts={folder}/questions.jsonl", f"answers={folder}/answers.jsonl"]


def test_days_that_judge_come_after_those_that_are_trained_on(tmp_path):
    write_service(tmp_path, range(100, 110))
    service = read_service(f"{tmp_path}/questions.jsonl", f"{tmp_path}/answers.jsonl")
    groups = [service.training, service.choosing, service.judging]
    assert [len(rows) for rows in groups] == [9, 3, 18]
    ids = [int(row["id"]) for rows in groups for row in rows]
    assert ids == list(range(30)) and service.judging[0]["messages"][1]["content"].startswith("12 is followed")
    assert (
        "the newest 7 answers of days 1 to 3 are trained on, 3 of day 4 choose the step, 18 of days 5 to 10 judge"
        in (service.describe_split(7))
    )


def test_the_shipped_service_is_whole():
    """Each question has an answer, and no question of the last days is trained on."""
    service = read_service(f"{ROOT}/data/domains/support_desk.jsonl", f"{ROOT}/data/domains/support_desk_answers.jsonl")
    assert (len(service.training), len(service.choosing), len(service.judging), service.num_days) == (223, 19, 58, 30)
    questions = {row["messages"][-2]["content"] for row in service.training}
    assert not [row for row in service.judging if row["messages"][-2]["content"] in questions]
    assert max(row["time"] for row in service.training) < service.judging[0]["time"]
    assert {row["finish"] for row in service.judging} == {"stop", "length"}


# The command


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A tiny target with a head, a service of ten days, and answers to other questions."""
    folder = tmp_path_factory.mktemp("demo")
    save_eagle(folder / "head", save_target(folder / "target"))
    write_service(folder, range(10))
    rows = []
    for number in range(8):
        messages = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"Hello {number}!"}]
        rows.append({"id": str(number), "temperature": 0.0, "messages": messages})
    write_rows(folder / "other.jsonl", rows)
    return folder


@pytest.fixture
def run_demo(demo_folder, tmp_path, monkeypatch, run_script):
    """run_demo("key=value", ..) -> what was printed; OUT is `out` in a new working directory"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec.tools.demo.budget.SHOWN_TOKENS", (8, 8))
    monkeypatch.setattr("specdec.tools.demo.budget.COMPARED_QUESTIONS", (2, 2))
    monkeypatch.setattr(comparison, "COMPARED_TOKENS", 8)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    names = {"prompts": "questions.jsonl", "answers": "answers.jsonl", "elsewhere": "other.jsonl", "checkpoint": "head"}
    options = [f"{name}={demo_folder / file}" for name, file in names.items()]
    options += [f"target.name={demo_folder}/target", "target.dtype=float32", "out=out", "progress=quiet"]
    return lambda *changes: run_script(command, *options, *changes)


def train_here(arguments: list[str], folder: Path, *, seconds: float) -> None:
    """`training.run_training` in this process."""
    from hydra import compose, initialize_config_dir

    from train.settings.hydra_text import make_search_path, quote_arguments

    arguments = [*arguments, "precision=fp32", "threads=1"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[*quote_arguments(arguments), "progress=quiet", make_search_path()])
    folder.mkdir(parents=True, exist_ok=True)
    assert train_command().fit(config) == 0


def test_the_parts_are_done_once_and_an_interrupted_one_again(run_demo, monkeypatch, capsys):
    """Ctrl-C in the second part: the same command does not repeat the first one, and other options are refused."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_training", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_demo()
    record = json.loads(Path("out/demo.json").read_text())
    assert record["parts"].keys() == {"1"} and record["plan"]["steps"] >= 1
    with pytest.raises(ValueError, match=r"minutes \(then 8, now 9.*fresh=true to begin anew"):
        run_demo("minutes=9")

    monkeypatch.setattr(training, "run_training", train_here)
    assert "== 1  " in capsys.readouterr().out
    out = run_demo()
    for text in (
        "1  ",
        "done before",
        "steps of training on recorded",
        "trained on, 3 of day 4 choose the step",
        "== 3  four ways",
    ):
        assert text in out
    assert "== 1" not in out and out.count(" expected.") == 2
    record = json.loads(Path("out/demo.json").read_text())
    changes, ways = record["parts"]["2"]["changes"], record["parts"]["3"]["ways"]
    assert changes["on the last days"]["answers"] >= 4 and changes["elsewhere"]["before"] >= 1
    assert ways[0][0] == "plain decoding" and len(ways) == 4 and ways[3][0].startswith("auto")
    assert record["parts"]["3"]["verdict"] in out
    trained = [json.loads(line)["id"] for line in Path("out/train.jsonl").read_text().splitlines()]
    assert trained == [str(number) for number in range(9)][-record["plan"]["rows"] :]  # the newest

    out = run_demo()
    assert "== " not in out and "way to decode" in out and record["parts"]["3"]["verdict"] in out
    monkeypatch.setattr(training, "run_training", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_demo("fresh=true")
    assert json.loads(Path("out/demo.json").read_text())["parts"].keys() == {"1"}


# The launcher


@pytest.fixture
def training_options(demo_folder, tmp_path, monkeypatch):
    """Options of a training that would take hours, whose run is checkpoints/long of a new working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = [f"data.train={demo_folder}/other.jsonl", f"validation.answers={demo_folder}/other.jsonl"]
    sizes = [
        "data.length=64",
        "train.steps=1000000",
        "train.validate_every=5",
        "train.log_every=5",
        "validation.num_prompts=2",
    ]
    target = [f"target.name={demo_folder}/target", "target.dtype=float32", "precision=fp32", "features.mode=online"]
    return ["head=eagle", "experiment=service", f"start={demo_folder}/head", "run=long", *rows, *sizes, *target]


@pytest.mark.full
def test_a_training_ends_at_its_moment_with_its_best_step(training_options, capfd):
    training.run_training(training_options, Path("checkpoints/long"), seconds=0)
    assert checkpoint.resolve("checkpoints/long").name.startswith("step_")
    out = capfd.readouterr().out
    assert "accelerate launch" in out and "The time of this part is over" in out
    assert not Path("checkpoints/long/finished").exists()
    assert json.loads(Path("checkpoints/long/log.jsonl").read_text().splitlines()[-1])["step"] >= 5


@pytest.mark.full
def test_ctrl_c_waits_until_the_training_is_saved(training_options, monkeypatch):
    def interrupt(text: str) -> None:
        if text.startswith("step"):
            monkeypatch.undo()
            raise KeyboardInterrupt

    folder = Path("checkpoints/long").absolute()
    monkeypatch.setattr(training.progress, "print_note", interrupt)
    with pytest.raises(KeyboardInterrupt, match="The same command continues"):
        training.run_training(training_options, folder, seconds=600)
    assert list((folder / "state").glob("step_*/state.json"))
    with hold_lock(folder / "lock", resource=folder):  # no process has it
        pass


@pytest.mark.full
def test_a_training_that_fails_says_why(training_options):
    with pytest.raises(ValueError, match=r"(?s)The training failed:\nerror: start=.*give head= the family"):
        training.run_training([*training_options, "head=mtp"], Path("checkpoints/long"), seconds=600)
