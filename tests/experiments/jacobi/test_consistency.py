"""Consistency training against a naive version: one block, one state or one token at a time."""

import itertools

import pytest
import torch
from hydra.utils import instantiate

from specdec import checkpoint
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.experiments.jacobi.head import Consistency
from specdec.experiments.jacobi.objective import ConsistencyObjective, ContinuationReader, cut_blocks, draw_guesses
from specdec.heads.base import Drafter
from specdec.target.adapter import disable_adapter
from specdec.text.conversations import Row
from tests.support.decoding import random_tokens
from tests.support.drafters import load_head
from tests.support.targets import make_target
from train.data.batches import collate

pytestmark = pytest.mark.full

V, N = 11, 4
CONFIG = load_head("consistency")
SETTINGS = {"losses": {"consistency": 0.7, "original": 0.4}, "depth": N, "passes": N - 1}


def make_row(seed: int, num_prompt: int, num_answer: int) -> Row:
    tokens = random_tokens(seed, num_prompt + num_answer, V)
    return Row(str(seed), "all", tokens, [False] * num_prompt + [True] * num_answer)


PACKS = [[make_row(0, 3, 9), make_row(1, 1, 5)], [make_row(2, 6, 7)]]
BATCH = collate(PACKS, length=20, pad_token=0)


def make() -> Consistency:
    """A drafter with a random adapter."""
    drafter = instantiate({**CONFIG["drafter"], "num_drafts": N}, make_target(V, num_layers=2), vocab=None).double()
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return drafter


def each_block(starts):
    """Yields (row, block number, the list of tokens before the block) for every block that exists."""
    for row, number in starts.nonzero().tolist():
        start = int(starts[row, number])
        first = start - int(BATCH.positions[row, start])
        assert 0 < start - first <= 12
        yield row, number, BATCH.tokens[row, first:start].tolist()


def law_after(target, tokens: list[int]):
    """Log-probabilities [len(tokens), V], from a pass over these tokens alone."""
    return target.logits(target.read(torch.tensor([tokens]), ()).final[0]).log_softmax(-1)


def greedy(target, text: list[int], num: int) -> list[int]:
    tokens = list(text)
    for _ in range(num):
        tokens.append(int(law_after(target, tokens)[-1].argmax()))
    return tokens[len(text) :]


def jacobi(target, text: list[int], first: list[int], passes: int) -> list[int]:
    state = list(first)
    for _ in range(passes):
        choices = law_after(target, text + state).argmax(-1).tolist()
        state = choices[len(text) - 1 : -1]
    return state


@torch.no_grad()
def test_trajectories_equal_those_of_single_passes():
    torch.manual_seed(0)
    target, starts = make().target, cut_blocks(BATCH, N)
    first = draw_guesses(BATCH, starts, N)
    continuation = ContinuationReader(target, BATCH, starts, N).decode_greedily()
    blocks = [(row, number, text, greedy(target, text, N)) for row, number, text in each_block(starts)]
    for row, number, text, fixed in blocks:
        assert continuation.tokens[row, :, number].tolist() == fixed
        distribution = target.logits(continuation.final[row, :, number]).log_softmax(-1)
        torch.testing.assert_close(distribution, law_after(target, text + fixed)[len(text) :], rtol=0, atol=1e-10)
    reader, num_changed = ContinuationReader(target, BATCH, starts, N), 0
    for shift in range(N + 1):
        passes = (torch.arange(starts.shape[1]) + shift) % (N + 1)
        states = reader.iterate_states(first, passes)
        for row, number, text, fixed in blocks:
            initial = first[row, :, number].tolist()
            expected = jacobi(target, text, initial, int(passes[number]))
            assert states[row, :, number].tolist() == expected
            assert passes[number] < N or expected == fixed
            num_changed += expected != initial
    assert num_changed > 10


def kl(p, q) -> float:
    return float((p.exp() * (p - q)).sum())


def test_the_loss_equals_a_naive_sum_and_trains_only_the_adapter():
    drafter = make()
    target, objective = drafter.target, ConsistencyObjective(drafter, **SETTINGS)
    torch.manual_seed(5)
    loss = objective(BATCH, None)
    loss.total.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in drafter.parameters())
    trained = {id(parameter) for parameter in drafter.parameters()}
    assert all(parameter.grad is None for parameter in target.model.parameters() if id(parameter) not in trained)
    torch.manual_seed(5)  # the same blocks and states again
    states, num_left = sum_over_states(target)
    assert num_left > 10
    expected = 0.7 * states + 0.4 * sum(sum_over_text(target, row) for row in itertools.chain(*PACKS))
    assert loss.total.item() == pytest.approx(expected, rel=1e-9)
    assert loss.num_goals == int(BATCH.loss_mask.sum()) and loss.matches is None


def sum_over_states(target) -> tuple[float, int]:
    """KL from the original at fixed points, from each state's first wrong token on, and the number of these tokens."""
    starts = cut_blocks(BATCH, N)
    passes = torch.randint(N, (starts.shape[1],))
    first, total, num_left = draw_guesses(BATCH, starts, N), 0.0, 0
    for row, number, text in each_block(starts):
        state = jacobi(target, text, first[row, :, number].tolist(), int(passes[number]))
        q = law_after(target, text + state)[len(text) :]
        with disable_adapter(target):
            fixed = greedy(target, text, N)
            p = law_after(target, text + fixed)[len(text) :]
        wrong = next((k for k in range(N) if state[k] != fixed[k]), N)
        total += kl(p[wrong:], q[wrong:])
        num_left += N - wrong
    return total, num_left


def sum_over_text(target, row: Row) -> float:
    """KL from the original along the answer of a row."""
    adapted = law_after(target, row.tokens)
    with disable_adapter(target):
        original = law_after(target, row.tokens)
    answer = slice(max(1, row.mask.index(True)) - 1, -1)
    return kl(original[answer], adapted[answer])


def test_a_checkpoint_restores_the_adapted_target(tmp_path):
    drafter = make()

    def answer(target):
        return Decoder(target, None, sampling=Sampling(0.0), stop=set()).generate([random_tokens(5, 6, V)], 20).tokens

    expected = answer(drafter.target)
    old_path = {"_target_": "specdec.heads.consistency.Consistency"}  # of checkpoints before the class moved
    checkpoint.save(tmp_path / "step", drafter.frozen_copy(), {**CONFIG["drafter"], "num_drafts": N, **old_path})
    fresh = make_target(V, num_layers=2)
    assert answer(fresh) != expected
    loaded = checkpoint.load(tmp_path / "step", fresh)
    assert isinstance(loaded, Consistency) and loaded.depth == N and loaded.adapts_target and fresh.adapted
    assert answer(fresh) == expected
    before = dict(drafter.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in loaded.named_parameters())


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"set vocab_size to null"):
        Consistency(make_target(V), vocab=torch.arange(4))
    drafter = make()
    for wrong, message in (
        ({"losses": {"kl": 1.0}}, "give weights to some of consistency, original"),
        ({"losses": {"consistency": 0.0, "original": 1.0}}, "the first needs one"),
        ({"depth": 3}, r"^depth=3 must be the drafter's num_drafts, 4"),
        ({"passes": 4}, "passes=4 must be 0 to depth - 1 = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            ConsistencyObjective(drafter, **{**SETTINGS, **wrong})
    assert not isinstance(drafter, Drafter) and not hasattr(drafter, "step")
