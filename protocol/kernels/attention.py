"""Grouped-query attention with the query heads of a group folded into rows.

No kernel then needs to know about groups, and the K length can be padded to a fixed multiple
under a mask, which keeps rows independent of how many are computed together.
"""

from typing import Final

from torch import Tensor
from torch.nn import functional

KEY_MULTIPLE: Final = 64


def padded_length(length: int, capacity: int, multiple: int = KEY_MULTIPLE) -> int:
    """`length` rounded up to the multiple that keeps rows width-invariant."""
    return min(-(-length // multiple) * multiple, capacity)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention.

    query [kv_heads, group, n, d]; key, value [kv_heads, L, d]; mask [group * n, L] additive (row
    order: group-major, as the folding makes it). Returns [kv_heads, group, n, d].
    """
    kv_heads, group, n, dim = query.shape
    folded = query.reshape(1, kv_heads, group * n, dim)
    out = functional.scaled_dot_product_attention(
        folded, key[None], value[None], attn_mask=mask[None, None], scale=scale
    )
    return out.reshape(kv_heads, group, n, dim)
