"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension."""
    return functional.rms_norm(x, weight.shape, weight, eps)
