"""Tests of scripts/choose.py on tiny checkpoints: what is chosen, from which costs, and refusals."""

import json
import shlex
import shutil
from types import SimpleNamespace

import pytest

from scripts import choose, evaluate
from specdec.target.model import Target
from specdec.tools.choose import engine_flags
from specdec.tools.choose.choice import ShapeAcceptance, predict_speedup
from specdec.tools.choose.round_costs import CostPoint, RoundCosts
from tests.support.commands import write_prompts, write_rows
from tests.support.drafters import make_drafter, save_eagle
from tests.support.targets import save_target

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choosing")
    target = save_target(folder / "target")
    for seed, name in enumerate(("one", "two")):
        save_eagle(folder / name / "step_000001", target, seed=seed)
        (folder / name / "best").write_text("step_000001\n")
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


@pytest.fixture
def run(folder, run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        values = {"checkpoint": f"{folder}/one", "prompts": f"{folder}/prompts.jsonl", "max_new_tokens": "8"}
        values |= {"loads": "1,4", "target.dtype": "float32", "out": f"{tmp_path}/choice"}
        values |= dict(argument.split("=", 1) for argument in arguments)
        return run_script(choose, *(f"{key}={value}" for key, value in values.items()))

    return run


def read(tmp_path, name="choice"):
    return json.loads((tmp_path / name / "results.json").read_text())["choice"]


def test_it_chooses_from_heads_trees_and_proposers_and_keeps_what_it_timed(run, folder, tmp_path):
    alone = ["contexts=10,20", "decode.temperature=1"]
    arguments = [f"checkpoint={folder}/one,{folder}/two", "proposers=ngram", "trees=2x2x4", *alone]
    printed = run(*arguments)
    result, out = read(tmp_path), tmp_path / "choice"
    assert "plain is faster than everything" in printed and "| load |" in (out / "results.md").read_text()
    assert "<svg" in (out / "results.html").read_text()
    assert [(row["load"], row["context"]) for row in result["loads"]] == [(1, 10), (4, 10), (1, 20), (4, 20)]
    shapes = {acceptance["shape"] for acceptance in result["acceptance"] if acceptance["drafter"] == "one"}
    assert shapes == {f"chain of {num}" for num in range(1, 17)} | {"tree of 2x2x4"}
    for row in result["loads"]:
        assert row["drafters"].keys() == {"one", "two", "ngram"}
        for name, recorded in row["drafters"].items():
            speedup = predict_speedup(result, name, recorded["shape"], row["load"], row["context"])
            assert speedup._asdict().items() <= recorded.items() and speedup.low <= speedup.speedup <= speedup.high
    assert predict_speedup(result, "one", "chain of 99", 1) is None
    timed = list((tmp_path / "cache").glob("*.rounds.json"))
    assert len(timed) == 5  # two heads, a tree of each, a proposer
    run(*arguments)
    assert read(tmp_path)["costs"] == result["costs"]
    run(f"out={tmp_path}/alone", *alone)  # what was timed beside others counts
    points = [point for point in result["costs"]["points"] if point["drafter"] == "one"]
    assert read(tmp_path, "alone")["costs"]["points"] == points


@pytest.fixture
def costs(folder, tmp_path):
    """costs=: the folder of an earlier choice, so that nothing is timed."""
    points = [CostPoint("one", rows, num, 20.0, 1 + 0.02 * rows * num, 1.0) for rows in (1, 256) for num in (1, 16)]
    fingerprint = Target.load(str(folder / "target"), dtype="float32").fingerprint()
    document = {"costs": RoundCosts(points, "made up").to_json(), "fingerprint": fingerprint}
    change_choice(tmp_path / "earlier", {"acceptance": [], "tokens": 8.0, "contexts": [20.0], **document})
    return f"costs={tmp_path}/earlier"


def change_choice(folder, changes):
    """The choice of a folder with other values."""
    folder.mkdir(exist_ok=True)
    path = folder / "results.json"
    document = json.loads(path.read_text()) if path.exists() else {"choice": {}}
    document["choice"] |= changes
    path.write_text(json.dumps(document))


def test_costs_come_from_an_earlier_choice(run, costs, folder, tmp_path):
    run(costs, "loads=1,256")
    choice = read(tmp_path)
    with pytest.raises(ValueError, match=r"results\.json was begun with other settings: loads"):
        run(costs, "loads=1,64")
    assert choice["costs"]["source"] == "made up"
    run(f"costs={tmp_path}/choice", f"out={tmp_path}/again", "loads=1,256")
    assert read(tmp_path, "again")["loads"] == choice["loads"]
    change_choice(tmp_path / "choice", {"fingerprint": "of another"})
    with pytest.raises(ValueError, match="are of another target than"):
        run(f"costs={tmp_path}/choice", f"out={tmp_path}/second")
    change_choice(tmp_path / "choice", {"fingerprint": "0" * 16})
    with pytest.warns(UserWarning, match="costs=.* name their target in the form of an earlier version"):
        run(f"costs={tmp_path}/choice", f"out={tmp_path}/of an earlier version")
    with pytest.raises(ValueError, match="known of one context only"):
        run(costs, "contexts=30", f"out={tmp_path}/second")
    run(costs, "loads=1,256,512", "contexts=20", f"out={tmp_path}/third")
    assert [row["drafters"]["one"]["extrapolated"] for row in read(tmp_path, "third")["loads"]] == [False, False, True]


def test_a_prediction_stands_beside_what_is_measured_as_it_was_predicted(run, costs, folder, run_script, tmp_path):
    run(costs, "loads=1")

    def measure(out, temperature):
        arguments = [f"checkpoint={folder}/one", f"prompts={folder}/prompts.jsonl", "max_new_tokens=8", "chains=2"]
        arguments += [f"predicted={tmp_path}/choice", "target.dtype=float32", f"decode.temperature={temperature}"]
        run_script(evaluate, *arguments, f"out={tmp_path}/{out}")
        return json.loads((tmp_path / out / "results.json").read_text())

    document = measure("compared", "0,1")
    predictions = {entry["temperature"]: entry.get("predicted_speedup") for entry in document["results"]}
    assert len(predictions[0]) == 4 and predictions[1] is None
    assert "T=1: nothing is predicted, as predicted= is of temperature 0.0" in document["notes"]
    change_choice(tmp_path / "choice", {"fingerprint": "of another"})
    assert "as predicted= is of fingerprint of another" in str(measure("with another", "0")["notes"])
    change_choice(tmp_path / "choice", {"fingerprint": "0" * 16})
    assert "(of an earlier version, not to be compared: choose again)" in str(measure("with old", "0")["notes"])


def test_sampling_that_replay_does_not_cover_is_decoded(run, folder, tmp_path):
    run("decode.temperature=1", "decode.top_p=0.9")
    shapes = [acceptance["shape"] for acceptance in read(tmp_path)["acceptance"]]
    assert shapes == [f"chain of {num}" for num in (1, 2, 4, 8, 16)]


def test_given_answers_are_replayed(run, costs, folder, tmp_path):
    """Also with a window, where they are longer than the texts that the head was trained on."""
    rows = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1 2 3 4 5"}]}
        for n in range(3)
    ]
    write_rows(tmp_path / "answers.jsonl", rows)
    shutil.copytree(folder / "one", tmp_path / "one")
    path = tmp_path / "one" / "step_000001" / "drafter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trained_length": 4}))
    (path.parent / "SHA256SUMS").unlink()
    printed = run(f"answers={tmp_path}/answers.jsonl", f"checkpoint={tmp_path}/one", costs, "hold_out=null")
    assert read(tmp_path)["num_answers"] == 3 and not (tmp_path / "choice" / "answers").exists()
    printed = " ".join(printed.split())
    assert "one, 3 texts longer than its training: a window of 4 changes tau from" in printed
    assert ": 3 texts are too few to tell, give 8 or more." in printed


