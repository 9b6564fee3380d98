"""Tests of scripts/evaluate.py on tiny checkpoints: reports, comparisons, batch sizes, refusals."""

import json
import re
import shutil
from dataclasses import replace

import numpy
import pytest
import safetensors.torch
import torch

from scripts import choose, evaluate, replay
from specdec import checkpoint, loading
from specdec.core import files
from specdec.heads.dflash import BlockDrafter
from specdec.heads.medusa import Medusa2
from specdec.measuring import trained_prompts
from specdec.options.command_defaults import read_group
from specdec.options.target import TargetOptions
from specdec.target.model import Target, load_tokenizer
from specdec.text import conversations as data
from specdec.tools.suites import suites
from tests.support import save_eagle, save_target, write_prompts, write_rows

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(folder / "other", seed=1)
    target = save_target(folder / "target")
    for seed, name in enumerate(("one", "two")):
        save_eagle(folder / name / "step_000001", target, seed=seed)
        (folder / name / "best").write_text("step_000001\n")
    shape = {"num_heads": 2, "lora_rank": 2}
    torch.manual_seed(0)
    adapting_head = Medusa2(target, **shape)  # from here on `target` is adapted
    for name, parameter in adapting_head.named_parameters():
        if "lora" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    spec = {"_target_": "specdec.heads.medusa.Medusa2", **shape}
    checkpoint.save(folder / "adapting" / "step_000001", adapting_head.frozen_copy(), spec)
    (folder / "adapting" / "best").write_text("step_000001\n")
    write_prompts(folder / "prompts.jsonl", 3)
    return folder


@pytest.fixture
def run(folder, run_script):
    def run(*arguments):
        values = {"checkpoint": f"{folder}/one", "prompts": f"{folder}/prompts.jsonl", "max_new_tokens": "6",
                  "target.dtype": "float32", "out": str(folder / "single")}  # fmt: skip
        values |= dict(argument.split("=", 1) for argument in arguments)
        return run_script(evaluate, *(f"{key}={value}" for key, value in values.items()))

    return run


def read(folder, **settings):
    """The entries of results.json, by their methods."""
    found = json.loads((folder / "results.json").read_text())["results"]
    return {each["method"]: each for each in found if settings.items() <= each.items()}


# One method


@pytest.fixture
def fresh(folder):
    shutil.rmtree(folder / "single", ignore_errors=True)


def test_one_head_has_every_figure_at_every_temperature_and_auto_beside(run, folder, fresh):
    printed = run("decode.temperature=0,1")
    assert "tau, replayed" in printed and "lossless" in printed and "protocol: 3 questions of" in printed
    document = json.loads((folder / "single" / "results.json").read_text())
    assert {(each["method"], each["temperature"]) for each in document["results"]} == {
        (name, t) for name in ("one, chain of 2", "auto") for t in (0.0, 1.0)
    }
    for key in ("target", "fingerprint", "chat", "template", "seed", "max_new_tokens", "dtype", "questions_digest"):
        assert key in document["settings"]
    assert str(document["settings"]["fingerprint"]) in document["protocol"]
    for entry in document["results"]:
        for key in ("tau", "tau_ci", "survival", "acceptance", "tokens_per_second", "baseline_tokens_per_second", "speedup",
                    "speedup_ci", "by_category", "user_tokens_per_second", "acceptance_length"):  # fmt: skip
            assert key in entry
        assert set(entry["by_category"]) == {"a", "b"} and set(entry["acceptance_length"]) == set(document["counting"])
        assert entry["tau"] == pytest.approx(1 + sum(entry["survival"]), rel=1e-3)
    head = read(folder / "single", temperature=0)["one, chain of 2"]
    assert head["identical_outputs"] == 1 and head["tau"] == pytest.approx(head["replayed_tau"])
    written = (folder / "single" / "results.md").read_text()
    assert document["protocol"] in written and "| one, chain of 2 |" in written


