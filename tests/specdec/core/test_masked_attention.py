"""Attention under a mask against softmax, also where the heads of few tokens are the rows of a product."""

import pytest
import torch

from specdec.core.cache import attend_masked

HEADS, GROUPS, NUM_KEYS, WIDTH = 6, 2, 24, 8
EXACT, ROUNDED = 1e-12, 0.02


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "heads_of_mask", "tolerance"),
    [
        (torch.float64, 1, 1, EXACT),
        (torch.bfloat16, 1, 1, ROUNDED),
        (torch.bfloat16, 1, HEADS, ROUNDED),
        (torch.bfloat16, 3, 1, ROUNDED),
        (torch.bfloat16, 9, 1, ROUNDED),
    ],
)
def test_attention_under_a_mask_against_softmax(dtype, num_tokens, heads_of_mask, tolerance):
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, num_tokens, WIDTH, dtype=dtype)
    key, value = torch.randn(2, 2, GROUPS, NUM_KEYS, WIDTH, dtype=dtype)
    mask = torch.rand(2, heads_of_mask, num_tokens, NUM_KEYS) < 0.5
    mask[..., 0] = True
    attended = attend_masked(query, key, value, mask, scale=0.3)
    q, k, v = (part.double() for part in (query, key, value))
    k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
    weights = (q @ k.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(attended.double(), weights @ v, atol=tolerance, rtol=tolerance)
    assert attended.dtype == dtype
