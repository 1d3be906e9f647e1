"""Preallocated keys and values: one row per position, pages resident only once written."""

import mmap
from typing import Final

import torch
from torch import Tensor

ROW_MULTIPLE: Final = 512  # capacity, so that padded K lengths always fit


class KeyValues:
    """K and V of `slots` sequences; row ``p`` of a slot belongs to position ``p``.

    Rows that no forward has written are zero, so that masked columns stay finite.
    """

    def __init__(
        self,
        *,
        slots: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.capacity = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        shape = (slots, layers, 2, kv_heads, self.capacity, head_dim)
        self._store = _lazy_zeros(shape, dtype)
        self._slots = [
            [(layer[0], layer[1]) for layer in slot.unbind(0)] for slot in self._store.unbind(0)
        ]

    def layers(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """K and V [kv_heads, capacity, head_dim] of every layer."""
        return self._slots[slot]

    def save(self, slot: int, base: int, rows: int) -> Tensor:
        """A copy of rows ``base ..`` of every layer."""
        return self._store[slot, :, :, :, base : base + rows].clone()

    def restore(self, slot: int, base: int, saved: Tensor) -> None:
        """Write back what `save` returned."""
        self._store[slot, :, :, :, base : base + saved.shape[3]].copy_(saved)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed memory whose pages the kernel hands out at the first write.

    `torch.zeros` writes every page at once, and numpy asks for huge pages, which makes the first
    row of a head cost 2 MiB; a private mapping does neither.
    """
    count = 1
    for size in shape:
        count *= size
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