def test_batches_give_the_same_figures(run, folder, fresh):
    run("batch=1,3", "decode.width=2", "decode.depth=3", "auto=false")
    (one,), (three,) = (list(read(folder / "single", batch=batch).values()) for batch in (1, 3))
    assert one["tau"] == three["tau"] and one["survival"] == three["survival"] and three["identical_outputs"] == 1
    users = [three[key] for key in ("user_tokens_per_second", "tokens_per_second")]
    assert 0 < users[0] < users[1]  # three users share the machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere"], "does not exist"),
        (["decode.temperature=hot"], "give numbers"),
        (["decode.depth=0"], "decode.depth=0 must be a whole number from 1 to 1024"),
        (["prompts=nowhere.jsonl"], "There is no file"),
        (["max_new_tokens=100000"], "positions"),
        (["target.name={folder}/other"], "fingerprint"),
        (["checkpoint=", "proposers=head"], "needs a trained head"),
        (["proposers=auto", "proposer.auto.costs=nowhere.json"], "costs=nowhere.json must be a JSON file"),
        (["checkpoint={folder}/one,{folder}/one"], "Two runs are called one"),
        (["checkpoint=", "chains=2"], "nothing to measure"),
        (["chains=1,two"], "chains=1,two cannot be read: give a comma list of DEPTH, such as 1,2,3"),
        (["trees=4x3"], "DEPTHxWIDTHxNODES, such as"),
        (["trees=3x2x2"], "cannot hold a path"),
        (["chains=0"], "at least 1"),
        (["batch=1,x"], "batch=1,x: give numbers"),
        (["batch=0"], "batch=0: give numbers from 1 to 4096"),
        (["suite=gsm"], "There is no suite=gsm. Did you mean gsm8k?"),
        (["protocol=dflash"], "There is no protocol=dflash. Did you mean dflash2?"),
        (["predicted=nowhere.json"], "nowhere.json"),
        (["proposers=ngram,ngram"], "list each once"),
        (["proposers=ngram", "proposer.max=3"], "proposer.NAME.KEY"),
        (["checkpoint={folder}/adapting", "proposers=head"], "adapts its target, which the other proposers share"),
    ],
)
def test_wrong_arguments_are_refused(refuse, folder, tmp_path, arguments, message):
    refuse(message, *(argument.format(folder=folder) for argument in arguments), f"out={tmp_path}/out")


@pytest.mark.parametrize("argument", ["chekpoint=x", "temperature=1"])
def test_misspelt_options_are_refused(run, argument):
    with pytest.raises(ValueError, match=r"Did you mean '(checkpoint|decode\.temperature)'"):
        run(argument)


# Comparisons

SEVERAL = (
    "checkpoint={folder}/one,{folder}/two",
    "proposers=ngram",
    "chains=3",
    "trees=3x2x4",
    "decode.temperature=0,1",
)


@pytest.fixture
def compare(run, folder):
    """compare("key=value", ...) -> what is printed by a comparison of two heads in two shapes and a proposer"""
    return lambda *arguments: run(
        *(each.format(folder=folder) for each in SEVERAL), *(arguments or [f"out={folder}/out"])
    )


@pytest.fixture
def compared(compare, folder):
    """The folder of a finished comparison, its report and its rows."""
    compare()
    out = folder / "out"
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return out, json.loads((out / "results.json").read_text()), rows


def test_a_comparison_has_the_figures_of_every_method(compared):
    out, document, rows = compared
    names = {"one, chain of 3", "one, tree of 3x2x4", "two, chain of 3", "two, tree of 3x2x4", "ngram"}
    assert len(rows) == 6 and len(document["results"]) == 10
    for entry in document["results"]:
        rows_of_temperature = [row for row in rows if row["temperature"] == entry["temperature"]]
        generations = [row["methods"][entry["method"]]["drafted"] for row in rows_of_temperature]
        rounds, emitted = (
            sum(len(generation["accepted"][0]) for generation in generations),
            sum(len(generation["tokens"][0]) - 1 for generation in generations),
        )
        assert entry["num_rounds"] == rounds and entry["tau"] == pytest.approx(emitted / rounds)
        assert ("replayed_tau" in entry) == ("chain" in entry["method"])
        assert entry["temperature"] == 1 or entry["identical_outputs"] == 1
        # others' counting, by hand: over answers that all have rounds
        lengths = entry["acceptance_length"]
        assert lengths["specdec"] == lengths["vLLM"] == pytest.approx(emitted / rounds)
        assert lengths["specforge"] == lengths["SGLang"] == pytest.approx((emitted + len(generations)) / rounds)
        ratios = [(len(one["tokens"][0]) - 1) / len(one["accepted"][0]) for one in generations]
        assert lengths["dflash2"] == pytest.approx(sum(ratios) / len(ratios))
    column = read(out, temperature=0)
    assert set(column) == names and column["one, chain of 3"]["difference"] == [0, [0, 0]]
    assert column["one, chain of 3"]["replayed_tau"] == pytest.approx(column["one, chain of 3"]["tau"])
    page = (out / "results.html").read_text()
    inside = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert {each["method"] for each in inside["results"]} == names
    assert len(page) < 1_000_000 and not re.search(r"(src|href)=.http", page)


