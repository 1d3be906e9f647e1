"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), one row at a time and by chunks.

A head's state S [key_dim, value_dim] forgets by the row's decay and corrects what its key reads:
``S = a S;  S = S + k (b (v - k S))^T``, and the row's output is ``q S``. Everything is float32.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

CHUNK: Final = 64
LANES: Final = 64  # of two vectors at once, of the shortest type
FLOOR: Final = 1e-6  # under the root of a key's length


def rowwise(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`function` of each element of `rows` [n, columns], whose bits do not depend on `n`.

    torch computes what is left over of whole vectors by other instructions than the rest. So rows
    are padded until nothing is left over.
    """
    columns = rows.shape[1]
    return function(functional.pad(rows, (0, -columns % LANES)))[:, :columns]


def convolve(rows: Tensor, taps: Tensor, count: int) -> Tensor:
    """Causal convolution of each column, then SiLU; the sum is taken in float32.

    rows [kernel - 1 + count, columns], the earlier ones first; taps [kernel, columns]. Each row of
    the result [count, columns] is a sum of its own, whatever `count` is.
    """
    total = rows[:count] * taps[0]
    for index in range(1, taps.shape[0]):
        total.addcmul_(rows[index : index + count], taps[index])
    return rowwise(functional.silu, total.to(rows.dtype))


def unit(rows: Tensor) -> Tensor:
    """Rows [..., d] of length one."""
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + FLOOR)


def by_rows(  # the rule has so many inputs
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    steps: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, value_dim], and the state after the last row, in memory of its own.

    query, key [n, heads, key_dim]; value [n, heads, value_dim]; decay (logarithms), beta
    [n, heads]; state [heads, key_dim, value_dim], which stays as it is. The state after row ``i``
    is left in ``steps[i]``, where they are wanted. No row's bits depend on how many there are.
    """
    out, kept = torch.empty_like(value), rowwise(torch.exp, decay)
    own = torch.empty_like(state)
    for index in range(query.shape[0]):
        now = own if steps is None else steps[index]
        torch.mul(state, kept[index][:, None, None], out=now)
        column = key[index].unsqueeze(-1)
        seen = torch.bmm(column.transpose(1, 2), now)
        now.baddbmm_(column, (value[index].unsqueeze(1) - seen) * beta[index][:, None, None])
        out[index] = torch.bmm(query[index].unsqueeze(1), now).squeeze(1)
        state = now
    return out, state if steps is None else state.clone()


def by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `by_rows`, `CHUNK` rows at a time.

    Inside a chunk the corrections depend on each other through a unit triangular system, which is
    solved for what the chunk's own values and the state before it would write.
    """
    heads_first = (each.transpose(0, 1) for each in (query, key, value))
    query, key, value = (each.contiguous() for each in heads_first)
    decay, beta = decay.t(), beta.t().unsqueeze(-1)
    outputs, width = [], value.shape[-1]
    for start in range(0, query.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        q, k, v = query[:, rows], key[:, rows], value[:, rows]
        total = decay[:, rows].cumsum(dim=1)
        grown, written = total.exp().unsqueeze(-1), beta[:, rows] * k
        between = total.unsqueeze(2) - total.unsqueeze(1)  # of row i after row j
        later = torch.ones_like(between[0], dtype=torch.bool).triu_(1)
        between = between.masked_fill_(later, -torch.inf).exp_()
        solved = torch.linalg.solve_triangular(
            torch.bmm(written, k.transpose(1, 2)) * between,
            torch.cat((beta[:, rows] * v, written * grown), dim=-1),
            upper=False,
            unitriangular=True,
        )
        fresh = solved[..., :width] - torch.bmm(solved[..., width:], state)
        inside = torch.bmm(q, k.transpose(1, 2)) * between
        outputs.append(torch.bmm(q * grown, state) + torch.bmm(inside, fresh))
        left = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * grown[:, -1:] + torch.bmm((k * left).transpose(1, 2), fresh)
    return torch.cat(outputs, dim=1).transpose(0, 1), state
