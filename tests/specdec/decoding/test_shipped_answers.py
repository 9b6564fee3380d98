"""Shipped heads on their real target: the answers are those of transformers' generate, but for near ties."""

import pytest

from specdec import checkpoint
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import compute_top2_gap
from specdec.proposers.auto import AutoProposer
from specdec.target.model import Target, load_tokenizer
from specdec.text import conversations as data
from tests.support.commands import ROOT
from tests.support.decoding import greedy
from tests.support.loops import transformers_answer
from tests.support.targets import REAL_TARGET

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not REAL_TARGET.exists(), reason="needs make setup"),
]
NUM_NEW, ROWS = 16, 2


@pytest.fixture(scope="module")
def target():
    return Target.load(str(REAL_TARGET), dtype="float32")


@pytest.fixture(scope="module")
def prompts(target):
    tokenizer = load_tokenizer(target.name)
    found = data.load_prompts(str(ROOT / "data" / "prompts_heldout.jsonl"), tokenizer, split=None, limit=2)
    return sorted((prompt.tokens for prompt in found), key=len)


@pytest.fixture(scope="module")
def expected(target, prompts):
    return [transformers_answer(target, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_plain_chain_tree_and_auto_answer_as_generate(target, prompts, expected, head):
    drafter = checkpoint.load(checkpoint.resolve(ROOT / "checkpoints" / "shipped" / head), target)
    proposers = {"plain": None, "chain": Drafting(4).proposer(drafter), "tree": Drafting(4, 3, 10).proposer(drafter)}
    proposers["auto"] = AutoProposer.make_default(target, proposers["chain"])
    for name, proposer in proposers.items():
        decoder = greedy(target, proposer)
        found = dict(decoder.answers(prompts, NUM_NEW, batch_size=ROWS))
        gaps = [
            compute_top2_gap(target, prompt, answer, found[number].tokens[0], Sampling())
            for number, (prompt, answer) in enumerate(zip(prompts, expected))
        ]
        assert all(gap is None or gap < 1e-3 for gap in gaps), f"{name}: {gaps}"
    assert all(len(answer) > 8 for answer in expected)
