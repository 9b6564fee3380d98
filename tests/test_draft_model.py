"""An existing small causal LM as the drafter: what is loaded of it, what is refused, and that its cache keeps up."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import random_tokens
from helpers import proposers
from specdec.decode import Decoder
from specdec.evaluate import Drafting
from specdec.heads.draft import Draft
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target
from test_draft import make_folder

V, DEPTH, NUM_NEW = 61, 3, 21
CHAIN = Drafting(DEPTH)
LENGTHS = (5, 12, 2)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target") / "target", rows=V)


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return Target.load(str(target_folder), dtype="float64")


@pytest.fixture(scope="module", params=["itself", "shaken", "another"])
def model(request, target_folder, tmp_path_factory) -> Path:
    """Always right, often right and seldom right."""
    path = make_folder(tmp_path_factory.mktemp("draft") / request.param, rows=V, width=24)
    if request.param != "another":
        lm = AutoModelForCausalLM.from_pretrained(target_folder)
        torch.manual_seed(0)
        for parameter in lm.parameters():
            parameter.data += (0.0 if request.param == "itself" else 0.03) * torch.randn_like(parameter)
        lm.save_pretrained(path)
    return path


def propose_with(target: Target, model: Path, drafting: Drafting = CHAIN) -> HeadProposer:
    return proposers.build("draft", target, settings={"model": str(model)}, drafting=drafting, checkpoint=None)


def prompts() -> list[list[int]]:
    return [random_tokens(seed, num, 57) for seed, num in enumerate(LENGTHS)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_loaded_once_and_in_the_targets_dtype(target_folder, tmp_path, dtype, tied):
    target = Target.load(str(target_folder), dtype=dtype)
    model = make_folder(tmp_path / "small", width=24, tied=tied)
    drafter = propose_with(target, model).drafter
    parameters = list(drafter.parameters())
    assert {parameter.dtype for parameter in parameters} == {target.dtype} and drafter.dtype == target.dtype
    assert not any(parameter.requires_grad for parameter in parameters) and not drafter.training
    saved = AutoModelForCausalLM.from_pretrained(model, dtype=target.dtype)
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in saved.parameters())
    held = {p.data_ptr() for p in parameters}
    assert len(held) == len(parameters) and not held & {p.data_ptr() for p in target.model.parameters()}
    assert all(name.endswith("inv_freq") and buffer.dtype == torch.float32 for name, buffer in drafter.named_buffers())


@torch.no_grad()
def continued(lm, text: list[int], num: int) -> list[int]:
    """Greedily, the whole text read again for every token."""
    tokens = [*text]
    for _ in range(num):
        tokens.append(int(lm(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


def test_its_cache_keeps_up(target, model, monkeypatch):
    """After a round of any length it holds the whole text (methods, 1.5), and drafts what the LM says behind it."""
    proposer = propose_with(target, model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    texts, accepted, trees = prompts(), [], []
    propose = proposer.propose

    def watched(*arguments):
        trees.append(propose(*arguments))
        assert proposer.cache.lengths.tolist() == proposer.cache.known == [len(text) for text in texts]
        assert proposer.cache.pending == 0
        return trees[-1]

    monkeypatch.setattr(proposer, "propose", watched)
    plain = Decoder(target, None, sampling=Sampling(), stop=set()).generate(texts, NUM_NEW).tokens
    for emitted in Decoder(target, proposer, sampling=Sampling(), stop=set()).stream(texts, NUM_NEW):
        if trees:
            for text, tree in zip(texts, trees[-1].tokens.tolist()):
                assert tree == [text[-1], *continued(lm, text, DEPTH)]
        if not all(map(len, emitted.tokens)):
            break  # an answer is full, and its text goes on unseen
        for text, tokens in zip(texts, emitted.tokens):
            text += tokens
        accepted += emitted.accepted
    assert all(
        text[num : num + NUM_NEW] == answer[: len(text) - num] for text, num, answer in zip(texts, LENGTHS, plain)
    )
    wanted = {"itself": {0, DEPTH}, "shaken": set(range(DEPTH + 1)), "another": {0}}[model.name]
    assert wanted <= set(accepted)
    if model.name == "itself":
        assert accepted[len(LENGTHS) :] == [DEPTH] * (len(accepted) - len(LENGTHS))


@pytest.mark.parametrize("rows", [57, 64])
def test_a_model_with_more_or_fewer_rows(target, tmp_path, rows):
    model = make_folder(tmp_path / "small", rows=rows, width=24)
    proposer = propose_with(target, model, Drafting(3, width=2, nodes=5))
    plain = Decoder(target, None, sampling=Sampling(), stop=set()).generate(prompts(), NUM_NEW)
    drafted = Decoder(target, proposer, sampling=Sampling(), stop=set()).generate(prompts(), NUM_NEW)
    assert drafted.tokens == plain.tokens and proposer.drafter.vocab_size == V
    sampled = Decoder(target, propose_with(target, model), sampling=Sampling(1.0), stop=set())
    assert [len(answer) for answer in sampled.generate(prompts(), 9).tokens] == [9] * len(LENGTHS)


def test_mistakes_are_answered_with_the_option_that_was_set(target, tmp_path):
    """Whoever drafts with a model names it by proposer.model, whoever trains one by head.drafter.model."""
    other = make_folder(tmp_path / "other", prefix="v")
    bare = make_folder(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    for path, message in ((other, "has another tokenizer than"), (bare, "could not be"), (tmp_path / "no", "does not")):
        with pytest.raises(ValueError, match=f"^model={path}.*{message}"):
            propose_with(target, path)
        with pytest.raises(ValueError, match=f"^model={path}.*{message}"):
            Draft(target, model=str(path))
    with pytest.raises(ValueError, match=r"^Give proposer\.model=\.\.\."):
        proposers.build("draft", target, settings={}, drafting=Drafting(2), checkpoint=None)
