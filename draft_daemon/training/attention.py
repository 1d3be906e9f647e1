"""Attention of a training step: many blocks over one sequence's context, under one softmax.

A block's rows see the context rows before its anchor and all rows of their own block. Context keys
and values exist once per sequence, whatever the number of its blocks; blocks never see each other.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Span:
    """The blocks of one sequence, and its context rows, in tensors that hold several."""

    rows: slice  # of the context
    blocks: slice
    hidden: Tensor | None  # [blocks, 1, rows] additive: context rows that a block must not see
    beyond: Tensor | None = None  # [blocks, 1, width] additive: own rows that are not there


def span(rows: slice, blocks: slice, anchors: Tensor, beyond: Tensor | None = None) -> Span:
    """`anchors` [blocks]: how many of the context rows ``rows`` each block sees, the first ones."""
    places = torch.arange(rows.stop - rows.start, device=anchors.device)
    unseen = places[None, None, :] >= anchors[:, None, None]
    hidden = torch.zeros(unseen.shape, device=anchors.device).masked_fill_(unseen, NEVER)
    return Span(rows, blocks, hidden, beyond)


def attend_jointly(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], part: Span
) -> Tensor:
    """Softmax over [context | own block] of one sequence's blocks.

    `query` [blocks, width, heads, dim]; `context` keys and values [rows, kv_heads, dim]; `own` ones
    [blocks, width, kv_heads, dim]. Returns [blocks, width, heads * dim].
    """
    blocks, width, heads, dim = query.shape
    kv_heads = context[0].shape[1]
    group = heads // kv_heads
    # [kv, blocks, group * width, dim]: every reader of the same keys lies together.
    folded = (query * dim**-0.5).view(blocks, width, kv_heads, group, dim).permute(2, 0, 3, 1, 4)
    folded = folded.reshape(kv_heads, blocks, group * width, dim)
    keys, values = (each.permute(1, 0, 2) for each in context)  # [kv, rows, dim]
    own_keys, own_values = (each.permute(2, 0, 1, 3) for each in own)  # [kv, blocks, width, dim]
    rows = keys.shape[1]
    over = torch.matmul(folded.flatten(1, 2), keys.transpose(1, 2))
    over = over.view(kv_heads, blocks, group * width, rows)
    if part.hidden is not None:
        over.add_(part.hidden)
    among = torch.matmul(folded, own_keys.transpose(2, 3))
    if part.beyond is not None:
        among.add_(part.beyond)
    weights = torch.cat((over, among), dim=-1).softmax(dim=-1).to(values.dtype)
    out = torch.matmul(weights[..., :rows].flatten(1, 2), values).view_as(folded)
    out = out + torch.matmul(weights[..., rows:], own_values)
    out = out.view(kv_heads, blocks, group, width, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(blocks, width, heads * dim)
