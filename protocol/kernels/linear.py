"""Bias-free and biased products with weights laid out once for the processor.

fp32 weights are kept transposed, ``[in, out]``: with MKL a product of 2 to 16 rows is then up to
2.5 times faster than `F.linear`, and its rows do not depend on how many there are. bf16 weights
stay ``[out, in]``, as oneDNN wants them. ADR 0002 has the measurements.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

TRANSPOSED: Final = {torch.float32: True, torch.bfloat16: False, torch.float16: False}


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x @ W^T + b`` over a packed weight."""

    weight: Tensor  # [in, out] where `transposed`, else [out, in]
    bias: Tensor | None  # [out]
    transposed: bool

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, in] -> [rows, out]."""
        if not self.transposed:
            return functional.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)


def pack(weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Linear:
    """Lay `weight` [out, in] out for products in `dtype`; the result shares no memory with it."""
    transposed = TRANSPOSED[dtype]
    source = weight.t() if transposed else weight
    packed = torch.empty(source.shape, dtype=dtype)
    packed.copy_(source)
    return Linear(packed, None if bias is None else bias.to(dtype, copy=True), transposed)


def adopt(weight: Tensor, *, transposed: bool) -> Linear:
    """Use memory that is laid out already (a shared head)."""
    return Linear(weight, None, transposed)
