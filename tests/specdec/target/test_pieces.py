"""Texts read in pieces against texts read at once, and attention of a piece against softmax under a mask."""

import pytest
import torch

from specdec.core import cached_keys
from specdec.core.cached_keys import attend_piece
from specdec.decoding.prefill import Prefill
from tests.support.targets import make_target
from tests.support.tree_cases import attend_masked

CAPACITY, HEADS, GROUPS = 48, 6, 2


def attend_texts(query, key, value, query_starts, key_starts, *sizes, seqused_k, window_size_left, **options):
    """Stands in for the kernel of a GPU: the texts' last query sees all keys, and each one before it one key fewer."""
    outs, sums = [], []
    for text, num_keys in enumerate(seqused_k.tolist()):
        q = query[query_starts[text] : query_starts[text + 1]].transpose(0, 1)  # [R, S, E]
        k, v = (part[key_starts[text] : key_starts[text] + num_keys, 0] for part in (key, value))
        distance = torch.arange(num_keys - q.shape[1], num_keys)[:, None] - torch.arange(num_keys)
        hidden = (distance < 0) | ((distance > window_size_left) & (window_size_left >= 0))
        scores = (options["scale"] * q @ k.T).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1), None


@pytest.mark.parametrize("kernel", ["cpu", "gpu"])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("num_before, num", [(0, 9), (0, 1), (7, 9), (30, 1), (20, 17)])
def test_attention_of_a_piece_against_a_mask(num_before, num, window, kernel, monkeypatch):
    """Blocks of 4 queries under a window; values narrower than keys; queries whose numbers lie apart."""
    monkeypatch.setattr(cached_keys, "WINDOW_QUERIES", 4)
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, 16, num, dtype=torch.float64).mT
    key, value = (torch.randn(2, GROUPS, CAPACITY, width, dtype=torch.float64) for width in (16, 8))
    distance = torch.arange(num_before, num_before + num)[:, None] - torch.arange(CAPACITY)
    mask = (distance >= 0) & (distance < (window or CAPACITY))
    if kernel == "gpu":
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend_texts)
        monkeypatch.setattr(cached_keys, "PIECE_KERNELS", {})
    out, log_sum = attend_piece(query, key, value, num_before, scale=0.25, window=window)
    torch.testing.assert_close(out, attend_masked(query, key, value, mask, None), atol=1e-12, rtol=0)
    scores = 0.25 * query @ key.repeat_interleave(HEADS // GROUPS, 1).mT
    torch.testing.assert_close(log_sum, scores.masked_fill(~mask, -torch.inf).logsumexp(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("piece_tokens", [1, 7, 16, 40])
def test_pieces_against_the_whole_text(piece_tokens):
    target = make_target(50, num_layers=3)
    tokens = torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(0))
    whole, cache = target.read(tokens, (1, 2)), target.cache(2)
    with torch.no_grad():
        outputs = [target.read_piece(part, (1, 2), cache) for part in tokens.split(piece_tokens, dim=1)]
    torch.testing.assert_close(torch.cat([output.final for output in outputs], dim=1), whole.final, atol=1e-10, rtol=0)
    features = torch.cat([output.features for output in outputs], dim=1)
    torch.testing.assert_close(features, whole.features, atol=1e-10, rtol=0)


def test_a_long_prompt_is_read_in_pieces_without_a_mask(monkeypatch):
    """Prompts of 37 and 20 tokens in pieces of 16: no tensor has a side of queries and one of all keys."""
    monkeypatch.setattr(cached_keys, "CPU_PIECE_TOKENS", 16)
    target, sizes = make_target(50, num_layers=3), []
    assert target.reads_pieces
    prompts = [[*range(1, 38)], [*range(1, 21)]]
    references = [target.read(torch.tensor([prompt]), (1,)) for prompt in prompts]
    monkeypatch.setattr(target.layers[0], "forward", note_mask(target.layers[0].forward, sizes))
    reading = Prefill(target, (1,), prompts)
    with torch.no_grad():
        for _ in range(3):
            reading.advance()
        final, features = reading.output()
        assert sizes == [0, 0, 0] and reading.complete
        for row, alone in enumerate(references):
            torch.testing.assert_close(final[row], alone.final[0, -1], atol=1e-10, rtol=0)
            torch.testing.assert_close(features[row, : len(prompts[row])], alone.features[0], atol=1e-10, rtol=0)


def note_mask(forward, sizes: list[int]):
    """A layer's forward that also notes the number of entries of its mask."""

    def noting_forward(*args, attention_mask=None, **kwargs):
        sizes.append(attention_mask.numel())
        return forward(*args, attention_mask=attention_mask, **kwargs)

    return noting_forward


def test_a_target_that_cannot_read_pieces_says_so_once(monkeypatch):
    target = make_target(50, num_layers=3)
    monkeypatch.setattr(target, "_try_pieces", lambda in_pieces: 1 / 0)
    with pytest.warns(
        UserWarning, match="cannot read a piece of a text without a mask .*It reads under masks"
    ) as record:
        assert not target.reads_pieces and not target.reads_pieces
    assert len(record) == 1
