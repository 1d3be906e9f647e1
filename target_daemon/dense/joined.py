"""Keys and values of a target whose layers lie on several devices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from target_daemon.dense.key_values import KeyValues


class JoinedKeyValues(KeyValues):
    """`KeyValues` of consecutive layers each, as one; what they return together is on the first's.

    Each part stays on its device: only what is saved, or loaded again, is moved.
    """

    def __init__(self, parts: Sequence[tuple[int, KeyValues]]) -> None:
        """`parts` with the number of layers of each."""
        self.capacity = parts[0][1].capacity
        self._parts = tuple(part for _, part in parts)
        self._counts = tuple(count for count, _ in parts)
        self._home = [(part, at) for count, part in parts for at in range(count)]

    def writers(self, slot: int, base: int, rows: int) -> Sequence[Tensor]:
        return [each for part in self._parts for each in part.writers(slot, base, rows)]

    def readers(self, slot: int, length: int) -> Sequence[Tensor]:
        return [each for part in self._parts for each in part.readers(slot, length)]

    def abreast(self, slots: slice, length: int) -> Sequence[Tensor]:
        return [each for part in self._parts for each in part.abreast(slots, length)]

    def layers(self, slot: int) -> Sequence[Tensor]:
        return [each for part in self._parts for each in part.layers(slot)]

    def put(self, layer: int, slots: Tensor, positions: Tensor, pairs: Tensor) -> None:
        part, at = self._home[layer]
        part.put(at, slots, positions, pairs)

    def move(self, source: int, goal: int, rows: int) -> None:
        for part in self._parts:
            part.move(source, goal, rows)

    def compact(self, slot: int, base: int, places: Sequence[int]) -> None:
        for part in self._parts:
            part.compact(slot, base, places)

    def view(self, slot: int, base: int, rows: int) -> Tensor:
        """A copy, on the first device: there is no view over several."""
        found = [part.view(slot, base, rows) for part in self._parts]
        return torch.cat([each.to(found[0].device) for each in found])

    def save(self, slot: int, base: int, rows: int) -> Tensor:
        return self.view(slot, base, rows)

    def bytes(self, rows: int) -> int:
        return sum(part.bytes(rows) for part in self._parts)

    def load(self, slot: int, rows: Tensor) -> None:
        if not rows.dim() or rows.shape[0] != sum(self._counts):
            raise ValueError(f"{rows.dtype} {list(rows.shape)} are no rows of this target")
        for part, own in zip(self._parts, rows.split(self._counts), strict=True):
            part.load(slot, own)

    def fill_with_noise(self, slot: int, rows: int, generator: torch.Generator) -> None:
        for part in self._parts:
            part.fill_with_noise(slot, rows, generator)

    def clear(self, slot: int, base: int, rows: int) -> None:
        for part in self._parts:
            part.clear(slot, base, rows)
