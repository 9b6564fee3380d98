"""Tests of scripts/generate.py on a tiny checkpoint: what is printed, and the defaults of decoding."""

from dataclasses import asdict

import hydra
import pytest
from omegaconf import OmegaConf

from scripts import generate
from specdec.core import progress
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.measuring.streamed_answer import print_comparison
from specdec.options.command_defaults import read_group
from specdec.options.decoding import DecodeOptions
from tests.support.commands import ROOT
from tests.support.drafters import save_eagle
from tests.support.targets import save_target


@pytest.mark.full
def test_generate_prints_the_answer_of_plain_decoding(run_script, tmp_path):
    save_eagle(tmp_path / "head", save_target(tmp_path / "target"))
    prompt = "prompt=Say \"hello, world\" = 'hi'"
    printed = run_script(generate, f"checkpoint={tmp_path}/head", "target.dtype=float32", prompt, "max_new_tokens=8")
    assert "tau" in printed and "Both answers are the same." in printed


@pytest.mark.parametrize("longer", [[1, 2, 4, 5], [1, 2]])
def test_generate_says_where_and_why_answers_differ(longer, capsys):
    drafted, plain = (Generation([tokens], [[1]], seconds=1.0) for tokens in ([1, 2, 3], longer))
    print_comparison(drafted, plain, Sampling(), 0.125, progress.Results())
    printed = " ".join(capsys.readouterr().out.split())
    assert ". One answer does not show whether the gain is certain" in printed
    assert "The answers differ from token 3 on: the target's two best logits are 0.125 apart there, and" in printed


def test_defaults_of_decoding_agree():
    options = read_group(DecodeOptions, "decode")
    assert options.make_drafting() == Drafting() and options.make_sampling() == Sampling()
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = hydra.compose("train")
    assert OmegaConf.to_container(config.decode) == asdict(Drafting()) | {"depth": "auto"}
