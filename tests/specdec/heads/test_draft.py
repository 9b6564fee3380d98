"""Draft models: the weights that they start from, their checkpoints, their exports and the options that are refused."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM

from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.target.model import Target
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import disturb, text_logits
from tests.support.exports import export, make_form
from tests.support.families import find_family, make
from tests.support.targets import save_word_model, word_tokenizer

pytestmark = pytest.mark.full

V = 61
VOCAB = torch.arange(0, V, 2)
SPEC = {"_target_": "specdec.heads.draft.Draft"}
TEXT = torch.tensor([random_tokens(5, 12, 57)])


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved_target(request, tmp_path_factory) -> Target:
    path = save_word_model(tmp_path_factory.mktemp("target") / "target", tied=request.param)
    return Target.load(str(path), dtype="float32")


# Initial weights


def test_a_draft_with_all_layers_equals_the_target(target):
    draft = Draft(target, copy_layers=list(range(target.num_layers))).double().eval()
    assert torch.equal(text_logits(draft, TEXT), target.logits(target.read(TEXT, ()).final))
    generation = greedy(target, HeadProposer(draft, chain_of(3))).generate(
        [random_tokens(1, 5, V), random_tokens(2, 3, V)], 17
    )
    assert generation.accepted == [[3] * 4] * 2  # tau = 4


def test_layers_of_another_family_are_copied():
    target = Target(make(find_family("qwen3"), attention.IMPLEMENTATION), name="tiny")
    draft = Draft(target, copy_layers=[0, 1, 2, -1]).eval()
    assert torch.equal(text_logits(draft, TEXT), target.logits(target.read(TEXT, ()).final))
    assert Draft(target).arguments()["config"]["model_type"] == "qwen3"


def test_default_layers_are_the_first_and_the_last(target):
    draft = Draft(target).double()
    for layer, target_layer in ((0, 0), (1, 7)):
        expected = target.decoder.layers[target_layer].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in draft.body.layers[layer].state_dict().items())
    random_layer = Draft(target, copy_layers=[]).body.layers[0]
    assert not torch.equal(random_layer.mlp.up_proj.weight, draft.body.layers[0].mlp.up_proj.weight.float())
    assert [Draft(target, num_layers=n).config.num_hidden_layers for n in (1, 3, 8)] == [1, 3, 8]


def test_borrowed_embeddings_are_not_parameters_of_the_draft(target):
    target_pointers = {value.data_ptr() for value in target.model.state_dict().values()}
    for draft in (Draft(target), Draft(target, borrow_embeddings=False), Draft(target, width=16)):
        assert not any(parameter.data_ptr() in target_pointers for parameter in draft.parameters())
    assert not any("embed" in name or "lm_head" in name for name in Draft(target).state_dict())
    own = Draft(target, borrow_embeddings=False).double()
    assert torch.equal(own.lm_head.weight, target.lm_head.weight) and own.lm_head.weight.requires_grad
    assert not target.lm_head.weight.requires_grad


def test_rows_of_a_trained_output_layer_are_up_to_date(target):
    draft = Draft(target, borrow_embeddings=False, vocab=VOCAB).double()
    before = text_logits(draft.eval(), TEXT)
    optimizer = torch.optim.SGD(draft.parameters(), lr=1.0)
    draft.train().lm_head.weight.grad = torch.ones_like(draft.lm_head.weight)
    optimizer.step()
    after = text_logits(draft.eval(), TEXT)
    assert not torch.allclose(before, after)
    assert torch.equal(after, text_logits(draft.train(), TEXT))


@pytest.mark.parametrize("rows", [57, V, 64])
def test_a_draft_from_an_existing_model_has_its_logits(saved_target, tmp_path, rows):
    path = save_word_model(tmp_path / "small", rows=rows, width=24)
    draft = Draft(saved_target, model=str(path)).eval()
    logits = AutoModelForCausalLM.from_pretrained(path)(TEXT).logits
    shared = min(rows, V)
    torch.testing.assert_close(text_logits(draft, TEXT)[..., :shared], logits[..., :shared], atol=1e-5, rtol=0)
    assert text_logits(draft, TEXT).argmax(-1).max() < rows and draft.num_parameters() > 2 * V * 24


@pytest.mark.parametrize("origin", [{"model": "small"}, {"num_layers": 2}, {"borrow_embeddings": False}], ids=str)
def test_adapters_alone_are_trained_and_merge(saved_target, tmp_path, origin):
    if "model" in origin:
        origin = {"model": str(save_word_model(tmp_path / "small", width=24, tied=True))}
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    draft = Draft(saved_target, lora=lora, vocab=VOCAB, **origin)
    plain = text_logits(Draft(saved_target, vocab=VOCAB, **origin).eval(), TEXT)
    assert all("lora_" in name for name, p in draft.named_parameters() if p.requires_grad)
    assert torch.equal(text_logits(draft.eval(), TEXT), plain)  # fresh adapters change nothing
    logits = text_logits(disturb(draft).eval(), TEXT)
    assert not torch.allclose(logits, plain, atol=1e-2)
    frozen = draft.frozen_copy()
    torch.testing.assert_close(text_logits(frozen, TEXT), logits, atol=1e-4, rtol=1e-4)
    assert not any("lora" in name or "base_layer" in name for name in frozen.state_dict())
    assert torch.equal(text_logits(draft, TEXT), logits)  # the draft in training is unchanged


# Checkpoints and exports

ORIGINS = {
    "borrowed": {},
    "own": {"borrow_embeddings": False},
    "narrow": {"width": 16, "num_layers": 1},
    "existing": {"model": True},
    "existing-lora": {"model": True, "lora": {"r": 2}},
}


@pytest.mark.parametrize("name", ORIGINS)
def test_a_checkpoint_needs_no_other_folder_and_its_export_is_one_that_generate_takes(saved_target, tmp_path, name):
    origin, before = dict(ORIGINS[name]), saved_target.fingerprint()
    if "model" in origin:
        origin["model"] = str(save_word_model(tmp_path / "small", width=24, tied=True))
    draft = disturb(Draft(saved_target, vocab=VOCAB, **origin)).eval().frozen_copy()
    checkpoint.save(tmp_path / "head", draft, {**SPEC, "model": "small", "lora": {"r": 2}})
    shutil.rmtree(tmp_path / "small", ignore_errors=True)
    loaded = checkpoint.load(tmp_path / "head", saved_target)
    assert torch.equal(text_logits(loaded, TEXT), text_logits(draft, TEXT))
    assert loaded.num_parameters() == sum(p.numel() for p in draft.parameters())

    form = export(loaded, "transformers", tmp_path / "out", dtype=torch.float32)
    assert saved_target.fingerprint() == before and form.whole_vocabulary
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == word_tokenizer(57).get_vocab()
    with torch.no_grad():
        logits = assistant(TEXT).logits
    torch.testing.assert_close(logits[..., VOCAB], text_logits(loaded, TEXT), atol=1e-5, rtol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(saved_target.name)
    settings = {"max_new_tokens": 20, "do_sample": False}
    assisted = model.generate(TEXT, assistant_model=assistant, **settings)
    assert torch.equal(assisted, model.generate(TEXT, **settings))
    with pytest.raises(ValueError, match="exists"):
        export(loaded, "transformers", tmp_path / "out")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 16, "borrow_embeddings": True}, "cannot be borrowed"),
        ({"width": 20}, "multiple of 8"),
        ({"width": 16, "copy_layers": [0]}, "target's shape"),
        ({"intermediate_size": 20, "copy_layers": [0]}, "target's shape"),
        ({"copy_layers": [0, 1], "num_layers": 3}, "a layer for each"),
        ({"copy_layers": [8]}, r"layers 0\.\.7"),
        ({"model": "x", "num_layers": 2}, "leave num_layers"),
        ({"model": "x", "borrow_embeddings": True}, "borrow_embeddings null"),
        ({"model": "./nowhere"}, r"^model=./nowhere: The folder"),
        ({"copy_layers": [], "lora": {"r": 2}}, "worth keeping"),
        ({"width": 16, "lora": {"r": 2}}, "worth keeping"),
    ],
)
def test_wrong_combinations_are_refused(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        Draft(target, **arguments)


def test_models_that_are_no_drafts_of_the_target_are_refused(saved_target, tmp_path):
    with pytest.raises(ValueError, match="another tokenizer"):
        Draft(saved_target, model=str(save_word_model(tmp_path / "small", prefix="v")))
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = GraniteConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0, bos_token_id=None)
    GraniteForCausalLM(config).save_pretrained(tmp_path / "scaled")
    word_tokenizer(57).save_pretrained(tmp_path / "scaled")
    with pytest.raises(ValueError, match="has scaled logits or unlike layers, and a draft's layers must keep entries"):
        Draft(saved_target, model=str(tmp_path / "scaled"))
    with pytest.raises(ValueError, match="format=transformers takes draft, and not Eagle"):
        make_form(Eagle(saved_target), "transformers")
