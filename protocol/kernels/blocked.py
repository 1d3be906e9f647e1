"""bf16 products over weights in the order of oneDNN's own tiles, where the processor has bf16.

`F.linear` lays a weight out anew for each product, which takes as long as the product itself where
rows are few. Measured with AMX (ADR 20), 1 to 16 rows: 1.3 to 2.2 times as fast. The bits are the
same up to 256 rows; of more, some products with two threads differ. The operators are those that
torch's own compiler puts in the place of `F.linear`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from protocol.cpu import fast_bf16
from protocol.gpu import CPU
from protocol.kernels.linear import Linear

REORDER: Final = "_reorder_linear_weight"  # of `torch.ops.mkldnn`
MULTIPLY: Final = "_linear_pointwise"
ROWS: Final = 8  # of the products that the order is chosen for: a decode forward's


@dataclass(frozen=True, slots=True)
class Blocked:
    """``y = x @ W^T + b``; `Linear`'s calls."""

    weight: Tensor  # [out, in], opaque to everything but the kernel
    bias: Tensor | None  # [out]
    multiply: Callable[..., Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that it takes."""
        return self.weight.dtype

    @property
    def outputs(self) -> int:
        """Numbers in a row that it gives."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, in] -> [rows, out]."""
        return self.multiply(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual += x @ W^T + b`` in place; returns `residual` [rows, out]."""
        return residual.add_(self(x))

    def tensors(self) -> tuple[Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def blocked(product: Linear) -> Linear | Blocked:
    """`product` with its weight laid out once, a copy; itself where that is not had here.

    Nothing but the copy is held afterwards, so that `product` can be let go.
    """
    weight = product.weight
    if not is_blocked(weight.dtype, weight.device.type):
        return product
    operators = torch.ops.mkldnn
    laid_out = getattr(operators, REORDER)(weight, ROWS)
    return Blocked(laid_out, product.bias, getattr(operators, MULTIPLY).default)


def is_blocked(dtype: torch.dtype, device: str) -> bool:
    """Whether weights of `dtype` on such a kind of device are laid out so here."""
    return dtype == torch.bfloat16 and device == CPU and _is_had()


@cache
def _is_had() -> bool:
    """Whether this torch has the operators, and this processor what makes them quick."""
    return fast_bf16() and all(hasattr(torch.ops.mkldnn, name) for name in (REORDER, MULTIPLY))
