"""Rotary positions (arXiv 2104.09864), half-split as published Llama and Qwen weights expect."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protocol.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of every position; rows are gathered, never recomputed."""

    cos: Tensor  # [positions, head_dim]
    sin: Tensor  # [positions, head_dim], the first half negated

    def at(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows of consecutive positions."""
        return self.cos[start:stop], self.sin[start:stop]


class Turner:
    """Rotates query and key heads in place, with as few kernels as the dtype allows.

    In fp32 the two halves of a head are interleaved once, in the rows of the weights that make
    it (`interleave`), and a rotation is then one complex product. Scores do not change, as query
    and key are permuted alike. There is no complex bf16: halves stay, as published.
    """

    def __init__(self, table: RopeTable, dtype: torch.dtype) -> None:
        half = table.cos.shape[-1] // 2
        self.interleaved = interleaves(dtype)
        self._angles: tuple[Tensor, ...] = (table.cos[:, None], table.sin[:, None])
        if self.interleaved:
            self._angles = (torch.complex(table.cos, table.sin.neg())[:, None, :half].clone(),)

    def at(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """What `turn_` needs for consecutive positions."""
        return tuple(angle[start:stop] for angle in self._angles)

    def gather(self, positions: Tensor) -> tuple[Tensor, ...]:
        """What `turn_` needs for `positions` [n] in any order."""
        at = positions.to(self._angles[0].device)
        return tuple(angle.index_select(0, at) for angle in self._angles)

    def turn_(self, x: Tensor, angles: tuple[Tensor, ...]) -> None:
        """Rotate `x` [n, heads, head_dim] in place, by `angles` from `at`."""
        if self.interleaved:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(angles[0])
            return
        cos, sin = angles
        turned = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
        x.mul_(cos).add_(turned)


def interleaves(dtype: torch.dtype) -> bool:
    """Whether `Turner` wants the weights of query and key interleaved in `dtype`."""
    return dtype == torch.float32


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (or elements) ``0, d/2, 1, d/2 + 1, ...`` of every head of `weight` [heads * d, ...]."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def table(
    head_dim: int,
    theta: float,
    positions: int,
    dtype: torch.dtype,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> RopeTable:
    """Build the table in float64 and round once; `scaling` is the checkpoint's own dictionary.

    It is computed on the host, so that it is the same on every device.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    frequency = _scale(frequency, scaling or {})
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency[None, :]
    cos, sin = angle.cos(), angle.sin()
    return RopeTable(
        torch.cat((cos, cos), dim=-1).to(device, dtype),
        torch.cat((-sin, sin), dim=-1).to(device, dtype),
    )


def _scale(frequency: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(frequency, scaling)
    raise UnsupportedModel(f"RoPE scaling {kind!r}; supported: default, linear, llama3")


def _llama3(frequency: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rule: long wavelengths divided, short ones kept, a ramp in between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    turns = original * frequency / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (ramp + (1 - ramp) / factor)