def test_the_same_command_continues_an_interrupted_comparison(compare, compared):
    out, _, rows = compared
    path = out / "rows.jsonl"
    content = path.read_text()
    finished = "".join(content.splitlines(keepends=True)[:2])
    for partial, num in ((finished, 2), (content[:-200], 5), (content[:-1], 5)):  # the last two: killed while writing
        path.write_text(partial)
        compare()
        continued = [json.loads(line) for line in path.read_text().splitlines()]
        assert path.read_text().startswith("".join(content.splitlines(keepends=True)[:num]))
        for before, after in zip(rows, continued, strict=True):
            assert (before["number"], before["temperature"]) == (after["number"], after["temperature"])
            for name in ("one, tree of 3x2x4", "two, tree of 3x2x4", "ngram"):
                assert before["methods"][name]["drafted"]["tokens"] == after["methods"][name]["drafted"]["tokens"]
    path.write_text(content[:-200] + "\n")
    with pytest.raises(ValueError, match="line 6 is damaged: delete that line"):
        compare()
    path.write_text(content)


def test_other_settings_are_refused(compare, compared, run, folder, tmp_path):
    with pytest.raises(ValueError, match=r"max_new_tokens \(then 6, now 7\).*another out="):
        compare(f"out={folder}/out", "max_new_tokens=7")
    with pytest.raises(ValueError, match="checkpoint"):
        compare(f"out={folder}/out", f"checkpoint={folder}/one")
    with pytest.raises(ValueError, match=r"proposers\.ngram\.max \(then 6, now 4\)"):
        compare(f"out={folder}/out", "proposer.ngram.max=4")
    shutil.copytree(folder / "two", tmp_path / "two")  # other tests use the original
    arguments = [
        "checkpoint=",
        "proposers=auto",
        f"proposer.checkpoint={tmp_path}/two",
        "limit=1",
        f"out={tmp_path}/out",
    ]
    run(*arguments)
    step = tmp_path / "two" / "step_000001"
    tensors = safetensors.torch.load_file(step / "drafter.safetensors")
    tensors = {name: 2 * value if value.is_floating_point() else value for name, value in tensors.items()}
    safetensors.torch.save_file(tensors, step / "drafter.safetensors")
    with pytest.raises(ValueError, match=r"drafter\.safetensors is damaged"):
        run(*arguments)
    (step / files.CHECKSUMS).unlink()
    with pytest.raises(ValueError, match=rf"files\.{step} \(then"):
        run(*arguments)


def test_a_proposer_with_a_head_is_decoded_with_each_checkpoint(compare, folder):
    few = ["proposers=auto,ngram", "limit=1", "chains=2", "trees=", "decode.temperature=0"]
    for out, more, expected in (("each", [], {"auto with one", "auto with two", "ngram"}),
                                ("named", [f"proposer.checkpoint={folder}/two"], {"auto", "ngram"})):  # fmt: skip
        compare(*few, *more, f"out={folder}/{out}")
        assert set(read(folder / out)) == expected | {"one, chain of 2", "two, chain of 2"}


def test_depth_is_limited_by_the_drafter_and_an_adapting_drafter_has_its_own_target(compare, folder):
    compare(f"checkpoint={folder}/adapting", f"out={folder}/shallow", "limit=1")
    report = read(folder / "shallow", temperature=0)
    assert {"adapting, chain of 2", "adapting, tree of 2x2x4"} < set(report)
    row = json.loads((folder / "shallow" / "rows.jsonl").read_text().splitlines()[0])
    adapted = "the target adapted by adapting"
    assert set(row["plain"]) == {adapted, "the frozen target"}
    assert row["plain"][adapted]["tokens"] != row["plain"]["the frozen target"]["tokens"]
    assert report["adapting, chain of 2"]["adapted_target"] and not report["ngram"]["adapted_target"]


