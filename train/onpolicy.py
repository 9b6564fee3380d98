"""On-policy distillation (DistillSpec, 2310.08461): the draft model learns from texts that it wrote itself.

corpus     <prompt> the corpus's or the target's answer     loss on the answer
on policy  <prompt> the draft's answer                      loss on the answer, judged by the target as ever
"""

import dataclasses

import torch
from torch.nn.utils.rnn import pad_sequence

from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.heads.base import Drafter, Head
from specdec.proposers.heads import HeadProposer
from train.data.packing import Packs
from train.data.rows import TrainingBatch, collate, last_answer
from train.features.outputs import Online

ROUND = 16  # tokens sampled before they are read again: the distributions [B, ROUND, V] are held that long


class OnPolicy:
    """Writes micro-batches whose last answers come from the current draft model; `features` are the target's outputs for them.

    on_policy: share of the micro-batches that are written so, 0 to 1; on_policy_temperature: of the sampling
    No gradient passes through the sampling. All random numbers come from torch's global generator, which the trainer
    seeds for each step, so that a resumed run writes the same texts. Raises ValueError for a drafter that needs features.
    """

    def __init__(
        self,
        drafter: Head,
        packs: Packs,
        *,
        length: int,
        on_policy: float,
        on_policy_temperature: float,
        stop: set[int],
    ):
        if not isinstance(drafter, Drafter) or drafter.attends != "text":
            raise ValueError(
                f"on_policy={on_policy}: {type(drafter).__name__} cannot write a text without the target. Train a draft model "
                "(head draft), or set on_policy=0."
            )
        self.drafter, self.packs, self.length = drafter, packs, length
        self.on_policy, self.temperature, self.stop = on_policy, on_policy_temperature, stop
        self.features = Online(drafter.target, drafter.target_layers)

    def __call__(self, indices: list[int]) -> TrainingBatch | None:
        """The packs of a micro-batch with their prompts answered anew; None if this micro-batch keeps the answers it has."""
        if float(torch.rand(())) >= self.on_policy:
            return None
        packs = [self.packs[index] for index in indices]
        rows = [row for pack in packs for row in pack]
        spans = [last_answer(row) for row in rows]
        answers = self.write(
            [row.tokens[:start] for row, (start, _) in zip(rows, spans)], [stop - start for start, stop in spans]
        )
        written = iter(
            dataclasses.replace(row, tokens=row.tokens[:start] + answer, mask=[False] * start + [True] * len(answer))
            for row, (start, _), answer in zip(rows, spans, answers)
        )
        return collate([[next(written) for _ in pack] for pack in packs], length=self.length, pad_token=0)

    @torch.no_grad()
    def write(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Answers of the draft model: as many tokens as `limits` says, or fewer, up to and with a stop token."""
        frozen = self.drafter.decodable().to(dtype=self.drafter.target.dtype)
        device = self.drafter.target.device
        proposer = HeadProposer(frozen, TreeShape(depth=ROUND, width=1, nodes=ROUND))
        num = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
        tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)  # [B, T]
        proposer.begin(tokens, num)
        new, num = tokens[:, 1:], num - 1  # `begin` has the first token
        answers: list[list[int]] = [[] for _ in prompts]
        sampling = Sampling(temperature=self.temperature)
        ended = [False] * len(prompts)
        while not all(ended):
            features = torch.zeros(*new.shape, 0, dtype=frozen.target.dtype, device=device)
            proposer.commit(new, features, num, num.tolist())
            new = proposer.propose(sampling, None).tokens[:, 1:]  # [B, ROUND]
            num = torch.full_like(num, ROUND)
            for row, drafts in enumerate(new.tolist()):
                for token in drafts:
                    if not ended[row]:
                        answers[row].append(token)
                        ended[row] = token in self.stop or len(answers[row]) == limits[row]
        return answers
