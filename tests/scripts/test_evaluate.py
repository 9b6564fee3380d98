"""Tests of scripts/evaluate.py on tiny checkpoints: reports, comparisons, batch sizes, suites, refusals."""

import json
import re
import shutil
from dataclasses import replace

import datasets
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
from specdec.measuring.page import list_links, write_page
from specdec.options.command_defaults import read_group
from specdec.options.target import TargetOptions
from specdec.target.model import load_tokenizer
from specdec.text import conversations
from specdec.tools.suites import suites
from tests.support.commands import write_prompts, write_rows
from tests.support.drafters import save_eagle
from tests.support.targets import save_target

pytestmark = [pytest.mark.full, pytest.mark.gpu]
FROZEN = "the frozen target"
LATTICE = {"_target_": "specdec.heads.dflash.BlockDrafter", "dependence": {"kind": "selector", "rank": 4, "top": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(folder / "other", seed=1)
    target = save_target(folder / "target")
    save_eagle(folder / "one" / "step_000001", target)
    torch.manual_seed(0)
    lattice = BlockDrafter(target, dependence=LATTICE["dependence"]).frozen_copy()
    checkpoint.save(folder / "two" / "step_000001", lattice, LATTICE)
    shape = {"num_heads": 2, "lora_rank": 2}
    adapting_head = Medusa2(target, **shape)  # from here on `target` is adapted
    for name, parameter in adapting_head.named_parameters():
        if "lora" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    spec = {"_target_": "specdec.heads.medusa.Medusa2", **shape}
    checkpoint.save(folder / "adapting" / "step_000001", adapting_head.frozen_copy(), spec)
    for name in ("one", "two", "adapting"):
        (folder / name / "best").write_text("step_000001\n")
    write_prompts(folder / "prompts.jsonl", 3)
    prompts = datasets.Dataset.from_json(f"{folder}/prompts.jsonl", cache_dir=f"{folder}/cache")
    datasets.DatasetDict({"dev": prompts}).save_to_disk(folder / "saved")
    return folder


@pytest.fixture
def run(folder, run_script):
    """run("key=value", ...) -> what is printed; the arguments replace the first head, the prompts and six new tokens"""

    def run(*arguments):
        defaults = [f"checkpoint={folder}/one", f"prompts={folder}/prompts.jsonl", "max_new_tokens=6"]
        return run_script(evaluate, *defaults, "target.dtype=float32", *arguments)

    return run


def read_document(out) -> dict:
    return json.loads((out / "results.json").read_text())


def read_entries(out, **settings) -> dict[str, dict]:
    """The entries of results.json that have these settings, by their methods."""
    entries = read_document(out)["results"]
    return {entry["method"]: entry for entry in entries if settings.items() <= entry.items()}


def read_rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def find_tables(printed: str) -> list[list[str]]:
    """The lines of each table."""
    tables = re.findall(r"^┏.*?^└[^\n]*$", printed, re.MULTILINE | re.DOTALL)
    return [table.splitlines() for table in tables]


# One method


def test_one_head_has_every_figure_at_every_temperature_and_auto_beside(run, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    printed = run("decode.temperature=0,1", f"out={tmp_path}/out")
    assert "lossless" in printed and "protocol: 3 questions of" in printed
    assert len(find_tables(printed)) == 1 and max(map(len, find_tables(printed)[0])) <= 100
    document = read_document(tmp_path / "out")
    methods = {(entry["method"], entry["temperature"]) for entry in document["results"]}
    assert methods == {(name, t) for name in ("one, chain of 2", "auto") for t in (0.0, 1.0)}
    recorded = "target fingerprint chat template seed max_new_tokens dtype questions_digest"
    assert set(recorded.split()) <= document["settings"].keys()
    assert str(document["settings"]["fingerprint"]) in document["protocol"]
    figures = """tau tau_ci survival acceptance tokens_per_second baseline_tokens_per_second speedup speedup_ci
        by_category user_tokens_per_second acceptance_length"""
    for entry in document["results"]:
        assert set(figures.split()) <= entry.keys()
        assert set(entry["by_category"]) == {"a", "b"} and set(entry["acceptance_length"]) == set(document["counting"])
        assert entry["tau"] == pytest.approx(1 + sum(entry["survival"]), rel=1e-3)
    head = read_entries(tmp_path / "out", temperature=0)["one, chain of 2"]
    assert head["identical_outputs"] == 1 and head["tau"] == pytest.approx(head["replayed_tau"])
    written = (tmp_path / "out" / "results.md").read_text()
    assert document["protocol"] in written and "| one, chain of 2 |" in written and "tau, replayed" in written
    verbose = run("decode.temperature=0,1", f"out={tmp_path}/out", "verbose=true")  # from the rows that are there
    assert len(find_tables(verbose)) == 3 and "The same rounds as others count them" in verbose


def test_prompts_beyond_the_training_are_named_and_buckets_add_up_to_tau(run, folder, tmp_path):
    head = shutil.copytree(folder / "one", tmp_path / "short")
    (head / "about.json").write_text(json.dumps({"data": {"length": 2}}))
    printed = run(f"checkpoint={head}", "max_new_tokens=40", "auto=false", f"out={tmp_path}/out")
    assert "3 of 3 prompts are longer than all texts that" in printed and "against 2 tokens" in printed
    (entry,) = read_entries(tmp_path / "out").values()
    for buckets in entry["contexts"].values():
        rounds = sum(bucket["rounds"] for bucket in buckets)
        emitted = sum(bucket["emitted"] for bucket in buckets)
        assert rounds == entry["num_rounds"] and emitted / rounds == entry["tau"]
    assert "contexts" not in entry["by_category"]["a"]
    written = [(tmp_path / "out" / name).read_text() for name in ("results.md", "results.html")]
    assert all("Acceptance length by tokens of the answer before a round" in text for text in written)


def test_batches_give_the_same_figures(run, folder, tmp_path):
    prompts = [f"prompts={folder}/saved", "split=dev"]
    run(*prompts, "batch=1,3", "decode.width=2", "decode.depth=3", "auto=false", f"out={tmp_path}")
    (single,), (batch,) = (read_entries(tmp_path, batch=batch).values() for batch in (1, 3))
    assert single["tau"] == batch["tau"] and single["survival"] == batch["survival"] and batch["identical_outputs"] == 1
    assert 0 < batch["user_tokens_per_second"] < batch["tokens_per_second"]  # three users share the machine


def test_categories_of_any_type_are_in_reports(run, folder, tmp_path):
    values = [5, "math", None, True, 2.5, "[red]bold[/red]", {"k": 1}]
    write_rows(tmp_path / "mixed.jsonl", [{"prompt": "Say hello.", "category": value, "id": value} for value in values])
    arguments = ["checkpoint=", "proposers=ngram", f"prompts={tmp_path}/mixed.jsonl", f"out={tmp_path}/out"]
    printed = run(*arguments, f"target.name={folder}/target", "verbose=true")
    names = ["5", "math", "all", "true", "2.5", "[red]bold[/red]", '{"k": 1}']
    (entry,) = read_document(tmp_path / "out")["results"]
    assert list(entry["by_category"]) == sorted(names) and all(name in printed for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("checkpoint=nowhere", "does not exist"),
        ("prompts=nowhere.jsonl", "There is no file"),
        ("max_new_tokens=100000", "positions"),
        ("target.name={folder}/other", "fingerprint"),
        ("checkpoint= proposers=head", "needs a trained head"),
        ("proposers=auto proposer.auto.costs=nowhere.json", "costs=nowhere.json must be a JSON file"),
        ("checkpoint={folder}/one,{folder}/one", "Two runs are called one"),
        ("proposers=ngram,ngram", "list each once"),
        ("proposers=ngram proposer.max=3", "proposer.NAME.KEY"),
        ("checkpoint={folder}/adapting proposers=head", "adapts its target, which the other proposers share"),
        ("prompts={folder}/long.jsonl", r"long\.jsonl, prompt toolong: A prompt of [\d,]+ tokens, 6 new ones"),
        ("prompts={folder}/empty.jsonl", r"empty\.jsonl: no rows\. Give a file with some"),
        ("prompts={folder}/saved", "saved has no split 'train'; it has: dev"),
    ],
)
def test_wrong_arguments_are_refused(refuse, folder, tmp_path, arguments, message):
    write_rows(folder / "long.jsonl", [{"prompt": "Say hello."}, {"id": "toolong", "prompt": "word " * 3000}])
    (folder / "empty.jsonl").touch()
    refuse(message, *arguments.format(folder=folder).split(), f"out={tmp_path}/out")


# Comparisons


@pytest.fixture
def compare(run, folder):
    """compare("key=value", ...) -> what is printed by a comparison of two heads in two shapes and a proposer"""
    heads = f"checkpoint={folder}/one,{folder}/two"
    shapes = ["proposers=ngram", "chains=3", "trees=3x2x4", "decode.temperature=0,1"]
    return lambda *arguments: run(heads, *shapes, f"out={folder}/out", *arguments)


@pytest.fixture
def compared(compare, folder):
    """The folder of a finished comparison, its report and its rows."""
    compare()
    return folder / "out", read_document(folder / "out"), read_rows(folder / "out")


def test_a_comparison_has_the_figures_of_every_method(compared):
    out, document, rows = compared
    names = {"one, chain of 3", "one, tree of 3x2x4", "two, chain of 3", "two, tree of 3x2x4", "ngram"}
    assert len(rows) == 6 and len(document["results"]) == 10
    for entry in document["results"]:
        rows_of_temperature = [row for row in rows if row["temperature"] == entry["temperature"]]
        generations = [row["methods"][entry["method"]]["drafted"] for row in rows_of_temperature]
        rounds = [len(generation["accepted"][0]) for generation in generations]
        emitted = [len(generation["tokens"][0]) - 1 for generation in generations]
        tau = sum(emitted) / sum(rounds)
        assert entry["num_rounds"] == sum(rounds) and entry["tau"] == pytest.approx(tau)
        assert ("replayed_tau" in entry) == ("chain" in entry["method"])
        assert ("candidates" in entry) == (entry["method"] == "two, chain of 3")
        assert entry["temperature"] == 1 or entry["identical_outputs"] == 1
        # others' counting, by hand: over answers that all have rounds
        lengths = entry["acceptance_length"]
        assert lengths["specdec"] == lengths["vLLM"] == pytest.approx(tau)
        assert lengths["specforge"] == lengths["SGLang"] == pytest.approx((sum(emitted) + len(rounds)) / sum(rounds))
        assert lengths["dflash2"] == pytest.approx(numpy.mean(numpy.divide(emitted, rounds)))
    column = read_entries(out, temperature=0)
    chain = column["one, chain of 3"]
    assert set(column) == names and chain["difference"] == [0, [0, 0]]
    assert chain["replayed_tau"] == pytest.approx(chain["tau"])


def test_the_page_of_a_comparison_has_its_figures_inside(compare, compared, folder):
    out, document, _ = compared
    report = folder / "one" / "step_000001" / "report.html"
    write_page(report, "a run", figures={}, verdicts=[], sections=[])
    printed = compare()
    assert list_links(report.read_text()) == {"../../out/results.html": "5 ways to draft"}
    assert "tau, best candidates" in (out / "results.md").read_text()
    page = (out / "results.html").read_text()
    assert list_links(page) == {"../one/step_000001/report.html": "run of one"}
    for temperature in (0, 1):
        (sentence,) = re.findall(f'verdict unsure">(Not sure, T {temperature}: .*, on 3 questions. .*)</p>', page)
        assert sentence in printed.replace("\n", " ") and f"**{sentence}**" in (out / "results.md").read_text()
    inside = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert inside["results"] == document["results"]
    assert len(page) < 1_000_000 and not re.search(r"(src|href)=.http", page)


def test_the_same_command_continues_an_interrupted_comparison(compare, compared):
    out, _, rows = compared
    candidates = read_entries(out)["two, chain of 3"]["candidates"]
    path = out / "rows.jsonl"
    content = path.read_text()
    lines = content.splitlines(keepends=True)
    for partial, num in (("".join(lines[:2]), 2), (content[:-200], 5), (content[:-1], 5)):  # two killed while writing
        path.write_text(partial)
        compare()
        assert path.read_text().startswith("".join(lines[:num]))
        assert read_entries(out)["two, chain of 3"]["candidates"] == candidates
        for before, after in zip(rows, read_rows(out), strict=True):
            assert (before["number"], before["temperature"]) == (after["number"], after["temperature"])
            for name in ("one, tree of 3x2x4", "two, tree of 3x2x4", "ngram"):
                assert before["methods"][name]["drafted"]["tokens"] == after["methods"][name]["drafted"]["tokens"]
    path.write_text(content[:-200] + "\n")
    with pytest.raises(ValueError, match="line 6 is damaged: delete that line"):
        compare()
    path.write_text(content)


def test_other_settings_are_refused(compare, compared, run, refuse, folder, tmp_path):
    for argument, message in (
        ("max_new_tokens=7", r"max_new_tokens \(then 6, now 7\).*another out="),
        (f"checkpoint={folder}/one", "checkpoint"),
        ("proposer.ngram.max=4", r"proposers\.ngram\.max \(then 6, now 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(argument)
    shutil.copytree(folder / "two", tmp_path / "two")  # other tests use the original
    head = f"proposer.checkpoint={tmp_path}/two"
    arguments = ["checkpoint=", "proposers=auto", head, "limit=1", f"out={tmp_path}/out"]
    run(*arguments)
    step = tmp_path / "two" / "step_000001"
    tensors = safetensors.torch.load_file(step / "drafter.safetensors")
    tensors = {name: 2 * value if value.is_floating_point() else value for name, value in tensors.items()}
    safetensors.torch.save_file(tensors, step / "drafter.safetensors")
    refuse(r"drafter\.safetensors is damaged", *arguments)
    (step / files.CHECKSUMS).unlink()
    refuse(rf"files\.{step} \(then", *arguments)


def test_a_proposer_with_a_head_is_decoded_with_each_checkpoint(compare, folder):
    arguments = ["proposers=auto,ngram", "limit=1", "chains=2", "trees=", "decode.temperature=0"]
    for out, argument, expected in (
        ("every", "seed=0", {"auto with one", "auto with two", "ngram"}),
        ("named", f"proposer.checkpoint={folder}/two", {"auto", "ngram"}),
    ):
        compare(*arguments, argument, f"out={folder}/{out}")
        assert set(read_entries(folder / out)) == expected | {"one, chain of 2", "two, chain of 2"}


def test_depth_is_limited_by_the_drafter_and_an_adapting_drafter_has_its_own_target(compare, folder):
    compare(f"checkpoint={folder}/adapting", f"out={folder}/shallow", "limit=1")
    entries = read_entries(folder / "shallow", temperature=0)
    assert {"adapting, chain of 2", "adapting, tree of 2x2x4"} < set(entries)
    plain = read_rows(folder / "shallow")[0]["plain"]
    adapted = "the target adapted by adapting"
    assert set(plain) == {adapted, FROZEN} and plain[adapted]["tokens"] != plain[FROZEN]["tokens"]
    assert entries["adapting, chain of 2"]["adapted_target"] and not entries["ngram"]["adapted_target"]


def test_batch_sizes_are_compared_with_full_batches(run, tmp_path, monkeypatch):
    """Every token is a stop token here, which ignore_stop=true ignores. A further size is added to what is there."""
    monkeypatch.setattr(conversations, "list_stop_tokens", lambda *_: set(range(100_000)))
    for batches in ("1", "4,1"):
        run(f"batch={batches}", "chains=2", f"out={tmp_path}", "ignore_stop=true")
    document = read_document(tmp_path)
    assert list(document["settings"]["checkpoint"]) == ["one"] and document["settings"]["num_questions"] == 3
    # each as if it had been measured alone
    figures = [(entry["method"], entry["batch"], entry["num_prompts"]) for entry in document["results"]]
    assert figures == [("one, chain of 2", 1, 3), ("one, chain of 2", 4, 4)]
    rows = read_rows(tmp_path)
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
    suite = ["suite=mt_bench", f"prompts={talks}", "chains=2", "proposers=ngram", f"out={talks}/out"]
    printed = run(*suite, "decode.temperature=0,1")
    rows = {(row["temperature"], row["prompt"]["id"]): row for row in read_rows(talks / "out")}
    assert {name for _, name in rows} == {"81 turn 1", "81 turn 2", "82"}
    opened = loading.load_target(read_group(TargetOptions, "target", name=f"{folder}/target", dtype="float32"))
    for temperature in (0.0, 1.0):
        first, second, single = (rows[temperature, name] for name in ("81 turn 1", "81 turn 2", "82"))
        answer = opened.tokenizer.decode(first["plain"][FROZEN]["tokens"][0], skip_special_tokens=True)
        texts = {"user": "w3 w4", "assistant": answer}
        talk = [{"role": role, "content": text} for role, text in [*texts.items(), ("user", "w5 w6 w7")]]
        assert second["prompt"]["tokens"] == conversations.encode_prompt(opened.tokenizer, talk)
        assert first["prompt"]["question"] == second["prompt"]["question"] != single["prompt"]["question"]
    document = read_document(talks / "out")
    assert document["settings"]["suite"]["name"] == "mt_bench" and "2 questions of MT-Bench" in printed
    assert [entry["num_prompts"] for entry in document["results"]] == [3] * 4
    path = talks / "out" / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # killed before the second turns
    run(*suite, "decode.temperature=0,1")
    again = {(row["temperature"], row["prompt"]["id"]): row["prompt"] for row in read_rows(talks / "out")}
    assert again == {key: row["prompt"] for key, row in rows.items()}


def test_a_protocol_sets_options_that_are_not_given(run, talks):
    suite = ["suite=mt_bench", f"prompts={talks}", "protocol=deepspec"]
    printed = run(*suite, f"out={talks}/deepspec", "proposers=ngram")
    document = read_document(talks / "deepspec")
    settings = document["settings"]
    assert (settings["decode"]["temperature"], settings["seed"], settings["chains"]) == ("1.0", 980406, "7")
    assert settings["max_new_tokens"] == 6 and settings["template"] == {}  # given; a template without modes
    assert {entry["num_prompts"] for entry in document["results"]} == {2}  # first turns only
    assert "protocol deepspec (DeepSpec" in printed and len(find_tables(printed)) == 2
    run(*suite, f"out={talks}/other", "decode.depth=1", "auto=false")
    assert set(read_entries(talks / "other")) == {"one, chain of 1"}


def test_a_protocols_stop_texts_end_answers(run, refuse, folder, tmp_path, monkeypatch):
    write_rows(tmp_path / "test.jsonl", [{"question": f"w{n}", "answer": "w1"} for n in range(5, 12)])
    protocol = suites.read_protocol("specforge")
    suite = ["suite=gsm8k", f"prompts={tmp_path}", "protocol=specforge"]
    sizes = ["proposers=ngram", "limit=2", "max_new_tokens=24"]
    decode = load_tokenizer(f"{folder}/target").decode

    def answer(out, stop=None):
        if stop is not None:
            monkeypatch.setattr(suites, "read_protocol", lambda name: replace(protocol, stop={"gsm8k": [stop]}))
        run(*suite, *sizes, f"out={tmp_path}/{out}")
        row = read_rows(tmp_path / out)[0]
        drafted = row["methods"]["ngram"]["drafted"]
        assert drafted["tokens"] == row["plain"][FROZEN]["tokens"]
        return drafted["tokens"][0]

    complete = answer("complete")
    text = decode([complete[5]])
    cut = answer("cut", text)
    assert cut == complete[: len(cut)] and len(cut) <= 6 < len(complete)
    assert text in decode(cut) and text not in decode(cut[:-1])
    message = r"protocol=specforge: The stop string 'a<\|im_end\|>' holds the special token"
    with pytest.raises(ValueError, match=message):
        answer("refused", "a<|im_end|>")


# Prompts that were trained on


def test_prompts_that_a_head_was_trained_on_are_counted(run, run_script, folder, tmp_path):
    answer = {"role": "assistant", "content": "w2 w3 w4"}
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"w{n} w7"}, answer]} for n in range(4)]
    write_rows(tmp_path / "copied.jsonl", rows)
    for name in ("one", "two"):
        shutil.copytree(folder / name, tmp_path / name)
    digests = [digest for row in rows[2:] for digest in trained_prompts.digest_row(row)]
    trained_prompts.write_digests(tmp_path / "one", numpy.unique(numpy.array(digests)))
    heads = f"checkpoint={tmp_path}/one,{tmp_path}/two"
    copied = [f"prompts={tmp_path}/copied.jsonl", "chains=2", "max_new_tokens=2"]
    sentence = "2 of 4 prompts (first: q2) are among those that {} was trained on: its figures flatter"
    assert sentence.format("one") in " ".join(run(heads, *copied, f"out={tmp_path}/heads").split())
    run(*copied, "checkpoint=", "proposers=head", f"proposer.checkpoint={tmp_path}/one", f"out={tmp_path}/inside")
    run(*copied, f"checkpoint={tmp_path}/one", "chains=", f"out={tmp_path}/auto")
    assert "trained on" not in run(heads, f"out={tmp_path}/held")
    common = [heads, "target.dtype=float32", "hold_out=null"]
    run_script(replay, *common, f"out={tmp_path}/replay", f"answers={tmp_path}/copied.jsonl")
    run_script(choose, *common, f"out={tmp_path}/choose", f"prompts={tmp_path}/copied.jsonl", "loads=1", copied[-1])
    names = {"inside": "one/step_000001"} | dict.fromkeys(("heads", "auto", "replay", "choose"), "one")
    for out, head in names.items():
        assert read_document(tmp_path / out)["notes"] == [sentence.format(head)]
