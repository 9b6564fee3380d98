"""Tests of draft models that are trained on texts of their own, with and without adapters."""

import pytest
import torch
from hydra.errors import InstantiationException

from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.target.model import Target
from tests.support import disturb, fit_interrupted, losses_of, random_tokens, text_logits
from train.data.packing import Packs, Rows
from train.data.rows import Row
from train.onpolicy import OnPolicy

pytestmark = pytest.mark.full

V = 61
VOCAB = torch.arange(0, V, 2)


def make_packs() -> Packs:
    """Three rows; the last has two answers."""
    masks_of = ([False] * 4 + [True] * 6, [False] * 7 + [True] * 2, [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4 + [False])  # fmt: skip
    return Packs(
        Rows.of([Row(str(n), "all", random_tokens(n, len(m), V), m) for n, m in enumerate(masks_of)]), length=24
    )


def make_on_policy(target, *, fraction=1.0, temperature=1.0, stop=()) -> OnPolicy:
    draft = disturb(Draft(target, vocab=VOCAB)).double()
    return OnPolicy(
        draft, make_packs(), length=24, on_policy=fraction, on_policy_temperature=temperature, stop=set(stop)
    )


def test_the_draft_model_answers_the_same_prompts(target):
    """At temperature 0 each answer equals that of a loop over the whole text, over the draft vocabulary."""
    on_policy = make_on_policy(target, temperature=0.0)
    batch = on_policy([0, 1])
    rows = [row for index in (0, 1) for row in on_policy.packs[index]]
    assert len(on_policy.packs) == 2 and len(rows) == 3
    num_answers = 0
    for pack in range(2):
        start = 0
        for row in on_policy.packs[pack]:
            begin, end = {"0": (4, 10), "1": (7, 9), "2": (7, 11)}[row.id]
            tokens = row.tokens[:begin]
            while len(tokens) < end:
                logits = text_logits(on_policy.drafter.eval(), torch.tensor([tokens]))[0, -1]
                tokens.append(int(VOCAB[logits.argmax()]))
            span = slice(start, start + end)
            assert batch.tokens[pack, span].tolist() == tokens != row.tokens[:end]
            assert batch.loss_mask[pack, span].tolist() == [False] * begin + [True] * (end - begin)
            assert batch.positions[pack, span].tolist() == list(range(end))
            start += end
            num_answers += 1
        assert not batch.loss_mask[pack, start:].any() and (batch.documents[pack, start:] == -1).all()
    assert num_answers == 3
    output = on_policy.features(batch)
    assert output.final.shape == (2, 24, target.width) and output.features.shape[-1] == 0


def test_answers_follow_the_draft_models_distribution_and_the_seed(target):
    on_policy = make_on_policy(target)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(on_policy([0, 1]).tokens)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    torch.manual_seed(0)
    prompt, num = random_tokens(8, 5, V), 4000
    first = torch.tensor(on_policy.write([prompt] * num, [1] * num))[:, 0]
    probs = text_logits(on_policy.drafter.eval(), torch.tensor([prompt]))[0, -1].softmax(-1)
    frequencies = torch.bincount(first, minlength=V)[VOCAB] / num
    assert (frequencies - probs).abs().max() < 5 * (0.25 / num) ** 0.5


def test_answers_end_at_their_limit_or_at_a_stop_token(target):
    free = make_on_policy(target).write([[1, 2]] * 3, [40, 50, 7])
    assert [len(answer) for answer in free] == [40, 50, 7]
    stopped = make_on_policy(target, stop=VOCAB.tolist()).write([[1, 2]] * 3, [40, 50, 7])
    assert [len(answer) for answer in stopped] == [1, 1, 1]


def test_on_policy_is_the_fraction_of_micro_batches(target):
    on_policy = make_on_policy(target, fraction=0.3)
    torch.manual_seed(0)
    drawn = [on_policy([0]) is not None for _ in range(60)]
    assert 8 <= sum(drawn) <= 28


def test_an_interrupted_on_policy_run_resumes_with_the_same_losses(fit, monkeypatch):
    more = ("head=draft", "data.on_policy=0.5", "features.mode=cached", "features.folder=cache", "train.accumulation=2")
    batches = []
    call = OnPolicy.__call__

    def recording_call(self, indices):
        batches.append(call(self, indices))
        return batches[-1]

    monkeypatch.setattr(OnPolicy, "__call__", recording_call)
    fit("whole", *more)
    assert len(batches) == 8 and 0 < sum(batch is not None for batch in batches) < 8
    fit("corpus", *more, "data.on_policy=0")
    assert losses_of("corpus") != losses_of("whole")
    fit_interrupted(fit, "died", *more)
    assert losses_of("died") == losses_of("whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("head=eagle", "data.on_policy=0.5"), "cannot write a text"),
        (("head=draft", "data.on_policy=1.5"), r"^data\.on_policy=1\.5 must be a number from 0 to 1\.$"),
        (("head=draft", "head.drafter.copy_layers=[]", "head.drafter.lora={r: 2}"), "worth keeping"),
    ],
)
def test_wrong_settings_are_refused(fit, overrides, message):
    with pytest.raises((ValueError, InstantiationException), match=message):
        fit("wrong", *overrides)


def test_trained_adapters_are_merged_in_the_checkpoint(fit, folder):
    lora = "head.drafter.lora={r: 2, target_modules: [q_proj, v_proj]}"
    assert fit("lora", "head=draft", lora) == 0
    target = Target.load(f"{folder}/target", dtype="float32")
    assert not any("lora" in name for name in checkpoint.load("checkpoints/lora", target).state_dict())
