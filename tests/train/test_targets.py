"""train.py with targets of other families: a head trains, and what cannot work is refused before the first step."""

import pytest
import torch

from specdec import checkpoint
from specdec.target.model import Target
from tests.support.families import FAMILIES, Family, make
from tests.support.runs import losses_of
from tests.support.targets import small_tokenizer

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """target_folder(name): a folder with a tiny target of this family and a tokenizer"""
    tokenizer = small_tokenizer()

    def save(name: str):
        folder = tmp_path_factory.mktemp("target")
        family = next(family for family in FAMILIES if str(family) == name)
        fields = {"vocab_size": len(tokenizer), **family.fields}
        make(Family(family.model_type, fields)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("mode", ["online", "cached"])
@pytest.mark.parametrize("name", ["lfm2", "gpt_oss"])
def test_a_head_trains_for_targets_of_other_families(fit, target_folder, name, mode):
    folder = target_folder(name)
    assert fit(name, f"target.name={folder}", "head=eagle3", f"features.mode={mode}") == 0
    assert len(losses_of(name)) == 4
    target = Target.load(str(folder), dtype="float32")
    assert all(torch.isfinite(value).all() for value in checkpoint.load(f"checkpoints/{name}", target).parameters())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lfm2", ["decode.width=2"], r"cannot verify a tree of drafts: set decode\.width=1"),
        ("bamba", ["decode.compile=true"], r"layers take more than a state, .*: set decode\.compile=false\.$"),
        ("mistral-window", ["decode.depth=6"], r"see 6 positions, and 6 drafts .*: lower decode\.depth= to 5 or less"),
        ("phi3-longrope", ["validation.max_new_tokens=150"], r"\(LongRoPE\), and this text would cross that length"),
        ("phi3-longrope", ["data.length=200"], r"data\.length=200: .* longer than 128 tokens \(LongRoPE\)"),
        ("gpt2", ["head.objective.losses={kl:0,smooth_l1:0}"], "give weights"),
        ("gpt2", ["decode.depth=2", "decode.nodes=1"], "cannot hold a path"),
        ("gpt2", ["target.shard=true"], r"^target\.shard=true lets a group .* there is one process: start several"),
        ("gpt2", ["target.shard=true", "target.device=auto"], r"^target\.shard=true"),
        ("gpt2", ["data.length=300"], r"data\.length=300: .* reads 256 positions"),
        ("llama4_text", ["validation.max_new_tokens=300"], r"256 positions: .* lower validation\.max_new_tokens="),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(fit, target_folder, name, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        fit("refused", f"target.name={target_folder(name)}", *settings)
    assert "resume=true" not in str(error.value)
