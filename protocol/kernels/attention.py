"""Grouped-query attention with the query heads of a group folded into rows.

No kernel then needs to know about groups, and the K length can be padded to a fixed multiple
under a mask, which keeps rows independent of how many are computed together.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

KEY_MULTIPLE: Final = 64
# torch's kernel for CPUs takes query rows in blocks of 32, or of a multiple of that. What is left
# over is a smaller product, which rounds otherwise where it is very small: measured with AVX-512,
# of up to 1, 2, 4, 5 and 10 rows with heads of 32, 64, 96, 128 and 256. (11 rows of 3 heads a group
# leave 1.)
ROW_BLOCK: Final = 32
LEAST_LEFT: Final = 8  # rows left over at least; a 16th of the head's size where that is more


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
    out = attend_folded(folded, key[None], value[None], mask[None, None], scale)
    return out.reshape(kv_heads, group, n, dim)


def attend_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`attend` for a caller that holds its views ready; returns [1, kv_heads, group * n, d].

    query [1, kv_heads, group * n, d]; key, value [1, kv_heads, L, d]; mask [1, 1, group * n, L].
    Few rows that are left over behind whole blocks are filled up with copies of the last, so that
    their bits are those that they have among more.
    """
    rows = query.shape[2]
    left = rows % ROW_BLOCK if rows > ROW_BLOCK and not query.is_cuda else 0
    least = max(LEAST_LEFT, query.shape[3] // 16)
    if 0 < left < least:
        more = (1, 1, least - left, 1)
        query = torch.cat((query, query[:, :, -1:].repeat(more)), dim=2)
        mask = torch.cat((mask, mask[:, :, -1:].repeat(more)), dim=2)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out if out.shape[2] == rows else out[:, :, :rows].contiguous()


def causal_mask(
    base: int,
    rows: int,
    length: int,
    *,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Additive mask [group * rows, length]: row ``i`` sees columns up to ``base + i``.

    A window counts the row's own position, as in published configs.
    """
    position = torch.arange(base, base + rows, device=device)[:, None]
    column = torch.arange(length, device=device)
    closed = column > position
    if window is not None:
        closed |= column <= position - window
    mask = torch.zeros(rows, length, dtype=dtype, device=device).masked_fill_(closed, -torch.inf)
    return mask.repeat(group, 1)
