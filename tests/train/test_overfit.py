"""A test that every head learns a text that depends on the position alone; a misaligned head could not learn it."""

import pytest
import torch
from hydra.utils import instantiate

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target, TargetOutput
from specdec.text.conversations import Row
from tests.support.decoding import chain_of
from tests.support.drafters import HEADS, load_head
from tests.support.targets import make_target
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.objective.objective import Objective

pytestmark = pytest.mark.full

V, LENGTH, STEPS = 17, 26, 300


class Clock(Target):
    """A target that predicts text[i+1] after position i for any tokens. Its states encode the position at random."""

    text = torch.randint(V, (LENGTH,), generator=torch.Generator().manual_seed(3))

    def read(self, tokens, layers, *, positions=None, **_):
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        generator = torch.Generator().manual_seed(4)
        codes = torch.randn(self.num_layers + 1, LENGTH, self.width, generator=generator)
        codes[-1] += 20 * torch.nn.functional.normalize(self.lm_head.weight, dim=1)[self.text.roll(-1)]
        states = codes[:, positions.clamp(max=LENGTH - 1)]  # [L+1, B, S, D]
        return TargetOutput(torch.cat([*states[list(layers)], states[-1][..., :0]], dim=-1), states[-1])

    def _check_logits(self):
        """The model is never run, so there are no logits to compare."""


@pytest.mark.parametrize("head", HEADS)
def test_every_draft_is_right_after_training(head):
    torch.manual_seed(0)
    target = Clock(make_target(V).model.float(), name="clock")
    predictions = target.logits(target.read(target.text[None], ()).final[0]).argmax(-1)
    assert torch.equal(predictions[:-1], target.text[1:]) and len(set(target.text.tolist())) > V // 2
    config = load_head(head)
    drafter = instantiate(config["drafter"], target, vocab=None)
    depth = drafter.depth or 3
    objective = Objective(drafter, **{**config["objective"], "depth": depth if drafter.context_kind != "text" else 1})
    row = Row("0", "all", target.text.tolist(), [False] + [True] * (LENGTH - 1))
    batch = collate([[row]], length=LENGTH, pad_token=0)
    output = ComputedFeatures(target, drafter.target_layers)(batch)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss = objective(batch, output)
        (loss.total / loss.num_goals).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for num_prompt in (2, 5):
        num_rounds = (LENGTH - depth - num_prompt - 1) // (depth + 1)
        decoder = Decoder(target, HeadProposer(drafter, chain_of(depth)), sampling=Sampling(0.0), stop=set())
        prompt, num = target.text[:num_prompt].tolist(), 1 + num_rounds * (depth + 1)
        generation = decoder.generate([prompt], num)
        assert generation.tokens == [target.text[num_prompt : num_prompt + num].tolist()]
        assert num_rounds >= 3 and generation.accepted == [[depth] * num_rounds]  # tau = depth + 1