def flags_of(target, kind, nums, cost=0.04):
    """The lines of a head with chains of these numbers of drafts by engine. cost: time of a draft in plain rounds"""
    chains = [ShapeAcceptance("a", f"chain of {num}", "a", num, 1 + num**0.5, [1 + num**0.5] * 2, []) for num in nums]
    points = [CostPoint("a", rows, num, 9.0, 1 + cost * rows * num, 1.0) for rows in (1, 4, 64) for num in nums]
    run = SimpleNamespace(name="a", drafter=make_drafter(target, kind))
    lines, settings = {}, {"loads": [1, 4, 64], "context": 9.0, "tokens": 50.0}
    for line in engine_flags.list_flags([run], target.name, chains, RoundCosts(points, ""), **settings):
        lines.setdefault(line["engine"], []).append(line)
    return lines


def test_flags_serve_the_best_chain_at_each_load(small_target):
    flags = flags_of(small_target, "eagle3", [1, 2, 7])
    (line,) = flags["vLLM"]
    words = shlex.split(line["line"])
    settings = json.loads(words[words.index("--speculative-config") + 1])
    assert settings["num_speculative_tokens"] == 7 and line["loads"] == [1, 64]
    assert settings[engine_flags.SCHEDULE] == [[1, 3, 7], [4, 63, 2], [64, 64, 0]]
    assert [each["loads"] for each in flags["SGLang"]] == [[1, 3], [4, 63]]
    assert ["--spec-draft-n-max 7" in each["line"] for each in flags["llama.cpp"]] == [True, False]
    (line,) = flags_of(small_target, "eagle3", [1, 2, 7], cost=0.001)["vLLM"]
    assert engine_flags.SCHEDULE not in line["line"] and line["loads"] == [
        1,
        64,
    ]  # one number of drafts is best at all loads
    (reason,) = flags_of(small_target, "eagle3", [1, 2], cost=9.0)["SGLang"]
    assert reason["reason"] == "plain decoding is faster at every load"


