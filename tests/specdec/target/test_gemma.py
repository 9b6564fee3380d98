"""Gemma 3 270M with its real weights (scripts/get_target.py): 262,144 tokens, windows of 512, no chat template."""

import json

import pytest
import torch
from hydra.utils import instantiate
from transformers import AutoModelForCausalLM

from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target, load_tokenizer
from specdec.text import token_text
from tests.support.commands import ROOT
from tests.support.decoding import Scripted, oracle
from tests.support.drafters import load_head

FOLDER = ROOT / "targets" / "gemma3-270m"
NUM_NEW = 12
TREE = TreeShape(depth=4, width=3, nodes=10)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (FOLDER / "config.json").exists(),
        reason=f"{FOLDER} is not here: python scripts/get_target.py name=gemma3-270m (Google's Gemma terms of use)",
    ),
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(FOLDER))


@pytest.fixture(scope="module")
def gemma():
    return Target.load(str(FOLDER), dtype="float32")


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """A short text, one that an answer takes across the window, one beyond it."""
    rows = [json.loads(line) for line in (ROOT / "data" / "prompts_train.jsonl").read_text().splitlines()[:40]]
    text = token_text.encode_text(tokenizer, " ".join(row["prompt"] for row in rows))
    return [token_text.encode_text(tokenizer, "The capital of France is"), text[:505], text[:600]]


@pytest.fixture(scope="module")
def expected(prompts):
    """What transformers writes."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": []}
    tensors = [torch.tensor([prompt]) for prompt in prompts]
    written = [model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0] for tokens in tensors]
    return [answer[len(prompt) :].tolist() for prompt, answer in zip(prompts, written)]


def test_texts_begin_with_its_token_and_go_on_sensibly(tokenizer, prompts, expected):
    assert {prompt[0] for prompt in prompts} == {tokenizer.bos_token_id}
    assert tokenizer.bos_token_id not in prompts[0][1:]
    assert "the capital of" in tokenizer.decode(expected[0])


def head(gemma, name: str) -> HeadProposer:
    """An untrained one, of a few tokens."""
    torch.manual_seed(0)
    return HeadProposer(instantiate(load_head(name)["drafter"], gemma, vocab=torch.arange(0, 262_144, 512)), TREE)


def branching(text: list[int], start: int) -> Tree:
    """A tree in which every right token of the text has a wrong sibling before it."""
    tokens, parents = [text[start]], [-1]
    for right in text[start + 1 : start + 4]:
        last = len(tokens) - 1
        tokens, parents = [*tokens, 0, right], [*parents, last, last]
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), None)


DRAFTS = {
    "plain": lambda gemma, text: None,
    "chain": lambda gemma, text: Scripted([text], 3, oracle(3)),
    "tree": lambda gemma, text: Scripted([text], 3, branching),
    "eagle3": lambda gemma, text: head(gemma, "eagle3"),
    "mtp": lambda gemma, text: head(gemma, "mtp"),
}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_it_writes_what_transformers_writes(gemma, prompts, expected, drafts):
    for prompt, answer in zip(prompts, expected):
        decoder = Decoder(gemma, DRAFTS[drafts](gemma, prompt + answer), sampling=Sampling(), stop=set())
        found = decoder.generate([prompt], NUM_NEW)
        assert found.tokens == [answer]
        if drafts in ("chain", "tree"):
            assert found.accepted[0][:2] == [3, 3]
