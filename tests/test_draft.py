"""Draft models: what they start from, what is saved and exported of them, and texts that they write themselves."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conftest import chain_of, random_tokens
from specdec import attention, checkpoint, masks
from specdec.cache import UnrollCache
from specdec.decode import Decoder
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target
from test_layouts import export, make_form
from test_train import command, fit, folder, losses_of  # noqa: F401 (fixtures)
from train.data import Packs, Row
from train.onpolicy import OnPolicy

V = 61
VOCAB = torch.arange(0, V, 2)
SPEC = {"_target_": "specdec.heads.draft.Draft"}


def make_tokenizer(num_words: int, prefix: str = "w") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"{prefix}{n}": n for n in range(num_words)}, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=f"{prefix}0", eos_token=f"{prefix}1")


def make_folder(
    path: Path, *, rows: int = V, width: int = 32, tied: bool = False, prefix: str = "w", seed: int = 0
) -> Path:
    """A saved model of 57 words."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=rows, hidden_size=width, intermediate_size=48, num_hidden_layers=4, head_dim=8,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4, tie_word_embeddings=tied,
                         bos_token_id=None, eos_token_id=1, pad_token_id=None)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    make_tokenizer(57, prefix).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved_target(request, tmp_path_factory) -> Target:
    path = make_folder(tmp_path_factory.mktemp("target") / "target", tied=request.param)
    return Target.load(str(path), dtype="float32")