def test_batch_sizes_are_compared_with_full_batches(run, folder, monkeypatch):
    """Every token is a stop token here, which ignore_stop=true ignores. A further size is added to what is there."""
    monkeypatch.setattr(data, "list_stop_tokens", lambda *_: set(range(100_000)))
    given = [f"out={folder}/batches", "ignore_stop=true"]
    run(*given, "batch=1", "chains=2")
    run(*given, "batch=4,1", "chains=2")
    document = json.loads((folder / "batches" / "results.json").read_text())
    assert list(document["settings"]["checkpoint"]) == ["one"] and document["settings"]["num_questions"] == 3
    assert [(each["method"], each["batch"]) for each in document["results"]] == [
        ("one, chain of 2", 1),
        ("one, chain of 2", 4),
    ]
    assert [each["num_prompts"] for each in document["results"]] == [3, 4]  # each as if it had been measured alone
    rows = [json.loads(line) for line in (folder / "batches" / "rows.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1] * 3 + [4] * 4
    assert all(len(row["methods"]["one, chain of 2"]["drafted"]["tokens"][0]) == 6 for row in rows)


# Suites and protocols


@pytest.fixture
def talks(tmp_path):
    """A file in the form of MT-Bench: one question of two turns, and one of one."""
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["w3 w4", "w5 w6 w7"]},
        {"question_id": 82, "category": "math", "turns": ["w8"]},
    ]
    write_rows(tmp_path / "question.jsonl", rows)
    return tmp_path


def test_the_targets_own_answer_is_in_the_history(run, talks, folder):
    arguments = [
        "suite=mt_bench",
        f"prompts={talks}",
        "chains=2",
        "proposers=ngram",
        f"out={talks}/out",
        "decode.temperature=0,1",
    ]
    printed = run(*arguments)
    rows = {
        (row["temperature"], row["prompt"]["id"]): row
        for row in map(json.loads, (talks / "out" / "rows.jsonl").read_text().splitlines())
    }
    assert {name for _, name in rows} == {"81 turn 1", "81 turn 2", "82"}
    loaded = loading.load_target(read_group(TargetOptions, "target", name=f"{folder}/target", dtype="float32"))
    for temperature in (0.0, 1.0):
        first, second = rows[temperature, "81 turn 1"], rows[temperature, "81 turn 2"]
        answer = loaded.tokenizer.decode(first["plain"]["the frozen target"]["tokens"][0], skip_special_tokens=True)
        talk = [
            {"role": "user", "content": "w3 w4"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "w5 w6 w7"},
        ]
        assert second["prompt"]["tokens"] == data.encode_prompt(loaded.tokenizer, talk)
        assert (
            first["prompt"]["question"] == second["prompt"]["question"] != rows[temperature, "82"]["prompt"]["question"]
        )
    document = json.loads((talks / "out" / "results.json").read_text())
    assert document["settings"]["suite"]["name"] == "mt_bench" and "2 questions of MT-Bench" in printed
    assert [each["num_prompts"] for each in document["results"]] == [3] * 4
    content = (talks / "out" / "rows.jsonl").read_text()
    (talks / "out" / "rows.jsonl").write_text(
        "".join(content.splitlines(keepends=True)[:2])
    )  # killed before the second turns
    run(*arguments)
    again = {
        (row["temperature"], row["prompt"]["id"]): row
        for row in map(json.loads, (talks / "out" / "rows.jsonl").read_text().splitlines())
    }
    assert again.keys() == rows.keys()
    assert all(again[key]["prompt"] == rows[key]["prompt"] for key in rows)


def test_a_protocol_sets_options_that_are_not_given(run, talks, folder):
    printed = run("suite=mt_bench", f"prompts={talks}", "protocol=deepspec", f"out={talks}/deepspec", "proposers=ngram")
    document = json.loads((talks / "deepspec" / "results.json").read_text())
    settings = document["settings"]
    assert (settings["decode"]["temperature"], settings["seed"], settings["chains"]) == ("1.0", 980406, "7")
    assert settings["max_new_tokens"] == 6 and settings["template"] == {}  # given; a template without modes
    assert {each["num_prompts"] for each in document["results"]} == {2}  # first turns only
    assert "protocol deepspec (DeepSpec" in printed
    run("suite=mt_bench", f"prompts={talks}", "protocol=deepspec", f"out={talks}/other", "decode.depth=1", "auto=false")
    assert set(read(talks / "other")) == {"one, chain of 1"}


