"""Tests of scripts/compare.py on two tiny checkpoints: figures, interruption, refusals."""

from helpers import comparison
from helpers.loading import FROZEN

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from scripts import compare
from specdec import checkpoint
from specdec.core import files
from specdec.core.generation import Generation
from specdec.heads.medusa import Medusa2
from specdec.measuring.comparing import results_of
from specdec.measuring.figures import tau_difference
from specdec.measuring.measurement import Prompt, PromptResult
from specdec.measuring.report import summarise
from tests.support import save_eagle, save_target, write_prompts

pytestmark = pytest.mark.slow

TRAINING = {"tokens": 2_000_000, "tokens_per_second": 1234.5, "peak_memory": 2**30, "seconds": 1620.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    target = save_target(folder / "target")
    report = {**summarise(random_results(0), depth=4, temperature=1.0).to_json(), "training": TRAINING}
    for seed, (name, extra) in enumerate([("one", {"report.json": report}), ("two", {})]):
        save_eagle(folder / name / "step_000001", target, seed=seed, extra=extra)
        (folder / name / "best").write_text("step_000001\n")
    shape = {"num_heads": 2, "lora_rank": 2}
    torch.manual_seed(0)
    adapting = Medusa2(target, **shape)  # from here on `target` is adapted
    for name, parameter in adapting.named_parameters():
        if "lora" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    spec = {"_target_": "specdec.heads.medusa.Medusa2", **shape}
    checkpoint.save(folder / "adapting" / "step_000001", adapting.decodable(), spec)
    (folder / "adapting" / "best").write_text("step_000001\n")
    write_prompts(folder / "prompts.jsonl", 3)
    return folder


@pytest.fixture
def run(folder, run_script):
    def run(*arguments):
        values = {
            "checkpoint": f"{folder}/one,{folder}/two",
            "proposers": "ngram",
            "prompts": f"{folder}/prompts.jsonl",
            "out": f"{folder}/out",
            "max_new_tokens": "6",
            "chains": "3",
            "trees": "3x2x4",
            "target.dtype": "float32",
        }
        values |= dict(argument.split("=", 1) for argument in arguments)
        return run_script(compare, *(f"{key}={value}" for key, value in values.items()))

    return run


@pytest.fixture
def compared(run, folder):
    """The folder of a finished comparison, and its lines."""
    run()
    return folder / "out", [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]


def cells(out: Path, title: str) -> dict[str, dict[str, str]]:
    """Table `title` of table.md as run -> column -> cell."""
    text = (out / "table.md").read_text().split(f"### {title}")[1].split("\n\n")[1]
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return {line[0]: dict(zip(header, line)) for line in lines}


def rows(lines: list[dict], name: str, temperature: float):
    return results_of(lines, name=name, baseline=FROZEN, temperature=temperature)


def test_the_table_holds_the_figures_of_summarise(compared):
    out, lines = compared
    assert len(lines) == 6 and (out / "comparison.png").stat().st_size > 10_000
    table = cells(out, "Comparison")
    assert set(table) == {"one, chain of 3", "one, tree of 3x2x4", "two, chain of 3", "two, tree of 3x2x4", "ngram"}
    for name in table:
        for temperature in (0.0, 1.0):
            prompt_results = rows(lines, name, temperature)
            assert [row.prompt.id for row in prompt_results] == ["0", "1", "2"]
            summary = summarise(prompt_results, depth=3, temperature=temperature)
            column = f"T={temperature:g}"
            assert table[name][f"tau {column}"] == comparison.figure(summary, "tau")
            assert table[name][f"speedup {column}, tokens/s"].startswith(comparison.figure(summary, "speedup"))
            assert (summary.replayed_tau is not None) == ("chain" in name)
            if temperature == 0:
                assert summary.identical_outputs == 1
    assert (
        table["one, chain of 3"]["tokens seen"] == "2.00 M" and table["one, tree of 3x2x4"]["peak memory"] == "1.00 GiB"
    )
    assert table["two, tree of 3x2x4"]["tokens seen"] == table["ngram"]["trained parameters"] == "-"


def test_at_temperature_0_replayed_tau_equals_tau(compared):
    summary = summarise(rows(compared[1], "one, chain of 3", 0.0), depth=3, temperature=0.0)
    assert summary.replayed_tau == pytest.approx(summary.tau)


def random_results(seed: int) -> list[PromptResult]:
    """Five prompts of 3 to 7 rounds with 0 to 4 accepted drafts each."""
    generator = torch.Generator().manual_seed(seed)
    counts = [torch.randint(5, (num,), generator=generator).tolist() for num in range(3, 8)]
    plain = Generation([[0] * 9], [[0] * 8], 1.0)
    return [
        PromptResult(Prompt("", "", [0]), plain, Generation([[0]], [accepted]), 1.0, [], None) for accepted in counts
    ]


def test_the_difference_of_a_run_to_itself_is_zero():
    assert tau_difference(random_results(0), random_results(0)) == (0.0, [0.0, 0.0])


def test_differences_are_paired():
    rows, others = random_results(0), random_results(1)
    (difference, interval), (reversed_difference, reversed_interval) = (
        tau_difference(rows, others),
        tau_difference(others, rows),
    )
    assert difference == -reversed_difference != 0
    assert interval == pytest.approx([-end for end in reversed_interval[::-1]])
    taus = [summarise(results, depth=4, temperature=1.0).tau for results in (rows, others)]
    assert difference == pytest.approx(taus[0] - taus[1])
    longer = [
        replace(row, drafted=replace(row.drafted, accepted=[[a + 1 for a in row.drafted.accepted[0]]])) for row in rows
    ]
    assert tau_difference(longer, rows)[1] == pytest.approx([1.0, 1.0])  # unpaired, it would be wide


def test_the_same_command_continues_an_interrupted_comparison(run, compared):
    out, lines = compared
    path = out / "rows.jsonl"
    finished = path.read_text().splitlines(keepends=True)[:2]
    path.write_text("".join(finished))
    assert "2 of 6 prompts" in run()
    continued = path.read_text()
    assert continued.startswith("".join(finished)) and len(continued.splitlines()) == 6
    for before, after in zip(lines, map(json.loads, continued.splitlines())):
        assert (before["number"], before["temperature"]) == (after["number"], after["temperature"])
        for name in ("one, tree of 3x2x4", "two, tree of 3x2x4", "ngram"):
            tokens = [line["methods"][name]["drafted"]["tokens"] for line in (before, after)]
            assert tokens[0] == tokens[1]


def test_a_damaged_line_is_named(run, compared):
    path = compared[0] / "rows.jsonl"
    content = path.read_text()
    path.write_text(content[:-200] + "\n")
    with pytest.raises(ValueError, match="line 6 is damaged: delete that line"):
        run()
    for partial in (content[:-200], content[:-1]):  # killed while the last line was written
        path.write_text(partial)
        assert "5 of 6 prompts" in run()
        assert (
            path.read_text().startswith(content[: content[:-1].rindex("\n") + 1])
            and len(path.read_text().splitlines()) == 6
        )
    path.write_text(content)


def test_other_settings_are_refused(run, compared, folder, tmp_path):
    with pytest.raises(ValueError, match=r"max_new_tokens \(then 6, now 7\).*another out="):
        run("max_new_tokens=7")
    with pytest.raises(ValueError, match="checkpoint"):
        run(f"checkpoint={folder}/one")
    with pytest.raises(ValueError, match=r"proposers\.ngram\.max \(then 6, now 4\)"):
        run("proposer.ngram.max=4")
    shutil.copytree(folder / "two", tmp_path / "two")  # other tests use the original
    arguments = ["checkpoint=", "proposers=merged", f"proposer.checkpoint={tmp_path}/two", "limit=1"]
    arguments += ["decode.temperature=0", f"out={tmp_path}/changed"]
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


def test_the_page_says_what_the_tables_say(compared):
    out, _ = compared
    text = (out / "comparison.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    table = cells(out, "Comparison")
    assert set(data["reports"]) == {"0", "1"} and set(data["reports"]["0"]) == set(table)
    shown = re.findall(r"<tr><td>([^<]+)</td><td>(0|1)</td><td>([\d.]+) \((.*?)\)</td>", text)
    assert len(shown) == 2 * len(table)
    for name, temperature, tau, interval in shown:
        assert f"{tau} ({interval})" == table[name][f"tau T={temperature}"]
        assert f"{data['reports'][temperature][name]['tau']:.2f}" == tau
    assert len(text) < 1_000_000 and not re.search(r"(src|href)=.http", text)


def test_a_proposer_with_a_head_is_decoded_with_each_checkpoint(run, folder):
    run("proposers=merged,ngram", f"out={folder}/each", "limit=1", "chains=2", "trees=", "decode.temperature=0")
    found = set(cells(folder / "each", "Comparison"))
    assert {"merged with one", "merged with two", "ngram"} < found
    (row,) = map(json.loads, (folder / "each" / "rows.jsonl").read_text().splitlines())
    of_merged = [{"merged with one", "merged with two"} & set(part) for part in row.values() if isinstance(part, dict)]
    assert {"merged with one", "merged with two"} in of_merged
    run("proposers=merged,ngram", f"proposer.checkpoint={folder}/two", f"out={folder}/named", "limit=1", "chains=2", "trees=",
        "decode.temperature=0")  # fmt: skip
    assert "merged" in cells(folder / "named", "Comparison")


def test_depth_is_limited_by_the_drafter_and_an_adapting_drafter_has_its_own_target(run, folder):
    printed = run(f"checkpoint={folder}/adapting", f"out={folder}/shallow", "limit=1")
    table = cells(folder / "shallow", "Comparison")
    name = "adapting"
    depths = {key: line["depth"] for key, line in table.items() if key.startswith(f"{name}, ")}
    assert set(depths.values()) == {"2"} and len(depths) == 2
    line = json.loads((folder / "shallow" / "rows.jsonl").read_text().splitlines()[0])
    adapted = f"the target adapted by {name}"
    assert set(line["plain"]) == {adapted, FROZEN} and f"plain decoding of {adapted}" in printed
    assert comparison.ADAPTED in (folder / "shallow" / "table.md").read_text()
    assert line["plain"][adapted]["tokens"] != line["plain"][FROZEN]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=", "proposers="], "nothing to compare"),
        (["proposers=ngrams"], "no proposer 'ngrams'; there are: .*ngram"),
        (["proposers=ngram,ngram"], "list each once"),
        (["checkpoint=", "proposers=merged"], "needs a trained head"),
        (["proposer.ngram.most=3"], "ngram has the settings"),
        (["proposer.max=3"], "proposer.NAME.KEY"),
        (["proposer.ngram.max=none"], "proposer.ngram.max=none must be a whole number, such as"),
        (["checkpoint=nowhere"], "does not exist"),
        (["checkpoint={folder}/one,{folder}/one"], "Two runs are called one"),
        (["checkpoint={folder}/target"], "does not exist"),
        (["trees=4x3"], "DEPTHxWIDTHxNODES, such as"),
        (["decode.temperature=hot"], "give numbers"),
        (["chains=", "trees="], "both empty: give a chain"),
        (["checkpoint={folder}/adapting", "proposers=merged"], "adapts its target, which the other proposers share"),
        (["proposer.ngram.checkpoint={folder}/one"], "ngram holds no trained head"),
        (["limit=0"], "limit=0 must be a whole number of 1 or more, or null"),
    ],
)
def test_wrong_arguments_are_refused(refuse, folder, arguments, message):
    refuse(message, *(argument.format(folder=folder) for argument in arguments))
