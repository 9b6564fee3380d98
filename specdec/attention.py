"""The target's attention: transformers' own sdpa, or matrix products where sdpa is slow on a CPU.

Measured on two cores (RESULTS.md): for a batch of 32 rows that each read one token, the CPU kernel of
scaled_dot_product_attention takes several times as long as two matrix products, in bfloat16 above all.
"""

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specdec"
FEW_ROWS, FEW_TOKENS = 3, 16  # with at most so many rows, or more tokens than this, sdpa is not slower


def attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [B, H, S, E], key and value [B, G, C, E], mask [B, 1, S, C] bool -> [B, S, H, E]"""
    num_rows, num_heads, num_tokens, width = query.shape
    if query.device.type != "cpu" or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if num_rows <= FEW_ROWS or num_tokens > FEW_TOKENS:
        # Called directly, because transformers would first copy each key for all heads of its group
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    groups = key.shape[1]
    query = (query * (scaling or width**-0.5)).reshape(num_rows, groups, -1, width)  # [B, G, H/G * S, E]
    scores = query @ key.transpose(-1, -2)  # [B, G, H/G * S, C]
    scores = scores.view(num_rows, num_heads, num_tokens, -1).masked_fill(~attention_mask, float("-inf"))
    weights = scores.float().softmax(-1) if scores.element_size() < 4 else scores.softmax(-1)  # [B, H, S, C]
    out = weights.to(value.dtype).view(num_rows, groups, -1, key.shape[2]) @ value  # [B, G, H/G * S, E]
    return out.view(num_rows, num_heads, num_tokens, width).transpose(1, 2), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