def test_a_protocols_stop_texts_end_answers(run, folder, tmp_path, monkeypatch):
    write_rows(tmp_path / "test.jsonl", [{"question": f"w{n}", "answer": "w1"} for n in range(5, 12)])
    arguments = [
        "suite=gsm8k",
        f"prompts={tmp_path}",
        "protocol=specforge",
        "proposers=ngram",
        "limit=2",
        "max_new_tokens=24",
    ]
    decode = load_tokenizer(f"{folder}/target").decode

    def answer(out):
        run(*arguments, f"out={tmp_path}/{out}")
        row = json.loads((tmp_path / out / "rows.jsonl").read_text().splitlines()[0])
        drafted = row["methods"]["ngram"]["drafted"]
        assert drafted["tokens"] == row["plain"]["the frozen target"]["tokens"]
        return drafted["tokens"][0]

    whole, protocol = answer("whole"), suites.read_protocol("specforge")
    text = decode([whole[5]])
    monkeypatch.setattr(suites, "read_protocol", lambda name: replace(protocol, stop={"gsm8k": [text]}))
    cut = answer("cut")
    assert cut == whole[: len(cut)] and len(cut) <= 6 < len(whole)
    assert text in decode(cut) and text not in decode(cut[:-1])
    monkeypatch.setattr(suites, "read_protocol", lambda name: replace(protocol, stop={"gsm8k": ["a<|im_end|>"]}))
    with pytest.raises(
        ValueError, match=r"protocol=specforge: The stop string 'a<\|im_end\|>' holds the special token"
    ):
        answer("refused")


# Candidates


def test_the_candidates_of_a_lattice_are_reported(run, folder, tmp_path):
    """In a comparison that is read again, too."""
    lattice = {"_target_": "specdec.heads.dflash.BlockDrafter", "dependence": {"kind": "selector", "rank": 4, "top": 8}}
    target = Target.load(str(folder / "target"), dtype="float32")
    head = BlockDrafter(target, dependence=lattice["dependence"]).frozen_copy()
    checkpoint.save(tmp_path / "lattice", head, lattice)
    run(f"checkpoint={tmp_path}/lattice", "decode.depth=3", f"out={tmp_path}/one", "auto=false")
    (candidates,) = (each["candidates"] for each in read(tmp_path / "one").values())
    assert len(candidates["recall"]) == len(candidates["mass"]) == 3
    assert "tau, best candidates" in (tmp_path / "one" / "results.md").read_text()
    compared = f"checkpoint={tmp_path}/lattice,{folder}/one", "chains=3", f"out={tmp_path}/compared"
    for _ in range(2):
        run(*compared)
        column = read(tmp_path / "compared")
        assert [each.get("candidates") for each in column.values()].count(None) == 1
        assert next(each["candidates"] for each in column.values() if "candidates" in each) == candidates


# Prompts that were trained on


def test_prompts_that_a_head_was_trained_on_are_counted(run, run_script, folder, tmp_path):
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"w{n} w7"}, {"role": "assistant", "content": "w2 w3 w4"}]} for n in range(4)]  # fmt: skip
    write_rows(tmp_path / "copied.jsonl", rows)
    shutil.copytree(folder / "one", tmp_path / "one")
    shutil.copytree(folder / "two", tmp_path / "two")
    digests = [each for row in rows[2:] for each in trained_prompts.digest_row(row)]
    trained_prompts.write_digests(tmp_path / "one", numpy.unique(numpy.array(digests)))
    heads = f"checkpoint={tmp_path}/one,{tmp_path}/two"
    arguments = [
        f"prompts={tmp_path}/copied.jsonl",
        "limit=null",
        "chains=2",
        "max_new_tokens=2",
        f"out={tmp_path}/out",
    ]
    sentence = "2 of 4 prompts (first: q2) are among those that {} was trained on: its figures flatter"
    assert sentence.format("one") in " ".join(run(heads, *arguments).split())
    notes = json.loads((tmp_path / "out" / "results.json").read_text())["notes"]
    assert notes == [sentence.format("one")]
    inside = ["checkpoint=", "proposers=head", f"proposer.checkpoint={tmp_path}/one", f"out={tmp_path}/inside"]
    run(*arguments[:-1], *inside)
    assert json.loads((tmp_path / "inside" / "results.json").read_text())["notes"] == [
        sentence.format("one/step_000001")
    ]
    run(*arguments[:2], "max_new_tokens=2", f"checkpoint={tmp_path}/one", f"out={tmp_path}/auto")  # inside auto, too
    assert json.loads((tmp_path / "auto" / "results.json").read_text())["notes"] == [sentence.format("one")]
    assert "trained on" not in run(heads, f"out={tmp_path}/held")
    for script, more in ((replay, ["answers={0}"]), (choose, ["prompts={0}", "loads=1", "max_new_tokens=2"])):
        common = [heads, "target.dtype=float32", f"out={tmp_path}/{script.__name__}", *more]
        run_script(script, *(each.format(f"{tmp_path}/copied.jsonl") for each in common), *["hold_out=null"])
        notes = json.loads((tmp_path / script.__name__ / "results.json").read_text())["notes"]
        assert notes == [sentence.format("one")]
