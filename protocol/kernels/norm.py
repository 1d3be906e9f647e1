"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from protocol.kernels.linear import Linear, Product


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return functional.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The same over a packed weight, in half the time at few rows.

    With ``n`` elements a row, ``sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n * eps)) / sqrt(n)``: four
    kernels instead of the eight that torch 2.13 runs on a processor.
    """

    weight: Tensor  # [size], as in the checkpoint
    eps: float
    scaled: Tensor | None  # fp32, weight * sqrt(size); None: folded into the product that follows
    floor: Tensor  # sqrt(size * eps)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., size] -> the same shape; the mean square is taken in fp32 in any dtype."""
        if x.is_cuda and x.dtype != torch.float32:  # torch has one kernel for it there
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        rows = x.float()  # itself where it is
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        unit = torch.div(rows, length.hypot_(self.floor))
        return (unit if self.scaled is None else unit.mul_(self.scaled)).to(x.dtype)


def pack_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> RmsNorm:
    """Prepare `weight` [size] for `dtype`; shares no memory with it."""
    own, size = weight.to(dtype, copy=True), weight.shape[0]
    floor = torch.tensor(math.sqrt(size * eps), device=weight.device)
    return RmsNorm(own, eps, own.float() * math.sqrt(size), floor)


def fold(norm: RmsNorm, product: Product) -> RmsNorm:
    """Move the weight of `norm` into the fp32 `product` that follows it, in place.

    Weights that are rounded, to bf16 or to integers, would be rounded once more: nothing is moved.
    """
    if not isinstance(product, Linear):
        return norm
    if product.weight.dtype != torch.float32 or norm.scaled is None:
        return norm
    columns = product.weight.t() if product.transposed else product.weight
    columns.mul_(norm.scaled)
    return replace(norm, scaled=None)
