"""Tests of commands whose answers follow a grammar."""

from helpers import grammar_figures

import json

import pytest

from scripts import evaluate, generate
from specdec.core.grammar import Grammar
from tests.support import save_eagle, save_target

pytestmark = pytest.mark.full
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "numbers": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}},
    "required": ["sky", "numbers"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMARS = [{"json_schema": SCHEMA}, {"regex": "(sky|blue){2,4}"}, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("grammars")
    save_eagle(folder / "head", save_target(folder / "target"))
    rows = [{"id": f"r{n}", "prompt": f"Say {n}", "grammar": GRAMMARS[n % 3]} for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder, **more) -> list[str]:
    usual = {
        "checkpoint": folder / "head",
        "prompts": folder / "prompts.jsonl",
        "max_new_tokens": 60,
        "target.dtype": "float64",
    }
    return [f"{key}={value}" for key, value in (usual | more).items()]


def test_evaluate_counts_complete_and_valid_answers(run_script, folder):
    """Replay applies at temperature 0: it gives what was decoded."""
    out = folder / "report.json"
    more = {"decode.grammar": "rows", "decode.temperature": "0,1", "out": out, "auto": "false", "batch": 2}
    printed = run_script(evaluate, *arguments(folder, **more))
    report = json.loads(out.read_text())
    for figures in report["grammar"]:
        assert figures["answers"] == figures["complete"] == 4 and figures["json"] == figures["valid"] == 2
        assert 0.3 < figures["forced_share"] < 1 and figures["mask_ms"] > 0
        assert figures["invalid"] == {}
    assert "of 2 in JSON 2 are valid" in printed.replace("\n", " ")
    greedy, sampled = report["temperatures"]
    assert greedy["replayed_tau"] == pytest.approx(greedy["tau"]) and greedy["identical_outputs"] == 1
    assert "replayed_tau" not in sampled


def test_compare_decodes_all_ways_under_the_grammar(run_script, folder):
    more = {
        "proposers": "forced",
        "chains": 2,
        "trees": "",
        "decode.temperature": 0,
        "decode.grammar": "rows",
        "out": folder / "out",
    }
    run_script(evaluate, *arguments(folder, **more))
    rows = [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        (plain,) = row["plain"].values()
        assert all(cell["drafted"]["tokens"] == plain["tokens"] for cell in row["methods"].values())
    forced = [row["methods"]["forced"]["drafted"] for row in rows if row["number"] % 3 == 0]
    assert all(sum(each["accepted"][0]) > 0 for each in forced)


def test_generate_says_whether_the_grammar_is_complete(run_script, folder):
    common = [f"checkpoint={folder / 'head'}", "prompt=Say it", f"decode.grammar=json:{json.dumps(SCHEMA)}"]
    out = run_script(generate, *common, "max_new_tokens=80")
    assert '"sky": ' in out and "complete under the grammar" in out and "; the same answer" in out.replace("\n", " ")
    assert "raise max_new_tokens=" in run_script(generate, *common, "max_new_tokens=4").replace("\n", " ")


def test_what_cannot_be_followed_is_refused(refuse, folder):
    head, (prompts, *_) = f"checkpoint={folder / 'head'}", [f"prompts={folder / 'prompts.jsonl'}"]
    refuse(r"decode\.grammar=xml cannot be read: give json:SCHEMA", evaluate, head, prompts, "decode.grammar=xml")
    refuse("regex cannot be used", evaluate, head, prompts, "decode.grammar=regex:(a")
    refuse("rows is for commands with prompts=", generate, head, "prompt=a", "decode.grammar=rows")
    (folder / "free.jsonl").write_text('{"prompt": "a"}\n')
    refuse("no row has a grammar", evaluate, head, f"prompts={folder / 'free.jsonl'}", "decode.grammar=rows")
    (folder / "bad.jsonl").write_text(
        '{"prompt": "a", "grammar": {"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}}\n'
    )
    refuse(
        "Row 0: The json schema cannot be used",
        evaluate,
        head,
        f"prompts={folder / 'bad.jsonl'}",
        "decode.grammar=rows",
    )
    (folder / "worse.jsonl").write_text('{"prompt": "a", "grammar": "json"}\n')
    refuse(
        "worse.jsonl:1: A grammar must be an object",
        evaluate,
        head,
        f"prompts={folder / 'worse.jsonl'}",
        "decode.grammar=rows",
    )


@pytest.mark.parametrize(
    "text, fault",
    [('{"a": 1}', ""), ('{"a": "x"}', "$.a: 'x' is not of type 'integer'"), ("{", "Expecting property name")],
)
def test_what_is_wrong_with_an_answer_is_said(text, fault):
    schema = Grammar("json_schema", '{"properties": {"a": {"type": "integer"}}}')
    found = grammar_figures.find_fault(schema, text)
    assert found.startswith(fault) and bool(found) == bool(fault)
