"""What commands say about the files they read and write, before anything is decoded."""

from specdec.options.command_line import read_command

import json

import datasets
import pytest

from scripts import answer, evaluate, show_data
from specdec.target.model import Target
from specdec.text import reading
from tests.support import find_model, save_target, write_prompts, write_rows

LONG = [{"id": "fine", "prompt": "Say hello."}, {"id": "toolong", "prompt": "word " * 3000}]
TWICE = [{"id": 5, "prompt": "a"}, {"prompt": "b"}, {"id": "5", "prompt": "c"}]
SHORT = ["target.device=cpu", "target.dtype=float32", "max_new_tokens=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", 2)
    saved = datasets.Dataset.from_list([{"id": "only", "prompt": "Say hello."}])
    datasets.DatasetDict({"test": saved, "dev": saved}).save_to_disk(folder / "two")
    return folder


@pytest.fixture
def run(folder, run_script):
    return lambda script, *given: run_script(script, f"target.name={folder}/target", *given)


# Splits


def test_the_split_of_prompts_is_an_option(folder, run, refuse, tmp_path):
    given, out = [f"prompts={folder}/two", "split=dev", "decode.temperature=0", *SHORT], tmp_path / "answers.jsonl"
    run(answer, *given, f"out={out}")
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["only@0"]
    run(evaluate, "proposers=ngram", *given, f"out={tmp_path}/out")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"][0]["num_prompts"] == 1
    refuse("two has no split 'train'; it has: test, dev", evaluate, f"prompts={folder}/two", "proposers=ngram", *SHORT)
    refuse("it has: test, dev", show_data, f"data={folder}/two")


def test_the_split_of_a_dataset_of_the_hub(monkeypatch):
    def load(source, config, *, split):
        if split not in ("train", "test"):
            raise ValueError(f'Unknown split "{split}". Should be one of ["train", "test"].')
        return split

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [reading.open_dataset("user/data", split) for split in (None, "test")] == ["train", "test"]
    with pytest.raises(ValueError, match=r"Could not read split 'dev' of 'user/data'.*one of ..train., .test"):
        reading.open_dataset("user/data", "dev")


# What is written


@pytest.mark.parametrize("script", [answer, evaluate], ids=lambda script: script.__name__)
def test_the_folder_of_a_result_is_made_before_anything_is_loaded(run, monkeypatch, tmp_path, script):
    monkeypatch.setattr(Target, "load", None)
    verb = script.__name__.removeprefix("scripts.")
    options = read_command(verb, find_model(verb), "", ["prompts=p.jsonl", f"out={tmp_path}/a/b/name"])
    assert options.out == f"{tmp_path}/a/b/name" and list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for out in ("/proc/none/name", f"{tmp_path}/file/name", f"{tmp_path}/{'x' * 300}/name"):
        with pytest.raises(ValueError, match=r"out=.* cannot be written .*Choose another"):
            run(script, "prompts=p.jsonl", f"out={out}")
    if script is answer:
        with pytest.raises(ValueError, match=r"out=.* is a folder: give"):
            run(script, "prompts=p.jsonl", f"out={tmp_path}")
    else:
        with pytest.raises(ValueError, match=r"out=.* is a file: give the name of a folder"):
            run(script, "proposers=ngram", f"out={tmp_path}/file")


# Prompts


@pytest.mark.parametrize(
    ("rows", "script", "given", "message"),
    [
        (LONG, evaluate, "proposers=ngram", r"rows\.jsonl, prompt toolong: A prompt of \d+ tokens, 4 new ones"),
        (LONG, answer, "seed=0", r"rows\.jsonl:2, prompt toolong@0: A prompt of"),
        ([], evaluate, "proposers=ngram", r"rows\.jsonl: No rows leave nothing to decode"),
        ([], answer, "seed=0", r"There are no prompts in .*rows\.jsonl"),
        (TWICE, answer, "seed=0", r"the same id, 5 \(.*rows\.jsonl:1; .*rows\.jsonl:3\)"),
    ],
)
def test_what_cannot_be_decoded_is_named_before_anything_is(refuse, tmp_path, rows, script, given, message):
    write_rows(tmp_path / "rows.jsonl", rows)
    refuse(message, script, given, f"prompts={tmp_path}/rows.jsonl", f"out={tmp_path}/out", *SHORT)
    assert script is evaluate or not (tmp_path / "out").exists() or not (tmp_path / "out").read_text()


def test_categories_of_any_type_are_in_reports(folder, run, tmp_path):
    values = [5, "math", None, True, 2.5, "[red]bold[/red]", {"k": 1}]
    write_rows(tmp_path / "mixed.jsonl", [{"prompt": "Say hello.", "category": value, "id": value} for value in values])
    source = f"prompts={tmp_path}/mixed.jsonl"
    printed = run(evaluate, "proposers=ngram", source, f"out={tmp_path}/a", *SHORT)
    names = ["5", "math", "all", "true", "2.5", "[red]bold[/red]", '{"k": 1}']
    (entry,) = json.loads((tmp_path / "a" / "results.json").read_text())["results"]
    assert list(entry["by_category"]) == sorted(names) and all(name in printed for name in names)


def test_a_row_that_cannot_be_shown_is_named_with_its_file(refuse, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"id": "r7", "messages": [{"role": "user", "content": "a"}]}])
    refuse(r"rows\.jsonl:1: Row r7 has no assistant turn, only user", show_data, f"data={tmp_path}/rows.jsonl")
