"""Preallocated keys and values: one row per position, pages resident only once written."""

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from target_daemon.families.base import NativeTarget
from target_daemon.target import StateCopy

HOST: Final = torch.device("cpu")
KEY_VALUES: Final = "key_values"
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
        device: torch.device = HOST,
    ) -> None:
        self.capacity = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        self._layers, self._heads, self._dim = layers, kv_heads, head_dim
        shape = (slots, layers, 2, kv_heads, self.capacity, head_dim)
        made = _lazy_zeros(shape, dtype) if device == HOST else _zeros(shape, dtype, device)
        self._whole, self._slots = made, made.unbind(0)

    def writers(self, slot: int, base: int, rows: int) -> Sequence[Tensor]:
        """Rows ``base ..`` of every layer: keys and values [2, kv_heads, rows, head_dim]."""
        return self._slots[slot].narrow(3, base, rows).unbind(0)

    def readers(self, slot: int, length: int) -> Sequence[Tensor]:
        """Rows below `length`, [1, kv_heads, length, head_dim]: keys of layer 0, its values, ..."""
        rows = self._slots[slot].narrow(3, 0, length)
        return rows.view(2 * self._layers, 1, self._heads, length, self._dim).unbind(0)

    def abreast(self, slots: slice, length: int) -> Sequence[Tensor]:
        """The same of some slots at once, [slots, kv_heads, length, head_dim]."""
        return self._whole[slots, :, :, :, :length].flatten(1, 2).unbind(1)

    def put(self, layer: int, slots: Tensor, positions: Tensor, pairs: Tensor) -> None:
        """Keys and values `pairs` [n, 2, kv_heads, head_dim] of one layer into rows of any slots.

        `slots` and `positions` [n] say which; no row is named twice.
        """
        self._whole[:, layer][slots, :, :, positions] = pairs

    def move(self, source: int, goal: int, rows: int) -> None:
        """Copy the first `rows` of a slot over those of another."""
        self.view(goal, 0, rows).copy_(self.view(source, 0, rows))

    def layers(self, slot: int) -> Sequence[Tensor]:
        """All rows of every layer: keys and values [2, kv_heads, capacity, head_dim]."""
        return self._slots[slot].unbind(0)

    def compact(self, slot: int, base: int, places: Sequence[int]) -> None:
        """Move rows ``base + places`` of every layer, ascending, to ``base ..``."""
        first = next((at for at, place in enumerate(places) if place != at), len(places))
        if first < len(places):
            rows = self._slots[slot]
            taken = torch.tensor(places[first:]) + base
            moved = rows.index_select(3, taken.to(rows.device))
            rows.narrow(3, base + first, len(places) - first).copy_(moved)

    def view(self, slot: int, base: int, rows: int) -> Tensor:
        """Rows ``base ..`` of every layer, as they stand."""
        return self._slots[slot].narrow(3, base, rows)

    def save(self, slot: int, base: int, rows: int) -> Tensor:
        """A copy of rows ``base ..`` of every layer."""
        return self.view(slot, base, rows).clone()

    def bytes(self, rows: int) -> int:
        """What the first `rows` of one slot take."""
        shape = self._slots[0].shape
        return rows * shape.numel() // self.capacity * self._slots[0].element_size()

    def load(self, slot: int, rows: Tensor) -> None:
        """Put what `save` returned for base 0, or its beginning, back into a slot.

        ValueError where it has another shape or dtype.
        """
        own = self._slots[slot]
        expected = (*own.shape[:3], rows.shape[3] if rows.dim() == own.dim() else 0, self._dim)
        if rows.shape != expected or rows.shape[3] > self.capacity or rows.dtype != own.dtype:
            raise ValueError(f"{rows.dtype} {list(rows.shape)} are no rows of this target")
        own.narrow(3, 0, rows.shape[3]).copy_(rows)

    def fill_with_noise(self, slot: int, rows: int, generator: torch.Generator) -> None:
        """Normal numbers in the first `rows` of every layer, the same on every device."""
        past = self._slots[slot].narrow(3, 0, rows)
        past.copy_(torch.empty(past.shape, dtype=past.dtype).normal_(generator=generator))

    def clear(self, slot: int, base: int, rows: int) -> None:
        """Zero rows ``base .. base + rows - 1`` of every layer, as far as they exist."""
        self._slots[slot].narrow(3, base, min(rows, self.capacity - base)).zero_()


class KeptRows(NativeTarget):
    """A target whose whole state is `key_values`, which can be cut and copied anywhere."""

    supports_cut = True
    key_values: KeyValues

    def state_bytes(self, slot: int, length: int) -> int:
        del slot
        return self.key_values.bytes(length)

    def copy_state(self, slot: int, length: int, *, shared: bool = False) -> StateCopy:
        rows = self.key_values.view if shared else self.key_values.save
        return StateCopy({KEY_VALUES: rows(slot, 0, length).cpu()})

    def set_state(self, slot: int, state: StateCopy, length: int) -> None:
        if KEY_VALUES not in state.tensors:
            raise ValueError("no keys and values")
        self.key_values.load(slot, state.tensors[KEY_VALUES].narrow(3, 0, length))


def probed_rows(logits: Tensor | None, made: Tensor) -> Tensor:
    """What a probe compares: logits [n, vocab], if any, beside the rows of `KeyValues.save`.

    Returns [n, columns] float32.
    """
    parts = made.permute(3, 0, 1, 2, 4).flatten(1).float()
    return parts if logits is None else torch.cat((logits, parts), dim=1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


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
