"""Domino's correction against the formula of its paper."""

import torch

from specdec.experiments.domino.part import Domino
from specdec.heads.dependence import DraftedBlock, DrafterSizes

WIDTH, VOCAB = 6, 11
SIZES = DrafterSizes(width=WIDTH, num_tokens=VOCAB, vocab_size=VOCAB, num_drafts=3, eps=1e-6)


def embed(tokens):
    return torch.nn.functional.one_hot(tokens % WIDTH, WIDTH).double()


def make_block() -> DraftedBlock:
    states = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return DraftedBlock(states[:, 0], states, torch.tensor([1, 2]), torch.zeros_like, embed, torch.clone)


def test_the_first_draft_is_unchanged_and_later_ones_read_all_tokens_before():
    torch.manual_seed(1)
    domino, block = Domino(SIZES, hidden=4, rank=5).double(), make_block()
    torch.nn.init.normal_(domino.after.weight)
    tokens, carried, reading = block.tokens, domino.first_carried(block), torch.zeros(2, 4, dtype=torch.float64)
    for d in (1, 2, 3):
        state, embedding = block.states[:, d - 1], block.embed(tokens)
        readout, carried = domino.advance(d, state, tokens, embedding, carried)
        logits = domino.logits(readout, lambda: torch.zeros(2, VOCAB, dtype=torch.float64), block.embed)
        reading = domino.reader(embedding, reading)
        inner = torch.cat([state, reading], dim=-1) @ domino.join.weight.T
        expected = (inner * torch.sigmoid(inner)) @ domino.after.weight.T
        torch.testing.assert_close(logits, torch.zeros_like(expected) if d == 1 else expected)
        tokens = logits.argmax(-1)
