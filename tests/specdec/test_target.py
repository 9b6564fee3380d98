"""Models as targets: several families decode correctly, and models that cannot be targets are refused."""

import sys

import pytest
import torch
import transformers

from specdec.decode import Decoder
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle3
from specdec.heads.medusa import Medusa2
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target, load_tokenizer
from specdec.tree import TreeShape
from tests.support import make_target

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def save(folder, family, **arguments):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, initializer_range=0.4, **arguments)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Qwen2", {}), ("Qwen3", {"head_dim": 16}),
     ("Mistral", {"sliding_window": None}), ("Olmo2", {})],
)  # fmt: skip
def test_families_decode_like_their_own_generate(tmp_path, family, arguments):
    target = Target.load(save(tmp_path, family, **arguments), dtype="float64")
    head = Eagle3(target, target_layers=[1, 4, 6]).double()
    prompt = [5, 9, 2, 44, 17]
    reference = target.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 5, dtype=torch.long),
                                   do_sample=False, max_new_tokens=12)[0, 5:].tolist()  # fmt: skip
    for shape in (None, TreeShape(3, 1, 3), TreeShape(3, 3, 7)):
        proposer = HeadProposer(head, shape) if shape else None
        assert Decoder(target, proposer, sampling=Sampling(0), stop=set()).generate([prompt], 12).tokens == [reference]


def test_hidden_states_are_numbered_as_in_transformers(tmp_path):
    target = Target.load(save(tmp_path, "Llama"), dtype="float64")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    states = target.model(tokens, output_hidden_states=True).hidden_states
    output = target.read(tokens, target.layer_ids([0, 3, -1]))
    torch.testing.assert_close(output.features, torch.cat([states[0], states[3], states[8]], dim=-1))
    torch.testing.assert_close(target.logits(output.final), target.model(tokens).logits)


def test_the_fingerprint_depends_on_weights_and_not_on_their_dtype(tmp_path):
    folder = save(tmp_path / "one", "Llama")
    first = Target.load(folder, dtype="float32")
    assert first.fingerprint() == Target.load(folder, dtype="bfloat16").fingerprint()
    with torch.no_grad():
        first.decoder.layers[5].mlp.down_proj.weight[0, 0] += 0.1
    assert first.fingerprint() != Target(first.model, name="changed").fingerprint()


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("Mistral", {"sliding_window": 16}, "cannot be cut back"),
        ("Gemma2", {}, "cannot be cut back"),
        ("Cohere", {"logit_scale": 0.0625}, "not lm_head"),
    ],
)
def test_targets_that_cannot_work_are_refused(tmp_path, family, arguments, message):
    with pytest.raises(ValueError, match=message):
        Target.load(save(tmp_path, family, **arguments), dtype="float32")


@pytest.mark.parametrize("layers", [[1, 1], [3, 2], [0, 9], [-10]])
def test_layers_out_of_order_or_range_are_refused(target, layers):
    with pytest.raises(ValueError, match="strictly increasing"):
        target.layer_ids(layers)


def test_messages_for_missing_folders_name_the_fix(tmp_path):
    with pytest.raises(
        ValueError, match=r"^The folder targets/nothing-here does not exist\. Give the folder of a model"
    ):
        Target.load("targets/nothing-here")
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="could not be loaded"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("make", [lambda target: Medusa2(target), lambda target: Draft(target, lora={"r": 2})])
def test_a_missing_peft_names_the_extra_to_install(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs the package peft: pip install 'specdec\[train\]'\.$"):
        make(make_target(6, num_layers=2))
