"""Cross-entropy over chosen rows of a frozen head, with its gradient computed on the way.

``loss = sum_r weight_r * (logsumexp(logits_r) - sum_t share_rt * logits_r[column_rt])``, where the
shares of a row sum to 1: one true token, or a distribution. The head is not trained, so that what
flows back is one matrix of the size of `hidden`; logits exist for a few rows at a time.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

CHUNK_ELEMENTS: Final = 1 << 24  # of logits at a time


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each of `r` rows should say, in columns of the head's chosen rows."""

    columns: Tensor  # [r, t] int64; the first one is the true token
    shares: Tensor  # [r, t]; rows sum to 1
    weights: Tensor  # [r]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, offset: Tensor | None, wanted: Wanted
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        right = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        step = max(1, CHUNK_ELEMENTS // len(head))
        for start in range(0, len(hidden), step):
            part = slice(start, min(start + step, len(hidden)))
            columns, shares, weights = (
                each[part] for each in (wanted.columns, wanted.shares, wanted.weights)
            )
            logits = (hidden[part] @ head.T).float()
            if offset is not None:
                logits += offset
            told = logits.gather(1, columns)
            best = logits.amax(1, keepdim=True)
            right[part] = told[:, :1].eq(best).flatten()
            total = logits.sub_(best).exp_().sum(1, keepdim=True)
            rows = (best + total.log()).flatten() - (told * shares).sum(1)
            loss += (rows * weights).sum(dtype=torch.float64)
            logits.mul_(weights[:, None] / total)
            logits.scatter_add_(1, columns, -shares * weights[:, None])
            torch.mm(logits.to(head.dtype), head, out=gradient[part])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss.to(torch.float32), right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * gradients[0], None, None, None


def weighted_loss(
    hidden: Tensor, head: Tensor, offset: Tensor | None, wanted: Wanted
) -> tuple[Tensor, Tensor]:
    """The loss, and whether each row's best column is the true token's.

    `hidden` [r, h]; `head` [c, h] of the same dtype; `offset` [c] is added to every row's logits:
    what a row that stands for many others is worth.
    """
    return cast("tuple[Tensor, Tensor]", _Loss.apply(hidden, head, offset, wanted))  # type: ignore[no-untyped-call]