@torch.no_grad()
def said(drafter: Draft, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [B, T] -> logits [B, T, W] of step 1 of every slot"""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    h = torch.zeros(*tokens.shape, 0)
    _, readout = drafter.step(1, h, tokens, positions, masks.documents(torch.zeros_like(tokens)), UnrollCache())
    return drafter.logits(1, readout)


def text(num: int = 12) -> torch.Tensor:
    return torch.tensor([random_tokens(5, num, 57)])


def shake(drafter: Draft) -> Draft:
    """As if it had been trained."""
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


# What it starts from


def test_a_draft_with_all_layers_is_the_target(target):
    draft = Draft(target, copy_layers=list(range(target.num_layers))).double().eval()
    assert torch.equal(said(draft, text()), target.logits(target.read(text(), ()).final))
    decoder = Decoder(target, HeadProposer(draft, chain_of(3)), sampling=Sampling(0.0), stop=set())
    generation = decoder.generate([random_tokens(1, 5, V), random_tokens(2, 3, V)], 17)
    assert generation.accepted == [[3] * 4] * 2  # tau = 4


def test_layers_of_another_family_are_copied():
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, attn_implementation=attention.NAME)  # fmt: skip
    target = Target(Qwen3ForCausalLM(config), name="tiny")
    draft = Draft(target, copy_layers=[0, 1, 2, -1]).eval()
    assert torch.equal(said(draft, text()), target.logits(target.read(text(), ()).final))
    assert Draft(target).arguments()["config"]["model_type"] == "qwen3"


def test_default_layers_are_the_first_and_the_last(target):
    draft = Draft(target).double()
    for mine, theirs in ((0, 0), (1, 7)):
        wanted = target.decoder.layers[theirs].state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in draft.body.layers[mine].state_dict().items())
    assert not torch.equal(
        Draft(target, copy_layers=[]).body.layers[0].mlp.up_proj.weight, draft.body.layers[0].mlp.up_proj.weight.float()
    )
    assert [Draft(target, num_layers=n).config.num_hidden_layers for n in (1, 3, 8)] == [1, 3, 8]


def test_borrowed_embeddings_are_not_its_own(target):
    theirs = {value.data_ptr() for value in target.model.state_dict().values()}
    for draft in (Draft(target), Draft(target, borrow_embeddings=False), Draft(target, width=16)):
        assert not any(parameter.data_ptr() in theirs for parameter in draft.parameters())
    assert not any("embed" in name or "lm_head" in name for name in Draft(target).state_dict())
    own = Draft(target, borrow_embeddings=False).double()
    assert torch.equal(own.lm_head.weight, target.lm_head.weight) and own.lm_head.weight.requires_grad
    assert not target.lm_head.weight.requires_grad


def test_rows_of_a_trained_output_layer_are_never_stale(target):
    draft = Draft(target, borrow_embeddings=False, vocab=VOCAB).double()
    before = said(draft.eval(), text())
    optimizer = torch.optim.SGD(draft.parameters(), lr=1.0)
    draft.train().lm_head.weight.grad = torch.ones_like(draft.lm_head.weight)
    optimizer.step()
    after = said(draft.eval(), text())
    assert not torch.allclose(before, after)
    assert torch.equal(after, said(draft.train(), text()))


@pytest.mark.parametrize("rows", [57, V, 64])
def test_from_an_existing_model(saved_target, tmp_path, rows):
    path = make_folder(tmp_path / "small", rows=rows, width=24)
    draft = Draft(saved_target, model=str(path)).eval()
    logits = AutoModelForCausalLM.from_pretrained(path)(text()).logits
    shared = min(rows, V)
    torch.testing.assert_close(said(draft, text())[..., :shared], logits[..., :shared], atol=1e-5, rtol=0)
    assert said(draft, text()).argmax(-1).max() < rows and draft.num_parameters() > 2 * V * 24


def test_adapters_alone_are_trained_and_merge(saved_target, tmp_path):
    path = make_folder(tmp_path / "small", width=24, tied=True)
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    for origin in ({"model": str(path)}, {"num_layers": 2}, {"num_layers": 2, "borrow_embeddings": False}):
        draft = Draft(saved_target, lora=lora, vocab=VOCAB, **origin)
        plain = said(Draft(saved_target, vocab=VOCAB, **origin).eval(), text())
        assert all("lora_" in name for name, p in draft.named_parameters() if p.requires_grad)
        assert torch.equal(said(draft.eval(), text()), plain)  # adapters start at nothing
        logits = said(shake(draft).eval(), text())
        assert not torch.allclose(logits, plain, atol=1e-2)
        frozen = draft.decodable()
        torch.testing.assert_close(said(frozen, text()), logits, atol=1e-4, rtol=1e-4)
        assert not any("lora" in name or "base_layer" in name for name in frozen.state_dict())
        assert torch.equal(said(draft, text()), logits)  # and training goes on undisturbed


# What is saved and exported


ORIGINS = {
    "borrowed": {},
    "own": {"borrow_embeddings": False},
    "narrow": {"width": 16, "num_layers": 1},
    "existing": {"model": True},
    "existing-lora": {"model": True, "lora": {"r": 2}},
}


@pytest.fixture(params=ORIGINS, ids=str)
def draft(request, saved_target, tmp_path):
    origin = dict(ORIGINS[request.param])
    if "model" in origin:
        origin["model"] = str(make_folder(tmp_path / "small", width=24, tied=True))
    return shake(Draft(saved_target, vocab=VOCAB, **origin)).eval()


def test_a_checkpoint_needs_no_other_folder(draft, saved_target, tmp_path):
    checkpoint.save(tmp_path / "head", draft.decodable(), {**SPEC, "model": "small", "lora": {"r": 2}})
    shutil.rmtree(tmp_path / "small", ignore_errors=True)
    loaded = checkpoint.load(tmp_path / "head", saved_target)
    assert torch.equal(said(loaded, text()), said(draft.decodable(), text()))
    assert loaded.num_parameters() == sum(p.numel() for p in draft.decodable().parameters())


def test_export_is_an_ordinary_folder_that_generate_takes(draft, saved_target, tmp_path):
    before = saved_target.fingerprint()
    checkpoint.save(tmp_path / "head", draft.decodable(), SPEC)
    loaded = checkpoint.load(tmp_path / "head", saved_target)
    form = export(loaded, "transformers", tmp_path / "out", dtype=torch.float32)
    assert saved_target.fingerprint() == before and form.whole_vocabulary
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == make_tokenizer(57).get_vocab()
    with torch.no_grad():
        theirs = assistant(text()).logits
    torch.testing.assert_close(theirs[..., VOCAB], said(loaded, text()), atol=1e-5, rtol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(saved_target.name)
    prompt, settings = text(), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(
        model.generate(prompt, assistant_model=assistant, **settings), model.generate(prompt, **settings)
    )
    with pytest.raises(ValueError, match="exists"):
        export(loaded, "transformers", tmp_path / "out")


@pytest.mark.parametrize("other", ["vllm", "sglang", "gguf"])
def test_servers_take_the_same_folder(draft, other):
    layout, theirs = (make_form(draft, form).layout for form in ("transformers", other))
    theirs.check()
    assert layout.config == theirs.config and layout.shapes == theirs.shapes
    assert theirs.tensors.keys() == layout.tensors.keys()
    assert all(torch.equal(value, layout.tensors[name]) for name, value in theirs.tensors.items())


def test_export_of_another_dtype_leaves_the_target_alone(saved_target, tmp_path):
    export(Draft(saved_target).eval(), "transformers", tmp_path / "out", dtype=torch.bfloat16)
    assert saved_target.dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_export_refuses_heads_that_are_no_language_models(saved_target):
    with pytest.raises(ValueError, match="is for head=draft: Eagle is no language model"):
        make_form(Eagle(saved_target), "transformers")


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
        ({"model": "./nowhere"}, "head.drafter.model=./nowhere"),
        ({"copy_layers": [], "lora": {"r": 2}}, "worth keeping"),
        ({"width": 16, "lora": {"r": 2}}, "worth keeping"),
    ],
)
def test_wrong_combinations_are_refused(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        Draft(target, **arguments)


def test_another_tokenizer_is_refused(saved_target, tmp_path):
    with pytest.raises(ValueError, match="another tokenizer"):
        Draft(saved_target, model=str(make_folder(tmp_path / "small", prefix="v")))


# Texts that it writes itself


def make_packs() -> Packs:
    """Three rows, the last with an earlier answer."""
    masks_of = ([False] * 4 + [True] * 6, [False] * 7 + [True] * 2, [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4 + [False])  # fmt: skip
    return Packs([Row(str(n), "all", random_tokens(n, len(m), V), m) for n, m in enumerate(masks_of)], length=24)


def make_on_policy(target, *, fraction=1.0, temperature=1.0, stop=()) -> OnPolicy:
    draft = shake(Draft(target, vocab=VOCAB)).double()
    return OnPolicy(draft, make_packs(), length=24, fraction=fraction, temperature=temperature, stop=set(stop))


def test_the_draft_answers_the_same_prompts(target):
    """At temperature 0 each answer is what a loop over the whole text says, over the draft vocabulary."""
    on_policy = make_on_policy(target, temperature=0.0)
    batch = on_policy([0, 1])
    rows = [row for index in (0, 1) for row in on_policy.packs[index]]
    assert len(on_policy.packs) == 2 and len(rows) == 3
    place = 0
    for pack in range(2):
        start = 0
        for row in on_policy.packs[pack]:
            begin, end = {"0": (4, 10), "1": (7, 9), "2": (7, 11)}[row.id]
            tokens = row.tokens[:begin]
            while len(tokens) < end:
                logits = said(on_policy.drafter.eval(), torch.tensor([tokens]))[0, -1]
                tokens.append(int(VOCAB[logits.argmax()]))
            found = slice(start, start + end)
            assert batch.tokens[pack, found].tolist() == tokens != row.tokens[:end]
            assert batch.loss_mask[pack, found].tolist() == [False] * begin + [True] * (end - begin)
            assert batch.positions[pack, found].tolist() == list(range(end))
            start += end
            place += 1
        assert not batch.loss_mask[pack, start:].any() and (batch.documents[pack, start:] == -1).all()
    assert place == 3
    output = on_policy.features([0, 1], batch)
    assert output.final.shape == (2, 24, target.width) and output.features.shape[-1] == 0


def test_answers_follow_the_law_and_the_seed(target):
    on_policy = make_on_policy(target)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(on_policy([0, 1]).tokens)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    torch.manual_seed(0)
    prompt, num = random_tokens(8, 5, V), 4000
    first = torch.tensor(on_policy.write([prompt] * num, [1] * num))[:, 0]
    law = said(on_policy.drafter.eval(), torch.tensor([prompt]))[0, -1].softmax(-1)
    found = torch.bincount(first, minlength=V)[VOCAB] / num
    assert (found - law).abs().max() < 5 * (0.25 / num) ** 0.5


def test_answers_end_with_a_stop_token_and_outlast_a_round(target):
    free = make_on_policy(target).write([[1, 2]] * 3, [40, 50, 7])
    assert [len(answer) for answer in free] == [40, 50, 7]
    stopped = make_on_policy(target, stop=VOCAB.tolist()).write([[1, 2]] * 3, [40, 50, 7])
    assert [len(answer) for answer in stopped] == [1, 1, 1]


def test_the_fraction_is_that_of_micro_batches(target):
    on_policy = make_on_policy(target, fraction=0.3)
    torch.manual_seed(0)
    drawn = [on_policy([0]) is not None for _ in range(60)]
    assert 8 <= sum(drawn) <= 28


def test_a_run_on_its_own_texts_continues_with_the_same_losses(fit, monkeypatch):  # noqa: F811
    more = ("head=draft", "data.on_policy=0.5", "features.mode=cached", "features.folder=cache", "train.accumulation=2")
    taken = []
    call = OnPolicy.__call__

    def watched(self, indices):
        taken.append(call(self, indices))
        return taken[-1]

    monkeypatch.setattr(OnPolicy, "__call__", watched)
    fit("whole", *more)
    assert len(taken) == 8 and 0 < sum(batch is not None for batch in taken) < 8
    fit("corpus", *more, "data.on_policy=0")
    assert losses_of("corpus") != losses_of("whole")
    step = command.Trainer._train_step

    def dies(self):
        if self.step == 3:
            raise KeyError("power cut")
        return step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(command.Trainer, "_train_step", dies)
        fit("died", *more)
    assert fit("died", *more, "resume=true") == 0
    assert losses_of("died") == losses_of("whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("head=eagle", "data.on_policy=0.5"), "cannot write a text"),
        (("head=draft", "data.on_policy=1.5"), "a share"),
        (("head=draft", "head.drafter.copy_layers=[]", "head.drafter.lora={r: 2}"), "worth keeping"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(fit, overrides, message):  # noqa: F811
    with pytest.raises((ValueError, command.InstantiationException), match=message):
        fit("wrong", *overrides)


def test_adapters_train_by_the_command(fit, folder):  # noqa: F811
    lora = "head.drafter.lora={r: 2, target_modules: [q_proj, v_proj]}"
    assert fit("lora", "head=draft", lora) == 0
    target = Target.load(f"{folder}/target", dtype="float32")
    assert not any("lora" in name for name in checkpoint.load("checkpoints/lora", target).state_dict())
