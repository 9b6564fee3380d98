"""Draft models that are trained on texts of their own, and adapters of theirs."""

import pytest
import torch
from hydra.errors import InstantiationException

from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.target import Target
from tests.support import disturb, fit_interrupted, losses_of, random_tokens, text_logits
from train.data import Packs, Row
from train.onpolicy import OnPolicy

pytestmark = pytest.mark.slow

V = 61
VOCAB = torch.arange(0, V, 2)


def make_packs() -> Packs:
    """Three rows, the last with an earlier answer."""
    masks_of = ([False] * 4 + [True] * 6, [False] * 7 + [True] * 2, [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4 + [False])  # fmt: skip
    return Packs([Row(str(n), "all", random_tokens(n, len(m), V), m) for n, m in enumerate(masks_of)], length=24)


def make_on_policy(target, *, fraction=1.0, temperature=1.0, stop=()) -> OnPolicy:
    draft = disturb(Draft(target, vocab=VOCAB)).double()
    return OnPolicy(
        draft, make_packs(), length=24, on_policy=fraction, on_policy_temperature=temperature, stop=set(stop)
    )


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
                logits = text_logits(on_policy.drafter.eval(), torch.tensor([tokens]))[0, -1]
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
    law = text_logits(on_policy.drafter.eval(), torch.tensor([prompt]))[0, -1].softmax(-1)
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


def test_a_run_on_its_own_texts_continues_with_the_same_losses(fit, monkeypatch):
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
    fit_interrupted(fit, "died", *more)
    assert losses_of("died") == losses_of("whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("head=eagle", "data.on_policy=0.5"), "cannot write a text"),
        (("head=draft", "data.on_policy=1.5"), "a share"),
        (("head=draft", "head.drafter.copy_layers=[]", "head.drafter.lora={r: 2}"), "worth keeping"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(fit, overrides, message):
    with pytest.raises((ValueError, InstantiationException), match=message):
        fit("wrong", *overrides)


def test_adapters_train_by_the_command(fit, folder):
    lora = "head.drafter.lora={r: 2, target_modules: [q_proj, v_proj]}"
    assert fit("lora", "head=draft", lora) == 0
    target = Target.load(f"{folder}/target", dtype="float32")
    assert not any("lora" in name for name in checkpoint.load("checkpoints/lora", target).state_dict())
