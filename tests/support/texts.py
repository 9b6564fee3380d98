"""Helpers for tests of proposers that look at texts."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence

from tests.support.decoding import greedy, prompts_of


def begin(proposer, prompts: list[list[int]]) -> None:
    """Begins a batch of prompts of any lengths. The last token of each prompt serves as the first of its answer."""
    tokens = pad_sequence([torch.tensor(prompt[:-1]) for prompt in prompts], batch_first=True)
    counts = [len(prompt) - 1 for prompt in prompts]
    proposer.begin(tokens, torch.tensor(counts))
    commit(proposer, [prompt[1:] for prompt in prompts])


def commit(proposer, new: list[list[int]]) -> None:
    """Commits rows of any lengths as the decoder does: entries after the tokens of a row are padding."""
    tokens = pad_sequence([torch.tensor(row) for row in new], batch_first=True, padding_value=9)
    counts = [len(row) for row in new]
    proposer.commit(tokens, tokens.new_zeros(*tokens.shape, 0), torch.tensor(counts), counts)


def repeating_texts(num_letters: int, length: int) -> list[list[int]]:
    """Random texts, and some that repeat themselves."""
    draw = random.Random(0)
    texts = [draw.choices(range(num_letters), k=length) for _ in range(4)]
    return [*texts, [1] * length, texts[0][:5] + [0, 1, 1, 2] * (length // 4), texts[1][: length // 2] * 2]


def check_rounds(target, proposer, drafts_after, num_new: int = 40) -> None:
    """Asserts plain decoding's answers, and acceptance by the drafts (token, parent) that drafts_after(text) gives."""
    prompts = prompts_of(target)
    plain = greedy(target, None).generate(prompts, num_new).tokens
    decoder = greedy(target, proposer)
    assert decoder.generate(prompts, num_new).tokens == plain
    total = 0
    for prompt, answer in zip(prompts, plain):
        (accepted,) = decoder.generate([prompt], num_new).accepted  # one row alone, since a batch pads short chains
        expected, end = [], 1
        while end < num_new:
            children = {(parent, token): n for n, (token, parent) in enumerate(drafts_after(prompt, answer[:end]), 1)}
            node, count = 0, 0
            while end + count < num_new and (node, answer[end + count]) in children:
                node, count = children[node, answer[end + count]], count + 1
            expected.append(min(count, num_new - end - 1))
            end += count + 1
        assert accepted == expected
        total += sum(accepted)
    assert total > num_new