def test_flags_have_whole_blocks_and_say_why_there_is_no_line(small_target):
    flags = flags_of(small_target, "dflash", [1, 2, 4])
    (line,) = flags["vLLM"]
    assert line["loads"] == [1, 63] and '"num_speculative_tokens": 4' in line["line"]
    assert engine_flags.SCHEDULE not in line["line"] and "The mask of this head" in flags["SGLang"][0]["reason"]
    assert "not Medusa" in flags_of(small_target, "medusa", [1, 2])["llama.cpp"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint="], "nothing to choose from"),
        (["loads=0"], "loads=0: give numbers"),
        (["loads=5000"], "loads=5000: give numbers"),
        (["contexts=0"], "contexts=0: give numbers"),
        (["contexts=20,1000000"], "positions, so [0-9]+ is the most"),
        (["engine=http://localhost:1", "contexts=10"], "no costs=, contexts=, proposers= or trees="),
        (["engine=http://localhost:1", "checkpoint={folder}/one"], "localhost:1"),
        (["costs={folder}/prompts.jsonl"], "must be a folder of specdec choose"),
        (["proposers=auto"], "auto chooses in every round"),
        (["decode.temperature=0,1"], "give one, and run this again"),
        (["engine=http://localhost:1", "costs=abacus"], "give that checkpoint=DIR"),
        (["limit=1"], "an interval over prompts needs two"),
        (
            ["limit=1", "protocol=dflash2", "target.name={folder}/target"],
            "an interval over prompts needs two",
        ),  # its chains= is left out
    ],
)
def test_wrong_arguments_are_refused(refuse, folder, arguments, message):
    refuse(message, *(argument.format(folder=folder) for argument in arguments))
