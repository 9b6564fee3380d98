"""What is continued reads the same target, data and prompts as when it was begun, or says which one has changed."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from scripts import answer, evaluate
from specdec.core.resumable import Resumable, read_rows
from specdec.target.fingerprint import Fingerprint
from tests.support.commands import write_rows
from tests.support.runs import PowerCutError, before_steps, cut_power, train_overrides
from tests.support.targets import save_target

SHORT = ["target.device=cpu", "target.dtype=float32", "max_new_tokens=4", "decode.temperature=0"]


@pytest.fixture
def inputs(folder, tmp_path):
    """A folder of inputs of the test's own, which it may change."""
    inputs_folder = tmp_path / "inputs"
    inputs_folder.mkdir()
    for name in ("target", "train.jsonl", "prompts.jsonl"):
        (shutil.copytree if name == "target" else shutil.copyfile)(folder / name, inputs_folder / name)
    return inputs_folder


@pytest.fixture
def begin(inputs, fit):
    """begin("key=value", ...): a run that ends after its second step -> what continues it"""

    def begin(*options):
        overrides = [*train_overrides(inputs, "run", *options)[1:], "train.validate_every=9", "validation.auto=never"]
        with before_steps(cut_power(2)), pytest.raises(PowerCutError):
            fit("run", *overrides)
        return lambda: fit("run", *overrides, "resume=true", "validation.decode=end")

    return begin


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize("mode", ["online", "cached"])
def test_a_run_is_not_continued_with_other_inputs(inputs, begin, mode, tmp_path):
    go_on = begin(f"features.mode={mode}")
    state = tmp_path / "checkpoints" / "run" / "state" / "step_000002" / "state.json"
    before = {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()}

    def refused(message: str) -> None:
        saved = state.read_bytes()
        with pytest.raises(ValueError, match=message):
            go_on()
        assert state.read_bytes() == saved
        for path, content in before.items():
            path.write_bytes(content)

    save_target(inputs / "target", num_layers=8, seed=1)
    digests = r"the target \(digest v2\.\w{16} then, v2\.\w{16} now\)"
    message = rf"checkpoints/run was begun with other inputs.*{digests}; .*another run=NAME"
    refused(message if mode == "online" else r"cached features in .* were made with another target")
    if mode == "cached":
        record = next(tmp_path.rglob("about.json"))
        record.write_text(json.dumps(json.loads(record.read_text()) | {"target": "0" * 16}))
        return refused(r"The cached features in .* name their target .*of an earlier version.*: delete the folder\.$")
    change(inputs / "train.jsonl", "3 is followed by", "3 is trailed by")
    refused(r"the training data \(digest")
    change(inputs / "prompts.jsonl", "Count on.", "Count off.")
    refused(r"the held-out prompts \(digest")
    assert go_on() == 0


def test_what_is_kept_of_another_target_is_not_read(inputs, fit):
    """Answers to held-out prompts, which all runs share."""
    answers_folder = Path("answers")
    for number, run in enumerate(("one", "two", "three"), 1):
        fit(run, *train_overrides(inputs, run, f"validation.answers={answers_folder}", "validation.auto=never")[1:])
        assert len(list(answers_folder.glob("*.json"))) == min(number, 2)
        if number == 1:
            save_target(inputs / "target", num_layers=8, seed=1)


# Answers


@pytest.mark.parametrize("chat", [True, False], ids=["chat model", "base model"])
def test_answers_are_continued_with_the_same_prompts_only(inputs, run, tmp_path, chat):
    if not chat:
        (inputs / "target" / "chat_template.jinja").unlink()
    prompts, out = inputs / "p.jsonl", tmp_path / "a.jsonl"
    arguments = [f"target.name={inputs}/target", f"prompts={prompts}", f"out={out}", *SHORT]
    texts = ["Name a river.", "Name a tree.", "Name a river."]  # one of them twice
    write_rows(prompts, [{"prompt": text, "category": n} for n, text in enumerate(texts)])
    run(answer, *arguments)
    whole = read_rows(out)
    assert sorted(row["id"] for row in whole) == ["0@0", "1@0", "2@0"]

    write_rows(prompts, [{"prompt": text} for text in ["Name a stone.", *texts]])
    message = r"a\.jsonl has an answer 0@0 to another prompt than .*p\.jsonl:1 now: .*Put the prompts back"
    with pytest.raises(ValueError, match=message):
        run(answer, *arguments)
    assert read_rows(out) == whole

    write_rows(prompts, [{"prompt": text} for text in [*texts, "Name a stone."]])  # more of them may follow
    run(answer, *arguments)
    (added,) = read_rows(out)[3:]
    assert (added["id"], added["messages"][0]["content"] if chat else added["prompt"]) == ("3@0", "Name a stone.")

    write_rows(prompts, [{"id": n, "prompt": text} for n, text in reversed([*enumerate([*texts, "Name a stone."])])])
    assert "4 in " in run(answer, *arguments) and len(read_rows(out)) == 4  # ids say which is which


def test_answers_are_continued_by_the_same_target_only(inputs, run, tmp_path):
    """Nor are comparisons."""
    out, meta = tmp_path / "a.jsonl", tmp_path / "a.jsonl.meta.json"
    shared = [f"target.name={inputs}/target", f"prompts={inputs}/prompts.jsonl", *SHORT]
    arguments, comparison = [*shared, f"out={out}"], [*shared, f"out={tmp_path}/c", "proposers=ngram"]
    run(answer, *arguments)
    run(evaluate, *comparison)
    first_answer = out.read_text().splitlines(keepends=True)[0]
    out.write_text(first_answer)
    shutil.copytree(inputs / "target", inputs / "kept")
    save_target(inputs / "target", num_layers=8, seed=1)
    for script, script_arguments in ((answer, arguments), (evaluate, comparison)):
        with pytest.raises(ValueError, match=r"\.jsonl was begun with another target, under the same name"):
            run(script, *script_arguments)
    assert out.read_text() == first_answer
    shutil.rmtree(inputs / "target")
    (inputs / "kept").rename(inputs / "target")
    template = inputs / "target" / "chat_template.jinja"
    whole = template.read_text()
    change(template, "You are a helpful", "You are an")
    with pytest.raises(ValueError, match="begun with another tokenizer or chat template, under the same name"):
        run(answer, *arguments)
    template.write_text(whole)
    run(answer, *arguments)
    recorded = json.loads(meta.read_text())["inputs"]
    assert len(read_rows(out)) == 2 and set(recorded) == {"target", "tokenizer_or_chat_template"}


def test_inputs_are_recorded_where_none_are(tmp_path):
    record, rows = tmp_path / "meta.json", tmp_path / "rows.jsonl"
    open_results = functools.partial(Resumable, record, rows, {"seed": 0}, advice="Choose another.")
    open_results().check_inputs(Fingerprint.from_text("a"))
    third = open_results()
    third.check_inputs(Fingerprint.from_text("b"))  # there were no rows yet
    third.append({"id": 1})
    with pytest.raises(ValueError, match=r"rows\.jsonl was begun with another target.*Choose another"):
        open_results().check_inputs(Fingerprint.from_text("a"))
    open_results().check_inputs(Fingerprint.from_text("b"), other="c")
    with pytest.raises(ValueError, match="another other"):
        open_results().check_inputs(other="d")
